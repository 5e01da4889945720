# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Statistics of one window, as arrays that a jitted function can return."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..noise.meter import NoiseMeter
from ..noise.sums import add_sums
from . import arithmetic


class Stats(NamedTuple):
    """The third output of `value_and_grad` with ``stats=True`` or ``noise=True``; scalar arrays.

    Attributes:
        weight: ``W``, the total weight of the micro-batches that took part; with 0 the loss is NaN and the
            gradient 0. For several losses it is 1, or 0 if none has weight.
        samples: the number of samples of these micro-batches.
        microbatches: the number of computed micro-batches on all devices, without padding.
        dropped: the number of micro-batches left out as not finite (``nonfinite="skip_microbatch"``).
        a2: ``sum (w_i / W)^2 |g_i|^2``, see `superbatch.noise`; None without ``noise=True``.
        b2: ``|g|^2`` of the batch's gradient.
        q: ``sum (w_i / W)^2``.
        effective_samples: ``1 / sum((w_i / W)^2 / n_i)``.
        losses: for several losses, each loss by name; NaN for one without weight.
        weights: for several losses, the total weight of each by name.
    """

    weight: Any
    samples: Any
    microbatches: Any
    dropped: Any
    a2: Any = None
    b2: Any = None
    q: Any = None
    effective_samples: Any = None
    losses: Any = None
    weights: Any = None


def noise_sums(squares: Any, weights: Any, samples: Any) -> tuple[Any, Any, Any]:
    """Return the sums over micro-batches (and devices) of ``|w g|^2``, ``w^2`` and ``w^2 / n``.

    Examples:
        >>> import jax.numpy as jnp
        >>> [float(part) for part in noise_sums(jnp.array([4.0]), jnp.array([2.0]), jnp.array([2.0]))]
        [4.0, 4.0, 2.0]
    """
    total = arithmetic.pairwise_sum
    return total(squares), total(weights * weights), total(weights * weights / samples)


def add_noise(meter: NoiseMeter, stats: Stats) -> None:
    """Add the noise statistics of a window to a `superbatch.NoiseMeter`, on the host.

    The meter counts a window as left out if it has one micro-batch, has nearly all weight on one, or is not
    finite.

    Args:
        meter: the average over windows.
        stats: the third output of a call of ``value_and_grad(..., noise=True)``.

    Examples:
        >>> meter = NoiseMeter()
        >>> add_noise(meter, Stats(20, 20, 2, 0, a2=2.5, b2=4.0, q=0.5, effective_samples=20.0))
        >>> meter.windows
        1
    """
    if stats.a2 is None:
        meter.passed += 1
        meter.leave_out("noise=True was not passed")
    else:
        add_sums(meter, stats.a2, stats.b2, stats.q, samples=stats.effective_samples)
