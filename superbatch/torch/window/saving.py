"""Saving and checking of the state of an open window, which resumes bit for bit."""

from __future__ import annotations

from typing import Any

from superbatch.errors import WindowError

from ..devices import local_part
from . import saved_checks
from .digest import digest_of
from .transaction import Transaction


def state_of(window: Transaction) -> dict[str, Any]:
    """Return the states of all participants, and values that `check_state` compares.

    Raises:
        WindowError: a micro-batch is between its forward and its backward.
    """
    progress, ranks = window.progress, window.config.sync
    # The graph of a forward cannot be saved.
    if progress.current is not None and progress.current not in progress.losses:
        raise WindowError(
            f"state_dict() was called between the forward and the backward of micro-batch {progress.current}."
            " Call it after backward(loss)."
        )
    state = {"identity": _identity(window), "ranks": (ranks.index, ranks.count), **window.state_dict()}
    return {**state, "digest": digest_of(state)}


def check_state(window: Transaction, state: dict[str, Any]) -> None:
    """Raise `WindowError` if a saved window has another batch, other parameters or other options."""
    config = window.config
    expected = saved_checks.Expected(
        len(window.progress.microbatches),
        {entry.name: local_part(entry.parameter).shape for entry in config.owned},
        config.sync.index,
        config.sync.count,
    )
    # First, because with other parameters all comparisons below would fail as well.
    if state["identity"] != _identity(window):
        raise WindowError(
            f"The saved window has other parameters or options than this window of {len(config.owned)} "
            "parameters. Make the Accumulator with the same model and options, or call discard() first."
        )
    progress = window.progress
    count, weights = len(progress.microbatches), progress.weights.ahead
    # The weights must agree, because the saved gradients were multiplied by them.
    if state["microbatches"] != count or state["weights"] != weights:
        raise WindowError(
            f"The saved window has {state['microbatches']} micro-batches with the weights "
            f"{state['weights']}, but this one has {count} with {weights}. Pass the batch of the saved "
            "window, cut in the same way, or call discard() first."
        )
    saved_checks.check_fit(state, expected)


def _identity(window: Transaction) -> list[str]:
    """Return values that must be equal on resuming: kind of gradient sum, options, names of parameters."""
    config = window.config
    # A weight function cannot be compared; `check_state` compares the weights that it returned.
    weigh = config.weigh if isinstance(config.weigh, str) else "counted"
    terms = [f"{name}: {term.reduction}" for name, term in config.declared.terms.items()]
    options = [
        config.reduction,
        *terms,
        weigh,
        config.nonfinite,
        # Frozen or pooled BatchNorms save different statistics.
        type(window.norms).__name__,
        str(config.sample_rng),
        *(
            []
            if config.user_participants is None
            else [type(each).__name__ for each in config.user_participants.participants]
        ),
    ]
    return [window.gradients.describe(), *options, *(entry.name for entry in config.owned)]
