"""Two machines train under torchrun. One is lost; the other continues with the same effective batch.

Two agents on this machine, each with one rank, stand for the machines. Killing an agent and its rank
simulates a power failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forked import ROOT

UPDATES, EVERY, PATIENCE = 60, 5, 240.0  # the last in seconds
TRAINING = (
    *(str(ROOT / "examples" / "train.py"), "--updates", str(UPDATES), "--batch", "12"),
    *("--microbatch", "4", "--width", "32", "--every", str(EVERY)),
)
# Detect a lost agent in seconds; the default of torchrun is half a minute.
FAST = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,timeout=120"


def agent(folder: Path, port: int, said: Path) -> subprocess.Popen[bytes]:
    """Start an agent with one rank, for a training on one or two agents."""
    launch = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "elastic")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", FAST)
    with said.open("wb") as file:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *launch,
                *rendezvous,
                "--local-addr",
                "127.0.0.1",
                *TRAINING,
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def children(pid: int) -> list[int]:
    """Return the child processes of a process and their children."""
    own = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*own, *(inner for each in own for inner in children(each))]


def end(program: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its rank if they still run."""
    if program.poll() is None:
        ranks = children(program.pid)
        for pid in (program.pid, *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.wait()


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the logged row of each update."""
    log = folder / "out" / "log.jsonl"
    return [json.loads(row) for row in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the ranks of an agent are found in /proc")
def test_a_machine_is_lost_and_the_other_one_continues(tmp_path: Path) -> None:
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    whole.mkdir()
    elastic.mkdir()
    subprocess.run([sys.executable, *TRAINING], cwd=whole, env=_environment(), check=True, timeout=PATIENCE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deadline = time.monotonic() + PATIENCE
    with ExitStack() as stack:
        first = agent(elastic, port, tmp_path / "first.txt")  # it hosts the rendezvous, so it must survive
        stack.callback(end, first)
        time.sleep(1.0)
        second = agent(elastic, port, tmp_path / "second.txt")
        stack.callback(end, second)
        while len(rows(elastic)) < 2 * EVERY + 2:
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "first.txt").read_text()
            time.sleep(0.05)
        done = len(rows(elastic))
        end(second)
        assert first.wait(deadline - time.monotonic()) == 0, (tmp_path / "first.txt").read_text()
    said = (tmp_path / "first.txt").read_text() + (tmp_path / "second.txt").read_text()
    assert re.search(r"begins: .* 2 ranks", said), "premise: both have trained"
    resumed = re.search(r"resumes out/\S*-(\d+): .* 1 ranks", said)
    assert resumed, said
    assert 0 < int(resumed[1]) <= done < UPDATES, "premise: it was lost during training"
    assert "RankError: Another rank has ended" in said
    expected, found = rows(whole), rows(elastic)
    assert len(found) == len(expected) == UPDATES
    for one, other in zip(found, expected, strict=True):
        assert one["tokens"] == other["tokens"], "the same effective batch, with both and with one"
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3), "in bfloat16"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
