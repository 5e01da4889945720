"""Models with fixed shapes, such as captured CUDA graphs, which refuse some micro-batches of the check."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import Accumulator

SIZE = 7


class Fixed(nn.Module):
    """A model with a static input buffer, as `torch.cuda.make_graphed_callables` makes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.place = torch.zeros(SIZE, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.place.copy_(x))


def _batch(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(samples, 5, generator=generator, dtype=torch.float64),
        "y": torch.randint(3, (samples,), generator=generator),
        # Uneven counts, so that the check also joins samples of several micro-batches.
        "w": torch.arange(1.0, samples + 1, dtype=torch.float64),
    }


def _mean(model: Any, part: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["y"])


def _sum(model: Any, part: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["y"], reduction="sum")


def _weighted(model: Any, part: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(model(part["x"]), part["y"], reduction="none")
    return (losses * part["w"]).sum() / part["w"].sum()


# The loss of a micro-batch, its declaration, and the loss of the batch.
KINDS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "mean": (_mean, {}, _mean),
    "sum": (_sum, {"reduction": "sum"}, _mean),
    "total": (_sum, {"reduction": "total"}, _sum),
    "weighted": (_weighted, {"weight": lambda part: part["w"].sum()}, _weighted),
    "returned": (
        lambda model, part: (_weighted(model, part), part["w"].sum()),
        {"weight": "returned"},
        _weighted,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_fixed_shapes_is_trained_and_warned_of_once(kind: str) -> None:
    loss, declared, loss_of_batch = KINDS[kind]
    model = Fixed()
    reference = copy.deepcopy(model.net)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference))
    accumulate = Accumulator(model, ours, lambda part: loss(model, part), microbatch_size=SIZE, **declared)
    batch = _batch(3 * SIZE)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(batch["x"][:4])  # premise: it refuses other numbers of samples
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            accumulate(batch)
    (warning,) = [str(each.message) for each in caught]
    assert "could not check the declared loss" in warning
    assert "size of tensor a (7) must match" in warning
    assert "check=False silences this" in warning
    for _ in range(4):
        theirs.zero_grad()
        loss_of_batch(reference, batch).backward()
        theirs.step()
    start = Fixed().net
    named = zip(model.net.named_parameters(), reference.parameters(), start.parameters(), strict=True)
    for (name, found), right, before in named:
        assert (right - before).norm() > 1e-4, f"premise: training changes {name}"
        assert (found - right).norm() < 1e-12 * (1 + right.norm()), name


def test_an_error_of_every_micro_batch_is_raised_without_a_warning() -> None:
    model = Fixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_fn(part: dict[str, Tensor]) -> Tensor:
        raise ValueError("a mistake in loss_fn")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="a mistake in loss_fn"):
            Accumulator(model, optimizer, loss_fn, microbatch_size=SIZE)(_batch(3 * SIZE))
