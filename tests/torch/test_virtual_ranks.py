"""`virtual_batch` on two gloo ranks, against BatchNorm over the samples of both in one process.

The reference is one process with the real batch of all samples, ``nn.BatchNorm``, and the mean of the ranks'
losses, as in DDP with SyncBatchNorm. The ranks have 24 and 40 samples in 4 and 6 micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch.window.sync.faults import HEADER
from tests.torch import virtual_ranks as ranks
from tests.torch.coupled.models import conv_net, resnet20
from tests.torch.embedding_tasks import assert_same_gradients
from tests.torch.states import assert_unchanged
from tests.torch.test_ddp import start_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each rank, by case."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    ended = start_ranks(folder, list(ranks.CASES))
    outputs_of_ranks = [(folder / f"output{rank}").read_text()[-2000:] for rank in range(2)]
    assert ended, f"the ranks failed:\n{outputs_of_ranks}"
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)]
        for name in ranks.CASES
    }


def both(results: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    for rank, result in enumerate(results[f"virtual_{name}"]):
        assert "traceback" not in result, f"rank {rank}: {result['traceback']}"
    return results[f"virtual_{name}"]


def split(outputs: Any, rank: int, counts: tuple[int, int]) -> Any:
    if isinstance(outputs, tuple):
        return tuple(split(output, rank, counts) for output in outputs)
    return outputs.split(list(counts))[rank]


def backward(
    model: nn.Module, inputs: Any, loss_of: Any, *, counts: tuple[int, int] = ranks.COUNTS, seed: int = 1
) -> list[float]:
    """Run backward from the mean of the ranks' losses, in one forward; return the losses."""
    outputs, batch = model(inputs), ranks.images(sum(counts), seed)
    losses = [
        loss_of(lambda _, rank=rank: split(outputs, rank, counts), ranks.rank_samples(batch, rank, counts))
        for rank in range(2)
    ]
    ((losses[0] + losses[1]) / 2).backward()
    return [float(loss.detach()) for loss in losses]


def of_images(batch: dict[str, Tensor]) -> Tensor:
    return batch["x"]


def of_rows(batch: dict[str, Tensor]) -> Tensor:
    return batch["x"][:, 0, 0, :4]


def of_views(batch: dict[str, Tensor]) -> Any:
    return batch


def assert_same(model: nn.Module, result: dict[str, Any]) -> None:
    """Assert that gradients and buffers are real, and within 1e-12 of the reference."""
    expected, gradients = ranks.found(model), dict(result["gradients"])
    largest = max(
        float(grad.to_dense().norm()) for grad in expected["gradients"].values() if grad is not None
    )
    # The gradient of a bias before BatchNorm is zero up to rounding.
    zero = [n for n, g in expected["gradients"].items() if g is not None and _norm(g) < 1e-12 * largest]
    for name in zero:
        del expected["gradients"][name]
        size = _norm(gradients.pop(name))
        assert size < 1e-12 * largest, f"{name}: relative error {size / largest:.1e}"
    none = [name for name, grad in expected["gradients"].items() if grad is None]
    assert_same_gradients(expected["gradients"], gradients, zero=none)
    assert result["types"] == expected["types"]
    assert expected["buffers"].keys() == result["buffers"].keys()
    for name, buffer in expected["buffers"].items():
        torch.testing.assert_close(result["buffers"][name], buffer, rtol=1e-12, atol=1e-13, msg=name)


def _norm(tensor: Tensor) -> float:
    return float(tensor.to_dense().norm())


Case = tuple[str, Callable[[], nn.Module], Any, Any, tuple[int, int]]
EXACT: list[Case] = [
    ("conv", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("conv_even", conv_net, of_images, ranks.cross_entropy, ranks.EVEN),
    ("conv_read_early", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("conv_paranoid", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("paranoid_frozen", ranks.partly_frozen, of_rows, ranks.means, ranks.COUNTS),
    ("conv_broadcast", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("conv_group", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("find_unused", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("bucket_view", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("static_graph", conv_net, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("resnet", resnet20, of_images, ranks.cross_entropy, ranks.COUNTS),
    ("small", ranks.small, of_rows, ranks.means, ranks.COUNTS),
    ("one_sample", ranks.small, of_rows, ranks.means, (1, 5)),
    ("towers_read_early", ranks.TwoTowers, of_views, ranks.unrelated, ranks.COUNTS),
    ("opaque", lambda: ranks.Opaque(ranks.COUNTS), of_rows, ranks.means, ranks.COUNTS),
]


@pytest.mark.parametrize(
    ("name", "make", "inputs", "loss_of", "counts"), EXACT, ids=[case[0] for case in EXACT]
)
def test_equal_to_one_batch_of_all_ranks(
    name: str, make: Any, inputs: Any, loss_of: Any, counts: tuple[int, int], results: Any
):
    model = ranks.model_of(make)
    losses = backward(model, inputs(ranks.images(sum(counts))), loss_of, counts=counts)
    moved = [name for name, buffer in ranks.model_of(make).named_buffers() if name.endswith("running_mean")]
    assert moved, "premise: there are statistics"
    for loss, result in zip(losses, both(results, name), strict=True):
        assert result["loss"] == pytest.approx(loss, rel=1e-12)
        assert_same(model, result)
        assert not result["left"]


def test_with_equal_counts_the_loss_is_the_global_mean(results: Any):
    model = ranks.model_of(conv_net)
    ranks.cross_entropy(model, ranks.images(64)).backward()
    for result in both(results, "conv_even"):
        assert_same(model, result)


@pytest.mark.parametrize("name", ["mutant_forward", "mutant_backward", "mutant_gradients", "conv_local"])
def test_without_a_sum_over_ranks_the_gradient_differs(name: str, results: Any):
    model = ranks.model_of(conv_net)
    backward(model, of_images(ranks.images(64)), ranks.cross_entropy)
    for result in both(results, name):
        with pytest.raises(AssertionError, match="relative error"):
            assert_same(model, result)


@pytest.mark.parametrize(
    ("name", "operator"), [("forward", "native_batch_norm"), ("backward", "native_batch_norm_backward")]
)
def test_paranoid_mode_detects_a_missing_sum_over_ranks(name: str, operator: str, results: Any):
    for result in results[f"virtual_paranoid_{name}"]:
        assert f"WrongRuleError: Output 0 of aten.{operator}.default" in result["traceback"]


def test_batchnorm_without_a_group_stays_within_its_rank(results: Any):
    assert_within_ranks(both(results, "conv_local"))


def assert_within_ranks(found: list[dict[str, Any]]) -> None:
    """Assert statistics per rank, and the mean of the ranks' gradients."""
    models = [ranks.model_of(conv_net) for _ in range(2)]
    for rank, model in enumerate(models):
        ranks.cross_entropy(model, ranks.rank_samples(ranks.images(64), rank, ranks.COUNTS)).backward()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        mine.grad = other.grad = (mine.grad + other.grad) / 2
    for model, result in zip(models, found, strict=True):
        assert_same(model, result)


def test_collectives(results: Any):
    """One per layer in forward and in backward, exchanges of status, and the gradients; none of DDP."""
    size = sum(parameter.numel() for parameter in ranks.model_of(conv_net).parameters())
    tensors = len(list(ranks.model_of(conv_net).parameters()))
    expected = [
        ("all_to_all_single", HEADER + 1),  # status of the ranks
        *[("all_gather", 2 * channels + 1) for channels in (4, 6, 6)],
        *[("all_reduce", 2 * channels) for channels in (6, 6, 4)],
        ("all_to_all_single", HEADER + 1),  # status again
        ("all_to_all_single", HEADER + tensors),  # gradients that each rank has
        ("all_reduce", size),
    ]
    for name in ("conv", "conv_read_early", "conv_group"):
        for result, microbatches in zip(both(results, name), (4, 6), strict=True):
            assert result["collectives"] == expected
            assert result["by_ddp"] == 0
            assert result["microbatches"] == microbatches
            shell = "" if name == "conv_group" else "module."
            layers = [(f"{shell}{number}", "batch_norm") for number in (1, 5, 8)]
            assert [point for point in result["points"] if point[0]] == layers


def test_nothing_is_computed_before_it_is_read(results: Any):
    assert [result["sweeps"] for result in both(results, "conv")] == [0, 0]
    first, second = both(results, "conv_read_early")
    assert first["sweeps"] > 0 and second["sweeps"] == 0


def test_reads_at_different_times_keep_the_order_of_collectives(results: Any):
    first, second = both(results, "towers_read_early")
    assert first["collectives"] == second["collectives"] and len(first["collectives"]) == 4 + 2 * 8


@pytest.mark.parametrize("name", ["gathered", "functional"])
def test_embeddings_of_all_ranks_with_their_gradient(name: str, results: Any):
    """Both differentiable all-gathers of torch work on a tower with BatchNorm."""
    model, batch = ranks.model_of(ranks.TwoTowers), ranks.images(64)
    a, b = model(batch)
    mine = [ranks.contrastive(rows, b, 32 * rank) for rank, rows in enumerate(a.split(32))]
    loss = (mine[0] + mine[1]) / 2
    loss.backward()
    for result in both(results, name):
        assert_same(model, result)
        assert name == "gathered" or result["total"] == pytest.approx(loss.item(), rel=1e-12)


def test_collectives_of_the_program_run_after_recorded_operations(results: Any):
    model = ranks.model_of(conv_net)
    losses = backward(model, of_images(ranks.images(64)), ranks.cross_entropy)
    for loss, result in zip(losses, both(results, "metrics"), strict=True):
        assert_same(model, result)
        assert result["seen"] == 64 and result["texts"] == ["rank 0", "rank 1"]
        assert result["total"] == pytest.approx(sum(losses), rel=1e-12)
        assert result["every"] == pytest.approx(losses, rel=1e-12)
        assert result["loss"] == pytest.approx(loss, rel=1e-12)


def test_without_ddp_the_gradients_stay_those_of_the_rank(results: Any):
    """Statistics cover all ranks, so the mean of their gradients is that of the mean loss."""
    model = ranks.model_of(conv_net)
    backward(model, of_images(ranks.images(64)), ranks.cross_entropy)
    first, second = both(results, "statistics_only")
    assert not torch.allclose(first["gradients"]["0.weight"], second["gradients"]["0.weight"])
    for name, gradient in first["gradients"].items():
        first["gradients"][name] = (gradient + second["gradients"][name]) / 2
    assert_same(model, first)


def test_checkpointing_recomputes_statistics(results: Any):
    model = ranks.model_of(conv_net)
    backward(model, of_images(ranks.images(64)), ranks.cross_entropy)
    once = dict(model.named_buffers())
    for result in both(results, "again"):
        assert all(int(n) == 2 for name, n in result["buffers"].items() if "tracked" in name)
        assert_same(model, {**result, "buffers": once})
        assert [kind for kind, _ in result["collectives"]].count("all_gather") == 2 * 3


def test_a_layer_with_a_group_of_one_rank_stays_within_it(results: Any):
    assert_within_ranks(both(results, "alone"))


def test_tensors_of_a_block_are_freed(results: Any):
    for result in both(results, "freed"):
        assert len(result["gone"]) == 9 and all(result["gone"])


def test_gradients_accumulate_over_blocks_and_are_reduced_where_ddp_would(results: Any):
    model = ranks.model_of(ranks.small)
    for seed in (1, 9):
        backward(model, of_rows(ranks.images(64, seed)), ranks.means, seed=seed)
    for result in both(results, "accumulated"):
        assert_same(model, result)
        assert result["reduced_first"] == 0 and result["same"]


@pytest.mark.parametrize("name", ["training", "training_views"])
def test_training_and_then_ddp_without_a_block(name: str, results: Any):
    model = ranks.model_of(ranks.small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in (1, 4, 7):
        backward(model, of_rows(ranks.images(64, seed)), ranks.means, seed=seed)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    backward(model, of_rows(ranks.images(64, 8)), ranks.means, seed=8)
    for result in both(results, name):
        assert_same(model, result)


def test_gradients_of_a_single_rank_and_sparse_gradients(results: Any):
    model = ranks.model_of(ranks.Experts)
    losses = [
        model(ranks.rank_samples(ranks.images(64), rank, ranks.COUNTS), rank == 1).sin().square().mean()
        for rank in range(2)
    ]
    ((losses[0] + losses[1]) / 2).backward()
    none = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert none == ["experts.2.weight", "experts.2.bias"], "premise: a layer that no rank uses"
    for result in both(results, "experts"):
        assert result["gradients"]["table.weight"].is_sparse
        assert_same(model, result)


@pytest.mark.parametrize("where", ["start", "forward", "read"])
def test_if_one_rank_fails_both_raise_and_roll_back(results: Any, where: str):
    first, second = both(results, f"fails_{where}")
    assert first["error"].startswith("WindowError: Another rank that shares the virtual batch has failed.")
    assert second["error"].startswith("KeyError: 'user code'")
    for result in (first, second):
        assert_unchanged(result["before"], result["after"])
        assert result["seconds"] < 5


@pytest.mark.parametrize("where", ["sweep", "backward"])
def test_if_one_rank_runs_out_of_memory_the_other_does_not_wait(results: Any, where: str):
    first, second = both(results, f"fails_{where}")
    assert first["error"].startswith("WindowError: Another rank that shares the virtual batch has failed.")
    assert second["error"].startswith("OutOfMemoryError: no memory")
    for result in (first, second):
        assert_unchanged(result["before"], result["after"])
        assert result["seconds"] < 5
        assert len(result["collectives"]) == 1 + 6 + 1


def test_if_no_rank_fails_the_same_program_runs(results: Any):
    for result in both(results, "fails_nowhere"):
        assert not result["error"]
        with pytest.raises(AssertionError, match="gradient"):
            assert_unchanged(result["before"], result["after"])


def test_unsupported_statistics_over_ranks_raise(results: Any):
    for result in both(results, "unsupported"):
        twice, elsewhere = result["errors"]
        assert twice.startswith("CoupledSamplesError") and "create_graph=True" in twice
        assert elsewhere.startswith("CoupledSamplesError") and "dimension 0" in elsewhere


def test_copies_made_in_a_block_have_the_forward_of_their_class(results: Any):
    for result in both(results, "copied"):
        assert len(result["own"]) == 12 and all(result["own"])
        assert not any(result["left"])


def test_validation_on_one_rank_only(results: Any):
    first, second = both(results, "validation")
    virtual, real = first["losses"]
    assert virtual == pytest.approx(real, rel=1e-12) and not second["losses"]
