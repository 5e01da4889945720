"""Documented loops: `test_typed_loops` runs them, and pyright checks their types."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from superbatch import NoiseMeter
from superbatch.torch import (
    Accumulator,
    Gradient,
    WholeBatch,
    WholeGradient,
    at_least,
    count_tokens,
    gradient,
    windows,
)
from superbatch.torch.options import ClipValue, FrozenBatchNorm, PerSampleRandom, Split

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Batch = tuple[Tensor, Tensor]
loader: list[Batch] = [(torch.randn(8, 3), torch.randn(8, 1))]


def loss_fn(microbatch: Batch) -> Tensor:
    x, y = microbatch
    return nn.functional.mse_loss(model(x), y)


accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size="auto", max_grad_norm=1.0)
for batch in loader:
    update = accumulate(batch)
    loss: float = update.loss
for window in windows(loader, accumulation_steps=8):
    first: Batch = window[0]
    accumulate(window)
    with accumulate.window(window) as opened:
        for microbatch in opened:
            x, y = microbatch
            opened.backward(nn.functional.mse_loss(model(x), y))
    made: bool = opened.update.made
for batch in loader:
    with accumulate.window(batch) as opened:
        for x, y in opened:
            opened.backward(nn.functional.mse_loss(model(x), y))
    norm: float | None = opened.update.grad_norm
WholeBatch(model, optimizer, loss_fn, microbatch_size="auto")(loader[0])
gradient(model, loss_fn, loader[0], microbatch_size=2)
Gradient([model], loss_fn, microbatch_size=2)(loader[0])
WholeGradient(model, loss_fn, microbatch_size=2)(loader[0])
Accumulator(
    model,
    [optimizer],
    loss_fn,
    weight=at_least(1, count_tokens("labels")),
    clip=ClipValue(1.0),
    participants=[FrozenBatchNorm(), PerSampleRandom()],
    observers=[NoiseMeter()],
    split=Split(unsplit=["edges"]),
    gradient_sum=torch.float32,
)
