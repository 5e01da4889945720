"""Errors for common mistakes in the use of an Accumulator, with the code to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ParamSpec

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from superbatch.errors import InputError
from superbatch.window import Window

P = ParamSpec("P")

PLAIN = {Tensor, dict, list, tuple, Window}  # the usual types of batches
_WINDOWS = "for window in windows(loader, accumulation_steps=8): accumulate(window)"
# Options of other libraries, and the instruction that replaces them here.
_OTHERS = {
    **dict.fromkeys(
        (
            "accumulation_steps",
            "gradient_accumulation_steps",
            "grad_accumulation_steps",
            "grad_accum_steps",
            "accum_steps",
            "accum_iter",
            "accumulate_grad_batches",
            "iter_size",
            "batch_multiplier",
        ),
        f"pass whole batches and microbatch_size=, or group a loader's micro-batches: {_WINDOWS}",
    ),
    **dict.fromkeys(("micro_batch_size", "batch_size"), "pass microbatch_size="),
    **dict.fromkeys(
        ("clip_grad_norm", "gradient_clip_val", "max_norm", "grad_clip", "clip_grad"), "pass max_grad_norm="
    ),
    **dict.fromkeys(("lr_scheduler", "schedulers"), "pass scheduler="),
    **dict.fromkeys(("loss", "criterion", "loss_func"), "pass loss_fn=, a function of one micro-batch"),
    **dict.fromkeys(("weights", "sample_weight"), "pass weight=, a function of one micro-batch"),
    **dict.fromkeys(("grad_scaler",), "pass scaler="),
    # Arguments of the functions that cut a batch, whose errors name them; "whole" is a former name.
    **dict.fromkeys(("unsplit", "whole"), "pass split=Split(unsplit=[...])"),
    "per_sample": "pass split=Split(per_sample=[...])",
    "clip_value": "pass clip=ClipValue(...)",
    "batchnorm": "pass participants=[FrozenBatchNorm()] or [GhostBatchNorm()]",
    "noise": "pass observers=[NoiseMeter()]",
}

_OPTION = re.compile(r"(\w+)=")


def name_unknown_options(init: Callable[P, None]) -> Callable[P, None]:
    """Wrap a constructor so that an option of another library raises an error that names ours.

    Raises:
        InputError: from the wrapped constructor, for such an option. Other unknown options raise Python's
            TypeError.

    Examples:
        >>> @name_unknown_options
        ... def init(*, scheduler=None): ...
        >>> init(lr_scheduler=1)
        Traceback (most recent call last):
        superbatch.errors.InputError: Accumulator has no option lr_scheduler=. Instead, pass scheduler=.
    """
    known = frozenset(inspect.signature(init).parameters)

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs.keys() - known:
            advice = _OTHERS.get(name, "")
            ours = _OPTION.search(advice)
            # Only if this class has the option: Gradient, for example, has no scheduler=.
            if ours is not None and ours[1] in known:
                owner = type(args[0]).__name__ if args else "Accumulator"
                raise InputError(f"{owner} has no option {name}=. Instead, {advice}.")
        init(*args, **kwargs)

    return checked


def check_loss_fn(loss_fn: object) -> None:
    """Check that a loss function can be called with one micro-batch.

    Raises:
        InputError: it needs another number of arguments, for example because it is a loss module of torch.

    Examples:
        >>> check_loss_fn(lambda microbatch: 0.0)
        >>> check_loss_fn(nn.MSELoss())
        Traceback (most recent call last):
        superbatch.errors.InputError: loss_fn MSELoss() takes 2 arguments, but it is called with one...
    """
    if loss_fn is None or not callable(loss_fn):
        return
    # None for an unknown signature, e.g. of a builtin function.
    needed = _required_arguments(loss_fn)
    if needed is None or needed == 1:
        return
    name = repr(loss_fn) if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__name__", repr(loss_fn))
    raise InputError(
        f"loss_fn {name} takes {needed} arguments, but it is called with one micro-batch. Pass a function "
        "of one argument, for example loss_fn=lambda microbatch: "
        'criterion(model(microbatch["x"]), microbatch["y"]).'
    )


def _required_arguments(function: Any) -> int | None:
    """Return 1 if one positional argument is possible, else the number required; None: unknown."""
    try:
        called = function.forward if isinstance(function, nn.Module) else function
        # Not the wrapped signature, because a decorator may pass arguments of its own.
        signature = inspect.signature(called, follow_wrapped=False)
    except (ValueError, TypeError):  # builtins without a signature
        return None
    # bind() respects defaults, *args and keyword-only arguments.
    try:
        signature.bind(None)
    except TypeError:
        empty = inspect.Parameter.empty
        star = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return sum(p.default is empty and p.kind not in star for p in signature.parameters.values())
    return 1


def refuse_no_batch(batch: object) -> None:
    """Raise `InputError` if a batch is a loader, a dataset or an iterator.

    Examples:
        >>> refuse_no_batch({"x": [1, 2]})
        >>> refuse_no_batch(iter([]))
        Traceback (most recent call last):
        superbatch.errors.InputError: A list_iterator is not a batch. Loop over it: for batch in loader...
    """
    # A list of batches passes, because a list may be a batch.
    if isinstance(batch, DataLoader | Dataset | Iterator):
        raise InputError(
            f"A {type(batch).__name__} is not a batch. Loop over "
            f"{'a DataLoader of it' if isinstance(batch, Dataset) else 'it'}: for batch in loader: "
            f"accumulate(batch); if it yields micro-batches: {_WINDOWS}."
        )


def without_tensor(loss: object, *, weighted: bool = True) -> InputError:
    """Return the error for a loss that is not a tensor.

    Args:
        loss: the value that `loss_fn` returned, or the argument of ``backward``.
        weighted: whether ``weight="returned"`` is possible, so that the error can advise it.

    Examples:
        >>> print(without_tensor(0.5))
        The loss is a float, not a tensor. Return the loss as a tensor computed from the model's outputs.
    """
    kind = type(loss).__name__
    # Hugging Face models return an output object or a dict with the loss inside.
    inner = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", None)
    if isinstance(inner, Tensor):
        advice = "Return its .loss: return model(**microbatch).loss."
    elif isinstance(loss, tuple | list) and weighted:
        advice = 'Return only the loss, or pass weight="returned" and return (loss, weight).'
    elif isinstance(loss, tuple | list):
        advice = "Return only the loss."
    else:
        advice = "Return the loss as a tensor computed from the model's outputs."
    return InputError(f"The loss is a {kind}, not a tensor. {advice}")
