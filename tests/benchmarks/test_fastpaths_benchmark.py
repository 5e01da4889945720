"""The benchmark of fast paths runs, executes each measured path, and refuses unknown names."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest

from superbatch.torch import fastpaths
from tests import forked

pytestmark = pytest.mark.benchmarks


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["benchmarks/fastpaths.py", *arguments], seconds=300)


def test_every_path_is_executed_and_measured(tmp_path: Path) -> None:
    path = tmp_path / "gains.json"
    result = run("--dry", "--work", "mlp", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = {row["path"]: row for row in json.loads(path.read_text())}
    expected = {"nothing", *fastpaths.PLAIN}
    if platform.libc_ver()[0] != "glibc":
        expected -= {"keep_freed_memory"}
    assert set(rows) == expected
    assert rows["backward"]["calls"] == 8, "one for each micro-batch"
    for name in ("divide", "multiply", "norms", "numpy_memory"):
        assert rows[name]["calls"] >= 1, name
    assert rows["copy"]["calls"] == 0, "on the CPU buffers are cloned"
    assert rows["add"]["calls"] == 0, "gradients are summed in .grad"
    assert all(row["milliseconds"] > 0 and row["low"] <= row["gain"] <= row["high"] for row in rows.values())


def test_an_unknown_path_is_refused_with_the_known_ones() -> None:
    result = run("--only", "backwards")
    assert result.returncode == 2
    assert "--only backwards is unknown. Pass some of nothing, backward, numpy_memory" in result.stderr
