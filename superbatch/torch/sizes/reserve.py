"""Check that an update has enough memory, before the optimizer changes anything.

If memory runs out inside an optimizer step, some parameters have changed and others have not. Such a step
cannot be retried. So the memory of the step is counted on fake tensors, then allocated and freed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from superbatch.errors import OutOfMemoryError

from ..memory.ledger import Ledger
from ..memory.out_of_memory import out_of_memory, release_caches
from ..window.participants.gradient_sum import ManagedParameter
from ..window.wrapped import leaves_of
from .fake import GuessValues, faked
from .stand_ins import stand_ins

# Smaller steps are not checked: inspecting the optimizer would take longer than the step.
LEAST_BYTES = 2**20


class Reserve:
    """Memory that the optimizers of an accumulator need for an update.

    Args:
        models: models whose parameters are updated.
        optimizers: optimizers that make the update.
        owned: parameters of the optimizers; the list may change in place.

    Attributes:
        tight: check every update, because micro-batches use nearly all memory.

    Examples:
        >>> layer = nn.Linear(1000, 500)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> reserve = Reserve([layer], [adam], [])
        >>> layer.weight.grad = torch.zeros_like(layer.weight)
        >>> reserve.bytes_of_update() >= 2 * layer.weight.nbytes
        True
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        owned: list[ManagedParameter],
    ) -> None:
        self._models, self._owned = models, owned
        # The innermost optimizers of wrappers, because they hold the state.
        self._leaves = [leaf for optimizer in optimizers for leaf in leaves_of(optimizer)]
        self._parameters = len(
            {id(p) for leaf in self._leaves for group in leaf.param_groups for p in group["params"]}
        )
        self._needed: tuple[int, int] | None = None  # number of states, and the bytes of an update with them
        self.tight = False

    def require(self) -> None:
        """Check the memory for the first update; with `tight`, for every update.

        Raises:
            OutOfMemoryError: the memory is not enough.
        """
        # Once all state exists, an update needs as much as the previous one, which has succeeded.
        states = sum([len(leaf.state) for leaf in self._leaves])
        if states == min(len(self._owned), self._parameters) and not self.tight:
            return
        if sum([entry.target.nbytes for entry in self._owned]) < LEAST_BYTES:
            return
        if self._needed is None or self._needed[0] != states:
            # A dry run takes milliseconds, so it is repeated only after states were added.
            self._needed = (states, self.bytes_of_update())
        needed = self._needed[1]
        try:
            self._allocate(needed)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            text = str(error)
        else:
            return
        # Free the cached blocks that were allocated for the check.
        release_caches(*(entry.target.device for entry in self._owned))
        raise OutOfMemoryError(_text(f"{needed / 2**20:.1f} MiB", text))

    def bytes_of_update(self) -> int:
        """Return the peak bytes of a step of the optimizers, beyond those in use now.

        The gradients must exist. The result is 0 if an optimizer cannot run on fake tensors.
        """
        ledger = Ledger(self._device, rounded=64)
        try:
            with stand_ins(self._leaves) as copies, faked(self._models, ledger), GuessValues():
                # The copies of the optimizers do not count.
                ledger.restart()
                before = ledger.live
                for (optimizer,) in copies:
                    # The class's method: on the instance, schedulers replace it by one of the real optimizer.
                    type(optimizer).step(optimizer)
                return ledger.restart() - before
        except Exception:  # noqa: BLE001  (an unknown optimizer may raise anything; the real step follows)
            return 0

    @property
    def _device(self) -> torch.device:
        if self._owned:
            return self._owned[0].target.device
        return next(parameter.device for model in self._models for parameter in model.parameters())

    def _allocate(self, needed: int) -> None:
        """Allocate and free memory in blocks of the largest parameter, which fit where those of a step do."""
        size = max(entry.target.nbytes for entry in self._owned)
        blocks: list[Tensor] = []
        while needed > 0:
            blocks.append(torch.empty(min(needed, size), dtype=torch.uint8, device=self._device))
            needed -= size


def raise_if_out_of_memory(error: BaseException, *, torn: Callable[[], None] | None) -> None:
    """Raise `OutOfMemoryError` if memory ran out in an update, which is not retried.

    Args:
        error: any error.
        torn: function to call if the optimizer may have changed something; None if it has not.

    Raises:
        OutOfMemoryError: `error` is an error of an allocator, not one of this library.

    Examples:
        >>> raise_if_out_of_memory(ValueError("something else"), torn=None)
    """
    if isinstance(error, OutOfMemoryError) or not out_of_memory(error):
        return
    if torn is None:
        raise OutOfMemoryError(_text("more than is free", str(error))) from None
    torn()
    raise OutOfMemoryError(
        f"Memory ran out inside the optimizer's step ({error}): some parameters or states have changed, and "
        "others have not. Load a checkpoint, and use an optimizer that needs less memory, or foreach=False."
    ) from None


def _text(needed: str, failure: str) -> str:
    return (
        f"There is not enough memory for an update: the optimizer's state and temporary tensors need "
        f"{needed} ({failure}). Everything is as before the window; free memory, or use an optimizer with "
        "less state, foreach=False or fused=True, or gradients or parameters of lower precision (a smaller "
        "micro-batch does not help)."
    )
