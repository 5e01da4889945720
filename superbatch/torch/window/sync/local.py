"""A single process: a window without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor

from superbatch.errors import RankError
from superbatch.results.ranks import RanksReport

from ..norm import finite_norm


class Local:
    """A single process, which does not communicate (a `Sync`).

    Examples:
        >>> Local().sum_numbers([1, 2.5]), Local().vote(True), Local().shared
        ([1, 2.5], True, False)
    """

    group: Any = None
    count, index = 1, 0
    shared, has_collective_forwards, reduces = False, False, True
    report = RanksReport("alone", 1, "never")

    def no_sync(self) -> ExitStack:
        """Return an empty context."""
        return ExitStack()

    def reshard(self) -> None:
        """No-op: parameters are not sharded."""

    def gathered(self) -> AbstractContextManager[None]:
        """Return an empty context: parameters are not sharded."""
        return nullcontext()

    def begin_microbatch(self, *, last: bool, zero_weight: bool = False) -> None:
        """No-op: there is no other rank."""

    def zero_backward(self, *, again: bool) -> None:
        """No-op: there is no other rank."""

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Return True: there is no other rank."""
        return True

    def flush(self) -> None:
        """No-op: all sums are in ``.grad``."""

    def scale(self, factor: float) -> None:
        """No-op: all sums are in ``.grad``."""

    def broadcast_buffers(self) -> None:
        """No-op: there is no other rank."""

    def begin_window(self, updates: int, numbers: int) -> None:
        """No-op: there is no other rank."""

    def fail(self, failed: str) -> None:
        """No-op: there is no other rank."""

    def record_lost(self, error: BaseException) -> RankError:
        """Return the error for a rank that cannot be reached; never called, without other ranks."""
        return RankError(str(error))

    def sum_numbers(self, numbers: Iterable[float]) -> list[float]:
        """Return the numbers."""
        return list(numbers)

    def first(self, number: int) -> int:
        """Return the number."""
        return number

    def sum_before(self, number: int) -> int:
        """Return 0: no rank comes before this one."""
        return 0

    def max(self, number: int) -> int:
        """Return the number."""
        return number

    def vote(self, raised: bool) -> bool:
        """Return the vote of this process."""
        return raised

    def microbatch_counts(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the number of micro-batches in a list."""
        return [microbatches]

    def agree_size(self, samples: int) -> int:
        """Return the size."""
        return samples

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensor with a first dimension of one."""
        return tensor[None]

    def gather(self, message: Any) -> list[Any]:
        """Return the message in a list."""
        return [message]

    def count_announced(self, parameters: Sequence[Tensor]) -> int:
        """Return 0, because `announce` returns no numbers."""
        return 0

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return an empty list."""
        return []

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients."""
        return gradients

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the 2-norm, and True if every element is finite."""
        return finite_norm(gradients)
