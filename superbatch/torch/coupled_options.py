"""Checks of the options of `WholeBatch` and `WholeGradient`, which lack some options of `Accumulator`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError
from .options import GhostBatchNorm, PerSampleRandom
from .window.coupled_work import Rng
from .window.options import is_size
from .window.validation import check_choice


def check_coupled(
    loss_fn: object,
    microbatch_size: object,
    rng: object,
    nonfinite: object,
    participants: object,
    weight: object,
) -> None:
    """Raise InputError if an option of a loss whose samples are coupled has the wrong type or value."""
    # Required, because a user's own loop cannot compute a coupled loss one micro-batch at a time.
    if not callable(loss_fn):
        raise InputError(
            f"loss_fn={loss_fn!r} is not a function. Pass a function batch -> loss, which is called once, "
            "with the whole batch."
        )
    if not is_size(microbatch_size) or microbatch_size == "largest":
        raise InputError(
            f'microbatch_size={microbatch_size!r} is not a number of samples. Pass a positive int, "auto", '
            "or None for all at once; the update does not depend on it."
        )
    check_choice(rng, "rng", Rng)
    # A NaN in one sample reaches the loss of all samples, so no micro-batch can be left out.
    if nonfinite == "skip_microbatch":
        raise InputError(
            'nonfinite="skip_microbatch" does not work here: a micro-batch of coupled samples cannot be left '
            'out. Pass nonfinite="skip_update" or "raise".'
        )
    # `engine_of` checks all other objects.
    for each in participants if isinstance(participants, Sequence) else ():
        if isinstance(each, GhostBatchNorm):
            raise InputError(
                "GhostBatchNorm normalises each micro-batch by itself, but here BatchNorm normalises the "
                "whole batch. Remove it from participants=, or use Accumulator."
            )
        if isinstance(each, PerSampleRandom):
            raise InputError(
                "PerSampleRandom needs samples that are not coupled. Remove it from participants= and pass "
                'rng="batch": random operators then draw what they draw for the large batch.'
            )
    if weight is not None and not callable(weight):
        raise InputError(
            f"weight={weight!r} is not a function. Pass a function of this rank's batch, such as "
            'count_tokens("labels"), or omit weight= to weigh a rank by its samples.'
        )
