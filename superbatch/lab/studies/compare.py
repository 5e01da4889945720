"""Comparison with the real batch: one recipe, the real batch, each split of it, several seeds.

All arms of a seed start from the same weights and see the same samples in the same order, for the same number
of updates. So the weights themselves can be compared, which is a far sharper question than accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.comparison import TOLERANCES, Comparison, Run
from .assembly import arm_report, notes_on
from .backends import Backend, check_backend, load_backend
from .options import CompareOptions as Options
from .setting import ArmPlan, Setting, curve_updates
from .shared_options import Interrupted, check_counts, check_positive, offered_optimizer
from .shared_options import Progress as Progress
from .splits import Split, parse_split, splits_of
from .versions import origin
from .workers import receiver, train_seeds

DEFAULTS = Options()
TAIL = 0.4  # share of the batch that an epoch's short last batch has, where there is one


def compare(
    recipe: str | Recipe,
    options: Options = DEFAULTS,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Comparison:
    """Train a recipe with the real batch and with each split, and compare what comes out."""
    start = time.monotonic()
    _check(recipe, options)
    backend = load_backend(options.backend)
    loaded = backend.load(recipe, options.data) if isinstance(recipe, str) else recipe
    setting = settle(loaded, options)
    backend.check(setting)
    seeds = range(options.runs)
    finished: list[list[Run]] = [[] for _ in setting.arms]
    peaks: list[int | None] = [None] * len(setting.arms)

    total = len(seeds) * setting.updates * sum(len(arm.split.sizes) for arm in setting.arms)
    receive = receiver(total, finished, progress, [arm.name for arm in setting.arms], lambda run: run.metric)

    def report(*, partial: bool) -> Comparison:
        made = origin(loaded, options, start, partial=partial, **backend.versions())
        return _report(loaded, options, setting, backend, finished, peaks, made)

    try:
        with backend.threads(options.threads):
            for index, arm in enumerate(setting.arms):
                peaks[index] = backend.peak_of_update(loaded, setting, arm)
            train_seeds(recipe, loaded, setting, seeds, receive, options=options, backend=options.backend)
    except KeyboardInterrupt:
        raise Interrupted(report(partial=True)) from None
    return report(partial=False)


def settle(recipe: Recipe, options: Options) -> Setting:
    """Fill in what the options leave to the recipe, and refuse what cannot be."""
    splits = splits_of(recipe, options.splits, options.batch_size)
    size = sum(splits[0].sizes)
    tail = max(1, round(TAIL * size)) if options.include_wrong else None
    if tail is not None and size + tail > recipe.samples:
        raise InputError(
            f"include_wrong with a batch of {size} samples: an epoch with a tail needs {size + tail} "
            f"samples, the recipe has {recipe.samples}. Use a smaller batch."
        )
    optimizer, learning_rate = _optimizer(recipe, options)
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


def _optimizer(recipe: Recipe, options: Options) -> tuple[str, float]:
    recipe.require("evaluate", "metric", by="superbatch compare")
    if options.margin is None:
        recipe.require("margin", by="superbatch compare without --margin")
    if options.learning_rate is None:
        recipe.require("learning_rates", by="superbatch compare without --lr")
    name = offered_optimizer(recipe, options.optimizer)
    return name, options.learning_rate or recipe.learning_rates[name]


def _arms(recipe: Recipe, splits: Sequence[Split], *, include_wrong: bool) -> list[ArmPlan]:
    size = sum(splits[0].sizes)
    parts = [split for split in splits if len(split.sizes) > 1]
    if not parts:
        raise InputError(
            f"A batch of {size} samples in one piece only: there is nothing to compare the real batch with. "
            "Add a split, such as 5x20 of a batch of 100."
        )
    wrong: list[ArmPlan] = []
    if include_wrong:
        unequal = next((split for split in parts if not split.equal), _uneven(size))
        uneven = unequal if recipe.weight is None else parts[0]
        equal = next((split for split in parts if split.equal), parse_split(f"{size}x1"))
        wrong = [ArmPlan(uneven, "mean of means", "wrong"), ArmPlan(equal, "fixed tail divisor", "wrong")]
        parts = list(dict.fromkeys([*parts, uneven, equal]))
    coupled = recipe.coupled == "exact"
    claim = "exact" if coupled or recipe.batchnorm == "error" else "inexact"
    real = ArmPlan(parse_split(f"1x{size}"), "real batch", "real")
    plain = [ArmPlan(split, "plain accumulation", "inexact") for split in parts if coupled]
    return [real, *(ArmPlan(split, "accumulator", claim) for split in parts), *plain, *wrong]


def _uneven(size: int) -> Split:
    """80/15/5 percent of a batch: micro-batches as unequal as a loader with a short last one makes them."""
    third = max(1, round(0.05 * size))
    second = max(1, round(0.15 * size))
    if size < 4:  # 2/1 and 1/1: the last is equal, so that a mean of means is right there
        return parse_split(f"{size - 1}/1")
    return parse_split(f"{size - second - third}/{second}/{third}")


def _report(
    recipe: Recipe,
    options: Options,
    setting: Setting,
    backend: Backend,
    finished: Sequence[Sequence[Run]],
    peaks: Sequence[int | None],
    made: dict[str, Any],
) -> Comparison:
    margin = options.margin or recipe.margin
    arms = tuple(
        arm_report(arm, recipe, setting, backend, runs, finished[0], peak, margin)
        for arm, runs, peak in zip(setting.arms, finished, peaks, strict=True)
    )
    return Comparison(
        **made,
        backend=backend.title,
        statement=recipe.statement,
        metric=recipe.metric,
        unit=recipe.unit,
        dtype=setting.dtype,
        optimizer=setting.optimizer,
        learning_rate=setting.learning_rate,
        batch_size=setting.batch_size,
        updates=setting.updates,
        seeds=tuple(range(options.runs)),
        margin=margin,
        tail=setting.tail,
        arms=arms,
        curve_updates=curve_updates(setting.updates),
        notes=notes_on(arms, setting, backend, options.workers),
    )


def _check(recipe: str | Recipe, options: Options) -> None:
    """Refuse values that no recipe can take."""
    check_counts(options, "updates", "runs", "batch_size", "threads", "workers")
    check_positive(options, "margin", "learning_rate")
    if options.dtype not in TOLERANCES:
        raise InputError(
            f"dtype={options.dtype!r}: a comparison needs to know how far rounding can go. Use one of "
            f"{', '.join(TOLERANCES)}."
        )
    check_backend(options.backend, recipe, data=options.data, threads=options.threads)
    if options.workers > 1 and options.runs > 1 and not isinstance(recipe, str):
        raise InputError(
            f"workers={options.workers} with a Recipe object: a worker process loads the recipe by its name. "
            "Pass the name, such as package.module:function or file.py:function, or workers=1."
        )
