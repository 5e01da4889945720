"""Reasons for the rules of `superbatch.tuning.scaling`, and the limits of each."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Mapping

NEAR = 0.1
"""A batch beyond this share of the noise scale is no longer far below it: the gain is 9 % short of kappa."""

_LINEAR = (
    "SGD in the noise: with lr x kappa the weights drift and shake as much per sample as before, so the "
    "course of training is the same."
)
_SQRT = (
    "Adam in the noise: its steps are measured in standard deviations of the gradient, which a kappa times "
    "larger batch makes sqrt(kappa) smaller, so lr x sqrt(kappa) keeps drift and noise per sample; beta2 "
    "keeps its half-life in samples."
)
_GAIN = (
    "The noise scale is known: one update with the larger batch gets as far as `gain` updates with the "
    "smaller one, which is less than kappa where the signal shows through the noise."
)
_KEEP = "Asked for: the rate stays; what remembers keeps its memory in samples."

_WHY: Mapping[str, str] = {"linear": _LINEAR, "sqrt": _SQRT, "power": _SQRT, "gain": _GAIN, "keep": _KEEP}

_SHAKEN = "Adam divides by the noise, so lr x kappa shakes the weights sqrt(kappa) times as much"
_WRONG: Mapping[tuple[str, str], str] = {
    ("sgd", "sqrt"): "lr x sqrt(kappa) shrinks SGD's noise: to a half of it at kappa 16",
    ("sgd", "power"): "SGD has no second moment",
    ("adam", "linear"): _SHAKEN,
    ("adamw", "linear"): _SHAKEN,
}


def reason(optimizer: str, rule: str) -> str:
    """Why a rule is used.

    Args:
        optimizer: the family.
        rule: one of its rules.

    Returns:
        A sentence or two.

    Examples:
        >>> reason("adam", "keep")
        'Asked for: the rate stays; what remembers keeps its memory in samples.'
    """
    root = rule == "gain" and optimizer != "sgd"
    return f"{_WHY[rule]} Adam takes the square root of it." if root else _WHY[rule]


def wrong_rule(optimizer: str, rule: str) -> str:
    """Why there is no such rule for an optimizer.

    Args:
        optimizer: the family.
        rule: not one of its rules.

    Returns:
        Part of a sentence.

    Examples:
        >>> wrong_rule("sgd", "power")
        'SGD has no second moment'
    """
    return _WRONG.get((optimizer, rule), "there is no such rule")


def limits(
    optimizer: str, rule: str, kappa: float, ratio: float | None, after: Mapping[str, float], *, over: float
) -> list[str]:
    """Describe the limits of a rule, with the numbers of this case.

    Args:
        optimizer: the family.
        rule: one of its rules.
        kappa: the new batch over the old one.
        ratio: noise over signal at the old batch, or None.
        after: the new settings.
        over: the new rate over the best one by the gain.

    Returns:
        Sentences, the general ones last.

    Examples:
        >>> limits("sgd", "linear", 64, 16.0, {"lr": 6.4}, over=4.71)[0]
        'The larger batch is 4 times the noise scale: the rule "linear" gives 4.71 times the best rate.'
    """
    said: list[str] = []
    if ratio is None and rule != "keep":
        said.append("The noise scale is not known: the rule holds while both batches are far below it.")
    if ratio is not None:
        share = max(kappa, 1.0) / ratio if ratio else math.inf
        if rule not in ("gain", "keep") and share > NEAR:
            said.append(
                f"The larger batch is {share:.3g} times the noise scale: the rule {_quoted(rule)} gives "
                f"{over:.3g} times the best rate."
            )
        if optimizer != "sgd" and share > 1:
            said.append(
                "At the larger batch the signal is stronger than the noise: Adam's second moment follows the "
                "signal there, and with a square-root rate fewer updates get less far."
            )
    if optimizer == "sgd":
        said.append(_stability(after.get("lr", 0.0), after.get("momentum", 0.0)))
    if kappa != 1:
        change = "Shorten" if kappa > 1 else "Lengthen"
        said.append(
            f"{change} warm-up and schedule, which count updates, by {max(kappa, 1 / kappa):.4g}: their "
            "length in samples is kept."
        )
    said.append("The rules keep the course of training; they say nothing about generalisation.")
    return said


def _stability(rate: float, momentum: float) -> str:
    bound = 2 * (1 + momentum)
    said = f"Stable only while lr x h < {bound:.3g} for the largest curvature h of the loss"
    return f"{said}: with lr {rate:.3g}, h below {bound / rate:.3g}." if rate > 0 else f"{said}."


def _quoted(rule: str) -> str:
    return f'"{rule}"'
