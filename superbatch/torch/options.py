"""Option objects of an `Accumulator`: BatchNorm, random streams, leaves of a batch, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import InputError

GradientSumOption = torch.dtype | Literal["auto", "momentum"] | None


class FrozenBatchNorm:
    """BatchNorms that normalise with their running statistics during each window: exact.

    Args:
        modules: BatchNorms, or modules that contain them. Without arguments: those of all models.

    Examples:
        >>> from superbatch.torch import Accumulator
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_fn = lambda x: model(x).square().mean()
        >>> accumulate = Accumulator(
        ...     model, sgd, loss_fn, microbatch_size=2, participants=[FrozenBatchNorm()]
        ... )
        >>> accumulate(torch.randn(4, 2)).made
        True
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = _modules(modules, "FrozenBatchNorm")

    def __repr__(self) -> str:
        return "FrozenBatchNorm()"


class GhostBatchNorm:
    """BatchNorms that normalise each micro-batch by itself, as ghost batch normalisation does: not exact.

    The gradient differs from that of the batch. Running statistics change once per update, by the mean and
    the variance of the whole batch, pooled from the micro-batches.

    Args:
        modules: BatchNorms, or modules that contain them. Without arguments: those of all models.

    Examples:
        >>> GhostBatchNorm(nn.BatchNorm1d(4))
        GhostBatchNorm()

    References:
        E. Hoffer, I. Hubara, D. Soudry, 2017, https://arxiv.org/abs/1705.08741
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = _modules(modules, "GhostBatchNorm")

    def __repr__(self) -> str:
        return "GhostBatchNorm()"


@dataclass(frozen=True)
class PerSampleRandom:
    """A random stream for each sample, so that dropout and noise do not depend on the split.

    Without it each micro-batch draws from the global generator, as in a loop written by hand.

    Examples:
        >>> PerSampleRandom()
        PerSampleRandom()
    """


@dataclass(frozen=True)
class Split:
    """Declaration of the parts of a batch that are not tensors with the samples in dimension 0.

    Args:
        unsplit: paths of parts that every micro-batch gets unsplit. All get the same object: do not change
            it in place.
        per_sample: paths of lists that hold one object per sample.

    Raises:
        InputError: `unsplit` or `per_sample` is not a sequence of strings.

    Examples:
        >>> Split(per_sample=["targets"])
        Split(unsplit=(), per_sample=('targets',))
    """

    unsplit: Sequence[str] = ()
    per_sample: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Not by assignment, which frozen=True forbids. Any sequence becomes a tuple.
        object.__setattr__(self, "unsplit", _paths(self.unsplit, "unsplit"))
        object.__setattr__(self, "per_sample", _paths(self.per_sample, "per_sample"))

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """Both options as keyword arguments for functions of `superbatch.batch`."""
        return {"unsplit": tuple(self.unsplit), "per_sample": tuple(self.per_sample)}


@dataclass(frozen=True)
class ClipValue:
    """Clipping of the elements of a gradient to a magnitude, in place.

    Args:
        limit: largest magnitude of an element.

    Raises:
        InputError: the limit is not a positive number.

    Examples:
        >>> gradient = torch.tensor([-3.0, 0.1])
        >>> ClipValue(0.5)([gradient])
        >>> gradient
        tensor([-0.5000,  0.1000])
    """

    limit: float

    def __post_init__(self) -> None:
        limit = self.limit
        # `not limit > 0` refuses NaN as well.
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise InputError(f"ClipValue({limit!r}) needs a positive limit. Pass a positive number.")

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Clip the elements of each tensor.

        Raises:
            InputError: a tensor is complex.
        """
        # In place, because .grad may be a view of a flat buffer.
        for gradient in gradients:
            if gradient.is_complex():
                raise InputError(
                    "ClipValue cannot clip a complex gradient, because complex numbers have no order. Pass "
                    "max_grad_norm= instead of clip=."
                )
            gradient.clamp_(-self.limit, self.limit)


def _modules(modules: Sequence[object], name: str) -> tuple[nn.Module, ...]:
    # A class raises too, as in FrozenBatchNorm(nn.BatchNorm2d).
    found = tuple(module for module in modules if isinstance(module, nn.Module))
    if len(found) != len(modules):
        other = next(module for module in modules if not isinstance(module, nn.Module))
        raise InputError(
            f"{name}() got {other!r}, which is not a module. Pass the model, or some of its BatchNorms."
        )
    return found


def _paths(paths: object, name: str) -> tuple[str, ...]:
    # A string is a sequence of strings, so unsplit="anchors" would become seven paths.
    if isinstance(paths, Sequence) and not isinstance(paths, str) and all(isinstance(p, str) for p in paths):
        return tuple(paths)
    raise InputError(f'{name}={paths!r} is not a list of paths. Pass {name}=["path"].')


NOT_DECLARED = Split()  # the default rules apply to every part of the batch
