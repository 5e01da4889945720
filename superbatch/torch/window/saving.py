"""Saving a window in flight, so that it goes on bit for bit: tensors and plain containers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from superbatch.errors import InputError, WindowError, explain
from superbatch.noise.meter import NoiseMeter

from ..sizes.sizing import Fixed, Sizing, load_sizing
from . import saved_checks
from .digest import digest_of
from .discarding import discard_saved as discard_saved
from .participants.batchnorm import Pooled
from .participants.parameter_gradients import InGrad
from .participants.snapshot import as_plain, restore_random_state

if TYPE_CHECKING:
    from .microbatches import Pieces
    from .open_window import WindowInFlight

WINDOW_KEYS = frozenset(
    {
        "place",
        "microbatches",
        "samples",
        "next",
        "weights",
        "returned",
        "losses",
        "dropped",
        "gradients",
        "key",
        "scale",
    }
    | {"random", "random_before", "state_before", "norms"}
)


def load_sizing_and_noise(state: Mapping[str, Any], sizing: Sizing, meter: NoiseMeter | None) -> Fixed:
    """Go on with an accumulator's sizes and noise: both, or neither.

    Args:
        state: of the accumulator.
        sizing: of batches.
        meter: of the noise, where it is measured.

    Returns:
        The sizes of windows.

    Raises:
        InputError: one of them cannot be read, or the noise was averaged otherwise; nothing has changed.
    """
    if not isinstance(state.get("noise"), Mapping | None):
        raise InputError("The saved noise is no mapping. Pass what Accumulator.state_dict() returned.")
    before = sizing.state_dict()
    of_windows = load_sizing(state, sizing)
    try:
        if meter is not None and state.get("noise") is not None:
            meter.load_state_dict(state["noise"])
    except Exception:  # whatever it is goes on; the sizes must not be those of a state that failed
        sizing.load_state_dict(before)
        raise
    return of_windows


def state_of(window: WindowInFlight) -> dict[str, Any]:
    """Return the sums so far, weights, position, random state, and what a failure restores.

    Raises:
        WindowError: a micro-batch has gone forward, and not yet backward.
    """
    if window._current is not None and window._current not in window._losses:
        raise WindowError(
            explain(
                f"state_dict() between the forward and the backward of micro-batch {window._current}",
                "a forward cannot be saved half way",
                "call it after backward(loss)",
            )
        )
    plan = window._plan
    random = plan.random.now()
    if plan.sample_rng:  # sample streams hide the generator's own state while a micro-batch is worked on
        random["torch"] = window._after_key
    gradients = window._place.state()
    state = {
        "place": _place(window),
        "ranks": (plan.ranks.index, plan.ranks.count),
        "microbatches": len(window._pieces),
        "samples": None if window._pieces.samples is None else list(window._pieces.samples),
        "next": window._next,
        "weights": window._weights.ahead,
        "returned": dict(window._weights.returned),
        "losses": window._losses.state(),
        "dropped": list(window._dropped),
        "gradients": gradients,
        "yet": window._place.yet if isinstance(window._place, InGrad) else 1.0,
        "held": saved_checks.held(gradients),
        "key": window._key,
        "scale": window._scale,
        "random": as_plain(random),
        "random_before": as_plain(plan.random.taken),
        "state_before": plan.state.state(),
        "norms": plan.norms.state() if isinstance(plan.norms, Pooled) else None,
        "noise": None if window._noise is None else window._noise.state(),
    }
    return {**state, "digest": digest_of(state)}


def check_state(window: WindowInFlight, state: dict[str, Any]) -> None:
    """Check that a saved window can go on in this one.

    Raises:
        WindowError: it was another batch, other parameters, or summed in another place.
    """
    plan = window._plan
    expected = saved_checks.Expected(
        len(window._pieces),
        {entry.name: entry.parameter.shape for entry in plan.owned},
        plan.ranks.index,
        plan.ranks.count,
    )
    if state["place"] != _place(window):
        raise WindowError(
            explain(
                f"a window that sums the gradients of {len(window._plan.owned)} parameters in this way",
                "the saved window in flight has other parameters or summed them elsewhere",
                "go on with the same model and options, or call discard() first",
            )
        )
    if state["microbatches"] != len(window._pieces) or state["weights"] != window._weights.ahead:
        raise WindowError(
            explain(
                f"a window of {len(window._pieces)} micro-batches that weigh {window._weights.ahead}",
                f"the saved window in flight has {state['microbatches']} that weigh {state['weights']}",
                "go on with the same batch and micro-batches, or call discard() first",
            )
        )
    saved_checks.check_fit(state, expected)


def cut_as_saved(pieces: Pieces, state: dict[str, Any]) -> None:
    """Cut a window's micro-batches as those of the saved one were: sizes may be found out, or memory ran out.

    Raises:
        WindowError: that is not possible.
    """
    if state["samples"] is not None:
        pieces.follow(state["samples"])


def load_state(window: WindowInFlight, state: dict[str, Any]) -> None:
    """Put an opened window where the saved one was.

    Raises:
        WindowError: losses are now scaled otherwise than those in the saved sums.
    """
    if state["scale"] != window._scale:
        raise WindowError(
            explain(
                f"a GradScaler with scale {window._scale}",
                f"the saved sums were scaled by {state['scale']}",
                "load the scaler's state of the same moment before going on",
            )
        )
    plan = window._plan
    window._next = state["next"]
    window._weights.returned = dict(state["returned"])
    window._losses.load_state(state["losses"])
    window._dropped = list(state["dropped"])
    window._place.load_state(state["gradients"])
    if isinstance(window._place, InGrad):
        window._place.yet = state.get("yet", 1.0)
    window._key = state["key"]
    plan.random.taken = state["random_before"]
    plan.state.load_state(state["state_before"])
    if isinstance(plan.norms, Pooled):
        plan.norms.load_state(state["norms"])
    if window._noise is not None:
        window._noise.load(state.get("noise") or {})
    restore_random_state(state["random"])
    window._after_key = torch.get_rng_state()


def _place(window: WindowInFlight) -> list[str]:
    """What must be the same for sums to be gone on with: how and where they are made, and of what."""
    plan = window._plan
    weigh = plan.weigh if isinstance(plan.weigh, str) else "counted"
    terms = [f"{name}: {term.reduction}" for name, term in plan.declared.terms.items()]
    options = [plan.reduction, *terms, weigh, plan.nonfinite, type(plan.norms).__name__, str(plan.sample_rng)]
    return [window._place.describe(), *options, *(entry.name for entry in plan.owned)]
