"""Protocol of the ranks that share a window, used by windows, checks and cached gradients.

`local`, `manual`, `ddp` and `sharded` implement it; `find` chooses one for the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, Protocol

from torch import Tensor

from superbatch.errors import RankError
from superbatch.results.ranks import RanksReport

SyncOption = Literal["auto", "window", "microbatch", "all_reduce"] | None
CoupledSync = Literal["auto", "window", "all_reduce"] | None


class Sync(Protocol):
    """Ranks that share a window. Every rank must make the same calls in the same order."""

    # -- the ranks -----------------------------------------------------------------------------------------

    @property
    def group(self) -> Any:
        """Process group; None for this process alone."""
        ...

    @property
    def count(self) -> int:
        """Number of ranks."""
        ...

    @property
    def index(self) -> int:
        """Index of this rank."""
        ...

    @property
    def shared(self) -> bool:
        """True if there are several ranks."""
        ...

    @property
    def report(self) -> RanksReport:
        """Report on the ranks that share a window, and the memory that this takes."""
        ...

    @property
    def has_collective_forwards(self) -> bool:
        """True if a forward or a backward under `no_sync` communicates.

        All ranks then run the same number of micro-batches (`microbatch_counts`, `agree_size`). After the
        last one they vote whether a rank has failed (`lockstep`). They also take part in each other's checks
        (`checks.announced_forwards`).
        """
        ...

    @property
    def reduces(self) -> bool:
        """False while the user's program has switched off the reduction of gradients (DDP's ``no_sync``)."""
        ...

    # -- the models ----------------------------------------------------------------------------------------

    def no_sync(self) -> ExitStack:
        """Return a context for the micro-batches of a window; only sharded models communicate in it."""
        ...

    def reshard(self) -> None:
        """Register the sharded parameters in the modules, after a forward has left gathered ones."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context, inside of `no_sync`, in which this rank has all parameters in full."""
        ...

    def begin_microbatch(self, *, last: bool, zero_weight: bool = False) -> None:
        """Prepare for the forward and backward of a micro-batch.

        Args:
            last: whether it is the last micro-batch of the window.
            zero_weight: whether its weight may be 0, so that it may have no loss to run backward on.
        """
        ...

    def zero_backward(self, *, again: bool) -> None:
        """Run a backward of zeros for a micro-batch of weight 0, because other ranks wait for a backward.

        Args:
            again: whether another backward of the same micro-batch follows.

        Raises:
            InputError: the forward of the micro-batch did not run the models.
        """
        ...

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Take part in the rest of a turn after this rank has failed, because other ranks wait for it.

        Args:
            forwards: functions that run a forward and return a loss, tried until one runs the models.
            backward: whether the turn has a backward.

        Returns:
            False if none ran the models; the other ranks then wait until their timeout.
        """
        ...

    def flush(self) -> None:
        """Reduce all sums so far into ``.grad``."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply sums that are kept outside of ``.grad``."""
        ...

    def broadcast_buffers(self) -> None:
        """Send the buffers of rank 0 to all ranks, if the models' wrapper does so before a forward."""
        ...

    # -- failures ------------------------------------------------------------------------------------------

    def begin_window(self, updates: int, numbers: int) -> None:
        """Begin a window. Each exchange of numbers in it also carries the window's number and a failure flag.

        Args:
            updates: number of updates that this rank has made.
            numbers: most numbers that one exchange carries; more take two exchanges.
        """
        ...

    def fail(self, failed: str) -> None:
        """Report to the other ranks, at their next exchange of numbers, that this rank has left the window.

        They raise `RankError` there. This method never raises, even if they cannot be reached.

        Args:
            failed: description of the failure, as the rest of a sentence that begins with "Rank 1".
        """
        ...

    def record_lost(self, error: BaseException) -> RankError:
        """Record that the other ranks cannot be reached, and return the error for it."""
        ...

    # -- numbers: each method raises RankError if a rank has failed, or is at another window -----------------

    def sum_numbers(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums over the ranks, in float64 (exact for whole numbers below 2**53)."""
        ...

    def first(self, number: int) -> int:
        """Return rank 0's number (below 2**53) on every rank."""
        ...

    def sum_before(self, number: int) -> int:
        """Return the sum of the numbers on the ranks before this one."""
        ...

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        ...

    def vote(self, raised: bool) -> bool:
        """Return True on every rank if `raised` is True on any rank."""
        ...

    def microbatch_counts(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the number of micro-batches of each rank, or only this rank's if no forward communicates.

        Args:
            microbatches: number of micro-batches of this rank.
            samples: number of samples of each of them; None: they cannot be cut differently.
        """
        ...

    def agree_size(self, samples: int) -> int:
        """Return the micro-batch size to use after this rank has found `samples`."""
        ...

    # -- tensors -------------------------------------------------------------------------------------------

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor's sum over the ranks (in place)."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, stacked in the order of the ranks."""
        ...

    def gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in their order; a message must be picklable."""
        ...

    def count_announced(self, parameters: Sequence[Tensor]) -> int:
        """Return the largest number of numbers that `announce` returns in a window."""
        ...

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return numbers for the caller to sum over the ranks with its own; `reduce` needs the sums.

        Args:
            gradients: as for `reduce`; the number of numbers does not depend on them.
            parameters: as for `reduce`.
        """
        ...

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Return the sum of the gradients over the ranks, or this rank's shards of it.

        Args:
            gradients: one for each parameter, of this rank's micro-batches. A gradient that only some ranks
                have counts as zero on the others. One that no rank has stays None, so that the optimizer
                skips its parameter, as with the large batch.
            parameters: the parameters, in the same order.
            zeros: ``zeros(i)`` returns a gradient of zeros for parameter ``i``.
            announced: the numbers of `announce`, summed over the ranks; None: they are exchanged here.
        """
        ...

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the 2-norm of the whole reduced gradient, and True if all of its elements are finite.

        Args:
            gradients: result of `reduce`: the whole gradient, or this rank's shards of it.
        """
        ...
