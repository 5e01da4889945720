"""Which samples of a batch influence each other, and where.

Accumulated gradients are exact only where the batch's loss is a weighted mean over samples
that do not see each other. This module finds what breaks that: by the type of a module, without data.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - public bases do not exist


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a module normalises with statistics of the batch it sees.

    A BatchNorm does so in training mode, and also in evaluation mode when it has no running statistics
    (`track_running_stats=False`).

    Args:
        module: any module; its children are not looked at.

    Returns:
        True for BatchNorm1d/2d/3d and SyncBatchNorm (and their subclasses) that would use batch statistics now.

    Examples:
        >>> uses_batch_statistics(nn.BatchNorm1d(3)), uses_batch_statistics(nn.BatchNorm1d(3).eval())
        (True, False)
    """
    if not isinstance(module, _BatchNorm):
        return False
    return module.training or (module.running_mean is None and module.running_var is None)


def coupled_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that, by their type and mode, let samples of a batch influence each other.

    Costs one walk over the modules and needs no data, so it misses hand-written coupling;
    `find_coupling` finds that by probing.

    Args:
        model: the model, in the mode (training or evaluation) in which it is about to be used.

    Returns:
        The paths, as in `model.named_modules()` and in its order; the model itself is `""`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
        >>> coupled_modules(model), coupled_modules(model.eval())
        (['1'], [])
    """
    return list(_paths_of_batch_statistics(model))


def _paths_of_batch_statistics(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if uses_batch_statistics(module):
            yield path
