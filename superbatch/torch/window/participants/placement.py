"""Choice of the gradient sum of a window."""

from __future__ import annotations

import torch

from ...options import GradientSumOption
from ...warn import warn
from ..config import Config
from ..validation import check_momentum
from .buffer_gradients import BufferGradientSum
from .gradient_sum import LOW_PRECISION, GradientSum, host_backward, run_backward
from .momentum_gradients import MomentumGradientSum
from .parameter_gradients import ParameterGradientSum

# A sixteenth of the 2**8 terms after which a sum of equal terms stops growing in bfloat16.
MOST_LOW_PRECISION_MICROBATCHES = 16


class Placement:
    """Chooses the gradient sum of each window.

    Args:
        config: the accumulator's.
        option: dtype in which low-precision gradients are summed; ``"auto"``: float32 for long windows;
            None: their own dtype; ``"momentum"``: the sum is in SGD's momentum buffer.
    """

    def __init__(self, config: Config, option: GradientSumOption) -> None:
        self._config, self._option = config, option
        host = config.backward
        self._run = run_backward if host is None else host_backward(host)
        self._has_warned = False

    def require_allowed(self) -> None:
        """Raise `OptimizerError` if a parameter group no longer allows sums in the momentum buffer."""
        if self._option == "momentum":
            check_momentum(self._config.rule.optimizers)

    def choose(self, microbatches: int, *, only_owned: bool) -> GradientSum:
        """Return the gradient sum of a window.

        Args:
            microbatches: number of micro-batches of the window.
            only_owned: whether the backward must leave out parameters of other optimizers.
        """
        config = self._config
        if self._option == "momentum":
            # At each window, because add_param_group() may have added nesterov or dampening.
            self.require_allowed()
            return MomentumGradientSum(config.owned, config.rule.optimizers[0], only_owned=only_owned)
        # Coupled samples have one backward for the batch, and no sum over micro-batches.
        if config.whole:
            return ParameterGradientSum(
                config.owned, only_owned=only_owned, whole=True, run=self._run, sync=config.sync
            )
        dtype = self._sum_dtype(microbatches)
        # Each micro-batch's gradient is checked by itself, so the sum cannot be in .grad.
        isolated = config.nonfinite == "skip_microbatch"
        if dtype is None and not isolated:
            return ParameterGradientSum(config.owned, only_owned=only_owned, run=self._run, sync=config.sync)
        return BufferGradientSum(config.owned, dtype, isolated=isolated, only_owned=only_owned, run=self._run)

    def _sum_dtype(self, microbatches: int) -> torch.dtype | None:
        """Return the dtype of the buffers for low-precision gradients, or None for a sum in ``.grad``."""
        config = self._config
        if config.sync.has_collective_forwards:
            return None  # fully_shard sums shards in the dtype of its mixed-precision policy
        if {entry.parameter.dtype for entry in config.owned}.isdisjoint(LOW_PRECISION):
            return None
        if not isinstance(self._option, str):
            return self._option
        if config.rule.masters_copied or config.weigh == "returned":
            return torch.float32  # sums that are divided only at the end would overflow in float16
        # All ranks must choose the same dtype, because their sums are added.
        longest = config.sync.max(microbatches)
        if longest <= MOST_LOW_PRECISION_MICROBATCHES:
            return None
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"The gradients of bfloat16/float16 parameters in a window of {longest} micro-batches are "
                "summed in float32 (4 bytes per parameter), because a long sum in their own dtype stops "
                "growing. Pass gradient_sum=torch.float32 to do this without a warning, or gradient_sum=None "
                "to sum in their own dtype."
            )
        return torch.float32
