"""Detect and restore global state that a test has changed: environment, folder, threads, settings of torch.

This file imports only the standard library, so that the tests of the core run without torch. It reads the
settings of torch only if a test has imported torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

# Set by libraries on import or first use, not by a test.
ENVIRONMENT_OF_LIBRARIES = {
    "PYTEST_CURRENT_TEST",  # pytest itself, renewed in every phase
    "KMP_DUPLICATE_LIB_OK",  # importing scikit-learn
    "KMP_INIT_AT_FORK",  # importing scikit-learn
    "TORCHINDUCTOR_CACHE_DIR",  # the first torch.compile
    "TRITON_CACHE_DIR",  # the first torch.compile
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # the first kernel that Inductor compiles
    "CUDA_MODULE_LOADING",  # Inductor of torch 2.6 in a CUDA build
    "TF_CPP_MIN_LOG_LEVEL",  # importing jax
    "TPU_SKIP_MDS_QUERY",  # importing jax
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",  # importing tensorflow
    "HDF5_PLUGIN_PATH",  # importing tensorflow (h5py)
    "TF2_BEHAVIOR",  # importing tensorflow
    "TPU_ML_PLATFORM",  # importing tensorflow
    "TPU_ML_PLATFORM_VERSION",  # importing tensorflow
    "TORCH_NCCL_AVOID_RECORD_STREAMS",  # importing torch.distributed.fsdp
}
# Threads that libraries keep until the process ends, by the start of the name ...
THREADS_OF_LIBRARIES = (
    "ThreadPoolExecutor-",  # torch.compile's pool of compilers
    "Thread-Subproc",
    "Dummy-",  # a thread not started from Python (of autograd, if a hook runs in it)
    "pydevd",
)
# ... or by the function that the thread runs, if it was given no name.
THREADS_WITHOUT_A_NAME = ("(_read_thread)",)  # torch.compile's pool of compilers, torch 2.6
PATIENCE = 2.0  # seconds for a thread that is about to end


@dataclass(frozen=True)
class State:
    """Global state that tests share."""

    environment: dict[str, str]
    folder: str
    threads: frozenset[threading.Thread]
    torch: dict[str, Any] | None


def torch_state() -> dict[str, Any] | None:
    """Return the global settings of torch by name, or None if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return None
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


def take_snapshot() -> State:
    """Return the present state."""
    environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT_OF_LIBRARIES}
    return State(environment, os.getcwd(), frozenset(threading.enumerate()), torch_state())


def _new_threads(before: State) -> list[str]:
    """Return the names of new threads that still run after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while True:
        new = [
            thread.name
            for thread in set(threading.enumerate()) - before.threads
            if thread.is_alive()
            and not thread.name.startswith(THREADS_OF_LIBRARIES)
            and not thread.name.endswith(THREADS_WITHOUT_A_NAME)
        ]
        if not new or time.monotonic() > end:
            return sorted(new)
        time.sleep(0.01)


def leaks(before: State, torch_default: dict[str, Any]) -> list[str]:
    """Return one sentence for each difference from `before`.

    `torch_default` is the state of a fresh torch: the reference for a test that imports torch itself.
    """
    now = take_snapshot()
    found: list[str] = []
    for name in sorted(before.environment.keys() | now.environment.keys()):
        old, new = before.environment.get(name), now.environment.get(name)
        if old != new:
            found.append(f"environment variable {name}: {old!r} became {new!r}")
    if now.folder != before.folder:
        found.append(f"working directory: {before.folder} became {now.folder}")
    found += [f"thread still running: {name}" for name in _new_threads(before)]
    if now.torch is not None:
        reference = before.torch or torch_default
        for name, new in now.torch.items():
            if name in reference and reference[name] != new:
                found.append(f"torch, {name}: {reference[name]} became {new}")
    return found


def restore(before: State) -> None:
    """Restore `before`, so that one leak fails one test and not all later ones. Threads cannot be stopped."""
    for name in os.environ.keys() - before.environment.keys() - ENVIRONMENT_OF_LIBRARIES:
        del os.environ[name]
    os.environ.update(before.environment)
    os.chdir(before.folder)
    torch = sys.modules.get("torch")
    if torch is None or before.torch is None:
        return
    torch.set_default_dtype(before.torch["default dtype"])
    torch.set_grad_enabled(before.torch["gradients enabled"])
    torch.use_deterministic_algorithms(before.torch["deterministic algorithms"])
    torch.set_num_threads(before.torch["number of threads"])
    torch.set_anomaly_enabled(before.torch["anomaly detection"])
    torch.set_autocast_enabled("cpu", before.torch["autocast on the CPU"])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
