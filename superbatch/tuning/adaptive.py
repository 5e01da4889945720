"""Batch size that follows the noise: tests of its size, and a controller of accumulation steps.

All of it is a function of ``rho = tr Cov(g) / |G|^2``, noise over signal of the batch's gradient ``g``, with
both parts unbiased (`superbatch.noise`):

    norm test      rho <= rho*                          (Byrd et al. 2012; Lau et al. 2024, arXiv:2402.11215)
    cosine test    E cos(two halves) = 1 / (1 + 2 rho) >= c            (SimiGrad, Qin et al., NeurIPS 2021)

The usual norm test divides by ``|g|^2``, which holds the noise too: its ratio is ``rho / (1 + rho)``, below 1
whatever the noise, so ``theta = 1`` always passes. `naive_ratio` says which ``theta^2`` means which rho*.

The controller decides from windows that are past. Whoever uses a window's gradient to decide whether the
window is long enough selects by the noise, and its mean is biased (see `torch.tuning.update_until`).
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..integers import positive_int
from ..results.noise import Noise
from ..schedule import check_update

CHANGE = 0.10
"""A window is changed only by more than this share: each change disturbs what is measured."""

FACTOR = 2
"""A window becomes at most this many times longer or shorter than the one before."""


@dataclass(frozen=True)
class BatchTest:
    """Test that a batch is large enough.

    Attributes:
        passed: None where the noise scale is not determined.
        value: what was tested: rho, or the cosine; None likewise.
        bound: the threshold.
        batch: the batch in samples that just passes; None likewise.
    """

    passed: bool | None
    value: float | None
    bound: float
    batch: float | None


def norm_test(noise: Noise, *, samples: float | None = None, target: float = 1.0) -> BatchTest:
    """Test whether a batch has at most `target` times as much noise as signal.

    Args:
        noise: as measured.
        samples: of the batch; None: as those that were measured.
        target: rho*; 1 is a batch as large as the noise scale, half of whose samples are progress.

    Returns:
        The answer; with `batch` the noise scale over `target`.

    Raises:
        InputError: the target is not positive.

    Examples:
        >>> noise = Noise(batch_size=400.0, low=300.0, high=550.0, signal=0.5, variance=200.0, windows=80,
        ...     effective_windows=60.0, samples_per_window=100.0, groups=(), reason=None)
        >>> norm_test(noise)
        BatchTest(passed=False, value=4.0, bound=1.0, batch=400.0)
    """
    _positive("target", target)
    if noise.batch_size is None or not noise.determined:
        return BatchTest(None, None, target, None)
    ratio = noise.batch_size / _positive("samples", noise.samples_per_window if samples is None else samples)
    return BatchTest(ratio <= target, ratio, target, noise.batch_size / target)


def cosine_test(noise: Noise, *, cosine: float, samples: float | None = None) -> BatchTest:
    """Test whether the expected cosine between the gradients of a batch's two halves is large enough.

    No second gradient is kept: ``E cos = 1 / (1 + 2 rho)``.

    Args:
        noise: as measured.
        cosine: that is wished for, between 0 and 1.
        samples: of the batch; None: as those that were measured.

    Returns:
        The answer; with `batch` = ``2 B_noise c / (1 - c)``.

    Raises:
        InputError: the cosine is not between 0 and 1.

    Examples:
        >>> noise = Noise(batch_size=100.0, low=80.0, high=130.0, signal=0.5, variance=50.0, windows=80,
        ...     effective_windows=60.0, samples_per_window=100.0, groups=(), reason=None)
        >>> cosine_test(noise, cosine=0.5)
        BatchTest(passed=False, value=0.333..., bound=0.5, batch=200.0)
    """
    tested = norm_test(noise, samples=samples, target=ratio_at_cosine(cosine))
    value = None if tested.value is None else expected_cosine(tested.value)
    return BatchTest(tested.passed, value, cosine, tested.batch)


def expected_cosine(ratio: float) -> float:
    """The cosine of the gradients of two half batches: ``1 / (1 + 2 rho)``.

    Args:
        ratio: rho of the whole batch.

    Returns:
        The cosine that is expected where the noise has many directions.

    Examples:
        >>> round(expected_cosine(0.1), 3), round(expected_cosine(1.0), 3)
        (0.833, 0.333)
    """
    return 1 / (1 + 2 * ratio)


def ratio_at_cosine(cosine: float) -> float:
    """The noise over signal at which two half batches have this cosine: ``(1/c - 1) / 2``.

    Args:
        cosine: between 0 and 1.

    Returns:
        rho.

    Raises:
        InputError: it is not between 0 and 1.

    Examples:
        >>> ratio_at_cosine(0.5)
        0.5
    """
    if not 0 < cosine < 1:
        raise InputError(f"No finite batch has cosine={cosine!r}. Pass a number between 0 and 1.")
    return (1 / cosine - 1) / 2


def naive_ratio(ratio: float) -> float:
    """Return the ratio measured with ``|g|^2`` of the noisy gradient as divisor: ``rho / (1 + rho)``.

    Args:
        ratio: rho*, the noise over signal that is meant.

    Returns:
        The ``theta^2`` to give to such a test; below 1 always.

    Examples:
        >>> naive_ratio(1.0), naive_ratio(7.3)
        (0.5, 0.879...)
    """
    return ratio / (1 + ratio)


class Controller:
    """Chooses the accumulation steps of each window from the noise of windows before it.

    ``K = ceil(B_noise / (target x microbatch))``, at most twice or half the steps before, between `least` and
    `most`, and changed only by more than 10 %. While the noise scale is not determined, the steps are held
    where its interval allows them, and move towards the interval's nearer end else: a window too short to
    show the signal grows until it does.

    Pass it to `windows` as the accumulation steps: it is asked once for each window, on every rank.

    Args:
        noise: what is known now, such as ``lambda: accumulate.noise``.
        microbatch: samples of one micro-batch, on all ranks together.
        start: accumulation steps of the first window. Noise is seen by the differences of micro-batches: on
            one rank 2 at least, and `least` 2.
        target: noise over signal that is aimed at (see `norm_test`).
        least: accumulation steps at least.
        most: accumulation steps at most; None: no cap of your own.
        first: rank 0's number on every rank, so that all have windows of one length; see
            `superbatch.torch.tuning.controller`.

    Raises:
        InputError: a value cannot be used.

    Examples:
        >>> noise = Noise(batch_size=400.0, low=300.0, high=550.0, signal=0.5, variance=200.0, windows=80,
        ...     effective_windows=60.0, samples_per_window=100.0, groups=(), reason=None)
        >>> controller = Controller(lambda: noise, microbatch=10, start=4)
        >>> [controller(update) for update in range(6)]
        [4, 8, 16, 32, 40, 40]
    """

    def __init__(
        self,
        noise: Callable[[], Noise | None],
        *,
        microbatch: int,
        start: int,
        target: float = 1.0,
        least: int = 1,
        most: int | None = None,
        first: Callable[[int], int] = int,
    ) -> None:
        self._noise, self._first = noise, first
        self._microbatch = positive_int("microbatch", microbatch)
        self._target = _positive("target", target)
        self._least = positive_int("least", least)
        self._most = math.inf if most is None else positive_int("most", most)
        self._steps, self._update = positive_int("start", start), -1
        if not self._least <= start <= self._most:
            raise InputError(
                f"start={start} is not from least={least} to most={most}. Give least <= start <= most."
            )

    @property
    def steps(self) -> int:
        """The accumulation steps that were chosen last."""
        return self._steps

    def __call__(self, update: int) -> int:
        """Choose the accumulation steps of an update; asked again for the same update, say the same.

        Args:
            update: its index.
        """
        check_update(update, "update")
        if update != self._update:
            # The first window of all is as long as was asked for.
            if self._update >= 0 or update > 0:
                self._steps = self._first(self.propose(self._noise()))
            self._update = update
        return self._steps

    def propose(self, noise: Noise | None) -> int:
        """Return the steps that would come next with this noise; nothing changes.

        Args:
            noise: as measured; None: not measured.
        """
        if not self._least <= self._steps <= self._most:  # loaded from a run with other bounds
            return int(min(max(self._steps, self._least), self._most))
        if noise is None:
            return self._steps
        if noise.batch_size is not None and noise.determined:
            wanted = self._reaching(noise.batch_size)
        else:
            # Short windows may never show the signal, and windows that are held stay short. The interval is
            # known all the same: nothing speaks for a batch outside of it.
            wanted = min(max(self._steps, self._reaching(noise.low)), self._reaching(noise.high))
        low = max(self._least, math.ceil(self._steps / FACTOR))
        high = min(self._most, self._steps * FACTOR)
        wanted = int(min(max(wanted, low), high))
        return wanted if abs(wanted - self._steps) > CHANGE * self._steps else self._steps

    def _reaching(self, batch: float) -> float:
        """Accumulation steps of a batch that just passes; may be infinite, or 0."""
        steps = batch / (self._target * self._microbatch)
        return math.ceil(steps) if math.isfinite(steps) else steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: the steps, and the update for which they were chosen."""
        return {"version": 1, "steps": self._steps, "update": self._update}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: from `state_dict`.

        Raises:
            InputError: it is no such state; nothing has changed.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1:  # pyright: ignore[reportUnnecessaryIsInstance]  (of any caller)
            raise InputError(
                "The state has no version 1, so no Controller saved it. Pass what its state_dict() returned."
            )
        steps, update = state.get("steps"), state.get("update")
        if type(steps) is not int or steps < 1 or type(update) is not int or update < -1:
            raise InputError(
                f"A saved Controller with steps={steps!r} and update={update!r} is not whole. "
                "Load what `state_dict()` returned."
            )
        self._steps, self._update = steps, update


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name}={value!r} is not a positive number. Pass one.")
    return value
