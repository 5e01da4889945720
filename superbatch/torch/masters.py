"""Float32 copies of low-precision parameters, for an optimizer to update in their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import as_models
from .gradients import LOW_PRECISION, Owned


def fp32_masters(model: nn.Module) -> dict[Tensor, Tensor]:
    """Make float32 copies of a model's low-precision parameters, for an optimizer to update in their place.

    Args:
        model: a model with bfloat16 or float16 parameters.

    Returns:
        Trainable parameter -> its float32 copy (parameters that are wider map to themselves): make the
        optimizer over the values and pass the mapping as ``Accumulator(masters=...)``.

    Raises:
        InputError: `model` is no module.

    Examples:
        >>> from superbatch.torch import Accumulator
        >>> model = nn.Linear(2, 1).bfloat16()
        >>> masters = fp32_masters(model)
        >>> optimizer = torch.optim.SGD(masters.values(), lr=0.1)
        >>> accumulate = Accumulator(model, optimizer, lambda x: model(x).mean(), masters=masters)
        >>> accumulate(torch.randn(4, 2, dtype=torch.bfloat16)).made
        True
    """
    (checked,) = as_models(model)
    return {
        parameter: nn.Parameter(parameter.detach().float()) if parameter.dtype in LOW_PRECISION else parameter
        for parameter in checked.parameters()
        if parameter.requires_grad
    }


def masters_written(owned: list[Owned]) -> dict[str, int]:
    """Note the versions of the parameters that have a master, as the last copy from it left them."""
    return {entry.name: entry.parameter._version for entry in owned if entry.target is not entry.parameter}


def take_over(owned: list[Owned], written: dict[str, int]) -> None:
    """Copy parameters that somebody else has written to (loaded, averaged) into their masters.

    Without this the next update would set them back to what their masters still hold.
    """
    for entry in owned:
        if entry.target is not entry.parameter and written.get(entry.name) != entry.parameter._version:
            with torch.no_grad():
                entry.target.copy_(entry.parameter)
