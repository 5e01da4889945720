"""Scorecard: error of each tool's update against the update of the real large batch.

    python benchmarks/exactness.py [--peers all|none|NAMES] [--dtypes float64,float32] [--json FILE]
        [--publish]

Rows are cases, columns are tools, each used as its documentation describes. A cell is the relative error of
the parameters' change, ``max over named parameters of ||change - truth|| / ||truth||``; the truth is the real
large batch in plain torch and float64. The exit code is 1 if superbatch is outside its bounds in any case.
Install the other libraries with ``pip install superbatch[peers]``. ``--publish`` writes the numbers to
benchmarks/exactness.json and the tables of docs/exactness.md and README.md.
"""

import argparse
import json
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import scorecard
import torch
from cases import CASES, Case, references
from peers import Peer, choose
from peers.libraries import load, version_of
from peers.task import NotApplicable, Parameters, Task, parameters_of, relative_error
from tables import print_table

EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}
NOT_INSTALLED = "not installed"
SILENT = ("", NOT_INSTALLED)
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Cell:
    """One measured number, or the reason why there is none."""

    error: float | None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One case in one precision."""

    case: str
    table: str  # precision of its table
    bound: float
    large_batch: float | None  # error of the large batch itself in this precision
    cells: dict[str, Cell]

    @property
    def ours_is_exact(self) -> bool:
        error = self.cells["ours"].error
        return error is not None and error <= self.bound


def main() -> int:
    """Run the scorecard and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="all", help='"all", "none" or names separated by commas')
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument(
        "--publish", action="store_true", help="also make the tables of docs/exactness.md and README.md"
    )
    options = parser.parse_args()
    try:
        peers, dtypes = choose(options.peers), [DTYPES[name] for name in options.dtypes.split(",")]
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    if options.publish and missing_columns(peers, dtypes):
        parser.error(f"--publish needs {missing_columns(peers, dtypes)}")
    torch.set_num_threads(1)
    modules = _load(peers)
    rows = [
        measure(case, case.dtype or dtype, dtype, peers, modules)
        for dtype in dtypes
        for case in CASES
        if case.dtype is None or dtype is dtypes[0]
    ]
    for dtype in dtypes:
        _print(dtype, [row for row in rows if row.table == _name(dtype)], peers)
    _print_notes(rows, peers, modules)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.publish:
        scorecard.publish(record_of(rows, peers))
    return 0 if all(row.ours_is_exact for row in rows) else 1


def missing_columns(peers: list[Peer], dtypes: list[torch.dtype]) -> str:
    """Return the libraries, columns and precisions that a published table would lack."""
    lacking = [str(peer.package) for peer in peers if peer.package and version_of(peer.package) is None]
    lacking += [] if peers == choose("all") else ["--peers all"]
    lacking += [] if dtypes == list(DTYPES.values()) else ["both dtypes"]
    return ", ".join(dict.fromkeys(lacking))


def record_of(rows: list[Row], peers: list[Peer]) -> scorecard.Record:
    """Return the record of a run: date, versions and every number."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "versions": versions_of(peers),
        "columns": {peer.name: peer.title for peer in peers},
        "cases": {case.name: case.why for case in CASES},
        "rows": [asdict(row) for row in rows],
    }


def versions_of(peers: list[Peer]) -> dict[str, str]:
    """Return the version of each installed distribution."""
    found = {peer.package: version_of(peer.package) for peer in peers if peer.package}
    return {"torch": torch.__version__, **{name: version for name, version in found.items() if version}}


def _load(peers: list[Peer]) -> dict[str, ModuleType]:
    """Return the modules of the installed columns; their printed output is suppressed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return {peer.name: load(peer.module) for peer in peers if version_of(peer.package) is not None}


def measure(
    case: Case, dtype: torch.dtype, table: torch.dtype, peers: list[Peer], modules: dict[str, ModuleType]
) -> Row:
    """Run one case in one precision through every column, and check the premise of the case."""
    task, exact_task = case.task(dtype), case.task(torch.float64)
    assert case.premise(task), f"the premise of the case {case.name!r} does not hold"
    truths = [_change(exact_task, parameters) for parameters in references(case, exact_task)]
    own = None
    if dtype != torch.float64 and not case.against_itself:
        own = _error(_change(task, references(case, task)[0]), truths)
    cells = {
        peer.name: _cell(case, task, truths, peer, modules[peer.name])
        if peer.name in modules
        else Cell(None, NOT_INSTALLED)
        for peer in peers
    }
    _check_that_the_wrong_way_differs(case, dtype, cells["tutorial"])
    bound = case.bound or max(EXACT[dtype], 2 * (own or 0))
    return Row(case.name, _name(table), bound, own, cells)


def _cell(case: Case, task: Task, truths: list[Parameters], peer: Peer, module: ModuleType) -> Cell:
    """Return the largest error over the variants of one column."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors = [_variant_error(case, task, truths, module, variant) for variant in peer.variants]
    except NotApplicable as reason:
        return Cell(None, f"n/a: {reason}")
    except Exception as error:  # noqa: BLE001  # an exception of a library is its result
        return Cell(None, f"raises: {_short(error)}")
    note = module.REMARKS.get(case.name, "") if hasattr(module, "REMARKS") else ""
    return Cell(math.nan if any(map(math.isnan, errors)) else max(errors), note)


def _variant_error(
    case: Case, task: Task, truths: list[Parameters], module: ModuleType, variant: str | None
) -> float:
    if case.against_itself:
        truths = [_change(task, module.train(task.whole(), variant))]
    run: Callable[..., Parameters] = getattr(module, case.action)
    return _error(_change(task, run(task, variant)), truths)


def _short(error: Exception) -> str:
    """Return the first line of an error, without terminal colours."""
    first = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _change(task: Task, after: Parameters) -> Parameters:
    before = parameters_of(task.model())
    return {name: after[name].double() - before[name].double() for name in before}


def _error(change: Parameters, truths: list[Parameters]) -> float:
    errors = [relative_error(change, truth) for truth in truths]
    return min((error for error in errors if not math.isnan(error)), default=math.nan)


def _check_that_the_wrong_way_differs(case: Case, dtype: torch.dtype, tutorial: Cell) -> None:
    """Check that the tutorial loop is right or wrong as expected; otherwise the case proves nothing."""
    error = tutorial.error
    assert error is not None, f"the tutorial loop fails on {case.name!r}: {tutorial.note}"
    wrong = math.isnan(error) or error > 1e-2
    assert wrong is case.tutorial_is_wrong, f"{case.name!r} ({dtype}): the tutorial loop's error is {error}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print(dtype: torch.dtype, rows: list[Row], peers: list[Peer]) -> None:
    header = ["case", *(peer.title for peer in peers), "large batch", "bound"]
    lines = []
    for row in rows:
        cells = [_show(row.cells[peer.name], row, is_ours=peer.name == "ours") for peer in peers]
        itself = "-" if row.large_batch is None else f"{row.large_batch:.0e}"
        lines.append([row.case, *cells, itself, f"{row.bound:.0e}"])
    print_table(f"\nRelative error of the update, {_name(dtype)} (ok: at most the bound)", header, lines)


def _show(cell: Cell, row: Row, *, is_ours: bool) -> str:
    if cell.error is None:
        return cell.note.split(":")[0]
    if math.isnan(cell.error):
        return "NaN"
    if is_ours:
        return f"{cell.error:.0e}{'' if row.ours_is_exact else ' FAILS'}"
    if cell.error <= row.bound:
        return "ok"
    return f"{cell.error:.2g}" if cell.error >= 1e-3 else f"{cell.error:.0e}"


def _print_notes(rows: list[Row], peers: list[Peer], modules: dict[str, ModuleType]) -> None:
    """Print versions, reasons and the purpose of each case."""
    versions = [f"{package} {version}" for package, version in versions_of(peers).items()]
    print("\nVersions:", ", ".join(versions))
    missing = sorted({peer.package or "" for peer in peers if peer.name not in modules})
    if missing:
        print(f"Not installed: {', '.join(missing)}. Install them with: pip install 'superbatch[peers]'")
    notes = [(row.case, peer.title, row.cells[peer.name].note) for row in rows for peer in peers]
    lines = dict.fromkeys(f"  {case} / {title}: {note}" for case, title, note in notes if note not in SILENT)
    print("\nNotes:", *(lines or ["  none"]), sep="\n")
    print("\nCases:", *(f"  {case.name}: {case.why}" for case in CASES), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
