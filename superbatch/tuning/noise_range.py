"""Range of a noise scale that is measured, given as a number, or not known."""

from __future__ import annotations

# pyright: strict
import math
from dataclasses import dataclass
from numbers import Real

from ..errors import InputError
from ..results.noise import Noise, NoiseOfModel


@dataclass(frozen=True)
class NoiseRange:
    """Range of the noise scale ``B_noise``, in samples.

    Attributes:
        value: the estimate; None if it is not determined.
        low: lower end of the interval.
        high: upper end of the interval; infinite if it is unbounded.
    """

    value: float | None
    low: float
    high: float


def noise_range_of(model: NoiseOfModel) -> NoiseRange:
    """Return the noise range under one model of Adam's preconditioner.

    Args:
        model: one of `Noise.models`.

    Examples:
        >>> noise_range_of(NoiseOfModel(power=1, batch_size=None, low=40.0, high=math.inf, signal=0.1,
        ...     variance=9.0, windows=20))
        NoiseRange(value=None, low=40.0, high=inf)
    """
    known = model.batch_size is not None and math.isfinite(model.high)
    return NoiseRange(model.batch_size if known else None, model.low, model.high)


def noise_range(noise: Noise | float | None) -> NoiseRange:
    """Return the range of a noise scale.

    Args:
        noise: a measurement, a number of samples (infinite without signal), or None if it is not known.

    Returns:
        The estimate with its interval. If the interval has no upper end, the estimate is None: the signal is
        not distinguishable from zero.

    Raises:
        InputError: `noise` is none of these, or not positive.

    Examples:
        >>> noise_range(1500.0)
        NoiseRange(value=1500.0, low=1500.0, high=1500.0)
        >>> noise_range(None)
        NoiseRange(value=None, low=0.0, high=inf)
    """
    if noise is None:
        return NoiseRange(None, 0.0, math.inf)
    if isinstance(noise, Noise):
        return NoiseRange(noise.batch_size if noise.determined else None, noise.low, noise.high)
    if isinstance(noise, bool) or not isinstance(noise, Real) or not noise > 0:  # pyright: ignore[reportUnnecessaryIsInstance]  (of any caller)
        raise InputError(
            f"noise={noise!r} is not a noise scale. Pass a positive number of samples, accumulate.noise of "
            "an Accumulator with observers=[NoiseMeter()], or None."
        )
    return NoiseRange(float(noise), float(noise), float(noise))
