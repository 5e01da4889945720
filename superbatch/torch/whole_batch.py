"""`WholeBatch`: updates by a loss that couples samples, computed in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..results.coupling import CouplingReport
from ..results.ranks import RanksReport
from ..results.update import Update
from .coupled_options import check_coupled
from .masters import MasterWeights
from .window.build import Options, engine_of
from .window.coupled_ranks import positive_weight
from .window.coupled_work import Coupled, Rng
from .window.engine import Engine
from .window.slips import name_unknown_options
from .window.sync.sync import CoupledSync
from .window.update_rule import Clip


class WholeBatch:
    """Updates a model by a loss whose samples are coupled, computed in micro-batches that fit in memory.

    Use it for BatchNorm in training mode, contrastive losses, or a loss over the hardest samples of a batch.
    `loss_fn` is called once, with the whole batch; below autograd each operator runs in micro-batches (see
    `virtual_batch`). The update is that of the real large batch. Micro-batches need no weights, and the loss
    is not checked.

    Args:
        model: the model, or a list of models, that `loss_fn` uses and the optimizer updates.
        optimizer: as the `Accumulator`'s.
        loss_fn: ``loss_fn(batch) -> loss``, a closure over the model.
        microbatch_size: largest number of samples in a micro-batch; ``"auto"``: as many as fit in memory;
            None: all. The update does not depend on it.
        rng: ``"microbatch"``: random operators draw anew for each micro-batch; ``"batch"``: they draw the
            numbers that the large batch would get.
        max_grad_norm: as in `Accumulator`; the same holds for `clip`, `scheduler`, `scaler` and `device`.
        nonfinite: a loss or gradient that is not finite: ``"raise"``, or ``"skip_update"``.
        participants: `FrozenBatchNorm`, and objects of your own.
        weight: on several ranks, a function from this rank's batch to its weight, such as
            ``count_tokens("labels")``; None: its number of samples.
        sync: as the `Accumulator`'s, without ``"microbatch"``. FSDP2 parameters are all-gathered for the
            window. BatchNorm in training mode uses the samples of all ranks. `loss_fn` gets the samples
            of this rank; if it couples samples itself, it must exchange them between ranks itself.

    Attributes:
        engine: internal object that opens and runs the windows; integrations with other libraries use it.

    Raises:
        InputError: an argument has the wrong type or value, or a model uses tensor parallelism.
        OptimizerError: the optimizer cannot be used, or does not own the model's parameters.

    Examples:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_fn = lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> accumulate = WholeBatch(model, optimizer, loss_fn, microbatch_size=4)
        >>> accumulate((torch.randn(10, 3), torch.randn(10, 1))).microbatches
        3
    """

    @name_unknown_options
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | MasterWeights | Sequence[Optimizer | MasterWeights],
        loss_fn: Callable[[Any], Any],
        *,
        microbatch_size: int | Literal["auto"] | None = "auto",
        rng: Rng = "microbatch",
        max_grad_norm: float | None = None,
        clip: Clip | None = None,
        scheduler: Any = None,
        scaler: Any = None,
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
            max_grad_norm=max_grad_norm,
            clip=clip,
            scheduler=scheduler,
            scaler=scaler,
            nonfinite=nonfinite,
            device=device,
            participants=participants,
            # A rank with weight 0 would skip its forward, and the other ranks would wait for it.
            weight=None if weight is None else positive_weight(weight),
            sync=sync,
            # The engine then evaluates loss_fn once, on a virtual batch.
            coupled=rng,
        )
        self.engine: Engine = engine_of(model, optimizer, loss_fn, options)

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return self.engine.updates

    @property
    def sync(self) -> RanksReport:
        """Report on the ranks that share a batch: how and when gradients are reduced, and their bytes."""
        return self.engine.config.sync.report

    @property
    def coupling(self) -> CouplingReport | None:
        """Report on the last window, with the operators that coupled its samples; None before the first."""
        # For pyright: with the option `coupled` the engine's work is a Coupled.
        assert isinstance(self.engine.work, Coupled)
        return self.engine.work.report

    def __call__(self, batch: Any) -> Update:
        """Make one update from a batch.

        Args:
            batch: any nesting of tensors with one row for each sample, on the host; or a `Window`, whose
                micro-batches are concatenated.

        Returns:
            The record of the update.

        Raises:
            InputError, SplitError: the batch cannot be split; nothing has changed.
            NonFiniteError: the loss or gradient is not finite (with ``nonfinite="raise"``); nothing has
                changed.
            CoupledSamplesError: on several ranks, `loss_fn` couples the samples of this rank but not those of
                other ranks, or divides by a count that is not proportional to the rank's weight.
        """
        return self.engine.update(batch)

    def discard(self) -> None:
        """Discard a window that an interrupt left open, and restore the state before it."""
        self.engine.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save beside the model's and the optimizer's: tensors and plain containers."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: from `state_dict`.

        Raises:
            InputError: `state` is not from `state_dict`, or its master weights do not fit.
            WindowError: a window is open.
        """
        self.engine.load_state_dict(state)
