"""Buffers that a forward changes, in two passes over micro-batches.

In the large batch there is one forward: all samples use the same buffers, which change once. So each
micro-batch begins with the buffers before the call, and afterwards they are as after a single micro-batch.
That is the result of the large batch if the change does not depend on the samples, e.g. for a count of calls
or the power iteration of spectral normalisation. A change that depends on samples, e.g. of running
statistics, raises `CoupledSamplesError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from superbatch.errors import CoupledSamplesError

from ..checks.coupling import changes_state, uses_batch_statistics
from ..module_tables import buffers_of
from ..window.participants.buffers import BufferKeeper

_CHOICES = (
    "Use virtual_batch(...) to compute with statistics of the whole batch, call module.eval() to use running "
    "statistics, or use GroupNorm or LayerNorm instead"
)


class OnePass:
    """Buffers before a pass over micro-batches, and changes after the first micro-batch.

    Examples:
        >>> norm = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
        >>> buffers = OnePass([norm])
        >>> for index in range(3):
        ...     buffers.rewind()
        ...     _ = norm(torch.ones(1, 2))
        ...     buffers.check(index)
        >>> buffers.moved
        True
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._modules = [
            (_path(number, path), module)
            for number, model in enumerate(models)
            for path, module in model.named_modules()
            if buffers_of(module)  # fewer modules, because every micro-batch walks this list
        ]
        self._keeper = BufferKeeper(models)
        self._keeper.begin()
        self._versions = self._read_versions()
        self._first_changes: dict[str, Tensor] | None = None
        self.moved = False

    def rewind(self) -> None:
        """Restore the buffers before the pass, if they have changed."""
        # Comparing version counters is cheaper than copying.
        if self.touched():
            self._keeper.restore()
            self._versions = self._read_versions()

    def touched(self) -> bool:
        """Return whether a buffer was written since the start or the last `rewind`."""
        return self._read_versions() != self._versions

    def restore(self) -> None:
        """Restore the buffers before the pass."""
        self._keeper.restore()

    def check(self, index: int) -> None:
        """Compare a micro-batch's changes of buffers with those of the first micro-batch.

        Args:
            index: index of the micro-batch; -1 for a trial with fewer samples.

        Raises:
            CoupledSamplesError: the changes differ.
        """
        changed = self._changed()
        self.moved = self.moved or bool(changed)
        if self._first_changes is None:
            # Copied, because the next micro-batch writes to the same buffers.
            self._first_changes = {path: buffer.clone() for path, buffer in changed.items()}
            return
        for path, buffer in _differing(changed, self._first_changes):
            raise _refusal(path, buffer, "fewer samples" if index < 0 else f"micro-batch {index}")

    def _changed(self) -> dict[str, Tensor]:
        return {
            path: buffer
            for path, (module, buffer) in self._buffers().items()
            # Kernels of normalisation layers write without increasing the version counter.
            if self._versions.get(path) != (id(buffer), buffer._version) or changes_state(module)
        }

    def _read_versions(self) -> dict[str, tuple[int, int]]:
        # The id too, because a module may assign a new tensor.
        return {path: (id(buffer), buffer._version) for path, (_, buffer) in self._buffers().items()}

    def _buffers(self) -> dict[str, tuple[nn.Module, Tensor]]:
        return {
            f"{path}.{name}" if path else name: (module, buffer)
            for path, module in self._modules
            for name, buffer in buffers_of(module).items()
            if buffer is not None
        }


def _path(number: int, *names: str) -> str:
    return ".".join([*([f"models[{number}]"] if number else []), *filter(None, names)])


def _differing(changed: dict[str, Tensor], after: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for path in {**changed, **after}:
        one, other = changed.get(path), after.get(path)
        if one is None or other is None:
            yield path, one if other is None else other  # type: ignore[misc]  (one of them is not None)
        # Of equal shape only: a cache that grows with the longest sample is no statistic.
        elif one.shape == other.shape and not torch.equal(one, other):
            yield path, one


def _refusal(path: str, buffer: Tensor, where: str) -> CoupledSamplesError:
    module, _, name = path.rpartition(".")
    return CoupledSamplesError(
        f"The forward of the module {module!r} changes the buffer {name!r} depending on the samples: its "
        f"value after {where} differs from that after the first micro-batch, so its value after the whole "
        f"batch is not known. {_CHOICES}, or, if no forward reads the buffer, update it outside of encode."
    )


def refuse_batch_statistics(models: Sequence[nn.Module]) -> None:
    """Raise CoupledSamplesError if a module, in its present mode, normalises with statistics of its input.

    Examples:
        >>> refuse_batch_statistics([nn.BatchNorm1d(2).eval(), nn.GroupNorm(1, 2)])
    """
    coupled = [
        _path(number, path) or type(module).__name__
        for number, model in enumerate(models)
        for path, module in model.named_modules()
        if uses_batch_statistics(module)
    ]
    if coupled:
        named = ", ".join(map(repr, coupled[:3])) + (f" and {len(coupled) - 3} more" if coupled[3:] else "")
        raise CoupledSamplesError(
            f"The encoder has BatchNorm in training mode ({named}), which normalises each sample by the "
            "other samples of its input, so embeddings of micro-batches are not those of the batch. "
            f"{_CHOICES}."
        )
