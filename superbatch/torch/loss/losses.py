"""Losses of a window, stored without their graphs and read from a device all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from superbatch import normalize
from superbatch.errors import InputError

from ..window.slips import without_tensor
from ..window.sync.sync import Sync


class Losses:
    """Losses that were passed to ``backward`` so far, by micro-batch.

    Examples:
        >>> losses = Losses()
        >>> losses.add(1, losses.read(1, torch.tensor(0.5, requires_grad=True)))
        >>> 1 in losses, losses.on_host(3)
        (True, [0.0, 0.5, 0.0])
    """

    def __init__(self) -> None:
        self._values: dict[int, float | Tensor] = {}
        self._on_device = False  # True if a loss is a tensor on a device

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def __len__(self) -> int:
        return len(self._values)

    def read(self, index: int, loss: Tensor) -> float | Tensor:
        """Return the sum of a micro-batch's losses with this one, for `add`.

        Called before the backward, because it may allocate, and nothing may fail between a backward and its
        record.
        """
        # A loss on a device is read at the end of the window with the others, so the host does not wait here.
        # It is copied, because a replayed graph writes each micro-batch's loss to the same memory.
        value = loss.item() if loss.is_cpu else loss.detach().clone()
        # The losses of several backward() calls for one micro-batch add up.
        return self._values[index] + value if index in self._values else value

    def add(self, index: int, total: float | Tensor) -> None:
        """Record the result of `read`: the sum of a micro-batch's losses."""
        self._values[index] = total
        self._on_device = self._on_device or isinstance(total, Tensor)

    def finite(self, index: int, *, on_host: bool = False) -> bool:
        """Return whether a micro-batch's loss is finite; with `on_host`, one on a device counts as finite."""
        value = self._values[index]
        return (on_host and isinstance(value, Tensor)) or math.isfinite(value)

    def on_device(self, index: int) -> list[Tensor]:
        """Return a micro-batch's loss in a list if it is on a device; else an empty list."""
        value = self._values[index]
        return [value] if isinstance(value, Tensor) else []

    def on_host(self, count: int) -> list[float]:
        """Return the losses of micro-batches 0..count-1; 0 for those without one."""
        found: dict[int, Any] = self._values
        if self._on_device:
            on_device = {index: loss for index, loss in found.items() if isinstance(loss, Tensor)}
            # One transfer for all, so that the host waits for the device once.
            values = torch.stack([loss.reshape(()) for loss in on_device.values()]).tolist()
            found = {**found, **dict(zip(on_device, values, strict=True))}
        return [found.get(index, 0.0) for index in range(count)]

    def empty(self) -> Losses:
        """Return a new object without losses."""
        return Losses()

    def state(self) -> dict[int, float]:
        """Return the losses so far, by micro-batch."""
        # As numbers, because a checkpoint must not contain tensors of a device.
        return {index: float(loss) for index, loss in self._values.items()}

    def load_state(self, state: dict[int, float]) -> None:
        """Load the losses of `state`."""
        self._values = dict(state)
        self._on_device = False


@dataclass(frozen=True)
class Sum:
    """Sum of a loss over the micro-batches of a window.

    Attributes:
        total: ``sum w l`` for a mean, else ``sum l``.
        weight: ``sum w``.
        nonzero: True if a loss was not 0.
    """

    total: float
    weight: normalize.Number
    nonzero: bool


@dataclass(frozen=True)
class WindowLoss:
    """Loss of a batch.

    Attributes:
        loss: the normalised loss; NaN if the weight is 0.
        weight: divisor of the losses; 0: there is no update; 1 if each term has its own.
        divisor: number that the summed gradients are divided by at the end of the window.
        losses: loss of each term.
        weights: weight of each term.
    """

    loss: float
    weight: normalize.Number
    divisor: float = 1.0
    losses: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, normalize.Number] = field(default_factory=dict)


def over_ranks(
    sums: list[Sum],
    sync: Sync,
    *,
    nonfinite: bool,
    configuration: int = 0,
    unchecked: tuple[bool, int] = (False, 0),
    announce: Callable[[], list[float]] = list,
) -> tuple[list[Sum], bool, bool, list[float] | None]:
    """Exchange the numbers of a window with all ranks, at its end.

    Args:
        sums: sums of this rank, one for each term.
        sync: the ranks to sum over.
        nonfinite: whether this rank has a loss that is not finite.
        configuration: number that must be equal on all ranks (see `NoiseOfWindows.configuration_number`).
        unchecked: whether this rank has an unchecked feature of the loss (see `check_schedule`), and a hash
            of the counts of its samples (see `rank_counts`); different hashes are an unchecked feature too.
        announce: function that returns further numbers to sum in the same exchange, for a later step.

    Returns:
        The sums over all ranks; whether any rank has a loss that is not finite; whether the declared loss
        must be checked; and the sums of the numbers of `announce`, or None without other ranks.

    Raises:
        InputError: the ranks do not agree on measuring the noise. It is raised on every rank, because a rank
            that continued would wait for ever.

    Examples:
        >>> from superbatch.torch.window.sync.local import Local
        >>> over_ranks([Sum(4.0, 2, nonzero=True)], Local(), nonfinite=False)
        ([Sum(total=4.0, weight=2, nonzero=True)], False, False, None)
    """
    if not sync.shared:
        return sums, nonfinite, unchecked[0], None
    # One all-reduce of a flat list with total, weight and nonzero of each term, then the flags.
    mine = [number for one in sums for number in (one.total, one.weight, one.nonzero)]
    is_unchecked, counts = unchecked
    found = sync.sum_numbers([*mine, nonfinite, is_unchecked, *_squared(configuration, counts), *announce()])
    numbers, rest = found[: len(mine)], found[len(mine) :]
    nonfinite_ranks, unchecked_ranks, *rest = rest
    # Numbers 0 and 1 belong to the configuration, 2 and 3 to the hash of the counts.
    configurations_differ, counts_differ = (_differ(rest[at], rest[at + 1], sync.count) for at in (0, 2))
    announced = rest[4:]
    if configurations_differ:
        raise InputError(
            f"The {sync.count} ranks measure the noise in different windows, because only some have loaded a "
            "state, or have a NoiseMeter. Load the same state_dict() on every rank, and make every "
            "Accumulator with the same observers."
        )
    columns = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return (
        [
            # Counts were exchanged as floats, but an int makes the division exact.
            Sum(total, int(weight) if weight.is_integer() else weight, nonzero=bool(nonzero))
            for total, weight, nonzero in columns
        ],
        bool(nonfinite_ranks),
        bool(unchecked_ranks) or counts_differ,
        announced,
    )


NUMBERS = 6
"""Numbers that `over_ranks` exchanges in addition to three for each loss and those of `announce`."""


def _squared(*numbers: int) -> list[int]:
    """Return each number and its square."""
    return [each for number in numbers for each in (number, number * number)]


def _differ(total: float, squares: float, ranks: int) -> bool:
    """Return whether a number differs between ranks, from its sum and the sum of its squares."""
    return int(total) ** 2 != ranks * int(squares)  # by Cauchy-Schwarz, equal only if all numbers are


def check_loss(loss: object) -> None:
    """Check that a loss can be differentiated: it has one element, a floating dtype, and a graph.

    Raises:
        InputError: the loss is not a tensor, has several elements or a complex dtype, or has no graph.

    Examples:
        >>> check_loss(torch.ones(1, requires_grad=True).sum())
    """
    if not isinstance(loss, Tensor):
        raise without_tensor(loss)
    if loss.numel() != 1:
        raise InputError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}, but a micro-batch has one loss. Return "
            'its mean (reduction="mean") or its sum (reduction="sum").'
        )
    if not loss.is_floating_point():
        raise InputError(
            f"loss_fn returned a loss of dtype {loss.dtype}, but a loss is a real number. Return its "
            "absolute value or real part."
        )
    # The error that autograd would raise later does not name the cause.
    if not loss.requires_grad:
        raise InputError(
            "loss_fn returned a loss without a graph, which depends on no parameter that needs a gradient. "
            "Compute the loss from the model, outside of torch.no_grad(), with parameters that require "
            "gradients."
        )


def pair_of(returned: Any) -> tuple[Any, Any]:
    """Return the result of a loss function if it is a pair of loss and weight.

    Raises:
        InputError: it is not a pair.

    Examples:
        >>> pair_of((0.5, 3))
        (0.5, 3)
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise InputError(
        f'loss_fn returned a {type(returned).__name__}, but weight="returned" declares a pair. Return (loss, '
        "weight)."
    )


def alone(returned: Any) -> Any:
    """Return the result of a loss function if it is a loss without a weight.

    Raises:
        InputError: it is a tuple or a mapping.

    Examples:
        >>> alone(0.5)
        0.5
    """
    if isinstance(returned, Tensor) or not isinstance(returned, tuple | Mapping):
        return returned
    if isinstance(returned, Mapping):
        # Models of Hugging Face return their loss in a mapping.
        if isinstance(returned.get("loss"), Tensor):
            raise without_tensor(returned)
        names = ", ".join(f"{name!r}: ..." for name in returned)
        raise InputError(
            f"loss_fn returned a mapping with the keys {list(returned)}. Pass the weight of each of these "
            f"losses as weight={{{names}}}, or return one tensor."
        )
    raise InputError(
        "loss_fn returned a tuple, but weight= does not declare that it returns a weight. Return only the "
        'loss, or pass weight="returned" and return (loss, weight).'
    )
