"""Update rule of each of Caffe's six solvers, from a gradient to the update that is subtracted from weights.

With r the local rate (``rate * lr_mult``), mu the momentum, g the normalised and regularised gradient::

    SGD       V = mu V + r g;   u = V                               (the rate lies inside the buffer)
    Nesterov  V' = mu V + r g;  u = (1 + mu) V' - mu V
    AdaGrad   H = H + g^2;      u = r g / (sqrt H + delta)
    RMSProp   H = d H + (1 - d) g^2;  u as AdaGrad's                (d = rms_decay)
    AdaDelta  H = mu H + (1 - mu) g^2;  u0 = g sqrt((delta + D) / (delta + H));
              D = mu D + (1 - mu) u0^2;  u = r u0
    Adam      m, v as usual;  u = r sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt v + delta)

Source: BVLC/caffe 9b891540, src/caffe/solvers/*_solver.cpp, `ComputeUpdateValue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Rule = Callable[[Tensor, dict[str, Tensor], Mapping[str, Any], int], Tensor]
"""(gradient, histories, parameter group, number of earlier updates) -> update; histories change in place."""


def sgd(gradient: Tensor, history: dict[str, Tensor], group: Mapping[str, Any], iteration: int) -> Tensor:
    """SGD with momentum; a change of the rate affects only later gradients, not those in the buffer."""
    # Unlike in torch.optim.SGD, the buffer contains gradients multiplied by the rate.
    return history["history"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"])


def nesterov(
    gradient: Tensor, history: dict[str, Tensor], group: Mapping[str, Any], iteration: int
) -> Tensor:
    """Nesterov's momentum: subtract mu times the old buffer, add 1 + mu times the new one."""
    # Before the buffer changes, because this needs its old value.
    back = history["history"] * -group["momentum"]
    history["history"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
    return back.add_(history["history"], alpha=1.0 + group["momentum"])


def adagrad(gradient: Tensor, history: dict[str, Tensor], group: Mapping[str, Any], iteration: int) -> Tensor:
    """AdaGrad: divide by the square root of the sum of squares."""
    history["history"].addcmul_(gradient, gradient)
    return _over_root(gradient, history["history"], group)


def rmsprop(gradient: Tensor, history: dict[str, Tensor], group: Mapping[str, Any], iteration: int) -> Tensor:
    """RMSProp: divide by the square root of the mean of squares."""
    _average(history["history"], gradient, group["rms_decay"])
    return _over_root(gradient, history["history"], group)


def adadelta(
    gradient: Tensor, history: dict[str, Tensor], group: Mapping[str, Any], iteration: int
) -> Tensor:
    """AdaDelta: multiply by the ratio of two root mean squares."""
    _average(history["history"], gradient, group["momentum"])
    ratio = (history["updates"] + group["delta"]).div_(history["history"] + group["delta"]).sqrt_()
    update = ratio.mul_(gradient)
    _average(history["updates"], update, group["momentum"])
    return update.mul_(group["lr"])


def adam(gradient: Tensor, history: dict[str, Tensor], group: Mapping[str, Any], iteration: int) -> Tensor:
    """Adam, with delta added to the square root before the bias correction."""
    beta1, beta2, count = group["momentum"], group["momentum2"], iteration + 1
    history["history"].mul_(beta1).add_(gradient, alpha=1.0 - beta1)
    _average(history["squares"], gradient, beta2)
    # Caffe corrects the rate and not the moments.
    correction = math.sqrt(1.0 - beta2**count) / (1.0 - beta1**count)
    update = history["history"] / history["squares"].sqrt().add_(group["delta"])
    return update.mul_(group["lr"] * correction)


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "SGD": (sgd, ("history",)),
    "Nesterov": (nesterov, ("history",)),
    "AdaGrad": (adagrad, ("history",)),
    "RMSProp": (rmsprop, ("history",)),
    "AdaDelta": (adadelta, ("history", "updates")),
    "Adam": (adam, ("history", "squares")),
}
"""The rule of each solver, and the names of its histories, in the order of Caffe's snapshots."""


def _average(squares: Tensor, values: Tensor, decay: float) -> None:
    squares.mul_(decay).addcmul_(values, values, value=1.0 - decay)


def _over_root(gradient: Tensor, squares: Tensor, group: Mapping[str, Any]) -> Tensor:
    return (gradient / squares.sqrt().add_(group["delta"])).mul_(group["lr"])
