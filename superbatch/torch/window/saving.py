"""State of an open window, in tensors and plain containers, which resumes bit for bit."""

from __future__ import annotations

from typing import Any

from superbatch.errors import WindowError

from ..devices import local_part
from . import saved_checks
from .digest import digest_of
from .transaction import Transaction


def state_of(window: Transaction) -> dict[str, Any]:
    """Return the states of all participants, and what tells that they fit the window that resumes them.

    Raises:
        WindowError: a micro-batch has gone forward, and not yet backward.
    """
    progress, ranks = window.progress, window.config.sync
    # The graph of that forward cannot be saved.
    if progress.current is not None and progress.current not in progress.losses:
        raise WindowError(
            f"state_dict() was called between the forward and the backward of micro-batch {progress.current}."
            " Call it after backward(loss)."
        )
    state = {"place": _place(window), "ranks": (ranks.index, ranks.count), **window.state_dict()}
    return {**state, "digest": digest_of(state)}


def check_state(window: Transaction, state: dict[str, Any]) -> None:
    """Check that a saved window can be resumed in this one.

    Raises:
        WindowError: it was another batch, other parameters, or summed in another place.
    """
    config = window.config
    expected = saved_checks.Expected(
        len(window.progress.microbatches),
        {entry.name: local_part(entry.parameter).shape for entry in config.owned},
        config.sync.index,
        config.sync.count,
    )
    # The place first: with other parameters, all comparisons below would differ as well.
    if state["place"] != _place(window):
        raise WindowError(
            "The saved window in flight has other parameters, or summed their gradients in another way, than "
            f"this window of {len(config.owned)} parameters. Resume with the same model and options, or call "
            "discard() first."
        )
    progress = window.progress
    count, weights = len(progress.microbatches), progress.weights.ahead
    # Weights too: the factor of each saved gradient came from them.
    if state["microbatches"] != count or state["weights"] != weights:
        raise WindowError(
            f"The saved window in flight has {state['microbatches']} micro-batches with the weights "
            f"{state['weights']}, this one {count} with {weights}. Resume with the same batch, cut in the "
            "same way, or call discard() first."
        )
    saved_checks.check_fit(state, expected)


def _place(window: Transaction) -> list[str]:
    """Return the facts that must be equal to resume sums: their kind, and the names of the parameters."""
    config = window.config
    # A function has no text that could be compared; its numbers are, as weights.
    weigh = config.weigh if isinstance(config.weigh, str) else "counted"
    terms = [f"{name}: {term.reduction}" for name, term in config.declared.terms.items()]
    options = [
        config.reduction,
        *terms,
        weigh,
        config.nonfinite,
        # Frozen, pooled or none: each saves other statistics.
        type(window.norms).__name__,
        str(config.sample_rng),
        *([] if config.extra is None else [type(each).__name__ for each in config.extra.participants]),
    ]
    return [window.gradients.describe(), *options, *(entry.name for entry in config.owned)]
