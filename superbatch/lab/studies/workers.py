"""Train the seeds of a study in this process or in several worker processes.

Worker processes are *spawned*, because a forked framework can hang. Each loads the recipe by its name and
limits torch to the threads of the options. Workers ignore Ctrl-C, which reaches the whole process group: the
parent stops them and keeps the finished runs. A worker whose parent has ended exits.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from superbatch.errors import SuperbatchError

from ..recipes import Recipe
from ..recipes.failing import recipe_failure
from .backends import load_backend
from .shared_options import Progress, Show

REPORT_EVERY = 0.2  # seconds between two messages about progress

# Units of work done since the last event; or the index of an arm, with a finished run of it.
Event = int | tuple[int, Any]
# Trains every arm: (recipe, seed=, tick=) -> pairs (index of an arm, its run). `tick` takes the units of work
# done since its last call. A worker process unpickles it: a function of a module, or a `partial` of one.
Train = Callable[..., Iterator[tuple[int, Any]]]


@dataclass
class Receiver:
    """Collects the finished runs of each arm and shows the progress."""

    names: Sequence[str]  # of the arms
    total: int  # units of work of all runs
    progress: Show
    value: Callable[[Any], float | None]  # a run -> the number that is shown when it is finished
    done: int = 0  # units of work

    def __post_init__(self) -> None:
        self.runs: list[list[Any]] = [[] for _ in self.names]  # finished runs of each arm

    def __call__(self, event: Event) -> None:
        """Record an event."""
        latest = None
        if isinstance(event, int):
            self.done += event
        else:
            arm, run = event
            self.runs[arm].append(run)
            latest = run.seed, self.names[arm], self.value(run)
        # The last batch of a run may have more samples than were left, so the sum may exceed the total.
        self.progress(Progress(min(self.done, self.total), self.total, latest))


def train_seeds(
    recipe: str | Recipe,
    resolved: Recipe,
    train: Train,
    seeds: Sequence[int],
    receiver: Receiver,
    *,
    options: Any,  # of the command, with workers, threads and data
    backend: str = "torch",
) -> None:
    """Train the seeds in `options.workers` processes; in this one if that is 1 or `recipe` is an object."""
    count = min(options.workers, len(seeds))
    if count == 1 or not isinstance(recipe, str):
        train_here(resolved, train, seeds, receiver)
        return
    context = multiprocessing.get_context("spawn")
    todo, events = context.Queue(), context.Queue()
    for seed in (*seeds, *[None] * count):  # None ends a worker
        todo.put(seed)
    load = backend, recipe, options.data, options.threads
    processes = [
        context.Process(target=_work, args=(load, train, todo, events), daemon=True) for _ in range(count)
    ]
    try:
        with _interrupts_ignored_by_children():
            for process in processes:
                process.start()
        _listen(processes, events, receiver, runs=len(seeds) * len(receiver.runs))
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join()
        for each in (todo, events):
            each.cancel_join_thread()
            each.close()


def train_here(recipe: Recipe, train: Train, seeds: Sequence[int], receive: Callable[[Event], None]) -> None:
    """Train the seeds one after the other in this process."""
    tick, flush = _throttled(receive)
    for seed in seeds:
        for arm, run in train(recipe, seed=seed, tick=tick):
            flush()
            receive((arm, run))


def _listen(processes: Sequence[Any], events: Any, receiver: Receiver, *, runs: int) -> None:
    """Pass on the workers' events until all runs are finished; raise the error of a worker."""
    while runs:
        try:
            event = events.get(timeout=1.0)
        except queue.Empty:
            # A worker that the system has killed reports nothing: only its exit code shows it.
            if any(process.exitcode not in (None, 0) for process in processes):
                codes = [process.exitcode for process in processes]
                raise SuperbatchError(
                    f"One of {len(processes)} worker processes ended without a report (exit codes {codes}). "
                    "If memory ran out, use fewer workers, or 1 to train in this process."
                ) from None
            continue
        if isinstance(event, Exception):
            raise event
        runs -= isinstance(event, tuple)
        receiver(event)


def _work(load: tuple[str, str, Any, int], train: Train, todo: Any, events: Any) -> None:
    """Train seeds in a worker process until there are none left or the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def put(event: Event) -> None:
        if parent is not None and not parent.is_alive():
            sys.exit(1)
        events.put(event)

    try:
        backend_name, name, data, threads = load
        backend = load_backend(backend_name)
        with backend.threads(threads):
            recipe = backend.load(name, data)
            while (seed := todo.get()) is not None:
                train_here(recipe, train, [seed], put)
    except Exception as error:  # noqa: BLE001  (the parent raises it)
        if not isinstance(error, SuperbatchError):
            # An exception of the user's own class may not unpickle in the parent; its text does.
            text = " ".join(f"A worker process raised {type(error).__name__}: {error}".split())
            error = recipe_failure(error) or SuperbatchError(text)
        events.put(error)


def _throttled(receive: Callable[[Event], None]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return a tick that passes on sums every `REPORT_EVERY` seconds, and a function that passes on the rest.

    A message for each update would cost more than a small update.
    """
    pending, last = 0, time.monotonic()

    def tick(work: int) -> None:
        nonlocal pending
        pending += work
        if time.monotonic() - last > REPORT_EVERY:
            flush()

    def flush() -> None:
        nonlocal pending, last
        receive(pending)
        pending, last = 0, time.monotonic()

    return tick, flush


@contextmanager
def _interrupts_ignored_by_children() -> Iterator[None]:
    """Block SIGINT and delay SIGTERM while children start.

    Children inherit the signal mask, so Ctrl-C never makes one print a traceback. A SIGTERM that arrives
    inside the block is raised at its end: a process that is only half started would not be stopped. SIGTERM
    is not blocked, because then children could not be terminated.
    """
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    delayed: list[int] = []
    # Only the main thread can set a handler, and only there signals are handled.
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    if handler is not None:
        signal.signal(signal.SIGTERM, lambda number, _: delayed.append(number))
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if delayed:
            signal.raise_signal(signal.SIGTERM)
