r"""Virtual batch over ranks: BatchNorm over the samples of all ranks, one reduction of the gradients.

Each collective of a block is a recorded operation that also reads the result of the previous collective. So
every rank issues collectives in program order, whenever it reads numbers. Ranks may have different numbers of
samples and micro-batches. Moments :math:`(n_r, \mu_r, M_r)` of ranks are combined like those of
micro-batches: :math:`\mu = \sum n_r \mu_r / n`, :math:`M = \sum M_r + n_r (\mu_r - \mu)^2`. In the backward,
only the sums in dx are over all ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superbatch.errors import CoupledSamplesError, WindowError
from superbatch.torch.window.sync.find import find_sync
from superbatch.torch.window.sync.local import Local
from superbatch.torch.window.sync.manual import Manual
from superbatch.torch.window.sync.sync import Sync
from superbatch.torch.window.wrapped_models import sharded_part

from ..ir.calls import OpStrategy, meta_tensor
from ..ir.recorder import Recorder
from ..ir.reductions import Moments
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard
from ..ir.values import Operand, Value
from ..trace.aliases import assign
from ..trace.tensor import VirtualTensor
from . import collectives, shards
from .sync_norm import routed, synchronised_layers


class RankReducer:
    """Reductions of a block over the ranks that share its batch.

    Args:
        group: as in `virtual_batch`; with a group, every BatchNorm in training mode is over all its ranks.
        device: device of the statistics.
        reduces: average the gradients at the end of the block.

    Attributes:
        sync: ranks over which gradients are averaged.
        ending: the program has left the block, so all its collectives are recorded.
        peer_failed: this rank has stopped because another rank failed.
        peers_released: no rank waits for this one, because the block has ended or the other ranks know that
            this rank has failed.
        communicates: the program has called a collective on virtual tensors.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        modules: Iterable[nn.Module],
        group: Any,
        device: torch.device,
        *,
        reduces: bool = True,
    ) -> None:
        gathered = not reduces and sharded_part(models) is not None  # gathered by the window already
        self.sync = Manual(group, device) if gathered else find_sync(models, group, sharded="gathered")
        self.peer_failed = self.peers_released = self.communicates = False
        self._norm_sync = self.sync if group is not None and self.sync.shared else None
        # Inside the program's `no_sync`, a later backward reduces the gradients.
        self._reduces = reduces and self.sync.shared and self.sync.reduces
        self.ending = False
        self._in_collective = False  # in a collective of the program, which all ranks call
        self._device = device
        self._layers = synchronised_layers(modules)
        self._groups = _distinct_groups([*map(self._group_of, self._layers), self.sync])
        self._recording: weakref.ref[Recorder] | None = None
        self._last: Value | None = None
        self._totals: weakref.WeakKeyDictionary[Value, tuple[Sync, Value]] = weakref.WeakKeyDictionary()
        # Without gradients, as in a validation, a single rank may run the block, so it must not wait.
        self._voted = self._ended = not (self._groups and torch.is_grad_enabled())
        # For each recorded collective that is not issued yet, a function that issues it with NaN.
        self._pending: deque[Callable[[], object]] = deque()
        self._issuing = False

    @property
    def normalises(self) -> bool:
        """Flag: a BatchNorm in training mode normalises over several ranks at present."""
        return self._norm_sync is not None

    @contextmanager
    def normalising_over(self, layer: nn.SyncBatchNorm) -> Iterator[None]:
        """Normalise over the ranks of a layer inside the context."""
        before, sync = self._norm_sync, self._group_of(layer)
        self._norm_sync = sync if sync.shared else None
        try:
            yield
        finally:
            self._norm_sync = before

    def _group_of(self, layer: nn.SyncBatchNorm) -> Sync:
        if not dist.is_available() or not dist.is_initialized():
            return Local()
        return Manual(layer.process_group or dist.group.WORLD, self._device)

    @contextmanager
    def models_prepared(self) -> Iterator[None]:
        """Disable DDP's reduction, gather shards, and let SyncBatchNorm take virtual tensors."""
        # Before the block: in it, DDP's forward would broadcast buffers and wait for ranks that compute.
        self.sync.broadcast_buffers()
        with self.sync.no_sync(), self.sync.gathered(), routed(self._layers):
            yield

    # -- statistics -----------------------------------------------------------------------------------------

    def shard_of(self, recording: Recorder, value: Value) -> Shard | None:
        """Return the sharding of the input of a BatchNorm over ranks; None for an InstanceNorm.

        Raises:
            CoupledSamplesError: the samples are not in dimension 0.
        """
        if value.shard is not None and value.shard.dim == 1:  # InstanceNorm, on [1, N * C, ...]
            return None
        if value.shard is None and value.meta.shape[:1] == (recording.samples,):
            return Shard(0)  # the full result of an operator without a rule
        raise CoupledSamplesError(
            f"The input of a BatchNorm over ranks has shape {tuple(value.meta.shape)}, with the samples not "
            "in dimension 0. Move them there with permute()."
        )

    def statistics(
        self,
        recording: Recorder,
        x: Operand,
        moments: Callable[[BatchSlice, list[Tensor]], Any],
        form: tuple[int, torch.dtype],
        eps: float,
    ) -> list[Value]:
        """Return mean, 1 / standard deviation, biased and unbiased variance, as in `RankSums.statistics`."""
        sync, (channels, dtype) = self._norm_sync, form
        assert sync is not None

        def finish(mean: Tensor, squares: Tensor, count: int) -> list[Tensor]:
            # One flat tensor [2 * channels + 1], for one all-gather per layer.
            return [torch.cat([mean, squares, mean.new_full((1,), count)])]

        strategy = OpStrategy(
            [x],
            [PARTIAL],
            lambda microbatch, tensors: moments(microbatch, tensors)[0],
            lambda: Moments(finish),
        )
        packed = recording.add("batch_norm", strategy, meta_tensor((2 * channels + 1,), (1,), dtype))

        def combine(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            means, squares, counts = sync.all_gather(tensors[0]).split([channels, channels, 1], dim=1)
            # The count stays a tensor, because reading the number would wait for the collective.
            count = counts.sum()
            mean = (means * (counts / count)).sum(0)
            total = (squares + counts * (means - mean).square()).sum(0)
            var = total / count
            return mean, (var + eps).rsqrt(), var, total / (count - 1).clamp(min=1), count

        metas = [meta_tensor((channels,), (1,), dtype)] * 4 + [meta_tensor((), (), dtype)]
        self._pending.append(lambda: sync.all_gather(self._nan(2 * channels + 1, dtype)))
        *statistics, count = self._collective(recording, "batch_norm over ranks", [packed], combine, metas)
        self._totals[statistics[0]] = sync, count
        return statistics

    def shard_in_backward(self, recording: Recorder, value: Value, mean: Value) -> Shard | None:
        """Return the sharding of the input in the backward; None if the forward was not over ranks."""
        return self.shard_of(recording, value) if self.is_over_ranks(mean) else None

    def is_over_ranks(self, mean: Value) -> bool:
        """Return whether the mean of a BatchNorm was computed over several ranks."""
        return mean in self._totals

    def sum_over_ranks(self, recording: Recorder, mean: Value, mine: Value) -> Value:
        """Return the sum of a 1-d value over the ranks that `mean` was computed over."""
        sync, _ = self._totals[mean]
        size, dtype = len(mine.meta), mine.meta.dtype

        def reduce(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            return (sync.sum_tensor(tensors[0].clone()),)  # all_reduce writes its argument

        self._pending.append(lambda: sync.sum_tensor(self._nan(size, dtype)))
        return self._collective(recording, "sum over ranks", [mine], reduce, [mine.meta])[0]

    def sum_backward(self, recording: Recorder, mean: Value, sums: list[Value], count: int) -> list[Value]:
        """Return the sums of a backward over all ranks, times this rank's share of the samples.

        `sums` are [channels] each; `count` is the number of elements per channel on this rank.

        Raises:
            CoupledSamplesError: the backward runs with ``create_graph=True``.
        """
        known = self._totals.get(mean)
        if known is None:  # the layer is not over ranks
            return sums
        if torch.is_grad_enabled():
            raise CoupledSamplesError(
                "A BatchNorm over ranks does not support create_graph=True in its backward. "
                "Use a layer without batch statistics, or a BatchNorm within each rank."
            )
        sync, total = known
        metas = [value.meta for value in sums]

        def reduce(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            *mine, everywhere = tensors[: len(sums) + 1]
            # dx is divided by `count` later; the factor corrects that to the number of elements on all ranks.
            flat = sync.sum_tensor(torch.cat(mine).to(everywhere.dtype)) * (count / everywhere)
            return tuple(
                each.to(meta.dtype)
                for each, meta in zip(flat.split([len(m) for m in mine]), metas, strict=True)
            )

        size, dtype = sum(map(len, metas)), total.meta.dtype
        self._pending.append(lambda: sync.sum_tensor(self._nan(size, dtype)))
        return self._collective(recording, "batch_norm sums over ranks", [*sums, total], reduce, metas)

    def _nan(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return NaN, which a failed rank sends in place of its numbers."""
        return torch.full((size,), torch.nan, dtype=dtype, device=self._device)

    def _collective(
        self,
        recording: Recorder,
        name: str,
        values: list[Value],
        run: Callable[[BatchSlice, list[Tensor]], Any],
        metas: list[Tensor],
    ) -> list[Value]:
        """Record a collective that is issued after the previous one."""

        def issue(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            with self._issued():
                self.vote_once()
                self._pending.popleft()  # first, so that `fail` does not issue it again
                return run(microbatch, tensors)

        # Reading a result of the previous collective fixes the order, whatever the plan is.
        operands = [
            Operand(value, REPLICATE) for value in [*values, *([] if self._last is None else [self._last])]
        ]
        results = recording.add(name, OpStrategy(operands, [PARTIAL] * len(metas), issue), metas, once=True)
        self._recording, self._last = weakref.ref(recording), results[-1]
        return results

    @contextmanager
    def _issued(self) -> Iterator[None]:
        # The block's dispatch mode also gets these collectives, which `user_collective` issues unchanged.
        before, self._issuing = self._issuing, True
        try:
            yield
        finally:
            self._issuing = before

    def issue_recorded(self) -> None:
        """Issue all recorded collectives, so that the next one follows them on every rank."""
        recording = None if self._recording is None else self._recording()
        if recording is not None and self._last is not None and self._last.full is None:
            recording.materialize([self._last])

    # -- the program's own collectives ----------------------------------------------------------------------

    def user_collective(self, recording: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a collective of the program on materialized tensors; tensors that it writes become full."""
        if self._issuing:
            return func(*args, **kwargs)
        real: dict[int, tuple[VirtualTensor, Tensor]] = {}

        def number(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [number(one) for one in item]
            if not isinstance(item, VirtualTensor):
                return item
            if id(item) not in real:
                # Cloned: pending operations may still read the numbers from before the write.
                real[id(item)] = item, recording.numbers(item).detach().clone()
            return real[id(item)][1]

        joins = any(isinstance(item, VirtualTensor) for item in collectives.flat([*args, *kwargs.values()]))
        # Computing the numbers may fail: `fail` then votes, because the others wait in this collective.
        self._in_collective = joins
        self.issue_recorded()
        recording.make_writes(collectives.flat(args))
        arguments = [number(arg) for arg in args]
        named = {name: number(arg) for name, arg in kwargs.items()}
        with self._issued():
            self._vote_before_collective(again=joins)
            self._in_collective = False
            result = func(*arguments, **named)
            if real:
                self.communicates = True
                result = collectives.waited(result)
        for item, tensor in real.values():
            if collectives.is_written(item, func, args):
                assign(recording, item, recording.from_real(tensor))
        return collectives.wrapped_result(recording, func, args, result) if real else result

    # -- the end --------------------------------------------------------------------------------------------

    def vote_once(self, *, failed: bool = False) -> None:
        """Vote once, before the first collective; raise `WindowError` if another rank has failed."""
        if not self._voted:
            self._voted = True
            self._vote(failed)

    def _vote_before_collective(self, *, again: bool) -> None:
        """Vote before a collective of the program, with `again` also if the block has voted before."""
        if again and self._voted and not self._ended:
            self._vote(failed=False)
        self.vote_once()

    def _vote_at_end(self, *, failed: bool = False) -> None:
        """Vote, at the end of the block, whether a rank has failed after its first collective."""
        if not self._ended:
            self._ended = True
            if self._last is not None:  # without a collective the first vote covers the block
                self._vote(failed)

    def _vote(self, failed: bool) -> None:
        any_failed = failed
        # The group of the gradients votes last, and so includes failures in the other groups.
        for group in self._groups:
            any_failed = group.vote(any_failed)
        self._ended = self._ended or any_failed
        if any_failed and not failed:
            self.peer_failed = True
            raise WindowError(
                "Another rank that shares the virtual batch has failed. Read the error of that rank."
            )

    def fail(self) -> None:
        """Tell the other ranks that this one has failed, if the collective for which they wait is known."""
        with suppress(RuntimeError):  # a failed vote must not replace the error that is being raised
            first = not self._voted
            self.vote_once(failed=True)
            # At the end of the block, and in a collective of the program, all ranks have recorded the same
            # collectives. This rank issues the remaining ones with NaN, then votes.
            if (self.ending or self._in_collective) and not self._ended:
                while self._pending:
                    self._pending.popleft()()
                if self._in_collective:
                    self._vote(failed=True)
                self._vote_at_end(failed=True)
            self.peers_released = first or self._ended

    def end(self) -> None:
        """Drop the recorded collectives."""
        self._last = None
        self._pending.clear()

    def mean(self, parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the means of gradients over the ranks, as DDP defines them, in new tensors."""
        self.vote_once()
        self._vote_at_end()
        self.peers_released = True
        if not (self._reduces and torch.is_grad_enabled()):
            return gradients
        with torch.no_grad():
            return shards.mean(self.sync, parameters, gradients, self._device)

    def scatter(self) -> None:
        """Reduce and scatter the gradients of parameters that were gathered."""
        if self._reduces and torch.is_grad_enabled():
            shards.scatter(self.sync)


def _distinct_groups(all_ranks: Iterable[Sync]) -> list[Sync]:
    """Return the groups of several ranks, each once, in the order of their last occurrence."""
    # Reversed twice, so that the group of the gradients stays last.
    shared = {id(sync.group): sync for sync in reversed(list(all_ranks)) if sync.shared}
    return list(reversed(shared.values()))
