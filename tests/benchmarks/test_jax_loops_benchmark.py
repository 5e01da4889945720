"""The benchmark of JAX loops runs, and fails if another loop is faster or a gradient is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytestmark = pytest.mark.jax
ROOT = Path(__file__).parents[2]
SMALL = ["--rounds", "1", "--rows", "8", "--microbatch-size", "2", "--models", "conv"]

BEYOND = """
import jax_loops
row = lambda way, temp, ratio, error=1e-7: jax_loops.Row("conv", way, temp, 10.0, ratio, error)
ours = row("superbatch", 10.0, 1.0)
fine = [row("scan", 10.0, 0.95), row("written out", 80.0, 0.5), row("host", None, 1.1)]
print(jax_loops.beyond([ours, *fine]))
print(jax_loops.beyond([ours, row("scan", 10.0, 0.3)]))
print(jax_loops.beyond([ours, row("host", None, 1.0, error=0.2)]))
"""


def run(*program):
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


def test_every_loop_computes_the_gradient_of_the_batch(tmp_path):
    path = tmp_path / "rows.json"
    done = run(str(ROOT / "benchmarks" / "jax_loops.py"), *SMALL, "--json", str(path))
    assert path.exists(), done.stderr
    rows = {row["way"]: row for row in json.loads(path.read_text())}
    assert len(rows) == 5 and all(0 < row["error"] < 1e-5 for row in rows.values()), rows
    assert rows["superbatch"]["temp_mib"] < 0.5 * rows["written out"]["temp_mib"]
    assert rows["superbatch"]["temp_mib"] <= 1.1 * rows["scan by hand"]["temp_mib"]


def test_a_faster_loop_and_a_wrong_gradient_are_beyond_the_bounds():
    done = run("-c", BEYOND)
    assert done.stdout.splitlines() == [
        "[]",
        "['conv, scan: faster than superbatch, in 0.30 of its time']",
        "['conv, host: gradient error 2.0e-01']",
    ], done.stderr
