"""Settings of every test and doctest: fixed seeds, one thread, and nothing left behind.

It lies beside the package, not in tests/, because the doctests of the package are held to the same.
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

# Before anything imports torch or matplotlib. Tiny models are faster on one thread, and a sum over several
# threads has no fixed order; a figure needs no screen.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # to compile takes longer than to run
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests load nothing, and TRL's telemetry starts a thread

# A shell ignores Ctrl-C for what it runs in the background, and Python does as it was started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Times vary with the machine: no deadline, and no failure of a test whose examples are slow to make. In CI, a
# red build must be red again when it is run again.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# The doctests of a backend that is not installed are left out, and the header of the run says so.
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

# Keras' backends are optional one by one, and a process has only one of them.
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
collect_ignore += [str(ROOT / "tests" / "contract" / "keras_model.py")]  # for processes of its own

# So are the integrations, each of which needs a library of its own.
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

# Helpers of their tests import those libraries too, and hold no doctests.
collect_ignore += [
    str(file)
    for file in (ROOT / "tests" / "integrations").glob("*.py")
    if not file.name.startswith(("test_", "conftest"))
]

# Run before all others, so that no core works alone through a long file at the end. A file that is missing
# here costs seconds, nothing else: `./run test --durations=100` shows which are long.
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
    """A backend that SUPERBATCH_BACKENDS asks for (torch,jax) and that does not load fails the run."""
    for name in filter(None, os.environ.get("SUPERBATCH_BACKENDS", "").split(",")):
        load(name)


def load(backend: str) -> None:
    """Import a backend that was asked for."""
    try:
        importlib.import_module(f"superbatch.{backend}")
    except ImportError as error:
        text = f"SUPERBATCH_BACKENDS asks for {backend}, which does not load: {error}"
        raise pytest.UsageError(text) from error


def pytest_report_header() -> list[str]:
    """Which doctests are left out, and why."""
    return [
        f"superbatch.{name}: doctests left out, {' and '.join(missing)} not installed"
        for name, missing in MISSING.items()
    ]


@pytest.hookimpl(tryfirst=True)  # before cells are left out by their marks
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
    """Return the backend that a file is a part of, and how early it is run."""
    backend = next((name for name in BACKENDS if (ROOT / "superbatch" / name) in path.parents), None)
    return backend, LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST)


def pytest_collection_finish() -> None:
    """What is loaded by now is no garbage: no collection has to look through it again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that changes what the next test would see; then change it back."""
    before = isolation.take_snapshot()
    yield
    found = isolation.leaks(before, TORCH_DEFAULT)
    if found:
        isolation.restore(before)
        pytest.fail("the test leaves behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Forget what earlier tests compiled: after eight backends dynamo runs the next one eagerly, silently."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        # torch notes for the whole process that a dispatch mode is on, and takes two that overlap in two
        # threads for one that never ends; with torch 2.6 nothing is compiled from then on.
        dispatch: Any = sys.modules["torch.utils._python_dispatch"]
        dispatch._is_in_torch_dispatch_mode = dispatch._is_in_non_infra_torch_dispatch_mode = False


def _sample(items: list[pytest.Item]) -> None:
    """Keep every n-th cell of a test that is marked ``sampled(n)``; the others become slow tests."""
    seen: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            function = item.nodeid.partition("[")[0]
            number = seen[function] = seen.get(function, -1) + 1
            if number % mark.args[0]:
                item.add_marker(pytest.mark.slow)
