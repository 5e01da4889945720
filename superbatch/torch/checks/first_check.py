"""Check of the declared loss on the first window of an accumulator, and on chosen samples of later ones."""

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
from .announced_forwards import announcing
from .check_samples import first_microbatches
from .checked import Checked
from .declared_loss import check_declaration
from .lengths import Pair, check_lengths
from .probing.problem import Problem, by_term


def check_first_window(config: Config, window: MicrobatchList, *, frozen: Sequence[nn.Module]) -> Checked:
    """Compare losses of micro-batches with those of their parts, before anything is updated.

    The outcome is that of this rank. The `frozen` BatchNorms run in evaluation mode.

    Raises:
        LossSpecError, CoupledSamplesError: the loss contradicts its declaration.
    """
    if not window.microbatches:  # a rank without data
        return check_later_window(config, window, [], frozen=frozen)
    return _check_terms(config, window, first_microbatches(window), frozen)


def check_later_window(
    config: Config, window: MicrobatchList, chosen: Sequence[Any], *, frozen: Sequence[nn.Module]
) -> Checked:
    """Check the loss again, on chosen samples of a later window; every rank calls it.

    `chosen` is empty on a rank without unchecked features; otherwise like `check_first_window`.

    Raises:
        LossSpecError, CoupledSamplesError: the loss contradicts its declaration.
    """
    if not chosen:
        for problem in by_term(_problem(config, window)).values():
            with (
                _agreed(config.sync),
                config.sync.no_sync(),
                announcing(problem, _spare(window.runs), config.sync),
            ):
                pass
        return Checked.of(())
    return _check_terms(config, window, chosen, frozen)


def check_pairs(
    config: Config, window: MicrobatchList, pairs: Sequence[Pair], *, frozen: Sequence[nn.Module]
) -> None:
    """Check the loss on samples of different lengths, which no micro-batch contains; every rank calls it.

    `pairs` are micro-batches with different lengths; they are empty on a rank without such samples.

    Raises:
        LossSpecError: the loss is a mean over all entries, but the declared weight is left out, or counts
            something other than entries or samples.
    """
    sync = config.sync
    with (
        _agreed(sync),
        sync.no_sync(),
        announcing(_problem(config, window), _spare(window.runs), sync) as whole,
    ):
        for pair, problem in product(pairs, by_term(whole).values()):
            if problem.reduction == "mean" and problem.weight != "returned":
                check_lengths(problem, pair, frozen=frozen)


def _spare(trained: Sequence[Any]) -> Any:
    """Return a micro-batch for the forwards that this rank makes for other ranks; None without data."""
    return trained[0] if trained else None


def _problem(config: Config, window: MicrobatchList) -> Problem:
    assert config.loss_fn is not None
    return Problem(
        config.models[0] if len(config.models) == 1 else nn.ModuleList(config.models),
        config.loss_fn,
        config.reduction,
        None if config.weigh == "samples" else config.weigh,
        unsplit=window.paths.get("unsplit", ()),
        per_sample=window.paths.get("per_sample", ()),
        state=config.state,
        terms=config.declared.terms,
    )


def _check_terms(
    config: Config, window: MicrobatchList, chosen: Sequence[Any], frozen: Sequence[nn.Module]
) -> Checked:
    """Check the loss, or each of its terms separately."""
    found: list[Checked] = []
    for name, problem in by_term(_problem(config, window)).items():
        try:
            found.append(check_on_all_ranks(problem, chosen, window.runs, config.sync, frozen=frozen))
        except (LossSpecError, CoupledSamplesError) as error:  # noqa: PERF203  (there are few terms)
            if not name:
                raise
            raise type(error)(f"The loss term {name!r} contradicts its declaration. {error}") from error
    return next((one for one in found if not one.informative), found[0])


def check_on_all_ranks(
    problem: Problem,
    microbatches: Sequence[Any],
    trained: Sequence[Any],
    sync: Sync,
    *,
    frozen: Sequence[nn.Module] = (),
) -> Checked:
    """Run `check_declaration` on every rank; if it raises on one, all ranks raise.

    `trained` are the micro-batches that training evaluates; the first one also serves the forwards that
    other ranks wait for. The outcome is that of this rank.

    Raises:
        LossSpecError, CoupledSamplesError: the loss contradicts its declaration, here or on another rank.
        RankError: another rank failed for another reason, e.g. an error in `loss_fn`.
    """
    with _agreed(sync), sync.no_sync(), announcing(problem, _spare(trained), sync) as announced:
        return _check_in_memory(announced, microbatches, trained, frozen)


@contextmanager
def _agreed(sync: Sync) -> Iterator[None]:
    """Vote with the other ranks after the body: if the check has failed on one of them, all raise.

    Raises:
        LossSpecError: the loss contradicts its declaration on another rank.
    """
    try:
        yield
    except (LossSpecError, CoupledSamplesError):
        sync.vote(raised=True)
        raise
    # The window announces any other error, as it does without a check; the other ranks then raise RankError
    # with its text in this vote.
    if sync.vote(raised=False):
        raise LossSpecError(
            "The loss on another rank contradicts its declaration, so no rank makes this update. Read the "
            "error of that rank, and correct the declaration."
        )


def _check_in_memory(
    problem: Problem, microbatches: Sequence[Any], trained: Sequence[Any], frozen: Sequence[nn.Module]
) -> Checked:
    """Check micro-batches, halved until they fit in memory."""
    while (checked := _check_that_fits(problem, microbatches, trained, frozen)) is None:
        release_caches(*accelerators([problem.model]))
        microbatches = [half for microbatch in microbatches[:8] for half in _halves(problem, microbatch)]
    return checked


def _check_that_fits(
    problem: Problem, microbatches: Sequence[Any], trained: Sequence[Any], frozen: Sequence[nn.Module]
) -> Checked | None:
    try:
        return check_declaration(problem, microbatches, trained=trained, frozen=frozen)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        # The frames keep tensors of the failed evaluation alive.
        traceback.clear_frames(error.__traceback__)
        return None


def _halves(problem: Problem, microbatch: Any) -> list[Any]:
    try:
        planned = plan_of(microbatch, **problem.paths)
    except SplitError:
        return []
    if planned.samples < 4:  # a half of one sample cannot be cut and compared
        return []
    return cut(planned, near_equal(planned.samples, (planned.samples + 1) // 2))
