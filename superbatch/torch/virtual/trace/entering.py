"""Virtual tensors for the real tensors of the batch, with gradients back to these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ir.calls import meta_like
from ..ir.shard import Shard
from ..ir.values import Sliced, Value
from .recording import Recording


def entered(tensor: Tensor, recording: Recording) -> Any:
    """Return a virtual tensor with the samples of a real one in dimension 0."""
    if tensor.requires_grad:
        recording.register_leaves(tensor)
        return _Enter.apply(tensor, recording)  # the gradient flows back to the real tensor
    return recording.wrap(_source(tensor, recording))


class _Enter(torch.autograd.Function):
    """Autograd function from a real tensor to a virtual one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, recording: Recording) -> Tensor:
        ctx.recording = recording
        return recording.wrap(_source(tensor, recording))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # with create_graph the gradient needs its graph
            return grads[0], None
        return ctx.recording.numbers(grads[0]), None


def _source(tensor: Tensor, recording: Recording) -> Value:
    value = Value(meta_like(tensor), recording.device, Shard(0))
    if tensor.device == recording.device:
        recording.readings.bind(value, tensor.detach())
    else:
        # The batch stays on the host: micro-batches are copied to the device one at a time.
        value.rows = Sliced(tensor.detach(), Shard(0))
    return value
