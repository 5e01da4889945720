"""Protocols of a recording and of the reductions over ranks.

A recording calls composites (BatchNorm, indexing, writes in place), which record simpler operations in that
recording. The protocols break the import cycle: a composite imports this file, never `trace.recording`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from superbatch.results.coupling import CouplingKind

from .calls import OpStrategy
from .readings import Readings
from .shard import BatchSlice, Shard
from .values import Handle, Operand, Value


class RandomSource(Protocol):
    """Source of the random numbers of a block."""

    @property
    def as_full_batch(self) -> bool:
        """Flag: draw the numbers of the real large batch (``rng="batch"``)."""
        ...


class Recorder(Protocol):
    """Recording of the operations of one block.

    Methods that record return a `Value`. Methods whose result the program gets return a virtual tensor, or a
    real one if its numbers are already computed.
    """

    @property
    def samples(self) -> int:
        """Number of samples of the batch."""
        ...

    # After the block, `numbers` returns only values that were materialized in the block.
    @property
    def open(self) -> bool:
        """Flag: the block has not ended."""
        ...

    @property
    def paranoid(self) -> bool:
        """Flag: each operation is compared with the same operation on full tensors."""
        ...

    @property
    def randomness(self) -> RandomSource:
        """Source of the random numbers of the block."""
        ...

    # Each is copied before a write, so that pending operations read the old numbers.
    @property
    def readings(self) -> Readings:
        """Real tensors that recorded operations read."""
        ...

    # A protocol, not `RankReducer`: `ranks` imports `trace`, which imports this file.
    @property
    def ranks(self) -> RankSums | None:
        """Reductions over the ranks that share the batch; None on a single rank."""
        ...

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dispatch an operation on virtual tensors."""
        ...

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation on values, and return the values of its results."""
        ...

    def add(
        self, func: Any, strategy: OpStrategy, metas: Any, *, once: bool = False, compilable: bool = False
    ) -> Any:
        """Record an operation with its strategy, and return the values of its results."""
        ...

    def value(self, tensor: Any) -> Any:
        """Return the value of a virtual or real tensor."""
        ...

    def values(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a value in place of each tensor."""
        ...

    # Small tensors are copied at once, others before the program writes into them (see `Readings`).
    def from_real(self, tensor: Tensor) -> Value:
        """Return a value for a real tensor."""
        ...

    def gathered(self, value: Value, kind: CouplingKind = "gathered", operator: Any = ...) -> Value:
        """Return the full value; a sharded one is gathered from its rows."""
        ...

    # `value` and `from_real` turn tensors of the program into values, `wrap` and `wrapped` do the opposite.
    def wrap(self, value: Value) -> Tensor:
        """Return a virtual tensor for a value."""
        ...

    def wrapped(self, results: Any) -> Any:
        """Return the results with a tensor in place of each value."""
        ...

    def register(self, handle: Handle) -> None:
        """Register a handle: while it lives, the program may read its value."""
        ...

    # Before the backward: afterwards the old gradient of the leaf could not be restored.
    def register_leaves(self, tensor: Tensor) -> None:
        """Register the autograd leaves that receive a gradient through a real tensor."""
        ...

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return a real tensor with the numbers of a virtual one."""
        ...

    def materialized(self, values: Iterable[Value]) -> list[Tensor]:
        """Materialize full values, and return their tensors."""
        ...

    # All pending values together: one at a time would repeat the sweeps that they share.
    def materialize(self, targets: Iterable[Value]) -> None:
        """Compute the targets and all other pending values."""
        ...

    def write_later(self, tensor: Tensor, value: Value) -> None:
        """Write a value into a buffer once it is computed."""
        ...

    # Called before every operation on a real tensor, e.g. if the program reads running_mean in the block.
    def make_writes(self, args: Iterable[Any]) -> None:
        """Make the pending writes if one of the arguments shares memory with a buffer to be written."""
        ...


class RankSums(Protocol):
    """BatchNorm statistics and the program's collectives over the ranks that share a batch."""

    @property
    def normalises(self) -> bool:
        """Flag: a BatchNorm in training mode normalises over several ranks at present."""
        ...

    def normalising_over(self, layer: nn.SyncBatchNorm) -> AbstractContextManager[None]:
        """Normalise over the ranks of a layer inside the context."""
        ...

    def shard_of(self, recording: Recorder, value: Value) -> Shard | None:
        """Return the sharding of the input of a BatchNorm over ranks; None for an InstanceNorm."""
        ...

    def shard_in_backward(self, recording: Recorder, value: Value, mean: Value) -> Shard | None:
        """Return the sharding of the input in the backward; None if the forward was not over ranks."""
        ...

    # `moments` gives (mean [C], M2 [C], count) of a micro-batch; `form` is (C, dtype of the statistics).
    def statistics(
        self,
        recording: Recorder,
        x: Operand,
        moments: Callable[[BatchSlice, list[Tensor]], Any],
        form: tuple[int, torch.dtype],
        eps: float,
    ) -> list[Value]:
        """Return mean, 1 / standard deviation, biased and unbiased variance over the ranks."""
        ...

    def is_over_ranks(self, mean: Value) -> bool:
        """Return whether the mean of a BatchNorm was computed over several ranks."""
        ...

    def sum_over_ranks(self, recording: Recorder, mean: Value, mine: Value) -> Value:
        """Return the sum of a 1-d value over the ranks that `mean` was computed over."""
        ...

    # The share is count / total, because dx divides by the count of this rank alone.
    def sum_backward(self, recording: Recorder, mean: Value, sums: list[Value], count: int) -> list[Value]:
        """Return the sums of a backward over all ranks, times this rank's share of the samples."""
        ...

    def user_collective(self, recording: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a collective of the program on materialized tensors."""
        ...
