"""Checks of a loss on ranks whose forwards wait for each other, as in sharded models.

The number of evaluations depends on the samples of a rank: a difference is evaluated again, and a remedy is
searched for. So a rank announces each evaluation, and ranks that have finished run a forward for each
evaluation that others announce.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from superbatch.batch.tree import plan
from superbatch.errors import SplitError

from ..memory.out_of_memory import out_of_memory
from ..window.sync.sync import Sync
from .declared_loss import prepared
from .probing.problem import Problem, evaluate
from .probing.resample import converted


@contextmanager
def announcing(problem: Problem, microbatch: Any, sync: Sync) -> Iterator[Problem]:
    """Yield the problem to check; if forwards wait for other ranks, it announces each of its forwards.

    Args:
        problem: problem whose loss is evaluated any number of times, or never.
        microbatch: micro-batch of this rank for the forwards that other ranks announce.
        sync: the ranks; each of them must enter and leave the context.

    Examples:
        >>> from torch import nn
        >>> from superbatch.torch.window.sync.local import Local
        >>> problem = Problem(nn.Linear(1, 1), lambda x: x.sum())
        >>> with announcing(problem, None, Local()) as checked:
        ...     checked is problem
        True
    """
    if not sync.has_collective_forwards:
        yield problem
        return
    guarded = replace(problem, loss_fn=partial(_with_other_ranks, problem, microbatch, sync))
    try:
        # A vote with raised=True announces a forward; ranks that have finished answer it below.
        yield replace(guarded, announce=partial(sync.vote, raised=True))
    finally:  # after an error too, because the other ranks still run forwards
        with prepared(problem) as (evaluation, _):
            while sync.vote(raised=False):
                evaluation.begin()
                with suppress(Exception):  # its loss is not used
                    evaluate(guarded, microbatch)


def _with_other_ranks(problem: Problem, spare: Any, sync: Sync, microbatch: Any) -> Any:
    """Return the loss of a micro-batch; after an error, take part in the collectives of other ranks."""
    sync.reshard()  # the attributes of the modules may have been restored
    sync.begin_microbatch(last=False, zero_weight=True)
    try:
        return problem.loss_fn(microbatch)
    except Exception as error:  # any kind, because it is raised again
        if out_of_memory(error):
            traceback.clear_frames(error.__traceback__)
        # The other ranks wait in this forward, so one sample completes it for them.
        part = spare
        with suppress(SplitError):
            part = plan(spare, unsplit=problem.unsplit, per_sample=problem.per_sample).take(0, 1)
        forward = partial(problem.loss_fn, converted(part, problem.dtype, problem.device))
        sync.catch_up([forward], backward=False)
        raise
