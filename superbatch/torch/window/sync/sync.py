"""Protocol of the ranks that share a window: all that a window, a check or a cached gradient asks of them.

`local`, `manual`, `ddp` and `sharded` implement it; `find` picks one for some models.
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
        """Number of this rank."""
        ...

    @property
    def shared(self) -> bool:
        """True if there are several ranks."""
        ...

    @property
    def report(self) -> RanksReport:
        """Report on the ranks that share a window, and what that costs."""
        ...

    @property
    def in_step(self) -> bool:
        """True if a forward or a backward under `no_sync` communicates.

        All ranks then run as many micro-batches (`turns`, `agree_size`), hear after the last one whether one
        has failed (`lockstep`), and join in each other's evaluations of a check (`checks.in_step`).
        """
        ...

    @property
    def reduces(self) -> bool:
        """False while the program itself has put off the reduction of gradients, as by DDP's ``no_sync``."""
        ...

    # -- the models ----------------------------------------------------------------------------------------

    def no_sync(self) -> ExitStack:
        """Return a context in which no backward reduces gradients."""
        ...

    def reshard(self) -> None:
        """Give the models the parameters that optimizers update, where a forward has left others."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context, inside of `no_sync`, in which this rank has all parameters whole."""
        ...

    def turn(self, *, last: bool, idle: bool = False) -> None:
        """Prepare for the forward and backward of a micro-batch.

        Args:
            last: it is the window's last one.
            idle: it may have no weight, and so no loss to run a backward from.
        """
        ...

    def idle_backward(self, *, again: bool) -> None:
        """Run a backward that adds nothing, where other ranks wait for that of a micro-batch without weight.

        Args:
            again: another backward of the same micro-batch follows.

        Raises:
            InputError: the micro-batch has not gone through the models.
        """
        ...

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Take part in the rest of a turn in which this rank has failed, and other ranks wait for it.

        Args:
            forwards: ways to run a forward, tried until one comes through the models; each returns a loss.
            backward: the turn has a backward.

        Returns:
            False if none did, so that the other ranks wait until their timeout.
        """
        ...

    def flush(self) -> None:
        """Bring all that was summed so far into ``.grad``."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply what was summed beside ``.grad``."""
        ...

    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of rank 0, where the models' wrapper does so before a forward."""
        ...

    # -- failures ------------------------------------------------------------------------------------------

    def begin_window(self, updates: int, numbers: int) -> None:
        """Begin a window: each exchange of numbers carries along which one, and whether a rank has failed.

        Args:
            updates: that this rank has made.
            numbers: the most that an exchange of the window has; a longer one takes two.
        """
        ...

    def fail(self, failed: str) -> None:
        """Tell the other ranks at their next exchange of numbers that this rank has left the window.

        They raise `RankError` there. Nothing is raised here, not even where they cannot be reached.

        Args:
            failed: how, as the rest of a sentence that begins with the rank.
        """
        ...

    def lose(self, error: BaseException) -> RankError:
        """Note that the other ranks cannot be reached, and return the error for it.

        Args:
            error: of the exchange that failed.
        """
        ...

    # -- numbers: each of them raises RankError where a rank has failed, or is at another window -------------

    def sum_numbers(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums over the ranks, in float64 (exact for whole numbers below 2**53).

        Raises:
            RankError: a rank has failed, is at another window or has made other updates, or has ended.
        """
        ...

    def first(self, number: int) -> int:
        """Return rank 0's number (below 2**53) on every rank."""
        ...

    def before(self, number: int) -> int:
        """Return the sum of the numbers on the ranks before this one."""
        ...

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        ...

    def vote(self, raised: bool) -> bool:
        """Return True on every rank if any rank has raised its hand."""
        ...

    def turns(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the micro-batches of each rank, where their forwards communicate; else of this one alone.

        Args:
            microbatches: the number that the window has as it was cut.
            samples: of each of them, which it can be cut into; None: it cannot be cut differently.
        """
        ...

    def agree_size(self, samples: int) -> int:
        """Return the size of micro-batches to use where this rank has found `samples`."""
        ...

    # -- tensors -------------------------------------------------------------------------------------------

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor's sum over the ranks (in place)."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, stacked in the order of the ranks."""
        ...

    def gather(self, message: Any) -> list[Any]:
        """Return a message of each rank, any object that can be pickled, in the order of the ranks."""
        ...

    def count_announced(self, parameters: Sequence[Tensor]) -> int:
        """Return the number of numbers that `announce` returns, at most, in a window."""
        ...

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return the numbers whose sums over the ranks `reduce` needs, to be exchanged together with others.

        Args:
            gradients: as for `reduce`; how many numbers there are does not depend on them.
            parameters: likewise.
        """
        ...

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients that this rank's optimizer needs of the sum over the ranks.

        Args:
            gradients: one for each parameter, of this rank's micro-batches. A gradient that only some ranks
                have counts as zero on the others; one that no rank has stays None, so that the optimizer
                leaves its parameter alone as it would for the large batch.
            parameters: in the same order.
            zeros: ``zeros(i)`` makes an empty gradient ``i``.
            announced: sums over the ranks of what `announce` returned; None: they are exchanged here.
        """
        ...

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the 2-norm of the whole reduced gradient, and True if every element of it is finite.

        Args:
            gradients: as `reduce` returned them: all of the gradient, or this rank's shards of it.
        """
        ...
