"""Failures of this rank, told to the ranks that share its window."""

from __future__ import annotations

from superbatch.errors import RankError

from .progress import Progress
from .sync.faults import is_transport, text_of
from .sync.sync import Sync


def tell(sync: Sync, error: BaseException | None, where: str) -> None:
    """Tell the other ranks that this one leaves the window, unless they know.

    Args:
        sync: the ranks.
        error: the reason; None: the window was left without one.
        where: the place, as the rest of a sentence.

    Raises:
        RankError: the error says that the other ranks cannot be reached.
    """
    # Every rank has heard of it in the exchange that raised it.
    if isinstance(error, RankError):  # from an exchange: all ranks have it
        return
    # A broken connection cannot carry the news.
    if is_transport(error):
        assert error is not None
        raise sync.lose(error) from error
    sync.fail(f"left its window {where}" if error is None else f"failed {where} ({text_of(error)})")


def place_of(progress: Progress) -> tuple[str, str]:
    """Return where a window is left, by an error and without one, as the rest of a sentence."""
    done, count = len(progress.losses), len(progress.microbatches)
    left = f"after {done} of {count} micro-batches"
    if progress.complete:
        return "at the end of its window", left
    return f"in micro-batch {progress.next if progress.current is None else progress.current}", left
