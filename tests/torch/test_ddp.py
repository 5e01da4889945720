"""Two gloo ranks against the single-process large batch over the data of both.

One pair of processes runs all cases of `ddp_worker`; the tests here build the large batch and compare.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator, Window
from superbatch.torch.loss.losses import NUMBERS
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import PerSampleRandom
from superbatch.torch.window.sync.faults import HEADER
from tests.forked import ROOT, Forked
from tests.torch import ddp_worker as ranks
from tests.torch.helpers import large_batch, mlp, sgd, tiny_lm

PATIENCE = 55.0  # seconds without a finished case, after which a pair of ranks is stopped


def start_ranks(folder: Path, names: list[str]) -> bool:
    """Run cases on two ranks; return whether both finished."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    (folder / "store").unlink(missing_ok=True)
    processes = [
        Forked(
            ["-W", "error", "-m", "tests.torch.ddp_worker", rank, folder, *names],
            environment=environment,
            merged=True,
        )
        for rank in range(2)
    ]
    done, last = 0, time.monotonic()
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(0.05)
            now_done = len(list(folder.glob("*.pt")))
            if now_done > done:
                done, last = now_done, time.monotonic()
            codes = [process.poll() for process in processes]
            if time.monotonic() - last > PATIENCE or any(code for code in codes):
                break
    finally:
        for rank, process in enumerate(processes):
            process.kill()
            (folder / f"output{rank}").write_text(process.output()[0])
            process.end()
    return all(process.returncode == 0 for process in processes)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of both ranks for each case. After a case that ends the processes, new ones run the others."""
    folder = tmp_path_factory.mktemp("ranks")
    left = [*ranks.EXACT, *ranks.OTHER, *ranks.SPECIAL]
    found: dict[str, list[dict[str, Any]]] = {}
    while left:
        ended = start_ranks(folder, left)
        for name in list(left):
            files = [folder / f"{name}.{rank}.pt" for rank in range(2)]
            if not all(file.exists() for file in files):
                if not ended:
                    outputs = [(folder / f"output{rank}").read_text()[-2000:] for rank in range(2)]
                    found[name] = [
                        {"traceback": f"the ranks failed in this case:\n{text}"} for text in outputs
                    ]
                    left.remove(name)
                break
            found[name] = [torch.load(file, weights_only=False) for file in files]
            left.remove(name)
    return found


def both(results: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    for rank, result in enumerate(results[name]):
        assert "traceback" not in result, f"rank {rank}: {result['traceback']}"
    return results[name]


def joined(microbatches: Sequence[Any]) -> Any:
    """Return the batch of all micro-batches."""
    if isinstance(microbatches[0], dict):
        return {key: torch.cat([mb[key] for mb in microbatches]) for key in microbatches[0]}
    return tuple(torch.cat(columns) for columns in zip(*microbatches, strict=True))


def large(case: ranks.Case) -> list[Any]:
    return [joined([*one, *other]) for one, other in zip(*case.data, strict=True)]


def differences(
    ours: dict[str, Tensor], reference: nn.Module, start: dict[str, Tensor], tolerance: float = 1e-12
) -> list[str]:
    """Return the names that differ from the reference, with errors relative to its change in training."""
    failures = []
    for name, expected in reference.state_dict().items():
        change = float((expected - start[name]).double().norm())
        if not change:
            if not torch.equal(ours[name], start[name]):
                failures.append(f"{name} changed")
            continue
        error = float((ours[name] - expected).double().norm()) / change
        if not error <= tolerance:
            failures.append(f"{name}: {error:.1e}")
    return failures


@pytest.mark.parametrize("name", list(ranks.EXACT))
def test_equal_to_the_large_batch_over_both_ranks(name: str, results: dict[str, Any]):
    case = ranks.EXACT[name]
    one, other = both(results, name)
    reference = case.make()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    objective = case.objective or case.loss
    seen = large_batch(
        case.optimizer(reference.parameters()),
        lambda batch: objective(reference, batch),
        large(case),
        max_grad_norm=case.options.get("max_grad_norm"),
    )
    moved = [key for key, value in reference.state_dict().items() if not torch.equal(value, start[key])]
    assert len(moved) >= 4, "premise: training changes the parameters"
    found = differences(one["parameters"], reference, start)
    if case.mutant:
        assert len(found) >= 4, "the mutant must differ from the large batch"
        return
    assert not found
    assert all(torch.equal(one["parameters"][key], other["parameters"][key]) for key in start)
    assert not one["left"] and not other["left"]
    assert one["syncs"] and other["syncs"], "DDP must reduce again outside windows"
    for update, twin, loss, norm in zip(
        one["updates"], other["updates"], seen.losses, seen.norms, strict=True
    ):
        assert update.made and twin.made
        assert (update.loss, update.weight, update.grad_norm) == (twin.loss, twin.weight, twin.grad_norm)
        assert abs(update.loss - loss) <= 1e-12 * max(1.0, abs(loss))
        assert update.grad_norm == pytest.approx(norm, rel=1e-11)
    if case.options.get("max_grad_norm"):
        assert all(norm > 2 * case.options["max_grad_norm"] for norm in seen.norms), "premise: all clipped"


def test_weight_of_an_update_is_that_of_both_ranks(results: dict[str, Any]):
    case = ranks.EXACT["tokens"]
    for result in both(results, "tokens"):
        weights = [int((batch["labels"] != -100).sum()) for batch in large(case)]
        assert [update.weight for update in result["updates"]] == weights
        assert all(isinstance(update.weight, int) for update in result["updates"])


def test_premises_of_the_data():
    """Ranks differ in tokens and micro-batches, and some micro-batches and windows have no tokens."""

    def counts(data: Any) -> list[list[int]]:
        return [[int((mb["labels"] != -100).sum()) for mb in window] for window in data]

    one, other = (counts(data) for data in ranks.UNEQUAL)
    assert all(sum(a) != sum(b) and len(a) != len(b) for a, b in zip(one, other, strict=True))
    assert all(0 in a for a in one)
    assert [sum(window) for window in counts(ranks.LOPSIDED[1])] == [0, 8, 0]


def single_process(case: ranks.Case) -> tuple[nn.Module, dict[Tensor, Tensor] | None]:
    """Train on the micro-batches of both ranks in one process, with the same rounding in low precision."""
    model = case.make()
    masters = fp32_masters(model) if case.masters else None
    optimizer = case.optimizer([*(masters.values() if masters else model.parameters())])
    accumulate = Accumulator(
        model,
        MasterWeights(optimizer, masters) if masters else optimizer,
        lambda mb: case.loss(model, mb),
        **{"gradient_sum": torch.float32, **case.options},
    )
    for one, other in zip(*case.data, strict=True):
        accumulate(Window([*one, *other]))
    return model, masters


def test_bfloat16_parameters_with_float32_buffers_and_masters(results: dict[str, Any]):
    one, other = both(results, "fp32_buffers")
    model, masters = single_process(ranks.OTHER["fp32_buffers"])
    assert masters
    for ours, twin, expected in zip(one["masters"], other["masters"], masters.values(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, twin)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    start = ranks.OTHER["fp32_buffers"].make().state_dict()
    assert all(not torch.equal(value, start[key]) for key, value in model.state_dict().items())


def test_ranks_with_unequal_numbers_of_microbatches_sum_in_one_dtype(results: dict[str, Any]):
    """20 micro-batches on one rank need float32 buffers, and 4 on the other do not."""
    one, other = both(results, "auto_buffers")
    model, _ = single_process(ranks.OTHER["auto_buffers"])
    for key, expected in model.state_dict().items():
        assert torch.equal(one["parameters"][key], other["parameters"][key])
        torch.testing.assert_close(one["parameters"][key], expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("name", ["batchnorm", "batchnorm_rank_without_weight"])
def test_running_statistics_are_those_of_the_large_batch(name: str, results: dict[str, Any]):
    """Only the first layer has the inputs of the large batch, so only its statistics are compared."""
    case = ranks.OTHER[name]
    one, other = both(results, name)
    reference = case.make()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    data = case.data if name == "batchnorm" else (case.data[0], [[] for _ in case.data[0]])
    for mine, others in zip(*data, strict=True):
        reference(joined([*mine, *others])[0])
    for key in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        expected = reference.state_dict()[key]
        assert not torch.equal(expected, start[key])
        for rank in (one, other):
            torch.testing.assert_close(rank["parameters"][key], expected, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(one["parameters"][key], other["parameters"][key]) for key in start)
    model, _ = single_process(case)  # each micro-batch is normalised by itself, on any number of ranks
    assert not differences(one["parameters"], model, start, 1e-11)


def test_frozen_batchnorm(results: dict[str, Any]):
    case = ranks.OTHER["batchnorm_frozen"]
    one, other = both(results, "batchnorm_frozen")
    reference = case.make()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    reference.eval()
    large_batch(sgd(reference.parameters()), lambda batch: ranks.mse(reference, batch), large(case))
    assert not differences(one["parameters"], reference, start)
    assert all(torch.equal(one["parameters"][key], other["parameters"][key]) for key in start)


# -- NaN on one rank ---------------------------------------------------------------------------------------


def trained(batches: list[Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    reference = mlp()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    large_batch(sgd(reference.parameters()), lambda batch: ranks.mse(reference, batch), batches)
    return reference, start


def rows_of(update: int, *, without_last: bool = False) -> Any:
    one, other = (data[update] for data in ranks.ROWS_CUT)
    return joined([*one, *(other[:1] if without_last else other)])


def test_nan_on_one_rank_raises_on_both(results: dict[str, Any]):
    one, other = both(results, "nan_raise")
    for rank in (one, other):
        assert [name for name, _ in rank["errors"]] == ["NonFiniteError"]
        assert rank["as_before"]
        assert len(rank["updates"]) == 2
    assert "on another rank" in one["errors"][0][1]
    assert "micro-batch 1 of 0..1 with loss nan" in other["errors"][0][1]
    assert "0.weight'" in other["errors"][0][1]
    reference, start = trained([rows_of(0), rows_of(2)])
    for rank in (one, other):
        assert not differences(rank["parameters"], reference, start)


def test_nan_on_one_rank_drops_its_microbatch(results: dict[str, Any]):
    one, other = both(results, "nan_skip_microbatch")
    reference, start = trained([rows_of(0), rows_of(1, without_last=True), rows_of(2)])
    for rank, dropped in ((one, ()), (other, (1,))):
        assert [update.dropped for update in rank["updates"]] == [(), dropped, ()]
        assert [update.weight for update in rank["updates"]] == [11, 10, 11]
        assert not differences(rank["parameters"], reference, start)


def test_nan_on_one_rank_skips_the_update_on_both(results: dict[str, Any]):
    reference, start = trained([rows_of(0), rows_of(2)])
    for rank in both(results, "nan_skip_update"):
        assert [update.made for update in rank["updates"]] == [True, False, True]
        assert "not finite" in rank["updates"][1].skipped
        assert not differences(rank["parameters"], reference, start)


def test_all_microbatches_of_one_rank_are_dropped(results: dict[str, Any]):
    """The remaining weight is not an integer, and both ranks must divide by it."""
    one, other = both(results, "whole_rank_dropped")
    reference = mlp()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    batch = joined(ranks.WEIGHTED[0][0])
    large_batch(sgd(reference.parameters()), lambda b: ranks.weighted(reference, b), [batch])
    weight = float(batch[2].sum())
    assert weight != int(weight), "premise"
    for rank in (one, other):
        assert [update.weight for update in rank["updates"]] == [pytest.approx(weight, rel=1e-14)]
        assert not differences(rank["parameters"], reference, start)
    assert other["updates"][0].dropped == (0, 1)


def test_all_statistics_of_one_rank_are_dropped(results: dict[str, Any]):
    one, other = both(results, "batchnorm_dropped")
    reference = ranks.normalised()
    reference(joined(ranks.BATCHNORM[0][0])[0])
    for key in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        for rank in (one, other):
            torch.testing.assert_close(
                rank["parameters"][key], reference.state_dict()[key], rtol=1e-12, atol=1e-12
            )


def test_a_window_without_weight_on_both_ranks(results: dict[str, Any]):
    case = ranks.EXACT["tokens"]
    reference = tiny_lm()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    large_batch(sgd(reference.parameters()), lambda b: ranks.token_mean(reference, b), large(case))
    for rank in both(results, "nobody_has_weight"):
        nothing = rank["nothing"]
        assert not nothing.made and "no weight" in nothing.skipped
        assert nothing.weight == 0 and math.isnan(nothing.loss)
        assert rank["as_before"]
        assert not differences(rank["parameters"], reference, start)


# -- collectives -------------------------------------------------------------------------------------------


def test_one_reduction_of_weights_before_and_one_of_gradients_after(results: dict[str, Any]):
    for rank, result in enumerate(both(results, "collectives")):
        events = result["events"]
        assert "DDP reduction" not in events
        first, second = events[: events.index("end")], events[events.index("end") + 1 : -1]
        assert first == second
        loop = first.index("forward"), len(first) - first[::-1].index("backward")
        numbers = f"numbers {HEADER + 3 + NUMBERS + result['announced']}"
        assert first[: loop[0]] == [numbers], "one collective, of numbers, before the first forward"
        assert first[loop[0] : loop[1]] == ["forward", "backward"] * len(ranks.ROWS_CUT[rank][0])
        after = first[loop[1] :]
        assert all(event.startswith(("all_reduce ", "numbers ")) for event in after)
        assert after.count(f"all_reduce {result['parameters']}") == 1, "the gradients, once, in one bucket"
        assert after[0] == numbers, "all of one size, so that a failing rank can join any of them"
        assert len(after) == 3, "losses and existing gradients, the sum, and the vote"


@pytest.mark.parametrize(
    "name",
    ["beside_buckets", "in_buckets", "in_buckets_ignored", "in_buckets_frozen", "in_buckets_hooked"],
)
def test_gradients_are_reduced_in_the_buckets_of_ddp(name: str, results: dict[str, Any]):
    frozen = ("0.bias",) if name == "in_buckets_frozen" else ()
    reference, start = trained_on_rows(frozen)
    inside = {"in_buckets": 4, "in_buckets_ignored": 3}.get(name, 0)
    for result in both(results, name):
        assert not differences(result["parameters"], reference, start)
        assert result["in buckets"] == [inside] * 3
        assert result["left"] == []


def test_mutant_with_means_in_the_buckets_is_wrong(results: dict[str, Any]):
    reference, start = trained_on_rows()
    for result in both(results, "in_buckets_mutant"):
        assert result["in buckets"] == [4] * 3
        assert len(differences(result["parameters"], reference, start)) == 4


def trained_on_rows(frozen: Sequence[str] = ()) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model trained on large batches with some frozen parameters, and its initial state."""
    reference = mlp()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(name not in frozen)
    start = ranks.state_of(reference)
    batches = [joined([*one, *other]) for one, other in zip(*ranks.ROWS_CUT, strict=True)]
    parameters = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    large_batch(sgd(parameters), lambda batch: ranks.mse(reference, batch), batches)
    return reference, start


def test_overflow_on_one_rank(results: dict[str, Any]):
    """Both ranks skip the update and the scheduler step, and halve the scale once."""
    reference = mlp()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    optimizer = sgd(reference.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    large_batch(optimizer, lambda b: ranks.mse(reference, b), [rows_of(0), rows_of(2)], scheduler=scheduler)
    for rank in both(results, "overflow"):
        assert [update.made for update in rank["updates"]] == [True, False, True]
        assert "overflow" in rank["updates"][1].skipped
        assert rank["scale"] == 4.0 and rank["lr"] == 0.1 * 0.25
        assert not differences(rank["parameters"], reference, start)


def test_scaler_on_a_rank_without_weight(results: dict[str, Any]):
    reference = tiny_lm()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    large_batch(
        sgd(reference.parameters()),
        lambda b: ranks.token_mean(reference, b),
        large(ranks.EXACT["rank_without_weight"]),
    )
    for rank in both(results, "scaler_without_weight"):
        assert all(update.made for update in rank["updates"])
        assert not differences(rank["parameters"], reference, start)


def test_a_rank_without_weight_skips_buffer_broadcasts(results: dict[str, Any]):
    reference = ranks.normalised().eval()
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    batches = [joined(window) for window in ranks.WEIGHTED[0]]
    large_batch(sgd(reference.parameters()), lambda b: ranks.weighted(reference, b), batches)
    for rank in both(results, "forward_between"):
        assert not differences(rank["parameters"], reference, start)


def test_a_wrong_declaration_on_one_rank_stops_both(results: dict[str, Any]):
    one, other = both(results, "wrong_statement")
    assert one["as_before"] and other["as_before"]
    assert len(one["errors"]) == len(other["errors"]) == 2
    assert all("on another rank" in error for error in one["errors"])
    assert all("loss_fn returns a sum, not a mean" in error for error in other["errors"])


def test_streams_per_sample_do_not_depend_on_the_ranks(results: dict[str, Any]):
    """The reference is one process with the samples of rank 0 and then of rank 1."""
    model = mlp(dropout=0.4)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: ranks.mse(model, mb),
        participants=[PerSampleRandom()],
        microbatch_size=5,
    )
    torch.manual_seed(5)
    updates = [accumulate(joined([a[0], b[0]])) for a, b in zip(*ranks.ROWS, strict=True)]
    without = trained([joined([a[0], b[0]]) for a, b in zip(*ranks.ROWS, strict=True)])[0]
    for rank in both(results, "dropout"):
        assert not differences(rank["parameters"], model, start, 1e-11)
        assert [update.loss for update in rank["updates"]] == pytest.approx(
            [u.loss for u in updates], rel=1e-12
        )
    assert not torch.allclose(without[0].weight, model[0].weight), "premise: there is dropout"  # type: ignore[index]


def test_momentum_accumulation_over_ranks_is_refused(results: dict[str, Any]):
    for rank in both(results, "momentum_refused"):
        assert "ranks" in rank["error"]
