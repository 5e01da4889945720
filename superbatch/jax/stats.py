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
        weight: ``W``, of the micro-batches that took part; 0: there is no mean and no gradient. Of a loss of
            several terms it is 1, or 0 where none has weight.
        samples: of these micro-batches.
        microbatches: all of them.
        dropped: how many were left out as not finite (``nonfinite="skip_microbatch"``).
        a2: ``sum (w_i / W)^2 |g_i|^2``, see `superbatch.noise`; None where noise is not measured.
        b2: ``|g|^2`` of the batch's gradient.
        q: ``sum (w_i / W)^2``.
        effective_samples: ``1 / sum((w_i / W)^2 / n_i)``.
        losses: of several terms, each one's loss by name; NaN where it has no weight.
        weights: of several terms, each one's ``W_t``.
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
    """Add a window's noise statistics to a `superbatch.NoiseMeter`, on the host.

    A window with one micro-batch, with nearly all weight on one, or that is not finite is noted as left out.

    Args:
        meter: the average over windows.
        stats: of one window, from ``value_and_grad(..., noise=True)``.

    Examples:
        >>> meter = NoiseMeter()
        >>> add_noise(meter, Stats(20, 20, 2, 0, a2=2.5, b2=4.0, q=0.5, effective_samples=20.0))
        >>> meter.windows
        1
    """
    if stats.a2 is None:
        meter.passed += 1
        meter.leave_out("noise=True was not asked for")
    else:
        add_sums(meter, stats.a2, stats.b2, stats.q, samples=stats.effective_samples)
