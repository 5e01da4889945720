"""Validation of a saved window, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import InputError, WindowError

from .digest import digest_of

# Keys that every version has written; newer ones ("held", "ranks", "pending_factor") are optional.
WINDOW_KEYS = frozenset(
    {"identity", "microbatches", "samples", "next", "weights", "returned", "losses", "dropped", "gradients"}
    | {"key", "scale", "random", "random_before", "state_before", "norms"}
)
_SOURCE = "Load a state_dict() of this Accumulator, or call discard() to begin the window again."


@dataclass(frozen=True)
class Expected:
    """Description of the window in which a saved window is resumed.

    Attributes:
        microbatches: number of micro-batches.
        shapes: shapes of the summed gradients, by parameter name.
        rank, ranks: index of this process, and number of processes that share the batch.
    """

    microbatches: int
    shapes: Mapping[str, torch.Size]
    rank: int
    ranks: int


def check_structure(state: Mapping[str, Any]) -> None:
    """Check the type of each value of a saved window.

    Raises:
        InputError: a value has a wrong type, or a value that no window can have; the error names its key.

    Examples:
        >>> check_structure({"next": -1})
        Traceback (most recent call last):
        superbatch.errors.InputError: The saved window's 'next' is -1, not the index of a micro-batch...
    """
    # All types are checked before any value is used, because the file may have been edited.
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "next": (_is_index, "the index of a micro-batch"),
        "microbatches": (_is_index, "a number of micro-batches"),
        "identity": (lambda v: _all(v, lambda each: isinstance(each, str)), "a list of names"),
        "samples": (lambda v: v is None or _all(v, _is_index), "None or a list of ints"),
        "losses": (lambda v: _by_index(v, _is_number_or_mapping), "a dict from index to loss"),
        "returned": (lambda v: _by_index(v, _is_number_or_mapping), "a dict from index to weight"),
        "dropped": (lambda v: _all(v, _is_index), "a list of indices"),
        "extra_turns": (lambda v: _all(v, _is_index) and len(v) == 2, "two numbers of turns"),
        "gradients": (lambda v: isinstance(v, Mapping), "a dict of tensors"),
        "random": (_is_random, "the states of the random generators"),
        "random_before": (_is_random, "the states of the random generators"),
        "norms": (
            lambda v: v is None or _all(v, lambda each: isinstance(each, Mapping)),
            "BatchNorm statistics",
        ),
        "noise": (lambda v: v is None or isinstance(v, Mapping), "None or a dict"),
        "pending_factor": (_is_number, "a number"),
        "ranks": (lambda v: _all(v, _is_index) and len(v) == 2, "an index and a number of ranks"),
        "held": (lambda v: _all(v, lambda each: isinstance(each, str)), "a list of names"),
        "scale": (lambda v: v is None or _is_number(v), "None or the scale of a GradScaler"),
    }
    for name, (is_right, wanted) in checks.items():
        if name in state and not is_right(state[name]):
            value = state[name]
            shown = (
                repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
            )
            raise InputError(f"The saved window's {name!r} is {shown}, not {wanted}. {_SOURCE}")
    # No later check finds a NaN in running statistics.
    bad = next((where for where, tensor in _statistics(state) if not _is_finite(tensor)), None)
    if bad is not None:
        raise InputError(f"The saved window's {bad} contains NaN or infinity. {_SOURCE}")


def check_fit(state: Mapping[str, Any], expected: Expected) -> None:
    """Check that a saved window fits this process and the window in which it is resumed.

    Args:
        state: a saved window that `check_structure` has passed.
        expected: description of the window in which it is resumed.

    Raises:
        WindowError: another rank or another number of ranks saved it; its position or its gradients do not
            fit the window; or it was changed after it was saved.

    Examples:
        >>> here = Expected(2, {"weight": torch.Size([1])}, rank=0, ranks=1)
        >>> check_fit({"next": 3}, here)
        Traceback (most recent call last):
        superbatch.errors.WindowError: The saved window resumes at micro-batch 3, but this window has 2...
    """
    rank, ranks = state.get("ranks", (expected.rank, expected.ranks))
    if (rank, ranks) != (expected.rank, expected.ranks):
        raise WindowError(
            f"The saved window is that of rank {rank} of {ranks}, but this process is rank {expected.rank} "
            f"of {expected.ranks}. Load on each rank the state that it saved, or save between windows."
        )
    # All indices, because a loss for an index beyond the last micro-batch would be added too.
    indices = [*state.get("losses", ()), *state.get("returned", ()), *state.get("dropped", ())]
    furthest = max([state["next"] - 1, *indices])
    if furthest >= expected.microbatches:
        shown = state["next"] if state["next"] > expected.microbatches else furthest
        raise WindowError(
            f"The saved window resumes at micro-batch {shown}, but this window has {expected.microbatches}. "
            f"{_SOURCE}"
        )
    gradients = _gradients(state)
    # "held" lists the sums that were saved.
    missing = [name for name in state.get("held", gradients) if name not in gradients]
    if missing:
        raise WindowError(f"The saved window lacks the gradient of {missing[0]!r}. {_SOURCE}")
    for name, gradient in gradients.items():
        shape = expected.shapes.get(name)
        if not isinstance(gradient, Tensor) or shape != gradient.shape:
            found = (
                f"a tensor of shape {tuple(gradient.shape)}"
                if isinstance(gradient, Tensor)
                else f"a {type(gradient).__name__}"
            )
            wanted = (
                "no such parameter is updated" if shape is None else f"its parameter has shape {tuple(shape)}"
            )
            raise WindowError(f"The saved window's gradient of {name!r} is {found}, but {wanted}. {_SOURCE}")
    # Last, because the errors above are more specific.
    if state.get("digest", digest := digest_of(state)) != digest:
        raise WindowError(f"The saved window was changed after it was saved. {_SOURCE}")


def _gradients(state: Mapping[str, Any]) -> Mapping[str, Any]:
    found = state.get("gradients", {})
    # A momentum sum is saved together with the buffers' copies from before the window.
    if found.keys() == {"momentum", "before"} and isinstance(found["momentum"], Mapping):
        return found["momentum"]
    return found


def _statistics(state: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Yield statistics of BatchNorm and noise, which are not checked for NaN later."""
    norms: list[Any] = state.get("norms") or []
    for index, module in enumerate(norms):
        for name, value in module.items():
            for each in _flat(value):
                if isinstance(each, Tensor | float):
                    yield f"{name!r} of BatchNorm {index}", torch.as_tensor(each)
    for index, squares in (state.get("noise") or {}).items():
        yield f"'noise' of micro-batch {index}", torch.as_tensor(squares, dtype=torch.float64)


def _is_finite(tensor: Tensor) -> bool:
    # No statistics are sparse or on the meta device.
    plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and bool(torch.isfinite(tensor).all())


def _flat(value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    return [each for part in value for each in _flat(part)]


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    # NaN is a float in Python.
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _is_number_or_mapping(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(each, int | float) for each in value.values())
    # A loss may be NaN: `nonfinite` handles it at the end of the window.
    return isinstance(value, int | float)


def _all(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_right, value))


def _by_index(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(map(_is_index, value)) and all(map(is_right, value.values()))


def _is_random(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    # Generator states are byte tensors on every device.
    generator = value.get("torch")
    return isinstance(generator, Tensor) and generator.dtype == torch.uint8
