"""Largest micro-batch that fits, found with a new process for every trial."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("under_limit.py")
SECONDS = 600
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Each larger tensor has its own mapping, which is returned to the system when the tensor is freed. With
glibc's moving threshold, freed memory is fragmented, and the largest size depends on earlier runs."""


@dataclass(frozen=True)
class TrueLimit:
    """Result of the trials.

    Attributes:
        samples: largest size up to which every tried size fits.
        highest: largest size that ever fitted; larger than `samples` if the limit is not sharp.
        tried: pairs of a size and True if it fitted, in the order of the trials.
    """

    samples: int
    highest: int
    tried: list[tuple[int, bool]]

    @property
    def sharp(self) -> bool:
        """Return True if every size that fits is smaller than every size that does not."""
        return self.samples == self.highest


class ChildError(RuntimeError):
    """Raised if a child process ended without an answer."""


def child(work: str, limit: int, *arguments: str, mapped: bool = True) -> dict[str, object]:
    """Run `under_limit.py` and return its answer.

    Args:
        work: name of the training.
        limit: bytes of address space.
        arguments: arguments of `under_limit.py`.
        mapped: True if freed tensors return their address space at once (see `MAPPED`).

    Raises:
        ChildError: the process gave no answer; the text is the end of its error output.
    """
    command = [sys.executable, str(CHILD), work, str(limit), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(MAPPED if mapped else {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"The process gave no answer within {SECONDS} s.") from error
    if done.returncode or not done.stdout.strip():
        said = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ChildError(f"exit code {done.returncode}: {said}"[:300])
    return json.loads(done.stdout.splitlines()[-1])


def fits_by_hand(work: str, limit: int, loop: str, *, mapped: bool = True) -> Callable[[int], bool]:
    """Return True if a hand-written loop ("accumulate" or "plain") succeeds with a size in a new process."""

    def fits(size: int) -> bool:
        try:
            return bool(child(work, limit, loop, str(size), mapped=mapped)["fits"])
        except ChildError:
            return False

    return fits


def search(fits: Callable[[int], bool], *, about: int, most: int, confirm: int = 3) -> TrueLimit:
    """Find the largest size that fits: widen a bracket around a guess, halve it, try neighbours again.

    Args:
        fits: function that returns True if a size fits; called once per trial.
        about: first size to try.
        most: largest size to try.
        confirm: number of sizes on each side of the limit to try again.
    """
    tried: list[tuple[int, bool]] = []

    def ask(size: int) -> bool:
        tried.append((size, fits(size)))
        return tried[-1][1]

    low, high, size = 0, most + 1, about
    while high > most and low < most:  # until something fails, or all fits
        if not ask(size):
            high = size
            break
        low, size = size, min(most, size * 5 // 4 + 1)
    while not low and high > 1:  # until something fits, or nothing does
        size = high * 4 // 5
        low, high = (size, high) if ask(size) else (0, size)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    for size in range(max(1, low - confirm + 1), min(most, low + confirm) + 1):
        ask(size)
    failed = min((size for size, fitted in tried if not fitted), default=most + 1)
    fitted = [size for size, fitted in tried if fitted]
    samples = max((size for size in fitted if size < failed), default=0)
    return TrueLimit(samples, max(fitted, default=0), tried)
