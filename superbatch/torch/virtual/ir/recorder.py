"""Interface of a recording to the operations that record others in it.

BatchNorm, an index or a write in place records simpler operations, and the recording calls them: each needs
the other. So the files of such operations know a recording, and the ranks that share a batch, by interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from superbatch.results.coupling import CouplingKind

from .calls import Recipe
from .layout import Layout, Part
from .readings import Readings
from .values import Handle, Operand, Value


class RandomSource(Protocol):
    """Random numbers of a block."""

    @property
    def as_the_batch(self) -> bool:
        """Draw the numbers of the real large batch."""
        ...


class Recorder(Protocol):
    """Recording of one block.

    Its values stand for tensors; the tensors that it returns are virtual, or numbers where there are some.
    """

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        ...

    @property
    def open(self) -> bool:
        """The block has not ended."""
        ...

    @property
    def paranoid(self) -> bool:
        """Each operation is compared with the same on whole tensors."""
        ...

    @property
    def randomness(self) -> RandomSource:
        """Random numbers of the block."""
        ...

    @property
    def readings(self) -> Readings:
        """Real tensors that operations read."""
        ...

    @property
    def across(self) -> RankSums | None:
        """Reductions over the ranks that share the batch; None if there are none."""
        ...

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dispatch an operation on virtual tensors."""
        ...

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation on values, and return the values of its results."""
        ...

    def add(self, func: Any, recipe: Recipe, metas: Any, *, once: bool = False, known: bool = False) -> Any:
        """Record an operation with its recipe, and return the values of its results."""
        ...

    def value(self, tensor: Any) -> Any:
        """Return the value of a tensor, virtual or not."""
        ...

    def values(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with a value in place of each tensor."""
        ...

    def given(self, tensor: Tensor) -> Value:
        """Return a value for a real tensor."""
        ...

    def gathered(self, value: Value, kind: CouplingKind = "gathered", why: Any = ...) -> Value:
        """Return the value in one piece."""
        ...

    def show(self, value: Value) -> Tensor:
        """Return a virtual tensor that shows a value."""
        ...

    def shown(self, results: Any) -> Any:
        """Return tensors that show values."""
        ...

    def watch(self, handle: Handle) -> None:
        """Remember what a tensor of the program holds as long as it shows a value."""
        ...

    def note_leaf(self, tensor: Tensor) -> None:
        """Remember the leaves that a real tensor brings a gradient to."""
        ...

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return a real tensor with the numbers of a virtual one."""
        ...

    def there(self, values: Iterable[Value]) -> list[Tensor]:
        """Return the tensors of whole values, computed if need be."""
        ...

    def work_out(self, targets: Iterable[Value]) -> None:
        """Run what the targets need, and what else is pending."""
        ...

    def write_later(self, tensor: Tensor, value: Value) -> None:
        """Write a buffer once its new value is there."""
        ...

    def settle_writes(self, args: Iterable[Any]) -> None:
        """Write the buffers that wait, if one of them is about to be used."""
        ...


class RankSums(Protocol):
    """Statistics of a BatchNorm, and collectives of the program, over the ranks that share a batch."""

    @property
    def normalises(self) -> bool:
        """A BatchNorm in training mode is over ranks."""
        ...

    def over(self, layer: nn.SyncBatchNorm) -> AbstractContextManager[None]:
        """Normalise over the ranks of a layer, for as long as the context lasts."""
        ...

    def layout_of(self, recording: Recorder, value: Value) -> Layout | None:
        """Return the layout of the input of a BatchNorm over ranks; None for an InstanceNorm."""
        ...

    def layout_back(self, recording: Recorder, value: Value, mean: Value) -> Layout | None:
        """Return the same for its backward; None if it was not over ranks."""
        ...

    def statistics(
        self,
        recording: Recorder,
        x: Operand,
        moments: Callable[[Part, list[Tensor]], Any],
        form: tuple[int, torch.dtype],
        eps: float,
    ) -> list[Value]:
        """Return mean, 1 / standard deviation, biased and unbiased variance over the ranks."""
        ...

    def spans(self, mean: Value) -> bool:
        """Return whether a mean that a BatchNorm normalises with is over ranks."""
        ...

    def summed(self, recording: Recorder, mean: Value, mine: Value) -> Value:
        """Return a flat value summed over the ranks that a mean is over."""
        ...

    def sums(self, recording: Recorder, mean: Value, sums: list[Value], count: int) -> list[Value]:
        """Return the sums of a backward over all ranks, times the share of this rank's samples."""
        ...

    def user_collective(self, recording: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a collective of the program on numbers."""
        ...
