"""The wheel and the sdist build, are complete, and install into an empty environment.

They are built without isolation (hatchling is in the `test` extra) and installed without dependencies, so
that no package index is used.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import superbatch

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def call(*command: str | Path, folder: Path) -> str:
    """Run a command without a package index; return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **NO_NETWORK},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build one distribution of `source` into `target`."""
    call(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        f"--{kind}",
        "--outdir",
        target,
        source,
        folder=target,
    )
    (file,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a fresh virtual environment with only the wheel and pip."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, folder=folder)
    return python


def contents(wheel: Path) -> dict[str, str]:
    """Return the hash of every file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    names = set(contents(wheel))
    package = {name for name in names if ".dist-info/" not in name}
    files = {p.relative_to(ROOT).as_posix() for p in (ROOT / "superbatch").rglob("*") if p.is_file()}
    assert package == {name for name in files if "__pycache__" not in name}
    assert "superbatch/py.typed" in package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_pytest_finds_the_fixture_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        entry_points = archive.read(name).decode()
    assert "[pytest11]\nsuperbatch = superbatch.pytest_plugin\n" in entry_points


def test_the_metadata(wheel: Path) -> None:
    data = metadata(wheel)
    assert (data["Name"], data["Version"]) == ("superbatch", superbatch.__version__)
    assert data["License-Expression"] == "Apache-2.0"
    assert data["Requires-Python"] == ">=3.10"
    assert data["Description-Content-Type"] == "text/markdown"
    assert f"/blob/v{superbatch.__version__}/LICENSE)" in str(data.get_payload())
    labels = [line.split(", ")[0] for line in data.get_all("Project-URL") or []]
    assert labels == ["Repository", "Documentation", "Changelog", "Issues"]
    required = data.get_all("Requires-Dist") or []
    assert required, "the premise: the extras are there"
    assert all("extra ==" in line for line in required), "the core has no dependency"
    assert set(data.get_all("Provides-Extra") or []) >= {
        "torch",
        "recipes",
        "plot",
        "cli",
        "docs",
        "test",
        "dev",
        "peers",
    }


def test_the_version_is_defined_in_one_place() -> None:
    files = ["pyproject.toml", "superbatch/__init__.py", "superbatch/_version.py"]
    pattern = re.compile(r"^\s*(__)?version(__)?\s*=\s*\"", re.MULTILINE)
    found = [name for name in files if pattern.search((ROOT / name).read_text(encoding="utf-8"))]
    assert found == ["superbatch/_version.py"]


def test_the_sdist_builds_into_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    (tmp_path / "built").mkdir()
    again = build("wheel", source, tmp_path / "built")
    assert contents(again) == contents(wheel)


def test_the_sdist_contains_the_files_for_packagers(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "run",
        "constraints.txt",
        "conftest.py",
    }
    needed |= {"hatch_build.py", "SECURITY.md", "CITATION.cff"}
    assert needed | {"tests/isolation.py", "docs/index.md", "mkdocs.yml"} <= names
    unwanted = [name for name in names if name.startswith((".ci", ".venv", "site", "reports"))]
    assert not unwanted


def test_the_installed_package_works_alone(installed: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import superbatch
new = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(superbatch.__version__, *sorted(new))
import pathlib
print(pathlib.Path(superbatch.__file__).with_name("py.typed").exists(), superbatch.__file__)
"""
    first, second = call(installed, "-c", code, folder=installed.parent).splitlines()
    assert first.split() == [superbatch.__version__, "superbatch"], "it imports the standard library only"
    exists, place = second.split(maxsplit=1)
    assert exists == "True"
    assert Path(place).is_relative_to(installed.parents[1]), "the premise: this is the installed one"


def test_a_backend_without_its_framework_says_what_is_missing(installed: Path) -> None:
    code = "import superbatch.torch"
    done = subprocess.run(
        [installed, "-c", code], cwd=installed.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "No module named 'torch'" in done.stderr
