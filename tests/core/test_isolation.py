"""Fixtures of conftest.py detect and restore global state that a test has changed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Folder with the project's conftest.py, for tests in a child process."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "tests" / "isolation.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
    return tmp_path


def run(suite: Path, code: str) -> str:
    """Run pytest on a file of tests and return its output."""
    (suite / "test_it.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no"],
        cwd=suite,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


# Each leak: the code of a test, the condition that the next test asserts, and the failure message.
LEAKS = [
    (
        "os.environ['PLANTED'] = '1'",
        "'PLANTED' not in os.environ",
        "environment variable PLANTED: None became '1'",
    ),
    ("os.environ.pop('HOME')", "'HOME' in os.environ", "environment variable HOME: "),
    ("os.chdir('/')", "os.getcwd() != '/'", "working directory: "),
    (
        "threading.Thread(target=threading.Event().wait, name='lost', daemon=True).start()",
        "True",
        "thread still running: lost",
    ),
]
TORCH_LEAKS = [
    (
        "torch.set_default_dtype(torch.float64)",
        "torch.get_default_dtype() is torch.float32",
        "torch, default dtype: torch.float32 became torch.float64",
    ),
    (
        "torch.set_grad_enabled(False)",
        "torch.is_grad_enabled()",
        "torch, gradients enabled: True became False",
    ),
    (
        "torch.use_deterministic_algorithms(True)",
        "not torch.are_deterministic_algorithms_enabled()",
        "torch, deterministic algorithms: False became True",
    ),
    ("torch.set_num_threads(3)", "torch.get_num_threads() == 1", "torch, number of threads: 1 became 3"),
    ("torch.set_anomaly_enabled(True)", "not torch.is_anomaly_enabled()", "torch, anomaly detection: "),
    (
        "torch.autocast('cpu').__enter__()",
        "not torch.is_autocast_enabled('cpu')",
        "torch, autocast on the CPU",
    ),
    (
        "d.init_process_group(store=d.HashStore(), rank=0, world_size=1)",
        "not d.is_initialized()",
        "torch, process group: False became True",
    ),
]


def check_leaks(suite: Path, imports: str, leaks: list[tuple[str, str, str]]) -> None:
    """Run pairs of tests in one process: each leak fails its test, and the next test has a clean state."""
    pairs = [
        f"def test_leak_{number}():\n    {leak}\ndef test_next_{number}():\n    assert {clean}\n"
        for number, (leak, clean, _) in enumerate(leaks)
    ]
    printed = run(suite, imports + "".join(pairs))
    # The body of each test passes; its teardown reports the leak as an error.
    assert f"{2 * len(leaks)} passed, {len(leaks)} errors" in printed, printed
    for number, (_, _, message) in enumerate(leaks):
        assert f"ERROR test_it.py::test_leak_{number}" in printed
        assert message in printed


def test_a_leak_fails_its_test_and_no_other(suite: Path) -> None:
    check_leaks(suite, "import os, threading\n", LEAKS)


@needs_torch
def test_settings_of_torch_are_restored(suite: Path) -> None:
    check_leaks(suite, "import torch\nfrom torch import distributed as d\n", TORCH_LEAKS)


@needs_torch
def test_the_first_import_of_torch_is_compared_with_its_defaults(suite: Path) -> None:
    printed = run(suite, "def test_leak():\n    import torch\n    torch.set_grad_enabled(False)\n")
    assert "1 passed, 1 error" in printed


def test_restored_state_and_short_threads_are_no_leak(suite: Path) -> None:
    code = """
import os, threading, time

def test_puts_back(monkeypatch, tmp_path):
    monkeypatch.setenv("PLANTED", "1")
    monkeypatch.chdir(tmp_path)

def test_ends_soon():
    threading.Thread(target=time.sleep, args=(0.2,)).start()
"""
    assert " 2 passed in" in run(suite, code)


def test_seeds_do_not_depend_on_the_tests_before(suite: Path) -> None:
    code = """
import random
seen = []

def test_first():
    seen.append(random.random())

def test_second():
    assert [random.random()] == seen
"""
    assert " 2 passed in" in run(suite, code)
