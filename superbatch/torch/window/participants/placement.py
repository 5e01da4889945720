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

# Up to here the rounding of a bfloat16 sum stays below that of its terms (K <= 2**8 / 16).
MOST_LOW_PRECISION_MICROBATCHES = 16


class Placement:
    """Chooses the place for each window.

    Args:
        config: of the accumulator.
        option: dtype that low-precision gradients are summed in; ``"auto"``: float32 for long windows; None:
            their own; ``"momentum"``: sum into SGD's momentum buffer.
    """

    def __init__(self, config: Config, option: GradientSumOption) -> None:
        self._config, self._option = config, option
        host = config.backward
        self._run = run_backward if host is None else host_backward(host)
        # Said once: a training loop makes thousands of windows.
        self._said = False

    def require_allowed(self) -> None:
        """Check that gradients may be summed in the momentum, whose groups may have changed.

        Raises:
            OptimizerError: an option of a group does not allow it.
        """
        if self._option == "momentum":
            check_momentum(self._config.rule.optimizers)

    def choose(self, microbatches: int, *, only_owned: bool) -> GradientSum:
        """Return the place for a window of a number of micro-batches."""
        config = self._config
        if self._option == "momentum":
            # Again for each window: add_param_group may have brought nesterov or dampening.
            self.require_allowed()
            return MomentumGradientSum(config.owned, config.rule.optimizers[0], only_owned=only_owned)
        # Coupled samples: one backward for the batch, so there is no sum over micro-batches to widen.
        if config.whole:
            return ParameterGradientSum(
                config.owned, only_owned=only_owned, whole=True, run=self._run, sync=config.sync
            )
        dtype = self._sum_dtype(microbatches)
        # Isolated needs the micro-batch's own gradient beside the sum, which .grad cannot hold.
        isolated = config.nonfinite == "skip_microbatch"
        if dtype is None and not isolated:
            return ParameterGradientSum(config.owned, only_owned=only_owned, run=self._run, sync=config.sync)
        return BufferGradientSum(config.owned, dtype, isolated=isolated, only_owned=only_owned, run=self._run)

    def _sum_dtype(self, microbatches: int) -> torch.dtype | None:
        """The dtype of the buffers that low-precision gradients are summed in, or None for no buffers."""
        config = self._config
        if config.sync.in_step or {e.parameter.dtype for e in config.owned}.isdisjoint(LOW_PRECISION):
            return None  # shards are summed in the dtype of their own mixed-precision policy
        if not isinstance(self._option, str):
            return self._option
        if config.rule.masters_copied or config.weigh == "returned":
            return torch.float32  # sums that are divided only afterwards would overflow in float16
        # All ranks must choose alike: their sums are added up.
        longest = config.sync.max(microbatches)
        if longest <= MOST_LOW_PRECISION_MICROBATCHES:
            return None
        if not self._said:
            self._said = True
            warn(
                f"a window of {longest} micro-batches with bfloat16/float16 parameters: their gradients are "
                "summed in float32 (4 bytes per parameter), since a sum in their own dtype would stop "
                "growing. gradient_sum=torch.float32 says the same without this message, gradient_sum=None "
                "undoes it."
            )
        return torch.float32
