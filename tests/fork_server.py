"""Server that imports torch once and forks for each program that `tests.forked` requests.

    python -m tests.fork_server CHANNEL        CHANNEL: the descriptor of a socket

A request is the JSON of a `Request` and four descriptors: stdin, stdout, stderr and a socket. The server
writes to that socket the program's process id at its start, and its exit code at its end.
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
FORKS = sys.platform == "linux"  # elsewhere libraries start threads, and each program is a new interpreter
# Slow imports that most programs of the tests need. None of them may start a thread.
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
# sklearn.datasets imports pandas, pandas imports pyarrow if it is installed, and pyarrow starts threads.
THREADED = {"sklearn.datasets": "pyarrow"}


@dataclass(frozen=True)
class Request:
    """A program: arguments after `python`, working folder, environment, and a flag for a new session."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    session: bool


def main() -> None:
    """Serve until the other side is closed; in a fork, run the requested program."""
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
    gc.freeze()  # so that the garbage collector of a fork does not touch, and so copy, these pages


def _is_installed(name: str) -> bool:
    package = name.partition(".")[0]
    return bool(package) and importlib.util.find_spec(package) is not None


def _serve(channel: socket.socket) -> Request | None:
    """Serve requests; return the request in the fork that runs it, and None in the server at the end."""
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
    """Reap the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # no child is left


def _watched(request: Request, *descriptors: int) -> Request:
    """Fork the program and return in the child; the parent waits and reports its exit code."""
    *streams, status = descriptors
    child = os.fork()  # `main` closes the channel of the child after this returns
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
    """Run the program as `python` would with these arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # pyright: ignore[reportAttributeAccessIssue]  (TextIO lacks the method, TextIOWrapper has it)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if not FORKS:
        os.execv(sys.executable, [sys.executable, *request.arguments])
    rest, options = list(request.arguments), list[str]()
    while rest[0] == "-W":
        options.append(rest[1])
        del rest[:2]
    _add_warning_filters(options)
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


def _add_warning_filters(options: list[str]) -> None:
    """Replace this process's own -W filter by `options`: before Python's filters, after those of imports."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for option in options:
            _filter(option)
        added = list(warnings.filters)
    filters: Any = warnings.filters
    (own,) = [place for place, (action, text, *_) in enumerate(filters) if (action, text) == ("error", None)]
    filters[own : own + 1] = added
    sys.warnoptions[:] = options  # for processes that the program starts
    with warnings.catch_warnings():
        pass  # clears the cache of earlier filter look-ups


def _filter(option: str) -> None:
    """Add the filter of one option -W: ACTION or ACTION:TEXT:CATEGORY, both literal."""
    action: Any
    action, _, more = option.partition(":")
    if not more:
        warnings.simplefilter(action)
        return
    text, _, category = more.rpartition(":")
    warnings.filterwarnings(action, re.escape(text), getattr(builtins, category))


if __name__ == "__main__":
    main()
