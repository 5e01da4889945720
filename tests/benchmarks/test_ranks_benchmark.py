"""The benchmark of ranks runs as a program, and meets its bounds other than times."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import run

pytestmark = pytest.mark.benchmarks


def test_no_hand_written_loop_has_fewer_collectives(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    arguments = ("--small", "--ranks", "2,3", "--rounds", "2", "--peers", "none")
    result = run("ranks.py", *arguments, "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = {(row["name"], row["ranks"]): row for row in json.loads(path.read_text())}
    ours = [row for row in rows.values() if row["name"].startswith("superbatch")]
    assert len(ours) == 2 * 5
    for row in ours:
        by_hand = rows[row["against"], row["ranks"]]
        assert row["distance"] <= 1e-5, "in float32"
        assert row["collectives"] <= by_hand["collectives"]
        assert row["sent"] <= by_hand["sent"] + 2048, "numbers"
        # Ranks vote before the step. If forwards are collective, they also agree on the number of
        # micro-batches and report failures.
        assert row["numbers"] <= by_hand["numbers"] + 1 + 2 * ("FSDP2" in row["name"])
        assert row["peak"] <= by_hand["peak"] + 1024, "numbers"
    for name in {row["name"] for row in ours}:
        kinds = [Counter(each["kind"] for each in rows[name, ranks]["exchanges"]) for ranks in (2, 3)]
        assert kinds[0] == kinds[1], "two and three ranks have the same collectives"
    assert "64 GPUs of 8 machines" in result.stdout


def test_the_vote_is_one_small_collective(tmp_path: Path) -> None:
    path = tmp_path / "vote.json"
    result = run("ranks_vote.py", "--small", "--rounds", "4", "--json", str(path))
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert {row["name"]: row["numbers"] for row in found["rows"]} == {
        "by hand": 2,
        "by hand, again": 2,
        "superbatch": 3,
    }
    assert found["distance"] < 1e-4, "in float32: the same update"
    assert found["milliseconds of a frame"] > 0
    assert "The vote takes" in result.stdout
