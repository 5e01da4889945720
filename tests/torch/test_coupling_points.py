"""`verify` names the coupling points that the engine for coupled samples finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import verify


class Centred(nn.Module):
    """Hand-written BatchNorm, which cannot be recognized by its type."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def rows(samples: int = 20) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(samples, 4),
        "y": torch.randn(samples, 4),
        "label": torch.randint(0, 3, (samples,)),
    }


def encoder(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 3))


def classify(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: F.cross_entropy(model(batch["x"]), batch["label"])


def contrast(model: nn.Module) -> Callable[[Any], Tensor]:
    def loss_fn(batch: Any) -> Tensor:
        first, second = F.normalize(model(batch["x"])), F.normalize(model(batch["y"]))
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))

    return loss_fn


COUPLED = "samples are coupled in"


@pytest.mark.parametrize(
    ("middle", "loss", "expected"),
    [
        (nn.BatchNorm1d(8), classify, ("1", "batch_norm", "statistic")),
        (Centred(), classify, ("1", "aten.sum.dim_IntList", "statistic")),
        (nn.ReLU(), contrast, ("", "aten.mm.default", "gathered")),
    ],
    ids=["BatchNorm", "hand-written", "contrastive loss"],
)
def test_coupling_points_are_named(middle: nn.Module, loss: Any, expected: tuple[str, str, str]) -> None:
    model = encoder(middle)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = verify(model, loss(model), rows(), microbatch_size=6)
    assert not report.exact
    assert expected in [(point.module, point.operation, point.kind) for point in report.coupling_points]
    assert f"{COUPLED} {expected[0] or 'loss_fn'}: {expected[1]} ({expected[2]})" in str(report)
    assert report.to_dict()["coupling_points"][0]["operation"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_separate_samples_have_no_coupling_points() -> None:
    model = encoder(nn.LayerNorm(8))
    report = verify(model, classify(model), rows(), microbatch_size=6)
    assert report.exact and report.coupling_points == ()
    assert str(report).startswith("exact") and COUPLED not in str(report)


def test_a_wrong_weight_is_no_coupling_point() -> None:
    model = encoder(nn.ReLU())
    report = verify(model, classify(model), rows(), microbatch_size=6, reduction="sum")
    assert not report.exact and report.coupling_points == ()
