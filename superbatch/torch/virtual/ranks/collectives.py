"""Arguments and results of collectives that the program calls on virtual tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import mapped
from ..ir.recorder import Recorder
from ..trace.tensor import VirtualTensor


def wrapped_result(recording: Recorder, func: Any, args: Any, result: Any) -> Any:
    """Return the result of a collective with virtual tensors in place of real ones."""
    if func.namespace == "c10d":  # in place: returns the program's tensors and a handle to wait for
        return (args[0], result[-1]) if isinstance(result, (list, tuple)) else result
    return mapped(result, lambda tensor: recording.wrap(recording.from_real(tensor)))


def is_written(item: VirtualTensor, func: Any, args: Any) -> bool:
    """Return whether a collective writes one of its arguments."""
    written = [
        arg
        for arg, declared in zip(args, func._schema.arguments, strict=False)
        # Schemas do not mark nested lists of tensors as written, but outputs have these names.
        if (declared.alias_info is not None and declared.alias_info.is_write)
        or declared.name in ("output_tensors", "outputs", "output", "output_tensor", "tensors")
    ]
    return any(tensor is item for tensor in flat(written))


def flat(items: Any) -> Iterator[Any]:
    """Yield the items of nested lists."""
    # The operators of all_gather and gather take lists of lists of tensors.
    for item in items if isinstance(items, (list, tuple)) else [items]:
        if isinstance(item, (list, tuple)):
            yield from flat(item)
        else:
            yield item


def waited(result: Any) -> Any:
    """Wait for a collective, and return its result."""
    # A virtual tensor cannot wait later, so its numbers must be complete when it is made.
    items = result if isinstance(result, (list, tuple)) else [result]
    for item in items:
        if isinstance(item, Tensor):
            torch.ops._c10d_functional.wait_tensor(item)
        elif isinstance(item, torch.ScriptObject):
            from torch._C import _distributed_c10d as c10d  # missing in builds without torch.distributed

            c10d.Work.unbox(item).wait()  # pyright: ignore[reportAttributeAccessIssue]  (not in torch's stubs)
    return result
