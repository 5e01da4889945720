"""Automatic sizes on a simulated machine, whose memory and time are known exactly."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from superbatch.batch.split import near_equal
from superbatch.torch.sizes.auto import AutoSize, Mode
from superbatch.torch.sizes.instruments import instruments_for
from superbatch.torch.sizes.sizing import Sizing
from tests.torch.made_up_machine import MIB, Machine, OutOfMemory, sizing_on, window

# ---- the largest size


def test_a_batch_far_below_the_limit_is_one_micro_batch_from_the_start():
    machine = Machine()
    sizing = sizing_on(machine)
    assert window(sizing, machine, 300) == [300]
    assert window(sizing, machine, 300) == [300]
    report = sizing.report()
    assert report is not None and report.chosen == 300 and "whole batch" in report.why


@pytest.mark.parametrize("wrong", [1.0, 0.8, 0.96, 1.3], ids=lambda wrong: f"predicted x {wrong}")
def test_the_largest_size_is_found_without_a_failure(wrong: float):
    machine = Machine(wrong=wrong, once=30 * MIB)
    sizing = sizing_on(machine)
    true = machine.true_largest()
    samples = 8 * true  # so that micro-batches are nearly of the largest size
    for _ in range(4):
        window(sizing, machine, samples)
    assert machine.failures == 0
    report = sizing.report()
    assert report is not None
    assert 0.97 * true <= report.largest <= true
    assert max(machine.log[-1]) == near_equal(samples, report.largest)[0]
    assert max(machine.log[-1]) - min(machine.log[-1]) <= 1
    assert len(machine.log[-1]) == -(-samples // report.largest), "no more micro-batches than needed"


def test_memory_that_the_optimizer_did_not_take_is_used():
    machine = Machine(state_guessed=1.9)  # 36 MiB of 1000: less than the 5 % that start a new search
    sizing = sizing_on(machine)
    true = machine.true_largest()
    for _ in range(3):
        window(sizing, machine, 7344)  # 9 micro-batches of 816, so that later windows bring no new size
        assert sizing.report() is not None, "a user may ask after each window"
    report = sizing.report()
    assert report is not None and machine.failures == 0
    assert max(machine.log[0]) < 0.97 * true, "the first window uses the prediction"
    assert 0.97 * true <= report.largest <= true


@given(
    limit=st.integers(600, 4000),
    each=st.integers(1, 64),
    gradients=st.integers(1, 60),
    states=st.integers(0, 2),
    wrong=st.floats(0.75, 1.5),
    once=st.integers(0, 100),
    kernels=st.integers(0, 8),
    buffers=st.floats(0, 0.5),  # share of the memory of a sample
    batches=st.lists(st.integers(1, 20_000), min_size=1, max_size=4),
)
# Only first micro-batches of windows were run, so the memory that a new size keeps is unknown.
@example(
    limit=600, each=64, gradients=27, states=0, wrong=1.0, once=8, kernels=7, buffers=0.0, batches=[3, 139]
)
@settings(max_examples=60, deadline=None)
def test_no_micro_batch_ever_fails(
    limit: int,
    each: int,
    gradients: int,
    states: int,
    wrong: float,
    once: int,
    kernels: int,
    buffers: float,
    batches: list[int],
):
    """The models vary, and predictions are 0.75 to 1.5 times the true memory."""
    machine = Machine(
        limit=limit * MIB,
        each=each * MIB // 8,
        gradients=gradients * MIB,
        state=states * gradients * MIB,
        wrong=wrong,
        once=once * MIB,
        kernels=kernels * MIB // 4,
        buffers=int(buffers * each * MIB / 8),
    )
    if machine.true_largest(sizes=20) < 8:
        return  # too little memory for any measurement
    sizing = sizing_on(machine)
    for samples in batches:
        for _ in range(3):
            window(sizing, machine, samples)
    assert machine.failures == 0
    report = sizing.report()
    assert report is not None
    assert window(sizing, machine, report.largest) == [report.largest]
    if report.largest < batches[-1]:  # limited by memory, not by the batch
        assert window(sizing, machine, 2 * report.largest) == 2 * [report.largest]
    assert machine.failures == 0


@pytest.mark.parametrize("kernels", [0, 1, 4], ids=lambda kernels: f"{kernels} MiB for each size")
@pytest.mark.parametrize("batch", [1.0, 1.9, 5.3, 40.0], ids=lambda batch: f"{batch} x the limit")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_reported_size_runs_in_one_micro_batch(kernels: int, batch: float, count: int):
    machine = Machine(kernels=kernels * MIB, once=30 * MIB)
    sizing = sizing_on(machine)
    for _ in range(3):
        window(sizing, machine, int(batch * machine.true_largest()))
    report = sizing.report()
    assert report is not None
    true = machine.true_largest(sizes=len(machine.sizes_run))
    assert 0.97 * true <= report.largest <= true
    assert window(sizing, machine, count * report.largest) == count * [report.largest]
    assert window(sizing, machine, count * report.largest) == count * [report.largest]
    assert machine.failures == 0


def test_small_batches_first_do_not_fix_a_small_size():
    machine = Machine()
    sizing = sizing_on(machine)
    for samples in (100, 100, 100, 100, 8000, 8000):
        window(sizing, machine, samples)
    assert max(machine.log[-1]) > 0.9 * machine.true_largest()


def test_memory_that_each_size_keeps_for_kernels_is_counted():
    machine = Machine(limit=200 * MIB, each=MIB // 5, gradients=MIB, state=MIB, kernels=3 * MIB)
    sizing = sizing_on(machine)
    for _ in range(6):
        window(sizing, machine, 6000)
    assert machine.failures == 0
    assert len(machine.sizes_run) <= 8
    report = sizing.report()
    assert report is not None
    true = machine.true_largest(sizes=len(machine.sizes_run) + 1)
    assert 0.97 * true <= report.largest <= true
    assert window(sizing, machine, 2 * report.largest) == 2 * [report.largest]
    assert machine.failures == 0


@pytest.mark.parametrize("batch", [400, 600, 2048, 6000])
@pytest.mark.parametrize("once", [0, 4, 12])
def test_buffers_of_the_largest_size_so_far_are_counted(batch: int, once: int):
    """A library keeps buffers for the largest size so far. Smaller sizes do not show them."""
    machine = Machine(
        limit=45 * MIB,
        each=MIB * 3 // 16,
        gradients=5 * MIB,
        state=0,
        once=once * MIB,
        kernels=MIB // 2,
        buffers=MIB // 10,
    )
    sizing = sizing_on(machine)
    for _ in range(6):
        window(sizing, machine, batch)
    assert machine.failures == 0
    report = sizing.report()
    assert report is not None
    true = machine.true_largest(sizes=len(machine.sizes_run))
    assert 0.75 * true <= report.largest <= true
    assert max(machine.log[-1]) >= near_equal(batch, int(0.7 * true))[0], "no fallback to small sizes"


def test_a_near_equal_split_stays_below_the_largest_size():
    machine = Machine(limit=900 * MIB, gradients=0, state=0)
    sizing = sizing_on(machine)
    for _ in range(4):
        window(sizing, machine, 1000)
    assert machine.log[-1] == [500, 500]
    report = sizing.report()
    assert report is not None and report.chosen == 500 and 0.97 * 900 <= report.largest <= 900


def test_a_larger_batch_gets_larger_micro_batches():
    machine = Machine()
    sizing = sizing_on(machine)
    for samples in (100, 300, 700, 5000, 5000, 5000):
        window(sizing, machine, samples)
    assert machine.failures == 0
    assert [len(sizes) for sizes in machine.log[:2]] == [1, 1]
    assert max(machine.log[-1]) == near_equal(5000, int(0.98 * machine.true_largest()))[0]


def test_one_sample_that_does_not_fit_raises_out_of_memory():
    machine = Machine(limit=50 * MIB, each=60 * MIB)
    sizing = sizing_on(machine)
    with pytest.raises(OutOfMemory):
        window(sizing, machine, 4)


# ---- a limit that changes


def test_micro_batches_shrink_before_memory_taken_by_others_makes_them_fail(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("superbatch.torch.sizes.auto._EVERY", 0.0)
    machine = Machine()
    sizing = sizing_on(machine)
    for _ in range(4):
        window(sizing, machine, 8000)
    before = max(machine.log[-1])
    machine.alive = 300 * MIB  # between two windows
    for _ in range(3):
        window(sizing, machine, 8000)
    assert machine.failures == 0
    assert max(machine.log[-1]) <= machine.true_largest() < before
    machine.alive = 0
    for _ in range(4):
        window(sizing, machine, 8000)
    assert machine.failures == 0 and max(machine.log[-1]) >= before


def test_a_tenth_more_memory_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("superbatch.torch.sizes.auto._EVERY", 0.0)
    machine = Machine(alive=100 * MIB)
    sizing = sizing_on(machine)
    for _ in range(3):
        window(sizing, machine, 80_000)
    machine.alive = 0
    for _ in range(3):
        window(sizing, machine, 80_000)
    assert machine.failures == 0
    assert 0.97 * machine.true_largest() <= max(machine.log[-1]) <= machine.true_largest()


def test_a_failure_halves_the_size_and_doubles_the_wait_until_it_grows_again():
    machine = Machine()
    sizing = sizing_on(machine)
    for _ in range(3):
        window(sizing, machine, 8000)
    before = max(machine.log[-1])
    waits: list[int] = []
    for _ in range(2):
        assert sizing.failed(before) == (before + 1) // 2
        windows = 0
        while max(window(sizing, machine, 8000)) <= (before + 1) // 2:
            windows += 1
        waits.append(windows)
        for _ in range(3):
            window(sizing, machine, 8000)
        assert max(machine.log[-1]) == before
    wait = Sizing.FIRST_WAIT
    assert waits[0] in (wait - 1, wait) and waits[1] >= 2 * wait - 1
    assert sizing.failed(1) == 0


def test_allocator_retries_make_micro_batches_smaller():
    machine = Machine()
    sizing = sizing_on(machine)
    for _ in range(4):
        window(sizing, machine, 8000)
    before = max(machine.log[-1])
    machine.retries = 3
    window(sizing, machine, 8000)
    assert max(window(sizing, machine, 8000)) < before


def test_retries_of_new_sizes_do_not_shrink_micro_batches():
    """Trials of larger sizes reach the limit, and cached blocks of other sizes do not fit them."""
    quiet, retrying = Machine(), Machine(retries_if_not_clean=1)
    for machine in (quiet, retrying):
        sizing = sizing_on(machine)
        for _ in range(4):
            window(sizing, machine, 8000)
    assert retrying.retries > 0, "premise: the allocator retried"
    assert retrying.log == quiet.log
    assert max(quiet.log[-1]) > 100


def test_each_size_is_measured_with_empty_caches():
    machine = Machine()
    sizing = sizing_on(machine)
    for _ in range(8):
        window(sizing, machine, 8000)
    ran = [size for sizes in machine.log for size in sizes]
    # The first run of each size, and the second if the first left something to measure.
    assert len(set(ran)) < machine.cleaned <= sum(min(2, ran.count(size)) for size in set(ran))
    assert machine.cleaned < len(ran), "premise: sizes also ran without a cleared cache"


def test_retries_before_training_are_ignored():
    machine, other = Machine(retries=5), Machine()
    for one in (machine, other):
        sizing = sizing_on(one)
        for _ in range(4):
            window(sizing, one, 8000)
    assert machine.log == other.log


def test_memory_left_free_after_retries_is_used_again():
    machine = Machine()
    sizing = sizing_on(machine)
    for _ in range(4):
        window(sizing, machine, 8000)
    before = max(machine.log[-1])
    machine.retries = 3
    for _ in range(3):
        window(sizing, machine, 8000)
    assert max(machine.log[-1]) < before
    for _ in range(110):
        window(sizing, machine, 8000)
    assert max(machine.log[-1]) == before


def test_more_is_left_free_if_the_system_kills_the_process():
    soft, hard = Machine(), Machine(by="memory.max of a control group")
    for machine in (soft, hard):
        sizing = sizing_on(machine)
        for _ in range(4):
            window(sizing, machine, 80_000)
    assert max(hard.log[-1]) < 0.93 * max(soft.log[-1])


def test_a_fragmented_heap_gets_room_for_its_holes():
    machine = Machine(holes=400 * MIB)
    sizing = sizing_on(machine)
    for _ in range(4):
        window(sizing, machine, 8000)
    assert machine.failures == 0
    assert max(machine.log[-1]) * machine.each * 3 <= machine.limit


# ---- shapes


def test_larger_samples_are_predicted_again_and_smaller_ones_are_not():
    machine = Machine()
    sizing = sizing_on(machine)
    for _ in range(3):
        window(sizing, machine, 4000, width=8)
    known = machine.predictions
    window(sizing, machine, 4000, width=5)
    assert machine.predictions == known and max(machine.log[-1]) == max(machine.log[-2])
    window(sizing, machine, 4000, width=16)
    assert machine.predictions > known
    assert machine.failures == 0
    assert max(machine.log[-1]) * 2 <= machine.true_largest()
    known = machine.predictions
    for width in (16, 8, 12):
        window(sizing, machine, 4000, width=width)
    assert machine.predictions == known and machine.failures == 0


# ---- the fastest size


def curve(best: int) -> Callable[[int], float]:
    return lambda n: 1e-3 * (1 + abs(n - best) / (n if n < best else 4 * best))


@pytest.mark.parametrize("best", [1, 32, 128, 500])
def test_the_fastest_size_is_found_in_real_windows(best: int):
    machine = Machine(speed=curve(best))
    sizing = sizing_on(machine, "fastest")
    for _ in range(40):
        window(sizing, machine, 500)
    assert machine.failures == 0
    settled = max(machine.log[-1])
    at = machine.speed
    assert at(settled) <= 1.1 * min(at(n) for n in range(1, 501))
    assert machine.log[-1] == machine.log[-2] == near_equal(500, settled)
    report = sizing.report()
    assert report is not None and "fastest of" in report.why and report.chosen == settled


def test_a_fastest_size_that_does_not_fit_is_approached_but_never_run():
    machine = Machine(speed=lambda n: 1e-3 * (1 + 50 / n))  # as on a GPU, larger sizes are faster
    sizing = sizing_on(machine, "fastest")
    for _ in range(10):
        window(sizing, machine, 8000)
    assert machine.failures == 0
    assert 0.85 * machine.true_largest() <= max(machine.log[-1]) <= machine.true_largest()


@pytest.mark.parametrize("threads", [1, 2])
def test_waiting_counts_only_if_torch_has_several_threads(threads: int):
    clock = instruments_for(torch.device("cpu"), lambda microbatch, samples: pytest.fail("no prediction"))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        start = clock.now()
        time.sleep(0.1)  # as if another process used the core
        waited = clock.seconds(start, clock.now())
        start = clock.now()
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        worked = clock.seconds(start, clock.now())
    finally:
        torch.set_num_threads(before)
    assert waited < 0.05 if threads == 1 else waited >= 0.1
    assert worked >= 0.05


def test_a_compiled_model_runs_at_most_two_sizes():
    class OptimizedModule(nn.Module):  # the class name that torch.compile gives a model
        pass

    model = nn.Sequential(OptimizedModule())  # a compiled submodule is enough
    machine = Machine()
    sizing = AutoSize(
        lambda x: x.sum(), [model], [], device=None, mode="fastest", instruments=machine.instruments()
    )
    for _ in range(5):
        window(sizing, machine, 4000)
    assert machine.failures == 0
    assert len(machine.sizes_run) <= 2 and len(machine.log[0]) > 1


# ---- without a prediction


def test_a_model_that_cannot_be_predicted_is_measured_by_its_first_micro_batches():
    """The simulated machine allocates no tensors, so a real model runs here."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    machine = Machine(predictable=False, limit=400 * MIB)
    sizing = AutoSize(
        lambda x: model(x).sum(), [model], [], device=None, mode="largest", instruments=machine.instruments()
    )
    batch = torch.randn(64, 64)
    sizes, done = sizing.plan(batch, 64), 0
    first = list(sizes)
    while sizes:
        with sizing.measure(sizes[0]):
            model(batch[done : done + sizes[0]]).sum().backward()
        done += sizes.pop(0)
        sizes = sizing.sizes_of_rest(64 - done) or sizes
    assert first[0] == 1
    report = sizing.report()
    assert report is not None and report.how == "small real runs"
    assert {each.samples for each in report.measured} >= {2, 4}
    assert report.largest == 64


# ---- saved state


@pytest.mark.parametrize("mode", ["largest", "fastest"])
def test_a_resumed_run_does_not_search_again(mode: Mode, tmp_path: Any):
    machine = Machine(speed=curve(100))
    sizing = sizing_on(machine, mode)
    for _ in range(20):
        window(sizing, machine, 8000)
    torch.save(sizing.state_dict(), tmp_path / "state.pt")
    again = Machine(speed=curve(100), updated=True)
    resumed = sizing_on(again, mode)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert window(resumed, again, 8000) == machine.log[-1]
    assert again.predictions == 0


def test_a_resumed_run_on_a_smaller_machine_takes_smaller_sizes():
    machine = Machine()
    sizing = sizing_on(machine)
    for _ in range(4):
        window(sizing, machine, 8000)
    small = Machine(limit=500 * MIB, updated=True)
    loaded: Any = SimpleNamespace(state={0: {"momentum": 1}}, param_groups=[])
    resumed = sizing_on(small, optimizers=[loaded])
    resumed.load_state_dict(sizing.state_dict())
    for _ in range(3):
        window(resumed, small, 8000)
    assert small.failures == 0
    assert 0.9 * small.true_largest() <= max(small.log[-1]) <= small.true_largest()


def test_a_settled_size_leaves_memory_for_kernels_of_new_sizes():
    """Batches of other lengths bring new sizes of micro-batches, and each new size keeps some memory."""
    machine = Machine(
        limit=301 * MIB,
        each=MIB // 4,
        gradients=27 * MIB,
        state=54 * MIB,
        wrong=1.5,
        once=93 * MIB,
        kernels=7 * MIB // 4,
    )
    sizing = sizing_on(machine)
    for samples in (1246, 430, 1240):
        for _ in range(3):
            window(sizing, machine, samples)
    assert machine.failures == 0
    assert len(machine.sizes_run) > 6, "premise: many sizes"
