"""Configuration that all windows of an accumulator share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from superbatch import normalize

from ..loss.declared import Declared
from ..loss.weighing import Weigh
from ..sizes.reserve import Reserve
from .before_step import BeforeStep
from .participants.batchnorm import Frozen, Pooled
from .participants.earlier_gradients import EarlierGradients
from .participants.forward_state_keeper import ForwardStateKeeper
from .participants.gradient_sum import ManagedParameter
from .participants.noise.windows import NoiseOfWindows
from .participants.snapshot import RandomKeeper
from .participants.user_participants import UserParticipants
from .sync.sync import Sync
from .transfer import Transfer
from .update_rule import UpdateRule

NonFinite = Literal["raise", "skip_microbatch", "skip_update"]


@dataclass(frozen=True)
class Config:
    """The checked options of an accumulator, and objects that its windows share.

    Attributes:
        models: the models.
        owned: the parameters whose gradients are summed; the list changes in place.
        rule: optimizers, schedulers, scaler and clipping.
        sync: the ranks that share a window.
        device: device to which micro-batches are moved; None: they stay where they are.
        declared: the declared reduction and weight of a micro-batch's loss.
        nonfinite: policy for losses and gradients that are not finite.
        sample_rng: True if each sample has its own random stream (`PerSampleRandom`).
        norms: participant for BatchNorm; None: there is none.
        random: participant that restores the random generators.
        loss_fn: the loss of a micro-batch; None if it needs the whole batch, or the user's loop computes it.
        state: restores buffers and other state that a forward changes.
        transfer: moves micro-batches to `device`; None: they are not moved.
        reserve: checks that there is memory for the update.
        before_step: snapshot of the optimizers before their step.
        until_next: gradients of the last window, whose memory the next one uses: `update_rule.zero_grad`.
        noise: measures how noisy the gradient is; None: it is not measured.
        whole: True if `loss_fn` is called once, with the whole batch (see `coupled_work`).
        masters: parameter -> float32 copy that the optimizer updates instead.
        backward: the backward function of another library; None: autograd's.
        earlier: gradients in ``.grad`` before the window, to which the window's is added (`Gradient`); None
            for an `Accumulator`.
        user_participants: participants of the user; None: there are none.
    """

    models: tuple[nn.Module, ...]
    owned: list[ManagedParameter]
    rule: UpdateRule
    sync: Sync
    device: torch.device | None
    declared: Declared
    nonfinite: NonFinite
    sample_rng: bool
    norms: Frozen | Pooled | None
    state: ForwardStateKeeper
    random: RandomKeeper
    loss_fn: Callable[[Any], Any] | None
    transfer: Transfer | None
    reserve: Reserve
    before_step: BeforeStep
    # One list for all windows: `OpenWindow` clears it as the next one begins.
    until_next: list[Tensor] = field(default_factory=list)
    noise: NoiseOfWindows | None = None
    whole: bool = False
    masters: Mapping[Tensor, Tensor] = field(default_factory=dict)
    backward: Callable[..., Any] | None = None
    earlier: EarlierGradients | None = None
    user_participants: UserParticipants | None = None

    def outside_window(self) -> AbstractContextManager[None]:
        """Return a context for forwards outside of windows, e.g. in a check; restores `user_participants`."""
        return nullcontext() if self.user_participants is None else self.user_participants.outside_window()

    @property
    def reduction(self) -> normalize.Reduction:
        """Reduction of what `loss_fn` returns."""
        return self.declared.reduction

    @property
    def weigh(self) -> Weigh:
        """Weight of a micro-batch."""
        return self.declared.weigh
