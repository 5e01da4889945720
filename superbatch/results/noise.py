"""Noise scale of a gradient with its interval, or the reason why it has no value."""

from __future__ import annotations

# pyright: strict
import math
from dataclasses import dataclass
from typing import Literal

ASSUMPTION = "if the micro-batches of a window are independent draws"
"""Assumption of every noise scale; printed beside each of them."""


@dataclass(frozen=True, kw_only=True)
class Independence:
    """Result of a test that the micro-batches of a window are independent draws.

    Attributes:
        verdict: ``"shared"``: micro-batches share noise, which counts as signal, so the noise scale is too
            small. ``"even"``: windows vary less than independent draws would, so the noise scale is too
            large. None: no deviation was found, or there are too few windows.
        ratio: variance between windows over the variance that their micro-batches explain; 1 for independent
            draws, infinite if micro-batches are copies, None if not known. A loss that only falls does not
            raise it: it is the smaller of F_1 and F_0 (see `superbatch.noise.independence`).
        low: smallest lower end of the intervals of F_0, F_1 and F_2.
        high: largest upper end of the intervals of F_1 and F_2.
        triples: number of triples of windows compared; a verdict needs 20.
        by: the compared quantity.
        updates_see: noise scale from differences between whole windows, in samples, which includes the shared
            noise; None if not known, as for ``by="losses"``.
    """

    verdict: Literal["shared", "even"] | None
    ratio: float | None
    low: float
    high: float
    triples: int
    by: Literal["losses", "gradients"] = "losses"
    updates_see: float | None = None

    @property
    def text(self) -> str | None:
        """Return the verdict and the remedy in a sentence; None without a verdict."""
        if self.verdict is None or self.ratio is None:
            return None
        observation = (
            f"{self.by} of whole windows differ {self.ratio:.2g} times as much as their micro-batches explain"
            if math.isfinite(self.ratio)
            else f"{self.by} of whole windows differ, and those of the micro-batches of a window do not"
        )
        scale = self.updates_see
        effective = (
            "" if scale is None else f"; with these windows, the effective noise scale is about {scale:.2g}"
        )
        if self.verdict == "shared":
            # While parameters move, a loss that jumps from update to update looks the same.
            jumps = (
                ". If they already are shuffled, the loss jumps between updates: lower the learning rate, or "
                "test at constant parameters with superbatch.torch.tuning.independence.independence_at_rest()"
                if self.by == "losses"
                else effective
            )
            return (
                f"{observation}: micro-batches of a window share noise (similar samples, copies, one "
                "document), and a noise scale from them would be too small. Shuffle samples over "
                f"windows{jumps}"
            )
        return (
            f"{observation}: windows vary less than independent draws would, so the noise scale is too "
            "large. Draw samples at random, and pass data_size if the data set is small"
        )


@dataclass(frozen=True, kw_only=True)
class NoiseOfGroup:
    """The noise scale of one parameter group; see `Noise` for the meaning of each number.

    Attributes:
        name: name of the group.
        batch_size: its noise scale in samples; None if its signal is not distinguishable from noise.
        low: lower end of the interval.
        high: upper end of the interval; infinite if it is unbounded.
        signal: ``|G|^2`` of the group's part of the gradient.
        variance: trace of the covariance of one sample's gradient, for the group's part.
    """

    name: str
    batch_size: float | None
    low: float
    high: float
    signal: float
    variance: float


ASSUMED = {
    0: "Adam equalises the curvature",
    1: "the curvature is the preconditioner's inverse",
    2: "the curvature is equal in all directions",
}
"""Power of Adam's preconditioner -> its assumption (see `NoiseOfModel`)."""


@dataclass(frozen=True, kw_only=True)
class NoiseOfModel:
    """The noise scale under one model of Adam's preconditioner ``P = 1 / (sqrt(v_hat) + eps)``.

    ``|g|^2`` is replaced by ``sum P^power g^2``. The right power depends on the curvature H, which is not
    known. Each model may be wrong by a factor of about 3.

    Attributes:
        power: q. It is 0 if ``P H P`` is the same in all directions, 1 if ``H = 1 / P``, and 2 if H is the
            same in all directions.
        batch_size: its noise scale in samples; None if its signal is not distinguishable from noise.
        low: lower end of the interval.
        high: upper end of the interval; infinite if it is unbounded.
        signal: ``G' P^q G``, with P relative to the mean of ``1 / P``.
        variance: trace of P^q times the covariance of one sample's gradient, with the same P.
        windows: number of measured windows.
    """

    power: int
    batch_size: float | None
    low: float
    high: float
    signal: float
    variance: float
    windows: int


@dataclass(frozen=True, kw_only=True)
class NoiseProxy:
    """The noise scale of normalisation layers, from gradients of single samples: a proxy for the model's.

    It needs no second micro-batch. The noise scale of the whole model is `factor` times as large. The factor
    depends on the model and is measured in windows of several micro-batches (or ranks).

    Attributes:
        batch_size: noise scale of the weights and biases of LayerNorm and RMSNorm, in samples; None if their
            signal is not distinguishable from noise.
        low: lower end of the interval.
        high: upper end of the interval; infinite if it is unbounded.
        signal: ``|G|^2`` of these parameters.
        variance: trace of the covariance of one sample's gradient, for these parameters.
        windows: number of measured windows.
        factor: noise scale of all parameters over that of these, in the windows where both were measured;
            None if not known yet.
        reason: why `batch_size` is None; None if it has a value.

    Examples:
        >>> proxy = NoiseProxy(batch_size=300.0, low=200.0, high=500.0, signal=0.1, variance=30.0, windows=80,
        ...     factor=1.5, reason=None)
        >>> proxy.calibrated
        450.0
    """

    batch_size: float | None
    low: float
    high: float
    signal: float
    variance: float
    windows: int
    factor: float | None
    reason: str | None

    @property
    def calibrated(self) -> float | None:
        """Return the noise scale of all parameters that the proxy predicts: `factor` times `batch_size`."""
        return None if self.batch_size is None or self.factor is None else self.factor * self.batch_size


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise scale of a gradient: ``B_noise = T / |G|^2``, averaged over windows.

    ``G`` is the true gradient, ``T`` the trace of the covariance of one sample's gradient. A batch of
    `batch_size` samples has as much noise as signal. Much smaller batches are nearly all noise, so a larger
    batch pays; much larger ones are nearly all signal, so it does not.

    Attributes:
        batch_size: ``B_noise`` in samples; None if it cannot be determined: see `reason`.
        low: lower end of its 95 % interval (Fieller's); it may exist without an upper end.
        high: upper end; ``math.inf`` if it is unbounded.
        signal: average of ``|G|^2``; the unbiased estimate may be negative.
        variance: average of ``T``; the unbiased estimate may be negative.
        windows: number of measured windows.
        effective_windows: number of windows of equal weight with the same precision as the weighted average.
        samples_per_window: the mean effective batch ``1 / sum(w_i^2 / n_i)``; with equal weights it is the
            number of samples. If samples cannot be counted, weights replace ``n_i``.
        groups: noise scale of each parameter group; `signal` and `variance` are sums over the groups.
        reason: why `batch_size` is None; None if it has a value.
        data_size: number of samples from which batches are drawn without replacement; None for unlimited
            data.
        models: noise scales weighted by the powers 0 (the numbers above), 1 and 2 of Adam's preconditioner.
            Empty unless they are measured (``NoiseMeter(preconditioned=True)``).
        proxy: noise scale from gradients of single samples; None unless it is measured
            (``NoiseMeter(proxy=True)``).
        independence: test that micro-batches are independent draws; None if their losses are not known
            (outside torch). If micro-batches share noise, `batch_size` is None and `high` infinite.

    Examples:
        >>> noise = Noise(batch_size=400.0, low=300.0, high=550.0, signal=0.5, variance=200.0, windows=80,
        ...     effective_windows=60.0, samples_per_window=100.0, groups=(), reason=None)
        >>> noise.ratio, noise.determined
        (4.0, True)
        >>> noise.summary()
        'noise scale 400 samples (300 to 550), if the micro-batches of a window are independent draws'
    """

    batch_size: float | None
    low: float
    high: float
    signal: float
    variance: float
    windows: int
    effective_windows: float
    samples_per_window: float
    groups: tuple[NoiseOfGroup, ...]
    reason: str | None
    data_size: int | None = None
    models: tuple[NoiseOfModel, ...] = ()
    proxy: NoiseProxy | None = None
    independence: Independence | None = None

    def summary(self) -> str:
        """Return the noise scale in one sentence, with its interval and its assumption.

        Returns:
            Text such as ``noise scale at least 40 samples (too little signal), if ...``.
        """
        if self.batch_size is not None:
            text = f"noise scale {self.batch_size:.4g} samples ({self.low:.4g} to {self.high:.4g})"
        elif self.low > 0:
            text = f"noise scale at least {self.low:.4g} samples ({self.reason})"
        else:
            text = f"noise scale not known ({self.reason})"
        broken = None if self.independence is None else self.independence.text
        # Without a noise scale, `reason` already has the verdict of the test.
        if broken is None or self.batch_size is None:
            return f"{text}, {ASSUMPTION}"
        return f"{text}, {ASSUMPTION}; they are not: {broken}"

    @property
    def ratio(self) -> float | None:
        """Return noise over signal of the measured batch, ``rho = tr Cov(g) / |G|^2``; None if not known.

        It is `batch_size` / `samples_per_window`, times ``1 - N / D`` if a batch of N samples is drawn
        without replacement from D.
        """
        if self.batch_size is None or not self.samples_per_window > 0:
            return None
        # Correction for a finite population: a batch of all D samples has no noise.
        drawn = 0.0 if self.data_size is None else min(1.0, self.samples_per_window / self.data_size)
        return self.batch_size / self.samples_per_window * (1 - drawn)

    @property
    def determined(self) -> bool:
        """True if the noise scale has a value and a bounded interval."""
        return self.batch_size is not None and math.isfinite(self.high)
