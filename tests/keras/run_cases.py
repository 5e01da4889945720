# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Run cases on the backend that KERAS_BACKEND names: `... -m tests.keras.run_cases cases_exact.case_a_sum`.

A process has one Keras backend, whose import takes seconds, so all cases of a backend run in one process. It
prints the error of each case, or null, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from typing import Any


def prepare() -> None:
    """Set float64 and quick compilation, before and after importing Keras."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)  # noqa: FBT003  (positional only)
        jax.config.update("jax_disable_most_optimizations", True)  # noqa: FBT003
    import keras

    keras.config.set_floatx("float64")
    keras.config.disable_traceback_filtering()


def outcome(case: Any) -> dict[str, Any]:
    """Return the error of a case and its time."""
    import keras

    start = time.process_time()
    error = None
    try:
        case()
    except BaseException:  # noqa: BLE001  (the parent shows any error)
        error = traceback.format_exc()
    keras.backend.clear_session()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return {"error": error, "seconds": time.process_time() - start}


def main(names: list[str]) -> None:
    prepare()
    warnings.simplefilter("error", category=UserWarning)
    results = {}
    for name in names:
        file, _, wanted = name.partition(".")
        for case, act in vars(importlib.import_module(f"tests.keras.{file}")).items():
            if case.startswith("case_") and wanted in ("", case):
                results[f"{file}.{case}"] = outcome(act)
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
