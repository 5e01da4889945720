"""Progress on the standard error stream: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ..studies.shared_options import Progress

LINE_EVERY = 5.0  # least number of seconds between two plain lines

Show = Callable[[Progress], None]


@contextmanager
def progress(title: str) -> Iterator[Show]:
    """Show the progress of a command until the block ends; the yielded function takes each `Progress`."""
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
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, finished="")

        def show(event: Progress) -> None:
            bar.update(task, completed=event.done, total=event.total)
            if event.finished is not None:
                bar.update(task, finished=_text_of(event.finished))

        yield show


def _text_of(finished: Any) -> str:
    """Return `Progress.finished` as text; comparisons, surveys and studies report (seed, arm, value)."""
    if not isinstance(finished, tuple):
        return finished
    seed, arm, value = finished
    return f"seed {seed}, {arm}: {'no suggestion' if value is None else f'result {value:.4g}'}"


def _lines(title: str) -> Show:
    start: float | None = None
    last = -LINE_EVERY

    def show(event: Progress) -> None:
        nonlocal start, last
        now = time.monotonic()
        # The clock starts at the first event: imports and the start of processes would distort the estimate.
        start = now if start is None else start
        if event.finished is None or now - last < LINE_EVERY:
            return
        last = now
        share = f"{100 * event.done / event.total:.0f} %"
        if 50 * event.done > event.total:  # with less than 2 % done, the estimate would be a guess
            left = (now - start) / event.done * (event.total - event.done)
            share += f", about {timedelta(seconds=round(left))} left"
        print(f"{title}: {_text_of(event.finished)}; {share}", file=sys.stderr, flush=True)

    return show
