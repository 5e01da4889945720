"""Validation of models, optimizers and losses, before any work is done."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch.errors import InputError, OptimizerError

from .participant import no_savepoint
from .participants.gradient_sum import LOW_PRECISION, ManagedParameter, steps_in_backward
from .wrapped_models import pipelined


def as_models(model: object) -> tuple[nn.Module, ...]:
    """Return one or several models as a tuple.

    Raises:
        InputError: it is not a module, and not a non-empty sequence of modules.

    Examples:
        >>> len(as_models([nn.Linear(1, 1), nn.Linear(1, 1)]))
        2
    """
    models: tuple[Any, ...] = tuple(model) if isinstance(model, list | tuple) else (model,)
    for each in models:
        # By the module's name: importing pipelining takes longer than this library.
        if type(each).__module__.startswith("torch.distributed.pipelining"):
            raise pipelined(each)
    # After the pipelines, whose stages may be modules and whose schedules are not.
    if not models or not all(isinstance(m, nn.Module) for m in models):
        raise InputError(
            f"A model of type {_types(models)} is no torch module. Pass a torch.nn.Module, or a list of them."
        )
    return models


def as_optimizers(optimizer: object) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple, if each can be stepped once per window.

    Raises:
        OptimizerError: it is no optimizer, or needs a closure (LBFGS).

    Examples:
        >>> as_optimizers(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))[0].defaults["lr"]
        0.001
    """
    optimizers: tuple[Any, ...] = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise OptimizerError(
            f"An optimizer of type {_types(optimizers)} is none of torch. Pass a torch.optim.Optimizer, or a "
            "list of them."
        )
    for one in optimizers:
        # The class's signature: an instance may have a scheduler's wrapper without it.
        closure = inspect.signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimizerError(
                f"The step of the optimizer {type(one).__name__} needs a closure that evaluates the loss of "
                "the whole batch several times per update, and micro-batches are evaluated once. Use an "
                "optimizer that steps on gradients (SGD, AdamW, ...)."
            )
    return optimizers


def own_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor] | None
) -> list[ManagedParameter]:
    """List what the optimizers update, each with its name in the models.

    Raises:
        OptimizerError: no optimizer parameter that needs a gradient belongs to the models, two optimizers
            share one, or a parameter is stepped inside the backward.
        InputError: `masters` maps something else than parameters of the models.
    """
    names = names_of(models)
    parameter_of: Mapping[Any, Tensor] = _parameters_by_target(names, masters or {})
    owned: list[ManagedParameter] = []
    seen: set[Tensor] = set()
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            targets: list[Tensor] = group["params"]
            for place, target in enumerate(targets):
                # A set by identity: tensors hash so.
                if target in seen:
                    raise OptimizerError(
                        f"Two optimizers have the parameter {names.get(target, 'outside the model')!r}, and "
                        "one window makes one update of each parameter. Give each parameter to one "
                        "optimizer."
                    )
                seen.add(target)
                # With masters the optimizer's tensor is the copy, and gradients arrive at the parameter.
                parameter = parameter_of.get(target, target)
                # Frozen now; `refresh` adds it when it is unfrozen.
                if not parameter.requires_grad:
                    continue
                name = names.get(parameter, f"optimizer[{index}].group[{number}].parameter[{place}]")
                owned.append(ManagedParameter(name, parameter, target, optimizer, number))
    # A master in no optimizer: its parameter would keep its first value.
    unused = [parameter for parameter, master in (masters or {}).items() if master not in seen]
    if unused and masters:
        raise OptimizerError(
            f"No optimizer updates the master of {names.get(unused[0], 'a frozen parameter')!r}. Make the "
            "optimizer over masters.values(), not over model.parameters()."
        )
    # Typical: the optimizer was made before model.to(), or of another model.
    if not any(entry.parameter in names for entry in owned):
        raise OptimizerError(
            f"None of the {len(seen)} tensors of the optimizer is one of the {len(names)} trainable "
            "parameters of the model, so no update could change it. Make the optimizer with "
            "model.parameters(), or pass MasterWeights(optimizer, masters) for float32 copies."
        )
    for entry in owned:
        # torch's own mark, set by _apply_optimizer_in_backward.
        if hasattr(entry.parameter, "_in_backward_optimizers"):
            raise steps_in_backward(entry.name)
    return owned


def all_parameters(models: Sequence[nn.Module], nothing: Optimizer) -> list[ManagedParameter]:
    """List all trainable parameters of models, for a gradient without an optimizer.

    Args:
        models: one or several.
        nothing: an optimizer that is never stepped, to stand as theirs.

    Examples:
        >>> [entry.name for entry in all_parameters([nn.Linear(2, 1)], no_optimizer())]
        ['weight', 'bias']
    """
    return [ManagedParameter(name, each, each, nothing, 0) for each, name in names_of(models).items()]


def no_optimizer() -> Optimizer:
    """Return an optimizer of no model, to stand where there is none.

    Examples:
        >>> len(no_optimizer().param_groups)
        1
    """
    # A ManagedParameter asks its optimizer for a group, so there has to be one.
    return torch.optim.SGD([torch.zeros(1)], lr=0.0)


def has_others(models: Sequence[nn.Module], owned: list[ManagedParameter]) -> bool:
    """Return whether the models have trainable parameters that belong to other optimizers."""
    mine = {entry.parameter for entry in owned}
    return any(p.requires_grad and p not in mine for model in models for p in model.parameters())


class BackwardWatch:
    """Watches the first window for parameters that change inside a backward, and undoes it.

    Only where parameters have hooks of their own are they copied, so that an ordinary model costs nothing.
    """

    def __init__(self, owned: list[ManagedParameter]) -> None:
        hooked = any(
            # Tensor hooks too: one may step an optimizer.
            getattr(entry.parameter, "_post_accumulate_grad_hooks", None) or entry.parameter._backward_hooks
            for entry in owned
        )
        # Copies only where a hook exists: they take the memory of all parameters.
        self._watched = [(entry, entry.parameter.detach().clone()) for entry in owned] if hooked else []

    def check(self) -> None:
        """Raise if a backward has changed a parameter, which then is as it was.

        Raises:
            OptimizerError: it names the parameter.
        """
        # By value: what is written through `.data` does not move the version counter.
        changed = [entry.name for entry, before in self._watched if not torch.equal(entry.parameter, before)]
        if changed:
            self.restore()
            raise steps_in_backward(changed[0])

    def begin(self) -> None:
        """No-op: the copies were made with the object."""

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: a backward that changes a parameter ends the window."""

    def rollback(self) -> bool:
        """No-op: a backward that changes a parameter ends the window."""
        return True

    def restart(self) -> None:
        """Restore the parameters."""
        self.restore()

    def commit(self) -> None:
        # After the first window a hook that steps would have been found.
        """Drop the copies."""
        self._watched = []

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: parameters are saved with the model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: parameters are loaded with the model."""

    def restore(self) -> None:
        """Undo what hooks have done to the parameters."""
        with torch.no_grad():
            for entry, before in self._watched:
                entry.parameter.copy_(before)


def check_positive(value: object, name: str) -> float | None:
    """Return a positive finite number, or None where there is none.

    Raises:
        InputError: it is neither.

    Examples:
        >>> check_positive(1, "max_grad_norm")
        1.0
    """
    if value is None:
        return None
    # `not value > 0` is true for NaN as well, and refuses 0.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isnan(value):
        raise InputError(f"{name}={value!r} is not a positive number. Pass a positive float or None.")
    return float(value)


def check_choice(value: object, name: str, choices: Any) -> Any:
    """Return a value if it is one of the choices of a Literal type.

    Raises:
        InputError: it is not; the text lists them.

    Examples:
        >>> from typing import Literal
        >>> check_choice("a", "letter", Literal["a", "b"])
        'a'
    """
    # The type is the list of choices: one source for checker and user.
    allowed = get_args(choices)
    if isinstance(value, str) and value in allowed:
        return value
    listed = ", ".join(repr(choice) for choice in allowed)
    raise InputError(f"{name}={value!r} is unknown. Pass one of {listed}.")


def check_momentum(step_optimizers: Sequence[Optimizer], **conflicts: object) -> None:
    """Check that accumulating into the momentum buffer is exact.

    Raises:
        OptimizerError: the optimizer is not one SGD with momentum, or uses Nesterov, dampening, or the like.
        InputError: another option needs the whole gradient, which then exists nowhere.
    """
    optimizer = step_optimizers[0]
    # A subclass of SGD may compute its step differently.
    if len(step_optimizers) > 1 or type(optimizer) is not torch.optim.SGD:
        reason = "only one torch.optim.SGD has a state that is linear in the gradient"
    else:
        reason = next(filter(None, map(_not_linear, optimizer.param_groups)), None)
    if reason:
        raise OptimizerError(
            f'gradient_sum="momentum" cannot be used with {type(optimizer).__name__}: {reason}. Leave '
            "gradient_sum out."
        )
    # Options that need the gradient as a whole.
    for name, value in conflicts.items():
        if value:
            raise InputError(
                f'gradient_sum="momentum" cannot be used with {name}, because the gradient of the batch '
                f"never exists on its own to be read or changed. Leave out gradient_sum, or {name}."
            )


def _not_linear(group: Mapping[str, Any]) -> str | None:
    """Return the reason why a group's momentum buffer cannot sum a gradient in parts, or None."""
    reasons = {
        "there is no momentum buffer without momentum": not group["momentum"],
        "Nesterov needs the gradient alone beside the buffer": group["nesterov"],
        "dampening treats the first update differently from the others": group["dampening"],
        "a differentiable update needs the gradient in the graph": group["differentiable"],
        # The float32 sum is not available here: the buffer is SGD's own.
        "the buffer has the parameters' dtype, in which a long sum stops growing": any(
            parameter.dtype in LOW_PRECISION for parameter in group["params"]
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def names_of(models: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return the name of every trainable parameter; a tied one has its first name.

    Examples:
        >>> list(names_of([nn.Linear(1, 1)]).values())
        ['weight', 'bias']
    """
    names: dict[Tensor, str] = {}
    for index, model in enumerate(models):
        # As in BatchNorm's names: the first model has no prefix.
        prefix = "" if index == 0 else f"models[{index}]."
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # setdefault: a tied parameter is listed once, by its first name.
                names.setdefault(parameter, prefix + name)
    return names


def _parameters_by_target(
    names: Mapping[Tensor, str], masters: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    for parameter, master in masters.items():
        # A frozen parameter may have a master: it may be unfrozen later.
        known = parameter in names or (isinstance(parameter, Tensor) and not parameter.requires_grad)
        if not known or not isinstance(master, Tensor) or not _holds(master, parameter):
            raise InputError(
                "masters has an entry that does not map a trainable parameter of the model to a copy of its "
                "shape, in its dtype or a wider one. Make them with fp32_masters(model)."
            )
    return {master: parameter for parameter, master in masters.items()}


def _holds(master: Tensor, parameter: Tensor) -> bool:
    """Return whether a master has the shape of a parameter, and a dtype that holds its values."""
    # promote_types of both is the wider one: bfloat16 and float16 give float32.
    wider = torch.promote_types(master.dtype, parameter.dtype) == master.dtype
    return master.shape == parameter.shape and wider


def _types(values: Iterable[object]) -> str:
    return ", ".join(type(value).__name__ for value in values) or "an empty sequence"
