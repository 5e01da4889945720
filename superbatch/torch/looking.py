"""Looking at how a model computes, without compiling anything for it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def run_eagerly() -> AbstractContextManager[Any]:
    """Run compiled models eagerly: the odd sizes and the hooks of a look are not to be compiled.

    Examples:
        >>> with run_eagerly():
        ...     torch.ones(2).sum().item()
        2.0
    """
    # Importing dynamo takes seconds; while nobody has, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


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
