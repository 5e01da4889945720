"""Record of the scorecard and its Markdown tables, for `exactness.py --publish`.

The record is `exactness.json`; the tables are in docs/exactness.md and README.md, between two comments. This
file needs the standard library only, so a test can compare the tables with the record without running a case.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "exactness.json"
PAGE = ROOT / "docs" / "exactness.md"
README = ROOT / "README.md"

Record = dict[str, Any]
Score = dict[str, Any]  # one row of the record: a case in one precision

# Rows of README.md: the case and its title.
README_ROWS = {
    "equal micro-batches": "equal micro-batches",
    "tail window": "short last window",
    "token mask": "token mean, padded texts",
    "class weights": "class weights",
    "bf16 parameters, K=256": "256 gradients in bfloat16",
    "resume in a window": "resumed inside a window",
    "one NaN micro-batch": "one NaN micro-batch left out",
    "dropout, another split": "dropout, another split",
}
# Columns of README.md: title, column of the record, and a second documented method of the same tool.
README_COLUMNS = (
    ("tutorial loop", "tutorial", None, ""),
    ("Accelerate", "accelerate", "accelerate-items", "recipe"),
    ("Lightning", "lightning", None, ""),
    ("HF Trainer", "hf", "hf-items", "own loss"),
    ("superbatch", "ours", None, ""),
)


def publish(record: Record) -> None:
    """Write the record, and the tables made from it into the page and README.md."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for path, tables in ((PAGE, page_tables(record)), (README, readme_tables(record))):
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            text = replaced(text, name, table)
        path.write_text(text, encoding="utf-8")


def read_record() -> Record:
    """Return the record of the last published run."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def page_tables(record: Record) -> dict[str, str]:
    """Return the tables of the page, by the name of the comment above each."""
    return {
        "run": run_line(record),
        "float64": _table(record, "float64"),
        "float32": _table(record, "float32"),
        "cases": _cases(record),
        "notes": _notes(record),
    }


def readme_tables(record: Record) -> dict[str, str]:
    """Return the table of README.md and the line under it."""
    header = ["", *(title for title, *_ in README_COLUMNS)]
    rows: list[list[str]] = []
    for case, name in README_ROWS.items():
        score = _score(record, case, "float64")
        rows.append([name, *(_merged(score, first, second, way) for _, first, second, way in README_COLUMNS)])
    versions = ", ".join(f"{package} {_short_version(v)}" for package, v in record["versions"].items())
    link = f"[all {len(record['cases'])} cases](docs/exactness.md)"
    line = f"`python benchmarks/exactness.py`: {link}, 16 of them in float32 too; {versions}."
    return {"scorecard": f"{markdown(header, rows)}\n\n{line}"}


def run_line(record: Record) -> str:
    """Return date, versions and machine of a run."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    return f"Run on {record['date']}: {versions}; Python {record['python']}, one thread of a CPU."


def show(score: Score, column: str) -> str:
    """Return the text of a cell: the error, "exact" within the bound, or the reason for no number."""
    cell = score["cells"][column]
    error = cell["error"]
    if error is None:
        return cell["note"].split(":")[0] or "-"
    if math.isnan(error):
        return "NaN"
    if column == "ours":
        large = score["large_batch"]
        as_large = large is not None and large > 1e-4 and error <= 2 * large
        return f"{_number(error)}{', as the large batch' if as_large else ''}"
    return "exact" if error <= score["bound"] else _number(error)


def replaced(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between the comments of this name."""
    pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
    text, count = re.subn(pattern, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{count} comments <!-- table: {name} --> where one was expected")
    return text


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def _table(record: Record, table: str) -> str:
    # superbatch first, because a narrow window cuts off the last columns.
    columns = dict(sorted(record["columns"].items(), key=lambda column: column[0] != "ours"))
    scores = [score for score in record["rows"] if score["table"] == table]
    rows = [[score["case"], *(show(score, name) for name in columns)] for score in scores]
    return markdown(["case", *columns.values()], rows)


def _cases(record: Record) -> str:
    return "\n".join(f"* **{case}**: {why}." for case, why in record["cases"].items())


def _notes(record: Record) -> str:
    columns = record["columns"]
    notes = {
        (columns[name], cell["note"]): score["case"]
        for score in reversed(record["rows"])
        for name, cell in score["cells"].items()
        if cell["note"]
    }
    lines = [f"* {title}, *{case}*: {note.removeprefix('n/a: ')}." for (title, note), case in notes.items()]
    return "\n".join(reversed(lines))


def _merged(score: Score, column: str, second: str | None, way: str) -> str:
    """Return the cell of a tool; if it is wrong, with the tool's second documented method if that differs."""
    first = show(score, column)
    if second is None or first == "exact" or score["cells"][second]["error"] is None:
        return first
    other = show(score, second)
    return first if other == first else f"{first} ({way}: {other})"


def _score(record: Record, case: str, table: str) -> Score:
    return next(score for score in record["rows"] if (score["case"], score["table"]) == (case, table))


def _number(error: float) -> str:
    if error < 1e-3:
        return f"{error:.0e}"
    return f"{error:.2g}" if error >= 1 else (f"{error:.2f}" if error >= 0.01 else f"{error:.3f}")[1:]


def _short_version(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])
