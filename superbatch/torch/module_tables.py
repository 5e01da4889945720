"""Tables of a module: its own parameters, buffers and children by name.

torch's public functions build a new list in each call: ``named_buffers(recurse=False)`` takes 25 times as
long, and it is needed for each module in each update. They also omit a name whose
value is None, and a write to such a list does not change the module.
"""

from __future__ import annotations

from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of a module's own parameters, not a copy.

    Examples:
        >>> list(parameters_of(nn.Linear(2, 3, bias=False)).items())[1]
        ('bias', None)
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of a module's own buffers, not a copy.

    Examples:
        >>> list(buffers_of(nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's own children, not a copy.

    Examples:
        >>> list(children_of(nn.Sequential(nn.ReLU(), nn.ReLU())))
        ['0', '1']
    """
    return module._modules
