"""Run Python programs as child processes without importing torch again in each.

Each process of the tests has one server (`tests.fork_server`). It imports torch once and forks for each
program. A program has its own interpreter state, arguments, environment, folder, output and exit code.
Use `subprocess` for a test of the start of Python or torch: variables of the allocator or of OpenMP,
the modules that an import loads, the memory of a fresh process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.fork_server import LARGEST, Request

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120.0  # seconds


class Forked:
    """A running program; leaving the `with` block kills it if it still runs.

    Args:
        arguments: arguments after ``python``: ``-W``, then ``-m``, ``-c`` or a file.
        folder: working folder.
        environment: environment variables (default: those of this process).
        merged: write stderr to the same file as stdout.
        streams: descriptors of stdin, stdout and stderr (default: no input; `output` returns the rest).
        session: start in a new session, and so in a new process group.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        merged: bool = False,
        streams: Sequence[int] | None = None,
        session: bool = False,
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        self._session = session
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._errors = self._output if merged else tempfile.TemporaryFile()  # noqa: SIM115
        if streams is None:
            streams = (_nothing(), self._output.fileno(), self._errors.fileno())
        variables = dict(os.environ if environment is None else environment)
        request = Request(self.arguments, str(folder), variables, session)
        message = json.dumps(asdict(request)).encode()
        assert len(message) < LARGEST, "the program is too long for a request: put it into a file"
        self._status, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_server()[1], [message], [*streams, theirs.fileno()])
        self._said = b""
        pid = self._number(PATIENCE)
        assert pid is not None, "the server does not answer"
        self.pid = pid

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        self.end()

    def _number(self, seconds: float) -> int | None:
        """Return the next number that the server sends, or None if none comes in time."""
        end = time.monotonic() + seconds
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._status], [], [], max(end - time.monotonic(), 0.0))
            if not ready:
                return None
            more = self._status.recv(64)
            assert more, "the fork server has ended"
            self._said += more
        number, _, self._said = self._said.partition(b"\n")
        return int(number)

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        return self.wait(0.0)

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """Return the exit code, or None if the program still runs after `seconds`."""
        if self.returncode is None:
            self.returncode = self._number(seconds)
        return self.returncode

    def finish(self, seconds: float = PATIENCE) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr; raise TimeoutExpired after `seconds`."""
        if self.wait(seconds) is None:
            raise subprocess.TimeoutExpired(self.arguments, seconds, *self.output())
        return self.output()

    def kill(self) -> None:
        """Kill the program if it still runs."""
        if self.poll() is None:
            (os.killpg if self._session else os.kill)(self.pid, signal.SIGKILL)
            self.wait()

    def output(self) -> tuple[str, str]:
        """Return stdout and stderr so far."""
        return _text(self._output), "" if self._errors is self._output else _text(self._errors)

    def end(self) -> None:
        """Kill the program and close its files and its socket."""
        self.kill()
        for open_file in (self._status, self._output, self._errors):
            open_file.close()


def run(
    arguments: Sequence[object],
    *,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    seconds: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; kill it and raise TimeoutExpired after `seconds`."""
    with Forked(arguments, folder=folder, environment=environment) as program:
        output, errors = program.finish(seconds)
        assert program.returncode is not None
        return subprocess.CompletedProcess(program.arguments, program.returncode, output, errors)


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


@functools.cache
def _nothing() -> int:
    return os.open(os.devnull, os.O_RDONLY)


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return the server of this process and the socket to it; the first call starts the server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.fork_server", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(close)
    return server, ours


def close() -> None:
    """End the server if it was started."""
    if _server.cache_info().currsize:
        server, channel = _server()
        channel.close()
        server.wait()
        _server.cache_clear()
