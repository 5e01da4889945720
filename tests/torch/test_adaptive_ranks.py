"""Windows that follow the noise have one length on all ranks: two real gloo processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[int]]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    program = [sys.executable, "-W", "error", "-m", "tests.torch.adaptive_ranks"]
    processes = [
        subprocess.Popen(
            [*program, str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_rank_0_decides_where_ranks_know_different_things(found: list[dict[str, list[int]]]) -> None:
    # Micro-batches of 2 x 5 samples: rank 0 wants 40, 40, 40 and then 9; alone, rank 1 would want others.
    assert found[0]["disagreeing"] == [8, 16, 32, 40, 20]
    assert found[1]["disagreeing"] == found[0]["disagreeing"]


def test_lengths_follow_the_noise_of_both_ranks_together(found: list[dict[str, list[int]]]) -> None:
    lengths = found[0]["measured"]
    assert lengths == found[1]["measured"]
    assert lengths[0] == 2
    # 160 samples are 10 micro-batches of 8 on two ranks; counted for one rank alone they would be 20.
    assert 7 <= statistics.median(lengths[len(lengths) // 3 :]) <= 14
