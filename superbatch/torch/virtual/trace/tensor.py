"""Virtual tensor: a wrapper subclass with the shape of the full batch and a recording instead of memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.errors import WindowError

from ..ir.recorder import Recorder
from ..ir.values import Handle, Value


class Storage:
    """Storage shared by a tensor and its views: the current value, and the number of in-place writes."""

    __slots__ = ("handle", "version")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.version = 0

    @property
    def value(self) -> Value:
        """Current value."""
        return self.handle.value

    def write(self, value: Value) -> None:
        """Replace the value, and invalidate the views."""
        self.handle = value.handle()
        self.version += 1


class ViewStep(NamedTuple):
    """An operator that makes a view, with its arguments after the tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class VirtualState:
    """State of a virtual tensor.

    Attributes:
        recording: recording of its block.
        storage: storage shared with its base and views.
        steps: view operations from the value of the storage to this tensor.
        handle: handle of the value at the last read.
        seen: version of the storage at the last read.
    """

    # An object of its own: `become` and `restart` swap what a tensor shows, and autograd keeps the tensor.
    __slots__ = ("handle", "recording", "seen", "steps", "storage")

    def __init__(
        self, recording: Recorder, handle: Handle, storage: Storage | None, steps: tuple[ViewStep, ...]
    ) -> None:
        self.recording, self.handle, self.steps = recording, handle, steps
        self.storage = storage = storage or Storage(handle)
        self.seen = storage.version

    def show(self, handle: Handle, seen: int) -> None:
        """Show another value from now on.

        Args:
            handle: handle of the value.
            seen: version of the storage that the value belongs to.
        """
        self.handle, self.seen = handle, seen
        self.recording.watch(handle)

    def restart(self, recording: Recorder, handle: Handle) -> None:
        """Show a value with a new storage, as a tensor that is no view."""
        self.recording, self.storage, self.steps = recording, Storage(handle), ()
        self.show(handle, 0)

    def become(self, other: VirtualState) -> None:
        """Share the storage of another tensor of the block, with its view steps."""
        self.storage, self.steps = other.storage, other.steps
        self.handle, self.seen = other.handle, other.seen


class VirtualTensor(Tensor):
    """Tensor of the full batch, computed micro-batch by micro-batch when its numbers are read.

    Attributes:
        memoryless: marks the tensor for code that counts memory: its storage has a size but no memory.
        virtual: its state.
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
        """Wrap a value; with a storage, as a view of it."""
        meta = value.meta
        self: VirtualTensor = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue] not in torch's stubs
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=value.device,
        )
        # Makes C++ code that reads the memory (`data_ptr`, DLPack) raise: it would read a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(self)
        handle = value.handle()
        recording.watch(handle)
        self.virtual = VirtualState(recording, handle, storage, steps)
        return self

    # Functions reach `__torch_dispatch__` below autograd: the graph of the program is recorded as usual.
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
        _become(self, other)  # torch's setter would swap the C++ storage, which nothing here reads

    # These read raw memory without any dispatch, so they get the materialized numbers.

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
        """Describe the tensor, with numbers if they are full and already computed."""
        # A debugger calls this: it must not start a sweep.
        value = self.virtual.handle.value
        if value.shard is None and value.full is not None:
            return f"VirtualTensor({value.full!r})"
        return f"VirtualTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        """Format the number of a tensor that has one."""
        return self.virtual.recording.numbers(self).detach().__format__(spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return the numbers: the copy belongs to no block."""
        return self.virtual.recording.numbers(self).detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the numbers."""
        return self.virtual.recording.numbers(self).detach().__reduce_ex__(protocol)


def _become(target: VirtualTensor, other: Tensor) -> None:
    """Let a tensor show another one, as ``target.data = other`` does; its former base is unchanged.

    Raises:
        WindowError: shape or dtype differ.
    """
    # The sizes of a wrapper are fixed in C++: another shape would contradict them.
    if (other.shape, other.dtype) != (target.shape, target.dtype):
        raise WindowError(
            f"The .data of a virtual tensor of shape {tuple(target.shape)}, {target.dtype} cannot be set to "
            f"a tensor of shape {tuple(other.shape)}, {other.dtype}. Assign that tensor to a new variable."
        )
    state = target.virtual
    if isinstance(other, VirtualTensor) and other.virtual.recording is state.recording:
        state.become(other.virtual)
    else:
        state.restart(state.recording, state.recording.value(other).handle())


def _no_memory(what: str) -> WindowError:
    return WindowError(
        f"{what} was called on a virtual tensor, which has no memory. "
        "Read its numbers with tensor.numpy() or tensor.tolist()."
    )


def is_hollow(tensor: Tensor) -> bool:
    """Return whether the .data of a real tensor was set to a virtual one."""
    # Reading it in a kernel would end the process: `data_ptr` raises before that.
    try:
        tensor.data_ptr()
    except (RuntimeError, ValueError):  # also raised by a lazy parameter, a sparse tensor, another wrapper
        return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return False


def refuse_hollow(tensor: Tensor) -> None:
    """Raise if the .data of a real tensor was set to a virtual one.

    Raises:
        WindowError: it was.
    """
    if is_hollow(tensor):
        raise hollow_error(tensor)


def hollow_error(tensor: Tensor) -> WindowError:
    """Return the error of ``real.data = virtual``."""
    return WindowError(
        f"The .data of a real tensor of shape {tuple(tensor.shape)} was set to a virtual tensor, which has "
        "no memory. Write the numbers into it: with torch.no_grad(): real.copy_(numbers)."
    )


def _recording_of(args: Any, kwargs: dict[str, Any]) -> Recorder:
    """Return the recording of the first virtual tensor, of an open block if there is one."""
    found: Recorder | None = None
    for arg in (*args, *kwargs.values()):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, VirtualTensor) and (found is None or not found.open):
                found = item.virtual.recording
    assert found is not None
    return found
