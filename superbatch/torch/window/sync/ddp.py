"""Models wrapped in DistributedDataParallel, reduced once per window.

Every micro-batch runs under ``no_sync``, which must enclose the forward too. DDP itself reduces inside the
last backward, which a rank of weight 0 does not have. So the sums are reduced after the last micro-batch: in
DDP's buckets if the wrappers allow it (`ddp_buckets`), otherwise by all-reduces of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from superbatch.results.ranks import RanksReport

from ..wrapped_models import refuse_comm_hooks
from .all_reduce import SPARSE
from .ddp_buckets import Buckets
from .manual import Manual


class DDP(Manual):
    """The ranks of wrapped models: those of the wrappers' process group (a `Sync`).

    Args:
        wrappers: the models' DDP wrappers.
        device: device of the tensors in which numbers are exchanged.
        in_buckets: gradients may stay in the wrappers' buckets, which the next window overwrites.
    """

    def __init__(
        self, wrappers: Sequence[DistributedDataParallel], device: torch.device, *, in_buckets: bool = False
    ) -> None:
        super().__init__(wrappers[0].process_group, device)
        self._wrappers = tuple(wrappers)
        self._in_buckets = in_buckets
        self._buckets = Buckets(wrappers) if in_buckets and Buckets.usable(wrappers) else None

    @property
    def report(self) -> RanksReport:
        """Report on the ranks that share a window."""
        return RanksReport("DDP", self.count, "window")

    @property
    def reduces(self) -> bool:
        """False inside a ``no_sync`` of the user's program."""
        return all(wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def no_sync(self) -> ExitStack:
        """Return a context in which no forward and no backward communicates."""
        refuse_comm_hooks(self._wrappers)  # a hook may have been registered since the last window
        stack = ExitStack()
        for wrapper in self._wrappers:
            stack.enter_context(wrapper.no_sync())
            # Even under no_sync the first forward broadcasts buffers. A rank of weight 0 has no forward, and
            # the others would wait for it for ever.
            _set(stack, wrapper, require_forward_param_sync=False)
            if wrapper.static_graph:  # even under no_sync DDP would queue its reduction in the backward
                _set(stack, wrapper, _static_graph_delay_allreduce_enqueued=True)
            # After a forward outside of a window the reducer waits for a backward. It would reduce in the
            # first backward of this window, which a rank of weight 0 does not have.
            wrapper.reducer._reset_state()
        return stack

    def broadcast_buffers(self) -> None:
        """Send the buffers of rank 0 to all ranks, as a wrapper's own forward does."""
        for wrapper in self._wrappers:
            if torch.is_grad_enabled() and wrapper.will_sync_module_buffers():
                wrapper._sync_buffers()

    def count_announced(self, parameters: Sequence[Tensor]) -> int:
        """Return the number of numbers that `announce` returns."""
        return len(parameters) + (2 if self._in_buckets else 0)

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return a number for each gradient, and two flags: the buckets do not fit, or are not prepared."""
        if not self._in_buckets:
            return super().announce(gradients, parameters)
        buckets = self._buckets
        fit = buckets is not None and buckets.fit(gradients, parameters)
        return [*super().announce(gradients, parameters), not fit, buckets is None or not buckets.ready]

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Return the sums of the gradients over the ranks, in the buckets if they fit on all ranks."""
        if not self.shared or not self._in_buckets:
            return super().reduce(gradients, parameters, zeros, announced)
        if announced is None:
            announced = self.sum_numbers(self.announce(gradients, parameters))
        *kind_sums, unfit, unready = announced
        # DDP's buckets cannot hold sparse gradients, and must be used by all ranks or by none.
        buckets = None if unfit or max(kind_sums, default=0.0) >= SPARSE else self._buckets
        if buckets is None or (unready and not buckets.prepare()):
            return super().reduce(gradients, parameters, zeros, kind_sums)
        with self._lost_on_error():
            # Gradients of parameters outside of the buckets are summed below.
            missed = [index for index in buckets.reduce(gradients, parameters) if kind_sums[index]]
        reduced = [each.grad if ranks else None for each, ranks in zip(parameters, kind_sums, strict=True)]
        others = super().reduce(
            [reduced[index] for index in missed],
            [parameters[index] for index in missed],
            lambda number: zeros(missed[number]),
            [kind_sums[index] for index in missed],
        )
        for index, gradient in zip(missed, others, strict=True):
            reduced[index] = gradient
        return reduced


def _set(stack: ExitStack, wrapper: DistributedDataParallel, **values: Any) -> None:
    """Set attributes until the context ends."""
    for name, value in values.items():
        stack.callback(setattr, wrapper, name, getattr(wrapper, name))
        setattr(wrapper, name, value)
