"""The notebook of examples/: its cells run and print the saved output."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "from_wrong_to_right.ipynb"


def saved(cell: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [output for output in cell["outputs"] if output["output_type"] == kind]


def test_the_cells_print_the_saved_output_and_draw_every_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    shown: list[int] = []

    def show() -> None:
        shown.extend(pyplot.get_fignums())
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", show)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    pictures = 0
    for number, cell in enumerate(each for each in cells if each["cell_type"] == "code"):
        shown.clear()
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        text = "".join("".join(output["text"]) for output in saved(cell, "stream"))
        assert printed.getvalue() == text
        assert len(shown) == len(saved(cell, "display_data"))
    pictures = [
        output for cell in cells if cell["cell_type"] == "code" for output in saved(cell, "display_data")
    ]
    assert len(pictures) == 2
