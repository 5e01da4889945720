"""Checks of an accumulator's options, one by one, with errors that name the option."""

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

_SEARCHED = ("auto", "largest")  # microbatch_size= for which sizes are searched


def check_types(loss_fn: object, microbatch_size: object, gradient_sum: object) -> None:
    """Check the types of three options.

    Raises:
        InputError: an option has the wrong type; the error names it.

    Examples:
        >>> check_types(None, 8, "auto")
    """
    # Here, because a string or a loss value would fail only in the first window.
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            f"loss_fn is a {type(loss_fn).__name__}, not a function. Pass a function microbatch -> loss."
        )
    check_loss_fn(loss_fn)
    if not is_size(microbatch_size) and not isinstance(microbatch_size, TokenBudget):
        raise InputError(
            f"microbatch_size={microbatch_size!r} is not a number of samples. Pass a positive int, a "
            'TokenBudget, "auto", "largest", or None to leave the batch unsplit.'
        )
    # An integer dtype would round each gradient to whole numbers.
    floating = isinstance(gradient_sum, torch.dtype) and gradient_sum.is_floating_point
    word = isinstance(gradient_sum, str) and gradient_sum in ("auto", "momentum")
    if not (gradient_sum is None or floating or word):
        raise InputError(
            f"gradient_sum={gradient_sum!r} is not a floating-point dtype. Pass a dtype such as "
            'torch.float32, "auto", "momentum", or None for the dtype of the parameters.'
        )


def check_split(split: object) -> None:
    """Raise `InputError` if the option `split` is not a `Split`.

    Examples:
        >>> check_split(Split(unsplit=["anchors"]))
    """
    if not isinstance(split, Split):
        raise InputError(f"split={split!r} is not a Split. Pass Split(unsplit=[...], per_sample=[...]).")


def check_lists(**given: object) -> None:
    """Raise `InputError` if an option that must be a list is not one.

    Examples:
        >>> check_lists(participants=[])
    """
    for name, value in given.items():
        if not isinstance(value, list | tuple):
            raise InputError(f"{name}={value!r} is not a list. Pass {name}=[{value!r}].")


def is_size(microbatch_size: object) -> bool:
    """Return whether `microbatch_size` is a positive int, ``"auto"``, ``"largest"`` or None.

    Examples:
        >>> is_size("largest"), is_size(True)
        (True, False)
    """
    # bool is an int in Python, but microbatch_size=True is a mistake.
    if isinstance(microbatch_size, int) and not isinstance(microbatch_size, bool):
        return microbatch_size > 0
    return microbatch_size is None or (isinstance(microbatch_size, str) and microbatch_size in _SEARCHED)


def check_auto(
    mode: str, loss_fn: Callable[[Any], Any] | None, batchnorm: str | None
) -> Callable[[Any], Any]:
    """Return the loss to try sizes with; raise `InputError` if there is none or the update depends on sizes.

    Examples:
        >>> check_auto("auto", len, None)
        <built-in function len>
    """
    if loss_fn is None:
        raise InputError(
            f"microbatch_size={mode!r} needs loss_fn, because sizes are found by running the loss. Pass "
            "loss_fn, or a number of samples."
        )
    # Frozen statistics do not depend on the size, so "auto" is allowed with them.
    if batchnorm == "per_microbatch":
        raise InputError(
            f"microbatch_size={mode!r} with GhostBatchNorm makes the update depend on the size that happens "
            "to fit. Pass the number of samples."
        )
    return loss_fn


def as_device(device: object, owned: list[ManagedParameter]) -> torch.device | None:
    """Return the device to which micro-batches are moved; None if they are not.

    Raises:
        InputError: `device` is not a device of this machine.

    Examples:
        >>> as_device("cuda:1", [])
        device(type='cuda', index=1)
    """
    if device is None:
        return None
    if isinstance(device, str) and device == "auto":
        found = owned[0].parameter.device
        # On the CPU there is nothing to move: None saves the walk through the batch.
        return None if found.type == "cpu" else found
    try:
        # resolved() adds the index to "cuda", because tensors report their device with it.
        named = torch.device(device)  # pyright: ignore[reportArgumentType, reportCallIssue]  (its own check follows)
        return named if named.type == "cpu" else resolved(named)
    # torch raises AssertionError for CUDA in a build without it.
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InputError(
            f"device={device!r} is not a device of torch on this machine "
            f'({str(error).partition(chr(10))[0]}). Pass "auto", a torch.device, its name, or None.'
        ) from error


def as_schedulers(scheduler: Any) -> tuple[Any, ...]:
    """Return one or several schedulers as a tuple; raise `InputError` if one cannot be stepped.

    Examples:
        >>> as_schedulers(None)
        ()
    """
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, list | tuple) else (scheduler,)
    # Check the method: schedulers of other libraries are not subclasses of torch's.
    for one in schedulers:
        if not callable(getattr(one, "step", None)):
            raise InputError(
                f"scheduler is a {type(one).__name__}, which has no step(). Pass a "
                "torch.optim.lr_scheduler, a list of them, or None."
            )
    return schedulers


def check_scaler(scaler: Any) -> Any:
    """Return the scaler if it is None or has the methods of a `GradScaler`, else raise `InputError`.

    Examples:
        >>> check_scaler(None)
    """
    # Check the methods, so that a wrapper around a scaler passes.
    needed = ("scale", "unscale_", "step", "update", "is_enabled")
    missing = [name for name in needed if not callable(getattr(scaler, name, None))]
    if scaler is None or not missing:
        return scaler
    raise InputError(
        f"scaler is a {type(scaler).__name__}, which has no {missing[0]}(). Pass a torch.amp.GradScaler or "
        "None."
    )


def check_bool(value: object, name: str) -> bool:
    """Return the value if it is a bool, else raise `InputError`.

    Examples:
        >>> check_bool(value=True, name="check")
        True
    """
    if isinstance(value, bool):
        return value
    raise InputError(f"{name}={value!r} is not a bool. Pass True or False.")


def check_callable(value: Any, name: str, wanted: str) -> Any:
    """Return the value if it is a function or None, else raise `InputError`.

    Args:
        value: value of the option.
        name: name of the option.
        wanted: description of a valid value, for the error.

    Examples:
        >>> check_callable(len, "clip", "a function of the gradients")
        <built-in function len>
    """
    if value is None or callable(value):
        return value
    raise InputError(f"{name}={value!r} is not a function. Pass {wanted}, or None.")


def _is_window(state: object) -> bool:
    # More keys are allowed, because newer versions add some.
    return state is None or (isinstance(state, dict) and state.keys() >= WINDOW_KEYS)


def check_state(state: object) -> Mapping[str, Any]:
    """Return a saved state if `Accumulator.state_dict` may have returned it, else raise `InputError`.

    Examples:
        >>> check_state({"version": 1, "updates": 3, "window": None})["updates"]
        3
    """
    if (
        # The version, so that a state of another format raises and is not misread.
        isinstance(state, Mapping)
        and state.get("version") == 1
        and isinstance(state.get("updates"), int)
        and state["updates"] >= 0
        and "window" in state
        and _is_window(state["window"])
    ):
        if state["window"] is not None:
            # Only types are checked here. The next window checks that the state fits its batch.
            check_structure(state["window"])
        return state
    raise InputError(
        f"The state ({type(state).__name__}) is not from Accumulator.state_dict() of this version. Pass "
        "what state_dict() returned."
    )


def check_combinations(config: Config, *, gradient_sum: object) -> None:
    """Raise for options that exclude each other.

    Args:
        config: the accumulator's.
        gradient_sum: the option; ``"momentum"`` sums gradients into the momentum buffer.

    Raises:
        OptimizerError, InputError: two options exclude each other.
    """
    step, terms = config.rule, config.declared.terms
    momentum = gradient_sum == "momentum"
    if config.sync.has_collective_forwards:
        _check_sharded_options(config)
        if gradient_sum not in ("auto", None):
            raise InputError(
                f"gradient_sum={gradient_sum!r} has no effect on parameters sharded by fully_shard, which "
                "sums their gradients itself. Remove gradient_sum= and pass the dtype to fully_shard(..., "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))."
            )
    # The noise scale is defined for one gradient with one divisor.
    if terms and config.noise is not None:
        raise InputError(
            f"A NoiseMeter measures one loss with one weight, but this loss has the terms {list(terms)}. "
            "Remove observers=, or make an Accumulator for the term to measure."
        )
    # Returned weights come from loss_fn, which a user's own loop may not have.
    if terms and config.declared.returned and config.loss_fn is None:
        raise InputError(
            'weight={...: "returned"} needs loss_fn, which is run once more for each micro-batch. Pass '
            "loss_fn, or functions of the micro-batch in weight=."
        )
    # These options need the whole gradient, which is never formed with a sum in the momentum buffer.
    if momentum:
        check_momentum(
            step.optimizers,
            {
                "max_grad_norm=": step.max_grad_norm,
                "clip=": step.clip,
                "scaler=": step.scaler,
                "MasterWeights": step.masters_copied,
                'weight="returned"': config.weigh == "returned",
                'nonfinite="skip_microbatch"': config.nonfinite == "skip_microbatch",
                "several ranks": config.sync.shared,
            },
        )
    # Before the first window: ClipValue itself raises only once it gets a gradient.
    if isinstance(step.clip, ClipValue) and any(entry.parameter.is_complex() for entry in config.owned):
        raise InputError(
            "ClipValue cannot clip the gradients of complex parameters, because complex numbers have no "
            "order. Pass max_grad_norm= instead."
        )


def _check_sharded_options(config: Config) -> None:
    """Raise for options that need the whole gradient, because this rank has only its shards."""
    reasons = {
        "observers=[NoiseMeter()] needs the whole gradient of each micro-batch": config.noise is not None,
        'nonfinite="skip_microbatch" needs the whole gradient of each micro-batch': (
            config.nonfinite == "skip_microbatch"
        ),
        "scaler= needs the whole gradient to choose its scale": config.rule.scaling,
    }
    for reason, given in reasons.items():
        if given:
            raise InputError(
                f"{reason}, but a rank has only its shards of a sharded model. Remove "
                f"it{', and train in bfloat16, which needs no scaler.' if config.rule.scaling else '.'}"
            )


def without_loss_fn() -> InputError:
    """Return the error for a batch that is passed to an accumulator without `loss_fn`."""
    return InputError(
        "An Accumulator without loss_fn cannot make an update from a batch. Pass loss_fn, or write the "
        "loop yourself: `with accumulator.window(batch) as window: ...`."
    )
