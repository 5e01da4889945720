"""Run a contestant in its own process, as in a training; it runs windows on request."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from peers.work import Timing, TrainerWindow, Window

MARK = "windows: "  # prefix of messages to the parent: libraries print to the same stream


class Here:
    """Contestant in this process."""

    def __init__(self, contestant: Window | TrainerWindow) -> None:
        self._contestant = contestant

    def in_a_row(self, count: int) -> list[Timing]:
        """Run windows."""
        return [self._contestant.timed() for _ in range(count)]

    def collect(self) -> None:
        """Do nothing: the common process collects garbage."""

    def close(self) -> None:
        """End a Trainer."""
        self._contestant.close()


class Apart:
    """Contestant in a new process, with its own heap.

    Args:
        arguments: arguments of `overhead.py` in that process.
    """

    def __init__(self, arguments: list[str]) -> None:
        program = [sys.executable, str(Path(__file__).with_name("overhead.py")), *arguments, "--serve"]
        # A Trainer runs in a thread. With one malloc arena it uses the same heap as in the main thread.
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def in_a_row(self, count: int) -> list[Timing]:
        """Make the process run windows."""
        return [Timing(**timing) for timing in self._answer(count)]

    def collect(self) -> None:
        """Make the process collect garbage."""
        self._answer(0)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self, count: int) -> list[dict[str, float]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"{self._process.args} ended")


def serve(contestant: Window | TrainerWindow) -> None:
    """Run the number of windows in each input line; for 0 collect garbage, then disable the collector."""
    for line in sys.stdin:
        found = [asdict(contestant.timed()) for _ in range(int(line))]
        if not found:
            gc.collect()
            gc.disable()
        print(MARK + json.dumps(found), flush=True)
    contestant.close()
