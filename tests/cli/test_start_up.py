"""Start of the command line: imports, missing packages, version, unknown commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from superbatch.lab.cli import main
from tests.cli import commands
from tests.cli.commands import PLANE


def test_help_and_import_load_no_framework() -> None:
    code = """
import sys
from superbatch.lab.cli import main
assert main(["--help"]) == 0 and main(["compare", "--help"]) == 0
heavy = {"torch", "matplotlib", "numpy", "scipy", "sklearn"} & set(sys.modules)
print("heavy:", *heavy)
"""
    done = commands.python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
    assert "--include-wrong" in done.stdout


@pytest.mark.parametrize("package", ["typer", "torch", "matplotlib"])
def test_a_missing_package_is_named(package: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from superbatch.lab.cli import main
short = ["--runs", "1", "--updates", "1", "--splits", "4x5", "--workers", "1"]
sys.exit(main(["compare", {PLANE!r}, *short, "--out", {str(tmp_path)!r}]))
"""
    done = commands.python(code)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        f"he package {package} is not installed. Install superbatch[torch,cli]."
    )
    assert "Traceback" not in done.stderr


def test_version_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.match(r"superbatch \d", capsys.readouterr().out)
    assert main(["compere"]) == 2
    assert "No such command 'compere'" in capsys.readouterr().err
