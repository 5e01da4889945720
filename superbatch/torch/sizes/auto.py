"""Automatic micro-batch sizes, found in real windows of training, so that no trial is wasted.

An update does not depend on its split, so any micro-batch may be a trial.

* Memory: the first trial is predicted to need far less than the limit. The free memory that each trial leaves
  determines the next size (`trials`).
* Time (``mode="fastest"``): sizes are timed in ascending order, until two in a row are slower than the best
  (`superbatch.tuning.search`).
* Afterwards the free memory is read at intervals, because the limit may change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch.batch.split import near_equal
from superbatch.batch.tree import plan as plan_of
from superbatch.results.memory import Measured, MemoryReport, Peak
from superbatch.tuning.search import fastest, fit_curve, halvings, next_trial, time_per_sample

from ..checks.introspection import is_compiled
from ..options import GradientSumOption
from .budget import MemoryBudget
from .fake import PredictionError
from .instruments import Instruments, instruments_for
from .predict import predict_peak
from .shapes import Signature, covers, signature, volume
from .sizing import Sizing, agreed
from .trials import SizeHistory

Mode = Literal["fastest", "largest"]

# Share of the available memory that is left free; measured errors of the estimates were smaller.
MARGINS: dict[Mode, float] = {"largest": 0.005, "fastest": 0.05}

# Seconds between readings of the free memory. One takes less than 1 ms, which is negligible at this rate.
_EVERY = 0.1
_MOST_SIZES = 64  # number of sizes that are measured at their first run, regardless of the interval
_ENOUGH = 0.75  # least share of the size to try with which its time per sample may be measured


class AutoSize(Sizing):
    """Find the largest, or the fastest, micro-batch that fits; `Accumulator` makes it for ``"auto"``.

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
        instruments: functions that measure; None: those of the device.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_fn = lambda x: model(x).square().mean()
        >>> sizing = AutoSize(loss_fn, [model], [sgd], device=None, mode="largest")
        >>> sizing.plan(torch.randn(100, 3), 100)  # far from any limit
        [100]
    """

    measures = True

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

        def predict(microbatch: Any, samples: int) -> Peak:
            return predict_peak(
                loss_fn,
                microbatch,
                models=self._models,
                optimizers=self._optimizers,
                device=device,
                samples=samples,
                gradient_sum=gradient_sum,
                masters=masters,
            )

        self._instruments = instruments or instruments_for(self._device, predict)
        self._compiled = any(is_compiled(module) for model in models for module in model.modules())
        self._mode: Mode = "largest" if self._compiled else mode
        self.begin_search()

    def begin_search(self) -> None:
        """Forget all measurements, and begin a new search."""
        super().__init__()
        margin = MARGINS[self._mode]
        self._budget = MemoryBudget(self._device, self._optimizers, self._instruments, margin=margin)
        self._histories: dict[Signature, SizeHistory] = {}
        self._covered_by: dict[Signature, Signature] = {}  # a larger shape, whose size is used
        # Of the window in progress.
        self._history: SizeHistory | None = None
        self._samples = self._index = self._target = 0
        self._planned: list[int] = []
        # Trials whose time was not read yet: history, size to try, samples, start, end.
        self._unread: list[tuple[SizeHistory, int, int, Any, Any]] = []

    def fresh_copy(self) -> AutoSize:
        """Return a new object with the same settings and without measurements."""
        other = copy(self)
        other.begin_search()
        return other

    # -- calls of a window -------------------------------------------------------------------------------

    def plan(self, batch: Any, samples: int, agree: Callable[[int], int] | None = None) -> list[int]:
        """Return the sizes to begin a window with.

        Args:
            batch: batch of the window.
            samples: number of samples of the batch.
            agree: function from the size found here to the one that all ranks use; None: each uses its own.
        """
        history = self._history = self._find(batch, samples)
        # Reading the limit takes time, so it is read at each window only while sizes are tried.
        if not self._is_steady(history) or self._is_due():
            self._budget.read_again(history, self._histories.values())
        self._samples, self._index = samples, 0
        self._planned = self._sizes(samples)
        if agree is not None:
            first, rest = agreed(self._planned, samples, agree)
            self._planned = _begin_with(first, samples, rest)
        return list(self._planned)

    def sizes_of_rest(self, left: int) -> list[int] | None:
        """Return new sizes for the remaining samples if the last micro-batch changed the estimate."""
        del self._planned[:1]
        history = self._history
        if not left or history is None or self._is_steady(history):
            return None
        new = self._sizes(left)
        if new == self._planned:
            return None
        self._planned = new
        return list(new)

    def measure(self, samples: int) -> AbstractContextManager[None]:
        """Return a context that measures a micro-batch, or an empty one if no measurement is needed."""
        history = self._history
        first = self._index == 0
        self._index += 1
        if history is None:
            return nullcontext()
        if self._is_steady(history) and _needs_no_run(history, samples) and not self._is_due():
            return nullcontext()
        if history.how == "small real runs" and not history.needed:
            return self._budget.probed(history, samples, first=first)
        return self._measured(history, samples, first=first)

    def failed(self, samples: int) -> int:
        """Record that a micro-batch ran out of memory; return the largest size to continue with, or 0."""
        self._unread.clear()
        self._planned = []
        return super().failed(samples)

    def closed(self, *, made: bool) -> None:
        """Read the times of a window's trials at its end, when the device has finished them."""
        self._read_times()
        super().closed(made=made)
        if made:
            self._budget.updated(self._history)
            if self._history is not None and self._budget.is_tight(self._history):
                # Nine tenths: an allocator that repeatedly empties its caches is slow and near the limit.
                self._history.size = -(-9 * self._history.size // 10)

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found, and their measurements."""
        return {
            "version": 1,
            "mode": self._mode,
            "shapes": [(shape, history.state_dict()) for shape, history in self._histories.items()],
            "failures": super().state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the sizes of `state_dict`; the limit is read again."""
        self._histories = {
            tuple((dtype, tuple(dimensions)) for dtype, dimensions in shape): SizeHistory.from_state(saved)
            for shape, saved in state["shapes"]
        }
        if state["mode"] != self._mode:
            # Another mode has another size, but the measurements of memory remain valid.
            for history in self._histories.values():
                history.size = 0
        super().load_state_dict(state["failures"])
        self._covered_by.clear()
        self._budget.total = None

    def report(self) -> MemoryReport | None:
        """Return a report for the sample shape of the last window."""
        history, limit = self._history, self._budget.limit
        if history is None or limit is None:
            return None
        most = min(self._budget.largest(history), self.most_samples or self._samples, self._samples)
        chosen, why = self._choice(history, most)
        next_largest = self._budget.next_largest(history, iter(self._histories.values()))
        return MemoryReport(
            device=str(self._device),
            how=history.how,
            predicted=tuple(history.peaks),
            error=history.curve.error,
            measured=tuple(Measured(samples, size) for samples, size in sorted(history.measured.items())),
            limit=limit,
            largest=min(most, next_largest),  # a batch of this many samples would run in one micro-batch
            chosen=chosen,
            why=why,
        )

    # -- sizes -------------------------------------------------------------------------------------------

    def _sizes(self, left: int) -> list[int]:
        """Return sizes for the remaining samples of the window."""
        history = self._history
        assert history is not None
        self._target = 0
        fitting = self._budget.largest(history)
        size = min(fitting, self.most_samples or self._samples, self._samples)
        if history.how == "small real runs" and not history.needed:
            # The first micro-batch of a window is not measured; the next two give the curve.
            return _begin_with(1 if self._index == 0 else 4 if history.measured else 2, left, left)
        allowed = self._budget.next_largest(history, iter(self._histories.values()))
        if self._compiled:
            # Each new size compiles the model again: use one safe guess, and keep it.
            self._budget.end_search(history, history.size or min(allowed, near_equal(left, size)[0]))
            return near_equal(left, min(history.size, self.most_samples or left))
        if self._mode == "fastest":
            # From the samples of the whole window: the rest may be smaller than any size to try.
            size, trial = self._fastest(history, min(self.most_samples or self._samples, fitting), allowed)
            if trial and left >= _ENOUGH * trial:
                self._target = trial
                return _begin_with(trial, left, size)
        size = self._budget.with_new(history, near_equal(self._samples, size))
        sizes = near_equal(self._samples, size)  # of this window, or of the next ones
        largest = sizes[0]
        if largest > allowed:
            return _begin_with(allowed, left, largest)
        # Each new size needs memory for kernels, so use the last sizes of this split if they add up to
        # `left`, otherwise its largest size and a rest.
        while sum(sizes) > left:
            del sizes[0]
        if sum(sizes) == left:
            return sizes
        return [largest] * (left // largest) + [left % largest] * (left % largest > 0)

    def _fastest(self, history: SizeHistory, most: int, allowed: int) -> tuple[int, int]:
        """Return the size to use without a trial, and the size to try (0: none)."""
        if history.size:
            return min(history.size, most), 0
        sizes = self._candidates(history, most)
        trial = next_trial(sizes, history.timings)
        timed = {size: history.timings[size] for size in sizes if history.timings.get(size)}
        if trial is not None:
            trial = min(trial, allowed)
            return fastest(timed) if timed else trial, trial
        best = fastest(timed)
        if best == sizes[0] > 1:  # the smallest size is the best so far, so half of it is tried too
            half = best // 2
            history.sizes.insert(0, half)
            return half, min(half, allowed)
        self._budget.end_search(history, best)
        return best, 0

    def _candidates(self, history: SizeHistory, most: int) -> list[int]:
        """Return the sizes to time, ascending; they stay the same if the largest size changes little."""
        batch = near_equal(self._samples, most)[0]
        if not history.sizes:
            history.sizes = halvings(batch, smallest=batch // 64)
        sizes = [size for size in history.sizes if size <= most]
        if not sizes or batch > 1.15 * sizes[-1]:
            sizes.append(batch)
            history.sizes = sizes
        return sizes

    def _is_steady(self, history: SizeHistory) -> bool:
        """Return whether the search is over: all sizes in use were measured."""
        if self._compiled or (self._mode == "fastest" and not history.size):
            return bool(history.size)
        return bool(history.runs) and all(_needs_no_run(history, size) for size in self._planned)

    def _is_due(self) -> bool:
        return time.perf_counter() - self._budget.checked >= _EVERY

    def _choice(self, history: SizeHistory, most: int) -> tuple[int, str]:
        size = near_equal(self._samples, min(history.size or most, most))[0]
        if self.most_samples is not None:
            return size, "memory ran out with larger sizes, which are tried again later"
        timed = {key: seconds for key, seconds in history.timings.items() if seconds}
        if self._mode == "fastest" and history.size in timed:
            best = time_per_sample(timed[history.size]) * 1000
            return size, f"the fastest of {len(timed)} sizes, {best:.3g} ms per sample"
        if self._mode == "fastest":
            return size, "sizes are still being timed"
        return size, "the whole batch fits" if size == self._samples else "the largest that fits, near-equal"

    # -- measurements of a shape -------------------------------------------------------------------------

    def _find(self, batch: Any, samples: int) -> SizeHistory:
        """Return the history of a batch's sample shape; a prediction begins a new one."""
        shape = signature(batch, samples)
        shape = self._covered_by.get(shape, shape)
        # Shorter samples use the size for longer ones, so that few shapes are measured.
        if shape not in self._histories and (larger := [s for s in self._histories if covers(s, shape)]):
            self._covered_by[shape] = min(larger, key=volume)
            shape = self._covered_by[shape]
        history = self._histories.get(shape)
        if history is None:
            history = self._histories[shape] = self._predicted(batch, samples)
        if self._budget.total is None:
            self._budget.read(history)
        return history

    def _predicted(self, batch: Any, samples: int) -> SizeHistory:
        """Predict a few sizes, the last ones near the limit."""
        take = plan_of(batch, **self._paths).take
        peaks: list[Peak] = []

        def predict(size: int) -> SizeHistory:
            peaks.append(self._instruments.predict(take(0, size), size))
            return SizeHistory.predicted(peaks, "fake tensors")

        try:
            history = predict(min(2, samples))
            if samples > 2:
                history = predict(min(16, samples))
            if self._budget.total is None:  # read after the first prediction, which imports much of torch
                self._budget.read(history)
            assert self._budget.total is not None
            for _ in range(4):
                size = max(1, min(samples, history.curve.largest(self._budget.total, samples)))
                if any(abs(size - peak.samples) <= 0.02 * size for peak in peaks):
                    break
                history = predict(size)
        except PredictionError:
            # Without a prediction `_sizes` begins with small real runs.
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            gradients = sum(parameter.nbytes for group in groups for parameter in group["params"])
            unknown = fit_curve([(1, 0)])
            return SizeHistory([], "small real runs", unknown, unknown, gradients)
        return history

    # -- measurements of a micro-batch --------------------------------------------------------------------

    @contextmanager
    def _measured(self, history: SizeHistory, samples: int, *, first: bool) -> Iterator[None]:
        """Measure the memory of one micro-batch, and its time if it is a trial."""
        target, now = self._target, self._instruments.now
        with self._budget.measured(history, samples, first=first):
            start = now()
            yield
            end = now()
        if not target or samples < _ENOUGH * target:
            return
        self._unread.append((history, target, samples, start, end))
        # On the CPU the next size may depend on this time. On another device reading it would wait.
        if self._device.type == "cpu":
            self._read_times()

    def _read_times(self) -> None:
        for history, target, samples, *times in self._unread:
            seconds = self._instruments.seconds(*times) / samples
            history.timings.setdefault(target, []).append(seconds)
        self._unread.clear()


def _needs_no_run(history: SizeHistory, size: int) -> bool:
    """Return whether a size was already measured, or _MOST_SIZES others were."""
    return size in history.runs or len(history.runs) >= _MOST_SIZES


def _begin_with(trial: int, left: int, size: int) -> list[int]:
    """Return the size of a trial, then a near-equal split of the remaining samples."""
    return [trial, *near_equal(left - trial, size)] if left > trial else [left]
