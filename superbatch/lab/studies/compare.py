"""Comparison of splits with the real batch: one recipe, the real batch, each split of it, several seeds.

All arms of a seed start from the same weights and make the same number of updates on the same samples in the
same order. So the weights themselves can be compared, which is far more sensitive than accuracy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.comparison import TOLERANCES, Arm, Comparison, Run
from .backends import Backend, check_backend, load_backend, train_seed
from .checks import check_choice, check_counts, check_positive, check_workers, optimizer_and_rate
from .options import CompareOptions as Options
from .setting import ArmSpec, Setting, Split, curve_updates, parse_split, splits_of
from .shared_options import Interrupted, Show, report_fields, silent
from .statistics import limits_of, smallest_gap, summarise, tost_paired, tost_welch
from .workers import Receiver, train_seeds

DEFAULTS = Options()
TAIL = 0.4  # size of an epoch's short last batch, as a share of the batch; only with `include_wrong`

PAIRED = (
    "Equivalence is tested on pairs: all arms of a seed share initial weights and sample order. The Welch "
    "test treats the arms as independent groups."
)
BATCHNORM_COUPLES = (
    "This model has BatchNorm, which normalises by the samples of a micro-batch, not of the batch: these "
    "arms do not claim to give the real batch's weights."
)
PLAIN_ACCUMULATION = (
    "The samples of a batch are coupled. Arms that are named by their split alone compute the loss of the "
    "whole batch (WholeBatch). Plain accumulation computes that of each micro-batch, which is another "
    "objective, and does not claim to give the real batch's weights."
)
BATCHNORM = {"frozen": "FrozenBatchNorm()", "per_microbatch": "GhostBatchNorm()"}
ROUNDING = (
    "Differences of about 1e-7 are rounding in float32, and up to 1e-4 if rounding changes the sign of a "
    "ReLU's input. With --dtype float64, rounding differences are tiny, but those of a wrong method stay."
)


def compare(recipe: str | Recipe, options: Options = DEFAULTS, *, progress: Show = silent) -> Comparison:
    """Train a recipe with the real batch and with each split, and compare weights and metrics."""
    start = time.monotonic()
    _check(recipe, options)
    backend = load_backend(options.backend)
    task = backend.load(recipe, options.data) if isinstance(recipe, str) else recipe
    setting = setting_from(task, options)
    backend.check(setting)
    seeds = range(options.runs)
    peaks: list[int | None] = [None] * len(setting.arms)
    total = len(seeds) * setting.updates * sum(len(arm.split.sizes) for arm in setting.arms)
    receiver = Receiver([arm.name for arm in setting.arms], total, progress, lambda run: run.metric)

    def report(*, partial: bool) -> Comparison:
        margin = options.margin or task.margin
        arms = tuple(
            arm_report(arm, task, setting, backend, runs, receiver.runs[0], peak, margin)
            for arm, runs, peak in zip(setting.arms, receiver.runs, peaks, strict=True)
        )
        return Comparison(
            **report_fields(task, options, start, partial=partial, **backend.versions()),
            backend=backend.title,
            statement=task.statement,
            metric=task.metric,
            unit=task.unit,
            dtype=setting.dtype,
            optimizer=setting.optimizer,
            learning_rate=setting.learning_rate,
            batch_size=setting.batch_size,
            updates=setting.updates,
            seeds=tuple(seeds),
            margin=margin,
            tail=setting.tail,
            arms=arms,
            curve_updates=curve_updates(setting.updates),
            notes=notes_on(arms, setting, backend, options.workers),
        )

    try:
        with backend.threads(options.threads):
            for index, arm in enumerate(setting.arms):
                peaks[index] = backend.peak_of_update(task, setting, arm)
            train = partial(train_seed, setting=setting)
            train_seeds(recipe, task, train, seeds, receiver, options=options, backend=options.backend)
    except KeyboardInterrupt:
        raise Interrupted(report(partial=True)) from None
    return report(partial=False)


def setting_from(recipe: Recipe, options: Options) -> Setting:
    """Return the setting of a comparison: the options, with the recipe's values for those that are None."""
    splits = splits_of(recipe, options.splits, options.batch_size)
    size = sum(splits[0].sizes)
    tail = max(1, round(TAIL * size)) if options.include_wrong else None
    if tail is not None and size + tail > recipe.samples:
        raise InputError(
            f"include_wrong with a batch of {size} samples: an epoch with a short last batch needs "
            f"{size + tail} samples, and the recipe has {recipe.samples}. Use a smaller batch."
        )
    recipe.require("evaluate", "metric", by="superbatch compare")
    if options.margin is None:
        recipe.require("margin", by="superbatch compare without --margin")
    optimizer, learning_rate = optimizer_and_rate(recipe, options, by="superbatch compare")
    return Setting(
        arms=tuple(_arms(recipe, splits, include_wrong=options.include_wrong)),
        updates=options.updates or recipe.updates,
        batch_size=size,
        tail=tail,
        dtype=options.dtype,
        optimizer=optimizer,
        learning_rate=learning_rate,
        backend=options.backend,
    )


def _arms(recipe: Recipe, splits: Sequence[Split], *, include_wrong: bool) -> list[ArmSpec]:
    """Return the arms: the real batch, each split, and with `include_wrong` two wrong methods."""
    size = sum(splits[0].sizes)
    parts = [split for split in splits if len(split.sizes) > 1]
    if not parts:
        raise InputError(
            f"The only split is the batch of {size} samples itself, so there is nothing to compare. Add a "
            "split, such as 5x20 of a batch of 100."
        )
    wrong: list[ArmSpec] = []
    if include_wrong:
        # A mean of means is wrong if the micro-batches have different weights: different sizes, or a
        # weight of the recipe, which differs in any split.
        unequal = next((split for split in parts if not split.equal), _uneven(size))
        uneven = unequal if recipe.weight is None else parts[0]
        equal = next((split for split in parts if split.equal), parse_split(f"{size}x1"))
        wrong = [ArmSpec(uneven, "mean of means", "wrong"), ArmSpec(equal, "fixed tail divisor", "wrong")]
        parts = list(dict.fromkeys([*parts, uneven, equal]))
    coupled = recipe.coupled == "exact"
    claim = "exact" if coupled or recipe.batchnorm == "error" else "inexact"
    real = ArmSpec(parse_split(f"1x{size}"), "real batch", "real")
    plain = [ArmSpec(split, "plain accumulation", "inexact") for split in parts if coupled]
    return [real, *(ArmSpec(split, "accumulator", claim) for split in parts), *plain, *wrong]


def _uneven(size: int) -> Split:
    """Return the split of a batch into 80, 15 and 5 percent."""
    second, third = max(1, round(0.15 * size)), max(1, round(0.05 * size))
    if size < 4:  # too small for three parts; 1/1 is equal, and a mean of means is right for it
        return parse_split(f"{size - 1}/1")
    return parse_split(f"{size - second - third}/{second}/{third}")


def _check(recipe: str | Recipe, options: Options) -> None:
    """Raise `InputError` for options that cannot be used with any recipe."""
    check_counts(options, "updates", "runs", "batch_size", "threads", "workers")
    check_positive(options, "margin", "learning_rate")
    check_choice("dtype", options.dtype, TOLERANCES)
    check_backend(options.backend, recipe, data=options.data, threads=options.threads)
    check_workers(recipe, options)


def arm_report(
    arm: ArmSpec,
    recipe: Recipe,
    setting: Setting,
    backend: Backend,
    runs: Sequence[Run],
    real: Sequence[Run],
    peak_bytes: int | None,
    margin: float,
) -> Arm:
    """Summarise the finished runs of an arm; `real` has those of the real batch."""
    runs = sorted(runs, key=lambda run: run.seed)
    metrics = [run.metric for run in runs]
    of_seed = {run.seed: run.metric for run in real}
    pairs = [run.metric - of_seed[run.seed] for run in runs if run.seed in of_seed]
    compared, step = arm.claim != "real", recipe.metric_step
    how = backend.how[arm.method]
    if arm.method == "accumulator" and recipe.coupled == "exact":
        how = "superbatch.torch.WholeBatch"
    elif arm.claim == "inexact" and recipe.batchnorm != "error":
        how += f", participants=[{BATCHNORM[recipe.batchnorm]}]"
    apart = [run.weight_difference for run in runs if run.weight_difference is not None]
    return Arm(
        name=arm.name,
        sizes=arm.split.sizes,
        claim=arm.claim,
        how=how,
        runs=tuple(runs),
        mean=statistics.fmean(metrics) if metrics else None,
        sd=summarise(metrics).sd if len(metrics) > 1 else None,
        updates=setting.updates,
        seconds=statistics.fmean(run.seconds for run in runs) if runs else None,
        peak_bytes=peak_bytes,
        weight_difference=max(apart, default=None),
        median_difference=statistics.median(apart) if apart else None,
        worst_difference=max((d for run in runs if (d := run.worst_difference) is not None), default=None),
        paired=tost_paired(pairs, margin=margin, step=step) if compared and len(pairs) > 1 else None,
        welch=tost_welch(
            summarise(metrics),
            summarise(list(of_seed.values())),
            margin=margin,
            step=smallest_gap([*metrics, *of_seed.values()]) if step is None else step,
        )
        if compared and len(metrics) > 1 and len(of_seed) > 1
        else None,
    )


def notes_on(arms: Sequence[Arm], setting: Setting, backend: Backend, workers: int) -> tuple[str, ...]:
    """Return the notes of the report, which a reader needs to interpret the numbers."""
    notes = [PAIRED, *limits_of(arm.paired for arm in arms if arm.paired is not None)]
    if setting.dtype == "float32":
        notes.append(ROUNDING)
    claims = {arm.claim for arm in arms}
    if "inexact" in claims:
        notes.append(PLAIN_ACCUMULATION if "exact" in claims else BATCHNORM_COUPLES)
    if setting.tail is not None:
        notes.append(
            f"In every arm some batches have {setting.tail} samples instead of {setting.batch_size}, as at "
            "the end of an epoch: for these a fixed divisor is wrong."
        )
    needed = max((arm.welch.runs_needed or 0 for arm in arms if arm.welch is not None), default=0)
    if needed > max((len(arm.runs) for arm in arms), default=0):
        notes.append(
            f"At this variation between seeds, {needed} runs per arm are needed to show equivalence of "
            "independent arms with 80 % power."
        )
    notes.extend(backend.notes)
    if workers > 1:
        notes.append(f"Times were measured with up to {workers} processes at once on the same machine.")
    return tuple(notes)
