"""`Accumulator`: one exact update from each batch, computed in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from .. import normalize
from ..batch.split import TokenBudget
from ..noise.meter import NoiseMeter
from ..results.memory import MemoryReport
from ..results.noise import Noise
from ..results.ranks import RanksReport
from ..results.update import Update
from ..window import Window
from .loss.declared import WeightOption
from .masters import MasterWeights
from .options import NOT_DECLARED, GradientSumOption, Split
from .window.build import Options, engine_of
from .window.config import NonFinite
from .window.engine import Engine
from .window.open_window import OpenWindow
from .window.slips import name_unknown_options
from .window.sync.sync import SyncOption
from .window.update_rule import Clip

T = TypeVar("T")


class Accumulator:
    """Updates a model by the gradient of a whole batch, computed in micro-batches that fit in memory.

    The update is that of the real large batch: gradients are summed with the weight ``w_i / W`` of each
    micro-batch (``1 / W`` for a sum; see `superbatch.normalize`), then clipped and applied once.

    `MasterWeights` is in `superbatch.torch.masters`; `ClipValue`, `Split` and the objects for `participants`
    are in `superbatch.torch.options`.

    Args:
        model: the model, or a list of models, that `loss_fn` uses and the optimizer updates.
        optimizer: a torch optimizer, or a list of optimizers that own different parameters. Wrap an
            optimizer of float32 copies of low-precision parameters in `MasterWeights`.
        loss_fn: ``loss_fn(microbatch) -> loss``, a closure over the model. Not needed if you only use
            `window`.
        microbatch_size: largest number of samples in a micro-batch, or a `TokenBudget`. ``"auto"`` finds the
            fastest size that fits in memory, ``"largest"`` the largest. None computes the batch unsplit.
        reduction: how `loss_fn` reduces: to the ``"mean"`` over the micro-batch (PyTorch's default), to a
            ``"sum"`` that is divided by the weight of the batch, or to a ``"total"`` that is not divided.
        weight: weight of a micro-batch: None for its number of samples; a function micro-batch -> number
            (`count_tokens`, `sample_weights`, `class_weights`); or ``"returned"`` if `loss_fn` returns
            ``(loss, weight)``. `at_least` gives the sum of the weights a lower bound. For several losses with
            weights of their own, pass a mapping name -> weight; `loss_fn` returns a mapping name -> loss.
        max_grad_norm: clip the normalised gradient to this 2-norm, once per window.
        clip: a function that changes a list of gradients in place, called once per window after
            `max_grad_norm` is applied: `ClipValue`, or your own.
        scheduler: a learning-rate scheduler, or a list of them, stepped after each update, but not after a
            skipped one.
        scaler: a `torch.amp.GradScaler`; an overflow skips the update and the scheduler.
        nonfinite: what to do with NaN and infinity: ``"raise"``; ``"skip_microbatch"`` leaves a micro-batch
            and its weight out (its gradient is checked before it is added); ``"skip_update"`` discards the
            window.
        device: where micro-batches are moved: ``"auto"`` (the model's device), a device, or None.
        gradient_sum: dtype in which gradients of bfloat16/float16 parameters are summed. ``"auto"``: float32
            if a window has more than 16 micro-batches. None: the parameters' dtype. ``"momentum"`` sums
            directly in SGD's momentum buffer (exact).
        participants: objects whose state is restored if a window fails. BatchNorm in training mode needs
            `FrozenBatchNorm` or `GhostBatchNorm`. `PerSampleRandom` gives each sample a random stream. Your
            own objects implement `superbatch.torch.window.participant.Participant`.
        observers: a `superbatch.NoiseMeter` that measures how noisy the gradient is.
        split: a `Split` for the parts of a batch that are not tensors with the samples in dimension 0.
        check: compare the loss of micro-batches with the losses of their parts; each check calls `loss_fn` a
            few times. A wrong `reduction` or `weight` raises before the update. The first window is checked.
            A later window is checked if it shows something new (the first loss that is not 0, the first
            unequal counts of labels), and from window 10 on if the number of windows has doubled since the
            last check.
        sync: how ranks share a window. ``"auto"`` follows the model's wrapper or sharding, and raises if
            several ranks are initialised and the model is not wrapped and not sharded. ``"all_reduce"`` sums
            the gradients of such a model over all ranks, once per window. None: this rank trains alone. For
            `fully_shard`: ``"window"`` reduces gradients once per window and keeps them unsharded until then;
            ``"microbatch"`` reduces them after each micro-batch. The attribute `sync` reports the choice.

    Attributes:
        engine: internal object that opens and runs the windows; integrations with other libraries use it.

    Raises:
        InputError: an argument has the wrong type or value, or two of them exclude each other.
        OptimizerError: the optimizer cannot be used, or does not own the model's parameters.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss_fn(microbatch):
        ...     x, y = microbatch
        ...     return nn.functional.mse_loss(model(x), y)
        >>> accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=4)
        >>> update = accumulate((torch.randn(10, 3), torch.randn(10, 1)))
        >>> update.samples, update.microbatches, update.made
        (10, 3, True)
    """

    # For an option of another library, such as accumulation_steps=, this raises an error that names ours.
    @name_unknown_options
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | MasterWeights | Sequence[Optimizer | MasterWeights],
        loss_fn: Callable[[Any], Any] | None = None,
        *,
        microbatch_size: int | TokenBudget | Literal["auto", "largest"] | None = None,
        reduction: normalize.Reduction | Mapping[str, normalize.Reduction] = "mean",
        weight: WeightOption | Mapping[str, WeightOption] = None,
        max_grad_norm: float | None = None,
        clip: Clip | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        nonfinite: NonFinite = "raise",
        device: torch.device | str | int | None = "auto",
        gradient_sum: GradientSumOption = "auto",
        participants: Sequence[Any] = (),
        observers: Sequence[NoiseMeter] = (),
        split: Split = NOT_DECLARED,
        check: bool = True,
        sync: SyncOption = "auto",
    ) -> None:
        # One frozen object, because this class, Gradient and WholeBatch share the validation of options.
        options = Options(
            microbatch_size=microbatch_size,
            reduction=reduction,
            weight=weight,
            max_grad_norm=max_grad_norm,
            clip=clip,
            scheduler=scheduler,
            scaler=scaler,
            nonfinite=nonfinite,
            device=device,
            gradient_sum=gradient_sum,
            participants=participants,
            observers=observers,
            split=split,
            check=check,
            sync=sync,
        )
        # The engine holds all state, so its state_dict() is complete.
        self.engine: Engine = engine_of(model, optimizer, loss_fn, options)

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return self.engine.updates

    @property
    def sync(self) -> RanksReport:
        """Report on the ranks that share a window: how and when gradients are reduced, and their bytes."""
        return self.engine.config.sync.report

    @property
    def memory(self) -> MemoryReport | None:
        """Sizes found by ``"auto"`` or ``"largest"``; None for a size that you gave."""
        return self.engine.memory

    @property
    def noise(self) -> Noise | None:
        """Noise of the gradient over the windows so far; None without a `NoiseMeter`."""
        return self.engine.noise

    def __call__(self, batch: Any) -> Update:
        """Make one update from a batch, or from a `Window` of micro-batches.

        Args:
            batch: any nesting of tensors, arrays, mappings, sequences and dataclasses with the samples first,
                on the host; or a Window, whose micro-batches are not split. Arrays are split and remain
                arrays: `loss_fn` converts them. Pass None on a rank whose data ended before the others'.

        Returns:
            The record of the update.

        Raises:
            InputError, SplitError: the batch cannot be split; nothing has changed.
            LossSpecError: the loss does not have the declared `reduction` or `weight`; nothing has changed.
            CoupledSamplesError: the loss or the model couples samples; nothing has changed.
            NonFiniteError: a loss or gradient is not finite (with ``nonfinite="raise"``); nothing has
                changed.
        """
        return self.engine.update(batch)

    # Two overloads, so that a type checker knows the type that the loop over a Window yields.
    @overload
    def window(self, batch: Window[T]) -> OpenWindow[T]: ...
    @overload
    def window(self, batch: T) -> OpenWindow[T]: ...
    def window(self, batch: Any) -> OpenWindow[Any]:
        """Return a window of micro-batches, for a loop with a forward and backward of your own.

        Args:
            batch: as for a call.

        Returns:
            A context manager: iterate over it, call its ``backward(loss)`` for each micro-batch, read its
            ``update`` afterwards. Leaving it by an exception or before the last backward discards the window.

        Raises:
            InputError, SplitError: the batch cannot be split.
            WindowError: another window of this accumulator is open.
            LossSpecError, CoupledSamplesError: as for a call.

        Examples:
            >>> model = nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> accumulator = Accumulator(model, optimizer, microbatch_size=2)
            >>> with accumulator.window(torch.randn(5, 2)) as window:
            ...     for microbatch in window:
            ...         window.backward(model(microbatch).square().mean())
            >>> window.update.microbatches
            3
        """
        return self.engine.open(batch)

    def discard(self) -> None:
        """Discard a window left by an interrupt or by `load_state_dict`, and restore the state before it.

        If its optimizers have already stepped, the window is finished instead.

        Raises:
            WindowError: a hook, scheduler or participant called this while the window begins or ends, or a
                loaded window summed into momentum buffers of other parameters.

        Examples:
            >>> model = nn.Linear(2, 1)
            >>> Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1)).discard()
        """
        self.engine.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save beside the model's and the optimizer's: tensors and plain containers.

        Inside a window (in the loop, after ``backward``) the state includes that window, which resumes bit
        for bit.

        Raises:
            WindowError: between the forward and the backward of a micro-batch, or while the window ends (in a
                hook, scheduler or participant).
        """
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the next call or `window` resumes a window that was open.

        Args:
            state: from `state_dict`. Also load the model and the optimizer as they were saved at that time,
                in any order. If a window was open, pass its batch next.

        Raises:
            InputError: `state` is not from `state_dict`, its `NoiseMeter` had another `beta`, or its master
                weights do not fit.
            WindowError: a window is open.
        """
        self.engine.load_state_dict(state)
