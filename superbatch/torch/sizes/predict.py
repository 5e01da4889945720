"""Predict the peak memory of a micro-batch without running its computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from superbatch.batch.tree import count_samples
from superbatch.errors import InputError, SuperbatchError
from superbatch.results.memory import Peak

from ..memory.ledger import Ledger
from ..options import GradientSumOption
from ..window.norm import norm_of
from ..window.participants.buffer_gradients import BufferGradientSum
from ..window.participants.gradient_sum import LOW_PRECISION, GradientSum, ManagedParameter, clear
from ..window.participants.momentum_gradients import MomentumGradientSum
from ..window.participants.parameter_gradients import ParameterGradientSum
from ..window.transfer import to_device
from ..window.validation import (
    all_parameters,
    as_models,
    as_optimizers,
    has_others,
    no_optimizer,
    own_parameters,
)
from .fake import GuessValues, PredictionError, faked
from .stand_ins import stand_ins

# Allocators round up: posix_memalign(64) on the CPU, 512-byte blocks of the caching allocator on CUDA.
_ROUNDED = {"cpu": 64, "cuda": 512}


def predict_peak(
    loss_fn: Callable[[Any], Any],
    microbatch: Any,
    *,
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] = (),
    device: torch.device | None = None,
    samples: int | None = None,
    gradient_sum: GradientSumOption = None,
    masters: Mapping[Tensor, Tensor] | None = None,
    checkpointed: Sequence[nn.Module] = (),
) -> Peak:
    """Predict the peak memory of a window with micro-batches like the given one, on fake tensors.

    Two micro-batches and the update run as in the Accumulator, but on fake tensors. The memory that each
    operation would allocate is counted, and nothing is computed. The prediction lacks memory that a kernel
    allocates and frees inside one operation, and gaps between blocks of the allocator. To estimate both,
    compare `Peak.first` with one measured micro-batch.

    Parameters, `.grad`, buffers, Python attributes of the modules and random state do not change. `loss_fn`
    is called, so it has its effects outside of torch and the modules.

    Args:
        loss_fn: function from a micro-batch to a loss or ``(loss, weight)``, a closure over the models.
        microbatch: real micro-batch of the size to predict; its memory counts only if it is moved to
            `device`.
        models: modules that `loss_fn` computes with.
        optimizers: optimizers of the update; without any, the gradients of all parameters are summed, and no
            update is made.
        device: device to which micro-batches are moved, and whose memory is counted; None does not move them,
            and counts the memory of the models' device.
        samples: number of samples of the micro-batch; None counts them.
        gradient_sum: option of the Accumulator; ``"auto"`` counts as float32, the larger choice.
        masters: master parameters of the optimizer, from `fp32_masters`.
        checkpointed: modules to run in gradient checkpoints, to predict what these save.

    Returns:
        The peak, by phase.

    Raises:
        InputError: `device` is not available.
        PredictionError: the model cannot run on fake tensors: its computation depends on values
            (``.item()``), leaves torch (``.numpy()``), or uses an operation without a shape rule.

    Examples:
        >>> layer = nn.Linear(1000, 10, bias=False)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> peak = predict_peak(
        ...     lambda x: layer(x).square().mean(), torch.ones(8, 1000), models=layer, optimizers=adam
        ... )
        >>> peak.phase, peak.gradients, peak.optimizer_state
        ('optimizer', 40064, 80064)
        >>> layer.weight.grad, len(adam.state)
        (None, 0)
    """
    models = as_models(models)
    optimizers = as_optimizers(optimizers) if isinstance(optimizers, Optimizer) or optimizers else ()
    counted = device or _device_of(models)
    _check_available(counted)
    if samples is None:
        samples = count_samples(microbatch)
    ledger = Ledger(counted, rounded=_ROUNDED.get(counted.type, 512))
    try:
        with stand_ins(optimizers) as copies_of_each:
            copies = list(chain.from_iterable(copies_of_each))
            # A wrapper's copies are those of its inner optimizers; the wrapper itself has the parameters.
            owners = [
                inner[0] if type(inner[0]) is type(optimizer) else optimizer
                for optimizer, inner in zip(optimizers, copies_of_each, strict=True)
            ]
            owned = (
                own_parameters(models, owners, masters) if copies else all_parameters(models, no_optimizer())
            )
            only_owned = bool(copies) and has_others(models, owned)
            with faked(models, ledger) as fake:
                for module in checkpointed:
                    # An instance attribute takes precedence in nn.Module.__call__; `faked` removes it.
                    vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
                sums = _sums_of(owned, copies, gradient_sum)
                if only_owned:
                    # As in the Accumulator, parameters without an optimizer get no gradient.
                    sums.inputs = [fake(entry.parameter) for entry in owned]
                inputs = partial(_on_device, fake(microbatch), device)
                phases = _microbatches(inputs, loss_fn, sums, ledger)
                update = _update(sums, owned, copies, ledger)
                # Momentum buffers exist from the second window on, which therefore copies them.
                if isinstance(sums, MomentumGradientSum):
                    phases = _microbatches(inputs, loss_fn, sums, ledger).without(update.state)
    except SuperbatchError:
        raise
    except Exception as error:  # user code may raise anything on fake tensors
        raise _unpredictable(error) from error
    return _peak(samples, phases, update)


class _Phases(NamedTuple):
    """Peak bytes of the phases of a micro-batch; `first`: of the first micro-batch, in both phases."""

    first: int
    forward: int
    backward: int
    activations: int

    def without(self, state: int) -> _Phases:
        """Return the phases without the bytes of the optimizer's state, which `_peak` adds again."""
        return _Phases(self.first - state, self.forward - state, self.backward - state, self.activations)


class _Update(NamedTuple):
    """Bytes of an update: its peak, the summed gradients, and the state that it adds."""

    peak: int
    gradients: int
    state: int


def _microbatches(
    inputs: Callable[[], tuple[Any, Any]], loss_fn: Callable[[Any], Any], sums: GradientSum, ledger: Ledger
) -> _Phases:
    """Run two micro-batches: at the second one gradients exist, as at all later ones."""
    sums.begin()
    first = forward = backward = activations = 0
    for number in (0, 1):
        ledger.restart()
        before = ledger.live
        microbatch, following = inputs()
        returned = loss_fn(microbatch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        # As in training, only the graph keeps tensors of the forward alive during the backward.
        del returned
        activations = ledger.live - before
        forward = ledger.restart()
        # The memory does not depend on the factor 0.5.
        sums.backward(loss, 0.5)
        del loss, microbatch, following
        backward = ledger.restart()
        if number == 0:
            first = max(forward, backward)
    return _Phases(first, forward, backward, activations)


def _on_device(microbatch: Any, device: torch.device | None) -> tuple[Any, Any]:
    """Return a micro-batch on the device, and the next one, whose copy to the device has begun."""
    current = to_device(microbatch, device)
    # The copy of the next one takes memory too, except on the CPU, where nothing is copied.
    return current, to_device(microbatch, device) if device is not None and device.type != "cpu" else None


def _update(
    sums: GradientSum, owned: list[ManagedParameter], optimizers: list[Optimizer], ledger: Ledger
) -> _Update:
    # Adam reads the value of its step counter, which is fake.
    with GuessValues():
        gradients = sums.close()
        held = ledger.live
        ledger.restart()
        if isinstance(sums, MomentumGradientSum):
            sums.apply()
        elif optimizers:
            norm_of(gradients)
        sums.attach(gradients)
        for optimizer in optimizers:
            # The class's method: on the instance, schedulers replace it by one of the real optimizer.
            type(optimizer).step(optimizer)
        peak = ledger.restart()
        # Not earlier: training keeps the sums until here, even if the optimizer gets them in another dtype.
        del gradients
        clear(owned)
        # `begin` frees the state of the last window, and `restore` removes hooks.
        sums.begin()
        sums.restore()
    return _Update(peak, held, ledger.live)


def _peak(samples: int, phases: _Phases, update: _Update) -> Peak:
    ends: dict[Literal["forward", "backward", "optimizer"], int] = {
        # The optimizer's state of the first update is alive in all later windows.
        "backward": phases.backward + update.state,
        "forward": phases.forward + update.state,
        "optimizer": update.peak,
    }
    phase = max(ends, key=lambda name: ends[name])
    return Peak(
        samples=samples,
        bytes=ends[phase],
        phase=phase,
        first=phases.first,
        forward=phases.forward,
        backward=phases.backward,
        optimizer=update.peak,
        gradients=update.gradients,
        optimizer_state=update.state,
        activations=phases.activations,
    )


def _sums_of(
    owned: list[ManagedParameter],
    optimizers: list[Optimizer],
    option: GradientSumOption,
) -> GradientSum:
    if option == "momentum":
        return MomentumGradientSum(owned, optimizers[0])
    dtype = torch.float32 if option == "auto" else option
    if dtype is None or not any(entry.parameter.dtype in LOW_PRECISION for entry in owned):
        return ParameterGradientSum(owned, only_owned=False)
    return BufferGradientSum(owned, dtype)


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    devices = (parameter.device for model in models for parameter in model.parameters())
    return next(devices, torch.device("cpu"))


def _check_available(device: torch.device) -> None:
    # Autograd aborts the process if a fake tensor is on a device that this build of torch does not support.
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        raise InputError(f"device={str(device)!r} is not available. Predict on a machine that has it.")


def _unpredictable(error: Exception) -> PredictionError:
    text = " ".join(str(error).split())
    return PredictionError(
        f"The model or the loss cannot run on fake tensors ({type(error).__name__}: {text[:300]}). Measure "
        "small micro-batches instead, or, if a real run raises this error too, correct it first."
    )
