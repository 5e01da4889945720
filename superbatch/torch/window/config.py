"""Configuration of the windows of an accumulator."""

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
from .participants.extra import Extra
from .participants.gradient_sum import ManagedParameter
from .participants.moved_state import MovedState
from .participants.noise.windows import NoiseOfWindows
from .participants.snapshot import RandomKeeper
from .sync.sync import Sync
from .transfer import Transfer
from .update_rule import UpdateRule

NonFinite = Literal["raise", "skip_microbatch", "skip_update"]


@dataclass(frozen=True)
# Frozen: windows share it, and an option that changed between two windows would split one update.
class Config:
    """The options of an accumulator, checked, and what its windows use one after the other.

    Attributes:
        declared: what the loss of a micro-batch is, and what it weighs.
        loss_fn: of a micro-batch; None where it cannot be called with one.
        state: keeps buffers and other state that a forward moves.
        transfer: moves micro-batches to the device; None: they stay where they are.
        reserve: makes sure of the memory that an update needs.
        before_step: what the optimizers' step changes, as it was.
        until_next: gradients of the last window, whose memory the next one uses: `update_rule.zero_grad`.
        noise: measures how noisy the gradient is; None: it is not measured.
        whole: the loss is computed on the whole batch at once (see `coupled_work`).
        masters: float32 copies that are updated in place of parameters.
        backward: of a host, in place of autograd's; None: autograd's.
        earlier: gradients before the window, which its own is added to; None: an update is made of it.
        extra: participants of the user; None: there are none.
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
    state: MovedState
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
    extra: Extra | None = None

    # E.g. the first-window check: its forwards must not count for the user's participants.
    def aside(self) -> AbstractContextManager[None]:
        """Return a context for forwards that are no part of a window: it restores `extra`."""
        return nullcontext() if self.extra is None else self.extra.aside()

    @property
    def reduction(self) -> normalize.Reduction:
        """Reduction of what `loss_fn` returns."""
        return self.declared.reduction

    @property
    def weigh(self) -> Weigh:
        """Weight of a micro-batch."""
        return self.declared.weigh
