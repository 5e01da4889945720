"""Automatic micro-batch sizes, found in real windows of training, so that no trial is wasted.

An update does not depend on its split, so any micro-batch may be a trial. Memory: the first trial is
predicted to need far less than the limit, and the free memory that each trial leaves determines the next size
(`trials`). Time (``mode="fastest"``): sizes are timed in ascending order, until two in a row are slower than
the best (`superbatch.tuning.search`). Later the free memory is read at intervals: the limit may change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch.batch.split import near_equal
from superbatch.batch.tree import plan as plan_of
from superbatch.results.memory import Measured, MemoryReport, Peak
from superbatch.tuning.search import fastest, fit_curve, halvings, next_trial, time_per_sample

from ..options import GradientSumOption
from .fake import PredictionError
from .instruments import Instruments, instruments_for, is_compiled
from .predict import predict_peak
from .room import Room
from .shapes import Signature, covers, signature, volume
from .sizing import Smaller, agreed
from .trials import SizeHistory, known_from, known_of, state_of

Mode = Literal["fastest", "largest"]

# Share of the available memory that is left free; measured errors of the largest size were smaller.
MARGINS: dict[Mode, float] = {"largest": 0.005, "fastest": 0.05}

# Seconds between readings of the free memory. One takes about 0.2 ms, which is negligible at this rate.
_EVERY = 0.1
_MOST_SIZES = 64  # number of sizes that are measured at their first run, regardless of the interval


class AutoSize:
    """Find the largest, or the fastest, micro-batch that fits (a `Sizing`; `Accumulator` makes it).

    Args:
        loss_fn: loss function of the accumulator.
        models: models that `loss_fn` computes with.
        optimizers: optimizers that make the update.
        device: device to which micro-batches are moved; None does not move them.
        mode: find the largest size or the fastest one.
        unsplit: paths of leaves that every micro-batch gets in full.
        per_sample: paths of lists with one object per sample.
        gradient_sum: option of the accumulator, for the prediction.
        masters: master parameters of the optimizer, for the prediction.
        instruments: sources of measurements; None: those of the device.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_fn = lambda x: model(x).square().mean()
        >>> sizing = AutoSize(loss_fn, [model], [sgd], device=None, mode="largest")
        >>> sizing.plan(torch.randn(100, 3), 100)  # far from any limit
        [100]
    """

    measures = learns = True

    def __init__(
        self,
        loss_fn: Callable[[Any], Any],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        device: torch.device | None,
        mode: Mode = "fastest",
        unsplit: Sequence[str] = (),
        per_sample: Sequence[str] = (),
        gradient_sum: GradientSumOption = "auto",
        masters: Mapping[Tensor, Tensor] | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        parameters = [parameter for model in models for parameter in model.parameters()]
        self._device = device or (parameters[0].device if parameters else torch.device("cpu"))
        self._models, self._optimizers = tuple(models), tuple(optimizers)
        self._paths = {"unsplit": tuple(unsplit), "per_sample": tuple(per_sample)}
        shared: dict[str, Any] = {"device": device, "gradient_sum": gradient_sum, "masters": masters}
        predict = partial(
            predict_peak,
            loss_fn,
            models=self._models,
            optimizers=self._optimizers,
            **shared,
        )
        self._instruments = instruments or instruments_for(
            self._device, lambda microbatch, samples: predict(microbatch, samples=samples)
        )
        self._twin = partial(
            AutoSize,
            loss_fn,
            models,
            optimizers,
            mode=mode,
            unsplit=unsplit,
            per_sample=per_sample,
            instruments=self._instruments,
            **shared,
        )
        self._compiled = is_compiled(self._models)
        self._mode: Mode = "largest" if self._compiled else mode
        self._room = Room(self._device, optimizers, self._instruments, margin=MARGINS[self._mode])
        self._known: dict[Signature, SizeHistory] = {}
        self._alike: dict[Signature, Signature] = {}  # shapes that use the size of a larger one
        self._smaller = Smaller()
        # of the window in progress
        self._here: SizeHistory | None = None
        self._samples = self._target = 0
        self._planned: list[int] = []
        self._place = 0
        self._times: list[tuple[SizeHistory, int, int, Any, Any]] = []

    def twin(self) -> AutoSize:
        """Return another one with the same settings, which has found nothing yet."""
        return self._twin()

    # -- calls of a window -------------------------------------------------------------------------------

    def plan(self, batch: Any, samples: int, agree: Callable[[int], int] | None = None) -> list[int]:
        """Return the sizes to begin a window with.

        Args:
            batch: batch of the window.
            samples: number of samples of the batch.
            agree: function from the size found here to the one that all ranks use; None: each uses its own.
        """
        known = self._here = self._find(batch, samples)
        # Reading the limit takes 0.2 ms, so it is read at each window only while sizes are tried.
        if not self._is_steady(known) or self._is_due():
            self._room.look(known, self._known.values())
        self._samples, self._place = samples, 0
        self._planned = self._sizes(samples)
        if agree is not None:
            first, rest = agreed(self._planned, samples, agree)
            self._planned = _begin_with(first, samples, rest)
        return list(self._planned)

    def rest(self, left: int) -> list[int] | None:
        """Return new sizes for the remaining samples if the last micro-batch changed the estimate."""
        del self._planned[:1]
        known = self._here
        if not left or known is None or self._is_steady(known):
            return None
        new = self._sizes(left)
        if new == self._planned:
            return None
        self._planned = new
        return list(new)

    def measure(self, samples: int) -> AbstractContextManager[None]:
        """Return a context that measures a micro-batch, or an empty one if no measurement is needed."""
        known = self._here
        first = self._place == 0
        self._place += 1
        if known is None:
            return nullcontext()
        if self._is_steady(known) and _is_seen(known, samples) and not self._is_due():
            return nullcontext()
        if known.how == "small real runs" and not known.needed:
            return self._room.probed(known, samples, first=first)
        timed = partial(self._timed, known, self._target, samples)
        return self._room.measured(known, samples, first=first, timed=timed)

    def failed(self, samples: int) -> int:
        """Return the size to continue with after memory ran out (see `Smaller`)."""
        self._times.clear()
        self._planned = []
        return self._smaller.failed(samples)

    def closed(self, *, made: bool) -> None:
        """Read the clock at the end of a window, after the device has finished."""
        for known, target, samples, start, end in self._times:
            seconds = self._instruments.seconds(start, end) / samples
            known.timings.setdefault(target, []).append(seconds)
        self._times.clear()
        self._smaller.closed(made=made)
        if not made:
            return
        self._room.updated(self._here)
        self._shrink_if_thrashing()

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found, and their measurements."""
        return {
            "version": 1,
            "mode": self._mode,
            "shapes": [(shape, state_of(known)) for shape, known in self._known.items()],
            "failures": self._smaller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the sizes of `state_dict`; the limit is read again."""
        self._known = {
            tuple((dtype, tuple(dimensions)) for dtype, dimensions in shape): known_of(known)
            for shape, known in state["shapes"]
        }
        if state["mode"] != self._mode:
            # Another mode has another size, but the measurements of memory remain valid.
            for known in self._known.values():
                known.size = 0
        self._smaller.load_state_dict(state["failures"])
        self._alike.clear()
        self._room.total = None

    def report(self) -> MemoryReport | None:
        """Return a report for the sample shape of the last window."""
        known, limit = self._here, self._room.limit
        if known is None or limit is None:
            return None
        most = min(self._room.largest(known), self._smaller.most or self._samples, self._samples)
        chosen, why = self._choice(known, most)
        dared = self._room.reach(known, iter(self._known.values()))
        return MemoryReport(
            device=str(self._device),
            how=known.how,
            predicted=tuple(known.peaks),
            error=known.curve.error,
            measured=tuple(Measured(samples, size) for samples, size in sorted(known.measured.items())),
            limit=limit,
            largest=min(most, dared),  # a batch of this many samples would be run in one piece
            chosen=chosen,
            why=why,
        )

    # -- sizes -------------------------------------------------------------------------------------------

    def _sizes(self, left: int) -> list[int]:
        """Return sizes for the remaining samples of the window."""
        known = self._here
        assert known is not None
        self._target = 0
        room = self._room.largest(known)
        size = min(room, self._smaller.most or self._samples, self._samples)
        if known.how == "small real runs" and not known.needed:
            return _begin_with(min(left, self._next_probe(known)), left, left)
        allowed = self._room.reach(known, iter(self._known.values()))
        if self._compiled:
            # Each new size compiles the model again: use one safe guess, and keep it.
            self._settle(known, known.size or min(allowed, near_equal(left, size)[0]))
            return near_equal(left, min(known.size, self._smaller.most or left))
        if self._mode == "fastest":
            # For the whole window: the rest may be smaller than any size to try.
            size, trial = self._fastest(known, min(self._smaller.most or self._samples, room), allowed)
            if trial and left >= 0.75 * trial:
                # Three quarters of a trial are enough to measure its time per sample.
                self._target = trial
                return _begin_with(min(trial, left), left, size)
        size = self._room.with_new(known, near_equal(self._samples, size))
        pieces = near_equal(self._samples, size)  # of this window, or of the next ones
        if pieces[0] > allowed:
            return _begin_with(allowed, left, pieces[0])
        while sum(pieces) > left:
            del pieces[0]
        return pieces if sum(pieces) == left else _equal(left, near_equal(self._samples, size)[0])

    def _fastest(self, known: SizeHistory, most: int, allowed: int) -> tuple[int, int]:
        """Return the size to use without a trial, and the size to try (0: none)."""
        if known.size:
            return min(known.size, most), 0
        sizes = self._candidates(known, most)
        trial = next_trial(sizes, known.timings)
        timed = {size: known.timings[size] for size in sizes if known.timings.get(size)}
        if trial is None:
            best = fastest(timed)
            if best == sizes[0] > 1:  # the smallest size is the best so far: try smaller ones
                trial = best = best // 2
                known.sizes.insert(0, trial)
            else:
                self._settle(known, best)
            return best, min(trial or 0, allowed)
        return fastest(timed) if timed else min(trial, allowed), min(trial, allowed)

    def _candidates(self, known: SizeHistory, most: int) -> list[int]:
        """Return the sizes to time, ascending; small changes of the largest size do not change them."""
        batch = near_equal(self._samples, most)[0]
        if not known.sizes:
            known.sizes = halvings(batch, smallest=batch // 64)
        sizes = [size for size in known.sizes if size <= most]
        if not sizes or batch > 1.15 * sizes[-1]:
            sizes.append(batch)
            known.sizes = sizes
        return sizes

    def _settle(self, known: SizeHistory, size: int) -> None:
        assert self._room.total is not None
        known.size, known.total = size, self._room.total

    def _is_steady(self, known: SizeHistory) -> bool:
        """Return whether no trial is open: all sizes in use were measured."""
        if self._compiled or (self._mode == "fastest" and not known.size):
            return bool(known.size)
        return bool(known.runs) and all(_is_seen(known, size) for size in self._planned)

    def _is_due(self) -> bool:
        return time.perf_counter() - self._room.checked >= _EVERY

    def _choice(self, known: SizeHistory, most: int) -> tuple[int, str]:
        size = near_equal(self._samples, min(known.size or most, most))[0]
        if self._smaller.most is not None:
            return size, "memory ran out with larger sizes, which are tried again later"
        timed = {key: seconds for key, seconds in known.timings.items() if seconds}
        if self._mode == "fastest" and known.size in timed:
            best = time_per_sample(timed[known.size]) * 1000
            return size, f"the fastest of {len(timed)} sizes, {best:.3g} ms per sample"
        if self._mode == "fastest":
            return size, "sizes are still being timed"
        return size, "the whole batch fits" if size == self._samples else "the largest that fits, near-equal"

    # -- measurements of a shape -------------------------------------------------------------------------

    def _find(self, batch: Any, samples: int) -> SizeHistory:
        shape = signature(batch, samples)
        shape = self._alike.get(shape, shape)
        known = self._known.get(shape)
        if known is None:
            # Shorter samples use the size for longer ones, so that few shapes are measured.
            larger = [other for other in self._known if covers(other, shape)]
            if larger:
                self._alike[shape] = min(larger, key=volume)
                known = self._known[self._alike[shape]]
            else:
                known = self._known[shape] = self._predicted(batch, samples)
        if self._room.total is None:
            self._room.read(known)
        return known

    def _predicted(self, batch: Any, samples: int) -> SizeHistory:
        """Predict a few sizes, the last ones near the limit."""
        take = plan_of(batch, **self._paths).take
        predict = self._instruments.predict

        def probe(size: int) -> Peak:
            return predict(take(0, size), size)

        try:
            peaks = {size: probe(size) for size in sorted({min(2, samples), min(16, samples)})}
            known = known_from(list(peaks.values()), "fake tensors")
            if self._room.total is None:  # read after the first prediction, which imports much of torch
                self._room.read(known)
            total = self._room.total
            assert total is not None
            for _ in range(4):
                size = max(1, min(samples, known.curve.largest(total, samples)))
                if any(abs(size - other) <= 0.02 * size for other in peaks):
                    break
                peaks[size] = probe(size)
                known = known_from(list(peaks.values()), "fake tensors")
        except PredictionError:
            # Without a prediction `_sizes` begins with small real runs.
            nothing = fit_curve([(1, 0)])
            return SizeHistory([], "small real runs", nothing, nothing, self._gradients())
        return known

    def _gradients(self) -> int:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return sum(parameter.nbytes for group in groups for parameter in group["params"])

    # -- after a micro-batch -------------------------------------------------------------------------------

    def _timed(self, known: SizeHistory, target: int, samples: int, start: Any, end: Any) -> None:
        if target and samples >= 0.75 * target:
            if self._device.type == "cpu":
                seconds = self._instruments.seconds(start, end) / samples
                known.timings.setdefault(target, []).append(seconds)
            else:  # `closed` reads the clock
                self._times.append((known, target, samples, start, end))

    def _next_probe(self, known: SizeHistory) -> int:
        return 1 if self._place == 0 else 4 if known.measured else 2

    def _shrink_if_thrashing(self) -> None:
        """Use less memory if the allocator repeatedly empties its caches: it is slow and near the limit."""
        if self._here is not None and self._room.is_tight(self._here):
            self._here.size = -(-9 * self._here.size // 10)


def _is_seen(known: SizeHistory, size: int) -> bool:
    """Return whether a size was measured already, or is one too many to measure."""
    return size in known.runs or len(known.runs) >= _MOST_SIZES


def _equal(left: int, size: int) -> list[int]:
    """Return the sizes that later windows use, and the rest: each further size costs memory for kernels."""
    return [size] * (left // size) + [left % size] * (left % size > 0)


def _begin_with(trial: int, left: int, size: int) -> list[int]:
    """Return the size of a trial, then a near-equal split of the remaining samples."""
    return [trial, *near_equal(left - trial, size)] if left > trial else [left]
