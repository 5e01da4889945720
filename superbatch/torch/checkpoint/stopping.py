"""Signals that ask a training to stop: it ends the update at hand, saves and exits."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from superbatch.errors import WindowError

from .saving import HasEngine

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds: a Ctrl-C reaches the ranks of torchrun from the terminal and, at once again, from torchrun.
SAME_REQUEST = 1.0


class StopSignals:
    """Context in which Ctrl-C and SIGTERM ask for a stop instead of ending the program.

    The first signal is noted, and the update at hand is completed. Signals within a second of it are
    the same request. A later one does what it would have done without this context: Ctrl-C raises
    KeyboardInterrupt, which rolls the window back.

    Attributes:
        exit_code: 130 after Ctrl-C, 143 after SIGTERM, as shells have it; 0 before a signal.

    Raises:
        ValueError: on entry, from Python: it is entered in another thread than the main one.

    Examples:
        >>> from torch import nn
        >>> import torch
        >>> from superbatch.torch import Accumulator
        >>> model = nn.Linear(1, 1)
        >>> accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with StopSignals() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.requested(accumulate), stop.exit_code
        (True, 143)
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._first = 0.0
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        # Entering again would record our own handler as the earlier one.
        if self._earlier:
            raise WindowError("This StopSignals context is entered already. Make a new one.")
        self.exit_code = 0
        for number in SIGNALS:
            # Noted one by one: an error leaves those that were set to be restored.
            self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._earlier:
            number, handler = self._earlier.popitem()
            signal.signal(number, handler)

    def requested(self, accumulate: HasEngine) -> bool:
        """Return whether a stop was asked for, on any rank; all ranks call it, once after each update.

        Args:
            accumulate: whose ranks agree, by an exchange of one number.
        """
        # A vote, because a signal may reach one rank only.
        return accumulate.engine.config.sync.vote(self.exit_code > 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A handler only notes: it may run inside any C call.
        if not self.exit_code:
            self.exit_code, self._first = 128 + number, time.monotonic()
            return
        if time.monotonic() - self._first < SAME_REQUEST:
            return
        handler = self._earlier[number]
        if callable(handler):
            handler(number, frame)
        else:  # the system's default, which no Python function stands for
            signal.signal(number, handler)
            signal.raise_signal(number)
