"""Ranks that do not agree on measuring the noise must be told so, and none may wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch


def test_a_state_or_an_option_on_one_rank_only_is_an_error_on_all(tmp_path: Path) -> None:
    """With every=2 the ranks would measure in turns, and wait for each other; with 1 they average others."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", "-m", "tests.torch.noise_state_ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=root, env=environment) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=100) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert said[0] == said[1]
    assert set(said[0]) == {"state, every 2", "state, every 1", "option, every 1"}
    for name, found in said[0].items():
        for text in found["said"]:
            assert "2 ranks that measure the noise, but do not agree on which windows" in text, name
            assert "load the same state_dict() on every rank" in text, name
        assert found["unchanged"], "nothing is updated by a window that one rank takes for another"
        assert found["after"] == ["", "", ""], "loaded on all ranks they go on"
        assert found["windows"] == (3 if "every 2" in name else 6)
