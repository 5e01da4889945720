"""torch's modes that are in force, restored after a failure that cut torch's own bookkeeping in two."""

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
    """The modes that are in force now, outermost first.

    torch enters and leaves a mode, and takes it off while the mode handles a function, in lines of Python: an
    interrupt, or a lack of memory, between two of them leaves a mode in force for ever, or takes one off that
    is still in use. There is no public way to see the modes, hence the private names.

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
        """Bring back what an error may have cut in two, and nothing that its owner may still leave.

        Args:
            error: the reason; modes are taken off or put on for an interrupt or a lack of memory alone.
        """
        if error is None or isinstance(error, GeneratorExit):
            return
        if self.grad:
            torch.set_grad_enabled(True)
        if _cuts(error):
            _close_contexts(error)
            self.restore()

    def restore(self) -> None:
        """Bring into force the modes that were in force when this object was made."""
        torch.set_grad_enabled(self.grad)
        now = Modes()
        _become(self.functions, now.functions, _pop_torch_function_stack, _push_mode)
        _become(
            self.dispatch,
            now.dispatch,
            dispatch._pop_mode,  # pyright: ignore[reportPrivateUsage]
            dispatch._push_mode,  # pyright: ignore[reportPrivateUsage]
        )


@contextmanager
def without_modes() -> Iterator[None]:
    """Take every mode off during the block: what runs there is not a part of what the modes watch.

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
    """Leave the block with the modes that it was entered with, whatever failed inside."""
    modes = Modes()
    try:
        yield
    finally:
        modes.restore()


def view_tracking() -> Callable[[], None]:
    """Return a function that restores how autograd tracks views now.

    Examples:
        >>> restore = view_tracking()
        >>> restore()
    """
    return partial(_set_view_replay_enabled, _is_view_replay_enabled())


def _cuts(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, may stop torch between two lines of its own."""
    while error is not None:
        if out_of_memory(error) or not isinstance(error, Exception | GeneratorExit):
            return True
        error = error.__context__
    return False


def _close_contexts(error: BaseException) -> None:
    """Close the context managers that an error has left suspended, the innermost first.

    An interrupt may come after a function of `contextlib.contextmanager` has entered and before Python takes
    note of it. Its end then runs whenever the error's traceback is freed: it would take off whichever mode is
    in force by then, and restore what is out of date.
    """
    suspended = list[Any]()
    each: BaseException | None = error
    while each is not None:
        for frame, _ in walk_tb(each.__traceback__):
            if frame.f_code in _EDGES:
                suspended.append(frame.f_locals["self"])
        each = each.__context__
    for context in reversed(suspended):
        with suppress(Exception):  # its error: Python prints and ignores it where a generator is freed
            context.gen.close()


def _become(
    wanted: list[Any], now: list[Any], pop: Callable[[], object], push: Callable[[Any], object]
) -> None:
    same = 0
    while same < min(len(wanted), len(now)) and wanted[same] is now[same]:
        same += 1
    for _ in now[same:]:
        pop()
    for mode in wanted[same:]:
        push(mode)
