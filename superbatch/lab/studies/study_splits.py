"""Study of a batch in K micro-batches against the batch in one piece: the first source's table.

This is `superbatch.lab.studies.compare` and nothing else, put into the form of a study.
"""

from __future__ import annotations

from dataclasses import replace

from ..recipes import Recipe
from ..report.comparison import Arm, Comparison
from ..report.study import Quantity, Study, StudyArm, StudyRun, StudyTest
from ..report.verdict import verdict
from . import compare as comparing
from . import quick
from .catalogue import entry_of
from .study import Options, Progress, Show, StudyInterrupted, asked, loaded, seeds_of, turns_of

NAME = "splits"
QUICK_UPDATES, SHORTEST = 200, 20
UPDATES, APART = "updates", "weights differ by"


def run(recipe: str | Recipe, options: Options, progress: Show) -> Study:
    """Compare the real batch with its splits."""
    what = loaded(recipe, options)
    size = options.batch_size or what.batch_size
    seeds = seeds_of(NAME, options)
    wanted = comparing.Options(
        updates=max(1, options.samples // size) if options.samples else None,
        runs=len(seeds),
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        margin=options.margin,
        threads=options.threads,
        workers=options.workers,
        data=options.data,
    )

    notes: tuple[str, ...] = ()
    if options.quick and options.samples is None:
        most = min(QUICK_UPDATES, what.updates)
        updates, fits = _updates(recipe, wanted, most, turns=turns_of(recipe, options, seeds))
        wanted = replace(wanted, updates=updates)
        if updates < most:
            notes = (quick.note(f"{updates} updates", fits=fits),)

    def receive(event: comparing.Progress) -> None:
        text = None
        if event.finished is not None:
            seed, arm, metric = event.finished
            text = f"seed {seed}, {arm}: {metric:.4g}"
        progress(Progress(event.done, event.total, text))

    try:
        return as_study(comparing.compare(recipe, wanted, progress=receive), options, notes)
    except comparing.ComparisonInterrupted as stopped:
        raise StudyInterrupted(as_study(stopped.report, options, notes)) from None


def _updates(recipe: str | Recipe, wanted: comparing.Options, most: int, *, turns: int) -> tuple[int, bool]:
    """Return the number of updates a quick study has time for, and True if it has time for any."""

    def cost(updates: int) -> float:
        one = replace(wanted, updates=updates, runs=1, workers=1)
        return quick.seconds_of(lambda: comparing.compare(recipe, one))

    return quick.affordable(cost, least=SHORTEST, most=most, turns=turns)


def as_study(report: Comparison, options: Options, notes: tuple[str, ...] = ()) -> Study:
    """A comparison in the form of a study."""
    metric = f"{report.metric}, {report.unit}" if report.unit else report.metric
    return Study(
        name=NAME,
        question=entry_of(NAME).question,
        recipe=report.recipe,
        description=report.description,
        setting={
            "batch": str(report.batch_size),
            "updates": str(report.updates),
            report.optimizer: f"lr {report.learning_rate:g}",
            "dtype": report.dtype,
        },
        quantities=(
            Quantity(
                name=metric,
                meaning="of held-out data, after the last update",
                form=".2f" if report.unit == "%" else ".4g",
            ),
            Quantity(name=UPDATES, meaning="of each run", form=",.0f"),
            Quantity(
                name=APART,
                meaning="|w - w_real| / |w_real| after the last update, pairs of the same seed",
                form=".1e",
            ),
        ),
        arms=tuple(_arm(arm, metric) for arm in report.arms),
        tests=tuple(
            StudyTest(first=arm.name, second=report.arms[0].name, quantity=metric, ratio=False, result=test)
            for arm in report.arms
            if (test := arm.paired) is not None
        ),
        conclusion=verdict(report)[0],
        curve_at=tuple(map(float, report.curve_updates)),
        seeds=report.seeds,
        seconds=report.seconds,
        partial=report.partial,
        versions=report.versions,
        command=asked(options),
        notes=(
            *report.notes,
            *notes,
            "superbatch compare shows time and memory too, other splits, and wrong ways beside it.",
        ),
    )


def _arm(arm: Arm, metric: str) -> StudyArm:
    return StudyArm(
        name=arm.name,
        how=arm.how,
        facts={UPDATES: float(arm.updates)},
        runs=tuple(
            StudyRun(
                seed=run.seed,
                values={metric: run.metric}
                | ({} if run.weight_difference is None else {APART: run.weight_difference}),
                curve=run.losses,
            )
            for run in arm.runs
        ),
    )
