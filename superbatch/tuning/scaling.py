"""Learning rate and other settings of the optimizer for a kappa times larger batch.

The rules keep three quantities constant per sample: the drift of the weights, their noise, and the memory of
the optimizer. With ``r = gain(kappa, B_noise / B)``, between 1 and kappa:

    SGD          lr x kappa, or lr x r near and above the noise scale; momentum and weight decay unchanged
    Adam, AdamW  lr x sqrt(kappa), or lr x sqrt(r); beta2 ** kappa; eps / sqrt(kappa); beta1 unchanged
    AdamW        weight decay x kappa / (factor of lr), which keeps lr x decay per sample

The linear rule: Goyal et al. 2017, arXiv:1706.02677. The gain: Johnson et al. 2020, arXiv:2007.05105, and
McCandlish et al. 2018, arXiv:1812.06162, whose best learning rates have the same ratio. Beta2 with constant
half-life in samples: Marek et al. 2025, arXiv:2507.07101. Weight decay with constant time scale in samples:
Wang & Aitchison 2024, arXiv:2405.13698.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Literal, get_args

from ..errors import InputError
from ..results.noise import Noise
from ..results.scaling import Scaling
from .noise_range import noise_range
from .scaling_words import limits, reason, wrong_rule

Rule = Literal["linear", "sqrt", "gain", "power", "keep"]
Family = Literal["sgd", "adam", "adamw"]

RULES: Mapping[Family, tuple[Rule, ...]] = {
    "sgd": ("linear", "gain", "keep"),
    "adam": ("sqrt", "gain", "power", "keep"),
    "adamw": ("sqrt", "gain", "power", "keep"),
}


def gain(kappa: float, ratio: float) -> float:
    """Return the progress of one update with a kappa times larger batch, in updates with the old batch.

    This is AdaScale's gain ``r = (1 + ratio) / (1 + ratio / kappa)``: 1 without noise, kappa without signal.
    It is also the ratio of the best learning rates at the two batches in McCandlish's model
    ``lr(B) = lr_max / (1 + B_noise / B)``.

    Args:
        kappa: the new batch over the old one, positive.
        ratio: noise over signal at the old batch, ``B_noise / B``; from 0 to infinity.

    Returns:
        The gain r.

    Raises:
        InputError: kappa is not positive, or the ratio is negative.

    Examples:
        >>> gain(4, ratio=0.0), gain(4, ratio=4.0), gain(4, ratio=float("inf"))
        (1.0, 2.5, 4.0)

    References:
        arXiv:2007.05105, arXiv:1812.06162
    """
    _positive("kappa", kappa)
    if not ratio >= 0:
        raise InputError(f"ratio={ratio!r} is not 0 or more. Pass B_noise / B, or infinity.")
    return float(kappa) if math.isinf(ratio) else (1 + ratio) / (1 + ratio / kappa)


def half_life(beta: float, batch: float) -> float:
    """Return the half-life of an exponential moving average in samples: ``batch ln(1/2) / ln(beta)``.

    Args:
        beta: decay factor per update, between 0 and 1.
        batch: samples of one update.

    Returns:
        The half-life in samples.

    Raises:
        InputError: an argument is out of range.

    Examples:
        >>> round(half_life(0.95, 512)), round(half_life(0.95 ** (1 / 512), 1))
        (6919, 6919)
    """
    _below_one("beta", beta)
    return _positive("batch", batch) * math.log(0.5) / math.log(beta)


def scaled_beta(beta: float, kappa: float) -> float:
    """Return the beta with the same half-life in samples at a kappa times larger batch: ``beta ** kappa``.

    Args:
        beta: the old decay factor, from 0 (no memory) to below 1.
        kappa: the new batch over the old one.

    Returns:
        The new beta.

    Raises:
        InputError: an argument is out of range.

    Examples:
        >>> scaled_beta(0.999, 32), scaled_beta(0.0, 32)
        (0.968..., 0.0)
    """
    return float(beta) if beta == 0 else float(_below_one("beta", beta)) ** _positive("kappa", kappa)


def warmup_updates(updates: float, kappa: float) -> int:
    """Return the updates of a warm-up with unchanged length in samples: ``updates / kappa``, rounded.

    Args:
        updates: length of the warm-up with the old batch, in updates; 0 for no warm-up.
        kappa: the new batch over the old one.

    Returns:
        Updates with the new batch, at least 1; 0 without a warm-up.

    Raises:
        InputError: an argument is out of range.

    Examples:
        >>> warmup_updates(2000, 8), warmup_updates(5, 64), warmup_updates(0, 2)
        (250, 1, 0)
    """
    if not updates >= 0:
        raise InputError(f"updates={updates!r} is not the length of a warm-up. Pass 0 or more.")
    return max(1, round(updates / _positive("kappa", kappa))) if updates else 0


def scale(
    settings: Mapping[str, float],
    *,
    optimizer: Family,
    kappa: float,
    ratio: float | None = None,
    rule: Rule | None = None,
) -> Scaling:
    """Scale an optimizer's settings to a kappa times larger batch, or a smaller one if kappa is below 1.

    Args:
        settings: values by name: ``lr``, ``momentum``, ``beta1``, ``beta2``, ``eps``, ``eps_root`` and
            ``weight_decay``, as far as the optimizer has them.
        optimizer: family of the optimizer. With ``"adamw"`` weight decay is decoupled: each update shrinks
            the weights by the share ``lr x weight_decay``. With the others it is a term of the loss, and does
            not change.
        kappa: the new batch over the old one.
        ratio: noise over signal at the old batch, ``B_noise / B``; None if not known.
        rule: rule for the learning rate. ``"power"`` is ``"sqrt"`` with ``beta1 ** kappa``; ``"keep"`` keeps
            the rate. None chooses ``"gain"`` if the ratio is known, else ``"linear"`` for SGD or ``"sqrt"``
            for Adam.

    Returns:
        The new settings, with the rule, its reason and its limits.

    Raises:
        InputError: the optimizer has no such rule, or a value is out of range.

    Examples:
        >>> print(scale({"lr": 0.1, "momentum": 0.9}, optimizer="sgd", kappa=4, ratio=12.0))
        sgd, batch x 4, rule 'gain': lr 0.1 -> 0.325, momentum 0.9 (kept)
        >>> adamw = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        >>> print(scale(adamw, optimizer="adamw", kappa=1 / 4))
        adamw, batch x 0.25, rule 'sqrt': lr 0.001 -> 0.0005, beta1 0.9 (kept), beta2 0.95 -> 0.987259, \
eps 1e-08 -> 2e-08, weight_decay 0.1 -> 0.05
    """
    _positive("kappa", kappa)
    chosen = choose(optimizer, rule, ratio)
    earned = gain(kappa, ratio) if ratio is not None and chosen == "gain" else None
    rate = rate_factor(optimizer, chosen, kappa, ratio)
    after = {name: _change(name, value, optimizer, chosen, kappa, rate) for name, value in settings.items()}
    return Scaling(
        optimizer=optimizer,
        rule=chosen,
        kappa=float(kappa),
        ratio=ratio,
        gain=earned,
        rate=rate,
        before={name: float(value) for name, value in settings.items()},
        after=after,
        why=reason(optimizer, chosen),
        limits=tuple(_limits(optimizer, chosen, kappa, ratio, after)),
    )


def choose(optimizer: Family, rule: Rule | None, ratio: float | None) -> Rule:
    """Return the given rule if it is valid, or the default rule for None.

    Args:
        optimizer: family of the optimizer.
        rule: the rule; None for the default, see `scale`.
        ratio: noise over signal at the old batch; None if not known.

    Returns:
        The rule.

    Raises:
        InputError: the optimizer has no such rule, or the rule needs the ratio.

    Examples:
        >>> choose("adam", None, None), choose("adam", None, 8.0), choose("sgd", None, None)
        ('sqrt', 'gain', 'linear')
    """
    if optimizer not in get_args(Family):
        raise InputError(f"optimizer={optimizer!r} is unknown. Pass one of {get_args(Family)}.")
    if rule is None:
        return "gain" if ratio is not None else RULES[optimizer][0]
    if rule not in RULES[optimizer]:
        raise InputError(
            f"rule={rule!r} is not for {optimizer}: {wrong_rule(optimizer, rule)}. Pass one of "
            f"{RULES[optimizer]}."
        )
    if rule == "gain" and ratio is None:
        raise InputError(
            'rule="gain" needs a noise scale. Measure it until it is determined, pass it as a number, or '
            f'pass rule="{RULES[optimizer][0]}".'
        )
    return rule


def rate_factor(optimizer: Family, rule: Rule, kappa: float, ratio: float | None) -> float:
    """Return the factor of the learning rate.

    Args:
        optimizer: family of the optimizer.
        rule: one of its rules.
        kappa: the new batch over the old one.
        ratio: noise over signal at the old batch; required by ``"gain"``.

    Returns:
        The new rate over the old one.

    Examples:
        >>> rate_factor("sgd", "gain", 4, 4.0), rate_factor("adam", "sqrt", 4, None)
        (2.5, 2.0)
    """
    if rule == "keep":
        return 1.0
    if rule != "gain":
        return float(kappa) if rule == "linear" else math.sqrt(kappa)
    assert ratio is not None  # `choose` raises otherwise
    # Adam's step does not grow with the gradient, so its rate grows by the root, as with "sqrt".
    earned = gain(kappa, ratio)
    return earned if optimizer == "sgd" else math.sqrt(earned)


def scale_config(
    config: Mapping[str, object],
    from_batch: float,
    to_batch: float,
    *,
    optimizer: Family,
    noise: Noise | float | None = None,
    rule: Rule | None = None,
) -> dict[str, object]:
    """Scale the keyword arguments of an optax or Keras optimizer; arguments without a rule are kept.

    Args:
        config: keyword arguments by name. The function scales ``lr``/``learning_rate``, ``momentum``,
            ``b1``/``beta1``/``beta_1``, ``b2``/``beta2``/``beta_2``, ``eps``/``epsilon``, ``eps_root`` and
            ``weight_decay``.
        from_batch: samples of one update for which the arguments were chosen.
        to_batch: samples of one update in the new training.
        optimizer: ``"sgd"``, ``"adam"``, or ``"adamw"`` if weight decay is decoupled: `optax.adamw`,
            `keras.optimizers.AdamW`, and any Adam variant of Keras with ``weight_decay``.
        noise: the noise scale in samples, as a number or a measurement; None if not known.
        rule: see `scale`.

    Returns:
        The new keyword arguments.

    Raises:
        InputError: a value is not a number (such as a schedule), a setting is given twice, or `scale` raises.

    Examples:
        >>> scale_config({"learning_rate": 0.003, "b2": 0.95, "nesterov": True}, 512, 128, optimizer="adam")
        {'learning_rate': 0.0015, 'b2': 0.987..., 'nesterov': True}
        >>> scale_config({"learning_rate": 0.1, "momentum": 0.9}, 256, 1024, optimizer="sgd")
        {'learning_rate': 0.4, 'momentum': 0.9}
    """
    known = {name: _NAMES[name] for name in config if name in _NAMES and config[name] is not None}
    numbers: dict[str, float] = {}
    for name, ours in known.items():
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(
                f"{name}={value!r} is not a number. Scale each number inside a schedule, and multiply its "
                "lengths by from_batch / to_batch."
            )
        if ours in numbers:
            raise InputError(f"{name} is given twice, under two names of one setting. Pass one of them.")
        numbers[ours] = value
    kappa = _positive("to_batch", to_batch) / _positive("from_batch", from_batch)
    value = noise_range(noise).value
    scaled = scale(
        numbers,
        optimizer=optimizer,
        kappa=kappa,
        ratio=None if value is None else value / from_batch,
        rule=rule,
    )
    return {name: scaled.after[known[name]] if name in known else value for name, value in config.items()}


_NAMES: Mapping[str, str] = {
    "learning_rate": "lr",
    "lr": "lr",
    "momentum": "momentum",
    "b1": "beta1",
    "beta_1": "beta1",
    "beta1": "beta1",
    "b2": "beta2",
    "beta_2": "beta2",
    "beta2": "beta2",
    "eps": "eps",
    "epsilon": "eps",
    "eps_root": "eps_root",
    "weight_decay": "weight_decay",
}


def _limits(
    optimizer: Family, rule: Rule, kappa: float, ratio: float | None, after: Mapping[str, float]
) -> list[str]:
    over = 1.0  # without the noise scale, the best rate is not known
    if ratio is not None:
        over = rate_factor(optimizer, rule, kappa, ratio) / rate_factor(optimizer, "gain", kappa, ratio)
    return limits(optimizer, rule, kappa, ratio, after, over=over)


def _change(name: str, value: float, optimizer: Family, rule: Rule, kappa: float, rate: float) -> float:
    """Return the value of one setting for the new batch."""
    if name not in set(_NAMES.values()):
        raise InputError(f"No rule is known for the setting {name!r}. Leave it out.")
    if name in ("lr", "eps", "eps_root", "weight_decay") and not (value >= 0 and math.isfinite(value)):
        raise InputError(f"{name}={value!r} is negative or not finite. Pass a finite number, 0 or more.")
    adam = optimizer != "sgd"
    changes: Mapping[str, Callable[[], float]] = {
        "lr": lambda: value * rate,
        "beta2": lambda: scaled_beta(value, kappa),
        "beta1": lambda: scaled_beta(value, kappa) if rule == "power" else value,
        # eps is added to the root of the second moment, which falls by sqrt(kappa) while noise dominates.
        "eps": lambda: value / math.sqrt(kappa) if adam else value,
        "eps_root": lambda: value / kappa if adam else value,  # optax adds it to the second moment itself
        # lr x weight_decay per sample stays the same.
        "weight_decay": lambda: value * kappa / rate if optimizer == "adamw" else value,
    }
    return float(changes[name]() if name in changes else value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and value is not True and value is not False


def _positive(name: str, value: float) -> float:
    if not _is_number(value) or not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name}={value!r} is not a positive number. Pass one.")
    return value


def _below_one(name: str, value: float) -> float:
    if not _is_number(value) or not 0 < value < 1:
        raise InputError(f"{name}={value!r} is not between 0 and 1. Pass a number that is.")
    return value
