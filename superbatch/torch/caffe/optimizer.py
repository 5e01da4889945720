"""Caffe's solver as a torch optimizer: clip, regularise, update, in Caffe's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from superbatch.caffe import SolverConfig
from superbatch.caffe.config import float32
from superbatch.caffe.rates import rate_schedule
from superbatch.errors import InputError, OptimizerError

from .rules import RULES

Clip = Literal["caffe", "mean"]


class CaffeOptimizer(Optimizer):
    """One of Caffe's six solvers; give it the *mean* gradient of a window, as an Accumulator does.

    Each step: clip the gradient, add the weight decay (L2 or L1) to it, update by the rule of the solver
    (`superbatch.torch.caffe.rules`). A group's ``lr`` is Caffe's local rate, ``rate * lr_mult``; `CaffeRate`
    sets it. As in Caffe, a parameter without a gradient has one of zeros: its decay and momentum continue.

    Args:
        parameters: parameters, or parameter groups: dicts with ``"params"`` and, as a layer's ``param`` in
            Caffe, ``"lr_mult"`` and ``"decay_mult"`` (default: 1 for both).
        config: the solver.
        clip: what ``clip_gradients`` is the largest norm of: the *sum* over ``iter_size`` micro-batches
            (``"caffe"``, as Caffe does), or the *mean*, the gradient of the batch (``"mean"``).

    Raises:
        InputError: a multiplier is no number, or an argument has the wrong type.

    Examples:
        >>> from superbatch.caffe import parse_solver
        >>> config = parse_solver('base_lr: 0.5 lr_policy: "fixed" momentum: 0.9')
        >>> layer = torch.nn.Linear(2, 1)
        >>> groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr_mult": 2, "decay_mult": 0}]
        >>> [group["lr"] for group in CaffeOptimizer(groups, config).param_groups]
        [0.5, 1.0]
    """

    def __init__(self, parameters: Iterable[Any], config: SolverConfig, *, clip: Clip = "caffe") -> None:
        if not isinstance(config, SolverConfig):
            raise InputError(
                f"A solver of type {type(config).__name__} has no known fields. Pass "
                'superbatch.caffe.read_solver("solver.prototxt").'
            )
        if clip not in get_args(Clip):
            raise InputError(
                f"clip={clip!r} is unknown: clip_gradients bounds the norm of the sum of a window, or of its "
                'mean. Pass clip="caffe" (the sum) or clip="mean".'
            )
        # Into the groups: torch saves groups in state_dict(), and a schedule may change each.
        defaults = {
            "lr": rate_schedule(config)(0),
            "lr_mult": 1.0,
            "decay_mult": 1.0,
            "type": config.type,
            "momentum": config.momentum,
            "momentum2": config.momentum2,
            "rms_decay": config.rms_decay,
            "delta": config.delta,
            "weight_decay": config.weight_decay,
            "regularization_type": config.regularization_type,
            # In units of the mean gradient, which is what an Accumulator hands over.
            "max_norm": _largest_norm(config, clip),
            "iteration": 0,
        }
        super().__init__(parameters, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` follows from its ``lr_mult`` where it is not given."""
        given = dict(param_group)
        # A multiplier is rounded to float32, in which Caffe stores it.
        for name in ("lr_mult", "decay_mult"):
            value = given.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(
                    f"{name}={value!r} is not a number, and it multiplies the solver's. Pass a number."
                )
            given[name] = float32(float(value))
        # After the multiplier: the local rate is rate * lr_mult.
        given.setdefault("lr", self.defaults["lr"] * given["lr_mult"])
        super().add_param_group(given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's overloads)
        """Make one update.

        Args:
            closure: evaluates the loss again; called first, as torch's optimizers do.

        Returns:
            What `closure` returns; None without one.

        Raises:
            OptimizerError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            # torch calls a closure with gradients enabled; step() runs without.
            with torch.enable_grad():
                loss = closure()
        # Over all groups: Caffe clips by one norm of the whole net.
        factor = _clip_factor(self.param_groups)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._update(parameter, group, factor)
            # Per group: torch saves it there, and Adam's correction counts from it.
            group["iteration"] += 1
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], factor: Tensor | None) -> None:
        rule, names = RULES[group["type"]]
        state = self.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        # Caffe steps such a parameter too: its history decays.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if factor is not None:
            # A copy: .grad stays as the Accumulator left it.
            gradient = gradient * factor.to(gradient.device)
        # After clipping, as in Caffe: the decay is not clipped.
        decay = group["weight_decay"] * group["decay_mult"]
        if decay:
            toward = parameter if group["regularization_type"] == "L2" else parameter.sign()
            gradient = gradient.add(toward, alpha=decay)
        parameter.sub_(rule(gradient, state, group, group["iteration"]))


def _largest_norm(config: SolverConfig, clip: Clip) -> float | None:
    """The largest norm of the mean gradient; None: it is not clipped."""
    if config.clip_gradients < 0:
        return None
    # Caffe clips the sum over iter_size micro-batches before it divides: sgd_solver.cpp:115-118.
    return config.clip_gradients / (config.iter_size if clip == "caffe" else 1)


def _clip_factor(groups: list[dict[str, Any]]) -> Tensor | None:
    """Return the factor of all gradients; None where they are not clipped. No transfer to the host."""
    gradients = [
        parameter.grad
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter.grad is not None
    ]
    # Before any parameter has moved.
    for gradient in gradients:
        if gradient.is_sparse:
            raise OptimizerError(
                "The gradient is sparse, and Caffe's solvers take none that is. Make the layer with "
                "sparse=False."
            )
    largest = groups[0]["max_norm"]
    if largest is None or not gradients:
        return None
    # On one device, for one norm; the factor moves back to each gradient's own.
    norms = [torch.linalg.vector_norm(gradient).to(gradients[0].device) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    # where() in place of an if: the host does not wait.
    return torch.where(norm > largest, largest / norm, torch.ones_like(norm))
