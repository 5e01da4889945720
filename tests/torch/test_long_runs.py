"""20,000 windows in every main mode: memory, objects, descriptors, threads and time per window stay flat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import run
from tests.torch.long_runs import MODES

LONG, SHORT = 20_000, 500
GROWTH = {"bytes": 3 << 20, "objects": 200, "descriptors": 0, "threads": 0}  # after the first measurement


def check(mode: str, windows: int, folder: Path) -> None:
    file = folder / "grown.json"
    ended = run(["-m", "tests.torch.long_runs", mode, windows, file], seconds=900)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(file.read_text())
    for name, most in GROWTH.items():
        first, *_, last = found[name][1:]
        assert last - first <= most, (name, found[name])
    first, *_, last = found["seconds"][1:]
    assert windows < LONG or last <= 1.25 * first, found["seconds"]  # CPU time, medians of 4,000 windows


@pytest.mark.parametrize("mode", MODES)
def test_some_windows(mode: str, tmp_path: Path) -> None:
    check(mode, SHORT, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_twenty_thousand_windows(mode: str, tmp_path: Path) -> None:
    check(mode, LONG, tmp_path)


def test_a_leak_is_found(tmp_path: Path) -> None:
    """The mutant keeps tensors and an open file of every window."""
    program = f"""
import json, sys
from pathlib import Path
from tests.torch import long_runs
kept, make = [], long_runs.training
def leaking(mode):
    update = make(mode)
    def one(batch):
        kept.append((batch.clone(), update(batch), [batch], open("/dev/null")))
    return one
long_runs.training = leaking
Path(sys.argv[1]).write_text(json.dumps(long_runs.main("plain", {SHORT})))
"""
    file = tmp_path / "grown.json"
    ended = run(["-c", program, file])
    assert ended.returncode == 0, ended.stderr
    found = json.loads(file.read_text())
    for name in ("objects", "descriptors"):
        first, *_, last = found[name][1:]
        assert last - first > GROWTH[name], (name, found[name])
