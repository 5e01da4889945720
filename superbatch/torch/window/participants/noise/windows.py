"""The noise scale of an accumulator's windows: what each says goes into a `superbatch.noise.NoiseMeter`.

The loss of micro-batch i is summed with its share ``w_i / W`` already, so ``A2 = sum |hook gradient|^2``
needs no correction but for a gradient scaler, and for a ``W`` that is known only afterwards. Over ranks A2 is
one number to be summed, while ``b2`` is that of the reduced gradient, before it is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch import normalize
from superbatch.errors import InputError, explain
from superbatch.noise.meter import (
    LEAST_SPREAD,
    POWERS,
    PROXY,
    PROXY_BESIDE,
    Estimate,
    NoiseMeter,
    estimate,
    power_name,
)
from superbatch.torch.window.norm import norm_of

from ..gradient_sum import Owned
from .adam import Preconditioner, have_second_moments
from .hooks import SeenGradients, on_host
from .samples import SeenSamples, norm_layers

if TYPE_CHECKING:
    from superbatch.torch.window.open_window import WindowInFlight

TINY_BYTES, EVERY_OF_TINY = 1 << 20, 20
"""Parameters of a tiny model, and which of its windows are measured unless it is stated."""

ALONE = "one micro-batch has nearly all the weight of its window"


class _Found(NamedTuple):
    """What a window says: of each parameter group, or why it cannot; and what was measured beside."""

    groups: dict[str, Estimate] | str
    samples: float = 0.0
    beside: Mapping[str, Estimate] = {}
    no_proxy: str | None = None


class NoiseOfWindows:
    """Measures windows, every so many.

    Args:
        meter: takes in what is measured.
        owned: the parameters; the list is kept up to date.
        optimizers: whose parameter groups are told apart.
        models: whose normalisation layers are looked at, for a proxy.
    """

    def __init__(
        self,
        meter: NoiseMeter,
        owned: list[Owned],
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
        self._samples: SeenSamples | None = None
        self._in_parts: set[Tensor] = set()
        self._named: list[Owned] = []
        self._names: list[str] = []
        self._groups: list[int] = []
        self._found: _Found | None = None

    def open(self, window: WindowInFlight) -> None:
        """Put hooks on for a window that is to be measured; they go with the window's context.

        Args:
            window: about to begin.
        """
        self._found = None
        window._noise = None
        if not self.meter.due:
            return
        alone = len(window._pieces) < 2 and not window._plan.ranks.shared
        if alone and not self.meter.proxy:
            self._found = _Found(ALONE)
            return
        self._name_groups()
        by_adam = self.meter.preconditioned and not alone and have_second_moments(self._optimizers)
        self._metric = Preconditioner(self._owned) if by_adam else None
        layers = norm_layers(self._models, self._owned) if self.meter.proxy else []
        self._samples = SeenSamples(layers, window._pieces.count) if layers else None
        window._noise = SeenGradients(
            self._owned, self._groups, self._in_parts, self._metric, self._samples, alone=alone
        )
        window._context.callback(window._noise.close)
        window._noise.open()

    def measure(
        self,
        window: WindowInFlight,
        gradients: list[Tensor | None],
        norm: float,
        weight: normalize.Number,
        divisor: float,
    ) -> None:
        """Take down what a window says; it counts once the update is made.

        Args:
            window: all of whose micro-batches are summed; its hooks are off.
            gradients: of the batch: reduced, normalised and unscaled, but not clipped.
            norm: of them all.
            weight: sum over the micro-batches of all ranks.
            divisor: of the summed gradients.
        """
        seen = window._noise
        if seen is None:
            return
        if not weight:  # a sum over nothing that was divided by its lower bound
            self._found = _Found(ALONE)
            return
        weights = window._weights.counted(window._dropped)
        counted = [index for index, each in enumerate(weights) if each]
        squares = seen.squares()
        if not seen.reason and len(counted) < len(window._weights.took_part(window._dropped)):
            seen.reason = "a micro-batch of weight 0 took part in a sum"
        missing = seen.reason or ("" if all(i in squares for i in counted) else "a part of it was not seen")
        count = len(self._names) + len(POWERS) * (self._metric is not None) + (self._samples is not None)
        # Sums of squares were taken of gradients times (planned W) x (scale of the scaler).
        shares = [weights[index] / weight for index in counted]
        units = window._pieces.samples or weights
        mine = [
            *(math.fsum(squares[i][g] for i in counted if i in squares) for g in range(count)),
            math.fsum(share * share for share in shares),
            math.fsum(s * s / units[i] for i, s in zip(counted, shares, strict=True)),
            float(bool(missing)),
        ]
        *sums, q, q_per_sample, incomplete = window._plan.ranks.sum_numbers(mine)
        q = 1.0 if seen.alone else q
        factor = divisor * (window._scale or 1.0)
        a2 = [each / factor**2 for each in sums]
        self._found = self._judged(a2, self._b2(gradients, norm), q, q_per_sample)
        if incomplete:
            missing = missing or "it was not seen whole on another rank"
            self._found = _Found(missing, no_proxy=missing)
        elif q_per_sample > 0:
            self._found = self._found._replace(**self._judged_beside(a2, gradients, q, q_per_sample))

    def left(self, *, made: bool) -> None:
        """The window is over: what was taken down counts if its update was made."""
        found, self._found = self._found, None
        if made:
            self.meter.passed += 1
        if not made or found is None:
            return
        if isinstance(found.groups, str):
            self.meter.leave_out(found.groups)
        else:
            self.meter.add(found.groups, samples=found.samples)
        for name, one in found.beside.items():
            self.meter.add_beside(name, one, samples=found.samples)
        if found.no_proxy is not None and self.meter.proxy:
            self.meter.leave_out(found.no_proxy, proxy=True)

    def _judged(self, a2: list[float], b2: list[float], q: float, q_per_sample: float) -> _Found:
        samples = 1 / q_per_sample
        if 1 - q < LEAST_SPREAD:
            return _Found(ALONE, samples)
        a2 = a2[: len(b2)]
        if not all(map(math.isfinite, [*a2, *b2])):
            return _Found("the squares of its gradients are not finite", samples)
        found = {name: estimate(a, b, q) for name, a, b in zip(self._names, a2, b2, strict=True)}
        return _Found(found, samples)

    def _judged_beside(
        self, a2: list[float], gradients: list[Tensor | None], q: float, q_per_sample: float
    ) -> dict[str, Any]:
        """What is measured beside: by Adam's preconditioner, and by single samples."""
        beside: dict[str, Estimate] = {}
        seen = a2[len(self._names) :]
        if self._metric is not None and 1 - q >= LEAST_SPREAD:
            mean = self._metric.mean()
            present = [(place, g) for place, g in enumerate(gradients) if g is not None]
            norms = [self._metric.norms(place, gradient) for place, gradient in present]
            for power, a, of_power in zip(POWERS, seen, zip(*norms, strict=True), strict=False):
                scale = mean**power
                b2 = math.fsum(norm**2 for norm in on_host(of_power))
                beside[power_name(power)] = estimate(scale * a, scale * b2, q)
        if self._samples is None:
            return {"beside": beside, "no_proxy": "there is no LayerNorm or RMSNorm that is trained"}
        if 1 - q_per_sample < LEAST_SPREAD or not math.isfinite(seen[-1]):
            alone = "one sample has nearly all the weight of its window"
            reason = alone if math.isfinite(seen[-1]) else self._samples.reason
            return {"beside": beside, "no_proxy": reason or "it could not be told on another rank"}
        places = {id(parameter) for parameter in self._samples.parameters()}
        own = [g for entry, g in zip(self._owned, gradients, strict=True) if id(entry.parameter) in places]
        norm = norm_of(own)
        one = estimate(seen[-1], 0.0 if norm is None else float(norm) ** 2, q_per_sample)
        beside |= {PROXY: one} | ({PROXY_BESIDE: one} if 1 - q >= LEAST_SPREAD else {})
        return {"beside": beside}

    def _b2(self, gradients: list[Tensor | None], norm: float) -> list[float]:
        if len(self._names) == 1:
            return [norm**2]
        of_groups: list[list[Tensor | None]] = [[] for _ in self._names]
        for group, gradient in zip(self._groups, gradients, strict=True):
            of_groups[group].append(gradient)
        norms = [norm_of(each) for each in of_groups]
        return [0.0 if each is None else float(each) ** 2 for each in norms]

    def _name_groups(self) -> None:
        # By identity: the entries hold tensors, which do not compare as a whole.
        if [id(entry) for entry in self._named] == [id(entry) for entry in self._owned]:
            return
        numbers, self._names = group_names(self._optimizers)
        self._groups = [numbers[id(entry.optimizer), entry.number] for entry in self._owned]
        # Of other parameters, as where some were frozen since, it is another noise scale.
        self.meter.expect(self._names, anew=bool(self._named))
        self._named = list(self._owned)


def mark_of(window: WindowInFlight) -> int:
    """How this rank stands with measuring, as a number that is the same on all ranks if all stand alike.

    Args:
        window: whose micro-batches are all summed.

    Returns:
        Below 2**21, so that its square times the number of ranks is exact in float64; 0: nothing is measured.
    """
    noise = window._plan.noise
    if noise is None:
        return 0
    meter = noise.meter
    how = (window._noise is not None) + 2 * meter.preconditioned + 4 * meter.proxy
    return (meter.passed % (1 << 17) + 1) * 8 + how


def group_names(optimizers: Iterable[Optimizer]) -> tuple[dict[tuple[int, int], int], list[str]]:
    """Number and name the parameter groups of optimizers.

    Args:
        optimizers: in order.

    Returns:
        (id of the optimizer, number of the group there) -> number among all; and the names: a group's own
        entry ``"name"`` where it has one that no other has, else ``"group 0"``, or with several optimizers
        ``"optimizer 0, group 0"``.

    Examples:
        >>> import torch
        >>> one, two = (torch.zeros(1, requires_grad=True) for _ in range(2))
        >>> optimizer = torch.optim.SGD([{"params": [one], "name": "head"}, {"params": [two]}])
        >>> group_names([optimizer])[1]
        ['head', 'group 1']
    """
    optimizers = list(optimizers)
    several = len(optimizers) > 1
    numbers: dict[tuple[int, int], int] = {}
    own: list[Any] = []
    plain: list[str] = []
    for place, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            numbers[id(optimizer), number] = len(numbers)
            own.append(group.get("name"))
            plain.append(f"optimizer {place}, group {number}" if several else f"group {number}")
    names = [
        name if isinstance(name, str) and own.count(name) == 1 and name not in plain else other
        for name, other in zip(own, plain, strict=True)
    ]
    return numbers, names


def noise_of(
    noise: object,
    models: Sequence[nn.Module],
    owned: list[Owned],
    optimizers: Sequence[Optimizer],
    *,
    momentum: bool,
    whole: bool,
) -> NoiseOfWindows | None:
    """Return what measures the noise, as the option of the accumulator states it.

    Args:
        noise: False, True, or a meter.
        models: of the accumulator.
        owned: the parameters.
        optimizers: of the accumulator.
        momentum: gradients are summed into the momentum buffer.
        whole: the loss is computed on the whole batch.

    Raises:
        InputError: it is neither of them, or cannot be measured.
    """
    if noise is False:
        return None
    if noise is not True and not isinstance(noise, NoiseMeter):
        raise InputError(
            explain(
                f"noise={noise!r}",
                "the noise of the gradient is measured, or not",
                "pass True, False, or a superbatch.noise.NoiseMeter with options of your own",
            )
        )
    if momentum:
        raise InputError(
            explain(
                'noise with accumulate_into="momentum"',
                "noise is told from the norm of the batch's gradient, which never exists on its own there",
                'use accumulate_into="grad" while measuring, or leave noise out',
            )
        )
    if whole:
        raise InputError(
            explain(
                'noise with coupled="exact"',
                "noise is told from the gradients of micro-batches, and where samples see each other a "
                "micro-batch has none of its own",
                "leave noise out",
            )
        )
    if noise is not True and noise.proxy and not norm_layers(models, owned):
        raise InputError(
            explain(
                "NoiseMeter(proxy=True) with models without a LayerNorm or RMSNorm that is trained",
                "only of those the gradients of single samples are at hand",
                "leave proxy out, and use two micro-batches or more",
            )
        )
    return NoiseOfWindows(NoiseMeter() if noise is True else noise, owned, optimizers, models)
