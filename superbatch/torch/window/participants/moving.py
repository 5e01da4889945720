"""The warning of state that a forward moves, at the first window."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...warn import warn
from .bindings import equal
from .moved_state import MovedState

_SHOWN = 5  # names


def warn_of_what_moves(keeper: MovedState, run: Callable[[], float | None]) -> None:
    """Warn of state that a forward moves: it would move once per micro-batch, not once per update.

    A tensor that a forward writes to is such a state. What it binds anew may as well be a result (the last
    features), a cache or a count that nobody reads: the same micro-batch is run twice to see whether it moves
    again, and for numbers whether the loss depends on it.

    Args:
        keeper: with what the last forward has moved.
        run: runs a forward on the same micro-batch each time; returns the loss, None where that is not known.
    """
    moving = keeper.moving()
    names = [one.name for one in moving if one.sure]
    if len(names) < len(moving):
        keeper.restore()
        # Two runs on one micro-batch: a result is equal both times, a moving average is not.
        first, before = run(), keeper.contents()
        second, after = run(), keeper.contents()
        # Relative to the loss: 1e-7 is about float32's rounding.
        depends = first is None or second is None or abs(second - first) > 1e-7 * abs(first)
        for name in after:
            again = name not in before or not equal(before[name], after[name])
            # A number that the loss does not depend on is a counter; a tensor may be read in a later window.
            if again and name not in names and (depends or isinstance(after[name], Tensor)):
                names.append(name)
    names = keeper.not_said(names)
    if names:
        warn(
            f"the forward changes the state {_listed(names)} once per micro-batch, where the real batch "
            "changes it once per update, so the update is not exactly that of the real batch. Change it once "
            "per update, outside of loss_fn; or freeze it (eval()), use WholeBatch, which calls loss_fn "
            "once, or accept it and pass check=False."
        )


def _listed(names: list[str]) -> str:
    """List some of the names, so that the first one of each module or variable comes before its others."""
    roots: dict[str, int] = {}
    order = []
    for name in names:
        # The second buffer of one BatchNorm says less than the first of another.
        root = name.rpartition(".")[0]
        roots[root] = roots.get(root, 0) + 1
        order.append(roots[root])
    ranked = [name for _, name in sorted(zip(order, names, strict=True), key=lambda pair: pair[0])]
    shown = ", ".join(map(repr, ranked[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
