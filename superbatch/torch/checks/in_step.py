"""Checks of a loss on ranks whose forwards wait for each other, as those of sharded models do.

How often a rank evaluates the loss depends on its samples: a difference is evaluated again, a remedy is
looked for. So each evaluation is announced, and a rank that has finished its own runs a forward for each of
those that other ranks announce.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..window.sync.sync import Sync
from .declared_loss import prepared
from .probing.problem import Problem, evaluate


@contextmanager
def in_step(problem: Problem, microbatch: Any, sync: Sync) -> Iterator[Problem]:
    """Yield the problem to check; where forwards wait for other ranks, each of its forwards is announced.

    Args:
        problem: whose loss is evaluated any number of times, none included.
        microbatch: of this rank, for the forwards that other ranks announce.
        sync: the ranks; each enters and leaves the context.

    Examples:
        >>> from torch import nn
        >>> from superbatch.torch.window.sync.local import Local
        >>> problem = Problem(nn.Linear(1, 1), lambda x: x.sum())
        >>> with in_step(problem, None, Local()) as checked:
        ...     checked is problem
        True
    """
    if not sync.in_step:
        yield problem
        return
    try:
        yield replace(problem, announce=partial(_announce, sync))
    finally:  # after an error too: the other ranks still evaluate
        with prepared(problem) as (evaluation, _):
            while sync.vote(raised=False):
                evaluation.begin()
                sync.reshard()
                with suppress(Exception):  # its loss is not used
                    evaluate(problem, microbatch)


def _announce(sync: Sync) -> None:
    """Announce a forward, from the sharded parameters: the modules' attributes may have been restored."""
    sync.reshard()
    sync.vote(raised=True)
