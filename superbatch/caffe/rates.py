"""Caffe's seven learning-rate policies, as functions of the update's index.

With b = base_lr, g = gamma, p = power, all of them float32, and i the update, counted from 0::

    fixed      b
    step       b g^(i // stepsize)
    exp        b g^i
    inv        b (1 + g i)^-p            g i is a float32 product
    multistep  b g^s                     s: stepvalues reached, at most one more per update
    poly       b (1 - i / max_iter)^p
    sigmoid    b / (1 + exp(-g (i - stepsize)))

All other arithmetic is in double precision, as in ``Solver<double>``; a ``Solver<float>`` rounds the rate to
float32.

Source: BVLC/caffe 9b891540, src/caffe/solvers/sgd_solver.cpp, `GetLearningRate`.
"""

from __future__ import annotations

# pyright: strict
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from ..schedule import check_update
from .config import SolverConfig, float32

Rate = Callable[[int], float]


def rate_schedule(config: SolverConfig) -> Rate:
    """Return the learning rate as a function of the update, for a parameter whose ``lr_mult`` is 1.

    After ``max_iter``, where Caffe stops, "poly" keeps its last value.

    Args:
        config: the solver.

    Returns:
        update (0, 1, 2, ...) -> rate.

    Examples:
        >>> from superbatch.caffe import parse_solver
        >>> text = 'base_lr: 0.1 lr_policy: "multistep" gamma: 0.5 stepvalue: [2, 2, 3]'
        >>> rate = rate_schedule(parse_solver(text))
        >>> [round(rate(update), 4) for update in range(6)]  # the drops come one by one
        [0.1, 0.1, 0.05, 0.025, 0.0125, 0.0125]
    """
    factor = _FACTORS[config.lr_policy](config)
    return lambda update: config.base_lr * factor(check_update(update, "update"))


def multistep_drops(stepvalue: tuple[int, ...]) -> tuple[int, ...]:
    """Return the updates at which "multistep" lowers the rate: one drop per update, in order.

    Args:
        stepvalue: values of the solver file, in its order.

    Returns:
        One update for each value.

    Examples:
        >>> multistep_drops((2, 2, 3)), multistep_drops((5, 3))
        ((2, 3, 4), (5, 6))
    """
    drops: list[int] = []
    for value in stepvalue:
        # Caffe compares with one value per update, so a second drop waits for the next update.
        drops.append(max(value, drops[-1] + 1 if drops else 0))
    return tuple(drops)


def listed(values: Sequence[object], most: int = 10) -> str:
    """List values in a sentence: the first ones, and how many follow.

    Examples:
        >>> listed((10, 20)), listed(range(40_000), most=2)
        ('10, 20', '0, 1 and 39998 more')
    """
    text = ", ".join(map(str, values[:most]))
    return text if len(values) <= most else f"{text} and {len(values) - most} more"


def _fixed(config: SolverConfig) -> Rate:
    return lambda update: 1.0


def _step(config: SolverConfig) -> Rate:
    return lambda update: _power(config.gamma, update // config.stepsize)


def _exp(config: SolverConfig) -> Rate:
    return lambda update: _power(config.gamma, update)


def _inv(config: SolverConfig) -> Rate:
    # Caffe multiplies gamma and the update in float32.
    return lambda update: _power(1.0 + float32(config.gamma * float32(update)), -config.power)


def _multistep(config: SolverConfig) -> Rate:
    drops = multistep_drops(config.stepvalue)
    return lambda update: _power(config.gamma, bisect_right(drops, update))


def _poly(config: SolverConfig) -> Rate:
    last = config.max_iter
    # Without min, the base would be negative after max_iter.
    return lambda update: _power(1.0 - min(update, last) / last, config.power)


def _sigmoid(config: SolverConfig) -> Rate:
    def factor(update: int) -> float:
        exponent = -config.gamma * (update - config.stepsize)
        # math.exp overflows from 710 on.
        return 0.0 if exponent > 700 else 1.0 / (1.0 + math.exp(exponent))

    return factor


_FACTORS: dict[str, Callable[[SolverConfig], Rate]] = {
    "fixed": _fixed,
    "step": _step,
    "exp": _exp,
    "inv": _inv,
    "multistep": _multistep,
    "poly": _poly,
    "sigmoid": _sigmoid,
}


def _power(base: float, exponent: float) -> float:
    """Compute C's pow for a base of 0 or more: infinity where Python raises."""
    try:
        return math.pow(base, exponent)
    except (OverflowError, ValueError):
        return math.inf
