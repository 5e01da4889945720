"""Checks of the arguments of `verify`."""

from __future__ import annotations

from typing import Any

from torch import nn

from superbatch.errors import InputError
from superbatch.torch.window.slips import check_loss_fn
from superbatch.torch.window.validation import check_positive

from .problem import Problem


def check_model(model: nn.Module) -> None:
    """Refuse a model without a gradient, and one whose gradients are reduced over ranks.

    Raises:
        InputError: it is such a model.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"A {type(model).__name__} without parameters that need a gradient has no gradient to compare. "
            "Pass the model that is trained, and do not freeze all of it."
        )
    # A part that is wrapped reduces its gradients as well.
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise InputError(
                f"DistributedDataParallel ({path or 'the model itself'}) reduces gradients over ranks, and "
                "each rank would verify another batch. Pass its .module, and a loss_fn that calls that."
            )


def check_options(problem: Problem, tolerance: Any) -> None:
    """Refuse options of the wrong type or value.

    Raises:
        InputError: one of them is.
    """
    # The usual slip: the loss itself instead of a function.
    if not callable(problem.loss_fn):
        raise InputError(
            f"loss_fn={problem.loss_fn!r} cannot be called. Pass a function micro-batch -> loss."
        )
    check_loss_fn(problem.loss_fn)
    # Before anything is copied or evaluated: the Accumulator's three forms of weight=.
    if not (problem.weight is None or problem.weight == "returned" or callable(problem.weight)):
        raise InputError(
            f"weight={problem.weight!r} cannot weigh a micro-batch. Pass None (samples), a function "
            'micro-batch -> number, or "returned".'
        )
    # check_positive lets None pass, which stands for an option without a value.
    if tolerance is None or check_positive(tolerance, "tolerance") is None:
        raise InputError(f"tolerance={tolerance!r} is no relative difference. Pass a float, such as 1e-12.")
