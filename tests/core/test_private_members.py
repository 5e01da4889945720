"""Private members are used only by their own object."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Allowed uses in a file, and the reason; the numbers may only shrink.
ALLOWED: dict[str, tuple[int, str]] = {
    "superbatch/keras/taking.py": (3, "Keras has no public names for the losses that compile() got"),
    "superbatch/torch/module_tables.py": (3, "torch has no public names for a module's own tables"),
    "superbatch/torch/tuning/batches.py": (2, "torch has no public name for the workers that persist"),
    "superbatch/torch/window/participants/gradient_sum.py": (1, "the values of a sparse, unsorted tensor"),
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> Iterator[str]:
    """Return the private names that classes of a file define: methods, fields, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield item.name
                elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _of_self(node):
            yield node.attr


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def _of_super(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"


def reaches(root: Path) -> dict[str, list[str]]:
    """Return the uses of private members from outside their object, by file.

    A private name that no class of the package defines belongs to a library (torch's `_version`).
    """
    files = {file: ast.parse(file.read_text(encoding="utf-8")) for file in root.glob("superbatch/**/*.py")}
    ours = {name for tree in files.values() for name in _defined(tree) if _is_private(name)}
    found: dict[str, list[str]] = {}
    for file, tree in files.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ours
                and not (_of_self(node) or _of_super(node))
            ):
                name = file.relative_to(root).as_posix()
                found.setdefault(name, []).append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_private_members_are_used_by_their_own_object() -> None:
    found = reaches(ROOT)
    beyond = [
        use for name, uses in found.items() if len(uses) > ALLOWED.get(name, (0, ""))[0] for use in uses
    ]
    assert not beyond, "give these members a public name:\n" + "\n".join(beyond)


def test_a_use_from_outside_is_found(tmp_path: Path) -> None:
    (tmp_path / "superbatch").mkdir()
    text = (
        "class A:\n    def __init__(self):\n        self._x = 1\n    def y(self):\n        return self._x\n"
    )
    (tmp_path / "superbatch" / "a.py").write_text(text + "z = A()._x + tensor._version\n", encoding="utf-8")
    assert reaches(tmp_path) == {"superbatch/a.py": ["superbatch/a.py:6: A()._x"]}
