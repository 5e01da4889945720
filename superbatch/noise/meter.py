"""Estimators of the gradient noise scale, and an average of them over windows.

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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import InputError
from ..results.noise import Noise, NoiseOfGroup, NoiseOfModel, NoiseProxy
from .estimates import Estimate as Estimate
from .estimates import effective_samples as effective_samples
from .estimates import estimate as estimate
from .estimates import homogeneous_estimate as homogeneous_estimate
from .independence import IndependenceTest
from .interval import Moments, Ratio, worth
from .over_run import noise_over_run as noise_over_run
from .over_run import relative_time as relative_time

POWERS = (1, 2)
"""Powers of Adam's preconditioner that are measured beside 0, which is the plain gradient."""

PROXY, PROXY_BESIDE = "proxy", "proxy, beside the gradient"
"""Averages of what single samples' gradients say: in all windows, and in those that also say the rest."""

FEWEST_WINDOWS = 8
"""Windows from which an interval is given: below, Student's t is so wide that it says nothing."""

LEAST_SPREAD = 0.05
"""A window is measured where ``1 - Q`` is at least this: below, one micro-batch has nearly all the weight."""

LARGEST = 1e150
"""Of the squared gradients of a window times its samples: averages of their squares would overflow."""

STATE_VERSION = 3
"""Of `NoiseMeter.state_dict`: averages of differences over several windows came with 2, the test of
independence with 3. A state of 2 is read: its test begins anew."""


class NoiseMeter:
    """Average over windows of the noise of their gradients: ``Accumulator(observers=[NoiseMeter()])``.

    Numerator and denominator are averaged apart, by exponentially decaying weights (debiased), and divided
    only when asked. Windows of different size are averaged rightly: the numerator is the variance of *one*
    sample's gradient. The interval comes from the differences between successive windows, so that a gradient
    that shrinks along the training is not taken for an uncertain one.

    Args:
        beta: how much of the average the next window leaves: 0.98 remembers about 100 windows.
        every: measure one window in this many. None: each, but for tiny models one in 20: there a call costs
            more than its arithmetic, and to measure each window would take a quarter of its time.
        data_size: samples that batches are drawn from *without replacement*. The noise scale is then that of
            the gradient of these data; None: they are as good as endless, as in one pass over a stream.
        preconditioned: with Adam (torch), measure it also by powers of its preconditioner: see
            `superbatch.results.noise.NoiseOfModel`. It costs some passes over each gradient.
        proxy: measure also the noise of the scales and shifts of LayerNorm and RMSNorm (torch) from the
            gradients of single samples, which tells something of a window of one micro-batch: see
            `superbatch.results.noise.NoiseProxy`.

    Raises:
        InputError: an option is out of range.

    Examples:
        >>> import random
        >>> meter, normal = NoiseMeter(), random.Random(0).gauss
        >>> for _ in range(200):  # |G|^2 = 4, a variance of 30 per sample, two micro-batches of 10
        ...     one, other = ([2 + normal(0, 1)] + [normal(0, 1) for _ in range(2)] for _ in range(2))
        ...     half = [(x + y) / 2 for x, y in zip(one, other)]
        ...     a2 = sum(x * x for x in one + other) / 4
        ...     meter.add({"all": estimate(a2, sum(x * x for x in half), 0.5)}, samples=20)
        >>> noise = meter.estimate()
        >>> noise.low < 7.5 < noise.high, noise.determined
        (True, True)
    """

    def __init__(
        self,
        beta: float = 0.98,
        *,
        every: int | None = None,
        data_size: int | None = None,
        preconditioned: bool = False,
        proxy: bool = False,
    ) -> None:
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  (a caller without types)
            raise InputError(f"beta={beta!r} is not between 0 and 1. Pass 0 < beta < 1.")
        for name, value in (("every", every), ("data_size", data_size)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  (a caller without types)
                raise InputError(f"{name}={value!r} is not a positive int. Pass one.")
        self.beta, self.every, self.data_size = beta, every, data_size
        self.preconditioned, self.proxy = bool(preconditioned), bool(proxy)
        self._begin()

    def _begin(self) -> None:
        self.passed = 0  # updates, measured or not
        self._windows = 0
        self._seen: dict[str, int] = {}  # windows that were not measured, by the reason
        self._seen_proxy: dict[str, int] = {}
        self._samples = 0.0
        self._groups: dict[str, Moments] = {}
        self._total = Moments()
        self._beside: dict[str, Moments] = {}  # what else was measured in some of the windows
        self._losses = IndependenceTest()
        self._has_losses = False

    @property
    def due(self) -> bool:
        """True if the next window is one to be measured."""
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
                f"The window has the groups {sorted(estimates)}, and those before it had "
                f"{sorted(self._groups)}. Make a new NoiseMeter when parameter groups change."
            )
        numbers = [samples, *(number for one in estimates.values() for number in one)]
        if not estimates or samples <= 0 or not all(map(math.isfinite, numbers)):
            raise InputError(
                f"The window gave {dict(estimates)} from {samples} samples, and a value that is not finite "
                "would never leave the average. Leave the window out."
            )
        self._windows += 1
        self._samples = self._moved(self._samples, samples)
        for name, one in estimates.items():
            self._groups.setdefault(name, Moments()).add(one.variance * samples, one.signal, self.beta)
        signal, variance = (math.fsum(one[part] for one in estimates.values()) for part in (0, 1))
        self._total.add(variance * samples, signal, self.beta)

    def add_beside(self, name: str, one: Estimate, *, samples: float) -> None:
        """Add another measurement of a window; one whose squares are not finite is left out.

        Args:
            name: of the average.
            one: from `estimate`.
            samples: the window's `effective_samples`.
        """
        if all(abs(each) * samples < LARGEST for each in one):  # or NaN
            self._beside.setdefault(name, Moments()).add(one.variance * samples, one.signal, self.beta)

    @property
    def centre(self) -> float:
        """The loss around which `add_losses` wants the spread of the next window."""
        return self._losses.centre

    def add_losses(self, mean: float, explained: float) -> None:
        """Take in the losses of one window, which show whether its micro-batches are independent draws.

        Args:
            mean: the window's loss, up to a factor that is the same in all windows.
            explained: variance of that mean by the spread of its micro-batches: ``(sum s_i^2 (l_i - c)^2 - q
                (sum s_i (l_i - c))^2) / (1 - q)`` with shares s_i of the weight, ``q = sum s_i^2`` and c the
                `centre`.
        """
        self._has_losses = True
        self._losses.add(mean, explained)

    def expect(self, groups: Iterable[str], *, anew: bool = False) -> None:
        """Restart the average if the parameter groups changed: their noise scale is another one.

        Args:
            groups: their names.
            anew: their parameters are others, whatever their names.
        """
        if anew or (self._windows and set(groups) != self._groups.keys()):
            self._begin()

    def leave_out(self, reason: str, *, proxy: bool = False) -> None:
        """Note a window that could not be measured.

        Args:
            reason: why.
            proxy: it is the proxy that could not.
        """
        seen = self._seen_proxy if proxy else self._seen
        seen[reason] = seen.get(reason, 0) + 1

    def estimate(self) -> Noise:
        """Return the noise scale as it is known now.

        Examples:
            >>> NoiseMeter().estimate().reason
            '0 windows measured; 8 needed'
        """
        debias = 1 - self.beta**self._windows
        few = self._windows < FEWEST_WINDOWS
        samples = self._samples / debias if debias else 0.0
        drawn = samples / self.data_size if self.data_size else 0.0
        independence = self._losses.judged(drawn) if self._has_losses else None
        total = self._ratio(self._total)
        groups = tuple(
            NoiseOfGroup(name=name, **self._ratio(moments).as_fields())
            for name, moments in self._groups.items()
        )
        found = Noise(
            **total.as_fields(),
            windows=self._windows,
            effective_windows=worth(self.beta, self._windows),
            samples_per_window=samples,
            groups=groups,
            reason=_too_few(self._windows, self._seen) if few else total.reason,
            data_size=self.data_size,
            models=self._models(total),
            proxy=self._proxy(total) if self.proxy else None,
            independence=independence,
        )
        shared = independence is not None and independence.verdict == "shared" and not few
        return _lower_ends(found) if shared else found

    def __repr__(self) -> str:
        return f"<NoiseMeter of {self._windows} windows: {self.estimate().summary()}>"

    def _ratio(self, moments: Moments) -> Ratio:
        found = moments.of(self.beta, self.data_size)
        if moments.count >= FEWEST_WINDOWS:
            return found
        return found.without_scale()

    def _models(self, total: Ratio) -> tuple[NoiseOfModel, ...]:
        """The plain one and the others, where these are measured."""
        others = [(power, self._beside.get(power_name(power), Moments())) for power in POWERS]
        if not any(moments.count for _, moments in others):
            return ()
        return (
            NoiseOfModel(power=0, windows=self._windows, **total.as_fields()),
            *(
                NoiseOfModel(power=power, windows=moments.count, **self._ratio(moments).as_fields())
                for power, moments in others
            ),
        )

    def _proxy(self, total: Ratio) -> NoiseProxy:
        moments = self._beside.get(PROXY, Moments())
        found = self._ratio(moments)
        beside = self._ratio(self._beside.get(PROXY_BESIDE, Moments())).batch_size
        reason = found.reason
        if moments.count < FEWEST_WINDOWS:
            reason = _too_few(moments.count, self._seen_proxy)
        return NoiseProxy(
            **found.as_fields(),
            windows=moments.count,
            factor=total.batch_size / beside if total.batch_size and beside else None,
            reason=reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the averages so far: plain containers of numbers."""
        return {
            "version": STATE_VERSION,
            "beta": self.beta,
            "passed": self.passed,
            "windows": self._windows,
            "left_out": dict(self._seen),
            "samples": self._samples,
            "total": self._total.state(),
            "groups": {name: moments.state() for name, moments in self._groups.items()},
            "proxy_left_out": dict(self._seen_proxy),
            "beside": {name: moments.state() for name, moments in self._beside.items()},
            "losses": self._losses.state() if self._has_losses else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, bit for bit.

        Args:
            state: from `state_dict`, of a meter with the same `beta`.

        Raises:
            InputError: it is no such state; nothing has changed.
        """
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (of any caller)
            raise InputError(f"{state!r} is no saved average. Load what `state_dict()` returned.")
        if state.get("version") not in (2, STATE_VERSION):
            raise InputError(
                f"The state has version {state.get('version')!r}, and this superbatch reads versions 2 and "
                f"{STATE_VERSION}. Make a new NoiseMeter, which measures again, and load no state into it."
            )
        if state.get("beta") != self.beta:
            raise InputError(
                f"The saved average has beta={state.get('beta')!r}, and this NoiseMeter beta={self.beta!r}. "
                "Make the NoiseMeter with the same beta, or load no state into it."
            )
        try:
            passed, windows, samples = int(state["passed"]), int(state["windows"]), float(state["samples"])
            seen, total = dict(state["left_out"]), Moments.of_state(state["total"])
            groups = {name: Moments.of_state(each) for name, each in state["groups"].items()}
            seen_proxy = dict(state["proxy_left_out"])
            beside = {name: Moments.of_state(each) for name, each in state["beside"].items()}
            losses = state["losses"] if state["version"] == STATE_VERSION else None
            test = IndependenceTest() if losses is None else IndependenceTest.of_state(losses)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"The saved average is incomplete ({error!r}). Load what `state_dict()` returned."
            ) from None
        self.passed, self._windows, self._samples = passed, windows, samples
        self._seen, self._total, self._groups = seen, total, groups
        self._seen_proxy, self._beside = seen_proxy, beside
        self._losses, self._has_losses = test, losses is not None

    def _moved(self, mean: float, value: float) -> float:
        return self.beta * mean + (1 - self.beta) * value


def _lower_ends(noise: Noise) -> Noise:
    """The lower ends alone: shared noise is counted as signal, so that each true number is larger."""
    assert noise.independence is not None
    bound = {"batch_size": None, "high": math.inf}
    proxy, reason = noise.proxy, noise.independence.text
    return replace(
        noise,
        **bound,
        reason=reason,
        groups=tuple(replace(each, **bound) for each in noise.groups),
        models=tuple(replace(each, **bound) for each in noise.models),
        proxy=None if proxy is None else replace(proxy, **bound, factor=None, reason=reason),
    )


def power_name(power: int) -> str:
    """The name of the average by a power of Adam's preconditioner."""
    return f"power {power}"


def _too_few(windows: int, left_out: Mapping[str, int]) -> str:
    said = f"{windows} window{'s' * (windows != 1)} measured; {FEWEST_WINDOWS} needed"
    if not left_out:
        return said
    reason = max(left_out, key=lambda each: left_out[each])
    return f"{said} ({left_out[reason]} left out: {reason})"
