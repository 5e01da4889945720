"""Gradients whose squares overflow: the meter leaves the window out, and the update is made."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from superbatch.noise import NoiseMeter
from superbatch.torch import Accumulator


@pytest.mark.parametrize("options", [{}, {"preconditioned": True}, {"proxy": True}])
@pytest.mark.parametrize("size", [1e90, 1e160])
def test_gradients_too_large_to_square_are_left_out_and_the_update_is_made(
    size: float, options: dict[str, bool]
) -> None:
    """The update is that of the large batch, without an OverflowError or NaN in the meter's state."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    sgds = [torch.optim.SGD(model.parameters(), 0.01 / size) for model in models]
    meter = NoiseMeter(every=1, **options)

    def loss(model: nn.Module, mb: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(mb[0]), mb[1]) * size

    accumulate = Accumulator(
        models[0], sgds[0], lambda mb: loss(models[0], mb), microbatch_size=4, observers=[meter]
    )
    for _ in range(12):
        batch = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
        accumulate(batch)
        sgds[1].zero_grad()
        loss(models[1], batch).backward()
        sgds[1].step()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
    assert (meter.windows, meter.passed) == (0, 12)
    json.dumps(meter.state_dict(), allow_nan=False)
    assert "12 left out: the squares of its gradients are not finite" in meter.estimate().summary()
