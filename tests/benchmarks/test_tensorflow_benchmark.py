"""The benchmark of TensorFlow runs, and fails the tutorial's loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
pytestmark = pytest.mark.tensorflow
ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # ./run test tests/benchmarks -m slow: traces many graphs
def test_errors_of_each_way(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "tensorflow_accumulation.py"), "--processes", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    options = ["--rounds", "1", "--rows", "24", "--size", "8", "--json", str(path)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert path.exists(), done.stderr
    errors = {row["name"]: row["error"] for row in json.loads(path.read_text())}
    assert errors["by hand, as tutorials"] > 1e-3 and errors["Keras gradient_accumulation_steps"] > 1e-3
    ours = {name: error for name, error in errors.items() if name.startswith("superbatch")}
    assert len(ours) == 4 and max(ours.values()) < 1e-12, ours
    assert "error" not in done.stdout.splitlines()[-1], "superbatch is within its bounds"
