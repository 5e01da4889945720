"""Cases of this folder on each backend of Keras, in two processes per backend: quick and slow cases."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.keras
# Compilation is slow: by default JAX and TensorFlow run only these cases; torch runs all, with the mutants.
QUICK = {
    "cases_exact.case_adam_schedule_clip_and_regularizer",
    "cases_exact.case_masked_tokens",
    "cases_exact.case_several_outputs_with_a_mask_and_weights_each",
    "cases_exact.case_a_loss_that_returns_one_number",
    "cases_empty.case_beside_an_add_loss",
    "cases_rows.case_a_number_for_each_pair",
    "cases_programs.case_every_loss_of_keras_is_in_the_table",
    "cases_programs.case_losses_of_keras_that_are_refused_by_name",
    "cases_programs.case_a_layer_that_centres_over_the_batch",
    "cases_programs.case_declared_weights",
    "cases_programs.case_random_layers_are_not_called_coupled",
    "cases_programs.case_ragged_batches",
    "cases_behaviour.case_the_users_model_is_not_changed",
    "cases_behaviour.case_no_second_copy_of_the_batch",
    "cases_numbers.case_random_numbers_differ_between_microbatches",
    "cases_numbers.case_batchnorm",
    "cases_numbers.case_a_batch_of_weight_zero",
    "cases_numbers.case_a_microbatch_that_is_not_finite",
    "cases_numbers.case_compiled_or_eagerly",
    "cases_behaviour.case_flush_tail",
    "cases_refusals.case_losses_without_a_known_divisor",
    "cases_refusals.case_micro_batches_that_agree_by_chance",
    "cases_refusals.case_layers_that_mix_rows",
    "cases_refusals.case_rows_that_are_read_by_index",
}
FILES = (
    "cases_exact",
    "cases_empty",
    "cases_rows",
    "cases_programs",
    "cases_behaviour",
    "cases_numbers",
    "cases_refusals",
    "cases_mutants",
)
PACKAGES = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}


def cases(file: str) -> list[str]:
    """Return the names of a file's cases without importing it, because that would import Keras."""
    tree = ast.parse((HERE / f"{file}.py").read_text(encoding="utf-8"))
    return [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
    ]


def process(module: str, *arguments: str, backend: str) -> Any:
    """Run a module of this folder in a child process on a Keras backend; return the JSON it prints."""
    for package in ("keras", PACKAGES[backend]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra: keras, on {backend})")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.keras.{module}", *arguments],
        cwd=HERE.parents[1],
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def slow(backend: str, case: str) -> bool:
    """Return True if the case runs only with `-m "slow and keras"`."""
    return backend != "torch" and case not in QUICK


PAIRS = [(backend, f"{file}.{name}") for backend in PACKAGES for file in FILES for name in cases(file)]


def params() -> list[Any]:
    return [
        pytest.param(*pair, marks=[pytest.mark.slow] if slow(*pair) else [], id="-".join(pair))
        for pair in PAIRS
    ]


@functools.cache
def results(backend: str, slowly: bool) -> Any:
    """Return the results of a backend's slow cases, or of its quick ones."""
    names = [case for on, case in PAIRS if on == backend and slow(on, case) is slowly]
    return process("run_cases", *names, backend=backend)


@pytest.mark.parametrize(("backend", "case"), params())
def test_a_case(backend: str, case: str) -> None:
    found = results(backend, slow(backend, case))
    assert case in found, "each case is run"
    if found[case]["error"]:
        pytest.fail(found[case]["error"], pytrace=False)


def test_there_are_cases() -> None:
    assert all(len(cases(file)) > 5 for file in FILES)
    assert {case for _, case in PAIRS} >= QUICK


@functools.cache
def mirrored() -> Any:
    return process("mirrored", backend="tensorflow")


@pytest.mark.parametrize(
    "what",
    [
        "rows that the replicas share unequally",
        "a tail of one row",
        "clipping",
        "regularizers",
        "masks",
        "one number beside an activity regularizer",
    ],
)
def test_on_two_replicas(what: str) -> None:
    found = mirrored()[what]
    assert found["replicas"] == 2 and found["moved"] > 1e-3, "the premises"
    assert found["error"] < 1e-12 * max(1.0, found["moved"]) and found["loss"] < 1e-12
    assert found["updates"] == (2 if what != "a tail of one row" else 6) * (2 if what == "clipping" else 1)


def test_refusals_on_two_replicas() -> None:
    found = mirrored()
    assert "Freeze it (layer.trainable = False) or use GroupNormalization" in found["batchnorm"]
    assert found["dropout"] > 0
    assert found["Keras' own option"] == "RuntimeError", "Keras' own option raises today"
