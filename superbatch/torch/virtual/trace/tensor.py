"""Virtual tensor: a wrapper subclass with the shape of the full batch, and a recording in place of memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.errors import WindowError

from ..ir.recorder import Recorder
from ..ir.values import Handle, Value


class Storage:
    """Storage of a tensor and its views: the current value, and the number of in-place writes."""

    __slots__ = ("handle", "version")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.version = 0

    @property
    def value(self) -> Value:
        """Current value."""
        return self.handle.value

    def write(self, value: Value) -> None:
        """Replace the value; views are recomputed when they are next read."""
        self.handle = value.handle()
        self.version += 1


class ViewStep(NamedTuple):
    """Operator that makes a view, with its arguments after the tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class VirtualState:
    """State of a virtual tensor.

    Attributes:
        recording: recording of its block.
        storage: storage, shared with its base and views.
        steps: view operations that lead from the value of the storage to this tensor.
        handle: handle of the value when the tensor was last read.
        version: version of the storage when the tensor was last read.
    """

    # Not in the tensor, because autograd keeps the tensor object while `alias` and `reset` change its value.
    __slots__ = ("handle", "recording", "steps", "storage", "version")

    def __init__(
        self, recording: Recorder, handle: Handle, storage: Storage | None, steps: tuple[ViewStep, ...]
    ) -> None:
        self.recording, self.handle, self.steps = recording, handle, steps
        self.storage = storage = storage or Storage(handle)
        self.version = storage.version

    def set_value(self, handle: Handle, version: int) -> None:
        """Set the value; `version` is that of the storage from which the value was computed."""
        self.handle, self.version = handle, version
        self.recording.register(handle)

    def reset(self, recording: Recorder, handle: Handle) -> None:
        """Set the value and a new storage, as for a tensor that is no view."""
        self.recording, self.storage, self.steps = recording, Storage(handle), ()
        self.set_value(handle, 0)

    def alias(self, other: VirtualState) -> None:
        """Share the storage of another tensor of the block, with its view steps."""
        self.storage, self.steps = other.storage, other.steps
        self.handle, self.version = other.handle, other.version


class VirtualTensor(Tensor):
    """Tensor of the full batch, computed micro-batch by micro-batch when its numbers are read.

    Attributes:
        memoryless: True, for code that counts memory: the storage has a size but no memory.
        virtual: state of the tensor.
    """

    memoryless = True
    virtual: VirtualState

    @staticmethod
    def __new__(
        cls,
        recording: Recorder,
        value: Value,
        storage: Storage | None = None,
        steps: tuple[ViewStep, ...] = (),
    ) -> VirtualTensor:
        """Create a tensor for a value; with a storage, as a view of it."""
        meta = value.meta
        self: VirtualTensor = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue] not in torch's stubs
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=value.device,
        )
        # C++ code that reads the memory (`data_ptr`, DLPack) raises. Otherwise it would read a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(self)
        handle = value.handle()
        recording.register(handle)
        self.virtual = VirtualState(recording, handle, storage, steps)
        return self

    # Disabled, so that operators arrive at `__torch_dispatch__`, below autograd, which records its graph.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation."""
        kwargs = kwargs or {}
        return _recording_of(args, kwargs).dispatch(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history."""
        return Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue] a descriptor

    @data.setter
    def data(self, other: Tensor) -> None:
        _alias(self, other)  # torch's setter would replace the C++ storage, which is not used here

    # These read memory without a dispatch, so they are given the materialized numbers.

    def numpy(self, *, force: bool = False) -> Any:
        """Return the numbers of the full batch."""
        return self.virtual.recording.numbers(self).numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """Return the numbers of the full batch."""
        return self.virtual.recording.numbers(self).__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Export the numbers of the full batch."""
        return self.virtual.recording.numbers(self).detach().__dlpack__(**options)

    def data_ptr(self) -> Any:
        """Raise: there is no memory."""
        raise _no_memory("data_ptr()")

    def share_memory_(self) -> Any:
        """Raise: there is no memory."""
        raise _no_memory("share_memory_()")

    def apply_(self, callable: Any) -> Any:
        """Raise: there is no memory."""
        raise _no_memory("apply_()")

    def tolist(self) -> Any:
        """Return the numbers of the full batch."""
        return self.virtual.recording.numbers(self).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe the tensor, with its numbers if they are full and already materialized."""
        # Debuggers call this, so it must not start a sweep.
        value = self.virtual.handle.value
        if value.shard is None and value.full is not None:
            return f"VirtualTensor({value.full!r})"
        return f"VirtualTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        """Format the number of a tensor with one element."""
        return self.virtual.recording.numbers(self).detach().__format__(spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return a real tensor with the numbers."""
        # The copy, such as that of an averaged model, may live longer than the block.
        return self.virtual.recording.numbers(self).detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a real tensor with the numbers."""
        return self.virtual.recording.numbers(self).detach().__reduce_ex__(protocol)


def _alias(target: VirtualTensor, other: Tensor) -> None:
    """Make a tensor an alias of another one, as ``target.data = other`` does; its former base is unchanged.

    Raises:
        WindowError: shape or dtype differ.
    """
    # C++ fixes the sizes of a wrapper, so another shape would contradict them.
    if (other.shape, other.dtype) != (target.shape, target.dtype):
        raise WindowError(
            f"The .data of a virtual tensor of shape {tuple(target.shape)}, {target.dtype} cannot be set to "
            f"a tensor of shape {tuple(other.shape)}, {other.dtype}. Assign that tensor to a new variable."
        )
    state = target.virtual
    if isinstance(other, VirtualTensor) and other.virtual.recording is state.recording:
        state.alias(other.virtual)
    else:
        state.reset(state.recording, state.recording.value(other).handle())


def _no_memory(what: str) -> WindowError:
    return WindowError(
        f"{what} was called on a virtual tensor, which has no memory. "
        "Read its numbers with tensor.numpy() or tensor.tolist()."
    )


def is_hollow(tensor: Tensor) -> bool:
    """Return whether the .data of a real tensor was set to a virtual one."""
    # `data_ptr` raises for such a tensor. A kernel that reads it would crash the process.
    try:
        tensor.data_ptr()
    except (RuntimeError, ValueError):  # also for lazy parameters, sparse tensors and other wrappers
        return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return False


def refuse_hollow(tensor: Tensor) -> None:
    """Raise `WindowError` if the .data of a real tensor was set to a virtual one."""
    if is_hollow(tensor):
        raise hollow_error(tensor)


def hollow_error(tensor: Tensor) -> WindowError:
    """Return the error for ``real.data = virtual``."""
    return WindowError(
        f"The .data of a real tensor of shape {tuple(tensor.shape)} was set to a virtual tensor, which has "
        "no memory. Write the numbers into it: with torch.no_grad(): real.copy_(numbers)."
    )


def _recording_of(args: Any, kwargs: dict[str, Any]) -> Recorder:
    """Return the recording of the first virtual tensor, preferably of one in an open block."""
    recording: Recorder | None = None
    for arg in (*args, *kwargs.values()):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, VirtualTensor) and (recording is None or not recording.open):
                recording = item.virtual.recording
    assert recording is not None
    return recording
