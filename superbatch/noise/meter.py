"""Average of the gradient noise scale over windows.

A window has micro-batches ``i = 1..K`` (of all ranks) with gradients ``g_i``, weights ``w_i`` that sum to
one, and ``n_i`` samples. The gradient of the batch is ``g = sum w_i g_i``. Three numbers are enough::

    A2 = sum w_i^2 |g_i|^2,  b2 = |g|^2,  Q = sum w_i^2
    |G|^2     = (b2 - A2) / (1 - Q)          unbiased if the g_i are independent with one mean G
    tr Cov(g) = (A2 - Q b2) / (1 - Q)        unbiased, however the variance depends on n_i

The noise scale is ``B = T / |G|^2`` with ``T = N_eff tr Cov(g)`` and ``N_eff = 1 / sum(w_i^2 / n_i)``. It is
computed as a ratio of two averages over windows. An average of ratios, or of parts clamped to 0, would be
biased by large factors, so nothing is clamped before the final ratio.

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
"""Measured powers of Adam's preconditioner besides 0, which is the plain gradient."""

PROXY, PROXY_WITH_GRADIENT = "proxy", "proxy, beside the gradient"
"""Names of two averages of the proxy: over all windows in which it was measured, and over the windows in
which the noise scale of the whole gradient was measured as well."""

FEWEST_WINDOWS = 8
"""Fewest windows for a noise scale; with fewer, Student's t makes the interval too wide to be useful."""

LEAST_SPREAD = 0.05
"""A window is measured if ``1 - Q`` is at least this. Below it, one micro-batch has nearly all the weight."""

LARGEST = 1e150
"""Limit of the squared gradients of a window times its samples; averages of larger squares would overflow."""

STATE_VERSION = 3
"""Version of `NoiseMeter.state_dict`. Version 2 added averages of differences over several windows, version 3
the test of independence. A state of version 2 can be loaded; its test of independence starts again."""


class NoiseMeter:
    """Measure the noise scale of the gradient over windows: ``Accumulator(observers=[NoiseMeter()])``.

    Variance and signal are averaged separately, with exponentially decaying weights (debiased). `estimate`
    divides the averages. The variance is that of *one* sample's gradient, so windows may have different
    sizes. The interval comes from differences between successive windows, so a gradient that
    shrinks during training does not widen it.

    Args:
        beta: decay factor of the averages; 0.98 remembers about 100 windows.
        every: measure every n-th window. None measures each window, but one in 20 for tiny models, where
            measuring each would add a quarter to the time.
        data_size: number of samples from which batches are drawn *without replacement*. The noise scale is
            then that of the gradient of these data. None for unlimited data, such as one pass over a stream.
        preconditioned: with Adam (torch), also measure the noise scale weighted by powers of its
            preconditioner, in extra passes over each gradient (see `superbatch.results.noise.NoiseOfModel`).
        proxy: also measure the noise of the weights and biases of LayerNorm and RMSNorm (torch) from
            gradients of single samples, which works with one micro-batch per window (see
            `superbatch.results.noise.NoiseProxy`).

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
                raise InputError(f"{name}={value!r} is not a positive int. Pass a positive int.")
        self.beta, self.every, self.data_size = beta, every, data_size
        self.preconditioned, self.proxy = bool(preconditioned), bool(proxy)
        self._begin()

    def _begin(self) -> None:
        self.passed = 0  # number of updates, measured or not
        self._windows = 0
        self._left_out: dict[str, int] = {}  # number of windows that could not be measured, by reason
        self._left_out_proxy: dict[str, int] = {}
        self._samples = 0.0
        self._groups: dict[str, Moments] = {}
        self._total = Moments()
        # Optional measurements, which some windows may lack: powers of the preconditioner, and the proxy.
        self._beside: dict[str, Moments] = {}
        self._losses = IndependenceTest()
        self._has_losses = False

    @property
    def due(self) -> bool:
        """True if the next window should be measured."""
        return self.passed % (self.every or 1) == 0

    @property
    def windows(self) -> int:
        """Number of windows measured."""
        return self._windows

    def add(self, estimates: Mapping[str, Estimate], *, samples: float) -> None:
        """Add one window to the averages.

        Args:
            estimates: result of `estimate` for each parameter group; the same groups in every window.
            samples: the window's `effective_samples`.

        Raises:
            InputError: the groups have changed, `samples` is not positive, or a number is not finite.
        """
        if self._windows and estimates.keys() != self._groups.keys():
            raise InputError(
                f"The window has the parameter groups {sorted(estimates)}, but earlier windows had "
                f"{sorted(self._groups)}. Make a new NoiseMeter when parameter groups change."
            )
        numbers = [samples, *(number for one in estimates.values() for number in one)]
        if not estimates or samples <= 0 or not all(map(math.isfinite, numbers)):
            raise InputError(
                f"The window has the estimates {dict(estimates)} and {samples} samples, but estimates "
                "must be finite, and samples positive. Leave the window out."
            )
        self._windows += 1
        self._samples = self.beta * self._samples + (1 - self.beta) * samples
        for name, one in estimates.items():
            self._groups.setdefault(name, Moments()).add(one.variance * samples, one.signal, self.beta)
        signal, variance = (math.fsum(one[part] for one in estimates.values()) for part in (0, 1))
        self._total.add(variance * samples, signal, self.beta)

    def add_beside(self, name: str, one: Estimate, *, samples: float) -> None:
        """Add an optional measurement of a window; ignore it if its square would overflow.

        Args:
            name: name of the average: from `power_name`, `PROXY` or `PROXY_WITH_GRADIENT`.
            one: result of `estimate`.
            samples: the window's `effective_samples`.
        """
        if all(abs(each) * samples < LARGEST for each in one):  # False for NaN
            self._beside.setdefault(name, Moments()).add(one.variance * samples, one.signal, self.beta)

    @property
    def centre(self) -> float:
        """Return the loss around which to compute `explained` for the next `add_losses`."""
        return self._losses.centre

    def add_losses(self, mean: float, explained: float) -> None:
        """Add the losses of one window to the test that micro-batches are independent draws.

        Args:
            mean: loss of the window, up to a factor that is the same in all windows.
            explained: variance of this loss expected from the spread of its micro-batches: ``(sum s_i^2 (l_i
                - c)^2 - q (sum s_i (l_i - c))^2) / (1 - q)``, with the shares s_i of the weight, ``q = sum
                s_i^2``, and c the `centre`.
        """
        self._has_losses = True
        self._losses.add(mean, explained)

    def expect(self, groups: Iterable[str], *, anew: bool = False) -> None:
        """Restart the averages if the parameter groups have changed, as new groups have another noise scale.

        Args:
            groups: names of the current groups.
            anew: restart in any case, because the groups contain other parameters.
        """
        if anew or (self._windows and set(groups) != self._groups.keys()):
            self._begin()

    def leave_out(self, reason: str, *, proxy: bool = False) -> None:
        """Count a window that could not be measured.

        Args:
            reason: the reason, in words.
            proxy: True if only the proxy could not be measured.
        """
        counts = self._left_out_proxy if proxy else self._left_out
        counts[reason] = counts.get(reason, 0) + 1

    def estimate(self) -> Noise:
        """Return the noise scale averaged over the windows so far.

        Examples:
            >>> NoiseMeter().estimate().reason
            '0 windows measured; 8 needed'
        """
        debias = 1 - self.beta**self._windows
        few = self._windows < FEWEST_WINDOWS
        samples = self._samples / debias if debias else 0.0
        drawn = samples / self.data_size if self.data_size else 0.0
        independence = self._losses.result(drawn) if self._has_losses else None
        total = self._ratio(self._total)
        groups = tuple(
            NoiseOfGroup(name=name, **self._ratio(moments).as_fields())
            for name, moments in self._groups.items()
        )
        noise = Noise(
            **total.as_fields(),
            windows=self._windows,
            effective_windows=worth(self.beta, self._windows),
            samples_per_window=samples,
            groups=groups,
            reason=_too_few(self._windows, self._left_out) if few else total.reason,
            data_size=self.data_size,
            models=self._models(total),
            proxy=self._proxy(total) if self.proxy else None,
            independence=independence,
        )
        shared = independence is not None and independence.verdict == "shared" and not few
        return _lower_ends(noise) if shared else noise

    def __repr__(self) -> str:
        return f"<NoiseMeter of {self._windows} windows: {self.estimate().summary()}>"

    def _ratio(self, moments: Moments) -> Ratio:
        ratio = moments.of(self.beta, self.data_size)
        return ratio if moments.count >= FEWEST_WINDOWS else ratio.without_scale()

    def _models(self, total: Ratio) -> tuple[NoiseOfModel, ...]:
        """Return the noise scale under each model of the preconditioner; empty if they are not measured."""
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
        ratio = self._ratio(moments)
        beside = self._ratio(self._beside.get(PROXY_WITH_GRADIENT, Moments())).batch_size
        reason = ratio.reason
        if moments.count < FEWEST_WINDOWS:
            reason = _too_few(moments.count, self._left_out_proxy)
        return NoiseProxy(
            **ratio.as_fields(),
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
            "left_out": dict(self._left_out),
            "samples": self._samples,
            "total": self._total.state(),
            "groups": {name: moments.state() for name, moments in self._groups.items()},
            "proxy_left_out": dict(self._left_out_proxy),
            "beside": {name: moments.state() for name, moments in self._beside.items()},
            "losses": self._losses.state() if self._has_losses else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, bit for bit.

        Args:
            state: from `state_dict`, of a meter with the same `beta`.

        Raises:
            InputError: the state is not from a NoiseMeter with this `beta`; the meter does not change.
        """
        if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (of any caller)
            raise InputError(f"{state!r} is not a saved NoiseMeter. Load the result of `state_dict()`.")
        if state.get("version") not in (2, STATE_VERSION):
            raise InputError(
                f"The state has version {state.get('version')!r}, and this superbatch reads versions 2 and "
                f"{STATE_VERSION}. Make a new NoiseMeter without loading the state; it measures again."
            )
        if state.get("beta") != self.beta:
            raise InputError(
                f"The saved NoiseMeter has beta={state.get('beta')!r}, but this one has beta={self.beta!r}. "
                "Make the NoiseMeter with the same beta, or load no state into it."
            )
        # Everything is read before the meter changes.
        try:
            passed, windows, samples = int(state["passed"]), int(state["windows"]), float(state["samples"])
            left_out, total = dict(state["left_out"]), Moments.of_state(state["total"])
            groups = {name: Moments.of_state(each) for name, each in state["groups"].items()}
            left_out_proxy = dict(state["proxy_left_out"])
            beside = {name: Moments.of_state(each) for name, each in state["beside"].items()}
            losses = state["losses"] if state["version"] == STATE_VERSION else None
            test = IndependenceTest() if losses is None else IndependenceTest.of_state(losses)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"The saved NoiseMeter is incomplete ({error!r}). Load the result of `state_dict()`."
            ) from None
        self.passed, self._windows, self._samples = passed, windows, samples
        self._left_out, self._total, self._groups = left_out, total, groups
        self._left_out_proxy, self._beside = left_out_proxy, beside
        self._losses, self._has_losses = test, losses is not None


def _lower_ends(noise: Noise) -> Noise:
    """Return the noise scales with their lower ends only.

    Shared noise counts as signal, so the true noise scales are larger than the measured ones.
    """
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
    """Return the name of the average for a power of Adam's preconditioner."""
    return f"power {power}"


def _too_few(windows: int, left_out: Mapping[str, int]) -> str:
    """Return the reason for a missing noise scale, with the most frequent reason for unmeasured windows."""
    text = f"{windows} window{'s' * (windows != 1)} measured; {FEWEST_WINDOWS} needed"
    if not left_out:
        return text
    reason = max(left_out, key=lambda each: left_out[each])
    return f"{text} ({left_out[reason]} left out: {reason})"
