"""Windows: the micro-batches of one update, taken from a loader that yields micro-batches.

All micro-batches of a window are loaded before its first backward. So the total weight of the window is known
before the first backward, and a shorter last window (a tail) needs no special case.
"""

from __future__ import annotations

# pyright: strict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar, cast, get_args, overload

from .errors import InputError
from .schedule import Schedule, as_schedule, check_update

Tail = Literal["update", "drop"]


T = TypeVar("T")


class Window(Sequence[T]):
    """The micro-batches of one update: an immutable sequence that an accumulator does not split.

    Args:
        microbatches: in order. An empty window raises an error in the accumulator, on all ranks together.

    Raises:
        InputError: `microbatches` cannot be iterated over.

    Examples:
        >>> window = Window([[1, 2], [3]])
        >>> len(window), window[1]
        (2, [3])
    """

    __slots__ = ("_microbatches",)

    def __init__(self, microbatches: Iterable[T]) -> None:
        # An empty window raises in the accumulator, on all ranks. An error here would be raised on this rank
        # alone, and its next window would be summed with the current window of the other ranks.
        self._microbatches: tuple[T, ...] = tuple(_iterable(microbatches, "micro-batches"))

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._microbatches[index]

    def __iter__(self) -> Iterator[T]:  # faster than Sequence's, which calls __getitem__ for each index
        return iter(self._microbatches)

    def __len__(self) -> int:
        return len(self._microbatches)

    def __repr__(self) -> str:
        return f"Window of {len(self)} micro-batch{'es' if len(self) != 1 else ''}"


def windows(
    loader: Iterable[T],
    accumulation_steps: int | Schedule,
    *,
    tail: Tail = "update",
    first_update: int = 0,
) -> Iterator[Window[T]]:
    """Group the micro-batches of a loader into windows, reading the loader lazily.

    Args:
        loader: yields micro-batches; it needs no length.
        accumulation_steps: micro-batches per window, or a schedule: a function of the update index.
        tail: what to do when the data ends inside a window: ``"update"`` yields a shorter window (exact, as
            it is normalised by its own weight), ``"drop"`` discards it.
        first_update: update index of the first window, for a schedule after a restart or in a later epoch.

    Yields:
        One `Window` per update.

    Raises:
        InputError: an argument has the wrong type or value.

    Examples:
        >>> [len(window) for window in windows(range(10), accumulation_steps=4)]
        [4, 4, 2]
        >>> [len(window) for window in windows(range(10), 4, tail="drop")]
        [4, 4]
        >>> [len(window) for window in windows(range(10), lambda update: 2**update)]
        [1, 2, 4, 3]
    """
    schedule = as_schedule(accumulation_steps)
    if tail not in get_args(Tail):
        raise InputError(
            f'tail={tail!r} is unknown. Pass tail="update" to train on the shorter last window, or '
            'tail="drop".'
        )
    return _windows(_iterable(loader, "a loader"), schedule, tail, check_update(first_update, "first_update"))


def _windows(loader: Iterable[T], schedule: Schedule, tail: Tail, update: int) -> Iterator[Window[T]]:
    microbatches = iter(loader)
    # Call the schedule only when a window has data: it may be a list with exactly as many entries.
    for first in microbatches:
        wanted = schedule(update)
        taken = [first, *islice(microbatches, wanted - 1)]
        if len(taken) < wanted and tail == "drop":
            return
        yield Window(taken)
        # Free this window before the next one is loaded: both at once could exceed the host's memory.
        del first, taken
        update += 1


def _iterable(given: Any, what: str) -> Iterable[Any]:
    if isinstance(given, Iterable):
        return cast("Iterable[Any]", given)
    raise InputError(
        f"{what} of type {type(given).__name__} is not iterable. Pass a DataLoader, a list or a generator of "
        "micro-batches."
    )
