"""Virtual batches on the operators and inputs of torch's own tests, with samples in every dimension."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARDS = 4
# Least number of comparisons, to detect an incomplete list of operators.
LEAST = {"inputs": 3000, "gradients": 1500, "second": 2000}


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("where", LEAST)
def test_every_operator_of_torchs_own_tests(where: str, shard: int) -> None:
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("torch's list of operators needs expecttest, which is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.coupled.torch_operators", where, str(shard), str(SHARDS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    compared = re.search(r"^(\d+) compared", done.stdout, re.MULTILINE)
    assert compared is not None
    assert int(compared[1]) > LEAST[where], done.stdout[-1000:]
