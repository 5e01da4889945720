"""Noise scale of a whole run, and relative time to a loss with a larger batch."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Iterable

from ..errors import InputError


def noise_over_run(
    noise: Iterable[float], *, batch_size: float, samples: Iterable[float] | None = None
) -> float:
    """Return one noise scale for a whole run, during which it changes (it usually grows).

    It is the harmonic mean, weighted by the progress in each stretch of the run. With a batch B, the share
    ``1 / (1 + B / B_t)`` of the samples is progress.

    Args:
        noise: noise scale ``B_t`` of each stretch of the run, in samples; all positive.
        batch_size: batch ``B`` of the run.
        samples: samples of each stretch; None if all stretches are equally long.

    Returns:
        ``1 / mean(1 / B_t)`` with the weights ``samples / (1 + B / B_t)``.

    Raises:
        InputError: there is no noise scale, or a noise scale or the batch is not positive.

    Examples:
        >>> round(noise_over_run([100.0, 1000.0], batch_size=100), 1)
        238.5
    """
    scales = list(noise)
    counts = [1.0] * len(scales) if samples is None else list(samples)
    if not scales or min(scales) <= 0 or batch_size <= 0:
        raise InputError(
            f"noise={scales} with batch_size={batch_size} is empty or has a number that is not positive. "
            "Pass positive numbers, and leave out stretches whose noise scale is not determined."
        )
    progress = [n / (1 + batch_size / each) for n, each in zip(counts, scales, strict=True)]
    return math.fsum(progress) / math.fsum(p / each for p, each in zip(progress, scales, strict=True))


def relative_time(
    accumulation_steps: float,
    *,
    noise: float,
    microbatch_size: float,
    microbatch_seconds: float,
    update_seconds: float,
    ranks: int = 1,
) -> float:
    """Return the time to a target loss with K micro-batches per update, relative to one per update.

    ``W(K) / W(1)`` with ``W(K) = (1 + K b R / B) (t_micro + t_update / K) / (b R)``. A larger batch needs
    more samples (the first factor) and fewer updates (the second). Below 1, accumulation pays.

    Args:
        accumulation_steps: K, at least 1.
        noise: the noise scale B in samples, not negative; may be infinite.
        microbatch_size: b, samples of a micro-batch on one rank.
        microbatch_seconds: time of the forward and backward of one micro-batch.
        update_seconds: time of an update without its micro-batches: optimizer, all-reduce, offloading.
        ranks: R, number of ranks that work in parallel.

    Examples:
        >>> alone = relative_time(16, noise=1000, microbatch_size=32, microbatch_seconds=0.1,
        ...     update_seconds=0.0)
        >>> slow = relative_time(16, noise=1000, microbatch_size=32, microbatch_seconds=0.1,
        ...     update_seconds=1.0)
        >>> round(alone, 3), round(slow, 3)
        (1.465, 0.216)
    """
    k, batch = accumulation_steps, microbatch_size * ranks
    samples = 1.0 if math.isinf(noise) else (noise + k * batch) / (noise + batch)  # relative to K = 1
    return samples * (microbatch_seconds + update_seconds / k) / (microbatch_seconds + update_seconds)
