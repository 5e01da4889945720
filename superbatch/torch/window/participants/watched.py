"""Tensors that have not changed so far, compared only by their version counters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

# A weak reference, so that a tensor that the user deletes is freed.
Entry = tuple[weakref.ref[Tensor], str, bool]
"""A tensor, its name for messages, and whether only the loss function refers to it."""


class WatchedTensors:
    """Tensors whose version counters a window reads at its beginning and at its end.

    Args:
        entries: the tensors, by their ids; None: no tensors.

    Attributes:
        entries: by the id of each tensor.

    Examples:
        >>> import torch
        >>> bank = torch.zeros(2)
        >>> watched = WatchedTensors({id(bank): (weakref.ref(bank), "bank", False)})
        >>> counters = VersionCounters(watched)
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
        """Stop watching these tensors; return their entries."""
        found = {id(tensor): self.entries.pop(id(tensor)) for tensor in tensors if tensor in self}
        # The list of references, which each window reads, is built again only if it changes.
        if found:
            self._set(self.entries)
        return found

    def current_versions(self) -> tuple[list[Tensor], list[int]]:
        """Return the tensors that are alive, and their version counters."""
        tensors = [tensor for reference in self._references if (tensor := reference()) is not None]
        # Usually every tensor is alive, and no dictionary is walked.
        if len(tensors) == len(self._references):
            return tensors, [tensor._version for tensor in tensors]
        self._set({key: entry for key, entry in self.entries.items() if entry[0]() is not None})
        return self.current_versions()

    def _set(self, entries: dict[int, Entry]) -> None:
        self.entries = entries
        self._references = [reference for reference, *_ in entries.values()]


class VersionCounters:
    """Version counters of watched tensors at one moment; the object holds the tensors.

    Args:
        watched: the tensors; other objects may share it.
    """

    def __init__(self, watched: WatchedTensors | None = None) -> None:
        self._watched = WatchedTensors() if watched is None else watched
        self._tensors, self._before = self._watched.current_versions()

    def read(self) -> list[int]:
        """Return the present counters."""
        return [tensor._version for tensor in self._tensors]

    def written(self) -> list[Tensor]:
        """Return the tensors that were written since this object was made and are still watched."""
        now = [tensor._version for tensor in self._tensors]
        # The usual case needs only one comparison of lists, in C.
        if now == self._before:
            return []
        each = zip(self._tensors, self._before, now, strict=True)
        return [tensor for tensor, was, count in each if count != was and tensor in self._watched]

    def ignore_writes_since(self, before: list[int]) -> None:
        """Ignore writes since `read` returned `before`: a check made them and restored the content."""
        each = zip(self._before, before, self.read(), strict=True)
        # Add the check's writes to the recorded counters.
        self._before = [recorded + now - was for recorded, was, now in each]
