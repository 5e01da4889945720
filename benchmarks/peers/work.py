"""Training of the overhead benchmark, and a Trainer that runs one window at a time."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .task import Batch

NANOSECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class Work:
    """Training on one batch, repeated."""

    name: str
    model: Callable[[], nn.Module]
    batch: Batch
    microbatch_size: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    rounds: int

    @property
    def samples(self) -> int:
        return len(self.batch["labels"])

    def part(self, first: int) -> Batch:
        """Return the micro-batch that begins at a sample."""
        return {name: leaf[first : first + self.microbatch_size] for name, leaf in self.batch.items()}

    def microbatches(self) -> list[Batch]:
        """Return the micro-batches of the batch, sliced once."""
        return [self.part(first) for first in range(0, self.samples, self.microbatch_size)]

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return model and optimizer on the batch's device, the same in every call."""
        torch.manual_seed(0)
        model = self.model().to(self.batch["labels"].device)
        return model, self.optimizer(model.parameters())


def loss_of(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean cross entropy over samples or tokens."""
    return F.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())


@dataclass(frozen=True)
class Timing:
    """CPU and wall seconds of one window."""

    wall: float
    cpu: float


class Clock:
    """Clock from `start` to `stop`; CPU time includes all threads of the process."""

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter_ns(), time.process_time_ns()

    def stop(self) -> Timing:
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        return Timing((wall - self._wall) / NANOSECONDS, (cpu - self._cpu) / NANOSECONDS)


class Window:
    """Contestant with a function that runs one window."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def timed(self) -> Timing:
        clock = Clock()
        clock.start()
        self.run()
        return clock.stop()

    def close(self) -> None:
        """Nothing to end."""


class _Closed(Exception):
    """Raised to end an endless Trainer."""


class TrainerWindow:
    """Trainer with its own loop, in a thread that stops at every K-th micro-batch it fetches.

    The clock runs in that thread from the release to the next stop, without the switch between threads. A
    Trainer that prefetches is still measured over K micro-batches and one update: all stops shift equally.
    """

    def __init__(self, fit: Callable[[Iterable[Batch]], object], microbatches: list[Batch]) -> None:
        self._microbatches = microbatches
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._closing, self._failure = False, None
        self.make_clock: Callable[[], Clock] = Clock
        self._timing: Timing | None = None
        self._thread = threading.Thread(target=self._run, args=(fit,), daemon=True)
        self._thread.start()
        self._done.acquire()  # the Trainer is set up and fetches its first micro-batch

    def __iter__(self) -> Iterator[Batch]:
        clock: Clock | None = None
        while True:
            self._timing = clock.stop() if clock else None
            self._done.release()
            self._go.acquire()
            if self._closing:
                raise _Closed
            clock = self.make_clock()
            clock.start()
            yield from self._microbatches

    def _run(self, fit: Callable[[Iterable[Batch]], object]) -> None:
        torch.set_num_threads(1)  # a setting per thread
        try:
            fit(self)
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001  # to be raised where the window was asked for
            self._failure = error
        self._done.release()

    def timed(self) -> Timing:
        self._go.release()
        self._done.acquire()
        if self._failure is not None:
            raise RuntimeError("the Trainer ended") from self._failure
        assert self._timing is not None
        return self._timing

    def close(self) -> None:
        self._closing = True
        self._go.release()
        self._thread.join()
