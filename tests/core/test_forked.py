"""A forked program runs as in a fresh `python`, isolated from other programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fork_server, forked
from tests.forked import Forked

SAYS = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("MINE"), __name__, sys.stdin.read(), os.getsid(0)]))
print("an error", file=sys.stderr)
sys.exit(3)
"""


def test_a_forked_program_equals_a_python_process(tmp_path: Path) -> None:
    """Compare arguments, folder, environment, streams and exit code."""
    environment = {**os.environ, "MINE": "yes"}
    done = forked.run(["-c", SAYS, "a", 1], folder=tmp_path, environment=environment)
    plain = subprocess.run(
        [sys.executable, "-c", SAYS, "a", "1"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert plain.returncode == 3 and "yes" in plain.stdout


def test_a_module_and_a_file_run(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys, beside; print(__name__, sys.argv[1:], beside.X)\n")
    (tmp_path / "beside.py").write_text("X = 5\n")
    assert forked.run([file, "a"]).stdout == "__main__ ['a'] 5\n"
    assert forked.run(["-m", "program", "b"], folder=tmp_path).stdout == "__main__ ['b'] 5\n"


def test_warnings_are_filtered_as_python_does() -> None:
    code = "import warnings; warnings.warn('old: x', DeprecationWarning); print('on')"
    assert forked.run(["-W", "error", "-c", code]).stderr.endswith("DeprecationWarning: old: x\n")
    assert forked.run(["-c", code]).stderr.startswith("<string>:1: DeprecationWarning: old: x\n"), (
        "by default"
    )
    spared = forked.run(["-W", "error", "-W", "ignore:old:DeprecationWarning", "-c", code])
    assert (spared.returncode, spared.stdout, spared.stderr) == (0, "on\n", "")


def test_changes_of_one_program_are_invisible_to_others() -> None:
    code = "import os, sys; print('L' in os.environ, hasattr(sys, 'l')); os.environ['L'] = 'x'; sys.l = 1"
    assert [forked.run(["-c", code]).stdout for _ in range(2)] == ["False False\n"] * 2


def test_a_program_that_hangs_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(["-c", "import time; print('here', flush=True); time.sleep(60)"], seconds=0.5)
    with Forked(["-c", "import time; time.sleep(60)"], session=True) as program:
        assert program.poll() is None
        program.kill()
        assert program.returncode == -signal.SIGKILL


def test_programs_run_concurrently_and_receive_interrupts() -> None:
    waits = "import time; print('ready', flush=True); time.sleep(60)"
    with Forked(["-c", waits], merged=True) as one, Forked(["-c", waits], session=True) as other:
        for program in (one, other):
            while not program.output()[0]:
                assert program.poll() is None
            time.sleep(0.2)  # wait until it sleeps: before, Python may lose an interrupt in a finalizer
            os.kill(program.pid, signal.SIGINT)
        assert "KeyboardInterrupt" in one.finish(10)[0]
        assert "KeyboardInterrupt" in other.finish(10)[1]
        assert one.returncode == other.returncode == -signal.SIGINT


@pytest.mark.skipif(not fork_server.FORKS, reason="elsewhere each program is started anew")
def test_torch_is_preloaded_without_its_threads() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    code = "import os, sys; print('torch' in sys.modules, len(os.listdir('/proc/self/task')))"
    assert forked.run(["-c", code]).stdout == "True 1\n"
