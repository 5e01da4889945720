"""Detection of failures on other ranks, by a header in each exchange of numbers.

Each exchange of numbers is one frame: a flag for a failure, the number of the rank's window, the number of
its updates, then the numbers. All frames of an accumulator have the same size, so a rank that has left its
window can answer any exchange of the others. If the sum of the frames shows a failure or a difference, the
ranks then exchange texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from superbatch.errors import RankError

from ...memory.out_of_memory import out_of_memory

HEADER = 5  # numbers in the header of a frame
_WRAP = 1 << 20  # sums of squares of smaller numbers over thousands of ranks are exact in float64
_MOST_TEXT = 500  # characters of another rank's error
_OF_TRANSPORT = re.compile(
    r"gloo|NCCL|Connection (closed|reset) by peer|Timed out waiting|[Pp]rocess ?[Gg]roup"
)


class RankMessage(NamedTuple):
    """Message of one rank to the others.

    Attributes:
        rank: its index.
        failed: description of its failure, as the rest of a sentence that begins with "Rank 1"; None: it has
            not failed.
        opened: number of windows that it has begun.
        updates: number of updates that it has made.
    """

    rank: int
    failed: str | None
    opened: int
    updates: int


class Position:
    """Number of this rank's window and update, for comparison with the other ranks.

    Attributes:
        size: numbers in a frame; 0 before the first window, when frames have no fixed size.
        opened: number of windows that this rank has begun.
        updates: number of updates that it has made.
        lost: why the other ranks can no longer be reached; empty if they can.
    """

    def __init__(self) -> None:
        self.size = self.opened = self.updates = 0
        self.lost = ""

    def begin(self, updates: int, size: int) -> None:
        """Begin a window."""
        self.opened, self.updates, self.size = self.opened + 1, updates, size

    def frame(self, numbers: Sequence[float], *, failed: bool = False) -> list[float]:
        """Return the frame of some numbers: header, numbers, and zeros up to the size of all frames."""
        opened, updates = self.opened % _WRAP, self.updates % _WRAP
        framed = [failed, opened, opened * opened, updates, updates * updates, *numbers]
        return framed + [0.0] * (self.size - len(framed))

    def message(self, failed: str | None) -> RankMessage:
        """Return the message of this rank to the others."""
        return RankMessage(dist.get_rank(), failed, self.opened, self.updates)

    def record_lost(self, error: BaseException) -> RankError:
        """Record that the other ranks cannot be reached, and return the error for it."""
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        self.lost = (
            f"Another rank has ended, or has not answered within the process group's timeout ({line[:200]}). "
            "Start all ranks again, from a checkpoint if there is one. Pass timeout= to init_process_group() "
            "if a rank needs more time."
        )
        return RankError(self.lost)


def in_order(frame: Sequence[float], ranks: int) -> bool:
    """Return whether the sum of the frames of all ranks shows no failure and no difference.

    Args:
        frame: the sum.
        ranks: number of ranks.

    Examples:
        >>> here = Position()
        >>> here.begin(updates=3, size=8)
        >>> in_order([2 * number for number in here.frame([])], 2)
        True
        >>> in_order([sum(each) for each in zip(here.frame([]), here.frame([], failed=True))], 2)
        False
    """
    failed, opened, opened_squares, updates, updates_squares = frame[:HEADER]
    if failed:
        return False
    return opened * opened == ranks * opened_squares and updates * updates == ranks * updates_squares


def error_of(every: Sequence[RankMessage]) -> RankError:
    """Return the error for the messages of the ranks.

    Args:
        every: the message of each rank, of which one has failed or differs.

    Examples:
        >>> first = RankMessage(0, None, 3, 2)
        >>> print(error_of([first, RankMessage(1, "failed in micro-batch 1 (KeyError: 'y')", 3, 2)]))
        Rank 1 failed in micro-batch 1 (KeyError: 'y'), so no rank makes this update, and ...
        >>> print(error_of([first, RankMessage(1, None, 4, 2)]))
        Rank 0 is at window 3, but rank 1 is at window 4. Call the accumulator equally often on each rank...
        >>> print(error_of([first, RankMessage(1, None, 3, 1)]))
        Rank 0 has made 2 updates, but rank 1 has made 1: an update failed on one rank after others had ...
    """
    failed = [each for each in every if each.failed is not None]
    if failed:
        more = f", as did {len(failed) - 1} more" if failed[1:] else ""
        return RankError(
            f"Rank {failed[0].rank} {failed[0].failed}{more}, so no rank makes this update, and everything "
            "is as before it. Correct the error there; then each rank can continue with its next batch."
        )
    first = every[0]
    # Before `updates`, which differ then too.
    other = next((each for each in every if each.opened != first.opened), None)
    if other is not None:
        return RankError(
            f"Rank {first.rank} is at window {first.opened}, but rank {other.rank} is at window "
            f"{other.opened}. Call the accumulator equally often on each rank, also after a rank has caught "
            "an error."
        )
    other = next((each for each in every if each.updates != first.updates), first)
    return RankError(
        f"Rank {first.rank} has made {first.updates} updates, but rank {other.rank} has made "
        f"{other.updates}: an update failed on one rank after others had made it, or only some ranks have "
        "loaded a state. Load the same checkpoint on every rank."
    )


def is_transport(error: BaseException | None) -> bool:
    """Return whether an error means that another rank cannot be reached.

    Examples:
        >>> is_transport(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
        True
        >>> is_transport(RuntimeError("shapes cannot be multiplied"))
        False
    """
    if not isinstance(error, RuntimeError) or isinstance(error, RankError) or out_of_memory(error):
        return False
    return isinstance(error, _errors_of_transport()) or _OF_TRANSPORT.search(str(error)) is not None


def text_of(error: BaseException) -> str:
    """Return the type and the first line of an error, for other ranks.

    Examples:
        >>> text_of(ValueError("no such label")), text_of(KeyboardInterrupt())
        ('ValueError: no such label', 'KeyboardInterrupt')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_MOST_TEXT]}" if lines else type(error).__name__


def _errors_of_transport() -> tuple[Any, ...]:
    names = ("DistBackendError", "DistNetworkError")
    return tuple(getattr(torch.distributed, name) for name in names if hasattr(torch.distributed, name))
