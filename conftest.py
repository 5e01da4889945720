"""Settings of all tests and doctests: fixed seeds, one thread, and a check that no test leaves changes.

The file is in the root folder, not in tests/, because the doctests of the package use these settings too.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import isolation

# Before anything imports torch or matplotlib. Tiny models are faster on one thread, and sums over several
# threads have no fixed order. Agg draws figures without a display.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling takes longer than running
os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # tests download nothing, and TRL's telemetry would start a thread

# A shell starts background processes with SIGINT ignored, and Python keeps that setting.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Times depend on the machine, so there is no deadline, and slow generation of examples is no failure. In CI
# the examples are fixed, so that a failed build fails again when it is repeated.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Doctests of backends that are not installed are skipped; the header of the run lists them.
BACKENDS = {"jax": ("jax", "optax"), "tensorflow": ("tensorflow",), "keras": ("keras",)}
MISSING = {
    name: missing
    for name, packages in BACKENDS.items()
    if (missing := [package for package in packages if importlib.util.find_spec(package) is None])
}
ROOT = Path(__file__).parent
collect_ignore = [
    str(file)
    for name in MISSING
    for file in (
        ROOT / "superbatch" / name,
        ROOT / "superbatch" / "lab" / "studies" / f"on_{name}.py",
        ROOT / "tests" / "contract" / f"run_{name}.py",
        *(
            file
            for file in (ROOT / "tests" / name).glob("*.py")
            if not file.name.startswith(("test_", "conftest"))
        ),
    )
]

# Each backend of Keras is optional, and a process has only one.
collect_ignore += [
    str(ROOT / "superbatch" / "keras" / file)
    for package, files in {
        "tensorflow": ("step_tensorflow.py", "replicas.py"),
        "jax": ("step_jax.py",),
        "torch": ("step_torch.py",),
    }.items()
    if importlib.util.find_spec(package) is None
    for file in files
]
collect_ignore += [str(ROOT / "tests" / "contract" / "keras_model.py")]  # imported in its own process

# Each integration needs its own library.
HOSTS = {
    "transformers": (
        "hf.py",
        "hf_calls.py",
        "hf_host.py",
        "hf_items.py",
        "hf_losses.py",
        "hf_singles.py",
        "trl.py",
    ),
    "lightning": ("lightning.py", "lightning_windows.py"),
    "accelerate": ("accelerate.py",),
    "sentence_transformers": ("sentence_transformers.py",),
}
collect_ignore += [
    str(ROOT / "superbatch" / "integrations" / file)
    for package, files in HOSTS.items()
    if importlib.util.find_spec(package) is None
    for file in files
]

# Helpers of their tests import these libraries too, and have no doctests.
collect_ignore += [
    str(file)
    for file in (ROOT / "tests" / "integrations").glob("*.py")
    if not file.name.startswith(("test_", "conftest"))
]

# These files run first, so that no single core is left with a long file at the end. A missing entry costs
# seconds; `./run test --durations=100` shows the long files.
LONGEST = (
    "test_snippets.py",
    "test_compare.py",
    "test_batch_studies.py",
    "test_momentum_study.py",
    "test_studies.py",
    "test_fit.py",
    "test_failing_allocations.py",
    "test_verify.py",
    "test_statement_remedy.py",
    "test_predict.py",
    "test_quick.py",
    "test_statement_found.py",
    "test_virtual_compile.py",
    "test_statement_draws.py",
    "test_virtual_operators.py",
    "test_survey_study.py",
    "test_statement_language_models.py",
    "test_statement.py",
    "test_virtual_batch.py",
    "test_check_routine.py",
    "test_statement_matrix.py",
    "test_site.py",
    "test_layers.py",
    "test_distribution.py",
    "test_coupled_exact.py",
    "test_virtual_paranoid.py",
    "test_virtual_layouts.py",
    "test_masters.py",
    "test_gpu.py",
    "test_savings.py",
    "test_moved_state.py",
    "test_exchange.py",
)

TORCH_DEFAULT = {
    "gradients enabled": True,
    "deterministic algorithms": False,
    "anomaly detection": False,
    "autocast on the CPU": False,
    "process group": False,
}


def pytest_configure() -> None:
    """Fail the run if a backend listed in SUPERBATCH_BACKENDS (such as torch,jax) cannot be imported."""
    for name in filter(None, os.environ.get("SUPERBATCH_BACKENDS", "").split(",")):
        load(name)


def load(backend: str) -> None:
    """Import a backend; raise `pytest.UsageError` if that fails."""
    try:
        importlib.import_module(f"superbatch.{backend}")
    except ImportError as error:
        text = f"SUPERBATCH_BACKENDS lists {backend}, which cannot be imported: {error}"
        raise pytest.UsageError(text) from error


def pytest_report_header() -> list[str]:
    """List the doctests that are skipped because a library is not installed."""
    return [
        f"superbatch.{name}: doctests skipped, {' and '.join(missing)} not installed"
        for name, missing in MISSING.items()
    ]


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the doctests of a backend as tests of that backend, and put the longest files first."""
    _sample(items)
    places = {path: place(path) for path in {item.path for item in items}}
    for item in items:
        name, _ = places[item.path]
        if name is not None:
            item.add_marker(name)
    items.sort(key=lambda item: places[item.path][1])


def place(path: Path) -> tuple[str | None, int]:
    """Return the backend that a file belongs to, and its position in the order of the run."""
    backend = next((name for name in BACKENDS if (ROOT / "superbatch" / name) in path.parents), None)
    return backend, LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST)


def pytest_collection_finish() -> None:
    """Exclude all present objects from garbage collection, which would otherwise scan them repeatedly."""
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that changes global state, and restore that state for the next test."""
    before = isolation.take_snapshot()
    yield
    found = isolation.leaks(before, TORCH_DEFAULT)
    if found:
        isolation.restore(before)
        pytest.fail("the test leaves behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random state, whichever tests ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Clear compiled programs: after eight backends dynamo silently runs the next one eagerly."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        # torch has one process-wide flag for active dispatch modes. If two modes overlap in two threads, the
        # flag stays set, and torch 2.6 then compiles nothing.
        dispatch: Any = sys.modules["torch.utils._python_dispatch"]
        dispatch._is_in_torch_dispatch_mode = dispatch._is_in_non_infra_torch_dispatch_mode = False


def _sample(items: list[pytest.Item]) -> None:
    """Keep every n-th parameter set of a test marked ``sampled(n)``; mark the others as slow."""
    seen: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            function = item.nodeid.partition("[")[0]
            number = seen[function] = seen.get(function, -1) + 1
            if number % mark.args[0]:
                item.add_marker(pytest.mark.slow)
