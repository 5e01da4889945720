"""The page on errors has a section with cause and cure for every error type."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "errors.md"
BASE = "SuperbatchError"


def error_types(folder: Path) -> set[str]:
    """Return the names of classes below `folder` that derive from the base of all errors."""
    bases: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    found = {BASE}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def sections(text: str) -> dict[str, str]:
    """Return the text of each section by its heading."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_error_type_has_its_section_and_a_row() -> None:
    types = error_types(ROOT / "superbatch")
    assert {"InputError", "WindowError", "PrototxtError", "WrongRuleError"} <= types, "the premise"
    text = PAGE.read_text(encoding="utf-8")
    assert set(sections(text)) == types
    for name in types - {BASE}:
        assert f"| [`{name}`](#{name.lower()}) |" in text, name


@pytest.mark.parametrize("part", ["**Cause.**", "**Cure.**"])
def test_every_section_has_a_cause_and_a_cure(part: str) -> None:
    found = sections(PAGE.read_text(encoding="utf-8"))
    assert not [name for name, text in found.items() if name != BASE and part not in text]


def test_a_type_that_the_page_lacks_is_found(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text(
        "class SuperbatchError(Exception): ...\n"
        "class FirstError(SuperbatchError, ValueError): ...\n"
        "class SecondError(FirstError): ...\n"
        "class OtherError(ValueError): ...\n"
    )
    assert error_types(tmp_path) == {"SuperbatchError", "FirstError", "SecondError"}
