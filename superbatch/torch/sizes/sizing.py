"""Number of samples per micro-batch: set by the user (`Fixed`), or found (`auto.AutoSize`).

Memory and time depend on this number; an update does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from superbatch.batch.split import TokenBudget
from superbatch.errors import InputError

if TYPE_CHECKING:
    from superbatch.results.memory import MemoryReport


class Sizing:
    """Choice of the sizes of micro-batches, which a window calls between its micro-batches.

    This base class measures nothing. It only halves the size after memory ran out: another process may have
    caused the failure, so larger sizes are tried again later. The number of updates until then doubles with
    each window that fails, so that a size that never fits is rarely tried.

    Attributes:
        measures: micro-batches are measured, so `sizes_of_rest` may change the sizes.
        most_samples: largest number of samples of a micro-batch after memory ran out; None: no such limit.
        learns: `closed` must be called at the end of the window. It is an attribute, not a property, because
            each window reads it.

    Examples:
        >>> sizing = Sizing()
        >>> sizing.failed(64), sizing.failed(32), sizing.most_samples
        (32, 16, 16)
    """

    FIRST_WAIT = 50  # updates until larger sizes are tried again, after the first failure
    measures = False

    def __init__(self) -> None:
        self.most_samples: int | None = None
        self.learns = self.measures
        self._wait = self.FIRST_WAIT
        self._until = 0
        self._failed = False  # in this window

    def sizes_of_rest(self, left: int) -> list[int] | None:
        """Return new sizes for the remaining samples after a micro-batch; None: as planned."""
        return None

    def measure(self, samples: int) -> AbstractContextManager[None]:
        """Return a context for the forward and backward of one micro-batch."""
        return nullcontext()

    def failed(self, samples: int) -> int:
        """Record that a micro-batch ran out of memory; return the largest size to continue with, or 0."""
        # A single sample cannot be halved.
        if samples == 1:
            return 0
        half = (samples + 1) // 2
        self.most_samples, self.learns = (
            half if self.most_samples is None else min(self.most_samples, half),
            True,
        )
        if not self._failed:  # once per window: further halvings belong to the search for a size that fits
            self._until, self._wait, self._failed = self._wait, 2 * self._wait, True
        return self.most_samples

    def closed(self, *, made: bool) -> None:
        """Record the end of the window, and whether it made its update."""
        self._failed = False
        # Only updates count: a window without an update may be repeated.
        if self.most_samples is not None and made:
            self._until -= 1
            if self._until <= 0:
                self.most_samples, self.learns = None, self.measures

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes found so far; here the limit, and the number of updates for which it holds."""
        return {"most": self.most_samples, "wait": self._wait, "until": self._until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the sizes of `state_dict`."""
        most, wait, until = state["most"], state["wait"], state["until"]
        # Validated before anything is set: the state may come from a damaged file.
        if not all(isinstance(number, int) for number in (1 if most is None else most, wait, until)):
            raise TypeError("numbers of samples and updates are not integers")
        self.most_samples, self._wait, self._until = most, wait, until
        self.learns = self.measures or most is not None

    def report(self) -> MemoryReport | None:
        """Return a report on the sizes found; None without measurements."""
        return None


class Fixed(Sizing):
    """Size that the user has set; temporarily a smaller one after memory ran out.

    Args:
        size: largest number of samples of a micro-batch, a `TokenBudget`, or None: the batch is not split.

    Examples:
        >>> sizing = Fixed(64)
        >>> sizing.failed(64), sizing.most_samples
        (32, 32)
    """

    def __init__(self, size: int | TokenBudget | None) -> None:
        super().__init__()
        self.size = size

    def fresh_copy(self) -> Fixed:
        """Return a new object with the same size."""
        return Fixed(self.size)


def sizing_state(sizing: Sizing, of_windows: Sizing) -> dict[str, Any]:
    """Return the state of an accumulator's two sizings, to save it.

    Args:
        sizing: sizes of a batch's micro-batches.
        of_windows: sizes for windows of given micro-batches, which are cut only after memory ran out.
    """
    # Keyed by class, so that a run may resume with another kind of sizing.
    return {type(sizing).__name__: sizing.state_dict(), "of windows": of_windows.state_dict()}


def load_sizing(state: Mapping[str, Any], sizing: Sizing) -> Fixed:
    """Load the saved sizes into a sizing; return the sizing for windows of given micro-batches.

    Raises:
        InputError: the sizes in the state cannot be read; `sizing` is unchanged.
    """
    saved, before = state.get("sizing", {}), sizing.state_dict()
    # A new one: a window that was saved before memory ran out must not be cut smaller now.
    of_windows = Fixed(None)
    try:
        if "of windows" in saved:
            of_windows.load_state_dict(saved["of windows"])
        if type(sizing).__name__ in saved:  # missing if the run resumes with another kind
            sizing.load_state_dict(saved[type(sizing).__name__])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # After an error both are as before.
        sizing.load_state_dict(before)
        raise InputError(
            f"The micro-batch sizes in the saved state cannot be read ({type(error).__name__}: {error}). "
            "Pass what Accumulator.state_dict() of this version returned."
        ) from None
    return of_windows


def agreed(planned: Sequence[int], samples: int, agree: Callable[[int], int]) -> tuple[int, int]:
    """Return the sizes on which all ranks agree: of the first micro-batch, and of the others.

    The first micro-batch may be a trial of another size. A rank whose batch fits in one micro-batch does not
    limit the others.

    Args:
        planned: sizes that this rank has found.
        samples: number of samples of its batch.
        agree: function that returns the smallest size of all ranks.

    Examples:
        >>> least = lambda mine: min(mine, 3)  # another rank has found 3
        >>> agreed([2, 4, 4], 10, least), agreed([1], 1, least)
        ((2, 3), (1, 1))
    """
    first, *others = planned
    # A near-equal split has two sizes, which differ by 1; the ranks agree on the larger one.
    mine = (first, max(others or [first]))
    one, other = (min(agree(size if size < samples else _NO_LIMIT), samples) for size in mine)
    return one, other


# Larger than any batch, so that the minimum over the ranks is another rank's.
_NO_LIMIT = 1 << 40
