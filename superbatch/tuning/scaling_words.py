"""Sentences on the rules of `superbatch.tuning.scaling`: the reason for each, and its limits."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Mapping

NEAR = 0.1
"""A batch is far below the noise scale up to this share of it. There the gain is 9 % short of kappa."""

_LINEAR = (
    "SGD while noise dominates: lr x kappa keeps the drift and the noise of the weights per sample, so "
    "training takes the same course."
)
_SQRT = (
    "Adam while noise dominates: its step is relative to the standard deviation of the gradient, which is "
    "sqrt(kappa) times smaller. So lr x sqrt(kappa) keeps drift and noise per sample; beta2 keeps its "
    "half-life in samples."
)
_GAIN = (
    "The noise scale is known: one update with the larger batch makes as much progress as `gain` updates "
    "with the smaller one. The gain is below kappa because part of the gradient is signal."
)
_KEEP = "As requested, the learning rate stays; the other settings follow their own rules."

_WHY: Mapping[str, str] = {"linear": _LINEAR, "sqrt": _SQRT, "power": _SQRT, "gain": _GAIN, "keep": _KEEP}

_NOISIER = "Adam divides by the noise, so lr x kappa multiplies the noise of the weights by sqrt(kappa)"
_WRONG: Mapping[tuple[str, str], str] = {
    ("sgd", "sqrt"): "lr x sqrt(kappa) lowers the noise of SGD, to a half at kappa 16",
    ("sgd", "power"): "SGD has no second moment",
    ("adam", "linear"): _NOISIER,
    ("adamw", "linear"): _NOISIER,
}


def reason(optimizer: str, rule: str) -> str:
    """Return the reason for a rule.

    Examples:
        >>> reason("adam", "keep")
        'As requested, the learning rate stays; the other settings follow their own rules.'
    """
    root = rule == "gain" and optimizer != "sgd"
    return f"{_WHY[rule]} For Adam the rate grows by its square root." if root else _WHY[rule]


def wrong_rule(optimizer: str, rule: str) -> str:
    """Return the reason why an optimizer has no such rule, as a clause for an error text.

    Examples:
        >>> wrong_rule("sgd", "power")
        'SGD has no second moment'
    """
    return _WRONG.get((optimizer, rule), "there is no such rule")


def limits(
    optimizer: str, rule: str, kappa: float, ratio: float | None, after: Mapping[str, float], *, over: float
) -> list[str]:
    """Return the conditions under which a rule fails, with the numbers of this case.

    `over` is the new rate over the best rate, which the rule ``"gain"`` gives.

    Examples:
        >>> limits("sgd", "linear", 64, 16.0, {"lr": 6.4}, over=4.71)[0]
        'The larger batch is 4 times the noise scale: the rule "linear" gives 4.71 times the best rate.'
    """
    sentences: list[str] = []
    if ratio is None and rule != "keep":
        sentences.append("The noise scale is not known: the rule holds while both batches are far below it.")
    if ratio is not None:
        # ratio is B_noise / B, so kappa / ratio is the new batch over the noise scale.
        share = max(kappa, 1.0) / ratio if ratio else math.inf
        if rule not in ("gain", "keep") and share > NEAR:
            sentences.append(
                f'The larger batch is {share:.3g} times the noise scale: the rule "{rule}" gives '
                f"{over:.3g} times the best rate."
            )
        if optimizer != "sgd" and share > 1:
            sentences.append(
                "At the larger batch the signal is stronger than the noise, so Adam's second moment follows "
                "the signal. A square-root rate then makes less progress per sample."
            )
    if optimizer == "sgd":
        sentences.append(_stability(after.get("lr", 0.0), after.get("momentum", 0.0)))
    if kappa != 1:
        change = "Shorten" if kappa > 1 else "Lengthen"
        sentences.append(
            f"{change} warm-up and schedule by a factor of {max(kappa, 1 / kappa):.4g} if they count "
            "updates: their length in samples should not change."
        )
    sentences.append("The rules preserve the course of training; they do not cover generalisation.")
    return sentences


def _stability(rate: float, momentum: float) -> str:
    # Gradient descent with momentum m on a quadratic of curvature h converges for lr h < 2 (1 + m).
    bound = 2 * (1 + momentum)
    condition = f"Stable only while lr x h < {bound:.3g} for the largest curvature h of the loss"
    return f"{condition}: with lr {rate:.3g}, h below {bound / rate:.3g}." if rate > 0 else f"{condition}."
