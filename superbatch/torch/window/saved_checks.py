"""Validation of a saved window: every part is inspected before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import InputError, WindowError

from .digest import digest_of

# Keys that every version wrote; newer ones ("held", "ranks", "yet") are optional.
WINDOW_KEYS = frozenset(
    {"place", "microbatches", "samples", "next", "weights", "returned", "losses", "dropped", "gradients"}
    | {"key", "scale", "random", "random_before", "state_before", "norms"}
)
_SOURCE = "Load the state_dict() that this Accumulator saved, or call discard() to begin the window again."


@dataclass(frozen=True)
class Expected:
    """The window that a saved one is to be resumed in.

    Attributes:
        microbatches: number of them.
        shapes: of the summed gradients, by parameter name.
        rank, ranks: index of this process, and number of processes that share the batch.
    """

    microbatches: int
    shapes: Mapping[str, torch.Size]
    rank: int
    ranks: int


def check_structure(state: Mapping[str, Any]) -> None:
    """Check that each part of a saved window has the type it was saved with.

    Args:
        state: of a window, with all its keys.

    Raises:
        InputError: a part has another type, or a value that no window can have; the text names it.

    Examples:
        >>> check_structure({"next": -1})
        Traceback (most recent call last):
        superbatch.errors.InputError: The saved window's 'next' is -1, not the index of a micro-batch...
    """
    # Each value is checked by type before any is used: a state may come from an edited file.
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "next": (_is_index, "the index of a micro-batch"),
        "microbatches": (_is_index, "a number of micro-batches"),
        "place": (lambda v: _all(v, lambda each: isinstance(each, str)), "a list of names"),
        "samples": (lambda v: v is None or _all(v, _is_index), "None or a list of ints"),
        "losses": (lambda v: _by_index(v, _is_number_or_mapping), "a dict from index to loss"),
        "returned": (lambda v: _by_index(v, _is_number_or_mapping), "a dict from index to weight"),
        "dropped": (lambda v: _all(v, _is_index), "a list of indices"),
        "idle": (lambda v: _all(v, _is_index) and len(v) == 2, "two numbers of turns"),
        "gradients": (lambda v: isinstance(v, Mapping), "a dict of tensors"),
        "random": (_is_random, "the states of the random generators"),
        "random_before": (_is_random, "the states of the random generators"),
        "norms": (
            lambda v: v is None or _all(v, lambda each: isinstance(each, Mapping)),
            "BatchNorm statistics",
        ),
        "noise": (lambda v: v is None or isinstance(v, Mapping), "None or a dict"),
        "yet": (_is_number, "a number"),
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
    # A NaN in running statistics would be found by no later check.
    bad = next((where for where, tensor in _statistics(state) if not _is_finite(tensor)), None)
    if bad is not None:
        raise InputError(f"The saved window's {bad} holds NaN or infinity. {_SOURCE}")


def check_fit(state: Mapping[str, Any], expected: Expected) -> None:
    """Check that a saved window belongs to this process and its parts to this window.

    Args:
        state: a window whose structure was checked.
        expected: the window it is to be resumed in.

    Raises:
        WindowError: it was saved by another rank or among another number of ranks, its position or its
            gradients are not possible here, or gradients are missing.

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
            "of "
            f"{expected.ranks}. Load each rank's own state, or save between windows."
        )
    # Every index, not only `next`: a loss behind the last micro-batch would be added.
    indices = [*state.get("losses", ()), *state.get("returned", ()), *state.get("dropped", ())]
    furthest = max([state["next"] - 1, *indices])
    if furthest >= expected.microbatches:
        shown = state["next"] if state["next"] > expected.microbatches else furthest
        raise WindowError(
            f"The saved window resumes at micro-batch {shown}, but this window has "
            f"{expected.microbatches}. {_SOURCE}"
        )
    gradients = _gradients(state)
    # "held" was written beside the sums: a sum that is missing now was lost in between.
    missing = [name for name in state.get("held", gradients) if name not in gradients]
    if missing:
        raise WindowError(f"The saved window lacks the gradient of {missing[0]!r}. {_SOURCE}")
    for name, gradient in gradients.items():
        shape = expected.shapes.get(name)
        if not isinstance(gradient, Tensor) or shape != gradient.shape:
            found = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            wanted = (
                "no such parameter is updated" if shape is None else f"its parameter has shape {tuple(shape)}"
            )
            raise WindowError(f"The saved window's gradient of {name!r} is {found}, but {wanted}. {_SOURCE}")
    # Last: the texts above say more than "was changed".
    if state.get("digest", digest := digest_of(state)) != digest:
        raise WindowError(f"The saved window was changed after it was saved. {_SOURCE}")


def held(gradients: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that saved sums are for.

    Examples:
        >>> held({"momentum": {"weight": torch.zeros(1)}, "before": {}})
        ['weight']
    """
    return list(_gradients({"gradients": gradients}))


def _gradients(state: Mapping[str, Any]) -> Mapping[str, Any]:
    found = state.get("gradients", {})
    # The momentum sum has the copies from before the window beside its sums.
    if found.keys() == {"momentum", "before"} and isinstance(found["momentum"], Mapping):
        return found["momentum"]
    return found


def _statistics(state: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Yield the statistics that no policy for NaN checks again."""
    norms: list[Any] = state.get("norms") or []
    for index, module in enumerate(norms):
        for name, value in module.items():
            for each in _flat(value):
                if isinstance(each, Tensor | float):
                    yield f"{name!r} of BatchNorm {index}", torch.as_tensor(each)
    for index, squares in (state.get("noise") or {}).items():
        yield f"'noise' of micro-batch {index}", torch.as_tensor(squares, dtype=torch.float64)


def _is_finite(tensor: Tensor) -> bool:
    # Sparse and meta tensors have no values to check here, and no statistics are such.
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
    return isinstance(value, int | float)  # a loss may be NaN: the policy for it comes at the boundary


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
