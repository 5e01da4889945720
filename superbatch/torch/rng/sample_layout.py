"""Dimension of a random tensor that runs over the samples of a micro-batch.

A random operation has a shape, but no names of dimensions. The dimension of the samples is, in this order:

1. the one declared with `samples_along`;
2. the one that grows with the number of samples, if a micro-batch with another number of samples has made the
   same call before;
3. by convention the first dimension, if its size is the number of samples; else the only dimension of that
   size; else the first, if its size is a multiple (``(B*T, C)``, batch outermost); else none, which means one
   draw for the whole batch.

An ambiguous shape raises `InputError`, and so does a later micro-batch that contradicts the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from superbatch.errors import InputError

_NOT_DECLARED = "not declared"
DeclaredDim = int | str | None  # a dimension; None: one draw for the batch; a string: nothing is declared
_declared: ContextVar[DeclaredDim] = ContextVar("superbatch_samples_along", default=_NOT_DECLARED)
_reading: ContextVar[Reading | None] = ContextVar("superbatch_reading", default=None)
_REMEDY = (
    "Put the call in `with samples_along(dim):`, or in `with samples_along(None):` for one draw per batch"
)


class Reading:
    """Dimensions of the samples in the random calls of one micro-batch, shared by all threads.

    For an accelerator autograd runs backward in other threads, which do not have the context variables of the
    thread that entered the stream. Activation checkpointing runs its forward again there.

    Attributes:
        declared: the dimension declared by `samples_along` in the thread that made this object.
        calls: calls of this micro-batch so far, by their keys; a repeated call gets the same dimension.
    """

    def __init__(self) -> None:
        self.declared: DeclaredDim = _declared.get()
        self.calls: dict[int, Call] = {}

    def axis(
        self, key: int, op: str, shape: tuple[int, ...], samples: int, before: Call | None
    ) -> int | None:
        """Return the dimension of the samples; see `sample_axis`.

        Examples:
            >>> reading = Reading()
            >>> with samples_along(1):
            ...     first = reading.axis(7, "rand", (8, 4), 4, None)
            >>> first, reading.axis(7, "rand", (8, 4), 4, None)
            (1, 1)
        """
        # Activation checkpointing repeats the call in a thread without a declaration.
        again = self.calls.get(key)
        if again is not None and (again.op, again.shape) == (op, shape):
            return again.axis
        # The declaration of this thread, else that of the thread that entered the stream.
        here = _declared.get()
        axis = sample_axis(op, shape, samples, before, self.declared if here == _NOT_DECLARED else here)
        self.calls[key] = Call(op, samples, shape, axis)
        return axis

    @contextmanager
    def in_use(self) -> Iterator[Reading]:
        """Return a context in which `samples_along` also sets `declared` of this object."""
        token = _reading.set(self)
        try:
            yield self
        finally:
            _reading.reset(token)


@dataclass(frozen=True)
class Call:
    """A random call of a micro-batch, with its dimension of the samples.

    Args:
        op: name of the operation.
        samples: number of samples of the micro-batch.
        shape: shape of the random tensor.
        axis: the dimension of the samples; None: one draw for the whole batch.

    Examples:
        >>> Call("aten.rand.default", 4, (4, 1, 1), 0).axis
        0
    """

    op: str
    samples: int
    shape: tuple[int, ...]
    axis: int | None


@contextmanager
def samples_along(dim: int | None) -> Iterator[None]:
    """Declare the dimension that runs over the samples, for the random calls inside.

    Outside of a `sample_stream` it has no effect, so a model may always call it.

    Args:
        dim: a dimension whose size is a multiple of the number of samples, with the batch outermost. None:
            the same draw in every micro-batch, e.g. for noise on weights.

    Examples:
        >>> import torch
        >>> with samples_along(1):
        ...     y = torch.nn.functional.dropout(torch.ones(16, 4, 8))  # (time, batch, channels)
    """
    # In the context variable, and in the Reading for autograd's threads.
    token, reading = _declared.set(dim), _reading.get()
    before = _NOT_DECLARED if reading is None else reading.declared
    if reading is not None:
        reading.declared = dim
    try:
        yield
    finally:
        _declared.reset(token)
        if reading is not None:
            reading.declared = before


def sample_axis(
    op: str, shape: tuple[int, ...], samples: int, before: Call | None, declared: DeclaredDim = _NOT_DECLARED
) -> int | None:
    """Return the dimension of the samples, or None for one draw for the whole batch.

    Args:
        op: name of the operation, for the error.
        shape: shape of the random tensor.
        samples: number of samples of this micro-batch.
        before: the same call in another micro-batch of the window, if there was one.
        declared: the dimension that `samples_along` has declared, if any.

    Returns:
        A dimension whose size is a multiple of ``samples``; or None.

    Raises:
        InputError: the declaration does not fit, the convention is ambiguous, or ``before`` contradicts.

    Examples:
        >>> sample_axis("rand", (4, 1, 1), 4, None), sample_axis("rand", (10, 4, 8), 4, None)
        (0, 1)
        >>> sample_axis("rand", (1,), 4, None) is None
        True
    """
    if not isinstance(declared, str):
        axis = _check_declared(op, shape, samples, declared)
    elif before is not None and before.samples != samples and len(before.shape) == len(shape):
        axis = _grown_dimension(op, shape, samples, before)
    else:
        axis = _convention(op, shape, samples)
    if before is not None and not _agree(shape, samples, axis, before):
        raise InputError(_contradiction(op, shape, samples, before))
    return axis


def _check_declared(op: str, shape: tuple[int, ...], samples: int, dim: int | None) -> int | None:
    if dim is None:
        return None
    axis = dim + len(shape) if dim < 0 else dim
    # A multiple, because a flattened dimension may hold several rows per sample.
    if not 0 <= axis < len(shape) or shape[axis] % samples:
        raise InputError(
            f"samples_along({dim}) does not fit {op} of shape {shape} in a micro-batch of {samples} samples: "
            "there is no such dimension, or its size is not a multiple of the number of samples. Pass the "
            "dimension that runs over the samples."
        )
    return axis


def _grown_dimension(op: str, shape: tuple[int, ...], samples: int, before: Call) -> int | None:
    # A shape that does not depend on the number of samples is one draw for the whole batch.
    if shape == before.shape:
        return None
    # E.g. dimension 0 of (8, 10) and (4, 10) with 8 and 4 samples.
    grows = [d for d, size in enumerate(shape) if size * before.samples == before.shape[d] * samples and size]
    return grows[0] if grows else _convention(op, shape, samples)


def _convention(op: str, shape: tuple[int, ...], samples: int) -> int | None:
    # A single number is drawn for the whole batch.
    if not shape:
        return None
    if samples == 1 or shape[0] == samples:
        return 0
    others = [d for d, size in enumerate(shape) if size == samples]
    # (B*T, C) with the batch outermost, unless one other dimension fits exactly.
    if shape[0] % samples == 0 and len(others) != 1:
        return 0
    if len(others) > 1 or (others and shape[0] % samples == 0):
        raise InputError(
            f"More than one dimension of {op} of shape {shape} could run over the {samples} samples of the "
            f"micro-batch. {_REMEDY}."
        )
    return others[0] if others else None


def _agree(shape: tuple[int, ...], samples: int, axis: int | None, before: Call) -> bool:
    if axis is None or before.axis is None:
        # One draw for the whole batch has the same shape in every micro-batch.
        return axis is before.axis and shape == before.shape
    # With one sample every dimension gives the same positions.
    return samples == 1 or before.samples == 1 or axis == before.axis


def _contradiction(op: str, shape: tuple[int, ...], samples: int, before: Call) -> str:
    return (
        f"{op} has shape {before.shape} in a micro-batch of {before.samples} samples, but {shape} in one of "
        f"{samples} samples, so the dimension of the samples is unknown. (Reasons may be packed sequences, "
        f"noise on weights, or a different path through the model.) {_REMEDY}."
    )
