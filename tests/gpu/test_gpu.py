"""Run the checks of tests/gpu under pytest: on a GPU if there is one, and as a dry run on the CPU."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.gpu import __main__ as runner
from tests.gpu.check import Check, Run, Skip
from tests.gpu.checks import CHECKS

IN_PROCESSES = {"expandable_segments", "ordinary_tests", "compiled", "compiled_virtual"}


def run(check: Check, device: torch.device, *, small: bool) -> dict[str, object]:
    try:
        return check.function(Run(device, small))
    except Skip as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_the_gpu(check: Check) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert run(check, torch.device("cuda", torch.cuda.current_device()), small=False)


@pytest.mark.filterwarnings("ignore:.*(kernel not used|dropout|attention):UserWarning")
@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c.name not in IN_PROCESSES], ids=lambda check: check.name
)
def test_dry_run(check: Check) -> None:
    """Run all lines that need no GPU, so that simple mistakes show before the first run on a GPU."""
    assert run(check, torch.device("cpu"), small=True)


def supervised(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["-m", "tests.gpu", "--device", "cpu", "--small", *arguments])


def test_the_runner_writes_each_result(tmp_path: Path) -> None:
    done = supervised("versions", "same_masks", "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(r["check"], r["outcome"]) for r in results] == [("versions", "passed"), ("same_masks", "passed")]
    assert results[0]["figures"]["torch"] == torch.__version__


def test_the_runner_stops_in_time(tmp_path: Path) -> None:
    done = supervised("versions", "same_masks", "--seconds", "0", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert {r["outcome"] for r in results} == {"not run"}, done.stdout


def test_the_runner_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    done = forked.run(["-m", "tests.gpu"])
    assert done.returncode == 2
    assert "no CUDA device is available" in done.stderr


SCRIPT = """
import sys, time
first = sys.argv[sys.argv.index("--here") + 1]
def result(name, **more):
    print('RESULT {"check": "' + name + '", "outcome": "' + more.pop("outcome", "passed") + '", "seconds": 1'
          + "".join(f', "{k}": "{v}"' for k, v in more.items()) + "}", flush=True)
if first == "versions":
    result("versions")
    result("plain_window", outcome="failed", reason="CUDA error: an illegal memory access")
elif first == "virtual_batchnorm":
    print("Segmentation fault", flush=True)
    sys.exit(139)
elif first == "attention_backends":
    time.sleep(60)
else:
    result(first)
"""


def test_the_runner_survives_broken_contexts_crashes_and_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(SCRIPT)
    names = ["versions", "plain_window", "virtual_batchnorm", "attention_backends", "layers"]
    monkeypatch.setattr(runner, "START_UP", 1.0)
    monkeypatch.setattr(runner, "WORKER", (str(worker),))
    limits = dict.fromkeys(names, 1.0)
    results: list[dict[str, str]] = []
    while len(results) < len(names):
        results += runner.collect(names[len(results) :], [], limits, time.monotonic() + 60)
    assert [result["outcome"] for result in results] == ["passed", "failed", "failed", "failed", "passed"]
    assert "illegal memory access" in results[1]["reason"]
    assert "139" in results[2]["reason"] and "Segmentation fault" in results[2]["reason"]
    assert "stopped after" in results[3]["reason"]
