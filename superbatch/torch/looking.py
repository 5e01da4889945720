"""Looking at how a model computes, without compiling anything for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Stance:
    """torch's stance on compiling while somebody looks. It is of the whole process, and so is this.

    Each of two looks that overlap in two threads would put back what it found: the second one to begin finds
    the first one's, and from its end on nothing would be compiled any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks = 0
        self._eager: Any = None

    def begin(self) -> None:
        with self._lock:
            if not self._looks:
                self._eager = torch.compiler.set_stance("force_eager")
                self._eager.__enter__()
            self._looks += 1

    def end(self) -> None:
        with self._lock:
            self._looks -= 1
            if not self._looks:
                self._eager.__exit__(None, None, None)


_STANCE = _Stance()


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled models eagerly: the odd sizes and the hooks of a look are not to be compiled.

    Examples:
        >>> with run_eagerly():
        ...     torch.ones(2).sum().item()
        2.0
    """
    if (
        "torch._dynamo" not in sys.modules
    ):  # importing it takes seconds; while nobody has, nothing is compiled
        yield
        return
    _STANCE.begin()
    try:
        yield
    finally:
        _STANCE.end()


class FloatingDtypes(TorchDispatchMode):
    """Collects the floating-point dtypes that operations give, inside autocast too.

    Examples:
        >>> with FloatingDtypes() as dtypes:
        ...     _ = torch.ones(2).double()
        >>> sorted(map(str, dtypes.seen))
        ['torch.float32', 'torch.float64']
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.seen.add(result.dtype)
        return result
