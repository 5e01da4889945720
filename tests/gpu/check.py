"""A check on a device: a plain function, so that it runs without pytest too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Figures = dict[str, Any]


class Skip(Exception):
    """Raised by a check that has no meaning on this machine; the text says why."""


@dataclass(frozen=True)
class Run:
    """The circumstances of one run.

    Attributes:
        device: under test.
        small: use tiny sizes, as the dry run on a CPU does.
    """

    device: torch.device
    small: bool


@dataclass(frozen=True)
class Check:
    """One question to the device.

    Attributes:
        name: unique, without blanks.
        function: raises AssertionError where the answer is wrong; returns the figures it found.
        seconds: time after which the runner stops it.
    """

    name: str
    function: Callable[[Run], Figures]
    seconds: float = 60.0
