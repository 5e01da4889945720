"""The script ./run with a stand-in for python3: messages, and the environment after failures.

CI uses the real script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stand-in for python3: makes a "virtual environment" with itself as its python, and records its calls.
PYTHON = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
"-c import sys;"*) exit ${TOO_OLD:-0} ;;
"-c import venv"*) exit ${NO_VENV:-0} ;;
"-V") echo "Python 3.9.2" ;;
"-m venv"*) for last; do :; done; mkdir -p "$last/bin"; : >"$last/pyvenv.cfg"; cp "$0" "$last/bin/python"
            printf '#!/bin/sh\\necho "superbatch $*"\\n' >"$last/bin/superbatch"
            chmod +x "$last/bin/superbatch" ;;
"-m pip install"*) exit ${PIP_FAILS:-0} ;;
"-m pytest"*) echo "pytest runs in $PWD" ;;
esac
"""


class Machine:
    """A folder with a clone of the script, a stand-in for python3 on the PATH, and no GPU."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.bin, self.calls = folder / "clone", folder / "bin", folder / "calls"
        self.clone.mkdir()
        self.bin.mkdir()
        for name in ("run", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.clone / name)
        for tool in ("cat", "cksum", "cp", "chmod", "dirname", "mkdir", "rm", "sed"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.add("python3", PYTHON)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Return the exit code and the output."""
        self.calls.write_text("")
        done = subprocess.run(
            ["/bin/sh", self.clone / "run", *arguments],
            cwd=self.clone.parent,
            env={"PATH": str(self.bin), "CALLS": str(self.calls), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def installations(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("-m pip install")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_call_installs_and_the_second_does_not(machine: Machine) -> None:
    code, printed = machine.run("compare", "--runs", "2")
    assert (code, printed.splitlines()[-1]) == (0, "superbatch compare --runs 2")
    (line,) = machine.installations()
    assert "[torch,cli]" in line
    assert f"-c {machine.clone}/constraints.txt" in line
    code, printed = machine.run("compare")
    assert (code, printed) == (0, "superbatch compare\n"), "no set-up, no output"
    assert not machine.installations()


def test_more_extras_are_installed_when_a_command_needs_them(machine: Machine) -> None:
    assert machine.run("compare")[0] == 0
    code, printed = machine.run("test", "-k", "window")
    assert code == 0
    assert f"pytest runs in {machine.clone}" in printed
    assert len(machine.installations()) == 1
    assert machine.run("compare")[0] == 0
    assert not machine.installations(), "the test extra includes what compare needs"


def test_the_benchmarks_have_their_own_run(machine: Machine) -> None:
    assert machine.run("test")[0] == 0
    assert machine.run("test-benchmarks", "-k", "memory")[0] == 0
    assert not machine.installations(), "in the same environment"
    assert "-m benchmarks and not slow -k memory" in machine.calls.read_text()


def test_the_other_backends_have_their_own_environment_and_run(machine: Machine) -> None:
    assert machine.run("test")[0] == 0
    code, printed = machine.run("test-backends", "-k", "contract")
    assert code == 0
    assert f"pytest runs in {machine.clone}" in printed
    (line,) = machine.installations()
    assert "[test-backends]" in line
    assert (machine.clone / ".venv-backends" / "pyvenv.cfg").exists()
    assert "(jax or tensorflow or keras) and not slow -k contract" in machine.calls.read_text()
    assert machine.run("test")[0] == 0
    assert not machine.installations(), "the environment of the other tests is unchanged"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_the_requirements_installs_again(machine: Machine, name: str) -> None:
    assert machine.run("compare")[0] == 0
    with (machine.clone / name).open("a") as file:
        file.write("# changed\n")
    assert machine.run("compare")[0] == 0
    assert len(machine.installations()) == 1


def test_a_failed_installation_is_reported_and_repeated(machine: Machine) -> None:
    code, printed = machine.run("compare", PIP_FAILS="1")
    assert code != 0
    assert "the installation failed" in printed
    assert "superbatch compare" not in printed
    code, printed = machine.run("compare")
    assert code == 0
    assert len(machine.installations()) == 1


def test_a_failed_upgrade_does_not_leave_the_old_stamp(machine: Machine) -> None:
    assert machine.run("compare")[0] == 0
    assert machine.run("test", PIP_FAILS="1")[0] != 0
    assert machine.run("compare")[0] == 0
    assert len(machine.installations()) == 1, "a broken installation is repeated"


def test_an_environment_without_a_working_python_is_rebuilt(machine: Machine) -> None:
    assert machine.run("compare")[0] == 0
    (machine.clone / ".venv" / "bin" / "python").unlink()
    assert machine.run("compare")[0] == 0
    assert len(machine.installations()) == 1


def test_the_environment_can_lie_elsewhere(machine: Machine, tmp_path: Path) -> None:
    assert machine.run("compare", SUPERBATCH_VENV=str(tmp_path / "else where"))[0] == 0
    assert (tmp_path / "else where" / "pyvenv.cfg").exists()
    assert not (machine.clone / ".venv").exists()


def test_a_folder_that_is_not_an_environment_is_left_unchanged(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    code, printed = machine.run("compare", SUPERBATCH_VENV=str(tmp_path / "mine"))
    assert code != 0
    assert "is not a virtual environment" in printed
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_with_a_gpu_torch_is_not_constrained(machine: Machine) -> None:
    machine.add("nvidia-smi", "#!/bin/sh\n")
    assert machine.run("compare")[0] == 0
    assert "constraints.txt" not in machine.installations()[0]


def test_an_old_python_is_named(machine: Machine) -> None:
    code, printed = machine.run("compare", TOO_OLD="1")
    assert code != 0
    assert "needs Python 3.10 or newer, and 'python3' is Python 3.9.2" in printed
    assert not (machine.clone / ".venv").exists()


def test_a_python_without_venv_says_what_to_install(machine: Machine) -> None:
    code, printed = machine.run("compare", NO_VENV="1")
    assert code != 0
    assert "apt install python3-venv" in printed
    assert not (machine.clone / ".venv").exists()


def test_no_python_at_all(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    code, printed = machine.run("compare")
    assert code != 0
    assert "'python3' was not found" in printed


def test_help_and_unknown_commands(machine: Machine) -> None:
    code, printed = machine.run("help")
    assert code == 0
    assert "./run compare" in printed
    assert machine.run()[1] == printed
    code, printed = machine.run("comapre")
    assert code != 0
    assert "no command 'comapre'" in printed


def test_the_real_interpreter_passes_the_checks_of_the_script(machine: Machine) -> None:
    """The checks run with a real python instead of the stand-in, up to the installation."""
    (machine.bin / "python3").unlink()
    (machine.bin / "python3").symlink_to(sys.executable)
    for tool in ("nvidia-smi", "pip"):
        assert not (machine.bin / tool).exists()
    os.truncate(machine.clone / "pyproject.toml", 0)  # so that pip has nothing to install
    code, printed = machine.run("compare", PIP_NO_INDEX="1")
    assert code != 0
    assert "making a virtual environment" in printed
    assert "the installation failed" in printed
    assert not (machine.clone / ".venv" / ".superbatch").exists()
