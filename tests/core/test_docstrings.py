"""First lines of docstrings: a noun phrase or an imperative, never a question."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUESTION_WORDS = {"what", "which", "whether", "who", "how", "where", "when", "is", "are", "does", "do", "has"}


def questions(root: Path) -> Iterator[str]:
    """Return places and first lines of the docstrings below `root` that begin with a question word."""
    for file in sorted(root.glob("superbatch/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if first.lower().split(" ")[0] in QUESTION_WORDS:
                    yield f"{file.relative_to(root).as_posix()}:{node.body[0].lineno}: {first}"


def test_first_lines_are_noun_phrases_or_imperatives() -> None:
    found = list(questions(ROOT))
    assert not found, "begin with a noun or an imperative (Return True if ...):\n" + "\n".join(found)


def test_a_question_is_found(tmp_path: Path) -> None:
    (tmp_path / "superbatch").mkdir()
    good = '"""Islands of a map."""\ndef good():\n    """Return what is left."""\n'
    bad = 'def bad():\n    """Whether it fits."""\n'
    (tmp_path / "superbatch" / "a.py").write_text(good + bad, encoding="utf-8")
    assert list(questions(tmp_path)) == ["superbatch/a.py:5: Whether it fits."]
