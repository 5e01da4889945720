"""Options of `WholeBatch` and `WholeGradient` that separate samples have, and coupled ones have not."""

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
    """Check the options of a loss whose samples are coupled.

    Args:
        loss_fn: of the batch.
        microbatch_size: samples, ``"auto"`` or None.
        rng: ``"microbatch"`` or ``"batch"``.
        nonfinite: ``"raise"`` or ``"skip_update"``.
        participants: of the user.
        weight: of a rank's batch; None: its samples.

    Raises:
        InputError: one of them has the wrong type or value.
    """
    # Required here: a coupled loss cannot be taken micro-batch by micro-batch from an owned loop.
    if not callable(loss_fn):
        raise InputError(
            f"loss_fn={loss_fn!r} cannot be called. Pass a function batch -> loss: it is called once, with "
            "the whole batch."
        )
    if not is_size(microbatch_size) or microbatch_size == "largest":
        raise InputError(
            f'microbatch_size={microbatch_size!r} is no number of samples. Pass a positive int, "auto", or '
            "None for all at once; the update does not depend on it."
        )
    check_choice(rng, "rng", Rng)
    # A row of the batch that is not finite has reached the loss of all the others.
    if nonfinite == "skip_microbatch":
        raise InputError(
            "A micro-batch cannot be left out where samples are coupled. "
            'Pass nonfinite="skip_update" or "raise".'
        )
    # Any other object is checked as a participant when the engine is made.
    for each in participants if isinstance(participants, Sequence) else ():
        if isinstance(each, GhostBatchNorm):
            raise InputError(
                "GhostBatchNorm normalises each micro-batch by itself, and a whole batch is normalised as "
                "one. Leave it out, or use Accumulator."
            )
        if isinstance(each, PerSampleRandom):
            raise InputError(
                'PerSampleRandom is for separate samples. Pass rng="batch" to draw what the large batch '
                "draws."
            )
    if weight is not None and not callable(weight):
        raise InputError(
            f"weight={weight!r} is no function. Pass a function of this rank's batch, such as "
            'count_tokens("labels"), or leave it out: a rank weighs as its samples.'
        )
