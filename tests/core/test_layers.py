"""Imports go to lower layers, the core needs only the standard library, imports have no side effects."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core import layers

ROOT = Path(__file__).resolve().parents[2]
EFFECTS = "tests.core.import_effects"


def python(code: str) -> list[str]:
    """Run `code` in a fresh interpreter with superbatch of the working tree; return the printed words."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def new_packages(statement: str, *, after: str = "pass") -> set[str]:
    """Return the top-level third-party packages that `statement` loads after `after` has run."""
    code = f"""
import sys
{after}
before = set(sys.modules)
{statement}
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
"""
    return set(python(code)) - layers.STANDARD_LIBRARY


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the package with empty files, to plant mistakes in."""
    folder = tmp_path_factory.mktemp("skeleton")
    shutil.copytree(
        ROOT / "superbatch",
        folder / "superbatch",
        ignore=shutil.ignore_patterns("__pycache__"),
        copy_function=lambda _, file: Path(file).touch(),
    )
    return folder


def core_modules() -> list[str]:
    files = [file for file in (ROOT / "superbatch").rglob("*.py") if file.name != "__main__.py"]
    names = [layers.module_name(file, ROOT) for file in sorted(files)]
    return [name for name in names if layers.part_of(name) == "core"]


def test_imports_go_down_only() -> None:
    found = layers.check(ROOT)
    assert not found, "\n".join(found)


def test_imports_between_the_folders_of_virtual_go_down_only() -> None:
    folders = {file.parent.name for file in (ROOT / "superbatch/torch/virtual").glob("*/*.py")}
    assert folders == set(layers.FOLDERS), "the premise: each folder has a rank"
    found = layers.upward_in_virtual(ROOT)
    assert not found, "\n".join(found)


def test_no_files_import_each_other_in_a_circle() -> None:
    found = layers.circles(ROOT)
    assert not found, [sorted(circle) for circle in found]


def test_the_core_imports_the_standard_library_only() -> None:
    modules = core_modules()
    assert {"superbatch", "superbatch.errors", "superbatch.results"} <= set(modules)
    assert new_packages("import " + ", ".join(modules)) == {"superbatch"}


def test_import_superbatch_imports_no_framework() -> None:
    assert new_packages("import superbatch") == {"superbatch"}


def test_import_superbatch_torch_imports_torch_and_nothing_else() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    assert new_packages("import superbatch.torch", after="import torch") == {"superbatch"}


def test_the_pytest_plugin_imports_pytest_and_nothing_else() -> None:
    assert new_packages("import superbatch.pytest_plugin", after="import pytest") == {"superbatch"}


@pytest.mark.jax
def test_import_superbatch_jax_imports_jax_and_optax_and_nothing_else() -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    loaded = "import jax.extend.core, jax.extend.random, optax"
    assert new_packages("import superbatch.jax", after=loaded) == {"superbatch"}


@pytest.mark.tensorflow
def test_import_superbatch_tensorflow_imports_tensorflow_and_nothing_else() -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    assert new_packages("import superbatch.tensorflow", after="import tensorflow") == {"superbatch"}


def effects(root: Path) -> list[str]:
    """Return the number of modules below `root`, then the changes that importing them makes."""
    done = subprocess.run(
        [sys.executable, "-m", EFFECTS, root], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)  # modules left out because an optional package is missing
    return [line for line in done.stdout.splitlines() if line]


def test_importing_every_module_changes_nothing() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    count, *found = effects(ROOT)
    assert int(count.split()[0]) > 10, "the premise: the script finds the modules"
    assert not found, "\n".join(found)


# The checkers can fail: each test plants a mistake, and the checker must find it.


@pytest.mark.parametrize(
    ("file", "code", "message"),
    [
        ("planted.py", "import torch", "imports torch, which core may not use"),
        ("planted.py", "def f():\n    import numpy.random", "imports numpy, which core may not use"),
        ("planted.py", "def f():\n    from . import torch", "superbatch.torch (torch): imports go down only"),
        ("results/planted.py", "from ..torch.accumulator import x", "(torch): imports go down only"),
        (
            "planted.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "imports torch",
        ),
        ("planted.py", "import importlib\nimportlib.import_module('torch.nn')", "imports torch"),
        ("planted.py", "from superbatch.lab.studies.compare import x", "(studies): imports go down only"),
        ("torch/planted.py", "import scipy.stats", "imports scipy, which torch may not use"),
        ("torch/planted.py", "from ..lab.plot import x", "superbatch.lab.plot.x (plot): imports go"),
        ("torch/planted.py", "from ..jax import x", "superbatch.jax.x (jax): imports go down only"),
        ("planted.py", "from .jax import x", "superbatch.jax.x (jax): imports go down only"),
        ("planted.py", "import jax", "imports jax, which core may not use"),
        ("jax/planted.py", "from ..torch import x", "superbatch.torch.x (torch): imports go down only"),
        ("jax/planted.py", "import torch", "imports torch, which jax may not use"),
        ("planted.py", "import tensorflow", "imports tensorflow, which core may not use"),
        ("tensorflow/planted.py", "from ..jax import x", "superbatch.jax.x (jax): imports go down only"),
        ("tensorflow/planted.py", "import keras", "imports keras, which tensorflow may not use"),
        ("lab/plot.py", "from .recipes import digits", "(recipes): imports go down only"),
        (
            "lab/studies/planted.py",
            "from ..cli import main",
            "superbatch.lab.cli.main (cli): imports go down only",
        ),
        ("lab/studies/planted.py", "import rich", "imports rich, which studies may not use"),
    ],
)
def test_a_planted_import_is_found(skeleton: Path, file: str, code: str, message: str) -> None:
    planted = skeleton / "superbatch" / file
    assert not planted.exists(), "the premise: the message names the planted import"
    planted.write_text(code + "\n", encoding="utf-8")
    try:
        found = layers.check(skeleton)
    finally:
        planted.unlink()
    assert layers.check(skeleton) == [], "the premise: nothing else is found"
    assert any(message in line and file in line for line in found), found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("ir/planted.py", "from ..run.plan import Plan"),
        (
            "ir/planted.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..trace import tensor",
        ),
        ("rules/planted.py", "def f():\n    from ..trace.recording import Recording"),
        ("run/planted.py", "from superbatch.torch.virtual.ranks.reducer import x"),
        ("ranks/planted.py", "from ..block import virtual_batch"),
        ("ranks/planted.py", "from .. import virtual_batch"),
    ],
)
def test_a_planted_import_upwards_in_virtual_is_found(skeleton: Path, file: str, code: str) -> None:
    planted = skeleton / "superbatch/torch/virtual" / file
    planted.write_text(code + "\n", encoding="utf-8")
    try:
        (found,) = layers.upward_in_virtual(skeleton)
    finally:
        planted.unlink()
    assert layers.upward_in_virtual(skeleton) == [], "the premise: nothing else is found"
    assert file in found, found


@pytest.mark.parametrize(
    "back",
    [
        "from .first import x",
        "def f():\n    from superbatch.torch import first",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import first",
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, back: str) -> None:
    package = tmp_path / "superbatch" / "torch"
    package.mkdir(parents=True)
    codes = {"first": "from .second import x", "second": "from . import third", "third": "", "fourth": back}
    for name, code in codes.items():
        (package / f"{name}.py").write_text(code + "\n", encoding="utf-8")
    assert layers.circles(tmp_path) == [], "the premise: without the second import there is no circle"
    (package / "third.py").write_text(back + "\n", encoding="utf-8")
    assert layers.circles(tmp_path) == [{f"superbatch.torch.{name}" for name in ("first", "second", "third")}]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os\nos.environ['PLANTED'] = '1'", "environment variable PLANTED"),
        ("import warnings\nwarnings.simplefilter('ignore')", "warnings filters"),
        ("import random\nrandom.seed(1)", "random state"),
        ("import logging\nlogging.basicConfig()", "log handlers"),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "thread"),
    ],
)
def test_a_planted_effect_is_found(tmp_path: Path, code: str, message: str) -> None:
    found = effects_of(code, tmp_path)
    assert any(message in line for line in found), found


def test_planted_effects_on_torch_are_found(tmp_path: Path) -> None:
    """All effects are planted in one process, because importing torch is slow; each gives its own line."""
    pytest.importorskip("torch", reason="torch is not installed")
    plants = {
        "torch.manual_seed(1)": "random state of torch: changed",
        "torch.set_default_dtype(torch.float64)": "torch, default dtype: torch.float32 became torch.float64",
        "torch.set_num_threads(torch.get_num_threads() + 1)": "torch, number of threads: ",
        "torch.Tensor.backward = lambda self: None": "Tensor.backward: patched",
    }
    assert effects_of("import torch", tmp_path) == [], "the premise: importing torch is not an effect"
    found = effects_of("import torch\n" + "\n".join(plants), tmp_path)
    assert len(found) == len(plants), found
    assert all(any(line.startswith(message) for line in found) for message in plants.values()), found


def effects_of(code: str, folder: Path) -> list[str]:
    """Return the changes found for a package with this code."""
    package = folder / "superbatch"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "planted.py").write_text(code + "\n", encoding="utf-8")
    count, *found = effects(folder)
    assert count == "1 modules"
    return found


def test_a_package_without_effects_has_none(tmp_path: Path) -> None:
    assert effects_of("import os, random, warnings, logging, threading", tmp_path) == []
