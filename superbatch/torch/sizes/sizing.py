"""Samples per micro-batch of a window: set by the user, or found (`auto`).

An update does not depend on it; memory and time do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from superbatch.batch.split import TokenBudget
from superbatch.errors import InputError

if TYPE_CHECKING:
    from superbatch.results.memory import MemoryReport


class Sizing(Protocol):
    """Sizes that a window asks for between its micro-batches, and its reports of them.

    Attributes:
        measures: whether `measure` measures, so that `rest` may change the sizes.
        learns: whether `closed` has anything to note.
    """

    measures: bool
    learns: bool

    def rest(self, left: int) -> list[int] | None:
        """Return, after a micro-batch, other sizes for the samples that are left; None: as planned."""
        ...

    def measure(self, samples: int) -> AbstractContextManager[None]:
        """Return a context for the forward and backward of one micro-batch."""
        ...

    def failed(self, samples: int) -> int:
        """Note that a micro-batch ran out of memory; return the most samples to continue with, 0 for none."""
        ...

    def closed(self, *, made: bool) -> None:
        """Note that the window is over, and whether it made its update."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes found so far."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sizes found before."""
        ...

    def report(self) -> MemoryReport | None:
        """Return a readable report on the sizes found; None without any."""
        ...


class Smaller:
    """The largest size that may be used for a while after memory ran out.

    Other users of the memory may have caused the failure, so larger sizes are tried again; the wait doubles
    with each window that fails, so that a size that never fits is hardly ever tried.

    Attributes:
        most: samples of a micro-batch; None: no limit.

    Examples:
        >>> smaller = Smaller()
        >>> smaller.failed(64), smaller.failed(32), smaller.most
        (32, 16, 16)
    """

    FIRST_WAIT = 50

    def __init__(self) -> None:
        self.most: int | None = None
        self._wait = self.FIRST_WAIT
        self._until = 0
        self._failed = False  # in this window

    def failed(self, samples: int) -> int:
        """Return half the samples, rounded up; 0 if there was only one."""
        # One sample cannot be halved.
        if samples == 1:
            return 0
        half = (samples + 1) // 2
        self.most = half if self.most is None else min(self.most, half)
        if not self._failed:  # further halvings in one window search for a size that fits
            self._until, self._wait, self._failed = self._wait, 2 * self._wait, True
        return self.most

    def closed(self, *, made: bool) -> None:
        """Count the updates until larger sizes are tried again."""
        self._failed = False
        # A window that made no update may be the same one again.
        if self.most is not None and made:
            self._until -= 1
            if self._until <= 0:
                self.most = None

    def state_dict(self) -> dict[str, Any]:
        """Return for how long which size is the largest."""
        return {"most": self.most, "wait": self._wait, "until": self._until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        most, wait, until = state["most"], state["wait"], state["until"]
        # Before anything is set: the state may come from a damaged file.
        if not all(isinstance(number, int) for number in (1 if most is None else most, wait, until)):
            raise TypeError("no numbers of samples and updates")
        self.most, self._wait, self._until = most, wait, until


class Fixed:
    """The size that the user set; a smaller one for a while after memory ran out.

    Args:
        size: most samples of a micro-batch, a `TokenBudget`, or None for a batch in one piece.

    Examples:
        >>> sizing = Fixed(64)
        >>> sizing.failed(64), sizing.most
        (32, 32)
    """

    measures = False

    def __init__(self, size: int | TokenBudget | None) -> None:
        self.size = size
        self.learns = False  # until memory runs out
        self._smaller = Smaller()

    @property
    def most(self) -> int | None:
        """Samples of a micro-batch since memory ran out, else None."""
        return self._smaller.most

    def rest(self, left: int) -> list[int] | None:
        """Return None: as planned."""
        return None

    def measure(self, samples: int) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def failed(self, samples: int) -> int:
        """Continue with smaller micro-batches (see `Smaller`)."""
        most = self._smaller.failed(samples)
        self.learns = self.most is not None
        return most

    def closed(self, *, made: bool) -> None:
        """Count the updates until the size that the user set is tried again."""
        self._smaller.closed(made=made)
        self.learns = self.most is not None

    def state_dict(self) -> dict[str, Any]:
        """Return for how long which smaller size is used."""
        return self._smaller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the smaller size."""
        self._smaller.load_state_dict(state)
        self.learns = self.most is not None

    def twin(self) -> Fixed:
        """Return another one of the same size."""
        return Fixed(self.size)

    def report(self) -> MemoryReport | None:
        """Return None: nothing was measured."""
        return None


def sizing_state(sizing: Sizing, of_windows: Sizing) -> dict[str, Any]:
    """Return the saved state of an accumulator's two ways to choose sizes.

    Args:
        sizing: of batches.
        of_windows: of windows, whose micro-batches are taken as they are while memory lasts.
    """
    # By class, so that a run may resume with another way to choose sizes.
    return {type(sizing).__name__: sizing.state_dict(), "of windows": of_windows.state_dict()}


def load_sizing(state: Mapping[str, Any], sizing: Sizing) -> Fixed:
    """Resume with the sizes of a saved state; return those of windows.

    Args:
        state: of an accumulator.
        sizing: of batches.

    Raises:
        InputError: it is no such state; the sizes are as before.
    """
    saved, before = state.get("sizing", {}), sizing.state_dict()
    # Of the same moment too: a window that was saved before memory ran out is not to be cut smaller now.
    of_windows = Fixed(None)
    try:
        if "of windows" in saved:
            of_windows.load_state_dict(saved["of windows"])
        if type(sizing).__name__ in saved:  # a run may resume with another way to choose sizes
            sizing.load_state_dict(saved[type(sizing).__name__])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # After an error both are as before.
        sizing.load_state_dict(before)
        raise InputError(
            f"The state has sizes of micro-batches that cannot be read ({type(error).__name__}: {error}). "
            "Pass what Accumulator.state_dict() of this version returned."
        ) from None
    return of_windows


def agreed(planned: Sequence[int], samples: int, agree: Callable[[int], int]) -> tuple[int, int]:
    """Return the sizes that all ranks use: of the first micro-batch, which may be a trial, and of the others.

    A rank whose whole batch is one micro-batch does not limit the others.

    Args:
        planned: that this rank has found.
        samples: of its batch.
        agree: returns the least of the ranks' sizes.

    Examples:
        >>> least = lambda mine: min(mine, 3)  # another rank has found 3
        >>> agreed([2, 4, 4], 10, least), agreed([1], 1, least)
        ((2, 3), (1, 1))
    """
    first, *others = planned
    # A near-equal split has two sizes, which differ by 1; the larger one is agreed on.
    mine = (first, max(others or [first]))
    one, other = (min(agree(size if size < samples else _ANY), samples) for size in mine)
    return one, other


# Larger than any batch, so that the least of all ranks is another rank's.
_ANY = 1 << 40
