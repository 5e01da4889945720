"""The benchmark of surveys runs as a program and reports its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import run

pytestmark = pytest.mark.benchmarks


def test_the_benchmark_of_surveys(tmp_path: Path) -> None:
    path = tmp_path / "survey.json"
    result = run("survey.py", "--work", "mlp", "--updates", "12", "--rounds", "3", "--json", str(path))
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(path.read_text())
    assert (row["work"], row["updates"], row["rounds"]) == ("mlp", 12, 3)
    assert 0.3 < row["ratio"] < 3, "not a bound: three rounds on a busy machine"
    assert "mlp, 12 updates" in result.stdout
