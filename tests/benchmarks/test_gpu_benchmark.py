"""The dry run of benchmarks/gpu.py: every section on the CPU, at tiny sizes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests import forked

pytestmark = pytest.mark.benchmarks


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["benchmarks/gpu.py", *arguments], seconds=300)


def test_every_section_runs(tmp_path: Path) -> None:
    file, plots = tmp_path / "gpu.json", tmp_path / "plots"
    done = gpu("--device", "cpu", "--small", "--seconds", "8", "--json", str(file), "--plots", str(plots))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    assert results["torch"] == torch.__version__
    tables = [rows for section in ("windows", "whole", "launch") for rows in results[section].values()]
    assert len(tables) == 6 + 3 + 2
    errors = [row["error"] for rows in tables for row in rows if row["error"]]
    assert not errors, errors
    assert all(row["rounds"] >= 1 and row["seconds"] > 0 for rows in tables for row in rows)
    assert results["fit"]["largest"]["size"] == results["fit"]["true limit"] == 8
    assert {path.name for path in plots.iterdir()} == {"gpu-windows.png", "gpu-whole.png", "gpu-launch.png"}


def test_an_unknown_section_is_refused() -> None:
    done = gpu("--device", "cpu", "--sections", "windows,fits")
    assert done.returncode == 2
    assert "--sections fits is unknown. Pass some of" in done.stderr


def test_without_a_gpu_the_program_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    done = gpu()
    assert done.returncode == 2
    assert "No CUDA device is available. For a dry run, pass --device cpu --small." in done.stderr
