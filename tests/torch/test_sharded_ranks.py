"""Sharded parameters plug in as one more `Sync`: two gloo ranks with a stand-in for FSDP2.

Nothing else knows of shards: the models of `sharded_ranks` train through an ordinary Accumulator, and are
compared with the large batch over the data of both ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch import sharded_ranks as ranks
from tests.torch.helpers import large_batch, mlp, mse, sgd
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found."""
    return found_by_both("tests.torch.sharded_ranks", tmp_path_factory.mktemp("ranks"))


def of_both(case: str) -> list[tuple[Tensor, ...]]:
    """The large batches of a case: the samples of both ranks."""
    if case == "weighted":
        samples = [*ranks.weighted_samples(0), *ranks.weighted_samples(1)]
        return [tuple(map(torch.cat, zip(*samples, strict=True)))]
    if case == "auto":
        return [tuple(map(torch.cat, zip(*(ranks.equal(rank) for rank in range(2)), strict=True)))] * 3
    both = zip(ranks.batches(0), ranks.batches(1), strict=True)
    return [tuple(map(torch.cat, zip(one, other, strict=True))) for one, other in both]


def trained_on_the_large_batch(case: str) -> tuple[nn.Module, Any]:
    model = mlp()
    objective = ranks.weighted if case == "weighted" else mse
    optimizer = sgd(model.parameters())
    clip = ranks.CLIP if case in ("clipped", "own norm") else None
    return model, large_batch(optimizer, lambda b: objective(model, b), of_both(case), max_grad_norm=clip)


def errors(parameters: dict[str, Tensor], reference: nn.Module) -> dict[str, float]:
    """The error of each parameter, relative to how far the reference has moved."""
    start = mlp().state_dict()
    return {
        name: float((parameters[name] - value).norm() / (value - start[name]).norm())
        for name, value in reference.state_dict().items()
    }


@pytest.mark.parametrize("case", ["clipped", "largest", "auto", "weighted", "few"])
def test_sharded_ranks_train_as_the_large_batch(case: str, found: Found) -> None:
    reference, seen = trained_on_the_large_batch(case)
    for one in (found[0][case], found[1][case]):
        assert max(errors(one["parameters"], reference).values()) <= 1e-12
        assert one["elements"] == sum(p.numel() for p in reference.parameters()) // 2 + 1, "premise: shards"
        assert [u.loss for u in one["updates"]] == pytest.approx(seen.losses, rel=1e-12)
        assert [u.grad_norm for u in one["updates"]] == pytest.approx(seen.norms, rel=1e-12)
        assert one["reductions"] == len(seen.losses), "one reduction per window"
        assert not one["left"]


def test_the_norm_of_one_rank_alone_is_told_from_the_large_batch(found: Found) -> None:
    reference, _ = trained_on_the_large_batch("own norm")
    assert min(errors(found[0]["own norm"]["parameters"], reference).values()) > 1e-3


def test_all_ranks_take_as_many_turns_whatever_their_samples(found: Found) -> None:
    one, other = ([u.microbatches for u in each["clipped"]["updates"]] for each in found)
    alone = [[-(-count // 2) for count in samples] for samples in ranks.SAMPLES]
    assert all(mine != theirs for mine, theirs in alone[::2]), "premise: ranks would take unequal turns"
    assert one == other == [max(counts) for counts in alone]


def test_found_sizes_are_agreed_on(found: Found) -> None:
    # Alone, each would take its batch in one piece; the smaller one is the size of both.
    for each in found:
        assert [u.microbatches for u in each["largest"]["updates"]] == [2, 2, 2]
    lengths = [[u.microbatches for u in each["auto"]["updates"]] for each in found]
    assert lengths[0] == lengths[1]


def test_a_rank_that_cannot_take_as_many_turns_stops_both_before_anything_is_changed(found: Found) -> None:
    for each in found:
        ((kind, text, unchanged),) = each["few"]["errors"]
        assert (kind, unchanged) == ("InputError", True)
        assert text == "The ranks have windows of [(3, 5), (1, 1)] micro-batches (now, at most)."


def test_an_infinite_element_of_one_shard_stops_both_ranks(found: Found) -> None:
    bad = [not torch.isfinite(torch.tensor(each["infinite"]["own"])) for each in found]
    assert sum(bad) == 1, "premise: the element is in one rank's shard"
    for each in found:
        ((kind, text, unchanged),) = each["infinite"]["errors"]
        assert (kind, unchanged) == ("NonFiniteError", True)
        assert "its gradient is not finite" in text
