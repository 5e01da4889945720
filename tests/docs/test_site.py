"""The site builds with warnings as errors, and its pages are complete."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from tests.docs import browser, links

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra: docs)")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_the_reference_is_made_from_docstrings(site: Path) -> None:
    core = page(site, "reference/core")
    assert "A batch cannot be split into micro-batches as asked." in core
    assert 'id="superbatch.normalize.scale"' in core


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("superbatch", "core"),
        ("superbatch.torch", "torch"),
        ("superbatch.jax", "jax"),
        ("superbatch.tensorflow", "tensorflow"),
    ],
)
def test_every_public_name_is_in_the_reference(site: Path, package: str, name: str) -> None:
    if package == "superbatch.torch":
        pytest.importorskip("torch", reason="torch is not installed")
    if package == "superbatch.jax":
        pytest.importorskip("jax", reason="jax is not installed")
        pytest.importorskip("optax", reason="optax is not installed")
    if package == "superbatch.tensorflow":
        pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    text = page(site, f"reference/{name}")
    public = [
        key
        for key, value in vars(importlib.import_module(package)).items()
        if key[0] != "_" and not isinstance(value, types.ModuleType)
    ]
    assert len(public) >= 3, "the premise: the package re-exports its public names"
    # The second form: a function with the name of its module.
    missing = [key for key in public if not re.search(rf'id="{package}\.(?:{key}\.)?{key}"', text)]
    assert not missing


def test_the_reference_begins_with_the_accumulator(site: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    names = re.findall(
        r'id="superbatch\.torch\.(\w+)" class="doc doc-heading"', page(site, "reference/torch")
    )
    assert names[:2] == ["Accumulator", "WholeBatch"]


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    typer = pytest.importorskip("typer", reason="typer is not installed (extra: cli)")
    from superbatch.lab.cli.app import app

    text = page(site, "reference/cli")
    commands = typer.main.get_command(app).commands
    assert {"compare", "verify", "fit"} <= set(commands)
    for name, command in commands.items():
        assert f'<h2 id="{name}">' in text
        for parameter in command.params:
            shown = parameter.opts if parameter.param_type_name == "option" else [parameter.name.upper()]
            assert getattr(parameter, "hidden", False) or all(f"<code>{one}</code>" in text for one in shown)


def test_files_of_the_root_are_pages(site: Path) -> None:
    assert "train with the batch size you want" in page(site, "")
    assert 'href="all-of-superbatch/"' in page(site, "")
    assert "Keep a Changelog" in page(site, "changelog")
    assert "Rules for tests" in page(site, "contributing")


def test_every_decision_has_a_unique_number_and_is_listed(site: Path) -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert decisions
    index = page(site, "decisions")
    for file in decisions:
        assert f"../decisions/{file.stem}" in index or f'href="{file.stem}/"' in index, file.name
        assert file.read_text(encoding="utf-8").startswith(f"# {file.name[:4]} "), f"the title of {file.name}"
    doubled = [number for number, count in Counter(file.name[:4] for file in decisions).items() if count > 1]
    assert not doubled, f"two decisions with one number: {doubled}"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    text = page(site, "")
    for attribute in ('<script src="http', '<link rel="stylesheet" href="http', '<img src="http'):
        assert attribute not in text


def test_no_link_is_broken(site: Path) -> None:
    assert len(links.page_names(site)) > 50, "the premise: the pages are found"
    assert not links.broken_links(site)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    text = '<p id="a"><a href="other/">x</a><a href="#b">x</a><a href="#a">x</a></p>'
    (tmp_path / "index.html").write_text(text)
    assert links.broken_links(tmp_path) == ["index.html: #b", "index.html: other/"]


# In a headless browser: no overflow, no missing picture, no error on the console.

FEW = ("index.html", "exactness/index.html")  # the front page, and the widest table


@pytest.fixture(scope="module")
def chromium() -> str:
    found = browser.chromium()
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(browser.NAMES)} is on the path")
    return found


def test_pages_fit_a_phone_and_a_desktop(site: Path, chromium: str, tmp_path: Path) -> None:
    assert set(FEW) <= set(links.page_names(site))
    assert not browser.problems(chromium, site, list(FEW), tmp_path)


@pytest.mark.slow
def test_all_pages_fit_a_phone_and_a_desktop(site: Path, chromium: str, tmp_path: Path) -> None:
    assert not browser.problems(chromium, site, links.page_names(site), tmp_path)


WRONG = {
    "wide": ('<div style="width: 500px">x</div>', "wide/index.html at 390 px: 5"),
    "picture": ('<img src="none.png">', "no picture"),
    "error": ("<script>undefined_name()</script>", "undefined_name is not defined"),
}


def test_problems_of_a_page_are_found(chromium: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, (body, _) in WRONG.items():
        (site / name).mkdir(parents=True)
        (site / name / "index.html").write_text(f"<!doctype html><body>{body}</body>")
    (site / "right").mkdir()
    (site / "right" / "index.html").write_text('<!doctype html><body><p id="here">x</p></body>')
    found = browser.problems(chromium, site, links.page_names(site), tmp_path / "profile")
    for name, (_, expected) in WRONG.items():
        assert any(expected in line for line in found), (name, found)
    assert not [line for line in found if line.startswith(("right", "wide/index.html at 1280"))]
