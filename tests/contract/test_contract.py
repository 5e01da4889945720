"""Contract of all backends: cases.json on each installed one, against whole windows in float64.

A backend is a file `run_<name>.py` with `WAYS`, `can(case, way)` and `run(case, way)`. SUPERBATCH_BACKENDS
lists the required backends (torch,jax): the run fails if one of them does not load (see conftest.py).
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import math
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed (the reference is written in it)")

from tests.contract import reference  # noqa: E402  (it needs NumPy: skip first)

CASES = json.loads(reference.FILE.read_text(encoding="utf-8"))
BACKENDS = {
    "torch": (),
    "jax": (pytest.mark.jax,),
    "tensorflow": (pytest.mark.tensorflow,),
    "keras": (pytest.mark.keras,),
}  # with the markers of their tests
WAYS = {
    "torch": ["windows", "batches"],
    "jax": ["value_and_grad", "multi_steps"],
    "tensorflow": ["eager", "function"],
    "keras": ["tensorflow", "jax", "torch"],
}


def backend(name: str) -> Any:
    """Return the runner of a backend; skip the test if the backend is not installed."""
    packages = {"jax": ("jax", "optax")}.get(name, (name,))
    for package in packages:
        if (
            importlib.util.find_spec(package) is None
        ):  # not imported: each backend of Keras runs in its own process
            pytest.skip(f"{package} is not installed (backend {name})")
    return importlib.import_module(f"tests.contract.run_{name}")


def check(case: dict[str, Any], got: dict[str, Any]) -> None:
    """Compare losses, number of updates, parameters and their moving average, each array separately."""
    expected, bound = case["expected"], case["bound"]
    assert got["updates"] == expected["updates"]
    if got["losses"] is not None and case["dtype"] == "float64":
        assert len(got["losses"]) == len(expected["losses"])
        for ours, theirs in zip(got["losses"], expected["losses"], strict=True):
            assert math.isnan(ours) if theirs is None else abs(ours - theirs) <= bound * abs(theirs)
    start = reference.parameters(case)
    for tree in ("parameters", "average"):
        for name, wanted in expected[tree].items():
            moved = np.abs(np.array(wanted) - start[name]).max()
            assert moved > 1e-3, f"the premise: {name} moved"
            error = np.abs(np.array(got[tree][name]) - np.array(wanted)).max()
            assert error <= bound * max(moved, 1.0 if bound < 1e-9 else moved), f"{tree}, {name}: {error}"


def pairs() -> list[Any]:
    return [
        pytest.param(case, name, way, id=f"{name}-{way}-{case['name']}", marks=marks)
        for name, marks in BACKENDS.items()
        for way in WAYS[name]
        for case in CASES
    ]


@pytest.mark.parametrize(("case", "name", "way"), pairs())
def test_a_backend_keeps_the_contract(case: dict[str, Any], name: str, way: str) -> None:
    runner = backend(name)
    assert WAYS[name] == runner.WAYS, "each way has tests"
    if runner.can(case, way):
        check(case, runner.run(case, way))


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in BACKENDS.items()])
def test_every_case_is_run_on_every_backend(name: str) -> None:
    runner = backend(name)
    left = [case for case in CASES if not any(runner.can(case, way) for way in runner.WAYS)]
    # A loss of Keras ignores tokens without weight.
    assert not [case["name"] for case in left if not (name == "keras" and case["background"])]


def test_the_file_is_up_to_date_with_the_reference() -> None:
    made = json.loads(reference.text())
    assert [case["name"] for case in made] == [case["name"] for case in CASES]
    for new, old in zip(made, CASES, strict=True):
        check(
            old,
            new["expected"] | {"losses": [math.nan if x is None else x for x in new["expected"]["losses"]]},
        )
        assert {k: v for k, v in new.items() if k != "expected"} == {
            k: v for k, v in old.items() if k != "expected"
        }


@pytest.mark.parametrize("background", [0.0, 0.3])
def test_gradients_by_hand_are_gradients(background: float) -> None:
    """The gradients of the reference equal finite differences."""
    case = CASES[0]
    rows = reference.window_of(reference.data(case), case, 0)
    p = reference.parameters(case)
    _, gradient = reference.loss_and_gradient(p, rows, background)
    for name, value in p.items():
        for index in np.ndindex(value.shape):
            beside = []
            for sign in (1, -1):
                moved = copy.deepcopy(p)
                moved[name][index] += sign * 1e-6
                beside.append(reference.loss_and_gradient(moved, rows, background)[0])
            assert abs((beside[0] - beside[1]) / 2e-6 - gradient[name][index]) < 1e-8


@pytest.mark.parametrize(
    "change",
    [
        {"updates": 99},
        {"losses": [0.5, 0.5]},
        {"parameters": {"w": [[0.1] * 4] * 3, "v": [0.1] * 4}},
        {"average": {"w": [[math.nan] * 4] * 3, "v": [0.1] * 4}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_result_is_rejected(change: dict[str, Any]) -> None:
    check(CASES[0], CASES[0]["expected"])
    with pytest.raises(AssertionError):
        check(CASES[0], CASES[0]["expected"] | change)


def test_a_required_backend_must_load(pytester_like: Any) -> None:
    done = pytester_like("nonsense")
    assert done.returncode != 0
    assert "SUPERBATCH_BACKENDS lists nonsense, which cannot be imported" in done.stderr + done.stdout
    assert pytester_like("").returncode == 0


@pytest.fixture
def pytester_like() -> Any:
    """Collect one small file in a child process with SUPERBATCH_BACKENDS set."""
    import os
    import subprocess
    import sys

    def collect(backends: str) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/core/test_limits.py"],
            cwd=reference.FILE.parents[2],
            env=os.environ | {"SUPERBATCH_BACKENDS": backends},
            capture_output=True,
            text=True,
            check=False,
        )

    return collect
