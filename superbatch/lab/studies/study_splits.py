"""Study of training in micro-batches against the real batch: a report of `superbatch compare` as a study."""

from __future__ import annotations

from dataclasses import replace

from ..recipes import Recipe
from ..report.comparison import Arm, Comparison
from ..report.study import Quantity, Study, StudyArm, StudyRun, StudyTest
from ..report.verdict import verdict
from . import compare as comparing
from . import quick
from .shared_options import Interrupted, Show
from .study import Options, as_study, options_for, recipe_for_study, seeds_of, seeds_per_process
from .study_common import COLUMNS, UPDATES, column_of_metric

QUICK_UPDATES, SHORTEST = 200, 20  # updates with ``--quick``: at most, and at least
APART = "weights differ by"
BESIDE = "superbatch compare also reports time and memory, takes other splits, and adds wrong methods."


def run(recipe: str | Recipe, options: Options, progress: Show) -> Study:
    """Compare the real batch with its splits."""
    task = recipe_for_study(recipe, options)
    size = options.batch_size or task.batch_size
    seeds = seeds_of("splits", options)
    updates = max(1, options.samples // size) if options.samples else None
    wanted = options_for(comparing.Options, options, updates=updates, runs=len(seeds))
    notes: tuple[str, ...] = ()
    if options.quick and options.samples is None:
        most = min(QUICK_UPDATES, task.updates)

        def cost(updates: int) -> float:
            one = replace(wanted, updates=updates, runs=1, workers=1)
            return quick.seconds_of(lambda: comparing.compare(recipe, one))

        runs = seeds_per_process(recipe, options, seeds)
        updates, fits = quick.affordable(cost, least=SHORTEST, most=most, runs=runs)
        wanted = replace(wanted, updates=updates)
        if updates < most:
            notes = (quick.note(f"{updates} updates", fits=fits),)

    try:
        return _study(comparing.compare(recipe, wanted, progress=progress), options, notes)
    except Interrupted as stopped:
        raise Interrupted(_study(stopped.report, options, notes)) from None


def _study(report: Comparison, options: Options, notes: tuple[str, ...]) -> Study:
    metric = column_of_metric(report)
    apart = "|w - w_real| / |w_real| after the last update, pairs of the same seed"
    return as_study(
        "splits",
        report,
        options,
        setting={
            "batch": str(report.batch_size),
            "updates": str(report.updates),
            report.optimizer: f"lr {report.learning_rate:g}",
            "dtype": report.dtype,
        },
        quantities=(metric, COLUMNS[1], Quantity(name=APART, meaning=apart, form=".1e")),
        arms=tuple(_arm(arm, metric.name) for arm in report.arms),
        tests=tuple(
            StudyTest(
                first=arm.name, second=report.arms[0].name, quantity=metric.name, ratio=False, result=test
            )
            for arm in report.arms
            if (test := arm.paired) is not None
        ),
        conclusion=verdict(report)[0],
        curve_at=tuple(map(float, report.curve_updates)),
        seeds=report.seeds,
        notes=(*notes, BESIDE),
    )


def _arm(arm: Arm, metric: str) -> StudyArm:
    runs: list[StudyRun] = []
    for run in arm.runs:
        apart = {} if run.weight_difference is None else {APART: run.weight_difference}
        runs.append(StudyRun(seed=run.seed, values={metric: run.metric, **apart}, curve=run.losses))
    return StudyArm(name=arm.name, how=arm.how, facts={UPDATES: float(arm.updates)}, runs=tuple(runs))
