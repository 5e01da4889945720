"""A check on a device, as a plain function that also runs without pytest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Figures = dict[str, Any]


class Skip(Exception):
    """Raised by a check that does not apply to this machine; the text gives the reason."""


@dataclass(frozen=True)
class Run:
    """Settings of one run.

    Attributes:
        device: device under test.
        small: use tiny sizes, as the dry run on a CPU does.
    """

    device: torch.device
    small: bool


@dataclass(frozen=True)
class Check:
    """A named check with a time limit.

    Attributes:
        name: unique name without blanks.
        function: raises AssertionError for a wrong result; returns the measured figures.
        seconds: time limit.
    """

    name: str
    function: Callable[[Run], Figures]
    seconds: float = 60.0
