"""Simulated machine for automatic sizes: every byte and second of it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from superbatch.batch.split import near_equal
from superbatch.results.memory import Limit, Peak
from superbatch.torch.sizes.auto import AutoSize, Mode
from superbatch.torch.sizes.fake import PredictionError
from superbatch.torch.sizes.instruments import Instruments

MIB = 2**20


class OutOfMemory(RuntimeError):
    pass


@dataclass
class Machine:
    """Memory and time of a training: the need of a micro-batch, the limit, the duration."""

    limit: int = 1000 * MIB
    alive: int = 0  # bytes in use by others
    each: int = MIB  # bytes per sample, actual
    once: int = 0  # bytes allocated at the first micro-batch and kept
    kernels: int = 0  # bytes allocated at every new size and kept
    buffers: int = 0  # bytes per sample of the largest size so far, kept
    gradients: int = 20 * MIB
    state: int = 40 * MIB
    state_guessed: float = 1.0  # predicted / actual bytes of the optimizer's state
    wrong: float = 1.0  # predicted / actual bytes of a sample
    predictable: bool = True
    by: str = "RLIMIT_AS of this machine"
    speed: Callable[[int], float] = lambda n: 1e-3  # seconds per sample
    holes: int = 0
    retries: int = 0
    cleaned: int = 0
    retries_if_not_clean: int = 0  # of the allocator, at each run of a size without cached blocks
    # state of the simulation
    time: float = 0.0
    summed: bool = False
    updated: bool = False
    held: bool = False  # gradients of the last window, until the next one is planned
    peak: int = 0
    sizes_run: set[int] = field(default_factory=set[int])
    failures: int = 0
    log: list[list[int]] = field(default_factory=list[list[int]])
    predictions: int = 0

    def used(self) -> int:
        kept = self.once * bool(self.sizes_run) + self.kernels * len(self.sizes_run)
        kept += self.buffers * max(self.sizes_run, default=0)
        return self.alive + kept + self.gradients * (self.summed or self.held) + self.state * self.updated

    def predict(self, microbatch: torch.Tensor, samples: int) -> Peak:
        assert len(microbatch) == samples
        self.predictions += 1
        if not self.predictable:
            raise PredictionError("not with fake tensors")
        activations = int(self.each_of(microbatch) * samples * self.wrong)
        state = 0 if self.updated else int(self.state * self.state_guessed)
        backward = activations + self.gradients
        return Peak(
            samples=samples,
            bytes=backward + state,
            phase="backward",
            first=activations,
            forward=backward,
            backward=backward,
            optimizer=self.gradients + state,
            gradients=self.gradients,
            optimizer_state=state,
            activations=activations,
        )

    def each_of(self, microbatch: torch.Tensor) -> float:
        return self.each * microbatch.shape[1] / 8

    def run(self, microbatch: torch.Tensor) -> None:
        samples = len(microbatch)
        if samples not in self.sizes_run and self.sizes_run:
            self.retries += self.retries_if_not_clean
        self.sizes_run.add(samples)
        need = int(self.each_of(microbatch) * samples) if self.summed else self._first(microbatch)
        if self.used() + need > self.limit:
            raise OutOfMemory(f"{samples} samples")
        self.peak = self.used() + need
        self.summed = True
        self.time += samples * self.speed(samples)

    def _first(self, microbatch: torch.Tensor) -> int:
        return max(int(self.each_of(microbatch) * len(microbatch)), self.gradients)

    def true_largest(self, sizes: int = 0) -> int:
        """Return the largest size that fits after `sizes` sizes have allocated their kernels."""
        kept = self.once + self.kernels * sizes + self.gradients + self.state
        return (self.limit - self.alive - kept) // (self.each + self.buffers)

    def instruments(self) -> Instruments:
        machine = self

        class Difference:
            before = 0

            def start(self) -> None:
                self.before = machine.used()

            def stop(self) -> int:
                return machine.peak - self.before

        return Instruments(
            predict=self.predict,
            limit=lambda: Limit(self.limit - self.used(), self.by),
            meter=Difference(),
            now=lambda: self.time,
            seconds=lambda start, end: end - start,
            retries=lambda: self.retries,
            holes=lambda: self.holes,
            clean=self._clean,
        )

    def _clean(self) -> None:
        self.cleaned += 1


def sizing_on(machine: Machine, mode: Mode = "largest", optimizers: Sequence[Any] = ()) -> AutoSize:
    return AutoSize(
        lambda microbatch: microbatch.sum(),
        [nn.Linear(1, 1)],
        optimizers,
        device=None,
        mode=mode,
        instruments=machine.instruments(),
    )


def window(sizing: AutoSize, machine: Machine, samples: int, *, width: int = 8) -> list[int]:
    """Run one window as an Accumulator does; return the sizes that succeeded."""
    batch = torch.zeros(samples, width)
    sizes = sizing.plan(batch, samples)
    machine.held = False
    assert sum(sizes) == samples and min(sizes) > 0
    done: list[int] = []
    while sizes:
        start = sum(done)
        try:
            with sizing.measure(sizes[0]):
                machine.run(batch[start : start + sizes[0]])
        except OutOfMemory:
            machine.failures += 1
            most = sizing.failed(sizes[0])
            if not most:
                raise
            sizes = near_equal(samples - start, most)
            continue
        done.append(sizes.pop(0))
        left = samples - sum(done)
        new = sizing.sizes_of_rest(left)
        if new is not None:
            assert sum(new) == left and min(new) > 0
            sizes = new
    machine.summed, machine.updated, machine.held = False, True, True
    sizing.closed(made=True)
    machine.log.append(done)
    return done
