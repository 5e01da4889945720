"""Validation of models and optimizers, before anything is changed."""

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
    """Return one or several models as a tuple; raise `InputError` for none, and for other objects.

    Examples:
        >>> len(as_models([nn.Linear(1, 1), nn.Linear(1, 1)]))
        2
    """
    models: tuple[Any, ...] = tuple(model) if isinstance(model, list | tuple) else (model,)
    for each in models:
        # By name, because importing pipelining takes longer than importing this library.
        if type(each).__module__.startswith("torch.distributed.pipelining"):
            raise pipelined(each)
    # After the test for pipelines, whose schedules are not modules.
    if not models or not all(isinstance(m, nn.Module) for m in models):
        raise InputError(
            f"model is of type {_types(models)}, not a torch module. Pass a torch.nn.Module, or a list of "
            "them."
        )
    return models


def as_optimizers(optimizer: object) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple; raise `OptimizerError` for LBFGS and for other objects.

    Examples:
        >>> as_optimizers(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))[0].defaults["lr"]
        0.001
    """
    optimizers: tuple[Any, ...] = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise OptimizerError(
            f"optimizer is of type {_types(optimizers)}, not a torch optimizer. Pass a "
            "torch.optim.Optimizer, or a list of them."
        )
    for one in optimizers:
        # The signature of the class, because a scheduler may have wrapped the instance's step.
        closure = inspect.signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise OptimizerError(
                f"{type(one).__name__}.step() needs a closure that evaluates the loss of the whole batch "
                "several times per update, but a window computes each micro-batch once. Use an optimizer "
                "whose step() needs no closure, such as SGD or AdamW."
            )
    return optimizers


def own_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor] | None
) -> list[ManagedParameter]:
    """List the parameters that the optimizers update, each with its name in the models.

    Raises:
        OptimizerError: the optimizers have no trainable parameter of the models, two optimizers share a
            parameter, or a parameter is stepped inside the backward.
        InputError: an entry of `masters` does not belong to a parameter of the models.
    """
    names = names_of(models)
    parameter_of: Mapping[Any, Tensor] = _parameters_by_target(names, masters or {})
    owned: list[ManagedParameter] = []
    seen: set[Tensor] = set()
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            targets: list[Tensor] = group["params"]
            for position, target in enumerate(targets):
                if target in seen:
                    name = names.get(target)
                    raise OptimizerError(
                        f"{'A tensor outside of the model' if name is None else f'The parameter {name!r}'} "
                        "is in two optimizers. Make each optimizer with different parameters."
                    )
                seen.add(target)
                # `target` is the master copy, `parameter` the model's tensor that gets the gradient.
                parameter = parameter_of.get(target, target)
                # A frozen parameter is added by `refresh` once it is unfrozen.
                if not parameter.requires_grad:
                    continue
                name = names.get(parameter, f"optimizer[{index}].group[{number}].parameter[{position}]")
                owned.append(ManagedParameter(name, parameter, target, optimizer, number))
    # Without an optimizer for its master a parameter would never change.
    unused = [parameter for parameter, master in (masters or {}).items() if master not in seen]
    if unused and masters:
        raise OptimizerError(
            f"No optimizer updates the master of {names.get(unused[0], 'a frozen parameter')!r}, so its "
            "parameter would not change. Make the optimizer with masters.values(), not with "
            "model.parameters()."
        )
    # Typically the optimizer was made before model.to(), or for another model.
    if not any(entry.parameter in names for entry in owned):
        raise OptimizerError(
            f"None of the optimizer's {len(seen)} tensors is one of the model's {len(names)} trainable "
            "parameters. Make the optimizer with model.parameters(), or pass MasterWeights(optimizer, "
            "masters) for float32 copies."
        )
    for entry in owned:
        # The attribute that torch's _apply_optimizer_in_backward sets.
        if hasattr(entry.parameter, "_in_backward_optimizers"):
            raise steps_in_backward(entry.name)
    return owned


def all_parameters(models: Sequence[nn.Module], placeholder: Optimizer) -> list[ManagedParameter]:
    """List all trainable parameters of models, for a gradient without an optimizer.

    Args:
        models: one or several models.
        placeholder: the optimizer of all entries, from `no_optimizer`; it is never stepped.

    Examples:
        >>> [entry.name for entry in all_parameters([nn.Linear(2, 1)], no_optimizer())]
        ['weight', 'bias']
    """
    return [ManagedParameter(name, each, each, placeholder, 0) for each, name in names_of(models).items()]


def no_optimizer() -> Optimizer:
    """Return a placeholder optimizer that belongs to no model.

    Examples:
        >>> len(no_optimizer().param_groups)
        1
    """
    # A ManagedParameter reads a group of its optimizer, so there must be one.
    return torch.optim.SGD([torch.zeros(1)], lr=0.0)


def has_others(models: Sequence[nn.Module], owned: list[ManagedParameter]) -> bool:
    """Return whether the models have trainable parameters that belong to other optimizers."""
    parameters = {entry.parameter for entry in owned}
    return any(p.requires_grad and p not in parameters for model in models for p in model.parameters())


class BackwardWatch:
    """Participant of the first window that detects parameters which a backward changes, and restores them.

    A hook may step an optimizer inside the backward, so that an update is made before the sum is complete.
    Parameters are copied only if one of them has hooks, so an ordinary model has no cost.
    """

    def __init__(self, owned: list[ManagedParameter]) -> None:
        hooked = any(
            # Tensor hooks too, because one may step an optimizer.
            getattr(entry.parameter, "_post_accumulate_grad_hooks", None) or entry.parameter._backward_hooks
            for entry in owned
        )
        self._watched = [(entry, entry.parameter.detach().clone()) for entry in owned] if hooked else []

    def check(self) -> None:
        """Restore all parameters and raise `OptimizerError` if a backward has changed one of them."""
        # By value, because a write through `.data` does not increase the version counter.
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
        """Free the copies."""
        self._watched = []

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: parameters are saved with the model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: parameters are loaded with the model."""

    def restore(self) -> None:
        """Restore the parameters that hooks have changed."""
        with torch.no_grad():
            for entry, before in self._watched:
                entry.parameter.copy_(before)


def check_positive(value: object, name: str) -> float | None:
    """Return a positive number as a float, or None; raise `InputError` for any other value.

    Examples:
        >>> check_positive(1, "max_grad_norm")
        1.0
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isnan(value):
        raise InputError(f"{name}={value!r} is not a positive number. Pass a positive float or None.")
    return float(value)


def check_choice(value: object, name: str, choices: Any) -> Any:
    """Return a value if it is one of the choices of a Literal type, else raise `InputError` with the list.

    Examples:
        >>> from typing import Literal
        >>> check_choice("a", "letter", Literal["a", "b"])
        'a'
    """
    allowed = get_args(choices)
    if isinstance(value, str) and value in allowed:
        return value
    listed = ", ".join(repr(choice) for choice in allowed)
    raise InputError(f"{name}={value!r} is not a choice of {name}. Pass one of {listed}.")


def check_momentum(
    step_optimizers: Sequence[Optimizer], conflicts: Mapping[str, object] | None = None
) -> None:
    """Check that summing gradients in the momentum buffer is exact.

    Args:
        step_optimizers: the accumulator's optimizers.
        conflicts: option as the user types it, e.g. "clip=" -> whether the user has set it; each needs the
            whole gradient.

    Raises:
        OptimizerError: the optimizer is not a single SGD with momentum, or uses Nesterov, dampening, or a
            differentiable update.
        InputError: another option needs the whole gradient, which is not formed.
    """
    optimizer = step_optimizers[0]
    # A subclass of SGD may compute its step differently.
    if len(step_optimizers) > 1 or type(optimizer) is not torch.optim.SGD:
        reason = "only one torch.optim.SGD has a state that is linear in the gradient"
    else:
        reason = next(filter(None, map(_not_linear, optimizer.param_groups)), None)
    if reason:
        raise OptimizerError(
            f'gradient_sum="momentum" with {type(optimizer).__name__} is not exact: {reason}. Remove '
            "gradient_sum=."
        )
    for option, is_set in (conflicts or {}).items():
        if is_set:
            raise InputError(
                f'gradient_sum="momentum" does not work with {option}: micro-batches are summed in the '
                "momentum buffer, so there is no separate gradient. Remove one of the two."
            )


def _not_linear(group: Mapping[str, Any]) -> str | None:
    """Return the reason why gradients cannot be summed in a group's momentum buffer, or None."""
    # Micro-batches can be added one by one only if a step computes buffer = momentum * buffer + gradient.
    reasons = {
        "without momentum there is no momentum buffer": not group["momentum"],
        "Nesterov momentum also needs the gradient by itself": group["nesterov"],
        "with dampening the first update differs from the others": group["dampening"],
        "a differentiable update needs the gradient in the graph": group["differentiable"],
        "the buffer has the dtype of the parameters, in which a long sum loses small gradients": any(
            parameter.dtype in LOW_PRECISION for parameter in group["params"]
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def names_of(models: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return the name of every trainable parameter; a shared one has its first name.

    Examples:
        >>> list(names_of([nn.Linear(1, 1)]).values())
        ['weight', 'bias']
    """
    names: dict[Tensor, str] = {}
    for index, model in enumerate(models):
        # The first model has no prefix, as in the names of BatchNorms.
        prefix = "" if index == 0 else f"models[{index}]."
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # setdefault keeps the first name of a shared parameter.
                names.setdefault(parameter, prefix + name)
    return names


def _parameters_by_target(
    names: Mapping[Tensor, str], masters: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    """Return the mapping master -> parameter; raise `InputError` for an entry that does not fit."""
    for parameter, master in masters.items():
        # A frozen parameter may have a master, because it may be unfrozen later.
        known = parameter in names or (isinstance(parameter, Tensor) and not parameter.requires_grad)
        if not known or not isinstance(master, Tensor) or not _holds(master, parameter):
            raise InputError(
                "An entry of masters= does not map a parameter of the model to a copy with the same shape "
                "and the same or a wider dtype. Make masters with fp32_masters(model)."
            )
    return {master: parameter for parameter, master in masters.items()}


def _holds(master: Tensor, parameter: Tensor) -> bool:
    """Return whether a master has a parameter's shape, and a dtype that represents its values."""
    # promote_types returns float32 for bfloat16 and float16, neither of which contains the other.
    wider = torch.promote_types(master.dtype, parameter.dtype) == master.dtype
    return master.shape == parameter.shape and wider


def _types(values: Iterable[object]) -> str:
    return ", ".join(type(value).__name__ for value in values) or "an empty sequence"
