"""The public surface: every exported name with its signature, frozen in `surface.txt`.

After a deliberate change run ``python -m tests.core.test_surface`` to rewrite the file, and describe the
change in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FROZEN = Path(__file__).with_name("surface.txt")
OPTIONS = "superbatch.torch.options"
TESTING = "superbatch.testing"
MODULES = (
    "superbatch",
    "superbatch.caffe",
    TESTING,
    "superbatch.torch",
    "superbatch.torch.caffe",
    "superbatch.torch.checkpoint",
    OPTIONS,
    "superbatch.torch.tuning",
)
FILES = (OPTIONS, TESTING)


def surface() -> Iterator[str]:
    """Yield a line for each public name, method and property."""
    for module in MODULES:
        public = vars(importlib.import_module(module))
        for name in sorted(name for name in public if not name.startswith("_")):
            value = public[name]
            if inspect.ismodule(value) or (module in FILES and getattr(value, "__module__", "") != module):
                continue  # imported names do not count
            yield f"{module}.{name}{_signature(value)}"
            if inspect.isclass(value):
                yield from (f"{module}.{name}.{line}" for line in _members(value))


def _members(kind: type) -> Iterator[str]:
    for name, value in sorted(vars(kind).items()):
        if not name.startswith("_") or name == "__call__":
            if isinstance(value, property):
                yield name
            elif callable(value):
                yield f"{name}{_signature(value)}"


def _signature(value: object) -> str:
    """Return names, kinds and defaults of parameters; pyright checks annotations."""
    if not callable(value):
        return f" = {value!r}"
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # of a class of the standard library, for example an exception
        return ""
    plain = str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters]))
    return re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", plain)


def test_the_public_surface_equals_the_frozen_one() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    frozen = FROZEN.read_text(encoding="utf-8").splitlines()
    assert list(surface()) == frozen


@pytest.mark.parametrize(("module", "most"), [("superbatch.torch", 17), ("superbatch.torch.tuning", 8)])
def test_a_public_package_exports_few_names(module: str, most: int) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    public = vars(importlib.import_module(module)).items()
    names = [name for name, value in public if not (name.startswith("_") or inspect.ismodule(value))]
    assert len(names) <= most


if __name__ == "__main__":
    FROZEN.write_text("\n".join(surface()) + "\n", encoding="utf-8")
