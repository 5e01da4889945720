"""Caffe's solvers as a torch optimizer, which clips, regularises and updates in Caffe's order."""

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
    """One of Caffe's six solvers; it expects the *mean* gradient of a window, as an Accumulator computes it.

    Each step clips the gradient, adds the weight decay (L2 or L1), and updates by the rule of the solver
    (`superbatch.torch.caffe.rules`). A group's ``lr`` is Caffe's local rate, ``rate * lr_mult``, which
    `CaffeRate` sets. As in Caffe, a parameter without a gradient is updated with a gradient of zeros, so its
    decay and momentum continue.

    Args:
        parameters: parameters, or parameter groups: dicts with ``"params"`` and, as a layer's ``param`` in
            Caffe, ``"lr_mult"`` and ``"decay_mult"`` (default: 1 for both).
        config: the solver.
        clip: the gradient whose norm ``clip_gradients`` limits: the *sum* over ``iter_size`` micro-batches
            (``"caffe"``, as Caffe does), or the *mean*, the gradient of the batch (``"mean"``).

    Raises:
        InputError: a multiplier is not a number, or an argument has the wrong type.

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
                f"config is a {type(config).__name__}, not a SolverConfig. Pass "
                'superbatch.caffe.read_solver("solver.prototxt").'
            )
        if clip not in get_args(Clip):
            raise InputError(
                f'clip={clip!r} is not a choice of clip. Pass clip="caffe" (limit the norm of the sum of a '
                'window) or clip="mean" (that of the mean).'
            )
        # In the groups, which torch saves in state_dict() and a schedule may change.
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
            "max_norm": _largest_norm(config, clip),
            "iteration": 0,
        }
        super().__init__(parameters, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` is computed from its ``lr_mult`` if it is missing."""
        group = dict(param_group)
        # A multiplier is rounded to float32, in which Caffe stores it.
        for name in ("lr_mult", "decay_mult"):
            value = group.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"{name}={value!r} is not a number. Pass a number, such as 1.0.")
            group[name] = float32(float(value))
        # The local rate is rate * lr_mult.
        group.setdefault("lr", self.defaults["lr"] * group["lr_mult"])
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's overloads)
        """Make one update.

        Args:
            closure: evaluates the loss again; called first, as by torch's optimizers.

        Returns:
            The result of `closure`; None without one.

        Raises:
            OptimizerError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            # torch calls a closure with gradients enabled, but step() runs under no_grad().
            with torch.enable_grad():
                loss = closure()
        # One factor for all groups, because Caffe clips by the norm of the whole net.
        factor = _clip_factor(self.param_groups)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._update(parameter, group, factor)
            # In the group, which torch saves; Adam's bias correction uses it.
            group["iteration"] += 1
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], factor: Tensor | None) -> None:
        rule, names = RULES[group["type"]]
        state = self.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        # Caffe updates a parameter without a gradient too, and its history decays.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if factor is not None:
            # A new tensor, so that .grad does not change.
            gradient = gradient * factor.to(gradient.device)
        # After clipping, because Caffe does not clip the decay.
        decay = group["weight_decay"] * group["decay_mult"]
        if decay:
            toward = parameter if group["regularization_type"] == "L2" else parameter.sign()
            gradient = gradient.add(toward, alpha=decay)
        parameter.sub_(rule(gradient, state, group, group["iteration"]))


def _largest_norm(config: SolverConfig, clip: Clip) -> float | None:
    """Return the limit of the norm of the mean gradient; None if it is not clipped."""
    if config.clip_gradients < 0:
        return None
    # Caffe clips the sum over iter_size micro-batches before it divides: sgd_solver.cpp:115-118.
    return config.clip_gradients / (config.iter_size if clip == "caffe" else 1)


def _clip_factor(groups: list[dict[str, Any]]) -> Tensor | None:
    """Return the factor of all gradients, without a transfer to the host; None if they are not clipped."""
    gradients = [
        parameter.grad
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter.grad is not None
    ]
    # Checked here, before any parameter changes.
    for gradient in gradients:
        if gradient.is_sparse:
            raise OptimizerError(
                "A parameter has a sparse gradient, which Caffe's solvers do not support. Make the layer "
                "with sparse=False."
            )
    largest = groups[0]["max_norm"]
    if largest is None or not gradients:
        return None
    # On one device, for a single norm; `_update` moves the factor to each gradient's device.
    norms = [torch.linalg.vector_norm(gradient).to(gradients[0].device) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    # where() in place of an if, so that the host does not wait.
    return torch.where(norm > largest, largest / norm, torch.ones_like(norm))
