"""`WholeBatch` and `WholeGradient` on two gloo ranks, against the large batch of both in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch import coupled_ranks as ranks
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]
EXACT = 1e-12


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each rank."""
    return found_by_both("tests.torch.coupled_ranks", tmp_path_factory.mktemp("ranks"))


WITHOUT = ("without BatchNorm", "checkpointed")
LOSSES: dict[str, Any] = {
    "labels": ranks.of_labels,
    "all labels": ranks.of_all_labels,
    "contrastive": ranks.own_negatives,
    "memory in a gather": ranks.own_negatives,
    "balanced": partial(ranks.balanced, alone=True),
    **dict.fromkeys(WITHOUT, partial(ranks.balanced, alone=True)),
}


def large_batches(cell: str, counts: Any = None) -> list[dict[str, Tensor]]:
    """Return the samples of all ranks for each update."""
    if counts is None:
        counts = ranks.EVEN if cell in ("contrastive", "memory in a gather") else ranks.COUNTS
    every = zip(*(ranks.data(rank, counts) for rank in range(len(counts[0]))), strict=True)
    return [{key: torch.cat([each[key] for each in parts]) for key in parts[0]} for parts in every]


def reference(cell: str, counts: Any = None) -> tuple[nn.Module, list[float], list[float]]:
    """Return a model trained with the large batches, its losses and gradient norms."""
    model = ranks.plain() if cell in WITHOUT else ranks.net()
    optimizer, losses, norms = ranks.adamw(model), [], []
    for batch in large_batches(cell, counts):
        optimizer.zero_grad()
        loss = LOSSES.get(cell, ranks.error_of)(model, batch)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), ranks.CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


def worst(one: dict[str, Any], trained: nn.Module) -> float:
    """Return the largest error of a parameter or buffer, relative to its change in training."""
    start = (ranks.net() if len(trained.state_dict()) > 6 else ranks.plain()).state_dict()
    errors = []
    for name, value in trained.state_dict().items():
        change = (value - start[name]).double().norm()
        assert change, "premise"
        errors.append(float((one["state"][name] - value).double().norm() / change))
    return max(errors)


@pytest.mark.parametrize(
    "cell",
    [
        *("DDP", "SyncBatchNorm", "all_reduce", "auto", "resumed"),
        *("labels", "all labels", "contrastive", "balanced"),
        *("without BatchNorm", "memory in the loss", "memory in a sweep", "memory in a gather"),
        *("error in the loss", "error in a sweep"),
    ],
)
def test_ranks_train_as_the_large_batch(cell: str, found: Found) -> None:
    trained, losses, norms = reference(cell)
    assert max(norms) > ranks.CLIP, "premise: some gradients are clipped"
    for each in found:
        assert worst(each[cell], trained) <= EXACT
        assert each[cell]["losses"] == pytest.approx(losses, rel=EXACT)
        assert each[cell]["norms"] == pytest.approx(norms, rel=EXACT)
        assert each[cell]["gradients"] == 0
    if cell in ("DDP", "all_reduce"):
        assert found[0][cell]["microbatches"] != found[1][cell]["microbatches"], "premise"
        assert found[0][cell]["report"] == f"{cell} over 2 ranks"


@pytest.mark.parametrize("name", ["ranks count the same", "BatchNorm within a rank"])
def test_mutant_differs_from_the_large_batch(name: str, found: Found) -> None:
    trained, _, _ = reference("DDP")
    assert worst(found[0][f"mutant: {name}"], trained) > 1e-3


def test_gradients_add_up_without_a_step(found: Found) -> None:
    model, losses = ranks.net(), []
    for batch in large_batches("DDP"):
        loss = ranks.error_of(model, batch)
        loss.backward()
        losses.append(loss.item())
    for each in found:
        assert each["gradient"]["losses"] == pytest.approx(losses, rel=EXACT)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (each["gradient"]["gradients"][name] - parameter.grad).norm()
            assert error <= EXACT * parameter.grad.norm()


@pytest.mark.parametrize("where", ["the loss", "a sweep", "a gather"])
def test_out_of_memory_on_one_rank_repeats_the_batch_on_both(where: str, found: Found) -> None:
    healthy, bad = (each[f"memory in {where}"] for each in found)
    assert bad["fired"], "premise"
    assert bad["failures"][0] == 1
    assert not any(healthy["failures"])
    assert not healthy["outcome"] and not bad["outcome"]


@pytest.mark.parametrize("where", ["the loss", "a sweep"])
def test_an_error_on_one_rank_restores_both(where: str, found: Found) -> None:
    healthy, bad = (each[f"error in {where}"]["outcome"] for each in found)
    assert bad == [("BrokenError", "no such label", True)]
    text = (
        "Rank 1 failed in micro-batch 0 (BrokenError: no such label), so no rank makes this update, and "
        "everything is as before it. Correct the error there; then each rank can continue with its next "
        "batch."
    )
    assert healthy == [("RankError", text, True)]


def test_losses_that_are_not_that_of_the_batch_are_refused(found: Found) -> None:
    for each in found:
        kind, text, unchanged = each["own negatives"]["error"]
        assert (kind, unchanged) == ("CoupledSamplesError", True)
        assert text == (
            "aten.mm.default couples the samples of this rank without those of the other ranks, so the loss "
            "is not that of the whole batch. Gather embeddings in loss_fn by all_gather, or "
            "sum statistics by all_reduce, both of torch.distributed.nn.functional."
        )
        kind, text, unchanged = each["labels without weight"]["error"]
        assert (kind, unchanged) == ("CoupledSamplesError", True)
        assert text.startswith("loss_fn divides by a count over this rank's samples (")
        assert text.endswith('Pass the count as weight=, such as weight=count_tokens("labels").')
        kind, text, unchanged = each["no weight"]["error"]
        assert (kind, unchanged) == ("InputError", True)
        assert "has the weight 0, but a batch of coupled samples cannot be left out." in text
        kind, text, _ = each["not stated"]["error"]
        assert (kind, text[:24]) == ("InputError", "2 ranks are initialised,")


def test_a_nonfinite_value_on_one_rank_raises_on_both(found: Found) -> None:
    for each in found:
        kind, _, unchanged = each["infinite"]["error"]
        assert (kind, unchanged) == ("NonFiniteError", True)
