"""Repeated updates leave no bytes allocated, even without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import WholeBatch, virtual_batch
from superbatch.torch.memory.ledger import Ledger

N, SIZE = 12, 4
MANY = pytest.param(1000, marks=pytest.mark.slow)


class Encoder(nn.Module):
    """Encoder with BatchNorm, a learned temperature and a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, views: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (F.normalize(self.net(view), dim=1) for view in views)
        return F.cross_entropy(one @ other.T * self.scale.exp(), torch.arange(len(one)))


def by_blocks(model: Encoder, optimizer: Any, **options: Any) -> Callable[[Any], float]:
    def update(batch: Any) -> float:
        optimizer.zero_grad()
        with virtual_batch(model, SIZE, **options) as virtual:
            loss = model(virtual(batch))
            loss.backward()
        optimizer.step()
        assert virtual.report().points, "premise: samples are coupled"
        return float(loss.detach())

    return update


def by_accumulator(model: Encoder, optimizer: Any) -> Callable[[Any], float]:
    accumulate = WholeBatch(model, optimizer, model, microbatch_size=SIZE)

    def update(batch: Any) -> float:
        return accumulate(batch).loss

    return update


WAYS: dict[str, Callable[[Encoder, Any], Callable[[Any], float]]] = {
    "blocks": by_blocks,
    "blocks, offloaded": lambda *model: by_blocks(*model, device_budget=0),
    "blocks, rng of the batch": lambda *model: by_blocks(*model, rng="batch"),
    "the accumulator": by_accumulator,
}


def alive(ledger: Ledger) -> tuple[int, int]:
    """Return the number and the bytes of live storages that operations made."""
    return sum(size > 0 for size in ledger._bytes.values()), ledger.live


@pytest.mark.parametrize("updates", [30, MANY])
@pytest.mark.parametrize("way", WAYS)
def test_updates_leave_no_bytes_behind(way: str, updates: int) -> None:
    model = Encoder()
    update = WAYS[way](model, torch.optim.Adam(model.parameters(), 1e-3))
    batches = [(torch.randn(N, 6), torch.randn(N, 6)) for _ in range(3)]
    gc.collect()
    gc.disable()
    try:
        with Ledger(torch.device("cpu")) as ledger:
            for batch in batches:
                update(batch)
            before = alive(ledger)
            losses = [update(batches[number % 3]) for number in range(updates)]
            after = alive(ledger)
    finally:
        gc.enable()
    assert sum(losses[-3:]) < sum(losses[:3]), "premise: it trains"
    assert before[1] >= 3 * sum(p.nbytes for p in model.parameters()), "premise: gradients and Adam's moments"
    assert after == before, "storages and bytes"


def test_storages_held_only_by_a_graph_are_counted() -> None:
    with Ledger(torch.device("cpu")) as ledger:
        before = alive(ledger)
        node = torch.ones(1000, requires_grad=True).sin().sin().grad_fn  # saves the first result
        assert node is not None
        assert alive(ledger) >= (before[0] + 1, before[1] + 4000)
        del node
        assert alive(ledger) == before
