"""Set one option of all parameter groups by a single number, as a survey does at each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from superbatch.errors import OptimizerError
from superbatch.results.survey import What

RANGES: dict[What, tuple[float, float]] = {"momentum": (0.0, 0.999), "weight_decay": (1e-6, 1.0)}


class OptionSetter:
    """Setter of the surveyed option of all parameter groups, which keep their ratios.

    Ratios are relative to the group with the largest value. If all values are zero (the first learning rate
    of a warm-up), the initial rates of schedulers give the ratios; without those all groups get the same
    value.

    Attributes:
        ratios: ratio of each group to the one with the largest value.

    Raises:
        OptimizerError: a group does not have the option.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.25}]
        >>> sgd = SGD(groups, lr=0.5)
        >>> setter = OptionSetter([sgd], "lr")
        >>> setter.set(2.0)
        >>> setter.ratios, [group["lr"] for group in sgd.param_groups]
        ((1.0, 0.5), [2.0, 1.0])
    """

    def __init__(self, optimizers: Sequence[Optimizer], what: What) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._set = _SETTERS[what]
        # Checked before anything is set: a survey changes all groups or none.
        if any(_key(group, what) not in group for group in self._groups):
            raise OptimizerError(
                f"A survey cannot change what={what!r} of "
                f"{', '.join(type(o).__name__ for o in optimizers)}: a parameter group has no such "
                'option. Survey what="lr", or use an optimizer that has it.'
            )
        # Momentum is not scaled by a ratio: all groups get the same value.
        self.ratios = (1.0,) * len(self._groups) if what == "momentum" else _ratios(self._groups, what)

    def set(self, value: float) -> None:
        """Set the option of each group to `value` times the group's ratio."""
        for group, ratio in zip(self._groups, self.ratios, strict=True):
            self._set(group, value * ratio)


def range_of(optimizers: Sequence[Optimizer], what: What) -> tuple[float, float]:
    """Return the default range of an option.

    Returns:
        First and last value. For learning rates 1e-6 and 10 with SGD, whose update is rate times gradient;
        1e-7 and 1 with other optimizers, whose update does not grow with the gradient (Adam).

    Examples:
        >>> import torch
        >>> parameters = [torch.zeros(1, requires_grad=True)]
        >>> range_of([SGD(parameters)], "lr"), range_of([torch.optim.Adam(parameters)], "lr")
        ((1e-06, 10.0), (1e-07, 1.0))
    """
    if what != "lr":
        return RANGES[what]
    return (1e-6, 10.0) if all(isinstance(optimizer, SGD) for optimizer in optimizers) else (1e-7, 1.0)


def _ratios(groups: Sequence[dict[str, Any]], what: What) -> tuple[float, ...]:
    values = [float(group[what]) for group in groups]
    # A warm-up starts at 0; then the initial rates give the ratios.
    if what == "lr" and not any(values):
        values = [float(group.get("initial_lr", 0.0)) for group in groups]
    largest = max(values)
    return tuple(value / largest for value in values) if largest > 0 else (1.0,) * len(values)


def _key(group: dict[str, Any], what: What) -> str:
    return "betas" if what == "momentum" and "betas" in group else what


def _set_number(name: str) -> Callable[[dict[str, Any], float], None]:
    def put(group: dict[str, Any], value: float) -> None:
        if isinstance(group[name], Tensor):  # in place: a compiled or captured optimizer reads this tensor
            group[name].fill_(value)
        else:
            group[name] = value

    return put


_NO_MOMENTUM = 1e-300  # so small that it has no effect in float32 and float64


def _set_momentum(group: dict[str, Any], value: float) -> None:
    if "betas" in group:
        group["betas"] = (value, *group["betas"][1:])
    else:  # with momentum 0 at the first update, RMSprop would have no buffer, and sums into it would fail
        group["momentum"] = value or _NO_MOMENTUM


_SETTERS: dict[What, Callable[[dict[str, Any], float], None]] = {
    "lr": _set_number("lr"),
    "weight_decay": _set_number("weight_decay"),
    "momentum": _set_momentum,
}
