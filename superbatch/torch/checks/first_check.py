"""The check of what is stated about a loss, on the first window of an accumulator."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from torch import nn

from superbatch.batch.split import cut, near_equal
from superbatch.batch.tree import plan as plan_of
from superbatch.errors import CoupledSamplesError, LossSpecError, SplitError

from ..devices import accelerators
from ..memory.out_of_memory import out_of_memory, release_caches
from ..window.config import Config
from ..window.microbatches import MicrobatchList
from ..window.sync.sync import Sync
from .check_pieces import first_pieces
from .checked import Checked
from .declared_loss import check_statement
from .in_step import in_step
from .lengths import Pair, check_lengths
from .probing.problem import Problem, by_term


def check_first_window(config: Config, pieces: MicrobatchList, *, frozen: Sequence[nn.Module]) -> Checked:
    """Compare losses of micro-batches with those of their parts, before anything is updated.

    Args:
        config: of the accumulator, with a loss_fn.
        pieces: of the window.
        frozen: BatchNorms to be taken as frozen.

    Returns:
        Whether a wrong statement could have shown, on this rank.

    Raises:
        LossSpecError, CoupledSamplesError: the loss is not what was stated.
    """
    if not pieces.microbatches:  # a rank without data
        return check_later_window(config, pieces, [], frozen=frozen)
    return _check_terms(config, pieces, first_pieces(pieces), frozen)


def check_later_window(
    config: Config, pieces: MicrobatchList, chosen: Sequence[Any], *, frozen: Sequence[nn.Module]
) -> Checked:
    """Check the loss again, on chosen samples of a later window; every rank takes part.

    Args:
        config: of the accumulator, with a loss_fn.
        pieces: of the window.
        chosen: micro-batches; none on a rank that has nothing to show.
        frozen: BatchNorms to be taken as frozen.

    Returns:
        Whether a wrong statement could have shown, on this rank.

    Raises:
        LossSpecError, CoupledSamplesError: the loss is not what was stated.
    """
    if not chosen:
        for problem in by_term(_problem(config, pieces)).values():
            with _told(config.sync), config.sync.no_sync(), in_step(problem, _spare(pieces), config.sync):
                pass
        return Checked.of(())
    return _check_terms(config, pieces, chosen, frozen)


def check_pairs(
    config: Config, pieces: MicrobatchList, pairs: Sequence[Pair], *, frozen: Sequence[nn.Module]
) -> None:
    """Check the loss on two samples of different lengths, which no micro-batch mixes; every rank takes part.

    Args:
        config: of the accumulator, with a loss_fn.
        pieces: of the window.
        pairs: of micro-batches; none on a rank that has nothing to show.
        frozen: BatchNorms to be taken as frozen.

    Raises:
        LossSpecError: the loss is a mean over all entries, and samples are declared to count alike, or by
            something else than those entries.
    """
    sync = config.sync
    with _told(sync), sync.no_sync(), in_step(_problem(config, pieces), _spare(pieces), sync) as whole:
        for pair, problem in product(pairs, by_term(whole).values()):
            if problem.reduction == "mean" and problem.weight != "returned":
                check_lengths(problem, pair, frozen=frozen)


def _spare(pieces: MicrobatchList) -> Any:
    """Return a micro-batch for forwards that other ranks announce; None on a rank without data."""
    return pieces.runs[0] if pieces.runs else None


def _problem(config: Config, pieces: MicrobatchList) -> Problem:
    assert config.loss_fn is not None
    return Problem(
        config.models[0] if len(config.models) == 1 else nn.ModuleList(config.models),
        config.loss_fn,
        config.reduction,
        None if config.weigh == "samples" else config.weigh,
        unsplit=pieces.paths.get("unsplit", ()),
        per_sample=pieces.paths.get("per_sample", ()),
        state=config.state,
        terms=config.declared.terms,
    )


def _check_terms(
    config: Config, pieces: MicrobatchList, chosen: Sequence[Any], frozen: Sequence[nn.Module]
) -> Checked:
    """Check the loss, or each term of it by itself."""
    found: list[Checked] = []
    for name, problem in by_term(_problem(config, pieces)).items():
        try:
            found.append(check_on_all_ranks(problem, chosen, _spare(pieces), config.sync, frozen=frozen))
        except (LossSpecError, CoupledSamplesError) as error:  # noqa: PERF203  (there are few terms)
            if not name:
                raise
            raise type(error)(f"The term {name!r} is not what was declared. {error}") from error
    return next((one for one in found if not one.informative), found[0])


def check_on_all_ranks(
    problem: Problem, pieces: Sequence[Any], idle: Any, sync: Sync, *, frozen: Sequence[nn.Module] = ()
) -> Checked:
    """Run `check_statement` on every rank; one that fails stops all.

    Args:
        problem: to check.
        pieces: to check it on.
        idle: a micro-batch for forwards that other ranks wait for.
        sync: the ranks.
        frozen: BatchNorms to be taken as frozen.

    Returns:
        Whether a wrong statement could have shown, on this rank.

    Raises:
        LossSpecError, CoupledSamplesError: as there, or because another rank's check failed.
        RankError: another rank failed otherwise, as by an error of `loss_fn`.
    """
    with _told(sync), sync.no_sync(), in_step(problem, idle, sync) as announced:
        return _check_in_memory(announced, pieces, frozen)


@contextmanager
def _told(sync: Sync) -> Iterator[None]:
    """Tell the other ranks how the check in the body goes here, and hear how it goes there.

    Raises:
        LossSpecError: the loss contradicts its declaration on another rank.
    """
    try:
        yield
    except (LossSpecError, CoupledSamplesError):
        sync.vote(raised=True)
        raise
    # Any other error is told by the window that it ends, as in a window without a check: the others raise
    # RankError with its text in the vote here.
    if sync.vote(raised=False):
        raise LossSpecError(
            "The loss on another rank contradicts what was declared, so no rank makes this update. Correct "
            "what the error of that rank names."
        )


def _check_in_memory(problem: Problem, pieces: Sequence[Any], frozen: Sequence[nn.Module]) -> Checked:
    """Check with pieces as large as there is memory for; a sample that does not fit fails in the window."""
    while (checked := _check_that_fits(problem, pieces, frozen)) is None:
        release_caches(*accelerators([problem.model]))
        pieces = [half for piece in pieces[:8] for half in _halves(problem, piece)]
    return checked


def _check_that_fits(problem: Problem, pieces: Sequence[Any], frozen: Sequence[nn.Module]) -> Checked | None:
    try:
        return check_statement(problem, pieces, frozen=frozen)
    except BaseException as error:
        if not out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return None


def _halves(problem: Problem, piece: Any) -> list[Any]:
    try:
        planned = plan_of(piece, unsplit=problem.unsplit, per_sample=problem.per_sample)
    except SplitError:
        return []
    if planned.samples < 4:  # a piece of one sample has no parts to compare it with
        return []
    return cut(planned, near_equal(planned.samples, (planned.samples + 1) // 2))
