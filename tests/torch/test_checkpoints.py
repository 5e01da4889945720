"""Checkpoints resume a training bit for bit. A damaged or foreign checkpoint raises and changes nothing."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from superbatch.errors import CheckpointError, InputError, WindowError
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.checkpoint import load_checkpoint, save_checkpoint
from superbatch.torch.checkpoint.codec import Encoder, decode
from superbatch.torch.masters import MasterWeights, fp32_masters
from tests.torch.states import assert_unchanged
from tests.torch.test_resume import BATCHES, MICROBATCHES, NAMES, Task, same_update, seed

pytest.importorskip("safetensors", reason="safetensors is not installed (extra: checkpoint)")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", [None, 0, 2, MICROBATCHES])
def test_resumes_bit_for_bit(name: str, position: int | None, tmp_path: Path) -> None:
    """Resume between two windows (None) or inside one, with random generators in another state."""
    straight = Task(name)
    batches = straight.batches()
    expected = [straight.run(batch) for batch in batches]
    final = straight.fingerprint()

    first = Task(name)
    first.save = lambda file: save_checkpoint(file, first.accumulate)  # type: ignore[method-assign,assignment]
    first.run(batches[0])
    if position is None:
        first.save(tmp_path)
    first.run(batches[1], save_at=position, file=tmp_path)

    second = Task(name)
    seed(99)
    loaded = load_checkpoint(tmp_path, second.accumulate)
    assert loaded is not None
    assert (loaded.updates, loaded.in_flight) == (1, position is not None)
    updates = [second.run(batch) for batch in batches[1:]]
    assert all(map(same_update, updates, expected[1:]))
    assert_unchanged(final, second.fingerprint())


def test_mutant_without_generator_states_ends_elsewhere(tmp_path: Path) -> None:
    straight, second = Task("dropout"), Task("dropout")
    for batch in BATCHES[:2]:
        straight.run(batch)
    save_checkpoint(tmp_path, straight.accumulate)
    straight.run(BATCHES[2])
    load_checkpoint(tmp_path, second.accumulate)
    seed(99)
    second.run(BATCHES[2])
    ours, theirs = straight.model.state_dict(), second.model.state_dict()
    assert not torch.equal(ours["0.weight"], theirs["0.weight"])


def test_generators_and_extra_state_of_the_program(tmp_path: Path) -> None:
    task, generator = Task("dropout"), torch.Generator().manual_seed(5)
    task.run(BATCHES[0])
    extra = {"best": float("inf"), 3: ("epoch", [1, None]), "table": torch.arange(3), "name": "run é"}
    path = save_checkpoint(tmp_path, task.accumulate, samples=10, extra=extra, generators={"data": generator})
    drawn = [torch.rand(2, generator=generator), torch.rand(2), random.random(), np.random.rand()]
    loaded = load_checkpoint(path, Task("dropout").accumulate, generators={"data": generator})
    assert loaded is not None
    again = [torch.rand(2, generator=generator), torch.rand(2), random.random(), np.random.rand()]
    assert str(again) == str(drawn)
    assert loaded.samples == 10
    assert loaded.extra.pop("table").tolist() == [0, 1, 2]
    assert loaded.extra == {k: v for k, v in extra.items() if k != "table"}
    with pytest.raises(
        CheckpointError, match=r"has a generator 'data', but generators= has none\. Pass the same"
    ):
        load_checkpoint(path, Task("dropout").accumulate)


def test_float32_masters_of_a_bfloat16_model(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Accumulator]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).bfloat16()
        masters = fp32_masters(model)
        adam = torch.optim.AdamW(masters.values(), lr=1e-3)
        step = MasterWeights(adam, masters)
        return model, Accumulator(model, step, lambda batch: model(batch).square().mean(), microbatch_size=2)

    batch = torch.randn(6, 4).bfloat16()
    straight, first, second = make(), make(), make()
    for _ in range(4):
        straight[1](batch)
    for _ in range(2):
        first[1](batch)
    save_checkpoint(tmp_path, first[1])
    load_checkpoint(tmp_path, second[1])
    for _ in range(2):
        second[1](batch)
    for name, value in straight[0].state_dict().items():
        assert torch.equal(second[0].state_dict()[name], value)
    ours, theirs = (each[1].state_dict()["masters"] for each in (straight, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Tied(nn.Module):
    """A model with one weight under two names, complex and empty buffers, and a view as a buffer."""

    column: torch.Tensor
    phase: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("column", torch.randn(4, 6)[:, 2])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)) + self.column.mean() + self.phase.real.mean()


def test_tied_weights_unusual_buffers_and_wrappers(tmp_path: Path) -> None:
    """Tied weights are one tensor in the file, and names have no prefix of a wrapper."""
    model, ids = Tied(), torch.arange(5)
    compiled: Any = torch.compile(model, backend="eager")
    wrapped = nn.DataParallel(compiled)
    step = torch.optim.Adam(wrapped.parameters())
    accumulate = Accumulator(wrapped, step, lambda ids: nn.functional.cross_entropy(model(ids), ids))
    accumulate(ids)
    path = save_checkpoint(tmp_path, accumulate)
    assert "_orig_mod" not in (path / "state.json").read_text()
    assert "module." not in (path / "state.json").read_text()
    other = Tied()
    second = Accumulator(other, torch.optim.Adam(other.parameters()), lambda batch: other(batch).mean())
    load_checkpoint(tmp_path, second)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert other.head.weight is other.embedding.weight
    weights = 5 * 3 * 4
    assert (path / "state.safetensors").stat().st_size < 3000 + 3 * weights, (
        "the model and two moments, once each"
    )


def test_whole_batches(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, WholeBatch]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, WholeBatch(model, sgd, lambda batch: model(batch).square().mean(), microbatch_size=3)

    data = torch.randn(4, 8, 4, dtype=torch.float64)
    straight, first, second = make(), make(), make()
    for batch in data:
        straight[1](batch)
    for batch in data[:2]:
        first[1](batch)
    save_checkpoint(tmp_path, first[1])
    load_checkpoint(tmp_path, second[1])
    for batch in data[2:]:
        second[1](batch)
    for name, value in straight[0].state_dict().items():
        assert torch.equal(second[0].state_dict()[name], value)


# Damaged checkpoints, foreign files, and checkpoints of another program.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint inside a window, so that no file is empty."""
    task, folder = Task("dropout"), tmp_path_factory.mktemp("saved")
    task.save = lambda file: save_checkpoint(folder, task.accumulate)  # type: ignore[method-assign,assignment]
    task.run(BATCHES[0])
    task.run(BATCHES[1], save_at=2)
    (path,) = folder.iterdir()
    return path


def refused(path: Path, text: str, *, task: Task | None = None) -> None:
    """Check that loading a checkpoint raises and changes nothing."""
    task = task or Task("dropout")
    before = task.fingerprint()
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint(path, task.accumulate)
    assert_unchanged(before, task.fingerprint())


FILES = ("checkpoint.json", "state.json", "state.safetensors", "rank-0.json", "rank-0.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_a_truncated_and_a_missing_file(name: str, saved: Path, tmp_path: Path) -> None:
    content = (saved / name).read_bytes()
    assert len(content) > 100, "premise"
    generator = random.Random(0)
    for number in range(12):
        path = tmp_path / str(number)
        shutil.copytree(saved, path)
        place = generator.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << generator.randrange(8))])
        (path / name).write_bytes(content[:place] + flipped + content[place + 1 :])
        refused(path, "damaged|version|was not written by|written by superbatch|cannot be read")
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path = tmp_path / f"cut to {length}"
        shutil.copytree(saved, path)
        (path / name).write_bytes(content[:length])
        refused(path, "truncated or damaged|is damaged")
    path = tmp_path / "000001-update-1"
    shutil.copytree(saved, path)
    (path / name).unlink()
    refused(path, "is missing|no checkpoint" if name != "checkpoint.json" else "no checkpoint")


def test_foreign_and_newer_checkpoints(saved: Path, tmp_path: Path) -> None:
    head = json.loads((saved / "checkpoint.json").read_text())
    for number, (change, text) in enumerate(
        [
            (
                {"version": 2},
                "has version 2 of the format, but this superbatch reads version 1. Install the superbatch",
            ),
            ({"format": "another"}, "was not written by save_checkpoint"),
            ({"updates": 7}, "its checksum has changed"),
        ]
    ):
        path = tmp_path / str(number)
        shutil.copytree(saved, path)
        (path / "checkpoint.json").write_text(json.dumps({**head, **change}))
        refused(path, text)
    file = tmp_path / "model.pt"
    torch.save({}, file)
    refused(file, "is a file. Pass the folder that you pass to save_checkpoint")
    refused(tmp_path / "000004-update-12", "does not exist. Pass the folder")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda task: setattr(task, "model", nn.Linear(4, 3)), "Only .* has '.*' of the model"),
        (
            lambda task: setattr(task, "optimizer", torch.optim.SGD(task.model.parameters(), lr=0.1)),
            "The checkpoint has the optimizer torch.optim",
        ),
        (lambda task: setattr(task, "scheduler", None), "1 schedulers, but the Accumulator has 0"),
        (lambda task: task.model.float(), "dtype torch.float64 in the checkpoint, but torch.float32"),
        (lambda task: task.model.append(nn.Linear(3, 3)), "Only this program has '"),
    ],
)
def test_a_checkpoint_of_another_program(change: Callable[[Any], object], text: str, saved: Path) -> None:
    task = Task("dropout")
    change(task)
    if not isinstance(task.optimizer, torch.optim.SGD):
        task.optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.05)
    scheduler = None
    if task.scheduler is not None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.7)
    task.accumulate = Accumulator(
        task.model, task.optimizer, microbatch_size=3, scheduler=scheduler, check=False
    )
    task.keep = [task.model, task.optimizer, task.accumulate]
    refused(saved, text, task=task)


def test_other_parameters_in_the_groups_of_the_optimizer(tmp_path: Path) -> None:
    """PyTorch would load the moments of one weight into another of the same shape."""

    def make(*, swapped: bool) -> Accumulator:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        parameters = list(model.parameters())
        step = torch.optim.Adam(parameters[2:] + parameters[:2] if swapped else parameters)
        return Accumulator(model, step, lambda batch: model(batch).mean())

    first = make(swapped=False)
    first(torch.randn(4, 3))
    save_checkpoint(tmp_path, first)
    with pytest.raises(
        CheckpointError, match=r"An optimizer has '0.0.weight' in the checkpoint, but '0.1.weight'"
    ):
        load_checkpoint(tmp_path, make(swapped=True))


def test_load_returns_none_without_checkpoints(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, Task("dropout").accumulate) is None
    assert load_checkpoint(tmp_path / "new", Task("dropout").accumulate) is None


# Folders.


def test_the_last_checkpoints_are_kept_in_order_of_writing(tmp_path: Path) -> None:
    """After loading an older checkpoint, the next one is still the newest."""
    task = Task("dropout")
    for _ in range(3):
        task.run(BATCHES[0])
        save_checkpoint(tmp_path, task.accumulate, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000002-update-2", "000003-update-3"]
    loaded = load_checkpoint(tmp_path / names[0], task.accumulate)
    assert loaded is not None
    assert loaded.updates == 2
    path = save_checkpoint(tmp_path, task.accumulate, keep=2)
    assert path.name == "000004-update-2"
    newest = load_checkpoint(tmp_path, task.accumulate)
    assert newest is not None
    assert newest.path == path


def test_folders_left_by_a_kill_are_ignored_and_then_deleted(tmp_path: Path) -> None:
    task = Task("dropout")
    for name in (".000009-update-9.writing", ".000001-update-1.deleting"):
        (tmp_path / name / "shards").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert load_checkpoint(tmp_path, task.accumulate) is None
    save_checkpoint(tmp_path, task.accumulate)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001-update-0", "notes"]


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            {"model": nn.Linear(1, 1)},
            "state.extra.model is a torch.nn.modules.linear.Linear, which cannot be",
        ),
        ({"a": [1, {2: object()}]}, "state.extra.a.1.2 is a builtins.object, which cannot be saved without"),
        (
            {"a": torch.eye(2).to_sparse()},
            "state.extra.a is a torch.sparse_coo tensor on the device cpu, which",
        ),
    ],
)
def test_values_that_need_pickle_are_named(extra: dict[str, Any], text: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Task("dropout").accumulate)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=text):
        save_checkpoint(tmp_path, Task("dropout").accumulate, extra=extra)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_deletes_no_checkpoint(tmp_path: Path) -> None:
    task = Task("dropout")
    path = save_checkpoint(tmp_path, task.accumulate)
    before, limits = sorted(tmp_path.rglob("*")), resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(each.stat().st_size for each in path.iterdir())
    for limit in (0, 100, largest - 1):  # maximum size of a file in bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                save_checkpoint(tmp_path, task.accumulate, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(tmp_path.rglob("*")) == before
    assert load_checkpoint(tmp_path, Task("dropout").accumulate) is not None


def test_wrong_arguments(tmp_path: Path) -> None:
    accumulate = Task("dropout").accumulate
    wrong: Any = nn.Linear(1, 1)
    for call in (lambda: save_checkpoint(tmp_path, wrong), lambda: load_checkpoint(tmp_path, wrong)):
        with pytest.raises(InputError, match=r"accumulate is a Linear. Pass the Accumulator or the Whole"):
            call()
    with pytest.raises(InputError, match=r"keep=0 is not .*\. Pass how many checkpoints to keep, 1 or more"):
        save_checkpoint(tmp_path, accumulate, keep=0)
    with pytest.raises(InputError, match=r"samples=-1 is not .*\. Pass the number of samples"):
        save_checkpoint(tmp_path, accumulate, samples=-1)
    assert list(tmp_path.iterdir()) == []


def test_saving_between_forward_and_backward_raises(tmp_path: Path) -> None:
    accumulate = Task("dropout").accumulate
    with accumulate.window(BATCHES[0]) as window:
        for _ in window:
            with pytest.raises(WindowError, match="between the forward and the backward of micro-batch 0"):
                save_checkpoint(tmp_path, accumulate)
            break
    assert list(tmp_path.iterdir()) == []


# The codec.

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.integers() | st.text() | st.tuples(st.integers()) | st.booleans(), inner, max_size=3
        )
        | st.sets(st.integers(), max_size=1)  # repr of a larger set depends on its order
    ),
    max_leaves=10,
)


@given(plain)
@settings(max_examples=200, deadline=None)
def test_plain_containers_round_trip(value: Any) -> None:
    written = json.dumps(Encoder().encode(value, "value"), allow_nan=False)
    back = decode(json.loads(written), {})
    assert repr(back) == repr(value)  # NaN, -0.0, 1 and True too


def test_arrays_dtypes_devices_and_sizes_round_trip() -> None:
    value = {
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3)[:, 1],
        "scalar": np.float64(0.1),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
    }
    encoder = Encoder()
    back = decode(json.loads(json.dumps(encoder.encode(value, "value"))), encoder.tensors)
    assert back["array"].tolist() == [1, 4]
    assert back["array"].dtype == np.uint32
    assert {k: v for k, v in back.items() if k != "array"} == {k: v for k, v in value.items() if k != "array"}
