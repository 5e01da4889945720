"""Measurement of one window from sums over its micro-batches, for JAX, Keras and TensorFlow."""

from __future__ import annotations

# pyright: strict
import math
from typing import SupportsFloat

from ..errors import InputError
from .meter import LEAST_SPREAD, NoiseMeter, estimate


def add_sums(
    meter: NoiseMeter, a2: SupportsFloat, b2: SupportsFloat, q: SupportsFloat, *, samples: SupportsFloat
) -> None:
    """Add one window to the average, or record why its sums give no estimate.

    Args:
        meter: the average over windows.
        a2: ``sum (w_i / W)^2 |g_i|^2``.
        b2: ``|g|^2`` of the batch's gradient.
        q: ``sum (w_i / W)^2``.
        samples: ``1 / sum((w_i / W)^2 / n_i)``; see `superbatch.noise.estimates.effective_samples`.

    Raises:
        InputError: the meter has an option that only `superbatch.torch` supports.

    Examples:
        >>> meter = NoiseMeter()
        >>> add_sums(meter, 2.5, 4.0, 0.5, samples=20.0)
        >>> add_sums(meter, 2.5, 4.0, 1.0, samples=20.0)  # one micro-batch shows no spread
        >>> meter.passed, meter.windows
        (2, 1)
    """
    if meter.preconditioned or meter.proxy:
        raise InputError(
            f"NoiseMeter(preconditioned={meter.preconditioned}, proxy={meter.proxy}) works only with "
            "superbatch.torch. Leave these options out."
        )
    meter.passed += 1
    numbers = [float(number) for number in (a2, b2, q, samples)]
    if not all(map(math.isfinite, numbers)):
        meter.leave_out("not finite")
    elif 1 - numbers[2] < LEAST_SPREAD:
        meter.leave_out("one micro-batch has nearly all the weight")
    else:
        meter.add({"all": estimate(*numbers[:3])}, samples=numbers[3])
