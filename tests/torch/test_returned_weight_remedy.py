"""The remedy for a wrong returned weight is code that can be typed into loss_fn as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import LossSpecError
from superbatch.torch import Accumulator, count_tokens
from superbatch.torch.options import Split

LENGTHS = [1, 4, 2, 3, 4, 1, 3, 2]
Loss = Callable[[nn.Module, dict[str, Any]], Tensor]


def inputs() -> Tensor:
    return torch.randn(8, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def of_labels(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    kept = batch["labels"] >= 0
    return (model(batch["x"])[..., 0].square() * kept).sum() / kept.sum()


def of_lists(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    each = model(batch["x"])[..., 0].square()
    count = sum(len(boxes) for boxes in batch["boxes"])
    rows = [row[: len(boxes)].sum() for row, boxes in zip(each, batch["boxes"], strict=True)]
    return torch.stack(rows).sum() / count


LABELS = torch.where(torch.arange(4) < torch.tensor(LENGTHS)[:, None], 1, -100)
CASES: dict[str, tuple[Loss, dict[str, Any], Split, str]] = {
    "a function": (
        of_labels,
        {"x": inputs(), "labels": LABELS},
        Split(),
        'count_tokens("labels")(microbatch)',
    ),
    "a lambda": (
        of_lists,
        {"x": inputs(), "boxes": [[0] * length for length in LENGTHS]},
        Split(per_sample=("boxes",)),
        'sum(len(one) for one in microbatch["boxes"])',
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_runs_as_it_is_printed(name: str) -> None:
    loss_of, batch, split, remedy = CASES[name]
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    code = "len(microbatch['x'])"

    def loss_fn(microbatch: dict[str, Any]) -> tuple[Tensor, Any]:
        weight = eval(code, {"count_tokens": count_tokens, "microbatch": microbatch})
        return loss_of(model, microbatch), weight

    def update() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: dict[str, Any] = {"weight": "returned", "microbatch_size": 4, "split": split}
        Accumulator(model, optimizer, loss_fn, **options)(batch)

    with pytest.raises(LossSpecError) as raised:
        update()
    found = re.search(r"[Rr]eturn (.*) as the weight", str(raised.value))
    assert found is not None and found[1] == remedy, str(raised.value)

    code = found[1]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss, weight = loss_fn(batch)
    assert float(weight) == sum(LENGTHS)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    update()
    for old, new, gradient in zip(before, model.parameters(), expected, strict=True):
        assert gradient.norm() > 0, "premise"
        assert torch.allclose(new, old - 0.1 * gradient, rtol=0, atol=1e-14)
