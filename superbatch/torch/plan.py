"""What every window of an accumulator has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import normalize
from ..tree import map_arrays
from .batchnorm import Frozen, Pooled
from .boundary import Step
from .gradients import Owned
from .snapshot import BufferKeeper, RandomKeeper
from .sync import Ranks
from .weighing import Weigh

NonFinite = Literal["raise", "skip_microbatch", "skip_update"]


@dataclass(frozen=True)
class Plan:
    """The options of an accumulator, checked, and what its windows use one after the other.

    Attributes:
        until_next: gradients of the last window, whose memory the next one uses (see `boundary.zero_grad`).
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
    until_next: list[Tensor]


def to_device(microbatch: Any, device: torch.device | None) -> Any:
    """Move the tensors of a micro-batch; copies from pinned memory do not wait.

    Examples:
        >>> to_device({"x": torch.zeros(2)}, torch.device("cpu"))["x"].device.type
        'cpu'
    """
    if device is None:
        return microbatch
    if type(microbatch) is tuple and all(
        type(leaf) is Tensor and leaf.device == device for leaf in microbatch
    ):
        return microbatch
    return map_arrays(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, microbatch
    )
