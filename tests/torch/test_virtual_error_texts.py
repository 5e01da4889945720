"""Exact texts of errors of a virtual batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import WindowError
from superbatch.torch import virtual_batch

X = torch.linspace(-1.0, 1.0, 18, dtype=torch.float64).reshape(6, 3)


def test_a_parameter_written_by_another_thread_after_its_use() -> None:
    """A dispatch mode is local to its thread: only the version counter shows the write."""
    # Tensors of up to 4096 elements are copied on use. The layer reads the transpose.
    model = nn.Linear(3, 2000, dtype=torch.float64)

    def write() -> None:
        with torch.no_grad():
            model.weight.add_(1.0)

    def block() -> None:
        with virtual_batch(model, 2) as batch:
            loss = model(batch(X)).square().mean()
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
            loss.item()

    text = (
        r"^A tensor of shape \(3, 2000\) was written in place after an operation of the virtual batch had "
        r"read it\. Write into parameters and buffers after the block, or write into a clone\.$"
    )
    with pytest.raises(WindowError, match=text):
        block()


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (
            lambda x: x.clone().resize_(2),
            r"^resize_\(\) and set_\(\) cannot change a virtual tensor: it has no memory\. "
            r"Use an operation that returns a new tensor\.$",
        ),
        (
            lambda x: x.clone().unfold(1, 2, 1).add_(1.0),
            r"^A view of the virtual batch made by aten\.unfold\.default cannot be written in place\. "
            r"Write into a clone of it\.$",
        ),
    ],
)
def test_unsupported_in_place_writes_raise(write: Callable[[Any], Tensor], text: str) -> None:
    with virtual_batch(nn.Linear(3, 1), 2) as batch, pytest.raises(WindowError, match=text):
        write(batch(X))
    write(X)  # premise: plain PyTorch allows it


def test_writing_to_a_view_of_another_block_raises() -> None:
    with virtual_batch(nn.Linear(3, 1), 2) as batch:
        rows = batch(X).sum(0)
        view = rows[1:]
        rows.sum().item()
    text = r"^A view of another virtual batch cannot be written in place\. Write into a clone of it\.$"
    with virtual_batch(nn.Linear(3, 1), 2) as batch, pytest.raises(WindowError, match=text):
        view.add_(batch(X).sum())
