# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""The contract on Keras' three backends: each way is a backend, and one process runs all its cases.

`python -m tests.contract.run_keras` runs them on the backend that KERAS_BACKEND names, and prints JSON.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from tests.contract import reference

WAYS = ["tensorflow", "jax", "torch"]


def can(case: dict[str, Any], way: str) -> bool:
    """Return True if this backend can run the case: losses of Keras ignore tokens without weight."""
    return not case["background"] and importlib.util.find_spec(way) is not None


def run(case: dict[str, Any], way: str) -> dict[str, Any]:
    """Return losses, updates, parameters and their average from the process of this backend."""
    return _all_cases(way)[case["name"]]


@functools.cache
def _all_cases(way: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.run_keras"],
        cwd=reference.FILE.parents[2],
        env=os.environ | {"KERAS_BACKEND": way, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train on the backend of this process."""
    import keras
    import numpy as np

    from superbatch.keras import accumulate
    from tests.contract import keras_model

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy(case["dtype"])
    start = reference.parameters(case)
    model = keras_model.build(case, start)
    arrays, row = reference.data(case), 0
    losses: list[float] = []
    average, updates = dict(start), 0
    # superbatch chooses the micro-batches, so the rows to be left out are left out one by one.
    skips = case["nonfinite"] == "skip_microbatch"
    size = 1 if skips else max(max(sizes) for sizes in case["windows"])
    ours = accumulate(model, microbatch_size=size, nonfinite=case["nonfinite"] or "propagate")
    for sizes in case["windows"]:
        rows = {name: array[row : row + sum(sizes)] for name, array in arrays.items()}
        for first, last in zip(np.cumsum([0, *sizes]), np.cumsum(sizes), strict=False):
            if skips and np.isnan(rows["x"][first:last]).any():
                rows["x"][first:last] = np.nan
        row += sum(sizes)
        before = updates
        ours.train_on_batch(*keras_model.batch(case, rows))
        tracker = ours._loss_tracker  # its result is float32 on torch, its sums are float64
        loss = float(tracker.total) / (float(tracker.count) or np.nan)
        updates = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        losses.append(loss if updates > before else float("nan"))
        if updates > before:
            for name, value in keras_model.parameters(model).items():
                average[name] = case["ema"] * average[name] + (1 - case["ema"]) * value
    return {
        "losses": losses,
        "updates": updates,
        "parameters": {name: value.tolist() for name, value in keras_model.parameters(model).items()},
        "average": {name: value.tolist() for name, value in average.items()},
    }


def main() -> None:
    """Run all cases."""
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)  # noqa: FBT003  (positional only)
    import keras

    cases = json.loads(reference.FILE.read_text(encoding="utf-8"))
    found = {}
    for case in cases:
        if case["background"]:
            continue
        found[case["name"]] = train(case)
        keras.backend.clear_session()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
