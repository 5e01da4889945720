"""Batches of a survey: one per point, starting again when the data end.

Afterwards the position of the data is restored as far as possible: counters and generators of a loader, its
samplers and datasets; the epoch of persistent workers; and the state of a loader that has `state_dict` and
`load_state_dict`. The position of an iterator cannot be restored, so iterators are not accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader

from superbatch.errors import InputError
from superbatch.schedule import Schedule
from superbatch.window import windows

from ..window.participants.snapshot import generator_restorer

_PLAIN = (bool, int, float, str, type(None))


class Batches:
    """Endless stream of batches.

    Args:
        batches: iterable that can start again (a DataLoader, a list), or a function without arguments that
            returns an iterable.
        accumulation_steps: group micro-batches into windows of this many, as `windows` does; None: each item
            is a batch. A schedule counts updates, so it continues when the batches start again.

    Attributes:
        epochs: number of starts.

    Raises:
        InputError: `batches` is an iterator or a generator, which cannot start again.

    Examples:
        >>> stream = Batches([1, 2], None)
        >>> [stream.take() for _ in range(5)], stream.epochs
        ([1, 2, 1, 2, 1], 3)
    """

    def __init__(self, batches: Any, accumulation_steps: int | Schedule | None) -> None:
        self._start = _starter(batches)
        self._steps: int | Schedule | None = accumulation_steps
        self._iterator: Iterator[Any] | None = None
        self.epochs = 0
        self._taken = 0

    def take(self) -> Any:
        """Return the next batch.

        Raises:
            InputError: there are no batches.
        """
        if self._iterator is not None:
            # A for loop with a return: next() with a default would hide a batch that is None.
            for batch in self._iterator:
                self._taken += 1
                return batch
        # Closed first: two iterators would have twice as many workers.
        self.close()
        self.epochs += 1
        loader = self._start()
        # A schedule counts the survey's updates across epochs of the loader.
        grouped = None if self._steps is None else windows(loader, self._steps, first_update=self._taken)
        self._iterator = iter(loader if grouped is None else grouped)
        for batch in self._iterator:
            self._taken += 1
            return batch
        raise InputError(
            f"The batches are empty{' the second time' if self.epochs > 1 else ''}, but a survey needs one "
            "per point. Pass a loader that is not empty, or a function that returns a new iterator each time."
        )

    def close(self) -> None:
        """Free the iterator; the workers of a loader end with it."""
        # Generators have close(); the iterator of a DataLoader ends with its last reference.
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()
        self._iterator = None


def keep_position(batches: Any, undo: ExitStack) -> None:
    """Record the position of a loader, and restore it when `undo` is closed.

    Examples:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> seeded = torch.Generator().manual_seed(0)
        >>> loader = DataLoader(range(100), batch_size=3, shuffle=True, generator=seeded)
        >>> with ExitStack() as undo:
        ...     keep_position(loader, undo)
        ...     first = next(iter(loader))
        >>> bool((first == next(iter(loader))).all())
        True
    """
    holders, with_state = _holders(batches), _has_state(batches)
    # A loader with state_dict restores everything itself.
    for holder in holders:
        if not (holder is batches and with_state):
            _keep_attributes(holder, undo)
    if with_state:
        # A copy: a loader may return its live state.
        undo.callback(batches.load_state_dict, copy.deepcopy(batches.state_dict()))
    if isinstance(batches, DataLoader):
        # Persistent workers continue their epoch afterwards; the survey uses others.
        undo.callback(setattr, batches, "_iterator", batches._iterator)
        batches._iterator = None


def _has_state(batches: Any) -> bool:
    return all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict"))


def _holders(batches: Any) -> list[Any]:
    """Return the loader, its samplers and its datasets, and those they wrap, which may have a position."""
    found: dict[int, Any] = {}
    waiting = [batches]
    while waiting:
        one = waiting.pop(0)
        # Functions and objects without __dict__ hold no position.
        if id(one) in found or not hasattr(one, "__dict__") or isinstance(one, FunctionType):
            continue
        found[id(one)] = one
        waiting += [
            getattr(one, name) for name in ("sampler", "batch_sampler", "dataset") if hasattr(one, name)
        ]
        # ConcatDataset and ChainDataset.
        several = getattr(one, "datasets", ())
        waiting += several if isinstance(several, list | tuple) else ()
    return list(found.values())


def _keep_attributes(holder: Any, undo: ExitStack) -> None:
    """Record counters and generators of an object. Not its containers: a cache may continue to grow."""
    attributes = vars(holder)
    plain = {name: value for name, value in attributes.items() if isinstance(value, _PLAIN)}
    # update, not replace: attributes that were added since may be caches.
    undo.callback(attributes.update, plain)
    for value in attributes.values():
        restore = generator_restorer(value)
        if restore is not None:
            undo.callback(restore)


def _starter(batches: Any) -> Callable[[], Iterable[Any]]:
    """Return a function that starts the batches again."""
    # Iterator is tested before Iterable, because every iterator is iterable.
    if isinstance(batches, Iterator):
        raise InputError(
            f"The batches are an iterator ({type(batches).__name__}), which cannot start again, so training "
            "would lack the batches of the survey. Pass the DataLoader or list itself (accumulation_steps=K "
            "groups it into windows), or a function that returns a new iterator: lambda: windows(loader, 8)."
        )
    if isinstance(batches, Iterable):
        return lambda: batches
    if callable(batches):
        make: Callable[[], Any] = batches
        return make
    raise InputError(
        f"A survey cannot iterate over batches of type {type(batches).__name__}. Pass a "
        "DataLoader, a list of batches, or a function that returns an iterator."
    )
