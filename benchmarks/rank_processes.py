"""Run a benchmark in gloo processes as ranks, and return the results of the first rank."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 1800.0  # seconds: a rank that waits for an ended rank would hang


def found_by_ranks(script: str, count: int, arguments: Sequence[str]) -> Any:
    """Run a script as `count` ranks; return ``found.json`` of the first rank, from ``--folder``.

    Args:
        script: script, which also gets ``--rank`` and ``--folder``.
        count: number of ranks.
        arguments: arguments of all ranks.

    Raises:
        SystemExit: a rank ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, script, *arguments, "--folder", folder]
        # One thread each: ranks that share cores would otherwise disturb each other.
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*own, "--rank", str(rank)], env=environment) for rank in range(count)]
        try:
            codes = [rank.wait(timeout=PATIENCE) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"A rank failed; exit codes of the ranks: {codes}")
        return json.loads(Path(folder, "found.json").read_text())
