"""Test by gradients, at parameters that rest, whether the micro-batches of windows are independent draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.integers import positive_int
from superbatch.noise.independence import FEWEST_TRIPLES, IndependenceTest
from superbatch.noise.meter import NoiseMeter
from superbatch.results.noise import Independence

from ..devices import in_float64
from ..gradient import Gradient


def independence_at_rest(
    models: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any], Any],
    batches: Iterable[Any],
    *,
    windows: int = 3 * FEWEST_TRIPLES,
    data_size: int | None = None,
    **options: Any,
) -> Independence:
    """Compare gradients of windows with what the spread of their micro-batches explains; nothing is updated.

    The test that a `superbatch.NoiseMeter` makes by losses sees no noise that gradients share and losses do
    not. This one does, at the price of 60 windows of computing and of three gradients in memory. Data sorted
    from end to end look like a gradient that drifts, which neither of them takes for noise. On the ranks of
    DistributedDataParallel each passes its share of every window, and all get the same result.

    Args:
        models: whose gradient it is; parameters stay as they are, and so does ``.grad``.
        loss_fn: loss of a micro-batch.
        batches: as training has them, in its order; at least `windows` of them.
        windows: how many to compare, three at a time.
        data_size: number of samples that batches are drawn from without replacement, as in `NoiseMeter`:
            such windows are more even than chance by as much as they draw; None: endless data.
        options: of `superbatch.torch.Gradient`, as in training: ``microbatch_size``, ``weight``,
            ``reduction``.

    Returns:
        The verdict, with the noise scale that updates see as windows are now.

    Raises:
        InputError: there are fewer batches, a window has one micro-batch, parameters are sharded over ranks,
            or an option cannot be used.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(4, 1)
        >>> def loss_fn(microbatch):
        ...     x, y = microbatch
        ...     return (model(x)[:, 0] - y).square().mean()
        >>> x = torch.randn(60 * 32, 4) + torch.randn(60, 4).repeat_interleave(32, 0)  # 60 documents
        >>> y = x.sum(1) + torch.randn(60 * 32)
        >>> as_read = zip(x.split(32), y.split(32))
        >>> independence_at_rest(model, loss_fn, as_read, microbatch_size=4).verdict
        'shared'
        >>> order = torch.randperm(len(x))
        >>> shuffled = zip(x[order].split(32), y[order].split(32))
        >>> independence_at_rest(model, loss_fn, shuffled, microbatch_size=4).verdict is None
        True
    """
    if positive_int("windows", windows) < 3:
        raise InputError(
            f"windows={windows} is too few to compare three at a time. Pass {3 * FEWEST_TRIPLES} or more "
            "for a verdict."
        )
    if "observers" in options:
        raise InputError("The test makes its own NoiseMeter. Leave observers= out.")
    if data_size is not None:
        positive_int("data_size", data_size)
    several = [models] if isinstance(models, nn.Module) else list(models)
    owned = list({id(p): p for each in several for p in each.parameters() if p.requires_grad}.values())
    # By the attribute: importing DTensor takes longer than importing this library.
    if any(hasattr(parameter, "device_mesh") for parameter in owned):
        raise InputError(
            "The parameters are sharded over ranks, and the test compares whole gradients. Run it on a model "
            "without fully_shard, or in DistributedDataParallel."
        )
    meter = NoiseMeter(every=1)
    fresh = meter.state_dict()
    gradient = Gradient(models, loss_fn, observers=[meter], **options)
    test, seen = IndependenceTest(), _Windows()
    before = [p.grad for p in owned]
    source = iter(batches)
    try:
        for _ in range(windows // 3):
            seen.triple(test, [_one(gradient, meter, fresh, owned, source, windows) for _ in range(3)])
    finally:
        for parameter, grad in zip(owned, before, strict=True):
            parameter.grad = grad
    drawn = seen.samples() / data_size if data_size else 0.0
    return replace(test.judged(drawn), by="gradients", updates_see=seen.noise_scale())


Gradients = Sequence[Tensor | None]


class _Windows:
    """Means over windows: squared length of the gradient, variance between neighbours, samples."""

    def __init__(self) -> None:
        self._lengths: list[float] = []
        self._between: list[float] = []
        self._samples: list[float] = []

    def triple(self, test: IndependenceTest, found: Sequence[tuple[Gradients, float, float]]) -> None:
        (a, va, _), (b, vb, _), (c, vc, _) = found
        squares = (_distance(a, b), _distance(b, c), _distance(a, c))
        test.add_triple(squares, (va, vb, vc))
        self._between.append((squares[0] + squares[1]) / 4)
        nothing = [None] * len(a)
        self._lengths += [_distance(each, nothing) for each, _, _ in found]
        self._samples += [samples for *_, samples in found]

    def samples(self) -> float:
        """Return the mean number of samples of a window."""
        return math.fsum(self._samples) / len(self._samples)

    def noise_scale(self) -> float | None:
        """``N D / (mean |g|^2 - D)``, D the variance of whole windows: right whatever is shared."""
        between, length, samples = (
            math.fsum(each) / len(each) for each in (self._between, self._lengths, self._samples)
        )
        return samples * between / (length - between) if length > between else None


def _one(
    gradient: Gradient,
    meter: NoiseMeter,
    fresh: dict[str, Any],
    owned: Sequence[Tensor],
    batches: Iterator[Any],
    windows: int,
) -> tuple[Gradients, float, float]:
    """Gradient of the next window, the variance that its micro-batches explain, and its samples."""
    batch = next(batches, None)
    if batch is None:
        raise InputError(
            f"The batches end before {windows} windows. Pass more of them, or a smaller windows= (at least "
            f"{3 * FEWEST_TRIPLES} for a verdict)."
        )
    for parameter in owned:
        parameter.grad = None
    meter.load_state_dict(fresh)
    gradient(batch)
    noise = meter.estimate()
    if not meter.windows:
        raise InputError(
            f"A window of the test could not be measured: {noise.reason}. Pass a microbatch_size that cuts "
            "each batch in two or more."
        )
    parts = [None if p.grad is None else p.grad.detach().to_dense().clone() for p in owned]
    return parts, noise.variance / noise.samples_per_window, noise.samples_per_window


def _distance(one: Gradients, other: Gradients) -> float:
    """The squared distance, parameter by parameter: float64 copies of whole gradients would not fit."""
    found = 0.0
    for a, b in zip(one, other, strict=True):
        if a is None and b is None:
            continue
        parts = [torch.zeros(()) if each is None else in_float64(each) for each in (a, b)]
        found += float((parts[0] - parts[1].to(parts[0].device)).abs().square().sum())
    return found
