"""Two views of a batch in one tensor, as in contrastive training: exact, without gathering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import CoupledSamplesError
from superbatch.torch import virtual_batch
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.virtual.rules import shape_arguments
from tests.torch.embedding_tasks import assert_same_gradients

N, M, D = 11, 4, 7
Model = nn.ModuleDict


def make(width: int = D) -> Model:
    torch.manual_seed(0)
    layers = {"encoder": nn.Linear(5, width), "head": nn.Linear(width, 4)}
    return nn.ModuleDict(layers).double()


def views(samples: int = N) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 5).double(), torch.randn(samples, 5).double()


def simclr(z: Tensor) -> Tensor:
    z, half = F.normalize(z, dim=1), len(z) // 2
    similarities = (z @ z.T / 0.5).masked_fill(torch.eye(2 * half, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(similarities, torch.arange(2 * half).roll(half))


def product(z: Any) -> Tensor:
    return (z[0] * z[1]).sum(1).mean()


Loss = Callable[[Model, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "sum": lambda m, a, b: torch.cat([a, b]).sum(),
    "mean": lambda m, a, b: torch.cat([a, b]).mean(),
    "mean over samples": lambda m, a, b: (torch.cat([a, b]).mean(0) * torch.arange(a.shape[1])).sum(),
    "mean of squares": lambda m, a, b: torch.cat([a, b]).square().mean(),
    "three": lambda m, a, b: torch.cat([a, b, a]).mean(),
    "repeated": lambda m, a, b: a.repeat(3, 1).mean() + b.sin().mean(),
    "head": lambda m, a, b: m["head"](torch.cat([a, b])).mean(),
    "mean of sums": lambda m, a, b: m["head"](torch.cat([a, b])).sum(1).mean(),
    "transposed": lambda m, a, b: torch.cat([a, b]).T.mean(),
    "views first": lambda m, a, b: m["head"](torch.stack([a, b]).flatten(0, 1)).mean(),
    "samples first": lambda m, a, b: m["head"](torch.stack([a, b], 1).flatten(0, 1)).mean(),
    "one more dimension": lambda m, a, b: torch.cat([a, b])[None].expand(3, -1, -1).mean(),
    "chunks": lambda m, a, b: product(m["head"](torch.cat([a, b])).chunk(2)),
    "slices": lambda m, a, b: product((lambda z: (z[: len(a)], z[len(a) :]))(m["head"](torch.cat([a, b])))),
    "two of three": lambda m, a, b: torch.cat([a, b, a])[len(a) :].square().mean(),
    "columns": lambda m, a, b: torch.cat([a.T, b.T], 1)[:, len(a) :].square().mean() + a.sin().mean(),
}


def expected(loss: Loss) -> dict[str, Tensor | None]:
    model, (a, b) = make(), views()
    loss(model, model["encoder"](a), model["encoder"](b)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def ours(loss: Loss, size: int, **options: Any) -> tuple[dict[str, Tensor | None], Any]:
    model, (a, b) = make(), views()
    with virtual_batch(model, size, **options) as batch:
        loss(model, model["encoder"](batch(a)), model["encoder"](batch(b))).backward()
    return {name: p.grad for name, p in model.named_parameters()}, batch.report()


@pytest.mark.parametrize("size", [1, M])
@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_is_gathered(name: str, size: int) -> None:
    found, report = ours(LOSSES[name], size, on_gather="error")
    real = expected(LOSSES[name])
    assert_same_gradients(real, found, zero=[n for n, grad in real.items() if grad is None])
    assert report.microbatches > 1, "premise"
    assert report.whole == () and report.unknown == ()


@pytest.mark.parametrize("name", LOSSES)
def test_every_operation_passes_in_paranoid_mode(name: str) -> None:
    ours(LOSSES[name], M, paranoid=True)


def test_simclr() -> None:
    loss: Loss = lambda m, a, b: simclr(m["head"](torch.cat([a, b])))  # noqa: E731
    found, report = ours(loss, M, on_gather="error")
    assert_same_gradients(expected(loss), found)
    assert {one.operation for one in report.whole} & {"aten.mm.default"}, "all samples are compared with all"


@pytest.mark.parametrize("name", ["sum", "mean", "repeated", "head", "slices"])
def test_the_memory_is_that_of_micro_batches(name: str) -> None:
    samples, width = 256, 512
    model, (a, b) = make(width), views(samples)

    def train() -> None:
        model.zero_grad()
        with virtual_batch(model, 4) as batch:
            LOSSES[name](model, model["encoder"](batch(a)), model["encoder"](batch(b))).backward()

    train()
    assert peak_bytes(train) <= 0.25 * samples * width * 8


@pytest.mark.parametrize("name", ["sum", "mean", "repeated", "head", "mean of sums", "views first"])
def test_mutant_without_the_layout_of_sums_gathers_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the layout of the summed tensor, `[2 * N, D]` is taken for two rows per sample."""
    plain = shape_arguments.expanded
    monkeypatch.setattr(shape_arguments, "expanded", lambda call, like=None: plain(call))
    with pytest.raises(CoupledSamplesError):
        ours(LOSSES[name], M, on_gather="error")
