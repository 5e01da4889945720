"""One option of all parameter groups as one number: what a survey turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from superbatch.errors import OptimizerError
from superbatch.results.survey import What

RANGES: dict[What, tuple[float, float]] = {"momentum": (0.0, 0.999), "weight_decay": (1e-6, 1.0)}


class Dial:
    """Sets the surveyed option of every parameter group; groups keep their ratios.

    The group with the largest value leads. Where all are zero (a warm-up's first learning rate), the
    schedulers' initial rates give the ratios, else all groups get the same.

    Args:
        optimizers: whose groups.
        what: the option.

    Attributes:
        ratios: of each group to the leading one.

    Raises:
        OptimizerError: a group does not have the option.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.25}]
        >>> sgd = SGD(groups, lr=0.5)
        >>> dial = Dial([sgd], "lr")
        >>> dial.turn(2.0)
        >>> dial.ratios, [group["lr"] for group in sgd.param_groups]
        ((1.0, 0.5), [2.0, 1.0])
    """

    def __init__(self, optimizers: Sequence[Optimizer], what: What) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._set = _SETTERS[what]
        # Before anything is set: a survey changes all groups or none.
        if any(_key(group, what) not in group for group in self._groups):
            raise OptimizerError(
                f"A parameter group of {', '.join(type(o).__name__ for o in optimizers)} has no option "
                f"{what!r} to survey. "
                'Survey what="lr", or use an optimizer that has it.'
            )
        # Momentum is not scaled by ratio: 0.9 and 0.45 are no halves of one thing.
        self.ratios = (1.0,) * len(self._groups) if what == "momentum" else _ratios(self._groups, what)

    def turn(self, value: float) -> None:
        """Give the leading group this value, and the others theirs."""
        for group, ratio in zip(self._groups, self.ratios, strict=True):
            self._set(group, value * ratio)


def range_of(optimizers: Sequence[Optimizer], what: What) -> tuple[float, float]:
    """The default ramp of an option.

    Args:
        optimizers: that are surveyed.
        what: the option.

    Returns:
        First and last value: a rate from 1e-6 to 10 for SGD, whose update is the gradient's size times it,
        and from 1e-7 to 1 for the others, whose updates have a size of their own (Adam).

    Examples:
        >>> import torch
        >>> parameters = [torch.zeros(1, requires_grad=True)]
        >>> range_of([SGD(parameters)], "lr"), range_of([torch.optim.Adam(parameters)], "lr")
        ((1e-06, 10.0), (1e-07, 1.0))
    """
    if what != "lr":
        return RANGES[what]
    # Adam's step has the size of the rate, SGD's that of rate times gradient.
    return (1e-6, 10.0) if all(isinstance(optimizer, SGD) for optimizer in optimizers) else (1e-7, 1.0)


def _ratios(groups: Sequence[dict[str, Any]], what: What) -> tuple[float, ...]:
    values = [float(group[what]) for group in groups]
    # A warm-up starts at 0, and the ratios are then those of the initial rates.
    if what == "lr" and not any(values):
        values = [float(group.get("initial_lr", 0.0)) for group in groups]
    largest = max(values)
    return tuple(value / largest for value in values) if largest > 0 else (1.0,) * len(values)


def _key(group: dict[str, Any], what: What) -> str:
    return "betas" if what == "momentum" and "betas" in group else what


def _set_number(name: str) -> Callable[[dict[str, Any], float], None]:
    def put(group: dict[str, Any], value: float) -> None:
        if isinstance(group[name], Tensor):  # a compiled or captured optimizer holds on to the tensor
            group[name].fill_(value)
        else:
            group[name] = value

    return put


_NO_MOMENTUM = 1e-300  # of which float32 and float64 make nothing


def _set_momentum(group: dict[str, Any], value: float) -> None:
    if "betas" in group:
        group["betas"] = (value, *group["betas"][1:])
    else:  # RMSprop has a buffer only if its first update has momentum; gradients can be summed only into one
        group["momentum"] = value or _NO_MOMENTUM


_SETTERS: dict[What, Callable[[dict[str, Any], float], None]] = {
    "lr": _set_number("lr"),
    "weight_decay": _set_number("weight_decay"),
    "momentum": _set_momentum,
}
