"""Tensors that were not seen to move, compared by their version counters alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

# Weak: a tensor that the user deletes must be freed.
Entry = tuple[weakref.ref[Tensor], str, bool]
"""A tensor, its name for messages, and whether it was reached through the loss function alone."""


class Watched:
    """Tensors to be watched; a window costs one pass over their version counters at each end.

    Attributes:
        entries: by the identity of each tensor.

    Examples:
        >>> import torch
        >>> bank = torch.zeros(2)
        >>> watched = Watched({id(bank): (weakref.ref(bank), "bank", False)})
        >>> counters = Counters(watched)
        >>> _ = bank.add_(1)
        >>> [watched.name_of(tensor) for tensor in counters.written()]
        ['bank']
    """

    def __init__(self, entries: dict[int, Entry] | None = None) -> None:
        self._set(entries or {})

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.entries

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of one of the tensors."""
        return self.entries[id(tensor)][1]

    def remove(self, tensors: Iterable[Tensor]) -> dict[int, Entry]:
        """Watch these tensors no longer; return their entries."""
        found = {id(tensor): self.entries.pop(id(tensor)) for tensor in tensors if tensor in self}
        # The list of references is built again only where an entry went: it is read in each window.
        if found:
            self._set(self.entries)
        return found

    def now(self) -> tuple[list[Tensor], list[int]]:
        """Return the tensors that are alive, and their version counters."""
        tensors = [tensor for reference in self._references if (tensor := reference()) is not None]
        # Usual case: every tensor lives, and no dictionary is walked.
        if len(tensors) == len(self._references):
            return tensors, [tensor._version for tensor in tensors]
        self._set({key: entry for key, entry in self.entries.items() if entry[0]() is not None})
        return self.now()

    def _set(self, entries: dict[int, Entry]) -> None:
        self.entries = entries
        self._references = [reference for reference, *_ in entries.values()]


class Counters:
    """Version counters of watched tensors as they were at one moment; it holds the tensors.

    Args:
        watched: shared with others.
    """

    def __init__(self, watched: Watched | None = None) -> None:
        self._watched = Watched() if watched is None else watched
        self._tensors, self._before = self._watched.now()

    def read(self) -> list[int]:
        """Return the counters as they are now."""
        return [tensor._version for tensor in self._tensors]

    def written(self) -> list[Tensor]:
        """Return the tensors that were written since, and are still watched."""
        now = [tensor._version for tensor in self._tensors]
        # List equality in C decides the usual window.
        if now == self._before:
            return []
        each = zip(self._tensors, self._before, now, strict=True)
        return [tensor for tensor, was, count in each if count != was and tensor in self._watched]

    def pass_over(self, before: list[int]) -> None:
        """Count what was written since `read` returned `before` as not written: it was restored."""
        each = zip(self._before, before, self.read(), strict=True)
        # Shift the note by what a check wrote: its restore leaves the counter higher than before.
        self._before = [noted + now - was for noted, was, now in each]
