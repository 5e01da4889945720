"""The command line as tests run it: in this process, in one of its own, on a terminal."""

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
# What is wrong, then what to type instead, as one line.
IMPERATIVE = (
    "Add|Choose|Close|Compare|Drop|Give|Install|Leave|Name|Pass|Read|Return|Run|"
    "See superbatch|Set|Start|Take|Unset|Use|Write"
)
ONE_LINE = rf"superbatch: .+[.?] ({IMPERATIVE}) .+\."
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


def process(*arguments: str, talkative: bool = False, streams: Sequence[int] | None = None) -> Forked:
    """The command line as a process of its own, in a session of its own, that hears interrupts.

    Talkative, it says every 0.1 seconds how far it is, so that a test need not wait.
    """
    # A terminal says itself how wide it is; where tests run in several processes, these say 80.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Forked(
        [*(("-c", _TALKATIVE) if talkative else ("-m", "superbatch")), *arguments],
        folder=Path.cwd(),
        environment=environment,
        streams=streams,
        session=True,
    )


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A program of a few lines, run to its end in an interpreter of its own, which has loaded nothing."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def on_a_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """Exit code and everything shown on a pseudo-terminal of that width, colours removed."""
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
            except OSError:  # how Linux says that the other end is closed
                break
            if not piece:
                break
            shown += piece
        os.close(ours)
        code = started.wait(60)
    assert code is not None
    return code, without_colours(shown.decode())


def without_colours(text: str) -> str:
    """What a terminal shows, as text."""
    return _COLOURS.sub("", text)


def lines_told(started: Forked, *, seconds: float) -> Iterator[str]:
    """Each line of its errors as it comes, or a failure if none comes in time."""
    for number in itertools.count():
        end = time.monotonic() + seconds
        while len(lines := started.output()[1].split("\n")) < number + 2:
            assert time.monotonic() < end, "nothing was said in time"
            assert started.poll() is None, started.output()
            time.sleep(0.01)
        yield lines[number]


def first_line(started: Forked, *, seconds: float) -> str:
    """The first line of its errors, or a failure if none comes in time."""
    return next(lines_told(started, seconds=seconds))


def read(kind: type[Report], folder: Path) -> Report:
    """The report in a folder of results."""
    return from_json(kind, (folder / "report.json").read_text(encoding="utf-8"))
