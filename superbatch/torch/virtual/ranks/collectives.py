"""Collectives that the program calls on virtual tensors: what they write and return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import mapped
from ..ir.recorder import Recorder
from ..trace.tensor import VirtualTensor


def shown(recording: Recorder, func: Any, args: Any, result: Any) -> Any:
    """Return the tensors that the program gave to be written, or new ones for what a collective returned."""
    if func.namespace == "c10d":
        return (args[0], result[-1]) if isinstance(result, (list, tuple)) else result
    return mapped(result, lambda tensor: recording.show(recording.given(tensor)))


def is_written(item: VirtualTensor, func: Any, args: Any) -> bool:
    """Tell whether a collective writes a tensor that it was given."""
    written = [
        arg
        for arg, told in zip(args, func._schema.arguments, strict=False)
        # Lists of lists of tensors come without a mark: outputs are named so, and come first.
        if (told.alias_info is not None and told.alias_info.is_write)
        or told.name in ("output_tensors", "outputs", "output", "output_tensor", "tensors")
    ]
    return any(found is item for found in flat(written))


def flat(items: Any) -> Iterator[Any]:
    """Yield the items of lists in lists."""
    for item in items if isinstance(items, (list, tuple)) else [items]:
        if isinstance(item, (list, tuple)):
            yield from flat(item)
        else:
            yield item


def waited(result: Any) -> Any:
    """Return the result of a collective, once its numbers can be read."""
    items = result if isinstance(result, (list, tuple)) else [result]
    for item in items:
        if isinstance(item, Tensor):
            torch.ops._c10d_functional.wait_tensor(item)
        elif isinstance(item, torch.ScriptObject):
            from torch._C import _distributed_c10d as c10d  # is not there in builds without distributed

            c10d.Work.unbox(item).wait()  # pyright: ignore[reportAttributeAccessIssue]  (not in torch's stubs)
    return result
