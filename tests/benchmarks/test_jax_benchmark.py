"""The benchmark of JAX runs, and fails a mean of means."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytestmark = pytest.mark.jax
ROOT = Path(__file__).parents[2]

WRONG = """
import sys
import jax_accumulation
ours = jax_accumulation.value_and_grad
def mean_of_means(fun, **options):
    options.pop("weight", None)
    return ours(fun, **options)
jax_accumulation.value_and_grad = mean_of_means
sys.argv[1:] = {arguments!r}
jax_accumulation.main()
"""


def run(tmp_path, *, wrong):
    path = tmp_path / "rows.json"
    options = ["--rounds", "1", "--rows", "32", "--sizes", "8", "--pairs", "128", "--json", str(path)]
    program = ["-c", WRONG.format(arguments=options)]
    if not wrong:
        program = [str(ROOT / "benchmarks" / "jax_accumulation.py"), *options]
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert path.exists(), done.stderr
    return done, {row["name"]: row["error"] for row in json.loads(path.read_text())}


@pytest.mark.slow  # ./run test-backends -m "jax and slow": a dozen transformers are compiled
def test_superbatch_rounds_like_the_full_batch(tmp_path):
    done, errors = run(tmp_path, wrong=False)
    assert done.returncode == 0, done.stdout
    assert 0 < errors["full batch"] < 1e-5, "float32 against float64"
    assert errors["superbatch, 8"] < 1.5 * errors["full batch"]
    assert errors["optax microbatch(grad), 8"] > 1e-2, "texts have different lengths"


@pytest.mark.slow
def test_a_mean_of_means_is_beyond_the_bound(tmp_path):
    done, errors = run(tmp_path, wrong=True)
    assert errors["superbatch, 8"] > 1e-2
    assert done.returncode == 1
    assert "superbatch, 8: gradient error" in done.stdout
