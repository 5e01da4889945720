"""Run the command line in this process, in a child process, or on a pseudo-terminal."""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from superbatch.lab.cli import main
from tests.forked import Forked
from tests.report_json import from_json
from tests.studies import own_recipe

ROOT = Path(__file__).resolve().parents[2]
PLANE = f"{own_recipe.__file__}:plane"
# An error message: one line that states the problem, then the remedy in the imperative.
IMPERATIVE = (
    "Add|Choose|Close|Compare|Drop|Give|Install|Leave|Name|Pass|Read|Return|Run|"
    "See superbatch|Set|Start|Take|Unset|Use|Write"
)
ONE_LINE = rf"superbatch: .+[.?] ({IMPERATIVE}) .+\."
PNG = b"\x89PNG\r\n\x1a\n"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Report = TypeVar("Report")


def run(*arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    return main([*arguments])


_TALKATIVE = (
    "import sys; import superbatch.lab.cli.progress as progress; progress.LINE_EVERY = 0.1; "
    "from superbatch.lab.cli import main; sys.exit(main(sys.argv[1:]))"
)


def process(*arguments: str, talkative: bool = False, streams: Sequence[int] | None = None) -> Forked:
    """Start the command line as a child process in its own session, so that it receives interrupts.

    With `talkative`, it prints its progress every 0.1 seconds, so that a test need not wait.
    """
    # The terminal gives its own width; pytest-xdist would set these variables to 80 columns.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Forked(
        [*(("-c", _TALKATIVE) if talkative else ("-m", "superbatch")), *arguments],
        folder=Path.cwd(),
        environment=environment,
        streams=streams,
        session=True,
    )


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines of code in a fresh interpreter, which has imported nothing yet."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def on_a_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the text shown on a pseudo-terminal of `columns`, without colours."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with process(*arguments, streams=(theirs, theirs, theirs)) as started:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            shown += piece
        os.close(ours)
        code = started.wait(60)
    assert code is not None
    return code, without_colours(shown.decode())


def without_colours(text: str) -> str:
    """Remove the escape sequences of colours."""
    return _COLOURS.sub("", text)


def error_lines(started: Forked, *, seconds: float) -> Iterator[str]:
    """Yield each line of stderr as it comes; fail if none comes within `seconds`."""
    for number in itertools.count():
        end = time.monotonic() + seconds
        while len(lines := started.output()[1].split("\n")) < number + 2:
            assert time.monotonic() < end, "no output in time"
            assert started.poll() is None, started.output()
            time.sleep(0.01)
        yield lines[number]


def first_line(started: Forked, *, seconds: float) -> str:
    """Return the first line of stderr; fail if none comes within `seconds`."""
    return next(error_lines(started, seconds=seconds))


def read(kind: type[Report], folder: Path) -> Report:
    """Read the report in a folder of results."""
    return from_json(kind, (folder / "report.json").read_text(encoding="utf-8"))
