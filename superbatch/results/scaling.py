"""Optimizer settings for another batch size: the rule, its reason, and its limits."""

from __future__ import annotations

# pyright: strict
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Settings of an optimizer after a change of the batch.

    Attributes:
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``, or the name of another optimizer, for which only the
            learning rate is changed.
        rule: ``"linear"``, ``"sqrt"``, ``"gain"``, ``"power"`` or ``"keep"``.
        kappa: the new batch over the old one.
        ratio: noise over signal at the old batch, ``B_noise / B``; None if not known.
        gain: AdaScale's gain, if the rule uses it.
        rate: factor of the learning rate.
        before: the old settings, by name.
        after: the settings for the new batch, by name.
        why: the reason for this rule.
        limits: conditions under which the rule fails.

    Examples:
        >>> scaling = Scaling(optimizer="sgd", rule="linear", kappa=4.0, ratio=None, gain=None, rate=4.0,
        ...     before={"lr": 0.1, "momentum": 0.9}, after={"lr": 0.4, "momentum": 0.9}, why="", limits=())
        >>> print(scaling)
        sgd, batch x 4, rule 'linear': lr 0.1 -> 0.4, momentum 0.9 (kept)
    """

    optimizer: str
    rule: str
    kappa: float
    ratio: float | None
    gain: float | None
    rate: float
    before: dict[str, float]
    after: dict[str, float]
    why: str
    limits: tuple[str, ...]

    def __str__(self) -> str:
        changes = ", ".join(_change(name, old, self.after[name]) for name, old in self.before.items())
        return f"{self.optimizer}, batch x {self.kappa:g}, rule {self.rule!r}: {changes}"


def setting_text(value: float) -> str:
    """Return a setting with six digits, or with more if it would round to 1.

    Args:
        value: value of the setting.

    Examples:
        >>> setting_text(0.00123456789), setting_text(0.9999995), setting_text(1.0)
        ('0.00123457', '0.9999995', '1')
    """
    if value == 1 or f"{value:.6g}" != "1":
        return f"{value:.6g}"
    # A beta2 such as 0.9999995 has its information in the distance from 1: show two digits of it.
    return f"{value:.{math.ceil(-math.log10(abs(1 - value))) + 2}g}"


def _change(name: str, old: float, new: float) -> str:
    same = old == new
    return (
        f"{name} {setting_text(old)} (kept)" if same else f"{name} {setting_text(old)} -> {setting_text(new)}"
    )
