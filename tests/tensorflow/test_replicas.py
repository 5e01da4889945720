"""Two replicas with unequal rows equal the large batch, and communicate only at the end of a window."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
pytestmark = pytest.mark.tensorflow
ROOT = Path(__file__).resolve().parents[2]
GRAPHS = ["graph", "graph, clipped", "everything", "loss scale"]


def run(*arguments: str) -> Any:
    """Run in a child process, because the number of devices must be set before TensorFlow starts."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tensorflow.replicas", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> Any:
    answer = run()
    assert answer["devices"] == 2, "the premise"
    return answer


@pytest.mark.parametrize("name", [*GRAPHS, "eager"])
def test_replicas_equal_the_large_batch(found: Any, name: str) -> None:
    one = found[name]
    assert one["moved"] > 1e-4, "the premise: every variable moved"
    assert one["error"] < 1e-12 and one["losses"] < 1e-12 and one["norms"] < 1e-12, one
    assert one["weights"] == [20, 5, 17], "tokens of all replicas"
    assert one["microbatches"] == [4, 2, 4]


@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_is_sent_before_the_end_of_the_window(found: Any, name: str) -> None:
    microbatch, update = found[name]["microbatch"], found[name]["update"]
    assert microbatch == {"collectives": 0, "crossing": 0, "devices": 2}
    assert update["collectives"] == 2, "one reduction, with an operation on each of two devices"


def test_a_window_and_its_update_in_one_function(found: Any) -> None:
    one = found["in one function"]
    assert one["collectives"] == 2, "one reduction for two micro-batches"
    assert one["error"] < 1e-14


def test_each_dtype_is_reduced_separately(found: Any) -> None:
    one = found["mixed dtypes"]
    assert one["right"] == [True, True]
    assert one["collectives"] == 4, "the sums, all in float32, and the counters, in float64"


def test_a_reduction_in_every_microbatch_would_be_found() -> None:
    assert run("mutant")["mutant"]["microbatch"]["collectives"] > 0


@pytest.mark.slow  # ./run test tests/tensorflow -m slow: a second process, for another reduction
def test_copies_in_every_microbatch_would_be_found() -> None:
    assert run("mutant", "copies")["mutant"]["microbatch"]["crossing"] > 0


def test_a_window_resumes_from_a_checkpoint(found: Any) -> None:
    assert found["resumed"] < 1e-15


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "an optimizer from outside",
            "OptimizerError: The optimizer of type SGD cannot be built",
        ),
        (
            "add outside",
            "WindowError: add() was called outside of strategy.run, but the variables are on 2 replicas",
        ),
        ("apply inside", "WindowError: apply() was called inside of strategy.run or strategy.scope()"),
        (
            "plain variables",
            "WindowError: add() was called in a replica, but the variables of the accumulator are not",
        ),
    ],
)
def test_wrong_use_under_a_strategy_is_refused(found: Any, name: str, message: str) -> None:
    assert found["refusals"][name].startswith(message)
