"""Whether a gradient inside a window is still as the window's own backward left it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, is_, ne
from typing import Any

from torch import Tensor

from .gradient_sum import Owned, foreign_gradient

# Both run for every parameter around every micro-batch: `map` with them takes half the time of a loop.
_grad, _version, _is_sparse = attrgetter("grad"), attrgetter("_version"), attrgetter("is_sparse")
_hooks = attrgetter("_post_accumulate_grad_hooks")


@dataclass
class Settling:
    """What backwards have shown so far: whether they add in place to gradients that are there.

    Attributes:
        seen: a backward has done so.
        kept: none has put another tensor in the place of one (a hook may; `Marks` cannot see all hooks).
    """

    seen: bool = False
    kept: bool = True


class Marks:
    """The gradients of parameters as the window's own backward left them.

    Where they are *settled* - each is there, and autograd adds to it in place from now on - only their values
    are looked at around each micro-batch, and at the end of the window whether each is still the same tensor.

    Args:
        owned: the parameters.
        settling: shared by the windows of an accumulator.
    """

    def __init__(self, owned: list[Owned], settling: Settling) -> None:
        self._parameters = [entry.parameter for entry in owned]
        self._names = [entry.name for entry in owned]
        self._settling = settling
        self._none: list[Any] = [None] * len(owned)
        self._gradients: list[Tensor | None] = self._none  # lists are replaced, never changed
        self._versions: list[int | None] = self._none
        self.clear()

    def set(self) -> bool:
        """Note the gradients as they are now, after a backward; return whether one is there that was not.

        Raises:
            WindowError: the backward went into another tensor than the one noted, put in its place before it.
        """
        before = self._versions
        if self._settled:
            self._versions = _versions(self._gradients)
            if all(map(ne, self._versions, before)):
                return False
            # One was not reached, or has been replaced: by a hook that came meanwhile, or by somebody else.
            if not any(map(_hooks, self._parameters)):
                self._require_same()
                return False
        self._look()
        return before.count(None) > self._versions.count(None)

    def _look(self) -> None:
        before = self._gradients
        any_before = self._versions.count(None) < len(self._versions)
        # Held here, a gradient's identity cannot be taken over by another tensor.
        self._gradients = list(map(_grad, self._parameters))
        self._versions = _versions(self._gradients)
        if any_before:
            kept = all(was is None or was is now for was, now in zip(before, self._gradients, strict=True))
            self._settling.seen, self._settling.kept = True, self._settling.kept and kept
        self._settled = self._settling.seen and self._settling.kept and self._stay()

    def savepoint(self) -> None:
        """Remember the gradients noted last, with their versions, as those before a micro-batch."""
        self._saved = (self._gradients, self._versions)

    def rollback(self) -> bool:
        """Restore the gradients of the savepoint; return False if one has been written to since.

        What was noted since does not count: a backward that came to its end may fail right afterwards.
        """
        gradients, versions = self._saved
        if _versions(gradients) != versions:
            return False
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._gradients, self._versions, self._settled = gradients, versions, False
        return True

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients that are noted, one for each parameter."""
        return self._gradients

    def require(self, *, last: bool = False) -> None:
        """Check that nobody else has changed a gradient since `set`.

        Args:
            last: the sums are complete, so that none can be put in the place of another later.

        Raises:
            WindowError: another backward went through the parameters, or something set gradients to zero.
        """
        if last or not self._settled:
            self._require_same()
        versions = _versions(self._gradients)
        if versions != self._versions:
            moved = map(ne, versions, self._versions)
            raise foreign_gradient(next(name for name, now in zip(self._names, moved, strict=True) if now))

    def _require_same(self) -> None:
        same = list(map(is_, map(_grad, self._parameters), self._gradients))
        if not all(same):
            raise foreign_gradient(self._names[same.index(False)])

    def clear(self) -> None:
        """Let the gradients go, those of the savepoint too."""
        self._gradients = self._none
        self._versions = self._none
        self._saved = (self._none, self._none)
        self._settled = False

    def forget(self) -> None:
        """Let the gradients go: there is none before the next `set`."""
        self._gradients = self._none
        self._versions = self._none
        self._settled = False

    def _stay(self) -> bool:
        """Whether backward adds in place to the gradients that are there, and so leaves the same tensors.

        It makes a new one where a sparse and a dense gradient meet, and for subclasses; a hook may as well.
        """
        if set(map(type, self._gradients)) != {Tensor}:  # None among them
            return False
        return not any(map(_is_sparse, self._gradients)) and not any(map(_hooks, self._parameters))


def _versions(gradients: list[Tensor | None]) -> list[int | None]:
    """How often each gradient was written in place; None for one that is not there."""
    try:
        return list(map(_version, gradients))
    except AttributeError:  # some are None
        return [None if gradient is None else gradient._version for gradient in gradients]
