"""How noisy is a gradient? Estimators of the gradient noise scale, and an average of them over windows.

A window has micro-batches ``i = 1..K`` (of all ranks) with gradients ``g_i``, weights ``w_i`` that sum to
one, and ``n_i`` samples; ``g = sum w_i g_i`` is the gradient of the batch. Two scalars are enough::

    A2 = sum w_i^2 |g_i|^2,  b2 = |g|^2,  Q = sum w_i^2
    |G|^2     = (b2 - A2) / (1 - Q)          unbiased, if the g_i are independent and have one mean G
    tr Cov(g) = (A2 - Q b2) / (1 - Q)        likewise; no model of how the variance depends on n_i

The noise scale ``B = T / |G|^2``, ``T = N_eff tr Cov(g)``, ``N_eff = 1 / sum(w_i^2 / n_i)``, is taken as a
ratio of two averages over windows. An average of ratios, or of parts that were clamped to be positive, is
biased by factors: nothing is clamped here before the very end.

Source: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162; for unequal weights as derived above.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import InputError, explain
from .noise_interval import Moments, Ratio, worth
from .report.noise import Noise, NoiseOfGroup

FEWEST_WINDOWS = 8
"""Windows from which an interval is given: below, Student's t is so wide that it says nothing."""

LEAST_SPREAD = 0.05
"""A window is measured where ``1 - Q`` is at least this: below, one micro-batch has nearly all the weight."""


class Estimate(NamedTuple):
    """What one window says; both parts are unbiased, and may come out negative.

    Attributes:
        signal: of ``|G|^2``.
        variance: of ``tr Cov(g)``, the noise of the batch's gradient (not of one sample's).
    """

    signal: float
    variance: float


def estimate(a2: float, b2: float, q: float) -> Estimate:
    """Return the signal and the noise of one window's gradient, for any weights and sizes.

    Args:
        a2: ``sum w_i^2 |g_i|^2``.
        b2: ``|g|^2`` of the summed gradient.
        q: ``sum w_i^2``, below 1.

    Returns:
        ``(b2 - a2) / (1 - q)`` and ``(a2 - q b2) / (1 - q)``.

    Raises:
        InputError: `q` is 1: there is one micro-batch, which differs from none.

    Examples:
        >>> estimate(a2=(1.0 + 9.0) / 4, b2=4.0, q=0.5)  # gradients 1 and 3, weights 1/2 each
        Estimate(signal=3.0, variance=1.0)
    """
    if not 0 < q < 1:
        raise InputError(
            explain(
                f"a window with sum w_i^2 = {q}",
                "noise is seen by the differences between micro-batches, of which there must be two",
                "use at least two micro-batches, on one rank or on several",
            )
        )
    return Estimate((b2 - a2) / (1 - q), (a2 - q * b2) / (1 - q))


def homogeneous_estimate(
    a1: float, b2: float, weights: Sequence[float], samples: Sequence[int | float]
) -> Estimate:
    """Return the same as `estimate`, under the assumption that the variance of ``g_i`` is ``T / n_i``.

    Less scattered where sizes differ much (with ``w_i = n_i / N`` it is the analysis of variance), and biased
    where the assumption fails: tokens of one text are no independent samples.

    Args:
        a1: ``sum w_i |g_i|^2``.
        b2: ``|g|^2`` of the summed gradient.
        weights: ``w_i``, which sum to one.
        samples: ``n_i``.

    Returns:
        ``b2 - q T`` and ``q T`` with ``T = (a1 - b2) / (sum w_i / n_i - q)``, ``q = sum w_i^2 / n_i``.

    Raises:
        InputError: there are fewer than two micro-batches.

    Examples:
        >>> homogeneous_estimate(5.0, 4.0, [0.5, 0.5], [8, 8])
        Estimate(signal=3.0, variance=1.0)
    """
    if len(weights) < 2:
        raise InputError(
            explain(
                f"{len(weights)} micro-batch",
                "noise is seen by the differences between micro-batches",
                "give two or more",
            )
        )
    q = sum(w * w / n for w, n in zip(weights, samples, strict=True))
    of_one_sample = (a1 - b2) / (sum(w / n for w, n in zip(weights, samples, strict=True)) - q)
    return Estimate(b2 - q * of_one_sample, q * of_one_sample)


def effective_samples(weights: Iterable[float], samples: Iterable[int | float]) -> float:
    """Return the batch of equal samples that has as little noise: ``1 / sum(w_i^2 / n_i)``.

    Args:
        weights: ``w_i``, which sum to one; micro-batches of weight 0 may be among them.
        samples: ``n_i``.

    Examples:
        >>> effective_samples([0.5, 0.5], [8, 8]), effective_samples([0.75, 0.25], [8, 8])
        (16.0, 12.8)
    """
    return 1 / math.fsum(w * w / n for w, n in zip(weights, samples, strict=True) if w)


class NoiseMeter:
    """Averages what windows say about the noise of their gradients: ``Accumulator(noise=NoiseMeter(...))``.

    Numerator and denominator are averaged apart, by exponentially decaying weights (debiased), and divided
    only when asked. Windows of different size are averaged rightly: the numerator is the variance of *one*
    sample's gradient. The interval comes from the differences between successive windows, so that a gradient
    that shrinks along the training is not taken for an uncertain one.

    Args:
        beta: how much of the average the next window leaves: 0.98 remembers about 100 windows.
        every: measure one window in so many. None: each, but for tiny models one in 10: there a call costs
            more than its arithmetic, and to measure each window would take a quarter of its time.
        data_size: samples that batches are drawn from *without replacement*. The noise scale is then that of
            the gradient of these data; None: they are as good as endless, as in one pass over a stream.

    Raises:
        InputError: an option is out of range.

    Examples:
        >>> import random
        >>> meter, normal = NoiseMeter(), random.Random(0).gauss
        >>> for _ in range(200):  # |G|^2 = 1, a variance of 30 per sample, two micro-batches of 10
        ...     one, other = ([1 + normal(0, 1)] + [normal(0, 1) for _ in range(2)] for _ in range(2))
        ...     half = [(x + y) / 2 for x, y in zip(one, other)]
        ...     a2 = sum(x * x for x in one + other) / 4
        ...     meter.add({"all": estimate(a2, sum(x * x for x in half), 0.5)}, samples=20)
        >>> noise = meter.estimate()
        >>> noise.low < 30 < noise.high, noise.determined
        (True, True)
    """

    def __init__(self, beta: float = 0.98, *, every: int | None = None, data_size: int | None = None) -> None:
        if isinstance(beta, bool) or not 0 < beta < 1:
            raise InputError(explain(f"beta={beta!r}", "an average remembers a part", "pass 0 < beta < 1"))
        for name, value in (("every", every), ("data_size", data_size)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  (a caller without types)
                raise InputError(explain(f"{name}={value!r}", "it is a count", "pass a positive int"))
        self.beta, self.every, self.data_size = beta, every, data_size
        self._begin()

    def _begin(self) -> None:
        self.passed = 0  # updates, measured or not
        self._windows = 0
        self._seen: dict[str, int] = {}  # windows that were not measured, by the reason
        self._samples = 0.0
        self._groups: dict[str, Moments] = {}
        self._total = Moments()

    @property
    def due(self) -> bool:
        """Whether the next window is one to be measured."""
        return self.passed % (self.every or 1) == 0

    @property
    def windows(self) -> int:
        """Number of windows measured."""
        return self._windows

    def add(self, estimates: Mapping[str, Estimate], *, samples: float) -> None:
        """Take in one window.

        Args:
            estimates: of each parameter group, from `estimate`; the same groups in every window.
            samples: the window's `effective_samples`.

        Raises:
            InputError: the groups are others than before, or a number is not finite.
        """
        if self._windows and estimates.keys() != self._groups.keys():
            raise InputError(
                explain(
                    f"a window with the groups {sorted(estimates)}",
                    f"those before had {sorted(self._groups)}",
                    "make a new NoiseMeter when parameter groups change",
                )
            )
        numbers = [samples, *(number for one in estimates.values() for number in one)]
        if not estimates or samples <= 0 or not all(map(math.isfinite, numbers)):
            raise InputError(
                explain(
                    f"a window with {dict(estimates)} from {samples} samples",
                    "one that is not finite would never leave the average",
                    "leave it out",
                )
            )
        self._windows += 1
        self._samples = self._moved(self._samples, samples)
        for name, one in estimates.items():
            self._groups.setdefault(name, Moments()).add(one.variance * samples, one.signal, self.beta)
        signal, variance = (math.fsum(one[part] for one in estimates.values()) for part in (0, 1))
        self._total.add(variance * samples, signal, self.beta)

    def expect(self, groups: Iterable[str]) -> None:
        """Begin anew if the parameter groups are others than before: it would be another noise scale.

        Args:
            groups: their names.
        """
        if self._windows and set(groups) != self._groups.keys():
            self._begin()

    def leave_out(self, reason: str) -> None:
        """Note a window that could not be measured.

        Args:
            reason: why.
        """
        self._seen[reason] = self._seen.get(reason, 0) + 1

    def estimate(self) -> Noise:
        """Return the noise scale as it is known now.

        Examples:
            >>> NoiseMeter().estimate().reason
            '0 windows measured; 8 needed'
        """
        debias = 1 - self.beta**self._windows
        few = self._windows < FEWEST_WINDOWS

        def ratio(moments: Moments) -> Ratio:
            found = moments.of(self.beta, self.data_size)
            return found._replace(batch_size=None, low=0.0, high=math.inf) if few else found

        total = ratio(self._total)
        groups = tuple(
            NoiseOfGroup(name=name, **ratio(moments).as_fields()) for name, moments in self._groups.items()
        )
        return Noise(
            **total.as_fields(),
            windows=self._windows,
            effective_windows=worth(self.beta, self._windows),
            samples_per_window=self._samples / debias if debias else 0.0,
            groups=groups,
            reason=self._too_few() if few else total.reason,
            data_size=self.data_size,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what has been averaged so far: plain containers of numbers."""
        return {
            "version": 1,
            "beta": self.beta,
            "passed": self.passed,
            "windows": self._windows,
            "left_out": dict(self._seen),
            "samples": self._samples,
            "total": list(self._total.values),
            "groups": {name: list(moments.values) for name, moments in self._groups.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit for bit.

        Args:
            state: from `state_dict`, of a meter with the same `beta`.

        Raises:
            InputError: it is no such state.
        """
        if state.get("version") != 1 or state.get("beta") != self.beta:
            raise InputError(
                explain(
                    f"a saved average with beta={state.get('beta')!r}",
                    f"this one has beta={self.beta!r}, and two memories do not mix",
                    "make the NoiseMeter with the same beta, or load no state into it",
                )
            )
        self.passed = int(state["passed"])
        self._windows, self._samples = int(state["windows"]), float(state["samples"])
        self._seen = dict(state["left_out"])
        self._total = Moments(state["total"], self._windows)
        self._groups = {name: Moments(values, self._windows) for name, values in state["groups"].items()}

    def _moved(self, mean: float, value: float) -> float:
        return self.beta * mean + (1 - self.beta) * value

    def _too_few(self) -> str:
        said = f"{self._windows} window{'s' * (self._windows != 1)} measured; {FEWEST_WINDOWS} needed"
        if not self._seen:
            return said
        reason = max(self._seen, key=lambda each: self._seen[each])
        return f"{said} ({self._seen[reason]} left out: {reason})"


def noise_over_run(
    noise: Iterable[float], *, batch_size: float, samples: Iterable[float] | None = None
) -> float:
    """Return the one noise scale that stands for a whole run, along which it changes (it mostly grows).

    A harmonic mean, weighted by progress: ``1 / (1 + B / B_t)`` of the samples of a batch B are progress.

    Args:
        noise: the noise scale ``B_t`` of stretches of the run, in samples, all positive.
        batch_size: the batch ``B`` of the run.
        samples: of each stretch; None: as many in each.

    Returns:
        ``1 / mean(1 / B_t)`` with the weights ``samples / (1 + B / B_t)``.

    Raises:
        InputError: there is no noise scale, or one is not positive.

    Examples:
        >>> round(noise_over_run([100.0, 1000.0], batch_size=100), 1)
        238.5
    """
    scales = list(noise)
    counts = [1.0] * len(scales) if samples is None else list(samples)
    if not scales or min(scales) <= 0 or batch_size <= 0:
        raise InputError(
            explain(
                f"noise scales {scales} of a run with batch {batch_size}",
                "a mean of inverses takes positive numbers, and at least one",
                "leave out stretches without a determined noise scale",
            )
        )
    progress = [n / (1 + batch_size / each) for n, each in zip(counts, scales, strict=True)]
    return math.fsum(progress) / math.fsum(p / each for p, each in zip(progress, scales, strict=True))


def relative_time(
    accumulation_steps: float,
    *,
    noise: float,
    microbatch_size: float,
    microbatch_seconds: float,
    update_seconds: float,
    ranks: int = 1,
) -> float:
    """Return the time to a target loss with K micro-batches per update, relative to that with one.

    ``W(K) / W(1)`` with ``W(K) = (1 + K b R / B) (t_micro + t_update / K) / (b R)``: a larger batch needs
    more samples (the first factor), and fewer updates (the second). Below 1, accumulation pays.

    Args:
        accumulation_steps: K, at least 1.
        noise: the noise scale B in samples, not negative; may be infinite.
        microbatch_size: b, samples of a micro-batch.
        microbatch_seconds: forward and backward of one.
        update_seconds: what an update takes beside them: optimizer, all-reduce, offloading.
        ranks: R, that work at the same time.

    Examples:
        >>> alone = relative_time(16, noise=1000, microbatch_size=32, microbatch_seconds=0.1,
        ...     update_seconds=0.0)
        >>> slow = relative_time(16, noise=1000, microbatch_size=32, microbatch_seconds=0.1,
        ...     update_seconds=1.0)
        >>> round(alone, 3), round(slow, 3)
        (1.465, 0.216)
    """
    k, batch = accumulation_steps, microbatch_size * ranks
    samples = 1.0 if math.isinf(noise) else (noise + k * batch) / (noise + batch)
    return samples * (microbatch_seconds + update_seconds / k) / (microbatch_seconds + update_seconds)
