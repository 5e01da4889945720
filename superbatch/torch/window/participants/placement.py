"""Choice of the gradient sum of a window."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from ..config import Plan
from ..validation import check_momentum
from .buffer_gradients import InBuffers
from .gradient_sum import LOW_PRECISION, Gradients
from .momentum_gradients import InMomentum
from .parameter_gradients import InGrad

# Up to here the rounding of a bfloat16 sum stays below that of its terms (K <= 2**8 / 16).
MOST_LOW_PRECISION_MICROBATCHES = 16


class Places:
    """Chooses the place for each window.

    Args:
        plan: of the accumulator.
        dtype: that low-precision gradients are summed in; ``"auto"``: float32 for long windows.
        momentum: sum into SGD's momentum buffer.
    """

    def __init__(self, plan: Plan, dtype: torch.dtype | Literal["auto"] | None, *, momentum: bool) -> None:
        self._plan = plan
        self._dtype: torch.dtype | Literal["auto"] | None = dtype
        self._momentum = momentum
        self._said = False

    def choose(self, microbatches: int, *, only_owned: bool) -> Gradients:
        """Return the place for a window of so many micro-batches."""
        plan = self._plan
        if self._momentum:
            check_momentum(plan.step.optimizers)  # groups may have changed since the last window
            return InMomentum(plan.owned, plan.step.optimizers[0], only_owned=only_owned)
        if plan.whole:
            return InGrad(plan.owned, only_owned=only_owned, whole=True)
        dtype = self._sum_dtype(microbatches)
        isolated = plan.nonfinite == "skip_microbatch"
        if dtype is None and not isolated:
            return InGrad(plan.owned, only_owned=only_owned)
        return InBuffers(plan.owned, dtype, isolated=isolated, only_owned=only_owned)

    def _sum_dtype(self, microbatches: int) -> torch.dtype | None:
        """The dtype of the buffers that low-precision gradients are summed in, or None for no buffers."""
        plan = self._plan
        if {entry.parameter.dtype for entry in plan.owned}.isdisjoint(LOW_PRECISION):
            return None
        if not isinstance(self._dtype, str):
            return self._dtype
        if plan.step.masters_copied or plan.weigh == "returned":
            return torch.float32  # sums that are divided only afterwards would overflow in float16
        # All ranks must choose alike: their sums are added up.
        longest = plan.ranks.max(microbatches)
        if longest <= MOST_LOW_PRECISION_MICROBATCHES:
            return None
        if not self._said:
            self._said = True
            warnings.warn(
                f"a window of {longest} micro-batches with bfloat16/float16 parameters: their gradients are "
                "summed in float32 (4 bytes per parameter), since a sum in their own dtype would stop "
                "growing. accumulator_dtype=torch.float32 says the same without this message, "
                "accumulator_dtype=None undoes it.",
                UserWarning,
                stacklevel=5,
            )
        return torch.float32
