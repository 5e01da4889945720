"""Progress on the standard error stream: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY = 5.0  # seconds between two plain lines, at least

Show = Callable[[int, int, str | None], None]  # (done, total, what has just been finished or None)


@contextmanager
def progress(title: str) -> Iterator[Show]:
    """Show how far a command is until the block is left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("elapsed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[finished]}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, finished="")

        def show(done: int, total: int, finished: str | None) -> None:
            bar.update(task, completed=done, total=total)
            if finished is not None:
                bar.update(task, finished=finished)

        yield show


def receiver(show: Show) -> Callable[[Any], None]:
    """Receive the events of a study: done, total, and the run or (seed, arm, value) just finished."""

    def receive(event: Any) -> None:
        text = event.finished
        if isinstance(text, tuple):
            seed, arm, value = text
            text = f"seed {seed}, {arm}: {'no suggestion' if value is None else f'{value:.4g}'}"
        show(event.done, event.total, text)

    return receive


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    Examples:
        >>> duration(42.3), duration(150)
        ('42 s', '2 min 30 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _lines(title: str) -> Show:
    start: float | None = None
    last = -LINE_EVERY

    def show(done: int, total: int, finished: str | None) -> None:
        nonlocal start, last
        now = time.monotonic()
        # The clock starts with the first message: what came before (imports, processes) says nothing about
        # speed.
        start = now if start is None else start
        if finished is None or now - last < LINE_EVERY:
            return
        last = now
        share = f"{100 * done / total:.0f} %"
        if 50 * done > total:  # with less than 2 % done, time left would be a guess
            share += f", about {duration((now - start) / done * (total - done))} left"
        print(f"{title}: {finished}; {share}", file=sys.stderr, flush=True)

    return show
