"""Record of the checks of a loss, and the test of its saved form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from superbatch.errors import InputError

# Required keys of a saved state: "routine" is missing in older versions, "microbatches" is not in the record.
_KEYS = ("compared", "seen", "unverified", "microbatches", "spent", "said")


@dataclass(frozen=True)
class CheckRecord:
    """Record of the checks of a loss so far.

    Attributes:
        compared: losses other than 0 were compared.
        seen: largest contrast (`sample_counts.contrast_of_cut`) of each count that was compared, by its name.
        unverified: first update made without a check that could have found an error; None if there is none.
        spent: calls of `loss_fn` for checks after the first window.
        said: names of the features that were checked; a further check of one needs room in the budget.
        routine: number of the last window that was checked again.
    """

    compared: bool = False
    seen: Mapping[str, float] = field(default_factory=dict)
    unverified: int | None = None
    spent: int = 0
    said: Sequence[str] = ()
    routine: int = 0


def check_saved_checks(state: object) -> None:
    """Validate a state of `CheckSchedule.state_dict`; None, from an older version, is valid.

    Raises:
        InputError: a key is missing, or the state is no mapping.

    Examples:
        >>> check_saved_checks(None)
    """
    # Additional keys are fine. A missing one would otherwise fail in the middle of load_state_dict.
    if state is None or (
        isinstance(state, Mapping) and state.keys() >= set(_KEYS) and isinstance(state["microbatches"], int)
    ):
        return
    raise InputError(
        "The saved state of the loss check is incomplete. Pass what Accumulator.state_dict() returned."
    )
