"""`superbatch train`: the updates of the large batch, also after a stop, a kill or a change of ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.lab.recipes import load_recipe
from superbatch.lab.studies.train import batches_from
from tests.cli.commands import PLANE, ROOT, process, run
from tests.studies.own_recipe import plane

load_file = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed (extra: checkpoint)"
).load_file

HOW = (
    *("--optimizer", "adam", "--learning-rate", "0.02", "--precision", "float64", "--clip", "2"),
    *("--schedule", "cosine", "--microbatch-size", "3", "--batch-size", "14", "--seed", "5"),
)
UPDATES = 24

KILLED = """
import os, signal
from pathlib import Path
from tests.studies import own_recipe

def recipe():
    whole, calls, mark = own_recipe.plane(), [], Path(__file__).with_name("killed")
    def batch(indices):
        calls.append(1)
        if os.environ.get("RANK") == "1" and len(calls) == 14 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole.batch(indices)
    return own_recipe.plane(batch=batch)
"""


def by_hand() -> dict[str, Tensor]:
    """Return the parameters after the updates of the large batch, in plain PyTorch."""
    recipe = plane()
    model = recipe.model(5).double()
    loss_fn, batches = recipe.loss_fn(model), batches_from(240, 5, 0, 14)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    clipped = 0
    for _ in range(UPDATES):
        batch = {name: leaf.double() for name, leaf in recipe.batch(next(batches)).items()}
        loss_fn(batch).backward()
        clipped += int(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0) > 2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert clipped > 0, "premise"
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def parameters_of(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a folder's last checkpoint."""
    from superbatch.torch import Accumulator
    from superbatch.torch.checkpoint import load_checkpoint

    model = plane().model(0).double()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    found = load_checkpoint(folder, Accumulator(model, optimizer, scheduler=scheduler, sync=None))
    assert found is not None
    assert (found.updates, found.samples) == (UPDATES, 14 * UPDATES)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a parameter."""
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a log, without times."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_train_gives_the_parameters_of_the_large_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "run", tmp_path / "log.jsonl"
    files = ("--checkpoints", str(out), "--log-file", str(log), "--evaluate-every", "8", "--every", "5")
    assert run("train", PLANE, *HOW, *files, "--updates", str(UPDATES), "--noise") == 0
    shown = capsys.readouterr().out
    assert re.match(rf"{UPDATES} updates, last loss [\d.]+, squared error [\d.]+\nnoise scale ", shown), shown
    assert distance(parameters_of(out), by_hand()) < 1e-12
    found = rows(log)
    assert [row["update"] for row in found] == list(range(1, UPDATES + 1))
    assert [row["update"] for row in found if "metric" in row] == [8, 16, 24]
    assert found[-1]["loss"] < 0.7 * found[0]["loss"], "premise: it trains"
    assert found[-1]["learning_rate"] < 0.001
    assert (
        run("train", PLANE, *HOW, "--checkpoints", str(out), "--seed", "6", "--updates", "30", "--noise") == 2
    )
    assert "was written with seed 5, and here it is 6. Pass the same" in capsys.readouterr().err


def test_batches_depend_on_the_seed_and_repeat_no_sample() -> None:
    assert not torch.equal(next(batches_from(240, 5, 0, 14)), next(batches_from(240, 6, 0, 14)))
    batches = batches_from(240, 5, 0, 14)
    every = [index for _ in range(17) for index in next(batches).tolist()]
    assert every != sorted(every)
    assert len(set(every)) == 238


def test_a_signal_saves_and_the_same_command_resumes_bit_for_bit(tmp_path: Path) -> None:
    def command(name: str) -> tuple[str, ...]:
        files = ("--checkpoints", str(tmp_path / name), "--log-file", str(tmp_path / f"{name}.jsonl"))
        return ("train", PLANE, *HOW, *files, "--updates", "4000", "--every", "100000")

    assert run(*command("straight")) == 0
    with process(*command("stopped")) as started:
        log, end = tmp_path / "stopped.jsonl", time.monotonic() + 60
        while not (log.exists() and log.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait() == 143, started.output()
        assert "; the same command resumes" in started.output()[1]
    done = len(rows(log))
    assert 0 < done < 4000, "premise"
    with log.open("a") as file:
        file.write(f'{{"update": {done + 1}}}\n{{"upd')  # as a kill after the checkpoint leaves it
    assert run(*command("stopped")) == 0
    assert rows(log) == rows(tmp_path / "straight.jsonl")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--precision", "half"), "precision='half' is not supported. Use one of float32, float64, bf16."),
        (("--schedule", "step"), "schedule='step' is not supported. Use one of constant, linear, cosine."),
        (
            ("--optimizer", "momentum"),
            "optimizer='momentum': the recipe 'plane' does not offer it. Use one of sgd, adam.",
        ),
        (
            ("--microbatch-size", "big"),
            "--microbatch-size='big' is not a size. Give a number, auto or largest.",
        ),
        (("--batch-size", "241"), "--batch-size=241 is out of range. Give 1 to 240."),
        (("--batch-size", "0"), "--batch-size=0 is out of range. Give 1 to 240."),
        (("--every", "0"), "every=0 is not a positive integer. Give 1 or more."),
        (("--seed", "-1"), "seed=-1 is out of range."),
        (("--device", "tpu"), "--device='tpu' is not supported. Use one of cpu, cuda."),
    ],
)
def test_wrong_options_give_one_line(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", PLANE, *arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_tensorboard_that_is_not_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", PLANE, "--tensorboard", str(tmp_path)) == 2
    assert "needs the package tensorboard, which is not installed. Use pip" in capsys.readouterr().err


def test_coupled_samples_and_bf16() -> None:
    assert run("train", "digits-bn", "--updates", "2", "--batch-size", "20", "--microbatch-size", "8") == 0
    assert run("train", PLANE, "--updates", "3", "--precision", "bf16") == 0
    assert run("train", "digits-bn", "--noise") == 2


FROZEN = """
import torch
from torch import nn
from tests.studies import own_recipe

def recipe():
    def model(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    def loss_fn(model):
        return lambda batch: (model(batch["x"])[:, 0] - batch["y"]).square().mean().sqrt()
    return own_recipe.plane(model=model, loss_fn=loss_fn, coupled="exact", batchnorm="frozen")
"""


def test_frozen_batchnorm_with_coupled_samples(tmp_path: Path) -> None:
    own, log = tmp_path / "own.py", tmp_path / "log.jsonl"
    own.write_text(FROZEN, encoding="utf-8")
    how = ("--optimizer", "sgd", "--learning-rate", "0.05", "--precision", "float64", "--batch-size", "14")
    more = ("--microbatch-size", "3", "--updates", "6", "--every", "1", "--log-file", str(log))
    assert run("train", f"{own}:recipe", *how, *more) == 0
    expected = {}
    for frozen in (True, False):
        recipe = load_recipe(f"{own}:recipe")
        model = recipe.model(0).double()
        if frozen:
            model.get_submodule("1").eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loss_fn, batches = recipe.loss_fn(model), batches_from(240, 0, 0, 14)
        expected[frozen] = []
        for _ in range(6):
            loss = loss_fn({name: leaf.double() for name, leaf in recipe.batch(next(batches)).items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected[frozen].append(loss.item())
    assert [row["loss"] for row in rows(log)] == pytest.approx(expected[True], rel=1e-12)
    assert expected[True] != pytest.approx(expected[False], rel=1e-2), "premise: freezing matters"


def torchrun(
    recipe: str, ranks: int, folder: Path, updates: int, restarts: int = 0, how: tuple[str, ...] = HOW
) -> str:
    """Train on some ranks; return the output."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    files = ("--checkpoints", str(folder / "run"), "--every", "5", "--updates", str(UPDATES))
    stop = ("--log-file", str(folder / "log.jsonl"))
    done = subprocess.run(
        [
            *(sys.executable, *launch, "--max-restarts", str(restarts), "-m", "superbatch"),
            *("train", recipe, *how, *files, *stop),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(folder / "log.jsonl")) == updates
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_rank_is_killed_and_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    """One and three ranks also resume from that checkpoint; all reach the parameters of the large batch."""
    recipe = tmp_path / "own.py"
    recipe.write_text(KILLED, encoding="utf-8")
    said = torchrun(f"{recipe}:recipe", 2, tmp_path, UPDATES, restarts=1)
    assert (tmp_path / "killed").exists(), "premise"
    assert "resumed from " in said
    assert "-update-10" in said
    expected = by_hand()
    assert distance(parameters_of(tmp_path / "run"), expected) < 1e-12
    saved = sorted((tmp_path / "run").iterdir())
    for ranks in (1, 3):
        other = tmp_path / str(ranks)
        (other / "run").mkdir(parents=True)
        (saved[0]).rename(other / "run" / saved[0].name)
        (other / "log.jsonl").write_text((tmp_path / "log.jsonl").read_text())
        torchrun(PLANE, ranks, other, UPDATES)
        assert distance(parameters_of(other / "run"), expected) < 1e-12
        saved = saved[1:]


DROPS = """
import torch
from torch import nn
from tests.studies import own_recipe

def recipe():
    def model(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    return own_recipe.plane(model=model)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "extra"), [("drops", "--sample-rng"), ("digits-bn", "")])
def test_random_numbers_and_coupled_samples_do_not_depend_on_ranks(
    recipe: str, extra: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(DROPS, encoding="utf-8")
    named = f"{own}:recipe" if recipe == "drops" else recipe
    how = ("--precision", "float64", "--batch-size", "26", "--microbatch-size", "5")
    final: dict[str, dict[str, Tensor]] = {}
    cells = (("1", 1, extra), ("2", 2, extra), ("3", 3, extra), ("mutant", 2, "--seed=1"))
    for name, ranks, option in cells:
        folder = tmp_path / name
        folder.mkdir()
        torchrun(named, ranks, folder, UPDATES, how=(*how, *([option] if option else [])))
        files = sorted((sorted((folder / "run").iterdir())[-1]).rglob("*.safetensors"))
        tensors = {k: v for file in files for k, v in load_file(file).items()}
        final[name] = {k: v for k, v in tensors.items() if ".models." in k and v.is_floating_point()}
    assert final["1"], "premise"
    for name in ("2", "3"):
        assert distance(final[name], final["1"]) < 1e-12
    assert distance(final["mutant"], final["1"]) > 1e-3


ENDS = """
import torch, torch.distributed as dist
from pathlib import Path
from superbatch.lab.recipes import load_recipe
from superbatch.lab.studies import train

def threads():
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)

counts = []
end = dist.destroy_process_group
def ending():
    counts.append(threads())
    end()
dist.destroy_process_group = ending  # a spy
train.train(load_recipe("digits"), train.Options(updates=2, batch_size=20, microbatch_size=5))
print(counts[0], threads())
"""


HELD = """
begin, held = dist.init_process_group, []
def beginning(name, **how):
    begin(name, **how)
    held.append(dist.group.WORLD)
dist.init_process_group = beginning
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are read from /proc")
@pytest.mark.parametrize("mutant", [False, True])
def test_threads_of_gloo_end_with_the_training(mutant: bool) -> None:
    """A thread left at exit may abort the process, and the finished training would be restarted."""
    program = ENDS.replace("counts = []", "counts = []\n" + HELD) if mutant else ENDS
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **one, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 0, "premise"
    assert (after > 0) == mutant
