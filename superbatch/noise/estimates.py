"""Estimate of the gradient's noise from one window: unbiased, for any weights."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import InputError


class Estimate(NamedTuple):
    """Estimate from one window; both parts are unbiased, and may come out negative.

    Attributes:
        signal: of ``|G|^2``.
        variance: of ``tr Cov(g)``, the noise of the batch's gradient (not of one sample's).
    """

    signal: float
    variance: float


def estimate(a2: float, b2: float, q: float) -> Estimate:
    """Return the signal and the noise of one window's gradient, for any weights and sizes.

    Args:
        a2: ``sum w_i^2 |g_i|^2``.
        b2: ``|g|^2`` of the summed gradient.
        q: ``sum w_i^2``, below 1.

    Returns:
        ``(b2 - a2) / (1 - q)`` and ``(a2 - q b2) / (1 - q)``.

    Raises:
        InputError: `q` is 1: there is one micro-batch, which differs from none.

    Examples:
        >>> estimate(a2=(1.0 + 9.0) / 4, b2=4.0, q=0.5)  # gradients 1 and 3, weights 1/2 each
        Estimate(signal=3.0, variance=1.0)
    """
    if not 0 < q < 1:
        raise InputError(
            f"Noise shows in the differences between micro-batches, and a window with sum w_i^2 = {q} has "
            "one. Use at least two micro-batches, on one rank or on several."
        )
    return Estimate((b2 - a2) / (1 - q), (a2 - q * b2) / (1 - q))


def homogeneous_estimate(
    a1: float, b2: float, weights: Sequence[float], samples: Sequence[int | float]
) -> Estimate:
    """Return the same as `estimate`, under the assumption that the variance of ``g_i`` is ``T / n_i``.

    Less scattered where sizes differ much (with ``w_i = n_i / N`` it is the analysis of variance), and biased
    where the assumption fails: tokens of one text are no independent samples.

    Args:
        a1: ``sum w_i |g_i|^2``.
        b2: ``|g|^2`` of the summed gradient.
        weights: ``w_i``, which sum to one.
        samples: ``n_i``.

    Returns:
        ``b2 - q T`` and ``q T`` with ``T = (a1 - b2) / (sum w_i / n_i - q)``, ``q = sum w_i^2 / n_i``.

    Raises:
        InputError: there are fewer than two micro-batches.

    Examples:
        >>> homogeneous_estimate(5.0, 4.0, [0.5, 0.5], [8, 8])
        Estimate(signal=3.0, variance=1.0)
    """
    if len(weights) < 2:
        raise InputError(
            f"Noise shows in the differences between micro-batches, and there is {len(weights)}. Give two or "
            "more."
        )
    q = sum(w * w / n for w, n in zip(weights, samples, strict=True))
    of_one_sample = (a1 - b2) / (sum(w / n for w, n in zip(weights, samples, strict=True)) - q)
    return Estimate(b2 - q * of_one_sample, q * of_one_sample)


def effective_samples(weights: Iterable[float], samples: Iterable[int | float]) -> float:
    """Return the batch of equal samples that has as little noise: ``1 / sum(w_i^2 / n_i)``.

    Args:
        weights: ``w_i``, which sum to one; micro-batches of weight 0 may be among them.
        samples: ``n_i``.

    Examples:
        >>> effective_samples([0.5, 0.5], [8, 8]), effective_samples([0.75, 0.25], [8, 8])
        (16.0, 12.8)
    """
    return 1 / math.fsum(w * w / n for w, n in zip(weights, samples, strict=True) if w)
