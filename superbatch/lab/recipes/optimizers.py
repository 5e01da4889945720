"""The optimizers that a recipe can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

OptimizerFactory = Callable[[Iterable["Tensor"], float], Any]


def _of(kind: str, **settings: float) -> OptimizerFactory:
    def make(parameters: Iterable[Tensor], learning_rate: float) -> Any:
        import torch  # here: recipes are listed without it

        return getattr(torch.optim, kind)(parameters, lr=learning_rate, **settings)

    return make


OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "sgd": _of("SGD"),
    "momentum": _of("SGD", momentum=0.9),
    "adam": _of("Adam"),
    "adamw": _of("AdamW"),  # with torch's weight decay of 0.01
}
