"""Participant that measures the noise scale of windows, and adds it to a `superbatch.noise.NoiseMeter`.

The noise follows from two sums of squares: ``a2``, over the gradients of the micro-batches, and ``b2``, of
the batch's gradient. The gradient of micro-batch i is already multiplied by its share ``w_i / W`` when a hook
gets it. So ``a2`` needs corrections only for a gradient scaler, and for a ``W`` that is known only at the
end. ``a2`` is summed over the ranks; ``b2`` is that of the reduced gradient, before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch import normalize
from superbatch.errors import InputError
from superbatch.noise.meter import (
    LARGEST,
    LEAST_SPREAD,
    POWERS,
    PROXY,
    PROXY_WITH_GRADIENT,
    Estimate,
    NoiseMeter,
    estimate,
    power_name,
)
from superbatch.torch.window.norm import norm_of

from ...participant import no_savepoint
from ...sync.sync import Sync
from ..gradient_sum import ManagedParameter
from .adam import Preconditioner, have_second_moments
from .groups import group_names
from .hooks import MicrobatchGradientNorms, on_host
from .samples import SampleGradientNorms, norm_layers

TINY_BYTES, EVERY_OF_TINY = 1 << 20, 20
"""Bytes of parameters below which a model is tiny; then every 20th window is measured by default."""

ALONE = "one micro-batch has nearly all the weight of its window"


class _Measurement(NamedTuple):
    """Measurement of a window.

    Attributes:
        groups: an estimate for each parameter group, or the reason why there is none.
        samples: effective number of samples of the window.
        others: estimates by Adam's preconditioner and from single samples.
        no_proxy: why there is no estimate from single samples; None: there is one, or none is needed.
        losses: loss of the window, and its variance as estimated from the micro-batches; None: unknown.
    """

    groups: dict[str, Estimate] | str
    samples: float = 0.0
    others: Mapping[str, Estimate] = {}
    no_proxy: str | None = None
    losses: tuple[float, float] | None = None


class Counted(Protocol):
    """Micro-batches whose samples can be counted."""

    def __len__(self) -> int: ...

    def count(self, index: int) -> int:
        """Return the number of samples of a micro-batch."""
        ...


class WindowSum(NamedTuple):
    """Weights and factors of a window's gradient sum.

    Attributes:
        weight: sum of the weights of all micro-batches of all ranks.
        divisor: number that the summed gradients are divided by.
        weights: weights of this rank's micro-batches; 0 for those that were dropped.
        took_part: number of micro-batches whose losses are in the sum.
        samples: number of samples of each micro-batch; None if they cannot be counted.
        losses: losses of this rank's micro-batches, as sums over their samples.
        scale: scale of a GradScaler; None: there is none.
        sync: ranks that share the window.
    """

    weight: normalize.Number
    divisor: float
    weights: Sequence[normalize.Number]
    took_part: int
    samples: Sequence[int] | None
    losses: Sequence[float]
    scale: float | None
    sync: Sync


class NoiseOfWindows:
    """Participant that measures the noise in every n-th window.

    Args:
        meter: collects the measurements.
        owned: the parameters; the list may change in place.
        optimizers: the optimizers, whose parameter groups are measured separately.
        models: the models, whose normalisation layers are used for the proxy.

    Attributes:
        norms: norms of the micro-batches' gradients in the open window; None: it is not measured.
    """

    def __init__(
        self,
        meter: NoiseMeter,
        owned: list[ManagedParameter],
        optimizers: Sequence[Optimizer],
        models: Sequence[nn.Module],
    ) -> None:
        self.meter = meter
        if meter.every is None:
            tiny = sum(entry.parameter.nbytes for entry in owned) < TINY_BYTES
            meter.every = EVERY_OF_TINY if tiny else 1
        self._owned = owned
        self._optimizers, self._models = optimizers, models
        self._metric: Preconditioner | None = None
        self._samples: SampleGradientNorms | None = None
        self._in_parts: set[Tensor] = set()
        self._named: list[ManagedParameter] = []
        self._names: list[str] = []
        self._groups: list[int] = []
        self._measurement: _Measurement | None = None
        self._before: dict[str, Any] | None = None  # state of the meter before the last window
        self._count: Callable[[int], int] = int
        self._is_single = False
        self.norms: MicrobatchGradientNorms | None = None

    def prepare(self, microbatches: Counted, *, shared: bool) -> None:
        """Prepare for a window; call this before `begin`.

        Args:
            microbatches: the micro-batches of the window; they may be cut differently later.
            shared: whether other ranks have micro-batches of the same window.
        """
        self._count = microbatches.count
        self._is_single = len(microbatches) < 2 and not shared

    def begin(self) -> None:
        """Register hooks if the window is to be measured."""
        self._measurement = self._before = self.norms = None
        if not self.meter.due:
            return
        if self._is_single and not self.meter.proxy:
            self._measurement = _Measurement(ALONE)
            return
        # At each window, because parameters may have been frozen or added.
        self._name_groups()
        by_adam = self.meter.preconditioned and not self._is_single and have_second_moments(self._optimizers)
        self._metric = Preconditioner(self._owned) if by_adam else None
        layers = norm_layers(self._models, self._owned) if self.meter.proxy else []
        self._samples = SampleGradientNorms(layers, self._count) if layers else None
        self.norms = MicrobatchGradientNorms(
            self._owned, self._groups, self._in_parts, self._metric, self._samples, is_single=self._is_single
        )
        self.norms.open()

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: a micro-batch is measured once its gradient has arrived."""

    def rollback(self) -> bool:
        """No-op: a micro-batch is measured once its gradient has arrived."""
        return True

    def restart(self) -> None:
        """Discard the measurements of this window, and keep the hooks."""
        if self.norms is not None:
            self.norms.restart()

    def restore(self) -> None:
        """Remove the hooks."""
        if self.norms is not None:
            self.norms.close()

    def commit(self) -> None:
        """Remove the hooks; `end_window` adds the measurement to the meter."""
        self.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements of the window's micro-batches so far."""
        return {"noise": None if self.norms is None else self.norms.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of `state_dict`."""
        if self.norms is not None:
            self.norms.load(state.get("noise") or {})

    def without_hooks(self) -> AbstractContextManager[None]:
        """Return a context in which the hooks are removed."""
        return nullcontext() if self.norms is None else self.norms.without_hooks()

    def configuration_number(self) -> int:
        """Return a number that is equal on all ranks if all measure in the same way.

        Returns:
            A number below 2**21, so that its square times the number of ranks is exact in float64.
        """
        mode = (self.norms is not None) + 2 * self.meter.preconditioned + 4 * self.meter.proxy
        return (self.meter.passed % (1 << 17) + 1) * 8 + mode

    def measure(
        self,
        gradients: list[Tensor | None],
        norm: float,
        window_sum: WindowSum,
    ) -> None:
        """Compute the measurement of a window; `end_window` adds it to the meter once the update is made.

        Args:
            gradients: the gradient of the batch: reduced, normalised and unscaled, but not clipped.
            norm: the norm of the gradient.
            window_sum: the weights and factors of its sum.
        """
        norms, weight = self.norms, window_sum.weight
        if norms is None:
            return
        if not weight:  # possible with `at_least`, which gives the divisor a lower bound
            self._measurement = _Measurement(ALONE)
            return
        weights = window_sum.weights
        counted = [index for index, each in enumerate(weights) if each]
        squares = norms.squares()
        if not norms.reason and len(counted) < window_sum.took_part:
            norms.reason = "a micro-batch of weight 0 took part in a sum"
        missing = norms.reason or (
            "" if all(i in squares for i in counted) else "not all of its micro-batches were measured"
        )
        count = len(self._names) + len(POWERS) * (self._metric is not None) + (self._samples is not None)
        # The squares still contain the planned W and the scaler's scale, which `factor` below removes.
        shares = [weights[index] / weight for index in counted]
        samples = window_sum.samples or weights
        centre = self.meter.centre
        # Shares of the loss, from sums over samples, so that no loss is divided by a weight of 0.
        parts = [(window_sum.losses[index] - centre * weights[index]) / weight for index in counted]
        own = [
            *(math.fsum(squares[i][g] for i in counted if i in squares) for g in range(count)),
            math.fsum(share * share for share in shares),
            math.fsum(s * s / samples[i] for i, s in zip(counted, shares, strict=True)),
            float(bool(missing)),
            math.fsum(parts),
            math.fsum(part * part for part in parts),
        ]
        *sums, q, q_per_sample, incomplete, off, squared_off = window_sum.sync.sum_numbers(own)
        q = 1.0 if norms.is_single else q
        factor = window_sum.divisor * (window_sum.scale or 1.0)
        a2 = [each / factor**2 for each in sums]
        self._measurement = self._estimate_groups(a2, self._b2(gradients, norm), q, q_per_sample)
        if incomplete:
            missing = missing or "it was not measured completely on another rank"
            self._measurement = _Measurement(missing, no_proxy=missing)
        elif q_per_sample > 0:
            others, no_proxy = self._estimate_others(a2, gradients, q, q_per_sample)
            losses = None
            if 1 - q >= LEAST_SPREAD:
                losses = (centre + off, estimate(squared_off, off * off, q).variance)
            self._measurement = _Measurement(
                self._measurement.groups, self._measurement.samples, others, no_proxy, losses
            )

    def end_window(self, *, made: bool) -> None:
        """End a window, and add its measurement to the meter if its update was made; may be called twice."""
        measurement, meter = self._measurement, self.meter
        if not made:
            self._measurement = None
            return
        if self._before is None:
            self._before = meter.state_dict()
        else:  # the first call may have failed halfway
            meter.load_state_dict(self._before)
        meter.passed += 1
        if measurement is None:
            return
        if isinstance(measurement.groups, str):
            meter.leave_out(measurement.groups)
        else:
            meter.add(measurement.groups, samples=measurement.samples)
            if measurement.losses is not None:
                meter.add_losses(*measurement.losses)
        for name, one in measurement.others.items():
            meter.add_beside(name, one, samples=measurement.samples)
        if measurement.no_proxy is not None and meter.proxy:
            meter.leave_out(measurement.no_proxy, proxy=True)

    def _estimate_groups(
        self, a2: list[float], b2: list[float], q: float, q_per_sample: float
    ) -> _Measurement:
        samples = 1 / q_per_sample
        if 1 - q < LEAST_SPREAD:
            return _Measurement(ALONE, samples)
        # The numbers behind those of the groups belong to `_estimate_others`.
        a2 = a2[: len(b2)]
        if not all(each * samples < LARGEST for each in [*a2, *b2]):  # false for NaN too
            return _Measurement("the squares of its gradients are not finite", samples)
        found = {name: estimate(a, b, q) for name, a, b in zip(self._names, a2, b2, strict=True)}
        return _Measurement(found, samples)

    def _estimate_others(
        self, a2: list[float], gradients: list[Tensor | None], q: float, q_per_sample: float
    ) -> tuple[dict[str, Estimate], str | None]:
        """Estimate the noise by Adam's preconditioner and from single samples.

        Returns:
            The estimates by name, and the reason why there is none from single samples, or None.
        """
        others: dict[str, Estimate] = {}
        # `a2` has one number per name, then one per power of the metric, and last that of single samples.
        a2 = a2[len(self._names) :]
        if self._metric is not None and 1 - q >= LEAST_SPREAD:
            mean = self._metric.mean()
            # A parameter without a gradient on any rank has no norm.
            present = [(index, g) for index, g in enumerate(gradients) if g is not None]
            norms = [self._metric.norms(index, gradient) for index, gradient in present]
            for power, a, of_power in zip(POWERS, a2, zip(*norms, strict=True), strict=False):
                scale = mean**power
                b2 = math.fsum(norm * norm for norm in on_host(of_power))
                others[power_name(power)] = estimate(scale * a, scale * b2, q)
        if self._samples is None:
            return others, "there is no trained LayerNorm or RMSNorm"
        if 1 - q_per_sample < LEAST_SPREAD or not math.isfinite(a2[-1]):
            single = "one sample has nearly all the weight of its window"
            reason = single if math.isfinite(a2[-1]) else self._samples.reason
            return others, reason or "it could not be measured on another rank"
        # Only normalisation layers, because single samples were measured only there.
        measured = {id(parameter) for parameter in self._samples.parameters()}
        own = [g for entry, g in zip(self._owned, gradients, strict=True) if id(entry.parameter) in measured]
        norm = norm_of(own)
        one = estimate(a2[-1], 0.0 if norm is None else float(norm) * float(norm), q_per_sample)
        others |= {PROXY: one} | ({PROXY_WITH_GRADIENT: one} if 1 - q >= LEAST_SPREAD else {})
        return others, None

    def _b2(self, gradients: list[Tensor | None], norm: float) -> list[float]:
        if len(self._names) == 1:
            return [norm * norm]  # not norm**2, which raises OverflowError in place of returning infinity
        of_groups: list[list[Tensor | None]] = [[] for _ in self._names]
        for group, gradient in zip(self._groups, gradients, strict=True):
            of_groups[group].append(gradient)
        norms = [norm_of(each) for each in of_groups]
        return [0.0 if each is None else float(each) * float(each) for each in norms]

    def _name_groups(self) -> None:
        # By id, because the entries contain tensors, which compare elementwise.
        if [id(entry) for entry in self._named] == [id(entry) for entry in self._owned]:
            return
        numbers, self._names = group_names(self._optimizers)
        self._groups = [numbers[id(entry.optimizer), entry.number] for entry in self._owned]
        # With other parameters, e.g. after some were frozen, the noise scale is different.
        self.meter.expect(self._names, anew=bool(self._named))
        self._named = list(self._owned)


def noise_of(
    observers: Sequence[object],
    models: Sequence[nn.Module],
    owned: list[ManagedParameter],
    optimizers: Sequence[Optimizer],
    *,
    momentum: bool,
) -> NoiseOfWindows | None:
    """Return the participant for the meter in `observers`; None if there is no meter.

    Args:
        observers: the accumulator's option.
        models: the accumulator's.
        owned: the parameters.
        optimizers: the accumulator's.
        momentum: whether gradients are summed into the momentum buffer.

    Raises:
        InputError: `observers` is not one meter, or the noise cannot be measured.
    """
    if not observers:
        return None
    meter, *others = observers
    if others or not isinstance(meter, NoiseMeter):
        raise InputError(
            f"observers={list(observers)!r} is not one meter. Pass observers=[superbatch.NoiseMeter()]."
        )
    if momentum:
        raise InputError(
            "A NoiseMeter needs the gradient of the batch, which is never formed with "
            'gradient_sum="momentum". Remove observers= or gradient_sum=.'
        )
    if meter.proxy and not norm_layers(models, owned):
        raise InputError(
            "NoiseMeter(proxy=True) needs a trained LayerNorm or RMSNorm, but the models have none. Remove "
            "proxy=True, and use two micro-batches or more."
        )
    return NoiseOfWindows(meter, owned, optimizers, models)
