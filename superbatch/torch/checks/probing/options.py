"""Checks of the arguments of `verify`."""

from __future__ import annotations

from typing import Any

from torch import nn

from superbatch.errors import InputError
from superbatch.torch.window.slips import check_loss_fn
from superbatch.torch.window.validation import check_positive

from .problem import Problem


def check_model(model: nn.Module) -> None:
    """Raise `InputError` for a model without trainable parameters, or with gradients reduced over ranks."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"The {type(model).__name__} has no parameter with requires_grad=True, so it has no gradient. "
            "Pass the model that is trained."
        )
    # A wrapped part of the model reduces its gradients too.
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise InputError(
                f"DistributedDataParallel ({path or 'the model itself'}) averages gradients over ranks with "
                "different batches. Pass its .module, and a loss_fn that calls that module."
            )


def check_options(problem: Problem, tolerance: Any) -> None:
    """Raise `InputError` for options of the wrong type or value."""
    if not callable(problem.loss_fn):
        raise InputError(
            f"loss_fn={problem.loss_fn!r} cannot be called. Pass a function from a micro-batch to its loss."
        )
    check_loss_fn(problem.loss_fn)
    if not (problem.weight is None or problem.weight == "returned" or callable(problem.weight)):
        raise InputError(
            f"weight={problem.weight!r} is not a weight. Pass None (weight by samples), a function from a "
            'micro-batch to a number, or "returned".'
        )
    # check_positive accepts None, as an option that is left out.
    if tolerance is None or check_positive(tolerance, "tolerance") is None:
        raise InputError(f"tolerance={tolerance!r} is not a positive number. Pass a float such as 1e-12.")
