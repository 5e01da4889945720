"""The command line as tests run it: in this process, in one of its own, on a terminal."""

from __future__ import annotations

import os
import re
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, TypeVar

from superbatch.lab.cli import main
from superbatch.lab.report.json import from_json
from tests.studies import own_recipe

ROOT = Path(__file__).resolve().parents[2]
PLANE = f"{own_recipe.__file__}:plane"
PNG = b"\x89PNG\r\n\x1a\n"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Report = TypeVar("Report")


def run(*arguments: str) -> int:
    """The exit code of the command line, run in this process."""
    return main([*arguments])


_TALKATIVE = (
    "import sys; import superbatch.lab.cli.progress as progress; progress.LINE_EVERY = 0.1; "
    "from superbatch.lab.cli import main; sys.exit(main(sys.argv[1:]))"
)


def process(*arguments: str, talkative: bool = False, **options: object) -> subprocess.Popen[str]:
    """The command line as a process of its own, in a session of its own, that hears interrupts.

    Talkative, it says every 0.1 seconds how far it is, so that a test need not wait.
    """
    # Tests that run in the background may ignore interrupts, and a child inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # A terminal says itself how wide it is; where tests run in several processes, these say 80.
    surroundings = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    try:
        return subprocess.Popen(
            [sys.executable, *(("-c", _TALKATIVE) if talkative else ("-m", "superbatch")), *arguments],
            env={**surroundings, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},  # pyright: ignore[reportArgumentType, reportCallIssue]  (keyword arguments by name)
        )
    finally:
        signal.signal(signal.SIGINT, before)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A program of a few lines, run to its end."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def on_a_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """Exit code and everything shown on a pseudo-terminal of that width, colours removed."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    started = process(*arguments, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return started.wait(timeout=60), without_colours(shown.decode())


def without_colours(text: str) -> str:
    """What a terminal shows, as text."""
    return _COLOURS.sub("", text)


def first_line(stream: IO[str] | None, *, seconds: float) -> str:
    """The next line of a pipe, or a failure if none comes in time."""
    assert stream is not None
    ready, _, _ = select.select([stream], [], [], seconds)
    assert ready, "nothing was said in time"
    return stream.readline()


def read(kind: type[Report], folder: Path) -> Report:
    """The report in a folder of results."""
    return from_json(kind, (folder / "report.json").read_text(encoding="utf-8"))
