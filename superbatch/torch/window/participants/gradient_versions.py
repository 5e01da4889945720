"""Versions of the gradients that a window's own backward left."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .gradient_sum import ManagedParameter, foreign_gradient


class GradientVersions:
    """The gradients of parameters as the window's own backward left them.

    Args:
        owned: the parameters.

    Attributes:
        parameters: whose gradients they are.
    """

    def __init__(self, owned: list[ManagedParameter]) -> None:
        self.parameters = [entry.parameter for entry in owned]
        self._owned = owned
        self._none: list[Any] = [None] * len(owned)  # never changed
        self._gradients: list[Tensor | None] = self._none
        self._versions: list[int | None] = self._none
        self._saved = (self._gradients, self._versions)

    def set(self) -> bool:
        """Note the gradients as they are now, after a backward; return whether one is there that was not."""
        before = self._versions
        self._gradients, self._versions = [], []
        for parameter in self.parameters:
            gradient = parameter.grad
            # Held here, a gradient's identity cannot be taken over by another tensor.
            self._gradients.append(gradient)
            self._versions.append(None if gradient is None else gradient._version)
        return None in before and before.count(None) > self._versions.count(None)

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
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._gradients, self._versions = gradients, versions
        return True

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients that are noted, one for each parameter."""
        return self._gradients

    def require(self) -> None:
        """Check that nobody else has changed a gradient since `set`.

        Raises:
            WindowError: another backward went through the parameters, or something set gradients to zero.
        """
        noted = zip(self.parameters, self._gradients, self._versions, strict=True)
        for index, (parameter, gradient, version) in enumerate(noted):
            now = parameter.grad
            if now is not gradient or (now is not None and now._version != version):
                raise foreign_gradient(self._owned[index].name)

    def clear(self) -> None:
        """Let the gradients go, those of the savepoint too."""
        self._gradients, self._versions = self._none, self._none
        self._saved = (self._none, self._none)

    def forget(self) -> None:
        """Let the gradients go: there is none before the next `set`."""
        self._gradients, self._versions = self._none, self._none


def _versions(gradients: list[Tensor | None]) -> list[int | None]:
    """Return the number of in-place writes of each gradient; None for one that is not there."""
    return [None if gradient is None else gradient._version for gradient in gradients]
