"""Recipes of the package, recipes of the user, and loading them by name."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import pytest
import torch

from superbatch.batch.tree import count_samples
from superbatch.errors import InputError
from superbatch.lab.recipes import RECIPES, Recipe, load_recipe
from superbatch.lab.recipes.mnist import read_idx
from superbatch.lab.recipes.text import IGNORE, NEWLINE
from tests.studies import own_recipe

OWN = Path(own_recipe.__file__)


def built_in() -> list[str]:
    return [name for name in RECIPES if name != "mnist"]


@pytest.mark.parametrize("name", built_in())
def test_a_recipe_trains(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    indices = torch.arange(recipe.batch_size)
    batch = recipe.batch(indices)
    assert count_samples(batch) == recipe.batch_size
    model = recipe.model(0)
    optimizer = recipe.optimizers[recipe.default_optimizer](
        model.parameters(), recipe.learning_rates[recipe.default_optimizer]
    )
    loss_fn, losses = recipe.loss_fn(model), []
    for _ in range(10):
        loss = loss_fn(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert isinstance(recipe.evaluate(model), float)


@pytest.mark.parametrize("name", built_in())
def test_weights_come_from_the_seed_and_leave_the_generator_alone(name: str) -> None:
    recipe = load_recipe(name)
    before = torch.get_rng_state()
    first, again, other = (list(recipe.model(seed).parameters()) for seed in (3, 3, 4))
    assert bool((torch.get_rng_state() == before).all())
    assert all(bool((a == b).all()) for a, b in zip(first, again, strict=True))
    assert not all(bool((a == b).all()) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", built_in())
def test_evaluation_changes_nothing(name: str) -> None:
    recipe = load_recipe(name)
    model = recipe.model(0).double().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert recipe.evaluate(model) == recipe.evaluate(model)
    assert model.training
    assert all(bool((value == before[key]).all()) for key, value in model.state_dict().items())


def test_digits_has_the_setup_of_the_experiment() -> None:
    recipe = load_recipe("digits")
    images, labels = recipe.batch(torch.arange(recipe.samples))
    assert (recipe.samples, recipe.batch_size, recipe.updates, recipe.margin) == (1297, 100, 1000, 0.5)
    assert (recipe.default_optimizer, recipe.learning_rates["sgd"]) == ("sgd", 0.06)
    assert images.shape == (1297, 64)
    assert (images.min(), images.max()) == (0, 1)
    counts = torch.bincount(labels)
    assert counts.max() - counts.min() <= 10, "stratified: the classes are about equally frequent"
    assert [tuple(p.shape) for p in recipe.model(0).parameters()] == [(32, 64), (32,), (10, 32), (10,)]


def test_text_has_different_lengths_and_matching_weights() -> None:
    recipe = load_recipe("text")
    batch = recipe.batch(torch.arange(32))
    assert callable(recipe.weight)
    lengths = (batch["labels"] != IGNORE).sum(1)
    assert lengths.max() > 2 * lengths.min(), "the premise: lengths differ"
    assert recipe.weight(batch) == int(lengths.sum())
    assert bool((batch["ids"][:, 0] == NEWLINE).all())
    row, length = 0, int(lengths[0])
    assert bool((batch["ids"][row, 1:length] == batch["labels"][row, : length - 1]).all())
    assert bool((batch["labels"][row, length:] == IGNORE).all())


def test_padding_does_not_reach_the_tokens_before_it() -> None:
    model = load_recipe("text").model(0).double()
    ids = torch.randint(256, (1, 10), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    assert torch.allclose(model(padded)[:, :10], model(ids), rtol=0, atol=1e-12)


def test_pairs_are_two_views_of_the_same_digit() -> None:
    recipe = load_recipe("pairs")
    batch = recipe.batch(torch.arange(200))
    similar = torch.nn.functional.normalize(batch["first"]) @ torch.nn.functional.normalize(batch["second"]).T
    found = (similar.argmax(1) == torch.arange(200)).double().mean()
    assert found > 0.05, "chance finds the partner among 200 in 0.5 % of cases"
    assert not bool((batch["first"] == batch["second"]).all())


# ------------------------------------------------------------------------------------------- the user's own


def test_a_recipe_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'from beside'\n", encoding="utf-8")
    file = tmp_path / "mine.py"
    file.write_text(
        f"import sys; sys.path.append({str(OWN.parent)!r})\n"
        "from own_recipe import plane\nimport beside\nsys.path.pop()\n"
        "def make():\n    return plane(name=beside.NAME)\n",
        encoding="utf-8",
    )
    path = list(sys.path)
    assert load_recipe(f"{file}:make").name == "from beside"
    assert sys.path == path
    for name in ("beside", "own_recipe", "superbatch_recipe_mine"):
        del sys.modules[name]


def test_a_recipe_of_a_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_package_of_mine").mkdir()
    (tmp_path / "a_package_of_mine" / "tasks.py").write_text(
        OWN.read_text(encoding="utf-8"), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    assert load_recipe("a_package_of_mine.tasks:plane").name == "plane"
    del sys.modules["a_package_of_mine.tasks"], sys.modules["a_package_of_mine"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", r"There is no recipe 'digit'; did you mean 'digits'\? Use one of digits, .*text"),
        ("horses", r"There is no recipe 'horses'\. Use one of digits, "),
        ("mine.py", r"'mine.py' names a file without a function. Write mine.py:recipe"),
        ("nowhere.py:make", "The recipe file 'nowhere.py' does not exist"),
        ("no_such_module_:make", "importing 'no_such_module_' raised ModuleNotFoundError"),
        (f"{OWN}:missing", r"has no function 'missing'\. Name a function"),
        (f"{OWN}:plan", r"has no function 'plan'; did you mean 'plane'\?"),
        (f"{OWN}:no_recipe", "returned int. Return a superbatch.lab.recipes.Recipe"),
        (f"{OWN}:broken", "its function raised RuntimeError: no such file"),
    ],
)
def test_errors_of_loading(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_recipe(name)
    assert "\n" not in str(caught.value)


def test_the_error_of_a_broken_recipe_keeps_its_cause() -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(f"{OWN}:broken")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "has samples=0"),
        ({"batch_size": 2.5}, "has batch_size=2.5"),
        ({"batch_size": 241}, "but only 240 training samples"),
        ({"learning_rates": {"rmsprop": 0.1}}, r"the unknown optimizers \['rmsprop'\]"),
    ],
)
def test_errors_of_a_recipe(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        own_recipe.plane(**changes)


# ---------------------------------------------------------------------------------------------------- IDX


def idx(values: torch.Tensor) -> bytes:
    """Return the content of an IDX file of unsigned bytes."""
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + bytes(values.flatten().tolist())


def mnist_folder(folder: Path, *, gz: bool, dot: bool) -> dict[str, torch.Tensor]:
    """Write the four files with random content, and return it."""
    generator = torch.Generator().manual_seed(0)
    content = {}
    for part, count in (("train", 60), ("t10k", 20)):
        content[f"{part}-images"] = torch.randint(256, (count, 5, 4), generator=generator)
        content[f"{part}-labels"] = torch.randint(10, (count,), generator=generator)
        content[f"{part}-labels"][0] = 9
    for name, values in content.items():
        ending = f"{'.' if dot else '-'}idx{values.ndim}-ubyte"
        raw = idx(values)
        file = folder / f"{name}{ending}{'.gz' if gz else ''}"
        file.write_bytes(gzip.compress(raw) if gz else raw)
    return content


@pytest.mark.parametrize(("gz", "dot"), [(False, False), (True, False), (False, True)])
def test_a_folder_in_idx_format(tmp_path: Path, gz: bool, dot: bool) -> None:
    content = mnist_folder(tmp_path, gz=gz, dot=dot)
    recipe = load_recipe("mnist", data=tmp_path)
    images, labels = recipe.batch(torch.arange(60))
    assert isinstance(recipe, Recipe)
    assert torch.equal((images * 255).round().long(), content["train-images"].flatten(1))
    assert torch.equal(labels, content["train-labels"])
    assert recipe.description == "a 20-32-10 perceptron with ReLU on 60 images in IDX format"
    assert 0 <= recipe.evaluate(recipe.model(0)) <= 100


def test_batches_may_not_exceed_a_small_folder(tmp_path: Path) -> None:
    mnist_folder(tmp_path, gz=False, dot=False)
    assert load_recipe("mnist", data=tmp_path).batch_size == 60


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"it starts with '', not 00 00 08"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00\x00\x00\x00", "it starts with '00 00 0d 01'"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x01", "its header is incomplete"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05abc", r"has the shape \(5,\), but 3 values follow"),
        (gzip.compress(b"abcdefgh" * 50, mtime=0)[:20], "Compressed file ended|incomplete"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_idx(file)


def test_errors_of_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs a folder with the four files of MNIST. Add --data FOLDER"):
        load_recipe("mnist")
    with pytest.raises(InputError, match="has no file train-images-idx"):
        load_recipe("mnist", data=tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        load_recipe("mnist", data=tmp_path / "nowhere")
    with pytest.raises(InputError, match="does not read data="):
        load_recipe("digits", data=tmp_path)
    mnist_folder(tmp_path, gz=False, dot=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(InputError, match="60 images, but train-labels has 3 labels"):
        load_recipe("mnist", data=tmp_path)
