"""A process that has imported torch once and forks for each program it is asked to run: `tests.forked` asks.

    python -m tests.fork_server CHANNEL        CHANNEL: the descriptor of a socket

A request is the JSON of a `Request` and four descriptors: standard input, output and errors, and a socket
on which come the program's process id, when it runs, and its exit code, when it has ended.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import socket
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 18  # bytes of a request
FORKS = sys.platform == "linux"  # elsewhere libraries start threads, and a program is started anew
# Costly to import, and imported by most programs of the tests. None of them may start a thread.
PRELOADED = (
    "torch",
    "superbatch.torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "sklearn.datasets",
    "matplotlib.pyplot",
    "superbatch.lab.cli",
)
# sklearn.datasets imports pandas, which imports pyarrow where it is installed, which starts threads.
THREADED = {"sklearn.datasets": "pyarrow"}


@dataclass(frozen=True)
class Request:
    """A program: what follows `python` in its command line, where it runs, and whether in a new session."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    session: bool


def main() -> None:
    """Serve until the other side is closed; in a fork, be the program that was asked for."""
    if FORKS:
        _preload()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        request = _serve(channel)
    if request is not None:
        _become(request)


def _preload() -> None:
    for name in PRELOADED:
        if _is_installed(name) and not _is_installed(THREADED.get(name, "")):
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork has one of them, and the locks of all"
    gc.collect()
    gc.freeze()  # no collection of a fork looks through it, and copies its pages


def _is_installed(name: str) -> bool:
    package = name.partition(".")[0]
    return bool(package) and importlib.util.find_spec(package) is not None


def _serve(channel: socket.socket) -> Request | None:
    """The request, in the fork that is to answer it; None when there is none any more."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, LARGEST, 4)
        if not message:
            return None
        watcher = os.fork()
        if watcher == 0:
            return _watched(Request(**json.loads(message)), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def _reap() -> None:
    """Let those that have ended go."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # there is none


def _watched(request: Request, *descriptors: int) -> Request:
    """Fork the program, which returns from here; this process stays to tell how the program ends."""
    *streams, status = descriptors
    child = os.fork()  # its socket to the tests is closed as soon as it returns
    if child == 0:
        if request.session:
            os.setsid()
        os.write(status, b"%d\n" % os.getpid())
        os.close(status)
        for here, stream in enumerate(streams):
            os.dup2(stream, here)
    for stream in streams:
        os.close(stream)
    if child == 0:
        return request
    try:
        _, how = os.waitpid(child, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(how))
    finally:
        os._exit(0)


def _become(request: Request) -> None:
    """Run the program, as `python` with these arguments would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # pyright: ignore[reportAttributeAccessIssue]  (TextIO has none, what it is here has)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if not FORKS:
        os.execv(sys.executable, [sys.executable, *request.arguments])
    rest, options = list(request.arguments), list[str]()
    while rest[0] == "-W":
        options.append(rest[1])
        del rest[:2]
    _filter_as_told(options)
    if rest[0] == "-m":
        sys.argv, sys.path[0] = rest[1:], request.folder
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif rest[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[2:]], ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[1], "<string>", "exec"), vars(module))
    else:
        sys.argv, sys.path[0] = rest, os.path.dirname(rest[0])
        runpy.run_path(rest[0], run_name="__main__")


def _filter_as_told(options: list[str]) -> None:
    """Put the options -W where this process has its own: before Python's filters, behind those of imports."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for option in options:
            _filter(option)
        told = list(warnings.filters)
    filters: Any = warnings.filters
    (own,) = [place for place, (action, text, *_) in enumerate(filters) if (action, text) == ("error", None)]
    filters[own : own + 1] = told
    sys.warnoptions[:] = options  # for processes that the program starts
    with warnings.catch_warnings():
        pass  # which forgets what was looked up with the filters of before


def _filter(option: str) -> None:
    """Python's option -W: ACTION or ACTION:TEXT:CATEGORY, both literal."""
    action: Any
    action, _, more = option.partition(":")
    if not more:
        warnings.simplefilter(action)
        return
    text, _, category = more.rpartition(":")
    warnings.filterwarnings(action, re.escape(text), getattr(builtins, category))


if __name__ == "__main__":
    main()
