"""Test, with gradients at fixed parameters, that the micro-batches of windows are independent draws."""

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
    """Test that gradients of windows vary as the spread of their micro-batches predicts; make no update.

    The test of a `superbatch.NoiseMeter` uses losses, so it misses noise that only the gradients of a window
    share. This test finds it, at the cost of computing 60 windows and of memory for three gradients. Both
    tests miss data that are sorted over the whole epoch, because these look like a drifting gradient. Each
    rank of DistributedDataParallel passes its share of every window, and all get the same result.

    Args:
        models: modules of the gradient; parameters and ``.grad`` do not change.
        loss_fn: function from a micro-batch to its loss.
        batches: at least `windows` batches, in the order of training.
        windows: number of windows to compare, three at a time.
        data_size: number of samples from which batches are drawn without replacement, as in `NoiseMeter`;
            such windows vary less than independent draws. None for unlimited data.
        options: options of `superbatch.torch.Gradient`, as in training: ``microbatch_size``, ``weight``,
            ``reduction``.

    Returns:
        The verdict, and the noise scale that is effective for updates with these windows.

    Raises:
        InputError: there are too few batches, a window has a single micro-batch, parameters are sharded over
            ranks, or an option is invalid.

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
        raise InputError(f"windows={windows} is too few for a verdict. Pass {3 * FEWEST_TRIPLES} or more.")
    if "observers" in options:
        raise InputError("The test uses a NoiseMeter of its own. Leave observers= out.")
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
    test, means = IndependenceTest(), _Windows()
    before = [p.grad for p in owned]
    source = iter(batches)
    try:
        for _ in range(windows // 3):
            means.triple(test, [_one(gradient, meter, fresh, owned, source, windows) for _ in range(3)])
    finally:
        for parameter, grad in zip(owned, before, strict=True):
            parameter.grad = grad
    drawn = means.samples() / data_size if data_size else 0.0
    return replace(test.result(drawn), by="gradients", updates_see=means.noise_scale())


Gradients = Sequence[Tensor | None]


class _Windows:
    """Means over windows: squared norm of the gradient, variance between neighbours, samples."""

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
        """Return ``N D / (mean |g|^2 - D)``, D the variance between windows; unbiased by shared noise."""
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
    """Return the gradient of the next window, its variance expected from micro-batches, and its samples."""
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
        # The reason for this window; that of the estimate also says how many windows an average needs.
        reason = ", ".join(meter.state_dict()["left_out"])
        raise InputError(
            f"The noise of a window could not be measured: {reason}. Pass a microbatch_size that cuts each "
            "batch into two or more micro-batches."
        )
    parts = [None if p.grad is None else p.grad.detach().to_dense().clone() for p in owned]
    return parts, noise.variance / noise.samples_per_window, noise.samples_per_window


def _distance(one: Gradients, other: Gradients) -> float:
    """Return the squared distance, one parameter at a time to save memory for float64 copies."""
    total = 0.0
    for a, b in zip(one, other, strict=True):
        if a is None and b is None:
            continue
        parts = [torch.zeros(()) if each is None else in_float64(each) for each in (a, b)]
        total += float((parts[0] - parts[1].to(parts[0].device)).abs().square().sum())
    return total
