"""Checker for test_layers.py: the layer of each file of superbatch and its allowed imports.

    core <- torch, jax, tensorflow, keras <- integrations, testing, report <- plot, recipes <- studies <- cli

The last five are folders of `lab`, experiments on top of the library. `pytest_plugin` is above `testing`.

A file may import its own part and the parts of the layers below. Parts of one layer do not import each other:
one backend never needs another backend, and a plot needs no recipe.

The folders within `superbatch/torch/virtual` are layers too. No files of superbatch import each other in a
circle. Imports inside functions and under `if TYPE_CHECKING` count too.
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


HOSTS = ("accelerate", "lightning", "sentence_transformers", "transformers", "trl")  # other training loops
PARTS = {
    "core": _part(0),
    "torch": _part(1, "torch", "safetensors"),  # safetensors is imported to write a checkpoint
    "jax": _part(1, "jax", "optax", "numpy"),
    "tensorflow": _part(1, "tensorflow"),
    "keras": _part(1, "keras", "tensorflow", "jax", "torch", "numpy"),  # a train step for each backend
    "integrations": _part(
        2, "torch", "accelerate", "lightning", "transformers", "trl", "sentence_transformers"
    ),
    "testing": _part(2, "torch"),
    "pytest_plugin": _part(3, "pytest"),  # every run of pytest loads it, so it must not import torch
    "report": _part(2, "jinja2"),
    "plot": _part(3, "matplotlib", "numpy"),
    "recipes": _part(3, "torch", "sklearn", "numpy", "PIL"),
    "studies": _part(4, "torch", "jax", "optax", "tensorflow", "keras", "numpy", "scipy"),
    "cli": _part(5, "typer", "click", "rich", "jinja2", "torch"),
}


VIRTUAL = "superbatch.torch.virtual"
FOLDERS = ("ir", "rules", "run", "trace", "ranks")  # lowest first; files outside the folders are above them


@dataclass(frozen=True)
class Import:
    """One import statement: its place and the full name of the imported module or object."""

    file: Path
    line: int
    name: str


def part_of(module: str) -> str:
    """Return the part of superbatch that contains a module (full dotted name)."""
    names = module.split(".")
    assert names[0] == "superbatch"
    if names[1:2] == ["__main__"]:
        return "cli"
    if names[1:2] == ["lab"]:
        names = names[1:]
    return names[1] if len(names) > 1 and names[1] in PARTS else "core"


def module_name(file: Path, root: Path) -> str:
    """Return the dotted name of a file below `root` (the folder that holds superbatch/)."""
    names = list(file.relative_to(root).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _dynamic(call: ast.Call) -> str | None:
    """Return the name in `import_module("name")` or `__import__("name")`; None for any other call."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if name not in ("import_module", "__import__", "find_spec") or not call.args:
        return None
    argument = call.args[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    """Return every import of a file, also inside functions and under `if TYPE_CHECKING`."""
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
            for alias in node.names:  # `from . import torch` imports superbatch.torch
                yield Import(
                    file, node.lineno, f"{full}.{alias.name}" if full.startswith("superbatch") else full
                )
        elif isinstance(node, ast.Call):
            name = _dynamic(node)
            if name is not None:
                yield Import(file, node.lineno, name)


def wrong(found: Import, root: Path) -> str | None:
    """Return the reason why the import is not allowed, or None."""
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
    """Return one sentence for each forbidden import of superbatch/ below `root`."""
    files = sorted((root / "superbatch").rglob("*.py"))
    assert files, f"no package superbatch in {root}"
    answers = (wrong(found, root) for file in files for found in imports_of(file, root))
    return [answer for answer in answers if answer is not None]


def _folder(module: str) -> int | None:
    """Return the index in `FOLDERS` of a module in virtual/; None outside."""
    if module != VIRTUAL and not module.startswith(f"{VIRTUAL}."):
        return None
    name = module.removeprefix(VIRTUAL).removeprefix(".").split(".")[0]
    return FOLDERS.index(name) if name in FOLDERS else len(FOLDERS)


def upward_in_virtual(root: Path) -> list[str]:
    """Return one sentence for each import in superbatch/torch/virtual from a folder above its own."""
    found: list[str] = []
    for file in sorted((root / "superbatch/torch/virtual").rglob("*.py")):
        here = _folder(module_name(file, root))
        for one in imports_of(file, root):
            there = _folder(one.name)
            if here is not None and there is not None and there > here:
                found.append(f"{file.relative_to(root)}:{one.line} imports {one.name}: imports go down only")
    return found


def _graph(root: Path) -> dict[str, set[str]]:
    """Map each module of superbatch to the modules that it imports."""
    files = {module_name(file, root): file for file in sorted((root / "superbatch").rglob("*.py"))}

    def holder(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {holder(found.name) for found in imports_of(file, root)} & files.keys() - {module}
        for module, file in files.items()
    }


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that a module imports, directly or indirectly."""
    reached: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += graph[module]
    return reached


def circles(root: Path) -> list[set[str]]:
    """Return the maximal sets of modules that all import each other, directly or indirectly."""
    graph = _graph(root)
    reached = {module: _reached(graph, module) for module in graph}
    found: list[set[str]] = []
    for module in graph:
        if module in reached[module] and not any(module in circle for circle in found):
            found.append({other for other in reached[module] if module in reached[other]})
    return found


def eager_modules(root: Path) -> set[str]:
    """Return the modules outside the standard library that a file imports at module level.

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
