"""Copies of tensors, for restoring them: made at once, or when an operation is about to write to a tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SMALL_BYTES = 1 << 20  # tensors up to this size are copied without regard to cost
_HEAD = 256  # number of values of a large tensor that are compared
# bfloat16 has no NumPy dtype; extended floats (f16, c32) have no torch dtype.
_FLOATING = frozenset({"f2", "f4", "f8", "c8", "c16"})
# A large tensor is summed in this many parts. The sums take 32 KiB and change with any row of a bank.
_PARTS = 4096


@dataclass
class KeptTensor:
    """A tensor and a record of its content at one moment.

    Attributes:
        name: name for messages.
        tensor: the tensor, whose content may change.
        alias: a tensor that shares the memory that `tensor` had at that moment.
        version: version counter of the tensor at that moment.
        frozen: it is a parameter that requires no gradient; each write is a change, even of equal values.
        trained: it requires a gradient, so an optimizer may change it.
        of_loss_fn: only the loss function refers to it, and no module.
        array: the NumPy array whose memory `tensor` shares; None for a tensor.
        copy: copy of the content; None if it was not copied.
        head: the first values, if it was not copied.
        sums: sums over the content, if it was not copied and is not too large.
        written: an operation has written to it while `CopyBeforeWrite` was active.

    Examples:
        >>> kept = KeptTensor.of("center", torch.zeros(2))
        >>> kept.copy_now()
        >>> kept.tensor.data = torch.ones(2)
        >>> kept.has_changed()
        True
        >>> kept.restore()
        >>> kept.tensor
        tensor([0., 0.])
    """

    name: str
    tensor: Tensor
    alias: Tensor
    version: int
    frozen: bool = False
    trained: bool = False
    of_loss_fn: bool = False
    array: Any = None
    copy: Tensor | None = None
    head: Tensor | None = None
    sums: Tensor | None = None
    written: bool = False

    @classmethod
    def of(cls, name: str, value: Any, *, of_loss_fn: bool = False) -> KeptTensor:
        """Return the record of a tensor or array, without a copy; `can_be_kept` must be True for it."""
        tensor = value if isinstance(value, Tensor) else _shared(value)
        parameter = isinstance(tensor, nn.Parameter)
        return cls(
            name,
            tensor,
            # .data shares the memory and has a version counter of its own.
            tensor.data,
            version(tensor),
            frozen=parameter and not tensor.requires_grad,
            trained=tensor.requires_grad,
            of_loss_fn=of_loss_fn,
            array=None if tensor is value else value,
        )

    @property
    def holder(self) -> Any:
        """The tensor, or the NumPy array, that the user's code refers to."""
        return self.tensor if self.array is None else self.array

    def content(self) -> Any:
        """Return a copy of the present content: a tensor, or a NumPy array if `holder` is one."""
        copy = self.tensor.detach().clone()
        return copy if self.array is None else copy.numpy()

    def copy_now(self) -> None:
        """Copy the content, unless it has been copied."""
        if self.copy is None:
            # From the alias, because `tensor.data = other` may have given the tensor other memory.
            self.copy = self.alias.clone()

    def record_head(self) -> None:
        """Record the first values."""
        self.head = _head(self.alias).clone()

    def record_sums(self) -> None:
        """Record sums of the content, to detect writes through ``.data``, which no version counter shows."""
        self.sums = sums_of(self.alias)

    def has_other_memory(self) -> bool:
        """Return whether the tensor now has other memory, because of ``tensor.data = ...``."""
        now, before = self.tensor, self.alias
        return now.shape != before.shape or now.dtype != before.dtype or now.data_ptr() != before.data_ptr()

    def has_changed(self) -> bool:
        """Return whether the content is known to have changed."""
        # A write of equal values is a change too, e.g. by a moving average of two equal models.
        if self.frozen and (self.written or version(self.tensor) != self.version):
            return True
        if self.has_other_memory():
            before = self.alias if self.copy is None else self.copy
            # The dtype first, because torch.equal raises for two dtypes.
            return self.tensor.dtype != before.dtype or not torch.equal(self.tensor.data, before)
        if self.copy is not None:
            return not torch.equal(self.alias, self.copy)
        return self._written_uncopied()

    def changed_without_copy(self) -> bool:
        """Return whether the content has changed and was not copied before."""
        return self.copy is None and self._written_uncopied()

    def is_undetectable(self) -> bool:
        """Return whether a write through ``.data`` would be missed in most of the content."""
        uncopied = self.copy is None and self.sums is None
        return uncopied and not (self.frozen or self.trained) and self.alias.nbytes > SMALL_BYTES

    def _written_uncopied(self) -> bool:
        # The optimizer changes trained parameters between windows, which is no change by a forward.
        if self.trained:
            return False
        if version(self.tensor) != self.version:
            return True
        if self.head is not None and not torch.equal(_head(self.alias), self.head):
            return True
        now = None if self.sums is None else sums_of(self.alias)
        return now is not None and self.sums is not None and not torch.equal(now, self.sums)

    def restore(self) -> None:
        """Restore the tensor's memory, and the content of that memory."""
        if self.has_other_memory():
            # First the memory, because the content is copied into the alias.
            self.tensor.data = self.alias
        if self.copy is not None and not torch.equal(self.alias, self.copy):
            # Through the alias, so that the tensor's version counter shows no new write.
            with torch.no_grad(), torch.inference_mode(self.tensor.is_inference()):
                self.alias.copy_(self.copy)
        self.written = False


def copy_or_trace(
    tensors: Iterable[KeptTensor],
    known: Container[int],
    *,
    frozen_bytes: int,
    other_bytes: int,
    sum_bytes: int,
) -> None:
    """Copy small tensors and those that have changed before; record some values, or sums, of the others.

    Args:
        tensors: the tensors; a trained one is copied only if it has changed before, and never traced.
        known: ids of the tensors that have changed before.
        frozen_bytes: bytes of frozen parameters that may be copied.
        other_bytes: bytes of other small tensors that may be copied.
        sum_bytes: bytes of large tensors that may be summed.

    Examples:
        >>> kept = KeptTensor.of("center", torch.zeros(2))
        >>> copy_or_trace([kept], set(), frozen_bytes=0, other_bytes=64, sum_bytes=0)
        >>> kept.copy
        tensor([0., 0.])
    """
    left = {True: frozen_bytes, False: other_bytes}
    # Small tensors come first, so that more of them fit.
    for kept in sorted(tensors, key=lambda kept: kept.alias.nbytes):
        size = kept.alias.nbytes
        if id(kept.holder) in known:
            kept.copy_now()
        elif kept.trained:
            continue
        elif size <= left[kept.frozen] and (size <= SMALL_BYTES or kept.frozen):
            left[kept.frozen] -= size
            kept.copy_now()
        else:
            kept.record_head()
            if SMALL_BYTES < size <= sum_bytes:
                sum_bytes -= size
                kept.record_sums()


def can_be_kept(value: Any) -> bool:
    """Return whether a value is a tensor or NumPy array whose content can be compared and copied.

    Examples:
        >>> can_be_kept(torch.zeros(2)), can_be_kept(torch.zeros(2, device="meta")), can_be_kept(2)
        (True, False, False)
    """
    if is_array(value):
        # torch.from_numpy raises for negative strides and warns of read-only arrays.
        return value.flags.writeable and _of_torch(value.dtype) and min(value.strides, default=0) >= 0
    return (
        # Exact types, because a subclass may change clone and equal. A tensor with a grad_fn is a result.
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.grad_fn is None
    )


def _of_torch(dtype: Any) -> bool:
    """Return whether torch has the same dtype; for unsigned integers one of the same size suffices."""
    return dtype.isnative and (dtype.kind in "biu" or dtype.kind + str(dtype.itemsize) in _FLOATING)


def _shared(array: Any) -> Tensor:
    """Return a tensor with the memory of a NumPy array."""
    dtype = array.dtype
    # As signed integers, because torch has few kernels for wide unsigned dtypes.
    return torch.from_numpy(array.view(f"i{dtype.itemsize}") if dtype.kind == "u" else array)


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array.

    Examples:
        >>> import numpy
        >>> is_array(numpy.zeros(2)), is_array(torch.zeros(2))
        (True, False)
    """
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes of a tensor; 0 for one without a version counter.

    Examples:
        >>> version(torch.zeros(2).add_(1))
        1
    """
    # Reading the version counter of an inference tensor raises.
    return 0 if tensor.is_inference() else tensor._version


def _head(tensor: Tensor) -> Tensor:
    # flatten() copies a tensor that is not contiguous, so only its first row is used.
    return tensor.flatten()[:_HEAD] if tensor.is_contiguous() else tensor[:1].flatten()[:_HEAD]


def sums_of(tensor: Tensor) -> Tensor | None:
    """Return integer sums of the bytes of a tensor, in 4096 parts; None if it is not contiguous.

    Examples:
        >>> int(sums_of(torch.ones(5, dtype=torch.uint8)).sum())
        5
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None  # view(uint8) below would raise
    flat = tensor.flatten().view(torch.uint8)
    # As int64 each addition reads 8 bytes; the view needs an offset that is a multiple of 8.
    if flat.storage_offset() % 8 == 0:
        flat = flat[: len(flat) // 8 * 8].view(torch.int64)
    parts = flat[: len(flat) // _PARTS * _PARTS].view(_PARTS, -1)
    rest = tensor.flatten().view(torch.uint8)[parts.nbytes :]
    return torch.cat([parts.sum(1), rest.sum().view(1)])


class CopyBeforeWrite(TorchDispatchMode):
    """Mode that copies tensors when an operation is about to write to their memory.

    Args:
        kept: returns the records of the tensors.

    Examples:
        >>> kept = KeptTensor.of("teacher.weight", torch.zeros(2))
        >>> with CopyBeforeWrite(lambda: [kept]):
        ...     _ = torch._foreach_add_([kept.tensor.data], 1.0)
        >>> kept.restore()
        >>> kept.tensor
        tensor([0., 0.])
    """

    def __init__(self, kept: Callable[[], Iterable[KeptTensor]]) -> None:
        super().__init__()
        self._kept = kept
        self._by_memory: dict[int, list[KeptTensor]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and skipping would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Most operations write nothing, so for them only this attribute is read.
        if func._schema.is_mutable:
            if self._by_memory is None:
                # Built at the first write, because many forwards write nothing.
                self._by_memory = {}
                for kept in self._kept():
                    self._by_memory.setdefault(_memory(kept.alias), []).append(kept)
            for tensor in _written(func, args, kwargs):
                for kept in self._by_memory.get(_memory(tensor), ()):
                    # All tensors in that memory, because a write to a view changes its base too.
                    kept.copy_now()
                    kept.written = True
        return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            # Arguments may be passed by position or by keyword; out= is always a keyword.
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    yield tensor


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return -1
