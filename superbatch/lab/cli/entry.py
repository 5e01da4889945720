"""Entry point of the installed command. It imports no dependency, so that it can report a missing one."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .exits import INTERRUPTED, NOT_WRITTEN, NOTHING_KEPT, PIPE_CLOSED, WRONG_INPUT

OPTIONAL = ("torch", "typer", "rich", "jinja2", "scipy", "matplotlib", "numpy", "sklearn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: without the name of the program; None for those of the process.

    Examples:
        >>> main(["--version"])
        superbatch ...
        0
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from .app import main as run

        with terminated_as_interrupted():
            code = run(arguments)
            sys.stdout.flush()  # a failure at the interpreter's exit would not reach the handlers below
        return code
    except (BrokenPipeError, SystemExit) as error:
        # rich turns a closed pipe into exit code 1.
        if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
            raise
        _silence()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
            raise
        where = f" {str(error.filename)!r}" if error.filename else ""
        print(f"superbatch: the output{where} could not be written: {error.strerror}", file=sys.stderr)
        _silence()
        return NOT_WRITTEN
    except KeyboardInterrupt:  # also while packages are imported, which takes seconds
        print(NOTHING_KEPT, file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in OPTIONAL:
            raise
        print(
            f"superbatch: The package {package} is not installed. Install superbatch[torch,cli].",
            file=sys.stderr,
        )
        return WRONG_INPUT


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that the command writes its partial report as after Ctrl-C.

    Does nothing outside the main thread, which alone may set handlers, or if SIGTERM has a handler already.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _silence() -> None:
    """Discard the rest of the standard output: flushing it when the interpreter exits would fail again."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass  # the standard output is no file, for example in a test
