"""Every trajectory of Caffe, reproduced by the Accumulator on windows to 1e-15."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter

import pytest
import torch

from superbatch.caffe import parse_solver
from superbatch.torch import Accumulator, windows
from superbatch.torch.caffe import solver
from tests.caffe import golden
from tests.caffe.reference import Reference

CASES = golden.cases()


def test_all_trajectories_are_present() -> None:
    configs = [parse_solver(case["solver_prototxt"]) for case in CASES.values()]
    assert len(configs) == 40
    assert len(Counter(config.type for config in configs)) == 6
    assert len(Counter(config.lr_policy for config in configs)) == 7
    assert Counter(config.iter_size for config in configs) == {1: 20, 4: 20}
    assert {case["net"] for case in CASES.values()} == {"linear", "lenet"}


@pytest.mark.parametrize("name", CASES)
def test_the_trajectory_is_that_of_caffe(name: str) -> None:
    found = golden.train(CASES[name])
    assert found.rates == 0.0, "the rates are the same numbers"
    assert found.worst <= golden.TOLERANCE, found


@pytest.mark.parametrize("name", CASES)
def test_the_transcription_equals_caffe(name: str) -> None:
    case = CASES[name]
    config = parse_solver(case["solver_prototxt"])
    model = golden.net(case)
    fields = {field: getattr(config, field) for field in ("momentum", "weight_decay", "delta", "rms_decay")}
    reference = Reference(
        model,
        case["lr_mult"],
        case["decay_mult"],
        type=config.type,
        momentum2=config.momentum2,
        iter_size=config.iter_size,
        **fields,
    )
    read, loss_fn = golden.microbatches(case), golden.loss_of(model)
    for expected in case["iterations"]:
        parts = [next(read) for _ in range(config.iter_size)]
        loss = reference.step([lambda part=part: loss_fn(part) for part in parts], expected["lr"])
        assert abs(loss - expected["loss"]) <= golden.TOLERANCE
        assert golden.largest_difference(reference.blobs, expected["weights"]) <= golden.TOLERANCE


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("lenet/Adam/iter_size=4")])
def test_a_batch_in_micro_batches_is_the_batch(name: str) -> None:
    """Data of Caffe: iter_size 4 with micro-batches of 4 trains as iter_size 1 with 16."""
    parts, whole = CASES[name], CASES[name.replace("iter_size=4", "iter_size=1")]
    last = [torch.tensor(values, dtype=torch.float64) for values in parts["iterations"][-1]["weights"]]
    assert golden.largest_difference(last, whole["iterations"][-1]["weights"]) < 1e-14


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("iter_size=4")])
def test_a_saved_training_resumes_bit_for_bit(name: str) -> None:
    """Save after three updates, load into new objects, train to the end: nothing differs."""
    case = CASES[name]
    config = parse_solver(case["solver_prototxt"].replace("average_loss: 1", "") + " average_loss: 3")

    def begin():
        model = golden.net(case)
        caffe = solver(config, golden.groups(model, case))
        return (
            model,
            caffe,
            Accumulator(model, caffe.optimizer, golden.loss_of(model), scheduler=caffe.scheduler),
        )

    data = [next(read) for read in [golden.microbatches(case)] for _ in range(8 * config.iter_size)]
    made = [*windows(data, config.iter_size)]
    model, caffe, accumulate = begin()
    smoothed = [caffe.smoothed_loss.add(accumulate(window).loss) for window in made[:3]]
    file = io.BytesIO()
    parts = (model, caffe.optimizer, caffe.scheduler, caffe.smoothed_loss)
    torch.save([part.state_dict() for part in parts], file)
    smoothed += [caffe.smoothed_loss.add(accumulate(window).loss) for window in made[3:]]

    file.seek(0)
    other, again, accumulate = begin()
    states = torch.load(file, weights_only=True)
    for part, state in zip(
        (other, again.optimizer, again.scheduler, again.smoothed_loss), states, strict=True
    ):
        part.load_state_dict(state)
    later = []
    for window in made[3:]:
        update = accumulate(window)
        later.append(again.smoothed_loss.add(update.loss))
    assert later == smoothed[3:]
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert (
        golden.largest_difference(list(other.parameters()), case["iterations"][-1]["weights"])
        <= golden.TOLERANCE
    )


def test_a_solver_describes_itself() -> None:
    case = next(iter(CASES.values()))
    config = dataclasses.replace(parse_solver(case["solver_prototxt"]), iter_size=3, average_loss=2)
    made = solver(config, golden.net(case).parameters())
    assert (made.accumulation_steps, made.config) == (3, config)
    assert [made.smoothed_loss.add(loss) for loss in (1.0, 3.0, 5.0)] == [1.0, 2.0, 4.0]
