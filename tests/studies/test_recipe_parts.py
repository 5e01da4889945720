"""Known values of functions of the recipes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from superbatch.lab.recipes import digits, models, pairs, text
from superbatch.lab.recipes.coupled import code_search, corpora, fairness, ring
from superbatch.lab.recipes.coupled.counting import counting
from superbatch.lab.recipes.coupled.docstrings import as_numbers, shuffled
from superbatch.lab.recipes.coupled.images import spots
from superbatch.lab.recipes.coupled.pair_files import pair_files, words_of
from superbatch.lab.recipes.digits_data import digits_elsewhere, facts, initial_weights, load_images
from superbatch.lab.recipes.drawing import Draws
from superbatch.lab.recipes.failing import recipe_failure
from superbatch.lab.recipes.mnist import read_idx


def test_the_digits_and_their_models() -> None:
    recipe = digits.digits()
    assert (recipe.samples, recipe.batch_size, recipe.learning_rates["sgd"]) == (1297, 100, 0.06)
    assert digits.digits_bn().coupled == digits.digits_conv_bn().coupled == "exact"
    assert sum(p.numel() for p in digits.digits_conv().model(0).parameters()) == 1898
    shapes = [(1297, 64), (1297,), (500, 64), (500,)]
    assert [tuple(part.shape) for part in digits.load_digits()] == shapes
    assert [part.shape for part in load_images()] == shapes
    assert list(facts(1297, 500)["learning_rates"]) == ["sgd", "momentum", "adam", "adamw"]


def test_the_digits_without_torch() -> None:
    assert {name: values.shape for name, values in initial_weights(0).items()} == {
        "0.weight": (32, 64),
        "0.bias": (32,),
        "2.weight": (10, 32),
        "2.bias": (10,),
    }
    assert Draws(0).permutation(5).tolist() == [4, 0, 1, 3, 2]
    assert torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist() == [4, 0, 1, 3, 2]
    recipe = digits_elsewhere()
    weights = recipe.model(0)
    assert recipe.samples == 1297
    assert recipe.evaluate(weights) < 30


def test_functions_of_models() -> None:
    model = models.seeded(lambda: nn.Linear(2, 1))
    first, again, other = (model(seed).get_parameter("weight") for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert models.dtype_of(nn.Linear(1, 1).double()) == torch.float64
    same = nn.Linear(2, 2, bias=False)
    same.weight.data.copy_(torch.eye(2))
    assert models.accuracy(same, torch.eye(2), torch.tensor([0, 0])) == 50.0


def test_evaluation_uses_eval_mode_and_the_dtype_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9)).double()
    outputs = models.evaluated(model, torch.ones(3, 2))
    assert torch.equal(outputs, model[0](torch.ones(3, 2).double())), "no dropout"
    assert model.training and not outputs.requires_grad


def test_pairs_of_digits() -> None:
    batch = pairs.pairs().batch(torch.arange(4))
    assert batch["first"].shape == (4, 64)
    assert not torch.equal(batch["first"], batch["second"])
    assert pairs.view(torch.zeros(2, 64), torch.Generator().manual_seed(0)).shape == (2, 64)
    assert round(pairs.info_nce(torch.eye(2), torch.eye(2)).item(), 4) == 0.0067


def test_lines_of_text() -> None:
    recipe = text.text(lines=400)
    batch = recipe.batch(torch.arange(8))
    assert batch["ids"].shape == batch["labels"].shape
    assert callable(recipe.weight) and recipe.weight(batch) < batch["labels"].numel()
    assert text.ByteModel()(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 256)
    lines = text.read_lines(1000)
    assert len(lines) == 1000
    assert max(map(len, lines)) <= text.LONGEST


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "labels-idx1-ubyte"
    file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    assert read_idx(file).tolist() == [7, 8, 9]
    assert pair_files(tmp_path / "nowhere") == []
    assert words_of("Où est la gare?") == ["où", "est", "la", "gare"]


def test_an_error_in_installed_code_is_not_the_users() -> None:
    """tests/cli/test_own_code_fails.py tests errors in the user's code."""
    with ThreadPoolExecutor() as executor:
        error = executor.submit(json.loads, "{").exception()
    assert error is not None and error.__traceback__ is not None, (
        "the premise: the traceback contains installed code"
    )
    assert recipe_failure(error) is None


def test_losses_of_the_coupled_recipes() -> None:
    assert (
        round(pairs.info_nce(torch.eye(2)[None], torch.eye(2)[None], code_search.TEMPERATURE).item(), 4)
        == 0.0013
    )
    assert fairness.gap(torch.tensor([0.5, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])).item() == 0.0
    assert ring.sliced(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2)).item() == 0.0


def test_data_of_the_coupled_recipes() -> None:
    assert text.collate([b"ab", b"c"], first=corpora.START)["ids"].tolist() == [[256, 97], [256, 0]]
    assert counting().batch(torch.arange(4))["images"].shape == (4, 1, 24, 24)
    assert shuffled([(["read", "file"], ["open", "file"])] * 2000).queries.shape == (2000, 32)
    pairs_of_words = [(["read", "file"], ["open", "file"])] * 2
    assert as_numbers(pairs_of_words, training_from=0).queries[0, :3].tolist() == [3, 1, 0]
    assert fairness.people(3, seed=0)["features"].shape == (3, 13)
    assert fairness.fairness().batch(torch.arange(4))["group"].shape == (4,)
    drawn = spots(3, seed=0)
    assert drawn.images.shape == (3, 1, 24, 24)
    assert bool((drawn.targets <= 30).all())
    assert ring.draw(3, seed=0)["points"].shape == (3, 2)
    assert ring.ring().batch(torch.arange(4))["noise"].shape == (4, 8)
