"""Errors are short: one sentence says what is wrong, and at most one more says what to type instead."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "superbatch"
MOST = 2
# A sentence ends where a period is followed by the end, or by a capital letter or code.
_END = re.compile(r"[.?!](?:\s+(?=[A-Z`])|$)")


def text_of(node: ast.expr) -> str:
    """Return the text of an expression; values that are known only at run time become X."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "X"


def error_texts(source: str) -> list[str]:
    """Return the first argument of each call of a class whose name ends with Error."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name.endswith("Error"):
                found.append(text_of(node.args[0]))
    return found


def long_texts(source: str) -> list[str]:
    """Return the texts that have too many sentences."""
    return [text for text in error_texts(source) if len(_END.findall(text)) > MOST]


def test_errors_have_at_most_two_sentences() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert sum(len(error_texts(source)) for source in sources.values()) > 500, "the premise"
    found = {path.name: texts for path, source in sources.items() if (texts := long_texts(source))}
    assert not found, f"more than {MOST} sentences: {found}"


def test_a_third_sentence_is_found() -> None:
    assert long_texts('raise InputError(f"x={x!r} is wrong. Pass an int. Or " "pass None.")')
    assert not long_texts('raise InputError(f"x={x!r} is wrong, e.g. 1.5. Pass an int.")')
