"""A recipe: one task with everything that an experiment needs to train it - model, data, loss and measure.

A recipe says *what* is trained. Which samples meet in which batch, the seed of the initial weights, the
splits and the number of updates are the study's, so that all arms of a comparison share them by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from superbatch.errors import InputError

from .optimizers import OPTIMIZERS, OptimizerFactory

if TYPE_CHECKING:  # a recipe can be described, listed and refused without importing torch
    from torch import Tensor, nn


def _not_measured(model: nn.Module) -> float:
    raise InputError("The recipe has no evaluate. Pass it to Recipe(...).")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task: model, data, loss, optimizer and metric.

    Attributes:
        name: a short name, as the user would type it.
        description: one sentence: what is trained on what.
        model: seed -> a new model with initial weights drawn from that seed, float32, on the CPU.
        samples: how many training samples there are.
        batch: indices, an int64 tensor of shape (n,) with values in [0, samples) -> the batch of these
            samples (any structure that the accumulator splits), floating-point leaves in float32.
        loss_fn: model -> the loss function of a batch or micro-batch, a closure over the model.
        evaluate: model -> the metric on held-out data, in `unit`. `superbatch verify` and `superbatch fit`
            do not need this field or the next four.
        metric: what `evaluate` measures, such as ``"test accuracy"``.
        unit: its unit, such as ``"%"``.
        margin: a difference of the metric, in `unit`, that does not matter (equivalence margin).
        metric_step: the smallest change of the metric: 100 / m for a percentage of m test samples, 0 for a
            loss. None: the smallest difference between runs.
        learning_rates: the optimizers that the recipe allows and the learning rate of each; the first is
            the default. If empty, commands that do not train allow all of `optimizers`.
        optimizers: how each is made: (parameters, learning rate) -> optimizer.
        batch_size: samples of one update.
        updates: length of a run.
        reduction: what `loss_fn` returns: a ``"mean"`` or a ``"sum"``.
        weight: how much a micro-batch counts, as `superbatch.torch.Accumulator` takes it; None: its samples.
        counts: what the weight counts, in words.
        batchnorm: BatchNorm in training mode raises an ``"error"``, is ``"frozen"`` (`FrozenBatchNorm`), or
            normalises ``"per_microbatch"`` (`GhostBatchNorm`); with ``coupled="exact"``: in the plain
            accumulation that is shown beside it.
        coupled: coupled samples raise an ``"error"``, or are ``"exact"`` (`superbatch.torch.WholeBatch`).

    Raises:
        InputError: a value cannot be used.

    Examples:
        >>> import torch
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> def model(seed):
        ...     torch.manual_seed(seed)
        ...     return torch.nn.Linear(3, 1)
        >>> recipe = Recipe(
        ...     name="plane", description="a plane through points", model=model, samples=60,
        ...     batch=lambda indices: (x[indices], x[indices].sum(1)),
        ...     loss_fn=lambda model: lambda batch: (model(batch[0])[:, 0] - batch[1]).square().mean(),
        ...     evaluate=lambda model: (model(x)[:, 0] - x.sum(1)).square().mean().item(),
        ...     metric="squared error", unit="", margin=0.1, learning_rates={"sgd": 0.1}, batch_size=12,
        ...     updates=20,
        ... )
        >>> recipe.default_optimizer
        'sgd'
    """

    name: str
    description: str
    model: Callable[[int], nn.Module]
    samples: int
    batch: Callable[[Tensor], Any]
    loss_fn: Callable[[nn.Module], Callable[[Any], Any]]
    evaluate: Callable[[nn.Module], float] = _not_measured
    metric: str = ""
    unit: str = ""
    margin: float = math.nan
    metric_step: float | None = None
    learning_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    optimizers: Mapping[str, OptimizerFactory] = field(default_factory=lambda: dict(OPTIMIZERS))
    batch_size: int = 100
    updates: int = 1000
    reduction: Literal["mean", "sum"] = "mean"
    weight: Callable[[Any], int | float] | Literal["returned"] | None = None
    counts: str = "samples"
    batchnorm: Literal["error", "per_microbatch", "frozen"] = "error"
    coupled: Literal["error", "exact"] = "error"

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "updates"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(
                    f"The recipe {self.name!r} with {name}={value!r} is no count. Give an int >= 1."
                )
        if self.batch_size > self.samples:
            raise InputError(
                f"The recipe {self.name!r} with batch_size={self.batch_size}: there are {self.samples} "
                "training samples only. Give a smaller batch_size."
            )
        unknown = sorted(set(self.learning_rates) - set(self.optimizers))
        if unknown:
            raise InputError(
                f"The recipe {self.name!r} with learning_rates={dict(self.learning_rates)!r}: "
                f"no way is known to make {unknown}. "
                f"Use names of {sorted(self.optimizers)} or add yours to `optimizers`."
            )

    @property
    def default_optimizer(self) -> str:
        """The first of `offered`."""
        return self.offered[0]

    @property
    def offered(self) -> tuple[str, ...]:
        """Names of the optimizers: those of `learning_rates`, or all of `optimizers` if it is empty."""
        return tuple(self.learning_rates or self.optimizers)

    def require(self, *names: str, by: str) -> None:
        """Raise an `InputError` if fields that the command `by` needs are missing."""
        left_out = {
            "evaluate": self.evaluate is _not_measured,
            "metric": not self.metric,
            "margin": math.isnan(self.margin),
            "learning_rates": not self.learning_rates,
        }
        missing = ", ".join(name for name in names if left_out[name])
        if missing:
            raise InputError(
                f"The recipe {self.name!r} has no {missing}, which {by} needs. Pass it to Recipe(...)."
            )

    @property
    def statement(self) -> str:
        """Description of the loss: its reduction and what a micro-batch counts."""
        return f"the loss is a {self.reduction} over {self.counts}"
