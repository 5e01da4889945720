"""The study `coupled` on the user's data: folders of images, pairs, texts and Python sources."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from superbatch.errors import InputError
from superbatch.lab.recipes import load_recipe
from superbatch.lab.recipes.coupled import CoupledRecipe
from superbatch.lab.studies.study import Options, study

OWN = """
from pathlib import Path
from superbatch.lab.recipes.coupled.code_search import code_search
from superbatch.lab.recipes.coupled.docstrings import as_numbers, words

def recipe():
    lines = Path(__file__).with_name("pairs.tsv").read_text().splitlines()
    pairs = [tuple(map(words, line.split("\\t"))) for line in lines]
    return code_search(texts=as_numbers(pairs, training_from=1500))
"""


def test_pairs_of_the_user(tmp_path: Path) -> None:
    """Use a folder with a file of queries and passages, and a recipe file beside it."""
    letters = [chr(ord("a") + i) * 3 for i in range(20)]
    lines = [f"{letters[i % 20]} {letters[i % 7]}\t{letters[i % 20]} {letters[i % 11]}" for i in range(1800)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    report = study("coupled", f"{tmp_path / 'mine.py'}:recipe", Options(runs=2, samples=256))
    assert {arm.name for arm in report.arms} >= {"superbatch", "plain, m = 2"}
    assert all(len(arm.runs) == 2 for arm in report.arms)


def test_a_folder_of_sources(tmp_path: Path) -> None:
    """Generate 2100 documented functions, each with a comment."""
    names = ["".join(chr(97 + i // 26**k % 26) * 2 for k in range(3)) for i in range(2100)]
    lines = [
        f'# Read {name} from file\ndef {name}(file):\n    """Read {name} from an open file again."""\n'
        f"    {name} = file.read()\n    for each in {name}: print(each, file, {name})\n"
        for name in names
    ]
    (tmp_path / "many.py").write_text("".join(lines) * 1, encoding="utf-8")
    search = load_recipe("code-search", data=tmp_path)
    assert search.samples == 2100 - 1500
    with pytest.raises(
        InputError, match=r"has \d+ pieces of source and 2100 comments, but token-means needs 1000"
    ):
        load_recipe("token-means", data=tmp_path)
    (tmp_path / "more.py").write_text("".join(lines) * 10, encoding="utf-8")
    assert load_recipe("token-means", data=tmp_path).samples > 1000
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="has 0 documented functions, but code-search needs 2000"):
        load_recipe("code-search", data=tmp_path / "nothing")


# ------------------------------------------------------------------------------------------------- pairs


def letters(number: int) -> str:
    return "".join(chr(97 + number // 26**k % 26) * 2 for k in range(3))


def write_pairs(folder: Path, count: int, kind: str) -> None:
    pairs = [
        (f"Où est {letters(i)}?", f"La {letters(i)} est là, près de {letters(i % 7)}") for i in range(count)
    ]
    if kind == "tsv":
        text = "\n".join(map("\t".join, pairs))
    else:
        text = "\n".join(json.dumps({"query": query, "passage": passage}) for query, passage in pairs)
    (folder / f"pairs.{kind}").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_pairs_of_a_folder(tmp_path: Path, kind: str) -> None:
    write_pairs(tmp_path, 2100, kind)
    recipe = load_recipe("code-search", data=tmp_path)
    assert recipe.samples == 2100 - 1500
    assert "a query must find its passage" in recipe.description and tmp_path.name in recipe.description
    batch = recipe.batch(torch.arange(200))
    assert (batch["query"] > 0).any() and (batch["code"] > 0).any(), "both sides share words"


def test_a_query_and_a_passage_count_once(tmp_path: Path) -> None:
    write_pairs(tmp_path, 2100, "tsv")
    write_pairs(tmp_path, 2100, "jsonl")
    assert load_recipe("code-search", data=tmp_path).samples == 2100 - 1500


def test_the_exact_update_learns_pairs(tmp_path: Path) -> None:
    """Run the whole command; the exact update is among those that learn."""
    write_pairs(tmp_path, 2300, "tsv")
    report = study("coupled", "code-search", Options(runs=1, samples=1024, data=tmp_path))
    assert report.setting["updates"] == "4" and "device" not in report.setting
    assert report.arm("superbatch").mean("recall@10, %") is not None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.tsv",
            "one\ttwo\nthree",
            r"a\.tsv, line 2 has 1 columns, not 2\. Write a query, one tab and a",
        ),
        ("a.jsonl", "{", r"a\.jsonl, line 1 is not JSON: .*\. Write one object on each line\."),
        ("a.jsonl", '{"q": "a"}', r"a\.jsonl, line 1 has the keys 'q'\. Write {\"query\""),
        ("a.jsonl", "[1]", r"a\.jsonl, line 1 is not an object\. Write {\"query\""),
        (
            "a.tsv",
            "how to\topen it",
            r"has 1 different pairs of texts, but code-search needs 2000\. Add pairs",
        ),
    ],
)
def test_a_wrong_line_of_pairs(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_recipe("code-search", data=tmp_path)


def test_a_file_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes("où\tici".encode("latin-1"))
    with pytest.raises(InputError, match=r"cannot be read: .* Save it as UTF-8 text\."):
        load_recipe("code-search", data=tmp_path)


# ------------------------------------------------------------------------------------------------- texts


def test_a_text_corpus(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = [" ".join(letters(draw.randrange(300)) for _ in range(14)) for _ in range(1700)]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "book.txt").write_text("\n\n".join([*lines, "short"]), encoding="utf-8")
    recipe = load_recipe("token-means", data=tmp_path)
    assert isinstance(recipe, CoupledRecipe)
    assert [each.name for each in recipe.measures][:2] == ["text, bits/byte", "lines, bits/byte"]
    assert "one of 8 texts is text, the others are lines" in recipe.description
    labels = recipe.batch(torch.arange(recipe.samples))["labels"]
    lengths = (labels != -100).sum(1)
    assert set(lengths.tolist()) == {128, 24}, "premise: the weights of the samples differ"
    assert 8 * int((lengths == 128).sum()) == len(lengths)
    (tmp_path / "one.py").write_text("# A source, which is read first\n", encoding="utf-8")
    with pytest.raises(InputError, match="has 0 pieces of source and 1 comments, but token-means needs 1000"):
        load_recipe("token-means", data=tmp_path)


# ------------------------------------------------------------------------------------------------ images


def write_images(folder: Path, names: tuple[str, ...], each: int, kind: str = "png") -> None:
    """Write noisy images with a grey level for each name."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra: plot)")
    draw = random.Random(0)
    for place, name in enumerate(names):
        (folder / name).mkdir()
        for number in range(each):
            grey = 255 * place // (len(names) - 1) + draw.randrange(-20, 20)
            size = (20 + number % 3, 30)
            image.new("RGB", size, (max(0, min(255, grey)),) * 3).save(folder / name / f"{number}.{kind}")


@pytest.mark.parametrize("kind", ["png", "ppm", "jpg"])
def test_counts_of_objects_in_images(tmp_path: Path, kind: str) -> None:
    write_images(tmp_path, ("0", "3", "12"), 70, kind)
    recipe = load_recipe("counting", data=tmp_path)
    assert "0 to 12 things in images of" in recipe.description
    assert recipe.samples == 210 - 2 * 42
    batch = recipe.batch(torch.arange(recipe.samples))
    assert (
        batch["images"].shape == (126, 3, 32, 32) and 0 <= batch["images"].min() < batch["images"].max() <= 1
    )
    assert set(batch["targets"].tolist()) == {0.0, 3.0, 12.0}
    brightness = batch["images"].mean((1, 2, 3))
    assert all(brightness[batch["targets"] == 0] < 0.2), "an image keeps its number"
    assert all(brightness[batch["targets"] == 12] > 0.8)


def test_classes_of_images(tmp_path: Path) -> None:
    write_images(tmp_path, ("cat", "dog"), 110)
    (tmp_path / "empty").mkdir()
    report = study("coupled", "counting", Options(runs=2, samples=32 * 12, data=tmp_path))
    assert "2 classes of images of" in report.description
    errors = {arm.name: arm.mean("errors, %") for arm in report.arms}
    assert all(value is not None and 0 <= value <= 100 for value in errors.values())
    assert errors["GroupNorm"] == 0, "premise: the classes are separable"
    assert report.conclusion.startswith("Errors, % (lower is better) of superbatch: ")


def test_the_exact_update_of_classes_equals_the_real_batch(tmp_path: Path) -> None:
    write_images(tmp_path, ("cat", "dog", "owl"), 70)
    recipe = load_recipe("counting", data=tmp_path)
    assert isinstance(recipe, CoupledRecipe)
    batch = recipe.batch(torch.arange(32))
    batch["images"] = batch["images"].double()

    def gradient(name: str) -> torch.Tensor:
        way = recipe.way(name)
        model = way.model(0).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = torch.nn.utils.parameters_to_vector(model.parameters())
        way.update(model, optimizer, 0.0)(batch)
        return before - torch.nn.utils.parameters_to_vector(model.parameters())

    model = recipe.model(0).double()
    recipe.loss_fn(model)(batch).backward()
    real = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert real.norm() > 1e-3
    assert (gradient("superbatch") - real).norm() < 1e-11 * real.norm()
    assert (gradient("plain, m = 2") - real).norm() > 1e-2 * real.norm(), "the mutant"


def test_too_few_images(tmp_path: Path) -> None:
    write_images(tmp_path, ("cat", "dog"), 3)
    message = (
        r"has 6 images in 2 subfolders, but counting needs at least 200 in 2 subfolders\. "
        r"Store them as FOLDER/CLASS/\*\.png"
    )
    with pytest.raises(InputError, match=message):
        load_recipe("counting", data=tmp_path)


def test_a_damaged_image(tmp_path: Path) -> None:
    write_images(tmp_path, ("cat", "dog"), 110)
    file = tmp_path / "dog" / "7.png"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(InputError, match=r"7\.png' cannot be read as an image: .*\. Repair or remove it\."):
        load_recipe("counting", data=tmp_path)


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, ("cat", "dog"), 110)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"Reading images needs Pillow\. Run pip install pillow\."):
        load_recipe("counting", data=tmp_path)


# ----------------------------------------------------------------------------------- folders and devices


@pytest.mark.parametrize("name", ["code-search", "counting", "token-means", "mnist"])
def test_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"nowhere' is not a folder\. Pass the path of a folder\."):
        load_recipe(name, data=tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["code-search", "counting", "fairness", "ring", "token-means"])
def test_the_losses_take_a_device(name: str, tmp_path: Path) -> None:
    """The device "meta" raises, as a GPU does, if a tensor is still on the CPU."""
    if name == "code-search":
        write_pairs(tmp_path, 2100, "tsv")
    recipe = load_recipe(name, data=tmp_path if name == "code-search" else None)
    assert isinstance(recipe, CoupledRecipe)
    batch = {key: each.to("meta") for key, each in recipe.batch(torch.arange(recipe.batch_size)).items()}
    losses = 0
    for way in recipe.ways:
        model = way.model(0).to("meta")
        if way.name.startswith("superbatch"):
            recipe.loss_fn(model)(batch).backward()
        elif way.name != "cached gradients":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            way.update(model, optimizer, 1.0)(batch)
        losses += 1
    assert losses >= 4
    with pytest.raises(RuntimeError, match="device"):  # the premise
        torch.nn.functional.cross_entropy(torch.ones(1, 2, device="meta"), torch.zeros(1, dtype=torch.long))


def test_a_missing_device() -> None:
    message = r"device='cuda:99' cannot be used here: .*\. Leave it out to train on the CPU\."
    with pytest.raises(InputError, match=message):
        study("coupled", "ring", Options(device="cuda:99"))
    with pytest.raises(InputError, match="device='gpu' cannot be used here"):
        study("coupled", "ring", Options(device="gpu"))
    with pytest.raises(InputError, match=r"The study 'splits' does not use device='cuda'\. Leave it"):
        study("splits", "digits", Options(device="cuda"))
