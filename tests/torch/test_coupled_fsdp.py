"""`WholeBatch` with FSDP2 on two and four gloo ranks trains as the large batch in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.torch import coupled_fsdp_ranks as ranks
from tests.torch.coupled_ranks import CLIP, error_of, net, plain
from tests.torch.test_coupled_ranks import EXACT, WITHOUT, Found, large_batches, reference, worst
from tests.torch.two_ranks import found_by_both

TRAINED = (
    *("BatchNorm", "kept gathered", "offloaded", "auto", "labels", "contrastive", "balanced"),
    *("without BatchNorm", "checkpointed"),
)
FAILING = ("memory in the loss", "memory in a sweep", "error in the loss", "error in a sweep")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each of two ranks."""
    return found_by_both("tests.torch.coupled_fsdp_ranks", tmp_path_factory.mktemp("ranks"), "2")


def assert_as_large_batch(found: Found, cell: str, counts: Any = None) -> None:
    trained, losses, norms = reference(cell, counts)
    assert max(norms) > CLIP, "premise: some gradients are clipped"
    for each in found:
        assert worst(each[cell], trained) <= EXACT
        assert each[cell]["losses"] == pytest.approx(losses, rel=EXACT)
        assert each[cell]["norms"] == pytest.approx(norms, rel=EXACT)
        assert each[cell]["gradients"] == 0


@pytest.mark.parametrize("cell", [*TRAINED, "resumed", *FAILING])
def test_sharded_models_train_as_the_large_batch(cell: str, found: Found) -> None:
    assert_as_large_batch(found, cell)


@pytest.mark.parametrize("cell", TRAINED)
def test_the_parameters_are_sharded_after_a_window(cell: str, found: Found) -> None:
    every = sum(p.numel() for p in (plain() if cell in WITHOUT else net()).parameters())
    for each in found:
        assert each[cell]["elements"] < every
        assert "each rank has all parameters in a window" in each[cell]["report"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["BatchNorm", "balanced"])
def test_replicas_of_shards_train_as_the_large_batch(cell: str, tmp_path: Path) -> None:
    four = found_by_both("tests.torch.coupled_fsdp_ranks", tmp_path, "4", cell, count=4)
    assert_as_large_batch(four, cell, ranks.OF_FOUR)
    assert four[0][cell]["report"].startswith("HSDP over 4 ranks")


def test_gradients_add_up_without_a_step(found: Found) -> None:
    model = net()
    for batch in large_batches("BatchNorm"):
        error_of(model, batch).backward()
    for each in found:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (each["gradient"]["gradients"][name] - parameter.grad).norm()
            assert error <= EXACT * parameter.grad.norm()


@pytest.mark.parametrize("cell", ["block", "block after an error"])
def test_a_virtual_batch_adds_the_gradient_of_the_batch_to_the_shards(cell: str, found: Found) -> None:
    model = net()
    for number, batch in enumerate(large_batches("contrastive")):  # equal numbers of samples on both ranks
        error_of(model, batch).backward()
        for each in found:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                error = (each[cell]["gradients"][number][name] - parameter.grad).norm()
                assert error <= EXACT * parameter.grad.norm()
    for each in found:
        for name, value in model.state_dict().items():
            assert (each[cell]["whole"][name] - value).double().norm() <= EXACT * value.double().norm()


def test_low_precision_rounds_as_one_backward_of_each_rank(found: Found) -> None:
    library, by_hand, exact = (found[0][name] for name in ("bfloat16", "bfloat16, by hand", "float32"))
    start = plain().float().state_dict()

    def error(one: dict[str, Any], name: str) -> float:
        change = (exact["state"][name] - start[name]).norm()
        return float((one["state"][name] - exact["state"][name]).norm() / change)

    for name in start:
        assert error(by_hand, name) > 1e-5, "premise: bfloat16 has an error"
        assert error(library, name) < 0.02


def test_mutant_without_all_gather_raises(found: Found) -> None:
    for each in found:
        assert "its data is not allocated" in each["mutant: not gathered"]["error"]


@pytest.mark.parametrize("where", ["the loss", "a sweep"])
def test_a_failure_on_one_rank(where: str, found: Found) -> None:
    healthy, bad = (each[f"memory in {where}"] for each in found)
    assert bad["fired"], "premise"
    assert bad["failures"][0] == 1
    assert not healthy["outcome"] and not bad["outcome"]
    healthy, bad = (each[f"error in {where}"]["outcome"] for each in found)
    assert bad == [("BrokenError", "no such label", True)]
    text = (
        "Rank 1 failed in micro-batch 0 (BrokenError: no such label), so no rank makes this update, and "
        "everything is as before it. Correct the error there; then each rank can continue with its next "
        "batch."
    )
    assert healthy == [("RankError", text, True)]


def test_unsupported_options_are_refused(found: Found) -> None:
    for each in found:
        assert each["tensor parallel"]["error"] == (
            "InputError",
            "Coupled samples need all parameters in full on each rank, but tensor parallel splits "
            "operations. Use only fully_shard (FSDP2), over a mesh of one or two dimensions.",
        )
        assert each["each micro-batch"]["error"] == (
            "InputError",
            "The model is sharded by fully_shard (FSDP2), so sync='microbatch' is not possible. Remove "
            'sync=, or pass "window".',
        )
