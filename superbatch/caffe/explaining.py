"""A solver file in today's terms: settings, rates, traps and code, in one report."""

from __future__ import annotations

# pyright: strict
import platform
import time
from collections.abc import Mapping

from .._version import __version__
from ..integers import positive_int
from ..results.caffe import CaffeExplained, Setting
from .code import code
from .config import SolverConfig
from .rates import listed, multistep_drops, rate_schedule
from .stock import stock
from .traps import traps
from .writing import shortest

POINTS = 400
"""Number of evenly spaced updates whose rate is reported; updates at which it drops are added."""


def explain_solver(
    config: SolverConfig,
    *,
    source: str = "solver",
    microbatch_size: int | None = None,
    command: Mapping[str, str] | None = None,
) -> CaffeExplained:
    """Describe the meaning of a solver file.

    Args:
        config: the solver.
        source: name of the solver in the report.
        microbatch_size: samples that the net's data layer yields (its ``batch_size``).
        command: flags of the command line, to be stored in the report.

    Returns:
        The report.

    Raises:
        InputError: `microbatch_size` is no positive int.

    Examples:
        >>> from superbatch.caffe import parse_solver
        >>> config = parse_solver('base_lr: 0.1 lr_policy: "fixed" max_iter: 100 iter_size: 4')
        >>> report = explain_solver(config, microbatch_size=16)
        >>> report.effective_batch, report.updates, report.samples
        (64, 100, 6400)
    """
    began = time.perf_counter()
    size = None if microbatch_size is None else positive_int("microbatch_size", microbatch_size)
    batch = None if size is None else size * config.iter_size
    at = _points(config)
    rate = rate_schedule(config)
    return CaffeExplained(
        source=source,
        type=config.type,
        policy=config.lr_policy,
        accumulation_steps=config.iter_size,
        microbatch_size=size,
        effective_batch=batch,
        updates=config.max_iter,
        samples=None if batch is None else batch * config.max_iter,
        settings=tuple(_settings(config, batch)),
        at=at,
        rates=tuple(rate(update) for update in at),
        traps=traps(config),
        stock=stock(config),
        code=code(config),
        seconds=time.perf_counter() - began,
        partial=False,
        versions={"superbatch": __version__, "python": platform.python_version()},
        command=dict(command or {}),
    )


def _points(config: SolverConfig) -> tuple[int, ...]:
    last = max(config.max_iter - 1, 0)
    points = {round(index * last / POINTS) for index in range(POINTS + 1)}
    drops: list[int] = []
    if config.lr_policy == "multistep":
        drops = list(multistep_drops(config.stepvalue))
    if config.lr_policy == "step":
        # With more drops than points the curve is smooth, and evenly spaced points show it.
        drops = list(range(0, last + 1, config.stepsize)) if last // config.stepsize <= POINTS else []
    # Both sides of a drop, so that a plot shows a step and not a slope.
    points |= {point for drop in drops for point in (drop - 1, drop) if 0 <= point <= last}
    return tuple(sorted(points))


def _settings(config: SolverConfig, batch: int | None) -> list[Setting]:
    c = config
    decay = f"added to the gradient: {'L2, not AdamW' if c.regularization_type == 'L2' else 'its sign (L1)'}"
    clip = "not clipped"
    if c.clip_gradients >= 0:
        # Caffe clips the sum of the micro-batches' gradients, max_grad_norm their mean.
        clip = f"max_grad_norm={c.clip_gradients / c.iter_size:g} on the gradient of the batch"
    samples = "" if batch is None else f", {batch * c.max_iter} samples"
    tests = listed(c.test_iter)
    rows = [
        ("type", c.type, _TYPES[c.type]),
        ("iter_size", str(c.iter_size), f"accumulation_steps={c.iter_size}" + _effective(batch)),
        ("max_iter", str(c.max_iter), f"{c.max_iter} updates{samples}"),
        ("base_lr", shortest(c.base_lr), "lr of a parameter with lr_mult 1"),
        ("lr_policy", c.lr_policy, _policy(c)),
        *(
            []
            if c.type in ("AdaGrad", "RMSProp")
            else [("momentum", shortest(c.momentum), _MOMENTUM[c.type])]
        ),
        *([("momentum2", shortest(c.momentum2), "beta2")] if c.type == "Adam" else []),
        *([("rms_decay", shortest(c.rms_decay), "alpha")] if c.type == "RMSProp" else []),
        *([] if c.type in ("SGD", "Nesterov") else [("delta", shortest(c.delta), "eps")]),
        ("weight_decay", shortest(c.weight_decay), decay if c.weight_decay else "none"),
        ("clip_gradients", shortest(c.clip_gradients), clip),
        ("average_loss", str(c.average_loss), f"the loss shown is a mean over {_updates(c.average_loss)}"),
        *(
            [("test_iter", tests, f"test on that many micro-batches, every {c.test_interval} updates")]
            if tests
            else []
        ),
        *([("snapshot", str(c.snapshot), f"save every {c.snapshot} updates")] if c.snapshot > 0 else []),
    ]
    return [Setting(field=field, value=value, meaning=meaning) for field, value, meaning in rows]


_TYPES = {
    "SGD": "SGD, with the rate inside the momentum buffer",
    "Nesterov": "SGD with nesterov, with the rate inside the buffer",
    "AdaGrad": "Adagrad",
    "RMSProp": "RMSprop, without momentum",
    "AdaDelta": "Adadelta",
    "Adam": "Adam, with delta added before the bias correction",
}
_MOMENTUM = {"SGD": "momentum", "Nesterov": "momentum", "AdaDelta": "rho", "Adam": "beta1"}


def _updates(count: int) -> str:
    return "1 update" if count == 1 else f"{count} updates"


def _effective(batch: int | None) -> str:
    return "" if batch is None else f", an effective batch of {batch}"


def _policy(config: SolverConfig) -> str:
    gamma, power = shortest(config.gamma), shortest(config.power)
    last = rate_schedule(config)(max(config.max_iter - 1, 0))
    reached = listed(multistep_drops(config.stepvalue))
    text = {
        "fixed": "constant",
        "step": f"times {gamma} every {config.stepsize} updates",
        "exp": f"times {gamma} every update",
        "inv": f"times (1 + {gamma} update)^-{power}",
        "multistep": f"times {gamma} at updates {reached or 'none'}",
        "poly": f"times (1 - update / {config.max_iter})^{power}",
        "sigmoid": f"over 1 + exp(-{gamma} (update - {config.stepsize}))",
    }[config.lr_policy]
    return f"{text}; {last:.3g} at the last update"
