"""The benchmark of checkpoints runs as a program; checkpoint files are as small as those of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import run

pytestmark = pytest.mark.benchmarks


def test_every_way_has_a_row_and_superbatch_is_exact_and_small(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed (extra: checkpoint)")
    file = tmp_path / "checkpoints.json"
    result = run("checkpoints.py", "--width", "128", "--rounds", "2", "--json", str(file))
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert found["exact"]
    names = ["torch.save", "torch.save, flushed", "distributed.checkpoint", "superbatch"]
    assert list(found["rows"]) == names
    assert found["rows"]["superbatch"]["size"] <= found["rows"]["torch.save"]["size"] + 0.05, "MiB"
