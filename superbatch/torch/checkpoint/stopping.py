"""Stop a training on a signal, after the present update, so that it can save and exit."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

from superbatch.errors import WindowError

from .saving import HasEngine

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds. A Ctrl-C reaches the ranks of torchrun twice: from the terminal, and right after from torchrun.
SAME_REQUEST = 1.0


class StopSignals:
    """Context in which Ctrl-C and SIGTERM request a stop instead of ending the program.

    The first signal is recorded, and the present update is completed. Signals within a second after it count
    as the same request. A later signal acts as without this context: Ctrl-C raises KeyboardInterrupt, which
    rolls the window back.

    Attributes:
        exit_code: 130 after Ctrl-C, 143 after SIGTERM, as in shells; 0 before a signal.

    Raises:
        WindowError: the context is entered a second time before its end.
        ValueError: from Python, if the context is entered in another thread than the main one.

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
            raise WindowError("This StopSignals context is already entered. Make a new StopSignals().")
        self.exit_code = 0
        for number in SIGNALS:
            # One by one, so that after an error `_earlier` has exactly the handlers that were replaced.
            self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._earlier:
            number, handler = self._earlier.popitem()
            signal.signal(number, handler)

    def requested(self, accumulate: HasEngine) -> bool:
        """Return whether a stop was requested on any rank; call it on all ranks, once after each update.

        Args:
            accumulate: the accumulator, whose ranks agree by an exchange of one number.
        """
        # By a vote, because a signal may reach only one rank.
        return accumulate.engine.config.sync.vote(self.exit_code > 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A handler only records the signal, because it may run between any two operations.
        if not self.exit_code:
            self.exit_code, self._first = 128 + number, time.monotonic()
            return
        if time.monotonic() - self._first < SAME_REQUEST:
            return
        handler = self._earlier[number]
        if callable(handler):
            handler(number, frame)
        else:  # the system's default action, which is not a Python function
            signal.signal(number, handler)
            signal.raise_signal(number)
