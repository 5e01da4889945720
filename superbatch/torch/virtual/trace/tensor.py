"""The tensor that the program sees: of the full size of the batch, with a recording in place of numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.errors import WindowError, explain

from ..ir.recorder import Recorder
from ..ir.values import Handle, Value


class Storage:
    """Storage shared by a tensor and its views: the current value, and a count of writes in place."""

    __slots__ = ("handle", "version")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.version = 0

    @property
    def value(self) -> Value:
        """The value now."""
        return self.handle.value

    def write(self, value: Value) -> None:
        """Put another in its place."""
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
        recording: of its block.
        storage: what it shares with its views.
        steps: by which it is a view of what the storage holds.
        handle: of the value that it showed when it was read last.
        seen: version of the storage then.
    """

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
            handle: of the value.
            seen: version of the storage that it belongs to.
        """
        self.handle, self.seen = handle, seen
        self.recording.watch(handle)

    def restart(self, recording: Recorder, handle: Handle) -> None:
        """Begin anew, as a tensor that is no view."""
        self.recording, self.storage, self.steps = recording, Storage(handle), ()
        self.show(handle, 0)

    def become(self, other: VirtualState) -> None:
        """Share the memory of another tensor of the same block, as the view that it is."""
        self.storage, self.steps = other.storage, other.steps
        self.handle, self.seen = other.handle, other.seen


class VirtualTensor(Tensor):
    """Tensor of the full batch, computed micro-batch by micro-batch when its numbers are read.

    Attributes:
        memoryless: for those that count memory: its storage says a size, and has none.
        virtual: its recording and its value there.
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
        """Wrap a value; with a storage: as a view of it."""
        meta = value.meta
        self: VirtualTensor = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue] not in torch's stubs
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=value.device,
        )
        # Otherwise what asks for its memory (`data_ptr`, DLPack in C) is given null, and reads there.
        torch._C._set_throw_on_mutable_data_ptr(self)
        handle = value.handle()
        recording.watch(handle)
        self.virtual = VirtualState(recording, handle, storage, steps)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation."""
        kwargs = kwargs or {}
        return _recording_of(args, kwargs).dispatch(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """The same without its history."""
        return Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue] a descriptor

    @data.setter
    def data(self, other: Tensor) -> None:
        _become(self, other)

    # What reads memory itself, below every dispatch, is given the numbers.

    def numpy(self, *, force: bool = False) -> Any:
        """Return the numbers, all of them."""
        return self.virtual.recording.numbers(self).numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """Return the numbers, all of them."""
        return self.virtual.recording.numbers(self).__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Hand over the numbers, all of them."""
        return self.virtual.recording.numbers(self).detach().__dlpack__(**options)

    def data_ptr(self) -> Any:
        """Refuse."""
        raise _no_memory("data_ptr()")

    def share_memory_(self) -> Any:
        """Refuse."""
        raise _no_memory("share_memory_()")

    def apply_(self, callable: Any) -> Any:
        """Refuse."""
        raise _no_memory("apply_()")

    def tolist(self) -> Any:
        """Return the numbers, all of them."""
        return self.virtual.recording.numbers(self).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe the tensor; whole values that are computed, with their numbers."""
        value = self.virtual.handle.value
        if value.layout is None and value.whole is not None:
            return f"VirtualTensor({value.whole!r})"
        return f"VirtualTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        """Format the number of a tensor that has one."""
        return self.virtual.recording.numbers(self).detach().__format__(spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return the numbers: a copy belongs to no block."""
        return self.virtual.recording.numbers(self).detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the numbers."""
        return self.virtual.recording.numbers(self).detach().__reduce_ex__(protocol)


def _become(target: VirtualTensor, other: Tensor) -> None:
    """Let a tensor be another from now on, as ``target.data = other`` does: what it was a view of stays.

    Raises:
        WindowError: its shape or dtype is another.
    """
    if (other.shape, other.dtype) != (target.shape, target.dtype):
        raise WindowError(
            explain(
                f".data = a tensor of shape {tuple(other.shape)}, {other.dtype}",
                f"the tensor of the virtual batch is of shape {tuple(target.shape)}, {target.dtype}",
                "use a new variable for it",
            )
        )
    state = target.virtual
    if isinstance(other, VirtualTensor) and other.virtual.recording is state.recording:
        state.become(other.virtual)
    else:
        state.restart(state.recording, state.recording.value(other).handle())


def _no_memory(what: str) -> WindowError:
    return WindowError(
        explain(
            f"{what} of a tensor of the virtual batch",
            "such a tensor has no memory of its own",
            "take its numbers: tensor.numpy(), tensor.tolist()",
        )
    )


def is_hollow(tensor: Tensor) -> bool:
    """Return whether a real tensor has a virtual one as its memory: to read it would end the process."""
    try:
        tensor.data_ptr()
    except (RuntimeError, ValueError):  # others without memory: a lazy parameter, a sparse or wrapped tensor
        return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return False


def refuse_hollow(tensor: Tensor) -> None:
    """Raise on a tensor after ``real.data = virtual``, which no hook sees when it is set.

    Raises:
        WindowError: it is such a tensor.
    """
    if is_hollow(tensor):
        raise hollow_error(tensor)


def hollow_error(tensor: Tensor) -> WindowError:
    """Return the error of ``real.data = virtual``."""
    return WindowError(
        f"A real tensor of shape {tuple(tensor.shape)} has its .data set to one of the virtual batch, "
        "which has no memory. Write the numbers into it: with torch.no_grad(): real.copy_(numbers)."
    )


def _recording_of(args: Any, kwargs: dict[str, Any]) -> Recorder:
    """The recording of the first virtual tensor, one that is still open if there is one."""
    found: Recorder | None = None
    for arg in (*args, *kwargs.values()):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, VirtualTensor) and (found is None or not found.open):
                found = item.virtual.recording
    assert found is not None
    return found
