"""Names of a model's state without those of its wrappers, so that any wrapping of it loads them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# These names are torch's own, wherever they stand; "module" may also be a user's.
_ALWAYS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # no one else's names


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return names of a model's state without the parts that DDP, torch.compile and checkpointing add.

    Args:
        model: as it is wrapped.
        names: of its parameters, or the keys of its state.

    Returns:
        Name -> plain name.

    Examples:
        >>> plain_names(nn.DataParallel(nn.Linear(1, 1)), ["module.weight", "module._orig_mod.bias"])
        {'module.weight': 'weight', 'module._orig_mod.bias': 'bias'}
    """
    # Found by type: a submodule of the user's may be named "module" as well.
    wrappers = {
        f"{path}.module" if path else "module"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, DistributedDataParallel | DataParallel)
    }
    return {name: _plain(name, wrappers) for name in names}


def _plain(name: str, wrappers: set[str]) -> str:
    parts = name.split(".")
    kept = [
        part
        for index, part in enumerate(parts)
        if part not in _ALWAYS and ".".join(parts[: index + 1]) not in wrappers
    ]
    return ".".join(kept)


def parameter_names(models: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return the plain name of each parameter, with the number of its model before it.

    Examples:
        >>> list(parameter_names([nn.Linear(1, 1)]).values())
        ['0.weight', '0.bias']
    """
    found: dict[Tensor, str] = {}
    for number, model in enumerate(models):
        parameters = dict(model.named_parameters())
        for name, plain in plain_names(model, parameters).items():
            found[parameters[name]] = f"{number}.{plain}"
    return found
