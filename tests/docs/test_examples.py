"""The programs of examples/ in small: each prints how far the usual loop is off, and superbatch is not."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ["--updates", "2", "--batch", "6", "--width", "16", "--microbatch", "3"]
NUMBER = r"(\d+\.?\d*(?:e[+-]\d+)?)"
DISTANCES = {
    "resnet_batchnorm.py": (["--updates", "2"], "plain accumulation, 2", "superbatch, 2"),
    "contrastive.py": (["--updates", "2"], "plain accumulation, 8", "superbatch, 8"),
    "moe_balance.py": (["--updates", "3"], "plain accumulation, 32", "superbatch, 32"),
}

# A release of a host is no failure by itself.
NEW_HOST = "ignore:superbatch.integrations was tested with:UserWarning"


def run(name: str, *arguments: str, folder: Path) -> str:
    command = ["-W", "error", "-W", NEW_HOST, EXAMPLES / name, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = forked.run(command, environment=environment, folder=folder, seconds=300)
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
            *(str(EXAMPLES / "train.py"), *SMALL),
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


def test_the_training_program_trains_and_resumes(tmp_path: Path) -> None:
    printed = run("train.py", *SMALL, folder=tmp_path)
    found = re.search(rf"tutorial loop {NUMBER}, superbatch {NUMBER}", printed)
    assert found, printed
    assert float(found[1]) > 0.05
    assert float(found[2]) < 1e-12
    assert "update    1" in printed
    again = run("train.py", *SMALL, "--updates", "3", "--resume", "out/checkpoint.pt", folder=tmp_path)
    assert "update    2" in again
    assert "update    1" not in again


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
    assert "update    1" in done.stdout


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
    """Run an example inside another library's loop, in a fresh interpreter."""
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
