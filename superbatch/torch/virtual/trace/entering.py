"""Entry of the batch's real tensors into a recording, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ir.calls import blank_like
from ..ir.shard import Shard
from ..ir.values import Sliced, Value
from .recording import Recording


def entered(tensor: Tensor, recording: Recording) -> Any:
    """Return a virtual tensor with the samples of a real one in dimension 0."""
    if tensor.requires_grad:
        recording.note_leaf(tensor)
        return _Enter.apply(tensor, recording)  # the gradient flows back to the real tensor
    return recording.show(_source(tensor, recording))


class _Enter(torch.autograd.Function):
    """Autograd function from a real tensor to a virtual one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, recording: Recording) -> Tensor:
        ctx.recording = recording
        return recording.show(_source(tensor, recording))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph: as numbers the gradient would be a constant
            return grads[0], None
        return ctx.recording.numbers(grads[0]), None


def _source(tensor: Tensor, recording: Recording) -> Value:
    value = Value(blank_like(tensor), recording.device, Shard(0))
    if tensor.device == recording.device:
        recording.readings.read(value, tensor.detach())
    else:
        # On the host: micro-batches are copied one at a time, and the batch is never on the device.
        value.rows = Sliced(tensor.detach(), Shard(0))
    return value
