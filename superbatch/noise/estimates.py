"""Unbiased estimates of a gradient's signal and noise from the micro-batches of one window."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import InputError


class Estimate(NamedTuple):
    """Unbiased estimates from one window; each may be negative.

    Attributes:
        signal: estimate of ``|G|^2``, with the true gradient G.
        variance: estimate of ``tr Cov(g)``, with the gradient g of the batch (not of one sample).
    """

    signal: float
    variance: float


def estimate(a2: float, b2: float, q: float) -> Estimate:
    """Return the signal and the noise of one window's gradient, for micro-batches of any weights and sizes.

    Micro-batch i has the gradient ``g_i`` and the weight ``w_i``; weights sum to one.

    Args:
        a2: ``sum w_i^2 |g_i|^2``.
        b2: ``|g|^2`` of the batch's gradient ``g = sum w_i g_i``.
        q: ``sum w_i^2``, below 1.

    Returns:
        ``(b2 - a2) / (1 - q)`` and ``(a2 - q b2) / (1 - q)``.

    Raises:
        InputError: `q` is not between 0 and 1; it is 1 with a single micro-batch.

    Examples:
        >>> estimate(a2=(1.0 + 9.0) / 4, b2=4.0, q=0.5)  # gradients 1 and 3, weights 1/2 each
        Estimate(signal=3.0, variance=1.0)
    """
    if not 0 < q < 1:
        raise InputError(
            f"Noise is measured from differences between micro-batches, but sum w_i^2 = {q} means one "
            "micro-batch. Use at least two, on one rank or on several."
        )
    return Estimate((b2 - a2) / (1 - q), (a2 - q * b2) / (1 - q))


def homogeneous_estimate(
    a1: float, b2: float, weights: Sequence[float], samples: Sequence[int | float]
) -> Estimate:
    """Return the signal and the noise under the assumption that the variance of ``g_i`` is ``T / n_i``.

    With very different sizes this varies less than `estimate`; with ``w_i = n_i / N`` it is the analysis of
    variance. It is biased if the assumption is wrong: tokens of one text are not independent samples.

    Args:
        a1: ``sum w_i |g_i|^2``.
        b2: ``|g|^2`` of the batch's gradient.
        weights: weights ``w_i``, which sum to one.
        samples: samples ``n_i`` of each micro-batch.

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
            f"Noise is measured from differences between micro-batches, but got {len(weights)}. Pass two "
            "or more."
        )
    q = sum(w * w / n for w, n in zip(weights, samples, strict=True))
    of_one_sample = (a1 - b2) / (sum(w / n for w, n in zip(weights, samples, strict=True)) - q)
    return Estimate(b2 - q * of_one_sample, q * of_one_sample)


def effective_samples(weights: Iterable[float], samples: Iterable[int | float]) -> float:
    """Return the size of an equally weighted batch with the same noise: ``1 / sum(w_i^2 / n_i)``.

    Args:
        weights: weights ``w_i`` of the micro-batches, which sum to one; some may be 0.
        samples: samples ``n_i`` of each micro-batch; may be 0 where the weight is 0.

    Examples:
        >>> effective_samples([0.5, 0.5], [8, 8]), effective_samples([0.75, 0.25], [8, 8])
        (16.0, 12.8)
    """
    return 1 / math.fsum(w * w / n for w, n in zip(weights, samples, strict=True) if w)
