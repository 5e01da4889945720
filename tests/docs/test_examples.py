"""Programs of examples/ at a small size: their output, and stopping and resuming a training."""

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

from tests import forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ["--updates", "2", "--batch", "6", "--width", "16", "--microbatch", "3"]
UPDATES = 40
LONGER = [*SMALL, "--updates", str(UPDATES), "--every", "1000"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
NUMBER = r"(\d+\.?\d*(?:e[+-]\d+)?)"
DISTANCES = {
    "resnet_batchnorm.py": (["--updates", "2"], "plain accumulation, 2", "superbatch, 2"),
    "contrastive.py": (["--updates", "2"], "plain accumulation, 8", "superbatch, 8"),
    "moe_balance.py": (["--updates", "3"], "plain accumulation, 32", "superbatch, 32"),
}

# A newer release of a host library must not fail a test by itself.
NEW_HOST = "ignore:superbatch.integrations was tested with:UserWarning"


def run(name: str, *arguments: str, folder: Path) -> str:
    command = ["-W", "error", "-W", NEW_HOST, EXAMPLES / name, *arguments]
    done = forked.run(command, environment=ENVIRONMENT, folder=folder, seconds=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_number(printed: str, row: str) -> float:
    found = re.search(rf"{re.escape(row)}\D*? +{NUMBER}", printed)
    assert found, f"no row {row!r} in\n{printed}"
    return float(found[1])


@pytest.mark.parametrize("name", DISTANCES)
def test_an_example_shows_its_point(name: str, tmp_path: Path) -> None:
    arguments, wrong, right = DISTANCES[name]
    printed = run(name, *arguments, folder=tmp_path)
    assert first_number(printed, wrong) > 0.05
    assert first_number(printed, right) < 1e-12


@pytest.mark.slow
def test_the_training_program_trains_the_same_under_torchrun(tmp_path: Path) -> None:
    alone = run("train.py", *SMALL, folder=tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
            *(str(EXAMPLES / "train.py"), *SMALL, "--out", "ranks"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "3 ranks" in done.stdout
    updates = re.compile(r"update +\d+  loss [\d.]+  gradient [\d.]+  \d+ tokens")
    assert updates.findall(alone)
    assert updates.findall(done.stdout) == updates.findall(alone)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_training_program_is_stopped_and_resumes_bit_for_bit(
    number: int, code: int, straight: Path, tmp_path: Path
) -> None:
    command = ["-W", "error", EXAMPLES / "train.py", *LONGER]
    with forked.Forked(command, environment=ENVIRONMENT, folder=tmp_path, session=True) as program:
        end = time.monotonic() + 60
        while "update    1" not in program.output()[0] and program.poll() is None:
            assert time.monotonic() < end, program.output()
            time.sleep(0.01)
        os.kill(program.pid, number)
        assert program.wait() == code, program.output()
    (saved,) = (path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert 0 < int(saved.rsplit("-", 1)[1]) < UPDATES, "premise: it was stopped during training"
    again = run("train.py", *LONGER, folder=tmp_path)
    assert again.startswith(f"resumes out/{saved}: ")
    assert "noise scale " in again
    assert rows(tmp_path) == rows(straight)
    expected = end_of(straight)
    for name, value in end_of(tmp_path).items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted training."""
    pytest.importorskip("safetensors", reason="safetensors is not installed (extra: checkpoint)")
    folder = tmp_path_factory.mktemp("straight")
    printed = run("train.py", *LONGER, folder=folder)
    assert re.search(rf"update +{UPDATES} .* 0 s left  held out [\d.]+ bits per byte", printed), printed
    found = rows(folder)
    assert [row["update"] for row in found] == list(range(1, UPDATES + 1))
    assert found[-1]["loss"] < found[0]["loss"] - 0.1, "premise: it trains"
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the log without evaluations: a stop adds one."""
    lines = (folder / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "held_out"} for line in lines]


def end_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's last checkpoint."""
    from safetensors.torch import load_file

    last = max(path for path in (folder / "out").iterdir() if path.is_dir())
    assert last.name.endswith(f"-update-{UPDATES}")
    return load_file(last / "state.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
)
def test_the_training_program_finds_its_microbatch_on_one_device_and_on_ranks(
    launch: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, *launch, EXAMPLES / "train.py", "--updates", "2", "--batch", "6", "--width", "16"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "update    2" in done.stdout


@pytest.mark.integrations
def test_the_example_in_the_trainer_shows_its_point(tmp_path: Path) -> None:
    needs("transformers")
    printed = run_host("hf_trainer.py", folder=tmp_path)
    factors = {row.split(",")[0]: float(row.rsplit(":", 1)[1]) for row in printed.splitlines()}
    assert factors["Trainer"] == pytest.approx(4, abs=0.1)
    assert factors["ExactTrainer"] == 1


@pytest.mark.integrations
def test_the_example_in_lightning_shows_its_point(tmp_path: Path) -> None:
    needs("lightning")
    printed = run_host("lightning_module.py", folder=tmp_path)
    assert first_number(printed, "Lightning, 4 x 4") > 0.05
    assert first_number(printed, "ExactModel, 4 x 4") < 1e-12


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def run_host(name: str, *, folder: Path) -> str:
    """Run an example for another library's training loop in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests" / "docs").glob("test_*.py"))
    files = sorted(file.name for file in EXAMPLES.glob("*.py"))
    assert len(files) >= 7
    assert not [name for name in files if f'"{name}"' not in tests]
    assert len((EXAMPLES / "train.py").read_text(encoding="utf-8").splitlines()) < 200
