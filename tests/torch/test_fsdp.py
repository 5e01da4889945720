"""Models sharded by `fully_shard` on two gloo ranks, against the large batch over the data of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch import sharded_tasks as tasks
from tests.torch.fsdp_ranks import MUTANTS, REPLICATED
from tests.torch.helpers import mse
from tests.torch.sharded_tasks import TASKS
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]
EXACT = 1e-12


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each rank."""
    return found_by_both("tests.torch.fsdp_ranks", tmp_path_factory.mktemp("ranks"), warnings="default")


def worst(one: dict[str, Any], task: str) -> float:
    """Return the largest error of a parameter."""
    reference, _ = tasks.reference(TASKS[task], 2)
    return max(tasks.errors(one["parameters"], reference, TASKS[task].make()).values())


IN_FLOAT32 = ("in float32", "bfloat16 loss", "autocast")
CELLS = [
    *(task for task in TASKS if task not in IN_FLOAT32),
    *(f"each micro-batch/{task}" for task in ("clipped", "windows", "tokens", "forked")),
    *(f"all_reduce/{task}" for task in ("clipped", "windows", "tokens", "forked", "checked")),
    *(
        f"{how}{cell}"
        for how in ("DDP", "all_reduce")
        for cell in (
            *(f"/{task}" for task in REPLICATED),
            *(f", resumed {where}/clipped" for where in ("inside", "between")),
            *(f", {kind} in the forward/samples" for kind in ("memory", "error")),
        )
    ),
    *("DDP, compiled/clipped", "all_reduce, compiled/clipped", "DDP, auto with little memory/samples"),
    *(f"{how}/clipped" for how in ("offloaded", "kept gathered", "ignored", "compiled")),
    *(f"{how}/clipped" for how in ("resumed", "resumed inside")),
    "resumed inside, each micro-batch/clipped",
    "resumed in a turn without weight/windows",
    "by hand/samples",
    *(
        f"{how} in the {where}/samples"
        for how in ("memory", "error")
        for where in ("loss", "forward", "backward", "backward of each micro-batch")
    ),
    *(f"{how} in the forward of the check/samples" for how in ("memory", "error")),
    "error in the loss of the check/samples",
    *(f"{size} with little memory/samples" for size in ("auto", "largest")),
]


@pytest.mark.parametrize("cell", CELLS)
def test_ranks_train_as_the_large_batch(cell: str, found: Found) -> None:
    task = cell.split("/")[-1]
    _, seen = tasks.reference(TASKS[task], 2)
    if not cell.startswith(("by hand", "all_reduce", "DDP")):
        assert found[0][cell]["sharded"] or cell.startswith("ignored"), "premise"
        assert found[0][cell]["elements"] != found[1][cell]["elements"], "premise"
    for each in found:
        assert worst(each[cell], task) <= EXACT
        assert each[cell]["losses"] == pytest.approx(seen.losses, rel=EXACT)
        assert each[cell]["norms"] == pytest.approx(seen.norms, rel=EXACT)
        assert each[cell]["gradients"] == 0
    for name, value in found[0][cell]["parameters"].items():
        assert torch.equal(value, found[1][cell]["parameters"][name])


@pytest.mark.parametrize("way", ["", "each micro-batch/"])
def test_a_loss_in_bfloat16_does_not_round_the_weights(way: str, found: Found) -> None:
    assert worst(found[0][f"{way}bfloat16 loss"], "bfloat16 loss") <= 2e-6


@pytest.mark.parametrize("reduced", ["window", "microbatch"])
def test_a_mixed_precision_policy_rounds_as_in_the_large_batch(reduced: str, found: Found) -> None:
    assert worst(found[0][f"float32 policy, {reduced}/in float32"], "in float32") <= 2e-6
    for policy in ("bfloat16", "bfloat16 loss"):
        ours = worst(found[0][f"{policy} policy, {reduced}/in float32"], "in float32")
        theirs = worst(found[0][f"{policy} policy, large batch/in float32"], "in float32")
        assert 1e-3 < ours < 2 * theirs < 0.1


@pytest.mark.parametrize("how", ["", "DDP/", "all_reduce/"])
def test_autocast_rounds_as_in_the_large_batch(how: str, found: Found) -> None:
    task = TASKS["autocast"]
    trained, _ = tasks.reference(task, 2)
    theirs = max(tasks.errors(tasks.rounded(task, 2), trained, task.make().double()).values())
    ours = max(tasks.errors(found[0][f"{how}autocast"]["parameters"], trained, task.make().double()).values())
    assert 1e-3 < ours < 2 * theirs < 0.1


@pytest.mark.parametrize(("name", "task"), [(name, task) for name, (task, _) in MUTANTS.items()])
def test_mutant_differs_from_the_large_batch(name: str, task: str, found: Found) -> None:
    assert worst(found[0][f"mutant: {name}/{task}"], task) > 1e-3


def test_ranks_with_unequal_micro_batches_make_equal_numbers_of_exchanges(found: Found) -> None:
    one, other = (each["windows"] for each in found)
    assert one["microbatches"] == [4, 3, 4]
    assert other["microbatches"] == [2, 3, 1], "premise: this rank has fewer in two windows"
    assert one["exchanges"] == other["exchanges"]


def test_a_participant_does_not_see_placeholder_micro_batches(found: Found) -> None:
    each = [one["counted by a participant/windows"] for one in found]
    assert [one["counted"] for one in each] == [sum(one["microbatches"]) for one in each] == [11, 6]


def test_ranks_split_batches_into_equally_many_micro_batches_if_possible(found: Found) -> None:
    one, other = (each["samples"]["microbatches"] for each in found)
    assert (one, other) == ([4, 3, 4], [4, 3, 1])


def test_gradients_are_reduced_once_in_a_window(found: Found) -> None:
    # The root and two blocks: 3 all-gathers per forward, 2 per backward, and 3 reductions at the end. Numbers
    # are sent 6 times: counts of micro-batches, weights, failures, losses, norm, vote before the step.
    assert found[0]["samples"]["exchanges"] == [count * 5 + 3 + 6 for count in (4, 3, 4)]


def test_gradients_add_up_without_a_step(found: Found) -> None:
    task = TASKS["samples"]
    model = task.make()
    optimizer = task.optimizer(model.parameters())
    losses = []
    for batch in tasks.large_batches(task, 2):
        loss = mse(model, batch)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    for each in found:
        assert max(tasks.errors(each["gradient"]["parameters"], model, task.make()).values()) <= EXACT
        assert each["gradient"]["losses"] == pytest.approx(losses, rel=EXACT)


def test_a_window_restores_the_settings_of_fsdp2(found: Found) -> None:
    for each in found:
        assert each["as set"]["before"] == each["as set"]["after"]
    model = tasks.net()
    model.load_state_dict(found[0]["as set"]["parameters"])
    for rank in range(2):
        (mse(model, tasks.samples(rank)[0]) / 2).backward()
    for name, gradient in found[0]["as set"]["own"].items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


def test_the_report_names_the_way_of_reduction_and_its_bytes(found: Found) -> None:
    one, other = (found[0][way]["report"] for way in ("clipped", "each micro-batch/clipped"))
    assert one.startswith(
        "FSDP2 over 2 ranks: gradients are reduced once in a window (they take less than a tenth of a rank"
    )
    assert one.endswith(
        "; 2.21 KiB of gradients are kept until then, 1.15 KiB if reduced after each micro-batch"
    )
    assert (
        "are reduced after each micro-batch (as passed); 1.15 KiB of gradients are kept until the end"
        in other
    )
    assert found[0]["all_reduce/clipped"]["report"] == "all_reduce over 2 ranks"


def test_several_ranks_with_an_unwrapped_model_need_sync(found: Found) -> None:
    for each in found:
        assert each["not stated"]["text"].startswith(
            "2 ranks are initialised, but the model is not wrapped and not sharded, so each rank would train "
            "apart."
        )
        assert 'pass sync="all_reduce"' in each["not stated"]["text"]
        assert each["apart"]["report"] == "alone"
    assert found[0]["apart"]["losses"] != found[1]["apart"]["losses"]


def test_replicas_that_differ_are_refused(found: Found) -> None:
    for each in found:
        assert each["unlike"]["text"].startswith("The parameter 'first.bias' differs between ranks")


@pytest.mark.parametrize("where", ["loss", "forward", "backward"])
def test_out_of_memory_on_one_rank_repeats_the_window_on_both(where: str, found: Found) -> None:
    bad = len(where) % 2
    failures = [each[f"memory in the {where}/samples"]["failures"] for each in found]
    assert sum(failures[bad]) == 1, "smaller sizes are remembered"
    assert failures[1 - bad] == [0, 0, 0]


@pytest.mark.parametrize("where", ["loss", "forward", "backward"])
def test_an_error_on_one_rank_restores_both(where: str, found: Found) -> None:
    bad = len(where) % 2
    ((kind, text, unchanged, gradients),) = found[bad][f"error in the {where}/samples"]["outcome"]
    assert (kind, text, unchanged, gradients) == ("BrokenError", "no such label", True, 0)
    ((kind, text, unchanged, gradients),) = found[1 - bad][f"error in the {where}/samples"]["outcome"]
    assert (kind, unchanged, gradients) == ("RankError", True, 0)
    assert text.startswith(f"Rank {bad} failed in micro-batch 0 (BrokenError: no such label), so no ")


@pytest.mark.parametrize("how", ["DDP", "all_reduce"])
def test_an_error_on_one_replica_restores_both(how: str, found: Found) -> None:
    healthy, bad = (each[f"{how}, error in the forward/samples"]["outcome"] for each in found)
    assert bad == [("BrokenError", "no such label", True, 0)]
    ((kind, text, unchanged, gradients),) = healthy
    assert (kind, unchanged, gradients) == ("RankError", True, 0)
    assert text.startswith("Rank 1 failed in micro-batch 0 (BrokenError: no such label), so no rank makes ")


@pytest.mark.parametrize("where", ["loss", "forward"])
def test_an_error_in_the_check_of_one_rank_stops_both(where: str, found: Found) -> None:
    outcomes = [each[f"error in the {where} of the check/samples"]["outcome"] for each in found]
    ((kind, text, unchanged, _),) = outcomes[1]
    assert (kind, text, unchanged) == ("BrokenError", "no such label", True)
    ((kind, text, unchanged, _),) = outcomes[0]
    assert (kind, unchanged) == ("RankError", True)
    assert text.startswith("Rank 1 failed before its first micro-batch (BrokenError: no such label)")


def test_a_nonfinite_value_on_one_rank_raises_on_both(found: Found) -> None:
    for case in ("nan", "bad gradient"):
        for each in found:
            kind, _, unchanged = each[case]["outcome"]
            assert (kind, unchanged) == ("NonFiniteError", True)
    assert "micro-batch 0 of 0..3 with loss nan" in found[1]["nan"]["outcome"][1]
    text = found[0]["bad gradient"]["outcome"][1]
    assert "first parameter with a non-finite gradient is 'first.weight'" in text


def test_the_first_window_finds_a_wrong_reduction(found: Found) -> None:
    for each in found:
        kind, text, unchanged = each["wrong reduction"]["outcome"]
        assert (kind, unchanged) == ("LossSpecError", True)
        assert 'Instead pass reduction="mean"' in text


def test_a_rank_whose_every_backward_fails_raises_its_own_error(tmp_path: Path) -> None:
    """The failing rank cannot finish the collectives of the window, so the other one may time out."""
    healthy, broken = found_by_both("tests.torch.broken_ranks", tmp_path, warnings="default")
    assert broken == ["BrokenError", "no backward here"]
    assert healthy[0] in ("RuntimeError", "RankError")
