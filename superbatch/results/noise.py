"""Noise of a gradient: the noise scale with its interval, or why there is no number."""

from __future__ import annotations

# pyright: strict
import math
from dataclasses import dataclass
from typing import Literal

ASSUMPTION = "if the micro-batches of a window are independent draws"
"""Condition of every noise scale, which stands beside it wherever it is shown."""


@dataclass(frozen=True, kw_only=True)
class Independence:
    """Result of the test whether the micro-batches of a window are independent draws.

    Attributes:
        verdict: ``"shared"``: they share noise, which is counted as signal, so that the noise scale comes out
            too small. ``"even"``: windows are more even than chance makes them, so that it comes out too
            large. None: nothing is said, either for want of evidence or because all is well.
        ratio: how many times as much the losses of windows differ as the spread of their micro-batches
            explains, the smaller of F_1 and F_0 (see `superbatch.noise.independence`), so that a loss that
            falls does not count; 1 for independent draws; infinite where micro-batches are copies; None: not
            known.
        low: smallest lower end of the intervals that decide (see `superbatch.noise.independence`).
        high: largest upper end.
        triples: of windows that were compared; a verdict takes 20.
        by: what was compared.
        updates_see: the noise scale that updates see as windows are now, in samples, whether noise is shared
            or not; None: not known, as by losses.
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
        """The verdict in a sentence, and what to do; None where nothing is said."""
        if self.verdict is None or self.ratio is None:
            return None
        seen = (
            f"{self.by} of whole windows differ {self.ratio:.2g} times as much as their micro-batches explain"
            if math.isfinite(self.ratio)
            else f"{self.by} of whole windows differ, and those of the micro-batches of a window do not"
        )
        see = self.updates_see
        as_they_are = "" if see is None else f"; as they are, updates see a noise scale of about {see:.2g}"
        if self.verdict == "shared":
            # While parameters move, a loss that jumps from update to update looks the same.
            jumps = (
                ". If they are shuffled, the loss jumps between updates: lower the learning rate, or test at "
                "rest with superbatch.torch.tuning.independence.independence_at_rest()"
                if self.by == "losses"
                else as_they_are
            )
            return (
                f"{seen}: micro-batches of a window share noise (similar samples, copies, one document), and "
                f"a noise scale from them would be too small. Shuffle samples over windows{jumps}"
            )
        return (
            f"{seen}: windows are more even than chance, and the noise scale comes out too large. Draw "
            "samples at random, and state data_size where they are few"
        )


@dataclass(frozen=True, kw_only=True)
class NoiseOfGroup:
    """The noise scale of one parameter group; see `Noise` for the meaning of each number.

    Attributes:
        name: of the group.
        batch_size: its noise scale in samples; None: its signal cannot be told from its noise.
        low: lower end of the interval.
        high: upper end of the interval; infinite when it is unbounded.
        signal: ``|G|^2`` of the group's part of the gradient.
        variance: trace of the covariance of one sample's gradient, of the group's part.
    """

    name: str
    batch_size: float | None
    low: float
    high: float
    signal: float
    variance: float


ASSUMED = {
    0: "Adam evens the curvature out",
    1: "the curvature is as Adam takes it to be",
    2: "the curvature is the same everywhere",
}
"""Power of Adam's preconditioner -> what it takes for granted (see `NoiseOfModel`)."""


@dataclass(frozen=True, kw_only=True)
class NoiseOfModel:
    """The noise scale as one model of Adam's preconditioner ``P = 1 / (sqrt(v_hat) + eps)`` has it.

    ``|g|^2`` is replaced by ``sum P^power g^2``; which power is right depends on the curvature H, which is
    not known. None of them is better than a factor of about 3.

    Attributes:
        power: q. 0 is right where P evens the curvature out (``P H P`` is the same in all directions), 1
            where the curvature is as P takes it to be (``H = 1 / P``), 2 where there is the same curvature
            everywhere.
        batch_size: its noise scale in samples; None: its signal cannot be told from its noise.
        low: lower end of the interval.
        high: upper end of the interval; infinite when it is unbounded.
        signal: ``G' P^q G``, P relative to the mean of ``1 / P``.
        variance: trace of P^q times the covariance of one sample's gradient, likewise.
        windows: how many were measured.
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
    """The noise scale of normalisation layers alone, from gradients of single samples: a proxy.

    It needs no second micro-batch. The noise scale of the whole model is `factor` times as large, and the
    factor depends on the model: it is known once windows of several micro-batches (or ranks) were measured.

    Attributes:
        batch_size: noise scale of the scales and shifts of LayerNorm and RMSNorm, in samples; None: their
            signal cannot be told from their noise.
        low: lower end of the interval.
        high: upper end of the interval; infinite when it is unbounded.
        signal: ``|G|^2`` of these parameters.
        variance: trace of the covariance of one sample's gradient, of these parameters.
        windows: how many were measured.
        factor: noise scale of all parameters over that of these, in the windows where both were measured;
            None: not known yet.
        reason: why there is no number; None where there is one.

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
        """The noise scale of all parameters, as the proxy has it: `factor` times `batch_size`."""
        return None if self.batch_size is None or self.factor is None else self.factor * self.batch_size


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise scale of a gradient: ``B_noise = T / |G|^2``, averaged over windows.

    ``G`` is the true gradient, ``T`` the trace of the covariance of one sample's gradient. A batch of
    `batch_size` samples has as much noise as signal: much smaller ones are nearly all noise, so that a larger
    batch pays; much larger ones are nearly all signal, so that it does not.

    Attributes:
        batch_size: ``B_noise`` in samples; None where there is no number, and `reason` says why.
        low: lower end of its 95 % interval (Fieller's); known even where there is no upper one.
        high: upper end; ``math.inf`` when it is unbounded.
        signal: ``|G|^2``, averaged; may come out negative, for it is unbiased.
        variance: ``T``, averaged, likewise.
        windows: how many were measured.
        effective_windows: how many windows of equal weight the average is worth.
        samples_per_window: the mean effective batch ``1 / sum(w_i^2 / n_i)``; that of samples counted alike
            is their number. (Where samples cannot be counted, weights take the place of ``n_i``.)
        groups: each parameter group by itself; `signal` and `variance` are the sums of theirs.
        reason: why there is no number; None where there is one.
        data_size: samples that batches are drawn from without replacement; None: as good as endless.
        models: the same under models of Adam's preconditioner, the powers 0 (all the numbers above), 1 and 2:
            how much depends on what is assumed of it. Empty unless they are measured
            (``NoiseMeter(preconditioned=True)``).
        proxy: of single samples' gradients; None unless it is measured (``NoiseMeter(proxy=True)``).
        independence: test of the assumption behind all these numbers; None where the losses of micro-batches
            are not known (outside of torch). Where micro-batches share noise, there is no number and no upper
            end.

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
        """Return the noise scale in one sentence: with its interval, its assumption, and what speaks against.

        Returns:
            Such as ``noise scale at least 40 samples (signal not told from noise), if ...``.
        """
        if self.batch_size is not None:
            said = f"noise scale {self.batch_size:.4g} samples ({self.low:.4g} to {self.high:.4g})"
        elif self.low > 0:
            said = f"noise scale at least {self.low:.4g} samples ({self.reason})"
        else:
            said = f"noise scale not known ({self.reason})"
        found = None if self.independence is None else self.independence.text
        if found is None or self.batch_size is None:
            return f"{said}, {ASSUMPTION}"
        return f"{said}, {ASSUMPTION}, which they are not: {found}"

    @property
    def ratio(self) -> float | None:
        """Noise over signal of the batch as it is, ``rho = tr Cov(g) / |G|^2``; None where it is not known.

        That is `batch_size` / `samples_per_window`, times ``1 - N / D`` where a batch of N samples is drawn
        without replacement from D.
        """
        if self.batch_size is None or not self.samples_per_window > 0:
            return None
        drawn = 0.0 if self.data_size is None else min(1.0, self.samples_per_window / self.data_size)
        return self.batch_size / self.samples_per_window * (1 - drawn)

    @property
    def determined(self) -> bool:
        """True if there is a number, with an interval that ends."""
        return self.batch_size is not None and math.isfinite(self.high)
