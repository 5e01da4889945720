"""Run a study: train a recipe in several arms from several seeds, and draw a conclusion from all runs.

The file `study_NAME` has the study's own part: `design`, which lists the arms and says how to train and
compare them, or `run`, which puts the report of another command into the form of a study. Seeds, processes,
progress, interruption and the report are the same for all studies; they are in this file.
"""

from __future__ import annotations

import importlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.comparison import Comparison
from ..report.study import Quantity, Study, StudyArm, StudyTest
from ..report.surveys import Surveys
from . import quick, shared_options
from .catalogue import DOCUMENTATION, entry_of
from .checks import check_counts, check_positive, check_workers
from .on_torch import torch_threads
from .options import StudyOptions as Options
from .shared_options import Interrupted, Show, given_options, report_fields, silent
from .statistics import limits_of
from .workers import Receiver, Train, train_seeds

OPTIONS_OF_SOME_STUDIES = (
    "samples",
    "batch_size",
    "learning_rate",
    "optimizer",
    "margin",
    "tolerance",
    "device",
)
TOO_FEW = "Too few runs were finished to conclude anything."

DEFAULTS = Options()


@dataclass(frozen=True, kw_only=True)
class StudyConclusions:
    """Conclusions from the finished runs."""

    tests: Sequence[StudyTest | None]  # between arms; None where there were too few runs for a test
    conclusion: str = TOO_FEW  # one sentence
    # Name of an arm -> quantities that are computed from all runs together.
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


@dataclass(frozen=True, kw_only=True)
class Design:
    """The study's own part: arms, training, columns of the table, and conclusions."""

    arms: tuple[StudyArm, ...]  # without runs
    train: Train  # trains every arm from one seed
    ticks: int  # units of work of one seed
    quantities: tuple[Quantity, ...]  # columns of the table
    progress_quantity: str  # the quantity that the progress shows
    fixed: dict[str, str]  # what all runs share: name -> text
    notes: tuple[str, ...]  # what the study does not show, and what else a reader needs to know
    conclude: Callable[[tuple[StudyArm, ...]], StudyConclusions]  # called with the arms and their runs
    curve_at: tuple[float, ...] = ()  # x values of the runs' curves
    samples: int = 0  # samples of a run, for ``--quick`` to reduce; 0: the length cannot be changed
    shortest: int = 0  # the fewest samples with which a run is meaningful


MakeDesign = Callable[..., Design]  # called with (recipe, options=)


def study(
    name: str, recipe: str | Recipe = "digits", options: Options = DEFAULTS, *, progress: Show = silent
) -> Study:
    """Run one of the studies on a recipe.

    Args:
        name: name of the study, one of `superbatch.lab.studies.catalogue.STUDIES`.
        recipe: a name that `superbatch.lab.recipes.load_recipe` takes, or a recipe.
        options: options that differ from the study's defaults.
        progress: called with the progress from time to time, in this thread.

    Returns:
        The report.

    Raises:
        InputError: the study does not exist, or cannot use one of the options.
        Interrupted: on Ctrl-C. It carries the partial report.

    Examples:
        >>> report = study("precision", options=Options(runs=1, quick=True))
        >>> report.arm("naive sum, bfloat16").mean("K = 256") > 1e-2
        True
    """
    _check(name, recipe, options)
    # Imported only now: the studies load torch, scipy and more.
    module: Any = importlib.import_module(f".study_{name.replace('-', '_')}", __package__)
    run = getattr(module, "run", None) or partial(run_design, name, module.design)
    with torch_threads(options.threads):
        return run(recipe, options, progress)


def seeds_of(name: str, options: Options) -> tuple[int, ...]:
    """Return the seeds of a study: consecutive numbers from its first seed, by default 0."""
    entry = entry_of(name)
    runs = options.runs or (entry.quick_runs if options.quick else entry.runs)
    return tuple(range(entry.first_seed, entry.first_seed + runs))


def recipe_for_study(recipe: str | Recipe, options: Options) -> Recipe:
    """Return the recipe, which must have the fields that studies need."""
    resolved = shared_options.resolve_recipe(recipe, options)
    resolved.require("evaluate", "metric", "margin", "learning_rates", by="superbatch study")
    return resolved


def run_design(
    name: str, make_design: MakeDesign, recipe: str | Recipe, options: Options, progress: Show
) -> Study:
    """Train all arms from all seeds, in this process or several, and make the report."""
    start = time.monotonic()
    task = recipe_for_study(recipe, options)
    seeds = seeds_of(name, options)
    design, notes = _shortened_design(
        task, options, make_design, runs=seeds_per_process(recipe, options, seeds)
    )
    receiver = Receiver(
        [arm.name for arm in design.arms],
        len(seeds) * design.ticks,
        progress,
        lambda run: run.values.get(design.progress_quantity, math.nan),
    )

    def report(*, partial: bool) -> Study:
        arms = tuple(
            # Worker processes finish seeds in any order.
            replace(arm, runs=tuple(sorted(runs, key=lambda run: run.seed)))
            for arm, runs in zip(design.arms, receiver.runs, strict=True)
        )
        conclusions = design.conclude(arms)
        tests = tuple(test for test in conclusions.tests if test is not None)
        return Study(
            **report_fields(task, options, start, partial=partial, torch=torch.__version__),
            name=name,
            question=entry_of(name).question,
            setting=design.fixed,
            quantities=design.quantities,
            arms=tuple(
                replace(arm, facts={**arm.facts, **conclusions.facts.get(arm.name, {})}) for arm in arms
            ),
            tests=tests,
            conclusion=conclusions.conclusion,
            curve_at=design.curve_at,
            seeds=seeds,
            notes=(
                *design.notes,
                *limits_of(test.result for test in tests),
                *notes,
                documentation_note(name),
            ),
        )

    try:
        train_seeds(recipe, task, design.train, seeds, receiver, options=options)
    except KeyboardInterrupt:
        raise Interrupted(report(partial=True)) from None
    return report(partial=False)


def seeds_per_process(recipe: str | Recipe, options: Options, seeds: Sequence[int]) -> int:
    """Return the number of seeds that one process trains, one after the other."""
    return math.ceil(len(seeds) / options.workers) if isinstance(recipe, str) else len(seeds)


def _shortened_design(
    recipe: Recipe, options: Options, make_design: MakeDesign, *, runs: int
) -> tuple[Design, tuple[str, ...]]:
    """Make the design; with ``--quick`` reduce the samples of its runs to fit the time, and add a note."""
    design = make_design(recipe, options=options)
    if not options.quick or options.samples is not None or not design.samples:
        return design, ()

    def cost(samples: int) -> float:
        short = make_design(recipe, options=replace(options, samples=samples))
        return quick.seconds_of(lambda: list(short.train(recipe, seed=0, tick=lambda _: None)))

    samples, fits = quick.affordable(cost, least=design.shortest, most=design.samples, runs=runs)
    if samples == design.samples:
        return design, ()
    shorter = make_design(recipe, options=replace(options, samples=samples))
    return shorter, (quick.note(f"{samples:,} samples", fits=fits),)


def options_for(kind: Callable[..., Any], options: Options, **values: Any) -> Any:
    """Return options of another command: `values`, and for other fields those of the study's options."""
    names = inspect.signature(kind).parameters.keys() & vars(options).keys() - values.keys()
    return kind(**{name: getattr(options, name) for name in names}, **values)


def as_study(name: str, report: Comparison | Surveys, options: Options, **fields: Any) -> Study:
    """Return the report of another command as a study; `fields` has those that differ."""
    notes = (*report.notes, *fields.pop("notes", ()), documentation_note(name))
    return Study(
        name=name,
        question=entry_of(name).question,
        recipe=report.recipe,
        description=report.description,
        seconds=report.seconds,
        partial=report.partial,
        versions=report.versions,
        command=given_options(options),
        notes=notes,
        **fields,
    )


def documentation_note(name: str) -> str:
    """Return the note that links to the study's section of the documentation."""
    return (
        f"How the numbers are measured, and what they do not show: {DOCUMENTATION}#{entry_of(name).section}"
    )


def _check(name: str, recipe: str | Recipe, options: Options) -> None:
    """Raise `InputError` for an option that this study cannot use."""
    entry = entry_of(name)
    given = [option for option in OPTIONS_OF_SOME_STUDIES if getattr(options, option) is not None]
    if useless := [option for option in given if option not in entry.takes]:
        raise InputError(
            f"The study {name!r} does not use {useless[0]}={getattr(options, useless[0])!r}. Leave it out; "
            f"this study takes {', '.join(entry.takes) or 'runs, threads and workers'}."
        )
    check_counts(options, "runs", "samples", "batch_size", "threads", "workers")
    check_positive(options, "learning_rate", "margin", "tolerance")
    check_workers(recipe, options)
