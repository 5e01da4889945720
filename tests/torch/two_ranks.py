"""Two real gloo ranks of a module of the tests, and what each of them has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds: a rank that waits for the other waits for ever


def found_by_both(
    module: str, folder: Path, *, warnings: str = "error", count: int = 2, patience: float = PATIENCE
) -> list[Any]:
    """Run a module as some ranks; return what each has written to ``RANK.json`` or ``RANK.pt`` of the folder.

    Args:
        module: its arguments are the rank and the folder.
        folder: an empty one.
        warnings: of Python, as ``-W`` takes them.
        count: of the ranks.
        patience: seconds.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", warnings, "-m", module]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=patience)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return [_read(folder, rank) for rank in range(count)]


def _read(folder: Path, rank: int) -> Any:
    if (written := folder / f"{rank}.json").exists():
        return json.loads(written.read_text())
    return torch.load(folder / f"{rank}.pt", weights_only=False)
