"""`Gradient` and `WholeGradient`: the gradient of a batch, for loops that step the optimizer themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn

from .. import normalize
from ..batch.split import TokenBudget
from ..noise.meter import NoiseMeter
from ..results.coupling import CouplingReport
from ..results.memory import MemoryReport
from ..results.noise import Noise
from ..results.ranks import RanksReport
from ..results.update import Update
from ..window import Window
from .coupled_options import check_coupled
from .loss.declared import WeightOption
from .options import NOT_DECLARED, Split
from .window.build import Options, engine_of
from .window.config import NonFinite
from .window.coupled_ranks import positive_weight
from .window.coupled_work import Coupled, Rng
from .window.engine import Engine
from .window.open_window import OpenWindow
from .window.slips import name_unknown_options
from .window.sync.sync import CoupledSync, SyncOption

T = TypeVar("T")


class Gradient:
    """Adds the gradient of a whole batch to ``.grad``, computed in micro-batches that fit in memory.

    The result is that of ``loss.backward()`` on the real large batch: the gradient is normalised by the
    weight of the batch, summed over the ranks of DistributedDataParallel, and not clipped. No optimizer is
    stepped. As in an `Accumulator`, the loss is checked, a micro-batch that runs out of memory is repeated in
    smaller ones, and long sums of low-precision gradients are made in float32 (see `gradient_sum`). A failure
    leaves ``.grad`` and everything else as before.

    Args:
        models: the model, or a list of models; the gradients of all their trainable parameters are added.
        loss_fn: ``loss_fn(microbatch) -> loss``, a closure over the models; None if you only use `window`.
        microbatch_size: as in `Accumulator`; the same holds for `reduction`, `weight`, `nonfinite`, `device`,
            `gradient_sum` (without ``"momentum"``), `participants`, `observers`, `split`, `check` and `sync`.
        scaler: a `torch.amp.GradScaler` that scales each loss. The gradient stays scaled, as after
            ``scaler.scale(loss).backward()``, and an overflow stays in it for ``scaler.step()`` to find.
        backward: another library's backward, such as ``accelerator.backward``, called with each weighted loss
            in place of ``loss.backward()``. It must not divide the loss. If it scales the loss by a
            GradScaler, pass that as `scaler` too; the loss is then scaled by `backward` alone.

    Attributes:
        engine: internal object that opens and runs the windows; integrations with other libraries use it.

    Raises:
        InputError: an argument has the wrong type or value, or no parameter needs a gradient.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> gradient_of = Gradient(model, lambda x: model(x).square().mean(), microbatch_size=4)
        >>> record = gradient_of(torch.randn(10, 3))
        >>> optimizer.step()
        >>> record.microbatches, model.weight.grad is not None
        (3, True)
    """

    @name_unknown_options
    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        loss_fn: Callable[[Any], Any] | None = None,
        *,
        microbatch_size: int | TokenBudget | Literal["auto", "largest"] | None = "auto",
        reduction: normalize.Reduction | Mapping[str, normalize.Reduction] = "mean",
        weight: WeightOption | Mapping[str, WeightOption] = None,
        scaler: Any = None,
        backward: Callable[..., Any] | None = None,
        nonfinite: NonFinite = "raise",
        device: torch.device | str | int | None = "auto",
        gradient_sum: torch.dtype | Literal["auto"] | None = "auto",
        participants: Sequence[Any] = (),
        observers: Sequence[NoiseMeter] = (),
        split: Split = NOT_DECLARED,
        check: bool = True,
        sync: SyncOption = "auto",
    ) -> None:
        options = Options(
            microbatch_size=_size(microbatch_size, loss_fn),
            reduction=reduction,
            weight=weight,
            scaler=scaler,
            backward=backward,
            nonfinite=nonfinite,
            device=device,
            gradient_sum=gradient_sum,
            participants=participants,
            observers=observers,
            split=split,
            check=check,
            sync=sync,
            # Without an optimizer step the gradient stays in .grad, and stays scaled by the scaler.
            steps=False,
        )
        # Without an optimizer the window sums the gradients of all trainable parameters.
        self.engine: Engine = engine_of(models, None, loss_fn, options)

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
        """Add the gradient of a batch, or of a `Window` of micro-batches, to ``.grad``.

        Args:
            batch: as the `Accumulator`'s.

        Returns:
            The record, without learning rates. Its `grad_norm` is the norm of the gradient that was added.

        Raises:
            InputError, SplitError: the batch cannot be split; nothing has changed.
            LossSpecError: the loss does not have the declared `reduction` or `weight`; nothing has changed.
            CoupledSamplesError: the loss or the model couples samples; nothing has changed.
            NonFiniteError: a loss or gradient is not finite (with ``nonfinite="raise"``); nothing has
                changed.
        """
        return self.engine.update(batch)

    @overload
    def window(self, batch: Window[T]) -> OpenWindow[T]: ...
    @overload
    def window(self, batch: T) -> OpenWindow[T]: ...
    def window(self, batch: Any) -> OpenWindow[Any]:
        """Return a window for a loop with a forward and backward of your own; see `Accumulator.window`.

        Args:
            batch: as for a call.

        Examples:
            >>> model = nn.Linear(2, 1)
            >>> gradient_of = Gradient(model, microbatch_size=2)
            >>> with gradient_of.window(torch.randn(5, 2)) as window:
            ...     for microbatch in window:
            ...         window.backward(model(microbatch).square().mean())
            >>> window.update.microbatches
            3
        """
        return self.engine.open(batch)

    def discard(self) -> None:
        """Discard a window left by an interrupt or by `load_state_dict`, and restore the state before it.

        Raises:
            WindowError: a hook or participant called this while the window begins or ends.
        """
        self.engine.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, in tensors and plain containers.

        It holds the micro-batch sizes found, the checks of the loss so far, and an open window.
        """
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: from `state_dict`.

        Raises:
            InputError: `state` is not from `state_dict`, or its `NoiseMeter` had another `beta`.
            WindowError: a window is open.
        """
        self.engine.load_state_dict(state)


def gradient(
    models: nn.Module | Sequence[nn.Module], loss_fn: Callable[[Any], Any], batch: Any, **options: Any
) -> Update:
    """Add the gradient of one batch to ``.grad``, as one call of a `Gradient` does.

    For a training loop, make a `Gradient` before the loop: it searches for the micro-batch size once, and
    checks the loss only in a few calls. This function does both in each call.

    Args:
        models: as for `Gradient`.
        loss_fn: as for `Gradient`.
        batch: as for a call of `Gradient`.
        options: other options of `Gradient`.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> loss_fn = lambda x: model(x).square().mean()
        >>> record = gradient(model, loss_fn, torch.randn(10, 3), microbatch_size=4)
        >>> record.samples, model.weight.grad is not None
        (10, True)
    """
    return Gradient(models, loss_fn, **options)(batch)


class WholeGradient:
    """Adds to ``.grad`` the gradient of a batch whose samples are coupled, computed in micro-batches.

    Use it in place of `Gradient` for BatchNorm in training mode and contrastive losses, as you use
    `WholeBatch` in place of `Accumulator`.

    Args:
        models: as `Gradient`'s.
        loss_fn: ``loss_fn(batch) -> loss``, called once, with the whole batch.
        microbatch_size: as in `WholeBatch`; the same holds for `rng`, `nonfinite`, `device`, `participants`,
            `weight` and `sync`.
        scaler: as `Gradient`'s.
        backward: as `Gradient`'s.

    Attributes:
        engine: internal object that opens and runs the windows; integrations with other libraries use it.

    Raises:
        InputError: an argument has the wrong type or value, or no parameter needs a gradient.

    Examples:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> gradient_of = WholeGradient(model, lambda x: model(x).relu().mean(), microbatch_size=4)
        >>> gradient_of(torch.randn(10, 3)).microbatches
        3
    """

    @name_unknown_options
    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        loss_fn: Callable[[Any], Any],
        *,
        microbatch_size: int | Literal["auto"] | None = "auto",
        rng: Rng = "microbatch",
        scaler: Any = None,
        backward: Callable[..., Any] | None = None,
        nonfinite: Literal["raise", "skip_update"] = "raise",
        device: torch.device | str | int | None = "auto",
        participants: Sequence[Any] = (),
        weight: Callable[[Any], Any] | None = None,
        sync: CoupledSync = "auto",
    ) -> None:
        # First, because the errors of the checks in `engine_of` are about losses of micro-batches.
        check_coupled(loss_fn, microbatch_size, rng, nonfinite, participants, weight)
        options = Options(
            microbatch_size=microbatch_size,
            scaler=scaler,
            backward=backward,
            nonfinite=nonfinite,
            device=device,
            participants=participants,
            # A rank with weight 0 would skip its forward, and the other ranks would wait for it.
            weight=None if weight is None else positive_weight(weight),
            sync=sync,
            # The engine then evaluates loss_fn once, on a virtual batch.
            coupled=rng,
            steps=False,
        )
        self.engine: Engine = engine_of(models, None, loss_fn, options)

    @property
    def coupling(self) -> CouplingReport | None:
        """Report on the last batch, with the operators that coupled its samples; None before the first."""
        # For pyright: with the option `coupled` the engine's work is a Coupled.
        assert isinstance(self.engine.work, Coupled)
        return self.engine.work.report

    def __call__(self, batch: Any) -> Update:
        """Add the gradient of a batch to ``.grad``.

        Args:
            batch: as `WholeBatch`'s.

        Returns:
            The record, as from `Gradient`.

        Raises:
            InputError, SplitError: the batch cannot be split; nothing has changed.
            NonFiniteError: the loss or gradient is not finite (with ``nonfinite="raise"``); nothing has
                changed.
        """
        return self.engine.update(batch)

    def discard(self) -> None:
        """Discard a window that an interrupt left open, and restore the state before it.

        Raises:
            WindowError: a hook or participant called this while the window begins or ends.
        """
        self.engine.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save (the micro-batch sizes found), in tensors and plain containers."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: from `state_dict`.

        Raises:
            InputError: `state` is not from `state_dict`.
            WindowError: a window is open.
        """
        self.engine.load_state_dict(state)


def _size(microbatch_size: Any, loss_fn: object) -> Any:
    """Return None in place of ``"auto"`` if there is no `loss_fn` to try sizes with: batches stay unsplit."""
    # No error: "auto" is the default, so the user may not have asked for it.
    return None if loss_fn is None and microbatch_size == "auto" else microbatch_size
