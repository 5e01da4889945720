"""What every window of an accumulator has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import normalize
from .batchnorm import Frozen, Pooled
from .before_step import BeforeStep
from .boundary import Step
from .gradients import Owned
from .noise.windows import NoiseOfWindows
from .sizes.reserve import Reserve
from .snapshot import BufferKeeper, RandomKeeper
from .sync import Ranks
from .transfer import Transfer
from .weighing import Weigh

NonFinite = Literal["raise", "skip_microbatch", "skip_update"]


@dataclass(frozen=True)
class Plan:
    """The options of an accumulator, checked, and what its windows use one after the other.

    Attributes:
        loss_fn: of a micro-batch; None where it cannot be called with one.
        transfer: moves micro-batches to the device.
        reserve: makes sure of the memory that an update needs.
        before_step: what the optimizers' step changes, as it was.
        until_next: gradients of the last window, whose memory the next one uses (see `boundary.zero_grad`).
        noise: measures how noisy the gradient is; None: it is not measured.
        whole: the loss is computed on the whole batch at once (see `coupled_exact`).
    """

    models: tuple[nn.Module, ...]
    owned: list[Owned]
    step: Step
    ranks: Ranks
    device: torch.device | None
    reduction: normalize.Reduction
    weigh: Weigh
    nonfinite: NonFinite
    sample_rng: bool
    norms: Frozen | Pooled | None
    buffers: BufferKeeper
    random: RandomKeeper
    loss_fn: Callable[[Any], Any] | None
    transfer: Transfer
    reserve: Reserve
    before_step: BeforeStep
    until_next: list[Tensor] = field(default_factory=list)
    noise: NoiseOfWindows | None = None
    whole: bool = False
