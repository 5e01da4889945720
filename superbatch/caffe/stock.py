"""The closest optimizer and scheduler of torch, and how they differ from Caffe's."""

from __future__ import annotations

# pyright: strict
from ..results.caffe import Stock
from .config import SolverConfig
from .rates import multistep_drops
from .writing import shortest


def stock(config: SolverConfig) -> Stock:
    """Name the closest optimizer and scheduler of torch, for the mean gradient of each update.

    Args:
        config: the solver.

    Returns:
        Expressions, and their differences from Caffe's optimizer and scheduler.

    Examples:
        >>> config = SolverConfig(base_lr=0.1, lr_policy="step", gamma=0.5, stepsize=9, momentum=0.9)
        >>> stock(config).scheduler
        'torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.5)'
        >>> stock(config).same
        False
    """
    name, options = _optimizer(config)
    given = {"lr": config.base_lr, **options}
    # torch's weight_decay is L2; it has no L1.
    if config.weight_decay and config.regularization_type == "L2":
        given["weight_decay"] = config.weight_decay
    written = [f"{key}={_number(value)}" for key, value in given.items()]
    if config.type == "Adam":
        written.append(f"betas=({_number(config.momentum)}, {_number(config.momentum2)})")
    return Stock(
        optimizer=f"torch.optim.{name}(parameters, {', '.join(written)})",
        scheduler=_scheduler(config),
        differs=tuple(_differences(config)),
    )


def _number(value: float | bool) -> str:
    return str(value) if isinstance(value, bool) else shortest(value)


def _optimizer(config: SolverConfig) -> tuple[str, dict[str, float | bool]]:
    c = config
    names: dict[str, tuple[str, dict[str, float | bool]]] = {
        "SGD": ("SGD", {"momentum": c.momentum}),
        # torch refuses nesterov=True without momentum; without it, both are plain SGD.
        "Nesterov": ("SGD", {"momentum": c.momentum, **({"nesterov": True} if c.momentum > 0 else {})}),
        "AdaGrad": ("Adagrad", {"eps": c.delta}),
        "RMSProp": ("RMSprop", {"alpha": c.rms_decay, "eps": c.delta}),
        "AdaDelta": ("Adadelta", {"rho": c.momentum, "eps": c.delta}),
    }
    if c.type != "Adam":
        return names[c.type]
    return "Adam", {"eps": c.delta}


def _scheduler(config: SolverConfig) -> str | None:
    gamma, power = shortest(config.gamma), shortest(config.power)
    # Drops after the end would only make the expression longer.
    drops = [drop for drop in multistep_drops(config.stepvalue) if drop < max(config.max_iter, 1)]
    text = {
        "fixed": None,
        "step": f"StepLR(optimizer, {config.stepsize}, {gamma})",
        "exp": f"ExponentialLR(optimizer, {gamma})",
        "inv": f"LambdaLR(optimizer, lambda update: (1 + {gamma} * update) ** -{power})",
        "multistep": f"MultiStepLR(optimizer, {drops}, {gamma})",
        "poly": f"PolynomialLR(optimizer, {config.max_iter}, {power})",
        "sigmoid": "LambdaLR(optimizer, lambda update: "
        f"1 / (1 + math.exp(-{gamma} * (update - {config.stepsize}))))",
    }[config.lr_policy]
    return None if text is None else f"torch.optim.lr_scheduler.{text}"


def _differences(config: SolverConfig) -> list[str]:
    differences: list[str] = []
    if config.type in ("SGD", "Nesterov") and config.momentum and config.lr_policy != "fixed":
        differences.append(
            "Caffe multiplies a gradient by the rate before it enters the momentum buffer, so that older "
            "gradients keep the old rate after a change; torch multiplies the whole buffer by the new rate"
        )
    if config.type == "Adam":
        differences.append(
            "torch adds eps after the bias correction of the second moment, Caffe adds delta before it, so "
            "that delta counts more in the first updates"
        )
    if config.weight_decay and config.regularization_type == "L1":
        differences.append("torch's optimizers have no L1 decay")
    if config.clip_gradients >= 0:
        # Divided: Caffe's threshold applies to the sum, torch's to the mean.
        differences.append(
            "the gradient must be clipped before the update: torch.nn.utils.clip_grad_norm_(parameters, "
            f"{config.clip_gradients / config.iter_size:g}), which differs by 1e-6 of the norm"
        )
    if config.lr_policy == "inv":
        differences.append("Caffe multiplies gamma and the update in float32")
    return differences
