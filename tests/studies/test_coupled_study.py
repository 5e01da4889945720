"""The study `coupled`: its ways of accumulating against the real large batch, its report and conclusions."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.lab.recipes import COUPLED, load_recipe
from superbatch.lab.recipes.coupled import CoupledRecipe
from superbatch.lab.recipes.coupled.code_search import code_search
from superbatch.lab.recipes.coupled.docstrings import Texts
from superbatch.lab.recipes.coupled.images import generated
from superbatch.lab.recipes.coupled.token_means import token_means
from superbatch.lab.recipes.coupled.ways import BatchLoss, accumulated
from superbatch.lab.report.json import to_json
from superbatch.lab.report.study import Study, StudyArm, StudyRun
from superbatch.lab.report.study_text import study_table
from superbatch.lab.studies import study_coupled
from superbatch.lab.studies.arms import cut
from superbatch.lab.studies.on_torch import cast_batch
from superbatch.lab.studies.study import Options, study
from superbatch.lab.studies.study_common import stream
from superbatch.torch import WholeBatch
from tests.report_json import from_json
from tests.studies import own_recipe

STRENGTH = 10.0
Gradient = dict[str, Tensor]


@cache
def made(name: str) -> CoupledRecipe:
    """Return a recipe; code search uses random words, because reading the standard library is slow."""
    if name == "token-means":
        return token_means(held_out=20)
    if name == "code-search":
        g = torch.Generator().manual_seed(0)
        queries, codes = (torch.randint(0, 500, (1800, length), generator=g) for length in (32, 64))
        return code_search(texts=Texts(queries, codes, words=500))
    recipe = load_recipe(name)
    assert isinstance(recipe, CoupledRecipe)
    return recipe


def random_batch(recipe: CoupledRecipe) -> Any:
    """Return a batch of random samples."""
    return cast_batch(recipe.batch(stream(recipe.samples, recipe.batch_size, seed=1)), "float64")


def loop_gradients(recipe: CoupledRecipe, model: nn.Module, parts: Sequence[Any]) -> Gradient:
    """Return the gradients of a plain loop over micro-batches; one micro-batch is the real large batch."""
    loss_fn = recipe.loss_fn(model)
    for part in parts:
        (loss_fn(part) / len(parts)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def way_gradients(recipe: CoupledRecipe, name: str) -> tuple[Gradient, nn.Module]:
    """Return the gradients that a way passes to its optimizer for one batch in float64, and the model."""
    way = recipe.way(name)
    model = way.model(3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: Gradient = {}

    def record_gradients(*_: object) -> None:
        found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(record_gradients)
    way.update(model, optimizer, STRENGTH)(random_batch(recipe))
    return found, model


def largest_difference(found: Gradient, reference: Gradient) -> float:
    """Return the largest relative difference of a gradient; near 0 it is relative to the total norm."""
    assert found.keys() == reference.keys()
    total = torch.stack([each.norm() for each in reference.values()]).norm()
    assert total > 1e-6, "premise: there is a gradient"
    norms = {name: torch.clamp_min(each.norm(), 1e-3 * total) for name, each in reference.items()}
    return max(float((found[name] - each).norm() / norms[name]) for name, each in reference.items())


@pytest.mark.parametrize("name", COUPLED)
def test_superbatch_gives_the_update_of_the_real_batch_unlike_a_plain_loop(name: str) -> None:
    recipe = made(name)
    real = loop_gradients(recipe, recipe.model(3).double(), [random_batch(recipe)])
    assert largest_difference(way_gradients(recipe, recipe.ways[0].name)[0], real) < 1e-12
    plain = [way.name for way in recipe.ways if way.name.startswith("plain")]
    assert len(plain) >= 2
    for each in plain:
        found, model = way_gradients(recipe, each)
        assert largest_difference(found, real) > 1e-2, "premise, and the mutant: plain accumulation differs"
        size = int(each.rpartition(" ")[2])
        looped = recipe.model(3).double()
        parts = cut(random_batch(recipe), (size,) * (recipe.batch_size // size))
        assert largest_difference(found, loop_gradients(recipe, looped, parts)) < 1e-12, (
            "the plain way is the loop"
        )
        kept = dict(looped.named_buffers())
        for path, buffer in model.named_buffers():
            assert torch.allclose(buffer, kept[path], rtol=1e-12, atol=1e-14), "running statistics as well"


def loss_of(name: str) -> BatchLoss:
    module = importlib.import_module(f"superbatch.lab.recipes.coupled.{name}")
    return module.loss_of(generated(32)) if name == "counting" else module.loss


@pytest.mark.parametrize(("name", "size"), [("counting", 2), ("fairness", 16), ("ring", 8)])
def test_the_exact_update_does_not_depend_on_the_micro_batch(name: str, size: int) -> None:
    """Micro-batches as small as in plain accumulation; the recipes use larger ones to save time."""
    recipe = made(name)
    way = replace(recipe.ways[0], update=accumulated(WholeBatch, loss_of(name), microbatch_size=size))
    found, _ = way_gradients(replace(recipe, ways=(way, *recipe.ways[1:])), way.name)
    real = loop_gradients(recipe, recipe.model(3).double(), [random_batch(recipe)])
    assert largest_difference(found, real) < 1e-12


def test_cached_gradients_are_exact_too() -> None:
    recipe = made("code-search")
    real = loop_gradients(recipe, recipe.model(3).double(), [random_batch(recipe)])
    assert largest_difference(way_gradients(recipe, "cached gradients")[0], real) < 1e-12


@pytest.mark.parametrize("name", ["GroupNorm", "frozen BatchNorm"])
def test_norms_without_coupling_are_exact_in_any_micro_batches(name: str) -> None:
    recipe = made("counting")
    found, model = way_gradients(recipe, name)
    model = copy.deepcopy(recipe.way(name).model(3).double())
    parts = cut(random_batch(recipe), (4,) * (recipe.batch_size // 4))
    assert largest_difference(found, loop_gradients(recipe, model, parts)) < 1e-12


def test_the_unbiased_penalty_has_the_mean_of_the_batch_penalty() -> None:
    """Compare over many draws; the plain penalty with m = 16 is too large."""
    from superbatch.lab.recipes.coupled.fairness import gap, people

    table = people(64_000, seed=5)
    group = table["group"].double().view(-1, 16)
    scores = table["features"][:, 0].double().sigmoid().view(-1, 16) + 0.05 * group
    exact = float(gap(scores.flatten(), group.flatten()).square())
    plain = float(gap(scores, group).square().mean())
    halves = zip(scores.chunk(2, -1), group.chunk(2, -1), strict=True)
    left, right = (gap(*each) for each in halves)
    unbiased = float((left * right).mean())
    assert plain > 4 * exact
    assert abs(unbiased - exact) < 0.2 * (plain - exact)


@pytest.mark.parametrize("name", COUPLED)
def test_the_report_contains_every_way(name: str) -> None:
    from superbatch.lab import plot

    recipe = made(name)
    report = study("coupled", recipe, Options(runs=2, samples=recipe.batch_size))
    assert report.seeds == (100, 101), "each run has its own seed"
    assert [arm.name for arm in report.arms] == [way.name for way in recipe.ways]
    assert [row[0] for row in study_table(report).rows] == [way.name for way in recipe.ways]
    assert {test.second for test in report.tests} == {"superbatch"} == {recipe.ways[0].name}
    assert all(way.name in report.conclusion for way in recipe.ways)
    assert report.conclusion.endswith(".") and ". " not in report.conclusion, "one sentence"
    rates = {point.learning_rate for point in recipe.points}
    assert {run.values["learning rate"] for arm in report.arms for run in arm.runs} <= rates
    assert to_json(from_json(Study, to_json(report))) == to_json(report)
    assert plot.png(plot.study(report), dots_per_inch=30).startswith(b"\x89PNG")


def planted(name: str, values: Sequence[float], quantity: str) -> StudyArm:
    runs = tuple(StudyRun(seed=seed, values={quantity: value}) for seed, value in enumerate(values))
    return StudyArm(name=name, how="planted", facts={}, runs=runs)


@pytest.mark.parametrize(
    ("shift", "spread", "said"),
    [
        (0.7, 0.01, "other: 1.700 (worse by 0.7, 0.69 to 0.71)."),
        (-0.7, 0.01, "other: 0.300 (better by 0.7, 0.69 to 0.71)."),
        (0.05, 0.01, "other: 1.050 (worse by 0.05, 0.039 to 0.061, within ±0.1)."),
        (0.0, 0.01, "other: 1.000 (the same within ±0.1)."),
        (0.0, 0.5, "other: 1.000 (no difference shown)."),
        (math.nan, 0.0, "other: nan (diverged)."),
    ],
)
def test_the_conclusion_follows_the_numbers(shift: float, spread: float, said: str) -> None:
    quantity = made("counting").measures[0].name
    first = planted("superbatch", [1.0] * 4, quantity)
    other = planted("other", [1 + shift + spread * s for s in (-1, 1, -0.5, 0.5)], quantity)
    found = study_coupled.conclude((first, other), recipe=made("counting"), margin=0.1)
    assert found.conclusion == f"Mean absolute error, spots (lower is better) of superbatch: 1.000; {said}"


def test_no_conclusion_without_runs() -> None:
    nothing = (planted("superbatch", [], ""), planted("other", [], ""))
    found = study_coupled.conclude(nothing, recipe=made("ring"), margin=0.1)
    assert found.conclusion == "Too few runs were finished to conclude anything."


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (
            own_recipe.plane,
            {},
            r"The recipe 'plane' is not for the study coupled\. Use one of code-search",
        ),
        (
            lambda: made("ring"),
            {"samples": 255},
            r"samples=255 is less than one update of 256 samples\. Give at",
        ),
        (lambda: made("ring"), {"learning_rate": 0.1}, "this study takes samples, margin"),
    ],
)
def test_wrong_options(recipe: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study("coupled", recipe(), Options(**options))
