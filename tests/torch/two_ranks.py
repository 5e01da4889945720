"""Run a module of the tests on two gloo ranks, and collect their results."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.forked import ROOT, Forked

PATIENCE = 120.0  # seconds; a rank without its peer waits forever


def found_by_both(
    module: str,
    folder: Path,
    *arguments: str,
    warnings: str = "error",
    count: int = 2,
    patience: float = PATIENCE,
) -> list[Any]:
    """Run a module on all ranks; return their results from ``RANK.json`` or ``RANK.pt`` in the folder.

    Args:
        module: takes the rank, the folder and `arguments`.
        folder: an empty folder.
        arguments: further arguments of the module.
        warnings: filter for ``python -W``.
        count: number of ranks.
        patience: timeout in seconds.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Forked(
                    ["-W", warnings, "-m", module, rank, folder, *arguments],
                    environment=environment,
                    merged=True,
                )
            )
            for rank in range(count)
        ]
        codes = [rank.wait(patience) for rank in ranks]
        output = "\n".join(rank.output()[0] for rank in ranks)
        assert codes == [0] * count, f"the ranks ended with {codes}:\n{output}"
    return [_read(folder, rank) for rank in range(count)]


def end_rank() -> NoReturn:
    """End the process of a rank with exit code 0, without the destructors of torch.

    The destructor of a DistributedDataParallel that outlives its process group joins a thread of gloo without
    releasing the GIL. That thread may wait for the GIL: about one program in twenty deadlocked.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _read(folder: Path, rank: int) -> Any:
    if (written := folder / f"{rank}.json").exists():
        return json.loads(written.read_text())
    return torch.load(folder / f"{rank}.pt", weights_only=False)
