"""Run a study: a recipe in several arms, from several seeds, and what the arms say together.

The file `study_NAME` has the study's own part: `design`, which says what the arms are, how one seed is
trained and what is concluded, or `run`, where another command is put into the form of a study. All else -
seeds, processes, progress, interruption, the report - is here, once.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from superbatch.errors import InputError

from ..recipes import Recipe, load_recipe
from ..report.comparison import Comparison
from ..report.study import Quantity, Study, StudyArm, StudyRun, StudyTest
from ..report.surveys import Surveys
from . import quick
from .catalogue import DOCUMENTATION, entry_of
from .on_torch import torch_threads
from .options import StudyOptions as Options
from .shared_options import Interrupted, asked, check_counts, check_positive
from .shared_options import Progress as Progress
from .statistics import limits_of
from .versions import origin
from .workers import Train, receiver, train_seeds

# Options that not every study takes.
SELDOM = ("samples", "batch_size", "learning_rate", "optimizer", "margin", "tolerance", "device")

DEFAULTS = Options()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings from the runs: the tests, one sentence, and what to know beside it."""

    tests: tuple[StudyTest, ...]  # between arms
    conclusion: str  # in one sentence
    notes: tuple[str, ...]  # what to know beside it
    # name of an arm -> quantities of it that only all runs together tell
    facts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


@dataclass(frozen=True, kw_only=True)
class Design:
    """Parts of a study that are its own."""

    arms: tuple[StudyArm, ...]  # without runs, in the order of `setting.arms`
    setting: Any  # what a worker process needs, with the attribute ``arms``
    train: Train  # trains every arm from one seed
    ticks: int  # units of work of one seed
    quantities: tuple[Quantity, ...]  # columns of the table
    headline: str  # the quantity that is shown while it runs
    fixed: dict[str, str]  # what was held fixed, in words
    # arms with their runs -> tests, conclusion, notes. There may be no run at all
    find: Callable[[tuple[StudyArm, ...]], Findings]
    curve_at: tuple[float, ...] = ()  # where the points of the runs' curves lie
    samples: int = 0  # that a run sees, by which it is made shorter; 0 where that cannot be
    shortest: int = 0  # run that says anything, in samples


MakeDesign = Callable[..., Design]  # (recipe, options=) -> the study's own part
Show = Callable[[Progress], None]


def study(
    name: str,
    recipe: str | Recipe = "digits",
    options: Options = DEFAULTS,
    *,
    progress: Show = lambda _: None,
) -> Study:
    """Answer one of the sources' open questions with a recipe.

    Args:
        name: of the study, one of `superbatch.lab.studies.catalogue.STUDIES`.
        recipe: a name that `superbatch.lab.recipes.load_recipe` takes, or a recipe.
        options: what differs from the study's own values.
        progress: called now and then, in this thread.

    Returns:
        The report.

    Raises:
        InputError: there is no such study, or an option cannot be used with it.
        Interrupted: on Ctrl-C; it carries the partial report.

    Examples:
        >>> report = study("precision", options=Options(runs=1, quick=True))
        >>> report.arm("naive sum, bfloat16").mean("K = 256") > 1e-2
        True
    """
    _check(name, recipe, options)
    # Imported when it is run: a study that trains loads torch, scipy and more.
    module: Any = importlib.import_module(f".study_{name.replace('-', '_')}", __package__)
    run = getattr(module, "run", None) or partial(run_design, name, module.design)
    with torch_threads(options.threads):
        return run(recipe, options, progress)


def seeds_of(name: str, options: Options) -> tuple[int, ...]:
    """Return the seeds of a study: 0, 1, ..., or from the study's own first seed."""
    entry = entry_of(name)
    runs = options.runs or (entry.quick_runs if options.quick else entry.runs)
    return tuple(range(entry.first_seed, entry.first_seed + runs))


def loaded(recipe: str | Recipe, options: Options) -> Recipe:
    """The recipe itself."""
    found = load_recipe(recipe, data=options.data) if isinstance(recipe, str) else recipe
    found.require("evaluate", "metric", "margin", "learning_rates", by="superbatch study")
    return found


def run_design(
    name: str, design: MakeDesign, recipe: str | Recipe, options: Options, progress: Show
) -> Study:
    """Train all arms from all seeds, here or in several processes, and make the report."""
    start = time.monotonic()
    what = loaded(recipe, options)
    seeds = seeds_of(name, options)
    plan, notes = _designed(what, options, design, turns=turns_of(recipe, options, seeds))
    finished: list[list[StudyRun]] = [[] for _ in plan.arms]

    receive = receiver(
        len(seeds) * plan.ticks,
        finished,
        progress,
        [arm.name for arm in plan.arms],
        lambda run: run.values.get(plan.headline, math.nan),
    )

    def report(*, partial: bool) -> Study:
        arms = tuple(
            replace(arm, runs=tuple(sorted(runs, key=lambda run: run.seed)))
            for arm, runs in zip(plan.arms, finished, strict=True)
        )
        found = plan.find(arms)
        return Study(
            **origin(what, options, start, partial=partial, torch=torch.__version__),
            name=name,
            question=entry_of(name).question,
            setting=plan.fixed,
            quantities=plan.quantities,
            arms=tuple(replace(arm, facts={**arm.facts, **found.facts.get(arm.name, {})}) for arm in arms),
            tests=found.tests,
            conclusion=found.conclusion,
            curve_at=plan.curve_at,
            seeds=seeds,
            notes=(*found.notes, *limits_of(t.result for t in found.tests), *notes, reading(name)),
        )

    try:
        train_seeds(recipe, what, plan.setting, seeds, receive, options=options, train=plan.train)
    except KeyboardInterrupt:
        raise Interrupted(report(partial=True)) from None
    return report(partial=False)


def turns_of(recipe: str | Recipe, options: Options, seeds: Sequence[int]) -> int:
    """Return the number of seeds that run one after the other; the others run beside them."""
    return math.ceil(len(seeds) / options.workers) if isinstance(recipe, str) else len(seeds)


def _designed(
    recipe: Recipe, options: Options, design: MakeDesign, *, turns: int
) -> tuple[Design, tuple[str, ...]]:
    """The study's own part, made shorter where a quick study would take longer than it may; and a note."""
    plan = design(recipe, options=options)
    if not options.quick or options.samples is not None or not plan.samples:
        return plan, ()

    def cost(samples: int) -> float:
        short = design(recipe, options=replace(options, samples=samples))
        return quick.seconds_of(lambda: list(short.train(recipe, short.setting, 0, tick=lambda _: None)))

    samples, fits = quick.affordable(cost, least=plan.shortest, most=plan.samples, turns=turns)
    if samples == plan.samples:
        return plan, ()
    shorter = design(recipe, options=replace(options, samples=samples))
    return shorter, (quick.note(f"{samples:,} samples", fits=fits),)


def as_study(name: str, report: Comparison | Surveys, options: Options, **own: Any) -> Study:
    """Put the report of another command into the form of a study, with fields of the study's own."""
    notes = (*report.notes, *own.pop("notes", ()), reading(name))
    return Study(
        name=name,
        question=entry_of(name).question,
        recipe=report.recipe,
        description=report.description,
        seconds=report.seconds,
        partial=report.partial,
        versions=report.versions,
        command=asked(options),
        notes=notes,
        **own,
    )


def reading(name: str) -> str:
    """Return the note of where a study's numbers are explained."""
    return (
        f"How the numbers are measured, and what they do not show: {DOCUMENTATION}#{entry_of(name).section}"
    )


def _check(name: str, recipe: str | Recipe, options: Options) -> None:
    """Refuse what this study cannot take."""
    entry = entry_of(name)
    given = [option for option in SELDOM if getattr(options, option) is not None]
    if useless := [option for option in given if option not in entry.takes]:
        raise InputError(
            f"The study {name!r} has no use for {useless[0]}={getattr(options, useless[0])!r}. Leave it out; "
            f"this study takes {', '.join(entry.takes) or 'runs only'}."
        )
    check_counts(options, "runs", "samples", "batch_size", "threads", "workers")
    check_positive(options, "learning_rate", "margin", "tolerance")
    if options.workers > 1 and not isinstance(recipe, str):
        raise InputError(
            f"workers={options.workers} with a Recipe object: each worker loads the recipe by its name. Pass "
            "package.module:function or file.py:function, or workers=1."
        )
