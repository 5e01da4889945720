"""The face for coupled samples: the loss of the whole batch, in the memory of micro-batches."""

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
    """Updates a model by a loss whose samples are coupled, at the memory of micro-batches.

    BatchNorm in training mode, contrastive losses, the hardest samples of a batch: `loss_fn` is called once,
    with the whole batch, which is worked through in micro-batches below autograd (see `virtual_batch`). The
    update is that of the real large batch; nothing is weighted, and there is nothing to check.

    Args:
        model: the model, or a list of models, that `loss_fn` uses and the optimizer updates.
        optimizer: as the `Accumulator`'s.
        loss_fn: ``loss_fn(batch) -> loss``, a closure over the model.
        microbatch_size: samples that are worked on at a time, at most; ``"auto"`` takes as many as fit in
            memory, None all. The update does not depend on it.
        rng: random operators draw for each ``"microbatch"``, or the numbers that the large ``"batch"`` would
            draw.
        max_grad_norm: as the `Accumulator`'s; so are `clip`, `scheduler`, `scaler` and `device`.
        nonfinite: a loss or gradient that is not finite: ``"raise"``, or ``"skip_update"``.
        participants: `FrozenBatchNorm`, and objects of your own.
        weight: on several ranks: how much this rank's batch counts, a function of it such as
            ``count_tokens("labels")``; None: its samples.
        sync: as the `Accumulator`'s, but for ``"microbatch"``. Models sharded by FSDP2 gather parameters
            for a window. Every BatchNorm in training mode is over the samples of all ranks; `loss_fn` gets
            those of this rank, and exchanges itself whatever else it couples.

    Attributes:
        engine: what opens the windows, for tools that make updates of their own.

    Raises:
        InputError: an argument has the wrong type or value, or the model is sharded.
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
        # Before Options, whose messages speak of micro-batches.
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
            # A weight of 0 would leave this rank out, while the others wait for its forward.
            weight=None if weight is None else positive_weight(weight),
            sync=sync,
            # Coupled: the engine evaluates loss_fn once, on a virtual batch.
            coupled=rng,
        )
        self.engine: Engine = engine_of(model, optimizer, loss_fn, options)

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return self.engine.updates

    @property
    def sync(self) -> RanksReport:
        """Ranks that share a batch, and when their gradients are reduced."""
        return self.engine.config.sync.report

    @property
    def coupling(self) -> CouplingReport | None:
        """Coupling points of the last window; None before the first."""
        # `coupled=` makes the engine's work a Coupled.
        assert isinstance(self.engine.work, Coupled)
        return self.engine.work.report

    def __call__(self, batch: Any) -> Update:
        """Make one update from a batch.

        Args:
            batch: any nesting of tensors with one row for each sample, on the host; or a `Window`, whose
                micro-batches are joined.

        Returns:
            The record of the update.

        Raises:
            InputError, SplitError: the batch cannot be worked through; nothing has changed.
            NonFiniteError: the loss or gradient is not finite (with ``nonfinite="raise"``); all is as before.
            CoupledSamplesError: `loss_fn` couples the samples of this rank, and not those of the others.
        """
        return self.engine.update(batch)

    def discard(self) -> None:
        """Discard a window that an interrupt left open, and restore its changes."""
        self.engine.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save beside the model's and the optimizer's: tensors and plain containers."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: from `state_dict`.

        Raises:
            InputError: it is no such state, or its masters do not fit.
            WindowError: a window is open.
        """
        self.engine.load_state_dict(state)
