"""Limits on the lines of a function and of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTION_LINES = 60  # without the docstring; the aim is 40
FILE_LINES = 400

# "file::function" or "file": reason for the exception. An unneeded entry fails the test.
ALLOWED: dict[str, str] = {}


def _docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(function) is None:
        return 0
    text = function.body[0]
    return (text.end_lineno or text.lineno) - text.lineno + 1


def too_long(root: Path) -> Iterator[tuple[str, int]]:
    """Return (name, lines) of every function and file below `root` over its limit."""
    for file in sorted([*root.glob("superbatch/**/*.py"), *root.glob("benchmarks/**/*.py")]):
        text, name = file.read_text(encoding="utf-8"), file.relative_to(root).as_posix()
        if len(text.splitlines()) > FILE_LINES:
            yield name, len(text.splitlines())
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
                if lines > FUNCTION_LINES:
                    yield f"{name}::{node.name}", lines


def test_limits() -> None:
    found = dict(too_long(ROOT))
    offenders = [f"{name}: {lines} lines" for name, lines in found.items() if name not in ALLOWED]
    assert not offenders, f"beyond {FUNCTION_LINES} lines a function, {FILE_LINES} a file:\n" + "\n".join(
        offenders
    )
    unused = ALLOWED.keys() - found.keys()
    assert not unused, f"within the limits, so no longer in need of an exception: {sorted(unused)}"


def test_long_functions_and_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "superbatch").mkdir()
    body = "    x = 1\n"
    docstring = '    """' + "\n" * 100 + '    """\n'
    (tmp_path / "superbatch" / "a.py").write_text("def good():\n" + docstring + body * 59, encoding="utf-8")
    (tmp_path / "superbatch" / "b.py").write_text("def bad():\n" + docstring + body * 60, encoding="utf-8")
    (tmp_path / "superbatch" / "c.py").write_text("x = 1\n" * 401, encoding="utf-8")
    assert list(too_long(tmp_path)) == [("superbatch/b.py::bad", 61), ("superbatch/c.py", 401)]
