"""Scale a torch optimizer to another batch size: groups, moments and schedulers, all of them or none.

The rules are those of `tuning.scaling`. All code that can raise runs before the first change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from superbatch.errors import InputError, OptimizerError
from superbatch.results.noise import Noise
from superbatch.results.scaling import Scaling
from superbatch.tuning.noise_range import noise_range
from superbatch.tuning.scaling import Family, Rule, choose, scale

Change = Callable[[], object]

RATES_OF_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""Entries that schedulers write into a group, in units of the learning rate."""

RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")
"""Attributes of schedulers in units of the learning rate."""


def rescale(
    optimizer: Optimizer,
    from_batch: float,
    to_batch: float,
    noise: Noise | float | None = None,
    rule: Rule | None = None,
    *,
    scheduler: Any = None,
) -> tuple[Scaling, ...]:
    """Scale an optimizer from one effective batch to another, in place; after an error nothing has changed.

    For SGD, Adam and AdamW (and subclasses) all settings are scaled as in `tuning.scaling.scale`. If beta2
    changes, Adam's state is scaled so that the debiased second moment stays the same. For any other optimizer
    only the learning rate is scaled, and only with an explicit `rule`.

    Args:
        optimizer: a torch optimizer.
        from_batch: samples of one update, on all ranks, for which the current settings were chosen.
        to_batch: samples of one update for which to scale them.
        noise: noise scale: the result of `Accumulator.noise`, a number of samples, or None if not known.
        rule: rule of `superbatch.tuning.scaling.scale`; None for that function's default.
        scheduler: scheduler of this optimizer's rate, or a list of them. Its rates are scaled too, because it
            would otherwise undo the change. Its number of steps does not change.

    Returns:
        The changes, the rule, and its limits, for each parameter group.

    Raises:
        InputError: a value cannot be scaled, or a scheduler sets the rate but was not passed.
        OptimizerError: no rule is known for this optimizer, and none was passed.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1e-3, betas=(0.9, 0.95))
        >>> (scaling,) = rescale(optimizer, from_batch=512, to_batch=128)
        >>> scaling.rule, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]
        ('sqrt', 0.0005, (0.9, 0.987...))
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"rescale() cannot scale an optimizer of type {type(optimizer).__name__}. Pass a torch optimizer."
        )
    schedulers = schedulers_of(scheduler)
    _require_schedulers(optimizer, schedulers)
    known = isinstance(optimizer, SGD | Adam | AdamW)
    if not known and rule is None:
        raise OptimizerError(
            f"No rule is known for an optimizer of type {type(optimizer).__name__}. To scale its learning "
            'rate only, pass rule="sqrt" (for optimizers like Adam) or rule="linear" (like SGD).'
        )
    _positive("from_batch", from_batch)
    kappa = _positive("to_batch", to_batch) / from_batch
    value = noise_range(noise).value
    ratio = None if value is None else value / from_batch
    # Computed for all groups first, so that after an error nothing has changed.
    scalings = [
        _scaled(group, family_of(optimizer, group, rule), kappa, ratio, rule, known=known)
        for group in optimizer.param_groups
    ]
    if not known:
        scalings = [_rate_only(each, type(optimizer).__name__) for each in scalings]
    # Then prepared for all groups, for the same reason.
    changes: list[Change] = []
    for group, scaling in zip(optimizer.param_groups, scalings, strict=True):
        changes += _group_changes(optimizer, group, scaling)
    if schedulers:
        rates = {scaling.rate for scaling in scalings}
        changes += [partial(_scale_scheduler, each, rates) for each in schedulers]
        # Schedulers have one base rate for each group, but one value such as eta_min for all groups.
        if len(rates) > 1:
            raise InputError(
                f"The rates of parameter groups change by different factors ({sorted(rates)}), but a "
                "scheduler has one value for all groups, such as eta_min. Pass one rule= for all groups."
            )
    # From here on nothing can fail.
    for change in changes:
        change()
    return tuple(scalings)


def family_of(optimizer: Optimizer, group: Mapping[str, Any], rule: Rule | None = None) -> Family:
    """Return the family of rules for a parameter group; `rule` determines that of an unknown optimizer.

    Returns:
        ``"sgd"``, ``"adam"``, or ``"adamw"`` with decoupled weight decay.

    Examples:
        >>> import torch
        >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
        >>> family_of(adam, adam.param_groups[0])
        'adam'
    """
    if isinstance(optimizer, SGD):
        return "sgd"
    # Adam(decoupled_weight_decay=True) is AdamW in newer releases.
    if isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay"):
        return "adamw"
    return "adam" if isinstance(optimizer, Adam) or rule in ("sqrt", "power") else "sgd"


def change_betas(optimizer: Optimizer, group: dict[str, Any], *, beta1: float, beta2: float) -> list[Change]:
    """Prepare a change of Adam's betas that does not change its debiased moments.

    Adam divides a moment by ``1 - beta ** updates``, as if all updates had been made with the current beta.
    After a change this divisor differs by the factor ``(1 - new ** updates) / (1 - old ** updates)``. Early
    in training the next steps would be several times too long or too short. So the state is multiplied by
    this factor.

    Returns:
        Functions that make the changes and cannot fail.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> adam = torch.optim.Adam([weight], betas=(0.9, 0.999))
        >>> weight.grad = torch.ones(1)
        >>> adam.step()
        >>> for change in change_betas(adam, adam.param_groups[0], beta1=0.9, beta2=0.95):
        ...     _ = change()
        >>> adam.param_groups[0]["betas"], adam.state[weight]["exp_avg_sq"]  # was 0.001
        ((0.9, 0.95), tensor([0.0500]))
    """
    old1, old2 = (float(beta) for beta in group["betas"])
    changes: list[Change] = []
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        # A float or a tensor, depending on the options of the optimizer.
        updates = float(state.get("step", 0))
        for names, old, new in (
            (("exp_avg",), old1, beta1),
            (("exp_avg_sq", "max_exp_avg_sq"), old2, beta2),
        ):
            # Before the first step there is nothing to correct.
            if updates and old != new:
                factor = (1 - new**updates) / (1 - old**updates)
                # max_exp_avg_sq exists with amsgrad only.
                changes += [partial(state[name].mul_, factor) for name in names if name in state]
    return [*changes, partial(_set_betas, group, beta1, beta2)]


def set_number(holder: Any, name: str, value: float) -> None:
    """Set an entry of a parameter group; a tensor (with ``capturable``) is set in place.

    Examples:
        >>> import torch
        >>> group = {"lr": torch.tensor(0.1)}
        >>> set_number(group, "lr", 0.5)
        >>> group
        {'lr': tensor(0.5000)}
    """
    if isinstance(holder[name], Tensor):
        holder[name].fill_(value)
    else:
        holder[name] = value


def schedulers_of(scheduler: Any) -> list[Any]:
    """Return a scheduler, or each of a list (None: none), with the schedulers that they contain.

    Examples:
        >>> schedulers_of(None)
        []
    """
    if scheduler is None:
        return []
    if isinstance(scheduler, list | tuple):
        return [inner for each in scheduler for inner in schedulers_of(each)]
    # SequentialLR and ChainedScheduler keep theirs in _schedulers.
    return [scheduler, *schedulers_of(list(getattr(scheduler, "_schedulers", ())))]


def _scaled(
    group: Mapping[str, Any],
    family: Family,
    kappa: float,
    ratio: float | None,
    rule: Rule | None,
    *,
    known: bool,
) -> Scaling:
    settings = {"lr": float(group["lr"])}
    if known and family == "sgd":
        # An unknown optimizer's settings may mean something else, so only the rate is read.
        settings["momentum"] = float(group["momentum"])
    elif known:
        settings["beta1"], settings["beta2"] = (float(beta) for beta in group["betas"])
        settings["eps"] = float(group["eps"])
    if known and group.get("weight_decay"):
        settings["weight_decay"] = float(group["weight_decay"])
    # If the noise scale could not be determined, a rule without it is chosen.
    chosen = choose(family, rule, ratio)
    return scale(settings, optimizer=family, kappa=kappa, ratio=ratio, rule=chosen)


def _rate_only(scaling: Scaling, name: str) -> Scaling:
    limit = f"Only the rate was changed: superbatch has no rule for the other settings of {name}."
    why = "Requested: superbatch has no rule for this optimizer."
    return replace(scaling, optimizer=name, why=why, limits=(limit,))


def _group_changes(optimizer: Optimizer, group: dict[str, Any], scaling: Scaling) -> list[Change]:
    after, changes = scaling.after, list[Change]()
    if "beta2" in after:
        changes += change_betas(optimizer, group, beta1=after["beta1"], beta2=after["beta2"])
    for name in ("lr", "eps", "weight_decay"):
        if name in after:
            changes.append(partial(set_number, group, name, after[name]))
    for name in RATES_OF_GROUPS:
        # Schedulers read these from the group at each step.
        if name in group:
            changes.append(partial(set_number, group, name, float(group[name]) * scaling.rate))
    return changes


def _set_betas(group: dict[str, Any], beta1: float, beta2: float) -> None:
    betas = group["betas"]
    # With capturable=True betas are tensors, and are set in place for the captured graph.
    if any(isinstance(beta, Tensor) for beta in betas):
        for beta, value in zip(betas, (beta1, beta2), strict=True):
            beta.fill_(value)
    else:
        group["betas"] = (beta1, beta2)


def _require_schedulers(optimizer: Optimizer, schedulers: Iterable[Any]) -> None:
    schedulers = list(schedulers)
    for each in schedulers:
        # By identity: an equal scheduler of another optimizer must not be changed.
        if getattr(each, "optimizer", None) is not optimizer:
            raise InputError(
                f"The scheduler of type {type(each).__name__} does not belong to this optimizer. Pass the "
                "scheduler that was made with it."
            )
    # The constructor of every torch scheduler sets initial_lr.
    if not schedulers and any("initial_lr" in group for group in optimizer.param_groups):
        raise InputError(
            "A scheduler sets the rate of this optimizer, and its next step would undo the change. Pass the "
            "scheduler too: rescale(..., scheduler=scheduler)."
        )


def _scale_scheduler(scheduler: Any, rates: set[float]) -> None:
    (rate,) = rates
    for name in RATES_OF_SCHEDULERS:
        # E.g. `min_lrs` of ReduceLROnPlateau, `eta_min` of cosine schedules: each class has some of them.
        value = vars(scheduler).get(name)
        if isinstance(value, list):
            setattr(scheduler, name, [each * rate for each in value])
        elif isinstance(value, float | int):
            setattr(scheduler, name, value * rate)
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.eps *= rate  # the smallest change of the rate that it makes


def _positive(name: str, value: float) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise InputError(f"{name}={value!r} is not a number of samples. Pass a positive number.")
    return value
