"""Reports of this rank's failures to the ranks that share its window."""

from __future__ import annotations

from superbatch.errors import RankError

from .progress import Progress
from .sync.faults import is_transport, text_of
from .sync.sync import Sync


def report_failure(sync: Sync, error: BaseException | None, where: str) -> None:
    """Report to the other ranks that this one leaves the window.

    A `RankError` is not reported, because the exchange that raised it has raised it on every rank.

    Args:
        sync: the ranks.
        error: the error that ended the window; None: the user left the window by ``break``.
        where: position in the window, as the rest of a sentence.

    Raises:
        RankError: `error` shows that the other ranks cannot be reached.
    """
    if isinstance(error, RankError):
        return
    # A broken connection cannot carry a message.
    if is_transport(error):
        assert error is not None
        raise sync.record_lost(error) from error
    sync.fail(f"left its window {where}" if error is None else f"failed {where} ({text_of(error)})")


def position_of(progress: Progress) -> tuple[str, str]:
    """Return two texts of the position in a window: for a failure there, and for a ``break`` there."""
    done, count = len(progress.losses), len(progress.microbatches)
    left = f"after {done} of {count} micro-batches"
    if progress.complete:
        return "at the end of its window", left
    return f"in micro-batch {progress.next if progress.current is None else progress.current}", left


class FailureReport:
    """Report of a failure of this rank in one window, which is sent at most once.

    Args:
        sync: the ranks that share the window, two or more.
        progress: position in the window.
    """

    def __init__(self, sync: Sync, progress: Progress) -> None:
        self._sync: Sync | None = sync  # None once no other rank waits for this one
        self._progress = progress
        self._position: tuple[str, str] | None = None

    @property
    def is_possible(self) -> bool:
        """True while other ranks may wait for this one."""
        return self._sync is not None

    def suppress(self) -> None:
        """Send no report: the other ranks know, or they wait in an exchange that cannot receive it."""
        self._sync = None

    def keep_position(self) -> None:
        """Record the present position, because the window is about to free its micro-batches."""
        if self._sync is not None:
            self._position = position_of(self._progress)

    def send(self, error: BaseException | None, *, agreed: bool) -> None:
        """Report to the other ranks that this one leaves the window.

        Args:
            error: the error that ended the window; None: the user left the window by ``break``.
            agreed: the ranks have made their last exchange of the window, so no rank waits.

        Raises:
            RankError: `error` shows that the other ranks cannot be reached.
        """
        sync, self._sync = self._sync, None
        if sync is not None and (is_transport(error) or not agreed):
            failed, left = self._position or position_of(self._progress)
            report_failure(sync, error, left if error is None else failed)
