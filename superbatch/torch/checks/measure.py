"""Gradients of a batch, computed in one pass and accumulated by the Accumulator, and their difference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from superbatch.batch.split import TokenBudget
from superbatch.batch.tree import count_samples
from superbatch.normalize import scale
from superbatch.results.verification import ParameterDifference

from ..accumulator import Accumulator
from ..devices import in_float64
from ..options import FrozenBatchNorm, GhostBatchNorm, PerSampleRandom, Split
from .probing.problem import Problem, evaluate
from .probing.untouched import seed_all, state_restorer

BatchNormChoice = Literal["per_microbatch", "frozen"]
Size = int | TokenBudget | None

# A parameter's difference is divided by the norm of its gradient, or by this share of the norm of all
# gradients if that is larger: some are zero up to rounding, e.g. that of a bias before a normalisation.
_FLOOR = 1e-3
# Added to a seed, it gives other random numbers.
_OTHER = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Settings of all passes of a verification, which run inside `untouched`.

    Args:
        problem: model, loss and declaration, in the dtype of the passes.
        batch: the whole batch.
        reset: function that makes new working copies of the model.
        batchnorm: treatment of BatchNorm; `"frozen"` freezes it for the whole batch too.
        streams: each sample draws from its own random stream.
        restore_state: buffers are restored before every micro-batch.
        seed: seed of each pass.
        host_seed: added to the seed for Python and NumPy.
    """

    problem: Problem
    batch: Any
    reset: Callable[[], None]
    batchnorm: BatchNormChoice = "per_microbatch"
    streams: bool = False
    restore_state: bool = False
    seed: int = 0
    host_seed: int = 0

    def but(self, **changes: Any) -> Setting:
        """Return a copy with some values changed."""
        return replace(self, **changes)

    def begin(self) -> None:
        """Start a pass: restore the state and seed the generators."""
        self.reset()
        if self.batchnorm == "frozen":
            for module in self.problem.model.modules():
                if isinstance(module, _BatchNorm):
                    # Not eval(): a user may have overridden it.
                    module.training = False
        seed_all(self.seed, self.problem.model, host=self.host_seed)


class Measured(NamedTuple):
    """Loss and gradient of a batch, and the number of samples of each micro-batch."""

    loss: float
    gradients: dict[str, Tensor]
    split: tuple[int, ...]


def whole(setting: Setting) -> Measured:
    """Compute loss and gradient of the whole batch in one pass, normalised by reduction and weight."""
    if setting.streams:  # only the accumulator draws from streams; None makes one micro-batch
        return accumulated(setting, None)
    setting.begin()
    loss, weight = evaluate(setting.problem, setting.batch)
    factor = scale(weight, weight, reduction=setting.problem.reduction)
    # The factor is the initial gradient of the backward, so the forward stays unchanged.
    loss.backward(torch.full_like(loss, factor, requires_grad=False))
    model = setting.problem.model
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    # Parameters without a gradient are left out; `differences` counts them as zero.
    existing = {name: _dense(gradient) for name, gradient in gradients.items() if gradient is not None}
    return Measured(float(loss.detach()) * factor, existing, (_samples(setting.problem, setting.batch),))


def accumulated(setting: Setting, size: Size) -> Measured:
    """Compute the loss of the batch, and the gradient that the Accumulator gives to an optimizer."""
    # Another seed than that of the whole batch: with the same one, a single dropout on the CPU would draw
    # equal numbers by chance. With streams the seed is the same, and numbers must be equal by construction.
    if not setting.streams:
        setting = setting.but(seed=setting.seed + _OTHER)
    elif size is not None:
        setting = setting.but(host_seed=setting.host_seed + _OTHER)
    setting.begin()
    problem = setting.problem
    reader = _Reader(problem)
    split: list[int] = []
    restore = state_restorer(problem.model) if setting.restore_state else None
    accumulator = Accumulator(
        problem.model,
        reader,
        microbatch_size=size,
        reduction=problem.reduction,
        weight=problem.weight,
        participants=_participants(setting),
        split=Split(tuple(problem.unsplit), tuple(problem.per_sample)),
        check=False,  # a wrong declaration is measured here, not raised
    )
    with _without_advice(), accumulator.window(setting.batch) as window:
        for microbatch in window:
            if restore is not None:
                restore()
            loss, weight = evaluate(problem, microbatch)
            window.backward(loss, *((weight,) if problem.weight == "returned" else ()))
            split.append(_samples(problem, microbatch))
    assert window.update is not None
    return Measured(window.update.loss, reader.gradients, tuple(split))


def differences(measured: Measured, reference: Measured) -> tuple[ParameterDifference, ...]:
    """Compare a gradient with the exact one, parameter by parameter; a missing gradient counts as zero.

    Examples:
        >>> a = Measured(0.0, {"w": torch.tensor([3.0, 4.0])}, (2,))
        >>> b = Measured(0.0, {"w": torch.tensor([3.0, 4.5])}, (1, 1))
        >>> [(d.name, d.norm, d.difference, d.relative) for d in differences(b, a)]
        [('w', 5.0, 0.5, 0.1)]
    """
    names = dict.fromkeys([*reference.gradients, *measured.gradients])
    norms = {name: _norm(reference.gradients.get(name)) for name in names}
    floor = _FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
    result: list[ParameterDifference] = []
    for name, norm in norms.items():
        a, b = measured.gradients.get(name), reference.gradients.get(name)
        difference = (
            _norm(b) if a is None else _norm(a) if b is None else _norm(in_float64(a) - in_float64(b))
        )
        size = max(norm, floor)
        result.append(ParameterDifference(name, norm, difference, difference / size if size else difference))
    return tuple(result)


def largest(measured: Measured, reference: Measured) -> float:
    """Return the largest relative difference of any parameter from the exact gradient; NaN if one is NaN.

    Examples:
        >>> one = Measured(0.0, {"w": torch.ones(2)}, (2,))
        >>> largest(one, one)
        0.0
    """
    relatives = [difference.relative for difference in differences(measured, reference)]
    # Python's max may drop a NaN; amax propagates it.
    return float(torch.tensor(relatives, dtype=torch.float64).amax()) if relatives else 0.0


class _Reader(torch.optim.Optimizer):
    """Optimizer that updates nothing; its step stores the gradients."""

    def __init__(self, problem: Problem) -> None:
        self._names = {
            name: parameter for name, parameter in problem.model.named_parameters() if parameter.requires_grad
        }
        # A group needs a learning rate; `step` changes nothing.
        super().__init__(list(self._names.values()), {"lr": 0.0})
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no loss
        self.gradients = {
            name: _dense(parameter.grad)
            for name, parameter in self._names.items()
            if parameter.grad is not None
        }


def _participants(setting: Setting) -> list[Any]:
    batchnorm = FrozenBatchNorm() if setting.batchnorm == "frozen" else GhostBatchNorm()
    return [batchnorm, PerSampleRandom()] if setting.streams else [batchnorm]


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence the accumulator's advice on gradient_sum, which is meant for training."""
    with warnings.catch_warnings():
        # Matched by the start of its text, so that warnings of the user's code are shown.
        warnings.filterwarnings("ignore", message="a window of", category=UserWarning)
        yield


def _samples(problem: Problem, batch: Any) -> int:
    return count_samples(batch, **problem.paths)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(in_float64(tensor)))
