"""Study of coupled samples: the loss of plain accumulation against the exact update.

Every way to make the update is trained from the same seeds on the same batches, with Adam and a cosine
schedule to zero. For each way and seed, validation chooses a point of the recipe's grid of hyperparameters.
Ways are compared on test data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from superbatch.batch.tree import map_arrays
from superbatch.errors import InputError, NonFiniteError

from ..recipes import COUPLED, Recipe
from ..recipes.coupled import CoupledRecipe, Point, Way
from ..report.study import Quantity, StudyArm, StudyRun, StudyTest
from .setting import Tick
from .study import Design, Options, StudyConclusions
from .study_common import Runs, equivalence_test, stream

RATE, STRENGTH = "learning rate", "strength"
SHORTEST = 10  # updates of the shortest run of a quick study


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the ways of a recipe."""
    if not isinstance(recipe, CoupledRecipe):
        raise InputError(
            f"The recipe {recipe.name!r} is not for the study coupled. Use one of {', '.join(COUPLED)}, or "
            "your own CoupledRecipe."
        )
    updates = recipe.updates if options.samples is None else options.samples // recipe.batch_size
    if not updates:
        raise InputError(
            f"samples={options.samples} is less than one update of {recipe.batch_size} samples. "
            f"Give at least {recipe.batch_size}."
        )
    device = checked_device(options.device or "cpu")
    return Design(
        arms=tuple(StudyArm(name=way.name, how=way.how, facts={}, runs=()) for way in recipe.ways),
        train=partial(train, updates=updates, device=device),
        ticks=len(recipe.ways) * len(recipe.points) * updates,
        quantities=_quantities(recipe),
        progress_quantity=recipe.measures[0].name,
        fixed={
            "batch": str(recipe.batch_size),
            "updates": str(updates),
            "optimizer": "adam",
            **({} if device == "cpu" else {"device": device}),
        },
        notes=(
            f"Mechanism: {recipe.mechanism}.",
            *recipe.limits,
            "Seeds vary weights and order of samples, not the data. Intervals are not corrected for the "
            "number of arms.",
        ),
        conclude=partial(conclude, recipe=recipe, margin=options.margin or recipe.margin),
        curve_at=recipe.curve_at,
        samples=updates * recipe.batch_size,
        shortest=SHORTEST * recipe.batch_size,
    )


def checked_device(name: str) -> str:
    """Return the name of a device; raise `InputError` if torch cannot use it."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a build without CUDA asserts
        raise InputError(
            f"device={name!r} cannot be used here: {str(error).splitlines()[0].rstrip('.')}. "
            "Leave it out to train on the CPU."
        ) from error
    return name


def _quantities(recipe: CoupledRecipe) -> tuple[Quantity, ...]:
    chosen = [Quantity(name=RATE, meaning="chosen by validation, mean over seeds", form=".3g")]
    if len({point.strength for point in recipe.points}) > 1:
        chosen.append(Quantity(name=STRENGTH, meaning="of the penalty, chosen by validation", form=".3g"))
    measured = (Quantity(name=each.name, meaning=each.meaning, form=each.form) for each in recipe.measures)
    return (*measured, *chosen)


def train(recipe: Recipe, seed: int, *, updates: int, device: str, tick: Tick) -> Runs:
    """Train every way from one seed at every point of the grid, and keep the best by validation."""
    assert isinstance(recipe, CoupledRecipe)
    order = stream(recipe.samples, updates * recipe.batch_size, seed).split(recipe.batch_size)

    def trained(way: Way, point: Point) -> nn.Module:
        model = way.model(seed).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=point.learning_rate)
        update: Callable[[Any], object] = way.update(model, optimizer, point.strength)
        for number, indices in enumerate(order):
            rate = point.learning_rate * (1 + math.cos(math.pi * number / len(order))) / 2
            optimizer.param_groups[0]["lr"] = rate
            try:
                update(map_arrays(lambda values: values.to(device), recipe.batch(indices)))
            except NonFiniteError:
                tick(len(order) - number)  # the progress counts the rest as done
                break
            tick(1)
        return model.cpu()  # the test data are on the CPU

    for index, way in enumerate(recipe.ways):
        models = [(point, trained(way, point)) for point in recipe.points]
        point, model = max(models, key=lambda each: _score(recipe, each[1]))
        values = {
            each.name: value for each, value in zip(recipe.measures, recipe.measure(model), strict=True)
        }
        curve = () if recipe.curve is None else recipe.curve(model)
        chosen = {RATE: point.learning_rate, STRENGTH: point.strength}
        yield index, StudyRun(seed=seed, values={**values, **chosen}, curve=curve)


def _score(recipe: CoupledRecipe, model: nn.Module) -> float:
    score = recipe.validate(model)
    # `max` would keep a NaN if it came first.
    return score if math.isfinite(score) else -math.inf


def conclude(arms: tuple[StudyArm, ...], *, recipe: CoupledRecipe, margin: float) -> StudyConclusions:
    """Test each way against the first one, which is exact, and conclude."""
    first, *others = arms
    measure = recipe.measures[0]
    tests = [equivalence_test(arm, first, measure.name, margin=margin) for arm in others]
    means = {arm.name: arm.mean(measure.name) for arm in arms}
    value = means[first.name]
    if value is None or not any(tests):
        return StudyConclusions(tests=tests)
    sense = "lower" if recipe.lower_is_better else "higher"
    results = "; ".join(
        f"{test.first}: {mean:{measure.form}} ({verdict(test, recipe.lower_is_better)})"
        for test in tests
        if test is not None and (mean := means[test.first]) is not None
    )
    title = measure.name[0].upper() + measure.name[1:]
    conclusion = f"{title} ({sense} is better) of {first.name}: {value:{measure.form}}; {results}."
    return StudyConclusions(tests=tests, conclusion=conclusion)


def verdict(test: StudyTest, lower_is_better: bool) -> str:
    """Return the outcome of a test in a few words."""
    if not math.isfinite(test.difference):
        return "diverged"
    low, high = sorted((abs(test.low), abs(test.high)))
    apart = f"by {abs(test.difference):.2g}, {low:.2g} to {high:.2g}"
    inside = f", within ±{test.margin:g}" if test.result.equivalent else ""
    if test.low > 0 or test.high < 0:
        return f"{'worse' if (test.low > 0) == lower_is_better else 'better'} {apart}{inside}"
    return f"the same within ±{test.margin:g}" if test.result.equivalent else "no difference shown"
