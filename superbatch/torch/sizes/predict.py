"""Predict the peak memory of a micro-batch without computing anything."""

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
    """Predict the peak memory of a window of micro-batches like this one, on fake tensors.

    Two micro-batches and the update run as the Accumulator runs them, but no operation computes anything:
    memory is counted as each would allocate it. Two things are not in the figure: memory that a
    kernel allocates and frees inside one operation, and gaps between an allocator's blocks. Compare
    `Peak.first` with one measured micro-batch to see how much that is.

    Nothing real is touched: parameters, `.grad`, buffers, Python attributes of the modules and random state
    are as before. `loss_fn` is called, so its effects beyond torch and the modules happen.

    Args:
        loss_fn: ``loss_fn(microbatch) -> loss``, or ``(loss, weight)``, a closure over the models.
        microbatch: of the size in question, real; its memory counts only where it is moved to `device`.
        models: modules that `loss_fn` computes with.
        optimizers: of the update; without any, gradients of all parameters are summed and no update
            is made.
        device: where micro-batches are moved, and whose memory is counted; None leaves them where they are
            and counts the memory of the models' device.
        samples: of the micro-batch; None counts them.
        gradient_sum: as the Accumulator's; ``"auto"`` is taken to be float32, the larger choice.
        masters: of the optimizer, from `fp32_masters`.
        checkpointed: modules to run in a gradient checkpoint, for the memory that this would save.

    Returns:
        The peak, by phase.

    Raises:
        InputError: `device` is not there.
        PredictionError: fake tensors cannot run the model: its computation depends on values (``.item()``),
            leaves torch (``.numpy()``), or uses an operation without a shape rule.

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
    _require_there(counted)
    if samples is None:
        samples = count_samples(microbatch)
    ledger = Ledger(counted, rounded=_ROUNDED.get(counted.type, 512))
    try:
        with stand_ins(optimizers) as lent:
            copies = list(chain.from_iterable(lent))
            # A wrapper gives its parameters alone.
            pairs = zip(optimizers, lent, strict=True)
            owners = [each[0] if type(each[0]) is type(one) else one for one, each in pairs]
            owned = (
                own_parameters(models, owners, masters) if copies else all_parameters(models, no_optimizer())
            )
            only_owned = bool(copies) and has_others(models, owned)
            with faked(models, ledger) as fake:
                for module in checkpointed:
                    # An instance attribute, which nn.Module.__call__ prefers; `faked` removes it again.
                    vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
                place = _place(owned, copies, gradient_sum)
                if only_owned:
                    # As the Accumulator: parameters that no optimizer has get no gradient.
                    place.inputs = [fake(entry.parameter) for entry in owned]
                inputs = partial(_on_device, fake(microbatch), device)
                phases = _microbatches(inputs, loss_fn, place, ledger)
                update = _update(place, owned, copies, ledger)
                # It keeps copies of the momentum buffers, which exist from the second window on.
                if isinstance(place, MomentumGradientSum):
                    phases = _microbatches(inputs, loss_fn, place, ledger).without(update.state)
    except SuperbatchError:
        raise
    except Exception as error:  # user code may raise anything on fake tensors
        raise _unpredictable(error) from error
    return _peak(samples, phases, update)


class _Phases(NamedTuple):
    first: int
    forward: int
    backward: int
    activations: int

    def without(self, state: int) -> _Phases:
        return _Phases(self.first - state, self.forward - state, self.backward - state, self.activations)


class _Update(NamedTuple):
    peak: int
    gradients: int
    state: int


def _microbatches(
    inputs: Callable[[], tuple[Any, Any]], loss_fn: Callable[[Any], Any], place: GradientSum, ledger: Ledger
) -> _Phases:
    """Two micro-batches: the second one sees gradients, as all later ones do."""
    place.begin()
    first = forward = backward = activations = 0
    for number in (0, 1):
        ledger.restart()
        before = ledger.live
        microbatch, following = inputs()
        returned = loss_fn(microbatch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        # As in training: during the backward only the graph keeps tensors of the forward alive.
        del returned
        activations = ledger.live - before
        forward = ledger.restart()
        # Any factor does: memory does not depend on it.
        place.backward(loss, 0.5)
        del loss, microbatch, following
        backward = ledger.restart()
        if number == 0:
            first = max(forward, backward)
    return _Phases(first, forward, backward, activations)


def _on_device(microbatch: Any, device: torch.device | None) -> tuple[Any, Any]:
    """A micro-batch where it is worked on, and the next one, which is already on its way to a device."""
    current = to_device(microbatch, device)
    # The next micro-batch is on its way to the device, and alive as well.
    return current, to_device(microbatch, device) if device is not None and device.type != "cpu" else None


def _update(
    place: GradientSum, owned: list[ManagedParameter], optimizers: list[Optimizer], ledger: Ledger
) -> _Update:
    # Adam reads its step counter, a fake.
    with GuessValues():
        gradients = place.close()
        held = ledger.live
        ledger.restart()
        if isinstance(place, MomentumGradientSum):
            place.apply()
        elif optimizers:
            norm_of(gradients)
        place.attach(gradients)
        for optimizer in optimizers:
            # Schedulers and users wrap the method of the instance, around the real optimizer.
            type(optimizer).step(optimizer)
        peak = ledger.restart()
        del gradients  # the sums live as long, also where the optimizer gets them in another dtype
        clear(owned)
        place.begin()  # drops the state of the last window; `restore` removes hooks:
        place.restore()
    return _Update(peak, held, ledger.live)


def _peak(samples: int, phases: _Phases, update: _Update) -> Peak:
    ends: dict[Literal["forward", "backward", "optimizer"], int] = {
        # The state that the first update makes is alive in all later windows.
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


def _place(
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
    found = (parameter.device for model in models for parameter in model.parameters())
    return next(found, torch.device("cpu"))


def _require_there(device: torch.device) -> None:
    # Autograd ends the process where a fake tensor is on a device that this torch was built without.
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        raise InputError(f"There is no device={str(device)!r} here. Predict on a machine that has one.")


def _unpredictable(error: Exception) -> PredictionError:
    text = " ".join(str(error).split())
    return PredictionError(
        f"The model and the loss could not be run on fake tensors: {type(error).__name__}: {text[:300]}. "
        "Measure small micro-batches instead; if this error comes in a real run too, correct it first."
    )
