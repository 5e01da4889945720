"""Losses of a window: numbers that keep no graph alive, read from a device all at once."""

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
    """Losses that were given to ``backward`` so far, by micro-batch.

    Examples:
        >>> losses = Losses()
        >>> losses.add(1, losses.read(1, torch.tensor(0.5, requires_grad=True)))
        >>> 1 in losses, losses.on_host(3)
        (True, [0.0, 0.5, 0.0])
    """

    def __init__(self) -> None:
        self._values: dict[int, float | Tensor] = {}
        self._on_device = False  # whether any is still to be read

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def __len__(self) -> int:
        return len(self._values)

    def read(self, index: int, loss: Tensor) -> float | Tensor:
        """Return the sum of a micro-batch's losses with this one, for `add`.

        Called before the backward: it may allocate, and nothing may fail between a backward and its record.
        """
        # A loss on a device is read at the boundary, with the others, so that nothing waits for it here. It
        # is a copy: a replayed graph writes each micro-batch's loss to the same memory.
        value = loss.item() if loss.is_cpu else loss.detach().clone()
        # Several backward() of one micro-batch add up.
        return self._values[index] + value if index in self._values else value

    def add(self, index: int, total: float | Tensor) -> None:
        """Record the result of `read`: the sum of a micro-batch's losses."""
        self._values[index] = total
        self._on_device = self._on_device or isinstance(total, Tensor)

    def finite(self, index: int, *, on_host: bool = False) -> bool:
        """Tell if a micro-batch's loss is finite; `on_host`: True for one on a device."""
        value = self._values[index]
        return (on_host and isinstance(value, Tensor)) or math.isfinite(value)

    def on_device(self, index: int) -> list[Tensor]:
        """Return a micro-batch's loss where it is on a device, else nothing."""
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
        """Return one without losses."""
        return Losses()

    def state(self) -> dict[int, float]:
        """Return the losses so far, by micro-batch."""
        # Numbers, as a checkpoint must not hold tensors of a device.
        return {index: float(loss) for index, loss in self._values.items()}

    def load_state(self, state: dict[int, float]) -> None:
        """Resume from what `state` returned."""
        self._values = dict(state)
        self._on_device = False


@dataclass(frozen=True)
class Sum:
    """Sum of a loss over the micro-batches of a window.

    Attributes:
        total: ``sum w l`` for a mean, else ``sum l``.
        weight: ``sum w``.
        nonzero: a loss was not 0.
    """

    total: float
    weight: normalize.Number
    nonzero: bool


@dataclass(frozen=True)
class WindowLoss:
    """Loss of a batch.

    Attributes:
        loss: normalised; NaN where there is nothing to divide by.
        weight: divisor of the losses; 0: there is no update; 1 where each term has its own.
        divisor: of the summed gradients, at the boundary.
        losses: of each term.
        weights: of each term.
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
    bad: bool,
    mark: int = 0,
    news: tuple[bool, int] = (False, 0),
    ahead: Callable[[], list[float]] = list,
) -> tuple[list[Sum], bool, bool, list[float] | None]:
    """Return the sums over all ranks, whether any rank has a loss that is not finite, any news, and `ahead`.

    Args:
        sums: of this rank, one for each term.
        sync: the ranks to sum over.
        bad: whether this rank has a loss that is not finite.
        mark: how this rank stands with measuring the noise (see `NoiseOfWindows.mark`).
        news: whether this rank has seen what no check of the loss has (see `check_schedule`), and a number
            that tells what its samples count (see `rank_counts`): ranks with other numbers are news too.
        ahead: returns numbers that a later step needs the sums of, which this exchange takes along.

    Raises:
        InputError: the ranks do not agree on measuring the noise, on every rank: a rank that went on would
            wait for ever.

    Examples:
        >>> from superbatch.torch.window.sync.local import Local
        >>> over_ranks([Sum(4.0, 2, nonzero=True)], Local(), bad=False)
        ([Sum(total=4.0, weight=2, nonzero=True)], False, False, None)
    """
    if not sync.shared:
        return sums, bad, news[0], None
    # One all-reduce of a flat list: total, weight and nonzero of each term, then the flags.
    mine = [number for one in sums for number in (one.total, one.weight, one.nonzero)]
    has_news, count = news
    found = sync.sum_numbers([*mine, bad, has_news, *_squared(mark, count), *ahead()])
    numbers, rest = found[: len(mine)], found[len(mine) :]
    bad_ranks, news_of, *rest = rest
    # 0 and 1 are of the noise, 2 and 3 of the samples' counts.
    marks_differ, counts_differ = (_differ(rest[at], rest[at + 1], sync.count) for at in (0, 2))
    later = rest[4:]
    # Raised on every rank: one that continued alone would wait for the others.
    if marks_differ:
        raise InputError(
            f"{sync.count} ranks measure the noise, and do not agree on which windows: a state was loaded, "
            "or a NoiseMeter passed, on some ranks only. Load the same state_dict() on every rank, and make "
            "every Accumulator with the same observers."
        )
    columns = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return (
        [
            # Counts arrive as floats; an int keeps the division exact.
            Sum(total, int(weight) if weight.is_integer() else weight, nonzero=bool(nonzero))
            for total, weight, nonzero in columns
        ],
        bool(bad_ranks),
        bool(news_of) or counts_differ,
        later,
    )


NUMBERS = 6
"""How many numbers `over_ranks` exchanges beside three of each loss and those it takes along."""


def _squared(*numbers: int) -> list[int]:
    """Return each number and its square."""
    return [each for number in numbers for each in (number, number * number)]


def _differ(total: float, squares: float, ranks: int) -> bool:
    """Return whether numbers differ between ranks, from their sum and that of their squares."""
    return int(total) ** 2 != ranks * int(squares)  # equal where all numbers are, and only there


def check_loss(loss: object) -> None:
    """Check that a loss can be differentiated: one element of floating dtype with a graph.

    Raises:
        InputError: it is no tensor, has several elements, or has no graph.

    Examples:
        >>> check_loss(torch.ones(1, requires_grad=True).sum())
    """
    # First, as the checks below read attributes of a tensor.
    if not isinstance(loss, Tensor):
        raise without_tensor(loss)
    if loss.numel() != 1:
        raise InputError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}, and a micro-batch has one loss. Return "
            'its mean (reduction="mean") or its sum (reduction="sum").'
        )
    if not loss.is_floating_point():
        raise InputError(
            f"loss_fn returned a loss of dtype {loss.dtype}, and a loss is a real number. Return its "
            "absolute value or real part."
        )
    # Autograd would raise later, without the cause.
    if not loss.requires_grad:
        raise InputError(
            "loss_fn returned a loss without a graph: it depends on no parameter that needs a gradient. "
            "Compute it from the model outside torch.no_grad(), with parameters that require gradients."
        )


def pair_of(returned: Any) -> tuple[Any, Any]:
    """Return the loss and the weight that a loss function returned.

    Raises:
        InputError: it returned something else.

    Examples:
        >>> pair_of((0.5, 3))
        (0.5, 3)
    """
    # Exactly two: an output of several tensors is no pair of loss and weight.
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise InputError(
        f'loss_fn returned {type(returned).__name__}, and weight="returned" declares that it returns a pair. '
        "Return (loss, weight)."
    )


def alone(returned: Any) -> Any:
    """Return the loss that a loss function returned without a weight.

    Raises:
        InputError: it returned a tuple or a mapping.

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
            f"loss_fn returned a mapping with the keys {list(returned)}. Declare what each of these losses "
            f"is a mean over, as in weight={{{names}}}, or return one tensor."
        )
    raise InputError(
        "loss_fn returned a tuple, and weight= does not say that the loss comes with its weight. Return the "
        'loss alone, or pass weight="returned" and return (loss, weight).'
    )
