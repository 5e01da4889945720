"""A training killed at random moments loses only the work after its last checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from superbatch.torch.checkpoint import load_checkpoint
from tests.forked import Forked, run
from tests.torch.killed_training import SAMPLES, Training

pytest.importorskip("safetensors", reason="safetensors is not installed (extra: checkpoint)")

PROGRAM = ("-m", "tests.torch.killed_training")


def last_reported(program: Forked) -> int:
    """Return the last update whose checkpoint the program has reported."""
    lines = program.output()[0].split("\n")[:-1]
    return int(lines[-1]) if lines else 0


def wait_for(program: Forked, updates: int) -> None:
    """Wait until a program has reported an update."""
    end = time.monotonic() + 60
    while last_reported(program) < updates and program.poll() is None and time.monotonic() < end:
        time.sleep(0.002)


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(kills: int, tmp_path: Path) -> None:
    generator, folder, file = random.Random(kills), tmp_path / "run", tmp_path / "end.pt"
    reached, left_behind, last = 0, 0, kills * 12
    for _ in range(kills):
        with Forked([*PROGRAM, folder, last, file]) as program:
            wait_for(program, reached + 1)
            time.sleep(generator.uniform(0.0, 0.08))
            os.kill(program.pid, signal.SIGKILL)
            program.wait()
            reported = max(last_reported(program), reached)
        left_behind += any(path.name.startswith(".") for path in folder.iterdir())
        found = load_checkpoint(folder, Training().accumulate)
        assert found is not None, "a checkpoint was lost"
        assert reported <= found.updates <= reported + 1
        assert found.samples == SAMPLES * found.updates
        reached = found.updates
    assert left_behind >= kills // 10, "premise: some kills interrupted a write"
    assert reached < last, "premise: no run finished"
    assert run([*PROGRAM, folder, reached + 3, file]).returncode == 0
    straight = tmp_path / "straight.pt"
    assert run([*PROGRAM, tmp_path / "straight", reached + 3, straight]).returncode == 0
    expected = torch.load(straight, weights_only=True)
    for name, value in torch.load(file, weights_only=True).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_update_saves_and_exits(number: int, code: int, tmp_path: Path) -> None:
    file = tmp_path / "end.pt"
    with Forked([*PROGRAM, tmp_path / "run", 10_000, file]) as program:
        wait_for(program, 3)
        os.kill(program.pid, number)
        assert program.wait() == code
        reported = last_reported(program)
    found = load_checkpoint(tmp_path / "run", Training().accumulate)
    assert found is not None
    assert found.updates == reported < 10_000
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


def test_a_later_signal_has_its_default_effect(tmp_path: Path) -> None:
    """During a long update, a user may press Ctrl-C again."""
    program = """
import os, signal, sys, time
from superbatch.torch.checkpoint import StopSignals
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # by torchrun, beside that of the terminal
    print(stop.exit_code, flush=True)
    time.sleep(1.1)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = run(["-c", program])
    assert ended.stdout.split() == ["130", "interrupted"]
    assert ended.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
