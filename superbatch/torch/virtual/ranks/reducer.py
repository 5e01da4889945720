r"""A virtual batch over ranks: BatchNorm over the samples of all of them, one reduction of the gradients.

The collectives of a block are recorded as operations on whole values, each of which also reads what the one
before it gave. So every rank issues them in the order in which its program called for them, whenever numbers
are asked for: a rank may read its loss in the block where the others do not. Nothing else has to be equal
on the ranks: numbers of samples and of micro-batches may differ.

With :math:`(n_r, \mu_r, M_r)` the count, mean and sum of squared deviations on rank r,

.. math:: n = \sum n_r, \quad \mu = \sum n_r \mu_r / n, \quad M = \sum M_r + n_r (\mu_r - \mu)^2

as within a rank (Chan, Golub, LeVeque 1979). In the backward only the sums in dx are those of all ranks.
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

from superbatch.errors import CoupledSamplesError, WindowError, explain
from superbatch.torch.window.sync.find import find_sync
from superbatch.torch.window.sync.local import Local
from superbatch.torch.window.sync.manual import Manual
from superbatch.torch.window.sync.sync import Sync
from superbatch.torch.window.wrapped_models import sharded_part

from ..ir.calls import Recipe, blank
from ..ir.layout import Layout, Part
from ..ir.recorder import Recorder
from ..ir.reductions import Moments
from ..ir.values import Operand, Value
from ..trace.aliases import assign
from ..trace.tensor import VirtualTensor
from . import collectives, shards
from .sync_norm import routed, synchronised_layers


class RankReducer:
    """Reductions of a block over the ranks that share its batch.

    Args:
        models: of the block.
        modules: all of theirs.
        group: as in `virtual_batch`; with it every BatchNorm in training mode is one over all ranks.
        device: where statistics are.
        reduces: gradients are averaged at the end of the block.

    Attributes:
        sync: the ranks over which gradients are averaged.
        ending: the program has come to the end of the block, so that all collectives are recorded.
        heard: this rank has stopped because another one has failed.
        settled: no rank waits for this one in the block, which is over or has told the others that it failed.
        exchanges: the program has called a collective on tensors of the batch.
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
        gathered = not reduces and sharded_part(models) is not None  # by the window, which reduces gradients
        self.sync = Manual(group, device) if gathered else find_sync(models, group, sharded="gathered")
        self.heard = self.settled = self.exchanges = False
        self._now = self.sync if group is not None and self.sync.shared else None
        # The user's own `no_sync` says that the gradients are reduced later.
        self._reduces = reduces and self.sync.shared and self.sync.reduces
        self.ending = False
        self._meeting = False  # all ranks are at the same collective of the program
        self._device = device
        self._layers = synchronised_layers(modules)
        self._groups = _different([*map(self._group_of, self._layers), self.sync])
        self._recording: weakref.ref[Recorder] | None = None
        self._last: Value | None = None
        self._totals: weakref.WeakKeyDictionary[Value, tuple[Sync, Value]] = weakref.WeakKeyDictionary()
        # Without gradients a block may well be one rank's alone (a validation).
        self._agreed = self._over = not (self._groups and torch.is_grad_enabled())
        self._pending: deque[Callable[[], object]] = deque()
        self._issuing = False

    @property
    def normalises(self) -> bool:
        """A BatchNorm in training mode is over ranks."""
        return self._now is not None

    @contextmanager
    def over(self, layer: nn.SyncBatchNorm) -> Iterator[None]:
        """Normalise over the ranks of a layer, for as long as the context lasts."""
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
        """Hold DDP back, gather shards, and let SyncBatchNorm take virtual tensors during the body."""
        self.sync.broadcast_buffers()  # DDP's own forward may not wait for the others inside the block
        with self.sync.no_sync(), self.sync.gathered(), routed(self._layers):
            yield

    # -- statistics -----------------------------------------------------------------------------------------

    def layout_of(self, recording: Recorder, value: Value) -> Layout | None:
        """Return the layout of the input of a BatchNorm over ranks; None for an InstanceNorm.

        Raises:
            CoupledSamplesError: its rows are not those of the samples.
        """
        if value.layout is not None and value.layout.dim == 1:
            return None
        if value.layout is None and value.meta.shape[:1] == (recording.samples,):
            return Layout(0)  # what an operator without a rule has given
        raise CoupledSamplesError(
            f"A BatchNorm over ranks of shape {tuple(value.meta.shape)} has its samples not in "
            "dimension 0. Put them there."
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
            recording: of the block.
            x: the samples of this rank.
            moments: what `Moments` combines.
            form: number of channels, and dtype of the statistics.
            eps: of the layer.
        """
        sync, (channels, dtype) = self._now, form
        assert sync is not None

        def finish(mean: Tensor, squares: Tensor, count: int) -> list[Tensor]:
            return [torch.cat([mean, squares, mean.new_full((1,), count)])]

        recipe = Recipe([x], [None], lambda part, tensors: moments(part, tensors)[0], lambda: Moments(finish))
        packed = recording.add("batch_norm", recipe, blank((2 * channels + 1,), (1,), dtype))

        def combine(part: Part, tensors: list[Tensor]) -> Any:
            means, squares, counts = sync.all_gather(tensors[0]).split([channels, channels, 1], dim=1)
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

    def layout_back(self, recording: Recorder, value: Value, mean: Value) -> Layout | None:
        """Return the same for its backward; None if it was not over ranks."""
        return self.layout_of(recording, value) if self.spans(mean) else None

    def spans(self, mean: Value) -> bool:
        """Return whether a mean that a BatchNorm normalises with is over ranks."""
        return mean in self._totals

    def summed(self, recording: Recorder, mean: Value, mine: Value) -> Value:
        """Return a flat value summed over the ranks that a mean is over."""
        sync, _ = self._totals[mean]
        size, dtype = len(mine.meta), mine.meta.dtype

        def reduce(part: Part, tensors: list[Tensor]) -> Any:
            return (sync.sum_tensor(tensors[0].clone()),)

        self._pending.append(lambda: sync.sum_tensor(self._nothing(size, dtype)))
        return self._collective(recording, "sum over ranks", [mine], reduce, [mine.meta])[0]

    def sums(self, recording: Recorder, mean: Value, sums: list[Value], count: int) -> list[Value]:
        """Return the sums of a backward over all ranks, for the count of this one.

        Args:
            recording: of the block.
            mean: what the layer normalised with.
            sums: this rank's, C numbers each.
            count: of this rank; dx divides by it, so what is returned is times ``count / total``.

        Raises:
            CoupledSamplesError: a backward of this backward is asked for.
        """
        known = self._totals.get(mean)
        if known is None:
            return sums
        if torch.is_grad_enabled():
            raise CoupledSamplesError(
                explain(
                    "a backward with create_graph=True through a BatchNorm over ranks",
                    "its second derivative would need sums over the ranks that torch does not define",
                    "use a layer without statistics of the batch, or BatchNorm within each rank",
                )
            )
        sync, total = known
        metas = [value.meta for value in sums]

        def reduce(part: Part, tensors: list[Tensor]) -> Any:
            *mine, everywhere = tensors[: len(sums) + 1]
            flat = sync.sum_tensor(torch.cat(mine).to(everywhere.dtype)) * (count / everywhere)
            return tuple(
                piece.to(meta.dtype)
                for piece, meta in zip(flat.split([len(m) for m in mine]), metas, strict=True)
            )

        size, dtype = sum(map(len, metas)), total.meta.dtype
        self._pending.append(lambda: sync.sum_tensor(self._nothing(size, dtype)))
        return self._collective(recording, "batch_norm sums over ranks", [*sums, total], reduce, metas)

    def _nothing(self, size: int, dtype: torch.dtype) -> Tensor:
        """Stands for what a rank that has failed would have sent."""
        return torch.full((size,), torch.nan, dtype=dtype, device=self._device)

    def _collective(
        self,
        recording: Recorder,
        name: str,
        values: list[Value],
        run: Callable[[Part, list[Tensor]], Any],
        metas: list[Tensor],
    ) -> list[Value]:
        """Record a collective that comes after the one before it."""

        def issue(part: Part, tensors: list[Tensor]) -> Any:
            with self._issued():
                self.agree()
                self._pending.popleft()
                return run(part, tensors)

        operands = [
            Operand(value, None) for value in [*values, *([] if self._last is None else [self._last])]
        ]
        results = recording.add(name, Recipe(operands, [None] * len(metas), issue), metas, once=True)
        self._recording, self._last = weakref.ref(recording), results[-1]
        return results

    @contextmanager
    def _issued(self) -> Iterator[None]:
        before, self._issuing = self._issuing, True
        try:
            yield
        finally:
            self._issuing = before

    def catch_up(self) -> None:
        """Issue all collectives that are recorded, so that what comes next comes after them on every rank."""
        recording = None if self._recording is None else self._recording()
        if recording is not None and self._last is not None and self._last.whole is None:
            recording.materialize([self._last])

    # -- the program's own collectives ----------------------------------------------------------------------

    def user_collective(self, recording: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a collective of the program on numbers; the tensors that it writes are full afterwards."""
        if self._issuing:
            return func(*args, **kwargs)
        real: dict[int, tuple[VirtualTensor, Tensor]] = {}

        def number(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [number(one) for one in item]
            if not isinstance(item, VirtualTensor):
                return item
            if id(item) not in real:
                # A copy: what was computed from the numbers before the write may still be read.
                real[id(item)] = item, recording.numbers(item).detach().clone()
            return real[id(item)][1]

        joins = any(isinstance(item, VirtualTensor) for item in collectives.flat([*args, *kwargs.values()]))
        self._meeting = joins  # memory may run out in what computes the numbers
        self.catch_up()
        recording.settle_writes(collectives.flat(args))
        arguments = [number(arg) for arg in args]
        named = {name: number(arg) for name, arg in kwargs.items()}
        with self._issued():
            self._meet(again=joins)
            self._meeting = False
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
        """Learn, once in a block and before its first collective, whether a rank has failed.

        Raises:
            WindowError: another rank has.
        """
        if not self._agreed:
            self._agreed = True
            self._exchange(failed)

    def _meet(self, *, again: bool) -> None:
        """Learn, before a collective of the program, whether a rank has failed.

        Args:
            again: also where this was asked in the block before.

        Raises:
            WindowError: another rank has.
        """
        if again and self._agreed and not self._over:
            self._exchange(failed=False)
        self.agree()

    def _agree_at_the_end(self, *, failed: bool = False) -> None:
        """Learn whether a rank has failed after its first collective."""
        if not self._over:
            self._over = True
            if self._last is not None:  # else there has been none since
                self._exchange(failed)

    def _exchange(self, failed: bool) -> None:
        somewhere = failed
        for group in self._groups:  # that of the gradients last, so that it learns of every other
            somewhere = group.vote(somewhere)
        self._over = self._over or somewhere
        if somewhere and not failed:
            self.heard = True
            raise WindowError(
                explain("ranks that share a batch", "another rank has failed", "see the error on that rank")
            )

    def fail(self) -> None:
        """Tell the others that this rank has failed, if it knows what they wait for.

        At the end of the block, and where the program calls a collective on the batch, all ranks have
        recorded the same ones: in those that are left it takes part with NaN, and says so after them.
        """
        with suppress(RuntimeError):  # the error that is being raised says more
            first = not self._agreed
            self.agree(failed=True)
            if (self.ending or self._meeting) and not self._over:
                while self._pending:
                    self._pending.popleft()()
                if self._meeting:
                    self._exchange(failed=True)
                self._agree_at_the_end(failed=True)
            self.settled = first or self._over

    def end(self) -> None:
        """Free what was recorded."""
        self._last = None
        self._pending.clear()

    def mean(self, parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Return the means of gradients over the ranks, as DDP defines them; those given are left alone."""
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
    """Return those with several ranks, each group once, the last of them last."""
    shared = {id(sync.group): sync for sync in reversed(list(all_ranks)) if sync.shared}
    return list(reversed(shared.values()))
