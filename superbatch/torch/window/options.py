"""The options of an accumulator: each checked by itself, in the words of the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from superbatch.batch.split import TokenBudget
from superbatch.errors import InputError

from ..devices import resolved
from ..options import ClipValue, Split
from .config import Config
from .participants.gradient_sum import ManagedParameter
from .saved_checks import WINDOW_KEYS, check_structure
from .slips import check_loss_fn
from .validation import check_momentum

_WORDS = ("auto", "largest")


def check_types(loss_fn: object, microbatch_size: object, gradient_sum: object) -> None:
    """Check the options that are more than a number or a choice.

    Raises:
        InputError: it names the option.

    Examples:
        >>> check_types(None, 8, "auto")
    """
    # Before anything calls it: a string or a loss value would fail in the first window.
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            f"loss_fn of type {type(loss_fn).__name__} cannot be called. Pass a function microbatch -> loss."
        )
    check_loss_fn(loss_fn)
    if not is_size(microbatch_size) and not isinstance(microbatch_size, TokenBudget):
        raise InputError(
            f"microbatch_size={microbatch_size!r} is no size of a micro-batch. Pass a positive int, a "
            'TokenBudget, "auto", "largest", or None for one piece.'
        )
    # An integer dtype would round each gradient to whole numbers.
    floating = isinstance(gradient_sum, torch.dtype) and gradient_sum.is_floating_point
    word = isinstance(gradient_sum, str) and gradient_sum in ("auto", "momentum")
    if not (gradient_sum is None or floating or word):
        raise InputError(
            f"gradient_sum={gradient_sum!r} is no place for a sum. Pass a floating-point dtype such as "
            'torch.float32, "auto", "momentum", or None for the parameters\' own dtype.'
        )


def check_split(split: object) -> None:
    """Check the description of a batch's leaves.

    Raises:
        InputError: it is no `Split`.

    Examples:
        >>> check_split(Split(unsplit=["anchors"]))
    """
    if not isinstance(split, Split):
        raise InputError(f"split={split!r} is no Split. Pass Split(unsplit=[...], per_sample=[...]).")


def check_lists(**given: object) -> None:
    """Check options that are lists of objects.

    Raises:
        InputError: one of them is no list.

    Examples:
        >>> check_lists(participants=[])
    """
    for name, value in given.items():
        if not isinstance(value, list | tuple):
            raise InputError(f"{name}={value!r} is no list. Pass {name}=[{value!r}].")


def is_size(microbatch_size: object) -> bool:
    """Return whether it is a number of samples, a word for one, or None.

    Examples:
        >>> is_size("largest"), is_size(True)
        (True, False)
    """
    # bool is an int in Python: microbatch_size=True is a slip.
    if isinstance(microbatch_size, int) and not isinstance(microbatch_size, bool):
        return microbatch_size > 0
    return microbatch_size is None or (isinstance(microbatch_size, str) and microbatch_size in _WORDS)


def check_auto(
    mode: str, loss_fn: Callable[[Any], Any] | None, batchnorm: str | None
) -> Callable[[Any], Any]:
    """Check that micro-batches may have any size, and can be tried; return the loss to try them with.

    Raises:
        InputError: there is no loss to try them with, or the update depends on their size.

    Examples:
        >>> check_auto("auto", len, None)
        <built-in function len>
    """
    if loss_fn is None:
        raise InputError(
            f"microbatch_size={mode!r} runs loss_fn to find how much memory a micro-batch needs, and there "
            "is none. Pass loss_fn, or a number of samples."
        )
    # Frozen statistics do not depend on the size, so "auto" is allowed with them.
    if batchnorm == "per_microbatch":
        raise InputError(
            f"microbatch_size={mode!r} with GhostBatchNorm would normalise over as many samples as happen to "
            "fit, another function each time. State the number of samples."
        )
    return loss_fn


def as_device(device: object, owned: list[ManagedParameter]) -> torch.device | None:
    """Return the device to which micro-batches are moved; None if they are not.

    Raises:
        InputError: it is no device.

    Examples:
        >>> as_device("cuda:1", [])
        device(type='cuda', index=1)
    """
    if device is None:
        return None
    if isinstance(device, str) and device == "auto":
        found = owned[0].parameter.device
        # On the CPU nothing is moved, and the walk through the batch is saved.
        return None if found.type == "cpu" else found
    try:
        # resolved() gives "cuda" its index: tensors compare their device with it.
        named = torch.device(device)  # pyright: ignore[reportArgumentType, reportCallIssue]  (its own check follows)
        return named if named.type == "cpu" else resolved(named)
    # torch raises AssertionError for CUDA in a build without it.
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InputError(
            f"device={device!r} is no device that torch has here ({str(error).partition(chr(10))[0]}). Pass "
            '"auto", a torch.device, its name, or None.'
        ) from error


def as_schedulers(scheduler: Any) -> tuple[Any, ...]:
    """Return one or several schedulers as a tuple.

    Raises:
        InputError: one of them cannot be stepped.

    Examples:
        >>> as_schedulers(None)
        ()
    """
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, list | tuple) else (scheduler,)
    # By the method: schedulers of other libraries are no subclasses of torch's.
    for one in schedulers:
        if not callable(getattr(one, "step", None)):
            raise InputError(
                f"A scheduler of type {type(one).__name__} has no step(). Pass a torch.optim.lr_scheduler, a "
                "list of them, or None."
            )
    return schedulers


def check_scaler(scaler: Any) -> Any:
    """Return a gradient scaler if it is one.

    Raises:
        InputError: it cannot scale, unscale, step and update.

    Examples:
        >>> check_scaler(None)
    """
    # By its methods, so that a wrapper around a scaler passes.
    needed = ("scale", "unscale_", "step", "update", "is_enabled")
    if scaler is None or all(callable(getattr(scaler, name, None)) for name in needed):
        return scaler
    raise InputError(
        f"A scaler of type {type(scaler).__name__} cannot scale losses and unscale gradients. Pass a "
        "torch.amp.GradScaler or None."
    )


def check_bool(value: object, name: str) -> bool:
    """Return a bool if it is one.

    Raises:
        InputError: it is not.

    Examples:
        >>> check_bool(value=True, name="check")
        True
    """
    if isinstance(value, bool):
        return value
    raise InputError(f"{name}={value!r} is not a bool. Pass True or False.")


def check_callable(value: Any, name: str, wanted: str) -> Any:
    """Return a function, or None.

    Args:
        value: of the option.
        name: of the option.
        wanted: to pass instead.

    Raises:
        InputError: it is neither.

    Examples:
        >>> check_callable(len, "clip", "a function of the gradients")
        <built-in function len>
    """
    if value is None or callable(value):
        return value
    raise InputError(f"{name}={value!r} cannot be called. Pass {wanted}, or None.")


def _is_window(state: object) -> bool:
    # More keys are allowed: newer versions add some.
    return state is None or (isinstance(state, dict) and state.keys() >= WINDOW_KEYS)


def check_state(state: object) -> Mapping[str, Any]:
    """Return a saved state if `Accumulator.state_dict` made it.

    Raises:
        InputError: it did not.

    Examples:
        >>> check_state({"version": 1, "updates": 3, "window": None})["updates"]
        3
    """
    if (
        # A version in the state, so that another format is refused and not misread.
        isinstance(state, Mapping)
        and state.get("version") == 1
        and isinstance(state.get("updates"), int)
        and state["updates"] >= 0
        and "window" in state
        and _is_window(state["window"])
    ):
        if state["window"] is not None:
            # Types first; whether it fits the window is checked when that window is made.
            check_structure(state["window"])
        return state
    raise InputError(
        f"A state of type {type(state).__name__} was not made by Accumulator.state_dict() of this version. "
        "Pass what state_dict() returned."
    )


def check_combinations(config: Config, *, gradient_sum: object) -> None:
    """Check options that may exclude each other.

    Args:
        config: of the accumulator.
        gradient_sum: as given; ``"momentum"``: gradients are summed into the momentum buffer.

    Raises:
        OptimizerError, InputError: two of them do.
    """
    step, terms = config.rule, config.declared.terms
    momentum = gradient_sum == "momentum"
    if config.sync.in_step:
        # Its own message: these options fail for every gradient of shards.
        _check_in_step(config)
        if gradient_sum not in ("auto", None):
            raise InputError(
                f"gradient_sum={gradient_sum!r} is not possible for parameters sharded over ranks, whose "
                "gradients fully_shard sums. Leave it out, and choose the dtype of the sum there: "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))."
            )
    # The noise scale is of one gradient with one divisor.
    if terms and config.noise is not None:
        raise InputError(
            "A NoiseMeter needs one loss with one weight, and this one has the terms "
            f"{list(terms)}. Leave observers out, or measure one of the terms."
        )
    # Returned weights come with the loss, and an owned loop has no loss_fn to run.
    if terms and config.declared.returned and config.loss_fn is None:
        raise InputError(
            'weight={...: "returned"} runs loss_fn once more for each micro-batch, and there is none. Pass '
            "functions of the micro-batch in weight=, or pass loss_fn."
        )
    # Each of these needs the whole gradient, which the momentum sum never has.
    if momentum:
        check_momentum(
            step.optimizers,
            max_grad_norm=step.max_grad_norm,
            clip=step.clip,
            scaler=step.scaler,
            masters=step.masters_copied,
            weight_returned=config.weigh == "returned",
            nonfinite_skip_microbatch=config.nonfinite == "skip_microbatch",
            ranks=config.sync.shared,
        )
    # torch clips elementwise by clamp, which complex tensors do not have.
    if isinstance(step.clip, ClipValue) and any(entry.parameter.is_complex() for entry in config.owned):
        raise InputError(
            "ClipValue cannot clip complex parameters, whose numbers have no order. Use max_grad_norm."
        )


def _check_in_step(config: Config) -> None:
    """Refuse what a rank would decide from its own shards of a gradient."""
    # A dict of texts: the first reason that holds is shown.
    needing = {
        "observers=[NoiseMeter()] measures the gradient of each micro-batch": config.noise is not None,
        'nonfinite="skip_microbatch" inspects the gradient of each micro-batch': (
            config.nonfinite == "skip_microbatch"
        ),
        "scaler= lowers the scale by the gradients of this rank's shards alone": config.rule.scaling,
    }
    for what, given in needing.items():
        if given:
            raise InputError(
                f"{what}, and parameters sharded over ranks have none of the whole model. Leave it out"
                f"{' and train in bfloat16, which needs no scaler.' if config.rule.scaling else '.'}"
            )


def without_loss_fn() -> InputError:
    """Return the error for a batch where the loss is not known."""
    return InputError(
        "This Accumulator was given a batch and has no loss_fn. Pass loss_fn, or own the loop: `with "
        "accumulator.window(batch) as window: ...`."
    )
