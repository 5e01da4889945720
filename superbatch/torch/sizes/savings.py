"""Options that lower the peak memory of a micro-batch, with savings predicted on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch.errors import OptimizerError
from superbatch.results.memory import Peak, Saving

from ..window.participants.gradient_sum import LOW_PRECISION
from ..window.validation import check_momentum
from .fake import PredictionError
from .predict import predict_peak

_LEAST_SHARE = 0.01  # of the peak; smaller savings are left out


def savings(
    loss_fn: Callable[[Any], Any],
    microbatch: Any,
    *,
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] = (),
    **options: Any,
) -> list[Saving]:
    """Return the options that lower the peak of a window with micro-batches like the given one.

    * Gradient checkpoints around the repeated blocks of a model: activations are recomputed in the backward
      instead of stored.
    * Gradients summed in the low-precision dtype of the parameters, or directly in SGD's momentum buffer.
    * An optimizer that updates one parameter at a time, or keeps less state.

    Each option is predicted alone; together they may save less than the sum.

    The arguments are those of `predict_peak`.

    Returns:
        The options that save 1 % of the peak or more, the largest saving first.

    Raises:
        PredictionError: the model cannot run on fake tensors.

    Examples:
        >>> import torch
        >>> blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(8)]
        >>> model = nn.Sequential(*blocks)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> found = savings(
        ...     lambda x: model(x).square().mean(), torch.ones(4096, 64), models=model, optimizers=sgd
        ... )
        >>> [saving.name for saving in found]
        ['gradient checkpoints']
        >>> found[0].how
        'torch.utils.checkpoint around each of the 8 blocks (Sequential): one more forward per micro-batch'
    """
    models = (models,) if isinstance(models, nn.Module) else tuple(models)
    optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)

    def predict(**changes: Any) -> Peak:
        settings = {"optimizers": optimizers, **options, **changes}
        return predict_peak(loss_fn, microbatch, models=models, **settings)

    now = predict()
    found = [
        *_checkpoints(predict, models, now),
        *_narrow_sums(predict, models, options, now),
        *_in_momentum(predict, optimizers, options, now),
        *_one_at_a_time(predict, optimizers, now),
        *_state(optimizers, now),
    ]
    worth = [saving for saving in found if saving.bytes >= _LEAST_SHARE * now.bytes]
    return sorted(worth, key=lambda saving: -saving.bytes)


def repeated_blocks(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the repeated blocks of a model: sibling modules of one class that have submodules.

    Returns:
        The group of blocks with the most parameters; empty if there is none.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> [type(block).__name__ for block in repeated_blocks([nn.TransformerEncoder(layer, 3)])]
        ['TransformerEncoderLayer', 'TransformerEncoderLayer', 'TransformerEncoderLayer']
        >>> repeated_blocks([nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))])
        []
    """
    stacks = (stack for model in models for parent in model.modules() for stack in _stacks(parent))
    return max(stacks, key=_parameters, default=[])


def _stacks(parent: nn.Module) -> Iterator[list[nn.Module]]:
    # A module without submodules is one operation, for which a checkpoint saves nothing.
    children = [child for child in parent.children() if next(child.children(), None) is not None]
    for kind in {type(child) for child in children}:
        alike = [child for child in children if type(child) is kind]
        if len(alike) > 1:
            yield alike


def _parameters(blocks: list[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _checkpoints(predict: Callable[..., Peak], models: Sequence[nn.Module], now: Peak) -> Iterator[Saving]:
    blocks = repeated_blocks(models)
    if not blocks:
        return
    try:
        peak = predict(checkpointed=blocks)
    except PredictionError:  # some blocks cannot run in a checkpoint
        return
    how = (
        f"torch.utils.checkpoint around each of the {len(blocks)} blocks ({type(blocks[0]).__name__}): "
        "one more forward per micro-batch"
    )
    yield Saving("gradient checkpoints", now.bytes - peak.bytes, how)


def _narrow_sums(
    predict: Callable[..., Peak], models: Sequence[nn.Module], options: dict[str, Any], now: Peak
) -> Iterator[Saving]:
    # Only gradients of low-precision parameters are summed in a wider dtype.
    low = any(parameter.dtype in LOW_PRECISION for model in models for parameter in model.parameters())
    if low and options.get("gradient_sum") is not None and not options.get("masters"):
        peak = predict(gradient_sum=None)
        how = "gradient_sum=None: exact enough for windows of up to 16 micro-batches"
        yield Saving("gradients summed in their own dtype", now.bytes - peak.bytes, how)


def _in_momentum(
    predict: Callable[..., Peak], optimizers: Sequence[Optimizer], options: dict[str, Any], now: Peak
) -> Iterator[Saving]:
    """Yield the saving of gradient_sum="momentum" if the optimizer supports it."""
    if not optimizers or options.get("masters") or options.get("gradient_sum") == "momentum":
        return
    try:
        check_momentum(optimizers)
    except OptimizerError:
        return
    peak = predict(gradient_sum="momentum")
    how = 'gradient_sum="momentum": no clipping by norm, and no norm in the record'
    yield Saving("gradients summed in the momentum", now.bytes - peak.bytes, how)


def _one_at_a_time(
    predict: Callable[..., Peak], optimizers: Sequence[Optimizer], now: Peak
) -> Iterator[Saving]:
    # If the peak is in another phase, these options do not lower it.
    if now.phase != "optimizer":
        return
    # fused first, because it is faster; foreach=False works on every device.
    for option, value in (("fused", True), ("foreach", False)):
        changed = [_with(optimizer, option, value) for optimizer in optimizers]
        if any(group.get(option, value) is not value for o in optimizers for group in o.param_groups):
            try:
                peak = predict(optimizers=changed)
            except PredictionError:  # some optimizers have no fused form on this device
                continue
            yield Saving(
                f"an update with {option}={value}", now.bytes - peak.bytes, f"optimizer({option}={value})"
            )
            return


def _with(optimizer: Optimizer, option: str, value: bool) -> Optimizer:
    # Without __init__: the copy shares parameters and state, and differs in one option.
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.param_groups = [
        {**group, **({option: value} if option in group else {})} for group in optimizer.param_groups
    ]
    return copy


def _state(optimizers: Sequence[Optimizer], now: Peak) -> Iterator[Saving]:
    # State that exists already; the prediction adds the state of a first update.
    existing = sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    names = " and ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
    how = f"the state of {names}: Adafactor or SGD keep less, 8-bit optimizers a quarter of it"
    yield Saving("optimizer state", existing + now.optimizer_state, how)
