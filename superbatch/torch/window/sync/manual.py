"""Ranks of an explicit process group, each with a replica of the unwrapped models.

The gradients of a window are summed once, by bucketed all-reduces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from superbatch.errors import RankError
from superbatch.results.ranks import RanksReport

from ...memory.out_of_memory import out_of_memory
from ..norm import finite_norm
from .all_reduce import Exchanges, all_reduced, kind
from .faults import HEADER, Position, RankMessage, error_of, in_order
from .frame_sum import FrameSum

T = TypeVar("T")


class Manual:
    """The ranks of a process group, each with a replica of the models (a `Sync`).

    Args:
        group: the process group.
        device: device of the tensors in which numbers are exchanged.
    """

    has_collective_forwards = False

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._position = Position()

    @property
    def count(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        """Index of this rank."""
        return dist.get_rank(self.group)

    @property
    def shared(self) -> bool:
        """True if there are several ranks."""
        return self.count > 1

    @property
    def report(self) -> RanksReport:
        """Report on the ranks that share a window."""
        return RanksReport("all_reduce", self.count, "window")

    @property
    def reduces(self) -> bool:
        """True: only the window reduces the gradients of unwrapped models."""
        return True

    def no_sync(self) -> ExitStack:
        """Return an empty context: the backward of unwrapped models does not communicate."""
        return ExitStack()

    def reshard(self) -> None:
        """No-op: parameters are not sharded."""

    def gathered(self) -> AbstractContextManager[None]:
        """Return an empty context: parameters are not sharded."""
        return nullcontext()

    def begin_microbatch(self, *, last: bool, zero_weight: bool = False) -> None:
        """No-op: forwards do not communicate."""

    def zero_backward(self, *, again: bool) -> None:
        """No-op: backwards do not communicate."""

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Return True: no rank waits for another one."""
        return True

    def flush(self) -> None:
        """No-op: all sums are in ``.grad``."""

    def scale(self, factor: float) -> None:
        """No-op: all sums are in ``.grad``."""

    def broadcast_buffers(self) -> None:
        """No-op: each rank has its own buffers."""

    def begin_window(self, updates: int, numbers: int) -> None:
        """Begin a window; see `Sync.begin_window`."""
        self._position.begin(updates, HEADER + numbers)

    def sum_numbers(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums over the ranks, in float64 (exact for whole numbers below 2**53)."""
        own = list(numbers)
        if not self.shared:
            return own
        frame = self._position.frame(own)
        if self._position.size and len(frame) > self._position.size:
            self._exchange(self._position.frame([]))  # a rank that has failed can answer only this size
        return self._exchange(frame)[HEADER : HEADER + len(own)]

    def fail(self, failed: str) -> None:
        """Report to the other ranks that this rank has left the window; see `Sync.fail`."""
        here = self._position
        if not self.shared or here.lost:
            return
        try:
            total = FrameSum(self._tensor(here.frame([], failed=True)), self.group)
            while not total.is_completed():  # Ctrl-C can end this wait, but not one in C++
                time.sleep(0.001)
            total.numbers()
            self._exchange_messages(here.message(failed))
        except RuntimeError as error:  # not raised, because this rank's own error is raised
            if not here.lost:
                here.record_lost(error)

    def record_lost(self, error: BaseException) -> RankError:
        """Record that the other ranks cannot be reached, and return the error for it."""
        return self._position.record_lost(error)

    def first(self, number: int) -> int:
        """Return rank 0's number (below 2**53) on every rank."""
        return int(self.sum_numbers([number if self.index == 0 else 0])[0])

    def sum_before(self, number: int) -> int:
        """Return the sum of the numbers on the ranks before this one."""
        return int(sum(self._of_each(number)[: self.index]))

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return int(max(self._of_each(number)))

    def vote(self, raised: bool) -> bool:
        """Return True on every rank if `raised` is True on any rank."""
        return bool(self.sum_numbers([raised])[0])

    def microbatch_counts(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the number of micro-batches of this rank, because forwards do not communicate."""
        return [microbatches]

    def agree_size(self, samples: int) -> int:
        """Return the argument, because each rank may use its own size."""
        return samples

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor's sum over the ranks (in place)."""
        if self.shared:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, stacked in the order of the ranks."""
        rows = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(rows, tensor, group=self.group)
        return torch.stack(rows)

    def gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in their order; a message must be picklable."""
        if not self.shared:
            return [message]
        self._exchange_header()
        messages: list[Any] = [None] * self.count
        self._reach(dist.all_gather_object, messages, message, group=self.group)
        return messages

    def count_announced(self, parameters: Sequence[Tensor]) -> int:
        """Return the number of numbers that `announce` returns."""
        return len(parameters)

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return the `kind` of each gradient: missing, dense or sparse."""
        return [kind(gradient) for gradient in gradients]

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Return the sums of the gradients over the ranks, with None for a gradient that no rank has."""
        if not self.shared:
            return gradients
        kind_sums = self.sum_numbers(map(kind, gradients)) if announced is None else announced
        with self._lost_on_error(exchanges := Exchanges(self.group)):
            return all_reduced(gradients, parameters, zeros, kind_sums, exchanges)

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the 2-norm, and True if every element is finite: the same on every rank."""
        return finite_norm(gradients)

    @contextmanager
    def _lost_on_error(self, exchanges: Exchanges | None = None) -> Iterator[None]:
        """Return a context that, after an error inside an exchange of tensors, records that ranks are lost.

        Args:
            exchanges: the exchanges of the block; None: any error may come from inside an exchange.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankError) and (exchanges is None or exchanges.inside):
                self._position.record_lost(error)
            raise

    def _exchange_header(self) -> None:
        """Exchange an empty frame, before an exchange that a failed rank could not answer."""
        if self._position.size:
            self._exchange(self._position.frame([]))

    def _exchange(self, frame: list[float]) -> list[float]:
        """Return the sum of the frames of all ranks; raise `RankError` if one failed, differs or is lost."""
        here = self._position
        if here.lost:
            raise RankError(here.lost)
        found = self._reach(lambda: FrameSum(self._tensor(frame), self.group).numbers())
        # The sum suffices, and needs no second exchange for the frame of each rank.
        if not in_order(found, dist.get_world_size(self.group)):
            raise error_of(self._exchange_messages(here.message(None)))
        return found

    def _exchange_messages(self, own: RankMessage) -> list[RankMessage]:
        """Return the messages of all ranks, after a frame that shows a failure; all ranks call this."""
        every: list[Any] = [None] * dist.get_world_size(self.group)
        self._reach(dist.all_gather_object, every, own, group=self.group)
        # All ranks continue with the same window number, so that a difference is reported only once.
        self._position.opened = max(each.opened for each in every)
        return every

    def _tensor(self, numbers: list[float]) -> Tensor:
        dtype = torch.float64 if self.device.type != "mps" else torch.float32
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def _reach(self, exchange: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call an exchange and return its result; raise `RankError` if another rank cannot be reached."""
        try:
            return exchange(*args, **kwargs)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise self.record_lost(error) from error

    def _of_each(self, number: int) -> list[float]:
        return self.sum_numbers([number if rank == self.index else 0 for rank in range(self.count)])
