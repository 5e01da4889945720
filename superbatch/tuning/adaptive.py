"""Adapt the batch size to the noise: tests of a batch size, and a controller of accumulation steps.

All functions use ``rho = tr Cov(g) / |G|^2``, the noise over signal of the batch's gradient ``g``. Both parts
are unbiased estimates (`superbatch.noise`):

    norm test      rho <= rho*                          (Byrd et al. 2012; Lau et al. 2024, arXiv:2402.11215)
    cosine test    E cos(two halves) = 1 / (1 + 2 rho) >= c            (SimiGrad, Qin et al., NeurIPS 2021)

The usual norm test divides by ``|g|^2``, which includes the noise. Its ratio is ``rho / (1 + rho)``, always
below 1, so a batch always passes with ``theta = 1``. `naive_ratio` converts rho* to ``theta^2``.

The controller uses past windows only. If a window's own gradient decided its length, the gradient would be
biased: the window would end sooner with some noise than with other (see `torch.tuning.update_until`).
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
"""Accumulation steps change only by more than this share, because each change disturbs the measurement."""

FACTOR = 2
"""Accumulation steps grow or shrink by at most this factor from one window to the next."""


@dataclass(frozen=True)
class BatchTest:
    """Result of a test that a batch is large enough.

    Without a determined noise scale, all values except `bound` are None.

    Attributes:
        passed: True if the batch is large enough.
        value: the tested quantity: rho, or the expected cosine.
        bound: the threshold.
        batch: the smallest batch that passes, in samples.
    """

    passed: bool | None
    value: float | None
    bound: float
    batch: float | None


def norm_test(noise: Noise, *, samples: float | None = None, target: float = 1.0) -> BatchTest:
    """Test that a batch has at most `target` times as much noise as signal.

    Args:
        noise: the measured noise scale.
        samples: samples of the batch; None for the measured batch.
        target: rho*, the largest allowed noise over signal. With 1, the smallest batch that passes is as
            large as the noise scale.

    Returns:
        The result; its `batch` is the noise scale over `target`.

    Raises:
        InputError: `target` or `samples` is not positive.

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
    """Test that the expected cosine between the gradients of a batch's two halves is large enough.

    It is computed from the noise scale, ``E cos = 1 / (1 + 2 rho)``, without gradients of the halves.

    Args:
        noise: the measured noise scale.
        cosine: c, the smallest allowed cosine, between 0 and 1.
        samples: samples of the batch; None for the measured batch.

    Returns:
        The result; its `batch` is ``2 B_noise c / (1 - c)``.

    Raises:
        InputError: `cosine` is not between 0 and 1, or `samples` is not positive.

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
    """Return the expected cosine between the gradients of two half batches: ``1 / (1 + 2 rho)``.

    Args:
        ratio: rho of the whole batch.

    Returns:
        The cosine. The formula assumes that the noise has many directions.

    Examples:
        >>> round(expected_cosine(0.1), 3), round(expected_cosine(1.0), 3)
        (0.833, 0.333)
    """
    # Half a batch has twice the noise, so |g_half|^2 is |G|^2 (1 + 2 rho), and two halves share only G.
    return 1 / (1 + 2 * ratio)


def ratio_at_cosine(cosine: float) -> float:
    """Return the noise over signal at which two half batches have this cosine: ``(1/c - 1) / 2``.

    Args:
        cosine: the cosine c, between 0 and 1.

    Returns:
        rho of the whole batch.

    Raises:
        InputError: the cosine is not between 0 and 1.

    Examples:
        >>> ratio_at_cosine(0.5)
        0.5
    """
    if not 0 < cosine < 1:
        raise InputError(f"cosine={cosine!r} is not between 0 and 1. Pass a number that is.")
    return (1 / cosine - 1) / 2


def naive_ratio(ratio: float) -> float:
    """Return the ``theta^2`` of the usual norm test that is equivalent to rho*: ``rho* / (1 + rho*)``.

    Args:
        ratio: rho*, noise over signal.

    Returns:
        ``theta^2``, below 1.

    Examples:
        >>> naive_ratio(1.0), naive_ratio(7.3)
        (0.5, 0.879...)
    """
    # E |g|^2 = |G|^2 + tr Cov(g).
    return ratio / (1 + ratio)


class Controller:
    """Controller that chooses the accumulation steps of each window from the noise of the windows before it.

    The steps are ``K = ceil(B_noise / (target x microbatch))``, within a factor of 2 of the previous steps,
    and between `least` and `most`. A change of 10 % or less is not made. Without a determined noise scale,
    the steps stay if the batch is within the interval of the noise scale. Otherwise they move towards the
    nearer end of the interval, so a window that is too short to show the signal grows until it does.

    Pass it to `windows` as the accumulation steps; `windows` calls it once per window, on every rank.

    Args:
        noise: function that returns the current noise scale, such as ``lambda: accumulate.noise``.
        microbatch: samples of one micro-batch, on all ranks together.
        start: accumulation steps of the first window. On one rank, pass at least 2 here and for `least`:
            noise is measured from differences between micro-batches.
        target: noise over signal to reach (see `norm_test`).
        least: smallest number of accumulation steps.
        most: largest number of accumulation steps; None for no limit.
        first: function that returns rank 0's argument on every rank, so that windows have the same length
            everywhere; `superbatch.torch.tuning.controller` sets it.

    Raises:
        InputError: an argument is out of range.

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
                f"start={start} is not between least={least} and most={most}. Pass least <= start <= most."
            )

    @property
    def steps(self) -> int:
        """Return the accumulation steps chosen last."""
        return self._steps

    def __call__(self, update: int) -> int:
        """Return the accumulation steps of an update; a second call for the same update returns the same.

        Args:
            update: index of the update.
        """
        check_update(update, "update")
        if update != self._update:
            # The first window has `start` micro-batches, whatever the noise.
            if self._update >= 0 or update > 0:
                self._steps = self._first(self.propose(self._noise()))
            self._update = update
        return self._steps

    def propose(self, noise: Noise | None) -> int:
        """Return the steps of the next window for a noise scale, without changing the controller.

        Args:
            noise: the noise scale; None if it was not measured.
        """
        if not self._least <= self._steps <= self._most:  # loaded from a run with other bounds
            return int(min(max(self._steps, self._least), self._most))
        if noise is None:
            return self._steps
        if noise.batch_size is not None and noise.determined:
            steps = self._steps_for(noise.batch_size)
        else:
            # Move to the nearer end of the interval. If the steps stayed, a window that is too short to show
            # the signal would never grow.
            steps = min(max(self._steps, self._steps_for(noise.low)), self._steps_for(noise.high))
        low = max(self._least, math.ceil(self._steps / FACTOR))
        high = min(self._most, self._steps * FACTOR)
        steps = int(min(max(steps, low), high))
        return steps if abs(steps - self._steps) > CHANGE * self._steps else self._steps

    def _steps_for(self, noise: float) -> float:
        """Return the accumulation steps that reach the target at a noise scale; may be infinite or 0."""
        steps = noise / (self._target * self._microbatch)
        return math.ceil(steps) if math.isfinite(steps) else steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: the steps, and the index of their update."""
        return {"version": 1, "steps": self._steps, "update": self._update}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: result of `state_dict`.

        Raises:
            InputError: the state is not from a Controller; the controller does not change.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1:  # pyright: ignore[reportUnnecessaryIsInstance]  (of any caller)
            raise InputError(
                "The state is not a mapping with version 1, so no Controller saved it. Pass the result of "
                "Controller.state_dict()."
            )
        steps, update = state.get("steps"), state.get("update")
        # -1 is the update before the first one.
        if type(steps) is not int or steps < 1 or type(update) is not int or update < -1:
            raise InputError(
                f"The saved Controller has steps={steps!r} and update={update!r}, not a positive int and an "
                "int of at least -1. Pass the result of Controller.state_dict()."
            )
        self._steps, self._update = steps, update


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name}={value!r} is not a positive number. Pass one.")
    return value
