"""The benchmark of the integrations runs and measures each accumulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")

pytestmark = pytest.mark.integrations
ROOT = Path(__file__).parents[2]


def test_it_measures_each_accumulation(tmp_path: Path) -> None:
    program, file = str(ROOT / "benchmarks" / "integrations.py"), tmp_path / "times.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, program, "--hosts", "hf", "--trainings", "classes,coupled", "--rounds", "1"]

    done = subprocess.run(
        [*command, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == 2 * ["its own", "its own, again", "superbatch"]
    assert all(row["milliseconds"] > 0 and row["ratio"] > 0 for row in rows)
