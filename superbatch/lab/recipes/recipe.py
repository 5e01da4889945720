"""Recipe: one task with everything that an experiment needs to train it - model, data, loss and metric.

The study, not the recipe, chooses the samples of each batch, the seed of the initial weights, the splits and
the number of updates. So all arms of a comparison share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from superbatch.errors import InputError

if TYPE_CHECKING:  # recipes are listed and validated without importing torch
    from torch import Tensor, nn

OptimizerFactory = Callable[[Iterable["Tensor"], float], Any]  # (parameters, learning rate) -> optimizer


def _of(kind: str, **settings: float) -> OptimizerFactory:
    def make(parameters: Iterable[Tensor], learning_rate: float) -> Any:
        import torch  # only when an optimizer is made

        return getattr(torch.optim, kind)(parameters, lr=learning_rate, **settings)

    return make


OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": _of("SGD"),
    "momentum": _of("SGD", momentum=0.9),
    "adam": _of("Adam"),
    "adamw": _of("AdamW"),  # with torch's default weight decay of 0.01
}
"""Optimizers that every recipe can name."""


def _not_measured(model: nn.Module) -> float:
    raise InputError("The recipe has no evaluate. Pass it to Recipe(...).")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task: model, data, loss, optimizer and metric.

    Attributes:
        name: short name, as the user types it.
        description: model and data, in one sentence.
        model: seed -> new model with initial weights drawn from that seed, in float32, on the CPU.
        samples: number of training samples.
        batch: indices -> batch of these samples. The indices are an int64 tensor of shape (n,) with values
            in [0, samples). The batch is any structure that the accumulator splits, with floating-point
            leaves in float32.
        loss_fn: model -> loss function of a batch or micro-batch, a closure over the model.
        evaluate: model -> metric on held-out data, in `unit`. This field, `metric`, `unit`, `margin`,
            `metric_step` and `learning_rates` are optional for `superbatch verify` and `superbatch fit`.
        metric: name of the metric, such as ``"test accuracy"``.
        unit: unit of the metric, such as ``"%"``.
        margin: difference of the metric, in `unit`, that does not matter (equivalence margin).
        metric_step: smallest change of the metric: 100 / m for a percentage of m test samples, 0 for a loss.
            None for the smallest difference between runs.
        learning_rates: learning rates of the allowed optimizers, by name; the first is the default. If empty,
            commands that do not train allow all of `optimizers`.
        optimizers: optimizer factories by name: (parameters, learning rate) -> optimizer.
        batch_size: samples of one update.
        updates: length of a run.
        reduction: reduction of `loss_fn` over the samples: ``"mean"`` or ``"sum"``.
        weight: weight of a micro-batch, as for `superbatch.torch.Accumulator`; None for its number of
            samples.
        counts: unit of the weight, in words.
        batchnorm: for BatchNorm in training mode, raise an ``"error"``, use ``"frozen"`` statistics
            (`FrozenBatchNorm`), or normalise ``"per_microbatch"`` (`GhostBatchNorm`). With
            ``coupled="exact"``, this applies only to the plain accumulation that is compared with it.
        coupled: raise an ``"error"`` for coupled samples, or make ``"exact"`` updates
            (`superbatch.torch.WholeBatch`).

    Raises:
        InputError: a number is not positive, `batch_size` exceeds `samples`, or `learning_rates` has a name
            that is not in `optimizers`.

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
                    f"The recipe {self.name!r} has {name}={value!r}. Pass a positive int to Recipe(...)."
                )
        if self.batch_size > self.samples:
            raise InputError(
                f"The recipe {self.name!r} has batch_size={self.batch_size}, but only {self.samples} "
                "training samples. Pass a smaller batch_size."
            )
        unknown = sorted(set(self.learning_rates) - set(self.optimizers))
        if unknown:
            raise InputError(
                f"The recipe {self.name!r} has learning_rates for the unknown optimizers {unknown}. Use "
                f"names of {sorted(self.optimizers)}, or add yours to `optimizers`."
            )

    @property
    def default_optimizer(self) -> str:
        """Return the name of the optimizer used by default, the first of `offered`."""
        return self.offered[0]

    @property
    def offered(self) -> tuple[str, ...]:
        """Return the names in `learning_rates`, or all names in `optimizers` if it is empty."""
        return tuple(self.learning_rates or self.optimizers)

    def require(self, *names: str, by: str) -> None:
        """Raise `InputError` if the recipe lacks fields that the command `by` needs."""
        is_missing = {
            "evaluate": self.evaluate is _not_measured,
            "metric": not self.metric,
            "margin": math.isnan(self.margin),
            "learning_rates": not self.learning_rates,
        }
        missing = ", ".join(name for name in names if is_missing[name])
        if missing:
            raise InputError(
                f"The recipe {self.name!r} has no {missing}, which {by} needs. Pass it to Recipe(...)."
            )

    @property
    def statement(self) -> str:
        """Return a description of the loss: its reduction, and the unit of the weights."""
        return f"{self.reduction} over {self.counts}"
