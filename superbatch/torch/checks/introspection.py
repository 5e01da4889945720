"""Run compiled models eagerly, and collect the dtypes in which models compute."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils._python_dispatch import TorchDispatchMode

from ..interrupts import DeferredInterrupts
from ..warn import warn


class _Stance:
    """Number of open blocks in which torch must not compile; global, like torch's stance.

    Without the count, two blocks that overlap in two threads would leave the stance set: the second one would
    save the stance of the first, and restore it at its end. Then nothing would be compiled any more.
    """

    def __init__(self) -> None:
        # Reentrant: the thread can acquire it again if an exception interrupts the release.
        self._lock = threading.RLock()
        self._blocks = 0
        self._eager: Any = None

    def begin(self) -> None:
        # An interrupt between these lines would leave the stance set for good.
        with DeferredInterrupts(), self._lock:
            if not self._blocks:
                self._eager = torch.compiler.set_stance("force_eager")
                self._eager.__enter__()
            self._blocks += 1

    def end(self) -> None:
        with DeferredInterrupts(), self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._eager.__exit__(None, None, None)


_STANCE = _Stance()


class _IgnoreHookWarning:
    """Filter for torch's warning about hooks of compiled modules, which does not apply to the hooks set here.

    Not `warnings.catch_warnings`: its end would undo filters that the program has set in the meantime. Also,
    warnings that are shown once per line would be shown again.
    """

    _FILTER = ("ignore", re.compile(r"Using `torch\.compile\(module\)` when there are"), UserWarning, None, 0)

    def __enter__(self) -> None:
        self._filters: Any = warnings.filters
        # In front, so that it precedes the program's own filters.
        self._filters.insert(0, self._FILTER)

    def __exit__(self, *error: object) -> None:
        # Another block or thread may have inserted an equal filter; removing either one is fine.
        if self._FILTER in self._filters:
            self._filters.remove(self._FILTER)


@cache
def _warn_of_eager_run() -> None:
    """Warn once per process that a compiled model runs eagerly."""
    warn(
        "A compiled model runs eagerly inside virtual_batch, which records its operations. "
        "Pass compile=True to virtual_batch to compile the recorded operations."
    )


@contextmanager
def _warning_of_eager_runs() -> Iterator[None]:
    thread = threading.get_ident()  # the global hook is called in other threads too

    def warn_if_compiled(module: nn.Module, inputs: object) -> None:
        if threading.get_ident() == thread and is_compiled(module):
            _warn_of_eager_run()

    # On all modules: a compiled one may be called anywhere inside the model.
    handle = all_modules.register_module_forward_pre_hook(warn_if_compiled)
    try:
        yield
    finally:
        handle.remove()


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module itself was compiled, by torch.compile(module) or module.compile().

    Examples:
        >>> is_compiled(nn.Linear(1, 1))
        False
    """
    # torch.compile(module) wraps it; module.compile() sets a private attribute.
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


@contextmanager
def run_eagerly(*, warns: bool = False) -> Iterator[None]:
    """Run compiled models eagerly inside the context, so that unusual sizes and probe hooks are not compiled.

    Args:
        warns: warn when a compiled model is called, once per process.

    Examples:
        >>> with run_eagerly():
        ...     torch.ones(2).sum().item()
        2.0
    """
    # Importing torch._dynamo takes seconds, and before it is imported nothing can be compiled.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _STANCE.begin()
    try:
        with ExitStack() as stack:
            if warns:
                stack.enter_context(_IgnoreHookWarning())
                stack.enter_context(_warning_of_eager_runs())
            yield
    finally:
        _STANCE.end()


class FloatingDtypes(TorchDispatchMode):
    """Collect the floating-point dtypes of the results of operations, inside autocast too.

    Examples:
        >>> with FloatingDtypes() as dtypes:
        ...     _ = torch.ones(2).double()
        >>> sorted(map(str, dtypes.seen))
        ['torch.float32', 'torch.float64']
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside; wrapping the mode would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.seen.add(result.dtype)
        return result
