"""The checker behind test_layers.py: which part of superbatch a file belongs to, and what it may import.

    core <- torch, jax, tensorflow, keras <- integrations, report <- plot, recipes <- studies <- cli

The last five are the folders of `lab`, experiments on top of the library.

A file may import its own part and the parts of the layers below. Parts of one layer do not import each other:
one backend never needs another backend, and a plot needs no recipe.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = frozenset(sys.stdlib_module_names) | {"__future__"}


@dataclass(frozen=True)
class Part:
    """A part of superbatch: its layer (0 is the lowest) and the packages it may use."""

    layer: int
    packages: frozenset[str]


def _part(layer: int, *packages: str) -> Part:
    return Part(layer, frozenset(packages))


PARTS = {
    "core": _part(0),
    "torch": _part(1, "torch"),
    "jax": _part(1, "jax", "optax", "numpy"),
    "tensorflow": _part(1, "tensorflow"),
    "keras": _part(1, "keras", "tensorflow", "jax", "torch", "numpy"),  # one step for each of its backends
    "integrations": _part(2, "torch", "accelerate", "lightning", "transformers"),
    "report": _part(2, "jinja2"),
    "plot": _part(3, "matplotlib", "numpy"),
    "recipes": _part(3, "torch", "sklearn", "numpy"),
    "studies": _part(4, "torch", "jax", "optax", "tensorflow", "keras", "numpy", "scipy"),
    "cli": _part(5, "typer", "click", "rich", "jinja2", "torch"),
}


@dataclass(frozen=True)
class Import:
    """One import as written: where it stands, and the full name of what it asks for."""

    file: Path
    line: int
    name: str


def part_of(module: str) -> str:
    """The part that a module of superbatch (full dotted name) belongs to."""
    names = module.split(".")
    assert names[0] == "superbatch"
    if names[1:2] == ["__main__"]:
        return "cli"
    if names[1:2] == ["lab"]:
        names = names[1:]
    return names[1] if len(names) > 1 and names[1] in PARTS else "core"


def module_name(file: Path, root: Path) -> str:
    """The dotted name of a file below `root` (the folder that holds superbatch/)."""
    names = list(file.relative_to(root).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _dynamic(call: ast.Call) -> str | None:
    """The name asked for by `import_module("name")` or `__import__("name")`; None for any other call."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if name not in ("import_module", "__import__", "find_spec") or not call.args:
        return None
    argument = call.args[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    """Every import in the file, those inside functions and under `if TYPE_CHECKING` included."""
    package = module_name(file, root).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from . import torch` asks for superbatch.torch
                yield Import(
                    file, node.lineno, f"{full}.{alias.name}" if full.startswith("superbatch") else full
                )
        elif isinstance(node, ast.Call):
            name = _dynamic(node)
            if name is not None:
                yield Import(file, node.lineno, name)


def wrong(found: Import, root: Path) -> str | None:
    """Why the import may not stand where it stands, or None."""
    here = part_of(module_name(found.file, root))
    where = f"{found.file.relative_to(root)}:{found.line} ({here})"
    package = found.name.split(".")[0]
    if package == "superbatch":
        there = part_of(found.name)
        if there == here or PARTS[there].layer < PARTS[here].layer:
            return None
        return f"{where} imports {found.name} ({there}): imports go down only"
    if package in STANDARD_LIBRARY or package in PARTS[here].packages:
        return None
    return f"{where} imports {package}, which {here} may not use"


def check(root: Path) -> list[str]:
    """One sentence per import of superbatch/ below `root` that goes the wrong way."""
    files = sorted((root / "superbatch").rglob("*.py"))
    assert files, f"no package superbatch in {root}"
    answers = (wrong(found, root) for file in files for found in imports_of(file, root))
    return [answer for answer in answers if answer is not None]


def eager_modules(root: Path) -> set[str]:
    """Modules beyond the standard library that a file asks for when it is imported (not in a function).

    `from scipy import stats` gives both `scipy` and `scipy.stats`, whether or not the second is a module.
    """
    found: set[str] = set()
    for file in (root / "superbatch").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] not in STANDARD_LIBRARY | {"superbatch"}}
