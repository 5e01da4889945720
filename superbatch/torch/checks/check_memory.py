"""Record of the checks of a loss, and its saved form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from superbatch.errors import InputError

# Without "routine", which states of older versions lack; "microbatches" is kept beside the memory.
_KEYS = ("compared", "seen", "unverified", "microbatches", "spent", "said")


@dataclass(frozen=True)
class Memory:
    """Record of the checks of a loss so far.

    Attributes:
        compared: whether losses that are not 0 were compared.
        seen: the largest contrast of each count that was compared.
        unverified: the first update that was made without a check that could have shown an error.
        spent: calls of `loss_fn` for further checks.
        said: news that was checked once, whatever it cost.
        routine: number of the last window that was checked again.
    """

    compared: bool = False
    seen: Mapping[str, float] = field(default_factory=dict)
    unverified: int | None = None
    spent: int = 0
    said: Sequence[str] = ()
    routine: int = 0


def check_saved_checks(state: object) -> None:
    """Check that a state is one that `CheckSchedule.state_dict` returned, or None, from an older version.

    Raises:
        InputError: it is something else.

    Examples:
        >>> check_saved_checks(None)
    """
    # More keys are fine. A missing one would fail only in the middle of load_state_dict.
    if state is None or (
        isinstance(state, Mapping) and state.keys() >= set(_KEYS) and isinstance(state["microbatches"], int)
    ):
        return
    raise InputError("The state of the check is incomplete. Pass what Accumulator.state_dict() returned.")
