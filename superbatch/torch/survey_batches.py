"""The batches of a survey: as many as it has points, from the beginning again where they end.

What is read is put back where it can be: the generators of a DataLoader and its samplers, and the state of a
loader that has `state_dict` and `load_state_dict`. Where an iterator stands cannot be put back, so none is
taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from ..errors import InputError, explain
from ..schedule import Schedule
from ..window import windows


class Batches:
    """An endless stream of batches.

    Args:
        batches: can be iterated over again and again (a DataLoader, a list), or a function without arguments
            that returns something to iterate over.
        accumulation_steps: group its micro-batches into windows of so many, as `windows` does; None takes
            each as a batch.

    Attributes:
        epochs: how often the batches were begun with.

    Raises:
        InputError: it is an iterator or a generator, which cannot be begun with again.

    Examples:
        >>> stream = Batches([1, 2], None)
        >>> [stream.take() for _ in range(5)], stream.epochs
        ([1, 2, 1, 2, 1], 3)
    """

    def __init__(self, batches: Any, accumulation_steps: int | Schedule | None) -> None:
        self._begin = _beginner(batches)
        self._steps: int | Schedule | None = accumulation_steps
        self._iterator: Iterator[Any] | None = None
        self.epochs = 0

    def take(self) -> Any:
        """Return the next batch.

        Raises:
            InputError: there is not a single one.
        """
        if self._iterator is not None:
            for batch in self._iterator:
                return batch
        self.close()
        self.epochs += 1
        loader = self._begin()
        self._iterator = iter(loader if self._steps is None else windows(loader, self._steps))
        for batch in self._iterator:
            return batch
        raise InputError(
            explain(
                "batches of which there is none" + (" the second time" if self.epochs > 1 else ""),
                "a survey makes one update per point, and begins again where batches end",
                "pass a loader that is not empty, or a function that makes a new iterator for each call",
            )
        )

    def close(self) -> None:
        """Let the iterator go: workers of a loader end with it."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()
        self._iterator = None


def keep_position(batches: Any, undo: ExitStack) -> None:
    """Note where a loader stands, and put it back when `undo` is closed.

    Args:
        batches: of the user.
        undo: what puts everything back.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> seeded = torch.Generator().manual_seed(0)
        >>> loader = DataLoader(range(100), batch_size=3, shuffle=True, generator=seeded)
        >>> with ExitStack() as undo:
        ...     keep_position(loader, undo)
        ...     first = next(iter(loader))
        >>> bool((first == next(iter(loader))).all())
        True
    """
    for generator in _generators(batches):
        undo.callback(generator.set_state, generator.get_state())
    if callable(getattr(batches, "state_dict", None)) and callable(getattr(batches, "load_state_dict", None)):
        undo.callback(batches.load_state_dict, copy.deepcopy(batches.state_dict()))


def _generators(batches: Any) -> list[torch.Generator]:
    sampler = getattr(batches, "sampler", None)
    batch_sampler = getattr(batches, "batch_sampler", None)
    holders = (batches, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for g in (getattr(one, "generator", None) for one in holders)}
    return [generator for generator in found.values() if isinstance(generator, torch.Generator)]


def _beginner(batches: Any) -> Callable[[], Iterable[Any]]:
    if isinstance(batches, Iterator):
        raise InputError(
            explain(
                f"batches that are an iterator ({type(batches).__name__})",
                "what a survey takes from it is lost to the training, and it cannot be begun with again",
                "pass the DataLoader or list itself (accumulation_steps=K makes windows of it), or a "
                "function that returns a new iterator: lambda: windows(loader, 8)",
            )
        )
    if isinstance(batches, Iterable):
        return lambda: batches
    if callable(batches):
        make: Callable[[], Any] = batches
        return make
    raise InputError(
        explain(
            f"batches of type {type(batches).__name__}",
            "a survey iterates over them",
            "pass a DataLoader, a list of batches, or a function that returns an iterator",
        )
    )
