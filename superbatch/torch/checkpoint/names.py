"""Names in a model's state without the parts of wrappers, so that they load with any wrapping."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Only torch uses these names; "module" may also be a user's.
_ALWAYS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return names of a model's state without the parts that DDP, torch.compile and checkpointing add.

    Returns:
        Name -> plain name.

    Examples:
        >>> plain_names(nn.DataParallel(nn.Linear(1, 1)), ["module.weight", "module._orig_mod.bias"])
        {'module.weight': 'weight', 'module._orig_mod.bias': 'bias'}
    """
    # By type, because a user's submodule may have the name "module" too.
    wrappers = {
        f"{path}.module" if path else "module"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, DistributedDataParallel | DataParallel)
    }
    return {name: _plain(name, wrappers) for name in names}


def _plain(name: str, wrappers: set[str]) -> str:
    parts = name.split(".")
    remaining = [
        part
        for index, part in enumerate(parts)
        if part not in _ALWAYS and ".".join(parts[: index + 1]) not in wrappers
    ]
    return ".".join(remaining)


def parameter_names(models: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return the plain name of each parameter, with the index of its model as a prefix.

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
