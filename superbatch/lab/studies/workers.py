"""Train the seeds of a comparison, in this process or spread over several.

Worker processes are *spawned* (a forked framework can hang), find the recipe by its name, and keep torch's
threads to what was asked. They ignore Ctrl-C, which reaches the whole process group: the parent stops them,
so that runs that are already finished can be kept. A worker whose parent is gone ends by itself.
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
from pathlib import Path
from typing import Any

from superbatch.errors import SuperbatchError

from ..recipes import Recipe
from ..recipes.failing import recipe_failure
from .backends import load_backend
from .shared_options import Progress
from .training import train_seed

REPORT_EVERY = 0.2  # seconds between two messages about progress


@dataclass(frozen=True)
class Advanced:
    """Some micro-batches were processed."""

    microbatches: int


@dataclass(frozen=True)
class Finished:
    """A run is complete; `run` is the record that the training function made of it."""

    arm: int
    run: Any


@dataclass(frozen=True)
class Failed:
    """A worker met an error."""

    error: BaseException


Event = Advanced | Finished
Receive = Callable[[Event], None]
Load = tuple[str, str, str | Path | None]  # backend, recipe and data, for a worker to load them


# (recipe, setting, seed, tick=) -> every arm, as (its index, its run); `tick` takes the work done since its
# last call. It is a function of a module, so that other processes find it, and the setting, which has the
# attribute ``arms``, can be sent to them.
Train = Callable[..., Iterator[tuple[int, Any]]]


def receiver(
    total: int,
    finished: Sequence[list[Any]],
    progress: Callable[[Progress], None],
    names: Sequence[str],
    value: Callable[[Any], float | None],
) -> Receive:
    """Make the function that keeps the runs of each arm and shows progress: seed, arm and value of a run."""
    done = 0

    def receive(event: Event) -> None:
        nonlocal done
        latest = None
        if isinstance(event, Advanced):
            done += event.microbatches
        else:
            finished[event.arm].append(event.run)
            latest = event.run.seed, names[event.arm], value(event.run)
        progress(Progress(min(done, total), total, latest))

    return receive


def train_seeds(
    recipe: str | Recipe,
    loaded: Recipe,
    setting: Any,
    seeds: Sequence[int],
    receive: Receive,
    *,
    options: Any,  # of the command, with workers, threads and data
    train: Train = train_seed,
    backend: str = "torch",
) -> None:
    """Train the seeds in this process, or in several where that is asked for and a name loads the recipe."""
    if min(options.workers, len(seeds)) == 1 or not isinstance(recipe, str):
        train_here(loaded, setting, seeds, receive, train=train)
    else:
        train_spread((backend, recipe, options.data), setting, seeds, receive, options=options, train=train)


def train_here(
    recipe: Recipe, setting: Any, seeds: Sequence[int], receive: Receive, *, train: Train = train_seed
) -> None:
    """Train the seeds one after the other in this process."""
    tick, flush = _gathered(receive)
    for seed in seeds:
        for arm, run in train(recipe, setting, seed, tick=tick):
            flush()
            receive(Finished(arm, run))


def train_spread(
    load: Load, setting: Any, seeds: Sequence[int], receive: Receive, *, options: Any, train: Train
) -> None:
    """Train the seeds in processes of their own; each takes the next seed when it has finished one."""
    context, workers = multiprocessing.get_context("spawn"), min(options.workers, len(seeds))
    todo, events = context.Queue(), context.Queue()
    for seed in (*seeds, *[None] * workers):
        todo.put(seed)
    processes = [
        context.Process(target=_work, args=(load, setting, train, options.threads, todo, events), daemon=True)
        for _ in range(workers)
    ]
    try:
        with _interrupts_ignored_by_children():
            for process in processes:
                process.start()
        _listen(processes, events, receive, runs=len(seeds) * len(setting.arms))
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join()
        for each in (todo, events):
            each.cancel_join_thread()
            each.close()


def _listen(processes: Sequence[Any], events: Any, receive: Receive, *, runs: int) -> None:
    while runs:
        try:
            event = events.get(timeout=1.0)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                codes = [process.exitcode for process in processes]
                raise SuperbatchError(
                    f"{len(processes)} worker processes: one ended before it could say why (exit codes "
                    f"{codes}); memory may have run out. Use fewer workers, or 1 to train in this process."
                ) from None
            continue
        if isinstance(event, Failed):
            raise event.error
        runs -= isinstance(event, Finished)
        receive(event)


def _work(load: Load, setting: Any, train: Train, threads: int, todo: Any, events: Any) -> None:
    """Run a worker process, until the seeds or its parent end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def put(event: Event) -> None:
        if parent is not None and not parent.is_alive():
            sys.exit(1)
        events.put(event)

    try:
        name, recipe_name, data = load
        backend = load_backend(name)
        with backend.threads(threads):
            recipe = backend.load(recipe_name, data)
            while (seed := todo.get()) is not None:
                train_here(recipe, setting, [seed], put, train=train)
    except Exception as error:  # noqa: BLE001  (it is raised again where the user is)
        if not isinstance(error, SuperbatchError):
            # An exception of a user's own class may not survive the way to the parent; its text does.
            text = " ".join(f"a worker process met {type(error).__name__}: {error}".split())
            error = recipe_failure(error) or SuperbatchError(text)
        events.put(Failed(error))


def _gathered(receive: Receive) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A tick for `train_seed` that passes on sums now and then, and a function that passes on the rest."""
    pending, last = 0, time.monotonic()

    def tick(microbatches: int) -> None:
        nonlocal pending
        pending += microbatches
        if time.monotonic() - last > REPORT_EVERY:
            flush()

    def flush() -> None:
        nonlocal pending, last
        receive(Advanced(pending))
        pending, last = 0, time.monotonic()

    return tick, flush


@contextmanager
def _interrupts_ignored_by_children() -> Iterator[None]:
    """Block SIGINT: children inherit the mask, so Ctrl-C never makes one print a traceback.

    SIGTERM waits for the end of the block: a child whose start is torn would fail, and nobody would stop it.
    It is not blocked, for then children could not be terminated. A signal in the meantime is delivered
    afterwards.
    """
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    terminated: list[int] = []
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        handler = None  # it cannot be set, and is not raised here
    if handler is not None:
        handler = signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if terminated:
            signal.raise_signal(signal.SIGTERM)
