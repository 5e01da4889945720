"""Noise statistics of windows, added to a `superbatch.NoiseMeter`."""

from __future__ import annotations

from ..noise.meter import NoiseMeter
from ..noise.sums import add_sums
from .outcome import Applied


def add_noise(meter: NoiseMeter, applied: Applied) -> None:
    """Add the noise statistics of a window to a `superbatch.NoiseMeter`, on the host.

    The meter averages ``|G|^2 = (b2 - a2) / (1 - q)`` and ``tr Cov(g) = (a2 - q b2) / (1 - q)``. It counts a
    window as left out if it has one micro-batch, has nearly all weight on one, or made no update.

    Args:
        meter: the average over windows.
        applied: the result of a window of an accumulator with ``noise=True``.

    Examples:
        >>> meter = NoiseMeter()
        >>> add_noise(meter, Applied(True, 20, 0.5, 2.0, 2, 0, 2.5, 4.0, 0.5, 20.0))
        >>> meter.windows
        1
    """
    if applied.a2 is None or not bool(applied.made):
        meter.passed += 1
        meter.leave_out("noise=True was not passed" if applied.a2 is None else "no update")
    else:
        add_sums(meter, applied.a2, applied.b2, applied.q, samples=applied.effective_samples)
