"""The first-window warning about state that a forward changes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...warn import warn
from .bindings import equal
from .moved_state import MovedState

_SHOWN = 5  # names


def warn_of_what_moves(keeper: MovedState, run: Callable[[], float | None]) -> None:
    """Warn of state that a forward changes: it would change once per micro-batch, not once per update.

    A tensor that a forward writes to is such state. A value that it assigns may also be a result (the last
    features), a cache or a count that no forward reads. So the same micro-batch is run twice. The value is
    state if it changes again and, for a number, if the loss changes too.

    Args:
        keeper: has recorded the changes of the last forward.
        run: runs a forward on the same micro-batch each time, and returns the loss, or None if it is unknown.
    """
    moving = keeper.moving()
    names = [one.name for one in moving if one.sure]
    if len(names) < len(moving):
        keeper.restore()
        # In two runs on one micro-batch a result is the same, and a moving average is not.
        first, before = run(), keeper.contents()
        second, after = run(), keeper.contents()
        # 1e-7 is about the rounding of float32.
        depends = first is None or second is None or abs(second - first) > 1e-7 * abs(first)
        for name in after:
            again = name not in before or not equal(before[name], after[name])
            # A number without effect on the loss is a count, but a tensor may be read in a later window.
            if again and name not in names and (depends or isinstance(after[name], Tensor)):
                names.append(name)
    names = keeper.not_said(names)
    if names:
        warn(
            f"the forward changes the state {_listed(names)} once per micro-batch. With the real batch it "
            "would change once per update, so the update is not exact. Change it once per update, outside of "
            "loss_fn; freeze it (eval()); use WholeBatch, which calls loss_fn once; or accept it and pass "
            "check=False."
        )


def _listed(names: list[str]) -> str:
    """List some of the names; the first name of each module or variable comes before its other names."""
    roots: dict[str, int] = {}
    order = []
    for name in names:
        root = name.rpartition(".")[0]
        roots[root] = roots.get(root, 0) + 1
        # First one state of each module, so that the few names shown cover many modules.
        order.append(roots[root])
    ranked = [name for _, name in sorted(zip(order, names, strict=True), key=lambda pair: pair[0])]
    shown = ", ".join(map(repr, ranked[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
