"""Snapshot of torch's active modes, to restore them after an interrupt inside torch's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import (
    _GeneratorContextManager,  # pyright: ignore[reportPrivateUsage]
    contextmanager,
    suppress,
)
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch._C import (
    _is_view_replay_enabled,  # pyright: ignore[reportPrivateUsage]
    _pop_torch_function_stack,  # pyright: ignore[reportPrivateUsage]
    _set_view_replay_enabled,  # pyright: ignore[reportPrivateUsage]
)
from torch.overrides import (
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils import _python_dispatch as dispatch

from .memory.out_of_memory import out_of_memory

_EDGES = [_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__]


class Modes:
    """The modes that were active when this object was made, outermost first.

    torch enters and leaves a mode in Python code, and removes it while the mode handles a function. An
    interrupt or an out-of-memory error between two of these lines leaves a mode active for ever, or removes
    one that is still in use. torch has no public function to list its modes, hence the private names.

    Attributes:
        functions: modes of functions (`torch.overrides.TorchFunctionMode`).
        dispatch: modes of operators (`torch.utils._python_dispatch.TorchDispatchMode`).
        grad: whether autograd records.

    Examples:
        >>> import torch
        >>> modes, leaked = Modes(), torch.device("cpu")
        >>> _ = leaked.__enter__()
        >>> modes.restore()
        >>> modes.functions == Modes().functions
        True
    """

    def __init__(self) -> None:
        self.functions = _get_current_function_mode_stack()
        self.dispatch = dispatch._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
        self.grad = torch.is_grad_enabled()

    def recover(self, error: BaseException | None) -> None:
        """Restore grad mode, and the modes that an error may have left inconsistent.

        Args:
            error: the error. Modes are removed or added only for an interrupt or an out-of-memory error;
                after another error their owners leave them.
        """
        if error is None or isinstance(error, GeneratorExit):
            return
        if self.grad:
            torch.set_grad_enabled(True)
        if _may_interrupt_torch(error):
            _close_contexts(error)
            self.restore()

    def restore(self) -> None:
        """Activate the modes that were active when this object was made, and remove all others."""
        torch.set_grad_enabled(self.grad)
        now = Modes()
        _change_stack(self.functions, now.functions, _pop_torch_function_stack, _push_mode)
        _change_stack(
            self.dispatch,
            now.dispatch,
            dispatch._pop_mode,  # pyright: ignore[reportPrivateUsage]
            dispatch._push_mode,  # pyright: ignore[reportPrivateUsage]
        )


@contextmanager
def without_modes() -> Iterator[None]:
    """Remove every mode during the block, so that the modes do not handle the functions that it calls.

    Examples:
        >>> import torch
        >>> with torch.device("meta"), without_modes():
        ...     torch.zeros(1).device
        device(type='cpu')
    """
    modes, none = Modes(), Modes()
    none.functions, none.dispatch = [], []
    none.restore()
    try:
        yield
    finally:
        modes.restore()


@contextmanager
def kept_modes() -> Iterator[None]:
    """Restore the present modes at the end of the block, also if it raises."""
    modes = Modes()
    try:
        yield
    finally:
        modes.restore()


def view_tracking() -> Callable[[], None]:
    """Return a function that restores autograd's present setting for tracking views.

    Examples:
        >>> restore = view_tracking()
        >>> restore()
    """
    return partial(_set_view_replay_enabled, _is_view_replay_enabled())


def _may_interrupt_torch(error: BaseException | None) -> bool:
    """Return whether an error, or one of its contexts, may have stopped torch between two of its lines."""
    while error is not None:
        if out_of_memory(error) or not isinstance(error, Exception | GeneratorExit):
            return True
        error = error.__context__
    return False


def _close_contexts(error: BaseException) -> None:
    """Close the context managers that an error has left open, the innermost first.

    An interrupt may arrive after a `contextlib.contextmanager` function has entered and before Python has
    recorded it. The function's end then runs only when the error's traceback is freed: it would remove
    whichever mode is active by then, and restore an outdated setting.
    """
    suspended = list[Any]()
    each: BaseException | None = error
    while each is not None:
        for frame, _ in walk_tb(each.__traceback__):
            if frame.f_code in _EDGES:
                suspended.append(frame.f_locals["self"])
        each = each.__context__
    for context in reversed(suspended):
        with suppress(Exception):  # any kind, as Python ignores errors of a generator that is freed
            context.gen.close()


def _change_stack(
    wanted: list[Any], now: list[Any], pop: Callable[[], object], push: Callable[[Any], object]
) -> None:
    """Change a stack of modes from `now` to `wanted`, without touching the modes that both share."""
    same = 0
    while same < min(len(wanted), len(now)) and wanted[same] is now[same]:
        same += 1
    for _ in now[same:]:
        pop()
    for mode in wanted[same:]:
        push(mode)
