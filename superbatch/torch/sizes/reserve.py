"""Check that an update has enough memory, before the optimizer changes anything.

An optimizer that runs out of memory in the middle has moved some parameters and not others, and nothing can
be retried. So the bytes of its step, counted on fake tensors, are allocated and freed before it.
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

# Below, the inspection of the optimizer would take longer than the memory is worth.
LEAST_BYTES = 2**20


class Reserve:
    """Memory that the optimizers of an accumulator need for an update.

    Args:
        models: whose parameters they update.
        optimizers: that make the update.
        owned: their parameters; may change in place.

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
        # Those inside of wrappers, which hold the state.
        self._leaves = [leaf for optimizer in optimizers for leaf in leaves_of(optimizer)]
        self._share = len(
            {id(p) for leaf in self._leaves for group in leaf.param_groups for p in group["params"]}
        )
        self._known: tuple[int, int] | None = None  # number of states, bytes
        self.tight = False

    def require(self) -> None:
        """Check that there is memory for the update: the first one, and each one where memory is tight.

        Raises:
            OutOfMemoryError: there is not.
        """
        # Once all state exists and memory is not tight, an update needs as much as the last one.
        states = sum([len(leaf.state) for leaf in self._leaves])
        if states == min(len(self._owned), self._share) and not self.tight:
            return
        if sum([entry.target.nbytes for entry in self._owned]) < LEAST_BYTES:
            return
        if self._known is None or self._known[0] != states:
            # A dry run takes milliseconds: only where states were added since the last one.
            self._known = (states, self.bytes_of_update())
        needed = self._known[1]
        try:
            self._allocate(needed)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            text = str(error)
        else:
            return
        # The cache holds the blocks that were allocated for the check.
        release_caches(*(entry.target.device for entry in self._owned))
        raise OutOfMemoryError(_text(f"{needed / 2**20:.1f} MiB", text))

    def bytes_of_update(self) -> int:
        """Return the most bytes that a step of the optimizers needs at once beyond those in use now.

        Gradients must be there. 0 where fake tensors cannot run an optimizer.
        """
        ledger = Ledger(self._device, rounded=64)
        try:
            with stand_ins(self._leaves) as lent, faked(self._models, ledger), GuessValues():
                # Copies of the optimizers are counted until here; only the step is wanted.
                ledger.restart()
                before = ledger.live
                for (optimizer,) in lent:
                    # Schedulers wrap the method of the instance, around the real optimizer.
                    type(optimizer).step(optimizer)
                return ledger.restart() - before
        except Exception:  # noqa: BLE001  (of an unknown optimizer, which is stepped for real right after)
            return 0

    @property
    def _device(self) -> torch.device:
        if self._owned:
            return self._owned[0].target.device
        return next(parameter.device for model in self._models for parameter in model.parameters())

    def _allocate(self, needed: int) -> None:
        """Allocate in pieces no larger than the step's own, so that gaps between blocks serve as well."""
        piece = max(entry.target.nbytes for entry in self._owned)
        pieces: list[Tensor] = []
        while needed > 0:
            pieces.append(torch.empty(min(needed, piece), dtype=torch.uint8, device=self._device))
            needed -= piece


def raise_if_out_of_memory(error: BaseException, *, torn: Callable[[], None] | None) -> None:
    """Raise the error for an update that ran out of memory; nothing is tried again.

    Args:
        error: any.
        torn: called where something has moved; None where nothing has.

    Raises:
        OutOfMemoryError: `error` is an allocator's error, not yet one of this library.

    Examples:
        >>> raise_if_out_of_memory(ValueError("something else"), torn=None)
    """
    if isinstance(error, OutOfMemoryError) or not out_of_memory(error):
        return
    if torn is None:
        raise OutOfMemoryError(_text("memory", str(error))) from None
    torn()
    raise OutOfMemoryError(
        f"Memory ran out inside the optimizer's step ({error}): some parameters or states have moved, others "
        "have not. Load a checkpoint; leave the optimizer more memory (foreach=False, a smaller "
        "microbatch_size)."
    ) from None


def _text(needed: str, failure: str) -> str:
    return (
        f"There is no memory for an update: the optimizer's state and its temporary tensors need {needed} "
        f"({failure}). All is as before the window. Use an optimizer with less state, foreach=False or "
        "fused=True, gradients or parameters of lower precision, or free memory: a smaller micro-batch does "
        "not help here."
    )
