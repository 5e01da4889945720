"""Backends of a comparison: torch's random numbers without torch, and options that only torch has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from superbatch.errors import InputError
from superbatch.lab.recipes import load_recipe
from superbatch.lab.recipes.digits_data import accuracy, digits_elsewhere, initial_weights
from superbatch.lab.recipes.drawing import Draws
from superbatch.lab.studies import backends
from superbatch.lab.studies.backends import PACKAGES, load_backend
from superbatch.lab.studies.compare import Options, compare
from superbatch.lab.studies.on_torch import orders, weights_of
from superbatch.lab.studies.setting import Setting, batches
from tests.studies import own_recipe

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [name for name in PACKAGES if name != "torch"]


def digits() -> Any:
    """The digits task on arrays, without a loss function."""
    return digits_elsewhere()


@pytest.mark.parametrize("seed", [0, 1, 9, 12345])
def test_the_task_without_torch_equals_that_of_torch(seed: int) -> None:
    ours, theirs = digits(), load_recipe("digits")
    model = theirs.model(seed)
    drawn = initial_weights(seed)
    for name, values in weights_of(model).items():
        assert values.abs().max() > 0.05
        assert np.array_equal(drawn.pop(name), values.numpy()), name
    assert drawn == {}
    indices = np.arange(0, 1297, 7)
    for got, wanted in zip(ours.batch(indices), theirs.batch(torch.from_numpy(indices)), strict=True):
        assert np.array_equal(got, wanted.numpy())
        assert got.dtype == wanted.numpy().dtype
    assert ours.evaluate(initial_weights(seed)) == theirs.evaluate(model)
    same = (
        "name",
        "description",
        "samples",
        "metric",
        "unit",
        "margin",
        "batch_size",
        "updates",
        "statement",
    )
    assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
    assert ours.learning_rates == theirs.learning_rates


@pytest.mark.parametrize("tail", [None, 40])
def test_the_order_without_torch_equals_that_of_torch(tail: int | None) -> None:
    setting = Setting(
        arms=(), updates=60, batch_size=100, tail=tail, dtype="float32", optimizer="sgd", learning_rate=1.0
    )
    draws = Draws(3)
    ours = list(batches(lambda: draws.permutation(1297), 1297, setting))
    theirs = list(orders(1297, setting, seed=3))
    assert len({len(batch) for batch in ours}) == (1 if tail is None else 2), (
        "the premise: tails, if asked for"
    )
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
    other = Draws(4).permutation(1297)
    assert ours[0].tolist() != other[:100].tolist()


def test_accuracy_counts_correct_labels() -> None:
    recipe = digits()
    images, labels = recipe.batch(np.arange(1297))
    weights = initial_weights(0)
    before = accuracy(weights, images, labels)
    assert before != accuracy({**weights, "2.bias": weights["2.bias"] + np.arange(10)}, images, labels)
    always_three = {name: 0 * values for name, values in weights.items()}
    always_three["2.bias"] = np.eye(10)[3]
    assert accuracy(always_three, images, labels) == pytest.approx(100 * np.mean(labels == 3))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (
            "text",
            {},
            "with recipe='text': only the backend torch supports that. Use recipe='digits'",
        ),
        ("digits-bn", {}, "with recipe='digits-bn'"),
        ("file.py:own", {}, "with recipe='file.py:own'"),
        ("digits", {"threads": 2}, "with threads=2: only the backend torch supports that"),
        (
            "digits",
            {"data": "folder"},
            "backend='{}' with data='folder': only the backend torch supports that",
        ),
    ],
)
def test_options_of_torch_alone_are_refused(
    name: str, recipe: str, options: dict[str, object], message: str
) -> None:
    asked = Options(backend=name, **options)  # pyright: ignore[reportArgumentType]  (keyword arguments by name)
    with pytest.raises(InputError, match=message.format(name)):
        compare(recipe, asked)


def test_a_recipe_object_needs_torch() -> None:
    with pytest.raises(InputError, match="backend='jax' with recipe='plane'"):
        compare(own_recipe.plane(), Options(backend="jax"))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match=r"There is no backend 'caffe'. Use one of torch, jax"):
        compare("digits", Options(backend="caffe"))


@pytest.mark.parametrize("name", OTHERS)
def test_a_missing_backend_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda package: None)
    packages = " and ".join(PACKAGES[name])
    message = rf"the packages? {packages} (is|are) not installed. Install superbatch\[{name},cli\]"
    with pytest.raises(InputError, match=message):
        load_backend(name)


def test_a_comparison_is_planned_without_a_framework() -> None:
    """Wrong options raise before the slow imports, and other backends do not import torch."""
    code = (
        "import sys, superbatch.lab.studies.compare, superbatch.lab.cli.app, superbatch.lab.plot\n"
        "print(*(name for name in ('torch', 'jax', 'tensorflow', 'keras') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
