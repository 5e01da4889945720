"""Predicted savings of memory against measured peaks of a training with each saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from superbatch.results.memory import Saving
from superbatch.torch import Accumulator
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.sizes.predict import predict_peak
from superbatch.torch.sizes.savings import repeated_blocks, savings
from tests.torch.sized_models import Transformer, convnet

WITHIN = 0.03


def text(count: int) -> dict[str, Tensor]:
    ids = torch.randint(1024, (count, 33))
    return {"inputs": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    def loss_fn(microbatch: Any) -> Tensor:
        out = model(microbatch["inputs"])
        return functional.cross_entropy(out.flatten(0, -2), microbatch["labels"].flatten())

    return loss_fn


def named(found: list[Saving], name: str) -> int:
    (saving,) = [saving for saving in found if saving.name == name]
    return saving.bytes


def most_alive(accumulate: Any, batch: Any) -> int:
    def windows() -> None:
        for _ in range(3):
            accumulate(batch)
            accumulate.engine.config.until_next.clear()

    return peak_bytes(windows)


def test_gradient_checkpoints() -> None:
    model, batch = Transformer(), text(32)
    half = {name: leaf[:16] for name, leaf in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = savings(loss_of(model), half, models=model, optimizers=optimizer)
    assert [saving.name for saving in found] == ["gradient checkpoints"]
    assert "4 blocks (TransformerEncoderLayer)" in found[0].how

    def most() -> int:
        accumulate = Accumulator(model, optimizer, loss_of(model), microbatch_size=16, check=False)
        return most_alive(accumulate, batch)

    plain = most()
    for block in repeated_blocks([model]):
        forward = block.forward
        block.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )
    saved = plain - most()
    assert saved > 0.3 * plain
    assert found[0].bytes == pytest.approx(saved, rel=WITHIN)


def test_prediction_leaves_no_checkpoint_behind() -> None:
    model = Transformer(2)
    savings(loss_of(model), text(4), models=model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_sums_in_the_parameters_own_dtype() -> None:
    model, batch = Transformer(2).bfloat16(), text(8)
    half = {name: leaf[:4] for name, leaf in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"models": model, "optimizers": optimizer, "gradient_sum": torch.float32}
    found = savings(loss_of(model), half, **options)
    peaks = [
        most_alive(
            Accumulator(
                model,
                torch.optim.AdamW(model.parameters()),
                loss_of(model),
                microbatch_size=4,
                check=False,
                gradient_sum=dtype,
            ),
            batch,
        )
        for dtype in (torch.float32, None)
    ]
    assert named(found, "gradients summed in their own dtype") == pytest.approx(peaks[0] - peaks[1], rel=0.05)


def test_sums_in_the_momentum_save_nothing_on_the_cpu() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))
    batch = {"inputs": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}

    half = {name: leaf[:4] for name, leaf in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = savings(loss_of(model), half, models=model, optimizers=optimizer)
    # On the CPU, copies of the buffers for a rollback are beside the buffers.
    assert "gradients summed in the momentum" not in [saving.name for saving in found]


def test_state_of_the_optimizer() -> None:
    model, half = Transformer(2), text(4)
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer, loss_fn = torch.optim.AdamW(model.parameters()), loss_of(model)
    new = named(savings(loss_fn, half, models=model, optimizers=optimizer), "optimizer state")
    assert new == pytest.approx(2 * size, rel=0.01)
    loss_fn(half).backward()
    optimizer.step()
    old = named(savings(loss_fn, half, models=model, optimizers=optimizer), "optimizer state")
    assert old == pytest.approx(new, rel=0.01)


def test_a_fused_update() -> None:
    model, half = Transformer(2), text(1)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = savings(loss_of(model), half, models=model, optimizers=optimizer)
    promised = named(found, "an update with fused=True")
    foreach = predict_peak(loss_of(model), half, models=model, optimizers=optimizer)
    other = torch.optim.AdamW(model.parameters(), fused=True)
    fused = predict_peak(loss_of(model), half, models=model, optimizers=other)
    assert promised == foreach.bytes - fused.bytes > 0
    assert optimizer.param_groups[0]["foreach"] is True


def test_a_model_without_blocks() -> None:
    model = convnet()
    assert repeated_blocks([model]) == []
    batch = {"inputs": torch.randn(64, 3, 32, 32), "labels": torch.randint(10, (64,))}
    assert savings(loss_of(model), batch, models=model) == []
