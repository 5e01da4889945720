"""Master weights: float32 copies of low-precision parameters, which the optimizer updates instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError
from .window.participants.gradient_sum import LOW_PRECISION, ManagedParameter
from .window.validation import as_models

# Name -> versions of a parameter and of its master; a version that has changed shows a write.
Written = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class MasterWeights:
    """An optimizer of float32 copies of low-precision parameters; each update copies them back, rounded.

    Args:
        optimizer: made with ``masters.values()``.
        masters: parameter -> copy, from `fp32_masters`.

    Raises:
        InputError: `masters` is not a mapping.

    Examples:
        >>> from superbatch.torch import Accumulator
        >>> model = nn.Linear(2, 1).bfloat16()
        >>> masters = fp32_masters(model)
        >>> sgd = torch.optim.SGD(masters.values(), lr=0.1)
        >>> accumulate = Accumulator(model, MasterWeights(sgd, masters), lambda x: model(x).mean())
        >>> accumulate(torch.randn(4, 2, dtype=torch.bfloat16)).made
        True
    """

    optimizer: Optimizer
    masters: Mapping[Tensor, Tensor]

    def __post_init__(self) -> None:
        # A list of tensors is a common mistake: fp32_masters(model).values().
        if not isinstance(self.masters, Mapping):
            raise InputError(
                f"masters= is a {type(self.masters).__name__}, not a dict. Pass what fp32_masters(model) "
                "returned."
            )


def fp32_masters(model: nn.Module) -> dict[Tensor, Tensor]:
    """Make float32 copies of a model's low-precision parameters, which the optimizer updates instead.

    Args:
        model: a model with bfloat16 or float16 parameters.

    Returns:
        Trainable parameter -> its float32 copy; float32 and float64 parameters map to themselves. Make the
        optimizer with the values, and pass both as ``MasterWeights(optimizer, masters)``.
        ``Accumulator.state_dict()`` contains the copies: save and load it, the model and the optimizer, in
        any order.

    Raises:
        InputError: `model` is not a module.

    Examples:
        >>> from superbatch.torch import Accumulator
        >>> model = nn.Linear(2, 1).bfloat16()
        >>> masters = fp32_masters(model)
        >>> optimizer = torch.optim.SGD(masters.values(), lr=0.1)
        >>> accumulate = Accumulator(model, MasterWeights(optimizer, masters), lambda x: model(x).mean())
        >>> accumulate(torch.randn(4, 2, dtype=torch.bfloat16)).made
        True
    """
    (checked,) = as_models(model)
    return {
        # A wider parameter is its own master, so that the optimizer gets one list of all parameters.
        parameter: nn.Parameter(parameter.detach().float()) if parameter.dtype in LOW_PRECISION else parameter
        for parameter in checked.parameters()
        if parameter.requires_grad
    }


def masters_written(owned: list[ManagedParameter]) -> Written:
    """Record the versions of parameters and their masters after the last copy between them."""
    return {
        entry.name: (entry.parameter._version, entry.target._version)
        for entry in owned
        if entry.target is not entry.parameter
    }


def masters_at_first(owned: list[ManagedParameter]) -> Written:
    """Check that each master rounds to its parameter, and record the versions of both.

    Raises:
        InputError: a master does not round to its parameter, so the first update would overwrite a parameter
            that was loaded.
    """
    for entry in owned:
        parameter, master = entry.parameter, entry.target
        # On the meta device there are no values to compare.
        if master is parameter or parameter.is_meta or master.is_meta:
            continue
        # A master may be on the CPU, to save GPU memory.
        if not _rounds_to(master.to(parameter.device), parameter):
            raise InputError(
                f"The master of {entry.name!r} differs from the parameter by more than rounding, so the "
                "first update would overwrite the parameter. Load the model, then call fp32_masters(model)."
            )
    return masters_written(owned)


def take_over(owned: list[ManagedParameter], written: Written) -> None:
    """Make parameters and masters agree after other code has written to one of them.

    A master that rounds to its parameter stays, so a checkpoint can load either of them first. If they
    differ, a written parameter (other weights, an average) is copied into its master, because the next update
    would overwrite the parameter. If only the master was written, it is copied into the parameter.

    Args:
        owned: the parameters.
        written: result of `masters_written` after the last update; changed in place.
    """
    for entry in owned:
        parameter, master = entry.parameter, entry.target
        versions = written.get(entry.name)
        # Without a write since the last copy, skip the comparison, which reads both tensors.
        if master is parameter or versions == (parameter._version, master._version):
            continue
        if not _rounds_to(master, parameter):
            # The parameter has the version of the last copy, so only the master was written.
            only_master = versions is not None and versions[0] == parameter._version
            with torch.no_grad():
                if only_master:
                    parameter.copy_(master)
                else:
                    master.copy_(parameter)
        # After the copy, because it increases a version.
        written[entry.name] = (parameter._version, master._version)


def _rounds_to(master: Tensor, parameter: Tensor) -> bool:
    rounded = master.detach().to(parameter.dtype)
    # torch.equal first: it is one kernel, and sufficient unless there is a NaN, which never equals itself.
    return torch.equal(rounded, parameter) or bool(
        ((rounded == parameter) | (rounded.isnan() & parameter.isnan())).all()
    )


def masters_state(models: Sequence[nn.Module], masters: Mapping[Tensor, Tensor]) -> dict[str, Tensor] | None:
    """Return the masters to save, by the names of their parameters; None if there are none.

    Returns:
        The tensors themselves, as in a module's ``state_dict()``, without parameters that are their own
        master.

    Examples:
        >>> layer = nn.Linear(2, 1).bfloat16()
        >>> sorted(masters_state([layer], fp32_masters(layer)))
        ['bias', 'weight']
    """
    return {name: master.detach() for name, master in _by_name(models, masters).items()} or None


def masters_loader(
    models: Sequence[nn.Module], masters: Mapping[Tensor, Tensor], saved: object
) -> Callable[[], None]:
    """Check masters saved by `masters_state`; return a function that copies them into the present ones.

    Raises:
        InputError: the saved masters are of other parameters, shapes or dtypes, or one of them is not finite;
            nothing has changed.

    Examples:
        >>> layer = nn.Linear(2, 1).bfloat16()
        >>> masters = fp32_masters(layer)
        >>> masters_loader([layer], masters, {"bias": torch.ones(1), "weight": torch.ones(1, 2)})()
        >>> masters[layer.bias].tolist()
        [1.0]
    """
    # By name, because another process has other tensors.
    here = _by_name(models, masters)
    if saved is None:
        return lambda: None
    if not isinstance(saved, Mapping) or not all(isinstance(each, Tensor) for each in saved.values()):
        raise InputError(
            "The saved masters are not a dict of names and tensors. Pass what state_dict() returned."
        )
    if saved.keys() != here.keys():
        # The first name in alphabetical order, so that the message is the same in each run.
        name = min(saved.keys() ^ here.keys())
        where = "the saved state" if name in saved else "this Accumulator"
        raise InputError(
            f"Only {where} has a float32 master of {name!r}. Make the Accumulator with "
            "MasterWeights(optimizer, fp32_masters(model)) of the same model."
        )
    # All are checked before one is copied.
    for name, master in here.items():
        _check_saved(name, saved[name], master)

    @torch.no_grad()
    def load() -> None:
        for name, master in here.items():
            master.copy_(saved[name])

    return load


def _check_saved(name: str, saved: Tensor, master: Tensor) -> None:
    """Raise if a saved master does not fit the present one, or is not finite."""
    if saved.shape != master.shape:
        raise InputError(
            f"The saved master of {name!r} has shape {tuple(saved.shape)}, but the parameter has shape "
            f"{tuple(master.shape)}. Load the state of the same model."
        )
    if saved.dtype != master.dtype:
        raise InputError(
            f"The saved master of {name!r} has dtype {saved.dtype}, not {master.dtype}. Load the state as "
            "it was saved, because a conversion rounds it."
        )
    if saved.is_meta:
        raise InputError(f"The saved master of {name!r} is on the meta device. Load a state that has values.")
    # An intended infinity, such as -inf in a mask, is in both tensors and is no error.
    wrong = ~torch.isfinite(saved) & (saved != master.detach().to(saved.device))
    if wrong.any():
        raise InputError(
            f"The saved master of {name!r} contains {float(saved[wrong][0])}: {int(wrong.sum())} of "
            f"{saved.numel()} values are not finite. Load an earlier state, in which all values are finite."
        )


def _by_name(models: Sequence[nn.Module], masters: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            master = masters.get(parameter)
            # A parameter that is its own master is saved with the model.
            if master is not None and master is not parameter:
                found[name if number == 0 else f"models[{number}].{name}"] = master
    return found
