"""The first-window warning about state that a forward changes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...warn import warn
from .bindings import equal
from .forward_state_keeper import ForwardStateKeeper

_SHOWN = 5  # names


def warn_of_changed_state(keeper: ForwardStateKeeper, run: Callable[[], float | None]) -> None:
    """Warn of state that a forward changes: it would change once per micro-batch, not once per update.

    A tensor that a forward writes to is such state. A value that a forward assigns may also be a result (the
    last features), a cache or a count that no forward reads. So this function runs the same micro-batch
    twice. The value is state if it changes again and, for a number, if the loss changes too.

    Args:
        keeper: keeper that has recorded the state before the last forward.
        run: function that runs a forward, on the same micro-batch each time. It returns the loss, or None if
            the loss is unknown.
    """
    changes = keeper.changes()
    names = [one.name for one in changes if one.sure]
    if len(names) < len(changes):
        keeper.restore()
        # In two runs on one micro-batch a result is the same, and a moving average is not.
        first, before = run(), keeper.contents()
        second, after = run(), keeper.contents()
        # 1e-7 is about the rounding of float32.
        loss_changes = first is None or second is None or abs(second - first) > 1e-7 * abs(first)
        for name in after:
            changes_again = name not in before or not equal(before[name], after[name])
            # A number without effect on the loss is a count, but a tensor may be read in a later window.
            if changes_again and name not in names and (loss_changes or isinstance(after[name], Tensor)):
                names.append(name)
    names = keeper.not_warned_of(names)
    if names:
        warn(
            f"forward() updates the state {_listed(names)} once per micro-batch instead of once per update, "
            "so the update is not exact. Call .eval() on its module; use WholeBatch, which calls loss_fn "
            "once; update the state outside of loss_fn; or pass check=False to accept this."
        )


def _listed(names: list[str]) -> str:
    """Return some of the names as text, beginning with one name of each module or variable."""
    counts: dict[str, int] = {}
    ranks = []
    for name in names:
        owner = name.rpartition(".")[0]
        counts[owner] = counts.get(owner, 0) + 1
        # The n-th name of its module gets the rank n, so that the few names shown cover many modules.
        ranks.append(counts[owner])
    ranked = [name for _, name in sorted(zip(ranks, names, strict=True), key=lambda pair: pair[0])]
    shown = ", ".join(map(repr, ranked[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
