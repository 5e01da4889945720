"""The check of what is stated about a loss, on the first window of an accumulator."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import SplitError, StatementError, explain
from ..split import cut, near_equal
from ..tree import plan as plan_of
from .out_of_memory import out_of_memory, release_caches
from .pieces import Pieces
from .plan import Plan
from .probing.problem import Problem
from .statement import check_statement
from .sync import Ranks


def check_first_window(plan: Plan, pieces: Pieces, *, frozen: Sequence[nn.Module]) -> None:
    """Compare losses of micro-batches with those of their parts, before anything is updated.

    Args:
        plan: of the accumulator, with a loss_fn.
        pieces: of the window.
        frozen: BatchNorms to be taken as frozen.

    Raises:
        StatementError, CoupledSamplesError: the loss is not what was stated.
    """
    assert plan.loss_fn is not None
    problem = Problem(
        plan.models[0] if len(plan.models) == 1 else nn.ModuleList(plan.models),
        plan.loss_fn,
        plan.reduction,
        None if plan.weigh == "samples" else plan.weigh,
        whole=pieces.paths.get("whole", ()),
        per_sample=pieces.paths.get("per_sample", ()),
    )
    check_on_all_ranks(problem, pieces.to_check(), plan.ranks, frozen=frozen)


def check_on_all_ranks(
    problem: Problem, pieces: Sequence[Any], ranks: Ranks, *, frozen: Sequence[nn.Module] = ()
) -> None:
    """Run `check_statement` on every rank; one that fails stops all.

    Raises:
        StatementError, CoupledSamplesError: as there, or because another rank's check failed.
    """
    wrong = True
    try:
        with ranks.hold_back():
            _check_in_memory(problem, pieces, frozen)
        wrong = False
    finally:  # on the way out with an error too: the other ranks wait to hear whether to go on
        wrong_ranks = ranks.sum([wrong])[0]
    if wrong_ranks:
        raise StatementError(
            explain(
                "a loss that contradicts its statement on another rank",
                "no rank can go on without it",
                "look at that rank's error",
            )
        )


def _check_in_memory(problem: Problem, pieces: Sequence[Any], frozen: Sequence[nn.Module]) -> None:
    """Check with pieces as large as there is memory for; a sample that does not fit fails in the window."""
    while not _fits(problem, pieces, frozen):
        release_caches(problem.device)
        pieces = [half for piece in pieces[:8] for half in _halves(problem, piece)]


def _fits(problem: Problem, pieces: Sequence[Any], frozen: Sequence[nn.Module]) -> bool:
    try:
        check_statement(problem, pieces, frozen=frozen)
    except BaseException as error:
        if not out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return False
    return True


def _halves(problem: Problem, piece: Any) -> list[Any]:
    try:
        planned = plan_of(piece, whole=problem.whole, per_sample=problem.per_sample)
    except SplitError:
        return []
    if planned.samples < 4:  # a piece of one sample has no parts to compare it with
        return []
    return cut(planned, near_equal(planned.samples, (planned.samples + 1) // 2))
