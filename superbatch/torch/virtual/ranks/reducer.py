r"""Virtual batch over ranks: BatchNorm over the samples of all ranks, one reduction of the gradients.

Each collective of a block is a recorded operation that also reads the result of the previous one. So every
rank issues them in program order, whenever it reads numbers. Samples and micro-batches per rank may differ.
Moments :math:`(n_r, \mu_r, M_r)` of the ranks combine as within one: :math:`\mu = \sum n_r \mu_r / n`,
:math:`M = \sum M_r + n_r (\mu_r - \mu)^2`. In the backward only the sums in dx are over all ranks.
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

from ..ir.calls import OpStrategy, blank
from ..ir.recorder import Recorder
from ..ir.reductions import Moments
from ..ir.shard import Part, Shard
from ..ir.values import Operand, Value
from ..trace.aliases import assign
from ..trace.tensor import VirtualTensor
from . import collectives, shards
from .sync_norm import routed, synchronised_layers


class RankReducer:
    """Reductions of a block over the ranks that share its batch.

    Args:
        models: models of the block.
        modules: all modules of the models.
        group: as in `virtual_batch`; with it every BatchNorm in training mode is over all its ranks.
        device: device of the statistics.
        reduces: average the gradients at the end of the block.

    Attributes:
        sync: ranks over which gradients are averaged.
        ending: the program has reached the end of the block: all its collectives are recorded.
        heard: this rank has stopped because another one failed.
        settled: no rank waits for this one: the block has ended, or the others have learned of its failure.
        exchanges: the program has called a collective on virtual tensors.
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
        gathered = not reduces and sharded_part(models) is not None  # the window has gathered the shards
        self.sync = Manual(group, device) if gathered else find_sync(models, group, sharded="gathered")
        self.heard = self.settled = self.exchanges = False
        self._now = self.sync if group is not None and self.sync.shared else None
        # Inside the program's own `no_sync` gradients are reduced by a later backward.
        self._reduces = reduces and self.sync.shared and self.sync.reduces
        self.ending = False
        self._in_collective = False  # inside a collective of the program, which all ranks call
        self._device = device
        self._layers = synchronised_layers(modules)
        self._groups = _different([*map(self._group_of, self._layers), self.sync])
        self._recording: weakref.ref[Recorder] | None = None
        self._last: Value | None = None
        self._totals: weakref.WeakKeyDictionary[Value, tuple[Sync, Value]] = weakref.WeakKeyDictionary()
        # Without gradients a single rank may run the block (a validation), so it must not wait for others.
        self._agreed = self._over = not (self._groups and torch.is_grad_enabled())
        # For each recorded collective that was not issued yet: a function that takes part in it with NaN.
        self._pending: deque[Callable[[], object]] = deque()
        self._issuing = False

    @property
    def normalises(self) -> bool:
        """Flag: a BatchNorm in training mode normalises over ranks now."""
        return self._now is not None

    @contextmanager
    def over(self, layer: nn.SyncBatchNorm) -> Iterator[None]:
        """Normalise over the ranks of a layer inside the context."""
        before, sync = self._now, self._group_of(layer)
        self._now = sync if sync.shared else None
        try:
            yield
        finally:
            self._now = before

    def _group_of(self, layer: nn.SyncBatchNorm) -> Sync:
        if not dist.is_available() or not dist.is_initialized():
            return Local()
        return Manual(layer.process_group or dist.group.WORLD, self._device)

    @contextmanager
    def held_together(self) -> Iterator[None]:
        """Disable DDP's reduction, gather shards, and route SyncBatchNorm to virtual tensors in the body."""
        # Now, because DDP's forward would broadcast buffers in the block and wait for ranks that compute.
        self.sync.broadcast_buffers()
        with self.sync.no_sync(), self.sync.gathered(), routed(self._layers):
            yield

    # -- statistics -----------------------------------------------------------------------------------------

    def shard_of(self, recording: Recorder, value: Value) -> Shard | None:
        """Return the sharding of the input of a BatchNorm over ranks; None for an InstanceNorm.

        Raises:
            CoupledSamplesError: the samples are not in dimension 0.
        """
        if value.shard is not None and value.shard.dim == 1:  # [1, N * C, ...], as InstanceNorm reshapes
            return None
        if value.shard is None and value.meta.shape[:1] == (recording.samples,):
            return Shard(0)  # a full result of an operator without a rule
        raise CoupledSamplesError(
            f"The input of a BatchNorm over ranks has shape {tuple(value.meta.shape)}, with the samples not "
            "in dimension 0. Move them there with permute()."
        )

    def statistics(
        self,
        recording: Recorder,
        x: Operand,
        moments: Callable[[Part, list[Tensor]], Any],
        form: tuple[int, torch.dtype],
        eps: float,
    ) -> list[Value]:
        """Return mean, 1 / standard deviation, biased and unbiased variance over the ranks.

        Args:
            recording: recording of the block.
            x: the samples of this rank.
            moments: computes (mean, M2, count) of a micro-batch.
            form: number of channels, and dtype of the statistics.
            eps: epsilon of the layer.
        """
        sync, (channels, dtype) = self._now, form
        assert sync is not None

        def finish(mean: Tensor, squares: Tensor, count: int) -> list[Tensor]:
            # One flat tensor [2 * channels + 1]: one all-gather per layer.
            return [torch.cat([mean, squares, mean.new_full((1,), count)])]

        strategy = OpStrategy(
            [x], [None], lambda part, tensors: moments(part, tensors)[0], lambda: Moments(finish)
        )
        packed = recording.add("batch_norm", strategy, blank((2 * channels + 1,), (1,), dtype))

        def combine(part: Part, tensors: list[Tensor]) -> Any:
            means, squares, counts = sync.all_gather(tensors[0]).split([channels, channels, 1], dim=1)
            # The count of all ranks stays a tensor: reading the number would wait for the collective.
            count = counts.sum()
            mean = (means * (counts / count)).sum(0)
            total = (squares + counts * (means - mean).square()).sum(0)
            var = total / count
            return mean, (var + eps).rsqrt(), var, total / (count - 1).clamp(min=1), count

        metas = [blank((channels,), (1,), dtype)] * 4 + [blank((), (), dtype)]
        self._pending.append(lambda: sync.all_gather(self._nothing(2 * channels + 1, dtype)))
        *found, count = self._collective(recording, "batch_norm over ranks", [packed], combine, metas)
        self._totals[found[0]] = sync, count
        return found

    def shard_in_backward(self, recording: Recorder, value: Value, mean: Value) -> Shard | None:
        """Return the sharding of the input in the backward; None if the forward was not over ranks."""
        return self.shard_of(recording, value) if self.spans(mean) else None

    def spans(self, mean: Value) -> bool:
        """Return whether the mean of a BatchNorm was computed over several ranks."""
        return mean in self._totals

    def summed(self, recording: Recorder, mean: Value, mine: Value) -> Value:
        """Return a flat value summed over the ranks of a mean."""
        sync, _ = self._totals[mean]
        size, dtype = len(mine.meta), mine.meta.dtype

        def reduce(part: Part, tensors: list[Tensor]) -> Any:
            return (sync.sum_tensor(tensors[0].clone()),)  # all_reduce writes its argument

        self._pending.append(lambda: sync.sum_tensor(self._nothing(size, dtype)))
        return self._collective(recording, "sum over ranks", [mine], reduce, [mine.meta])[0]

    def sums(self, recording: Recorder, mean: Value, sums: list[Value], count: int) -> list[Value]:
        """Return the sums of a backward over all ranks, times this rank's share of the samples.

        Args:
            recording: recording of the block.
            mean: mean that the layer normalised with.
            sums: sums of this rank, [channels] each.
            count: number of elements per channel on this rank.

        Raises:
            CoupledSamplesError: the backward runs with ``create_graph=True``.
        """
        known = self._totals.get(mean)
        if known is None:  # a layer within this rank
            return sums
        if torch.is_grad_enabled():
            raise CoupledSamplesError(
                "A BatchNorm over ranks does not support create_graph=True in its backward. "
                "Use a layer without batch statistics, or a BatchNorm within each rank."
            )
        sync, total = known
        metas = [value.meta for value in sums]

        def reduce(part: Part, tensors: list[Tensor]) -> Any:
            *mine, everywhere = tensors[: len(sums) + 1]
            # dx divides by `count`; times count / total it is divided by the elements of all ranks.
            flat = sync.sum_tensor(torch.cat(mine).to(everywhere.dtype)) * (count / everywhere)
            return tuple(
                each.to(meta.dtype)
                for each, meta in zip(flat.split([len(m) for m in mine]), metas, strict=True)
            )

        size, dtype = sum(map(len, metas)), total.meta.dtype
        self._pending.append(lambda: sync.sum_tensor(self._nothing(size, dtype)))
        return self._collective(recording, "batch_norm sums over ranks", [*sums, total], reduce, metas)

    def _nothing(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return the NaN that a failed rank sends in place of its numbers."""
        return torch.full((size,), torch.nan, dtype=dtype, device=self._device)

    def _collective(
        self,
        recording: Recorder,
        name: str,
        values: list[Value],
        run: Callable[[Part, list[Tensor]], Any],
        metas: list[Tensor],
    ) -> list[Value]:
        """Record a collective that is issued after the previous one."""

        def issue(part: Part, tensors: list[Tensor]) -> Any:
            with self._issued():
                self.agree()
                self._pending.popleft()  # before the call: a failure inside it must not repeat it
                return run(part, tensors)

        # Reading the last result of the previous collective fixes the order, independently of the plan.
        operands = [
            Operand(value, None) for value in [*values, *([] if self._last is None else [self._last])]
        ]
        results = recording.add(name, OpStrategy(operands, [None] * len(metas), issue), metas, once=True)
        self._recording, self._last = weakref.ref(recording), results[-1]
        return results

    @contextmanager
    def _issued(self) -> Iterator[None]:
        # Our own collectives pass the block's dispatch mode too: `user_collective` lets these through.
        before, self._issuing = self._issuing, True
        try:
            yield
        finally:
            self._issuing = before

    def catch_up(self) -> None:
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
        self._in_collective = (
            joins  # computing the numbers may fail: `fail` then answers the others' collective
        )
        self.catch_up()
        recording.settle_writes(collectives.flat(args))
        arguments = [number(arg) for arg in args]
        named = {name: number(arg) for name, arg in kwargs.items()}
        with self._issued():
            self._vote_before_collective(again=joins)
            self._in_collective = False
            result = func(*arguments, **named)
            if real:
                self.exchanges = True
                result = collectives.waited(result)
        for item, tensor in real.values():
            if collectives.is_written(item, func, args):
                assign(recording, item, recording.given(tensor))
        return collectives.shown(recording, func, args, result) if real else result

    # -- the end --------------------------------------------------------------------------------------------

    def agree(self, *, failed: bool = False) -> None:
        """Vote, once per block and before its first collective, whether a rank has failed.

        Raises:
            WindowError: another rank has failed.
        """
        if not self._agreed:
            self._agreed = True
            self._exchange(failed)

    def _vote_before_collective(self, *, again: bool) -> None:
        """Vote, before a collective of the program, whether a rank has failed.

        Args:
            again: vote even if the block has voted before.

        Raises:
            WindowError: another rank has failed.
        """
        if again and self._agreed and not self._over:
            self._exchange(failed=False)
        self.agree()

    def _agree_at_the_end(self, *, failed: bool = False) -> None:
        """Vote, at the end of the block, whether a rank has failed after its first collective."""
        if not self._over:
            self._over = True
            if self._last is not None:  # without a collective the first vote covers the block
                self._exchange(failed)

    def _exchange(self, failed: bool) -> None:
        somewhere = failed
        for (
            group
        ) in self._groups:  # the group of the gradients votes last and includes failures in the others
            somewhere = group.vote(somewhere)
        self._over = self._over or somewhere
        if somewhere and not failed:
            self.heard = True
            raise WindowError(
                "Another rank that shares the virtual batch has failed. Read the error of that rank."
            )

    def fail(self) -> None:
        """Notify the other ranks that this one has failed, if the collective that they wait for is known."""
        with suppress(RuntimeError):  # the error that is being raised has the cause
            first = not self._agreed
            self.agree(failed=True)
            # At the end of the block, and in a collective of the program, all ranks have recorded the same
            # collectives. This rank takes part in the remaining ones with NaN, then votes.
            if (self.ending or self._in_collective) and not self._over:
                while self._pending:
                    self._pending.popleft()()
                if self._in_collective:
                    self._exchange(failed=True)
                self._agree_at_the_end(failed=True)
            self.settled = first or self._over

    def end(self) -> None:
        """Free the recorded collectives."""
        self._last = None
        self._pending.clear()

    def mean(self, parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the means of gradients over the ranks, as DDP defines them, in new tensors."""
        self.agree()
        self._agree_at_the_end()
        self.settled = True
        if not (self._reduces and torch.is_grad_enabled()):
            return gradients
        with torch.no_grad():
            return shards.mean(self.sync, parameters, gradients, self._device)

    def scatter(self) -> None:
        """Reduce and scatter the gradients of parameters that were gathered."""
        if self._reduces and torch.is_grad_enabled():
            shards.scatter(self.sync)


def _different(all_ranks: Iterable[Sync]) -> list[Sync]:
    """Return the groups of several ranks, each once, in the order of their last occurrence."""
    # Reversed twice: the dict keeps the last occurrence, so the gradients' group stays last.
    shared = {id(sync.group): sync for sync in reversed(list(all_ranks)) if sync.shared}
    return list(reversed(shared.values()))
