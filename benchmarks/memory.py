"""Search for the micro-batch size: distance from the true limit, cost, and memory of the training.

    python benchmarks/memory.py [--parts limits,peaks,failures] [--work mlp,convnet,transformer]
                                [--finders all|none|NAMES] [--true NAME=SAMPLES,...] [--malloc mapped|default]
                                [--quick] [--json FILE]

limits    Each finder runs in its own process under a real limit (RLIMIT_AS), set after libraries and data are
          loaded. The true limit is the largest micro-batch with which the best hand-written loop makes some
          updates, found with a new process for each size. There are two: with accumulation; and without, for
          finders of a batch instead of a micro-batch, because no gradient exists during their forward.
          Columns: the chosen size against the true limit; the largest size tried; failed trials; samples
          whose forward contributed to no update, in batches of the true limit's size and of the wanted size;
          CPU seconds without an update; whether training succeeds; for superbatch also the CPU time of a
          sample afterwards.
peaks     The peak of the ledger of tensors in a window of training (see peaks.py), in bytes and, on top of
          the gradients, in units of the activations of a micro-batch.
failures  200 windows, each with one out-of-memory error (see failures.py): the difference of the final
          weights from those of training without failures.

For one case with a known true limit:

    python benchmarks/memory.py --parts limits --work convnet --finders ours-largest --true convnet=5002

The limits of the trainings "mlp-tiny", "convnet-tiny" and "transformer-tiny" are difficult because they
are small (see memory_work.py).
"""

import argparse
import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import failures
import peaks
import torch
from memory_work import LIMITED, Limited
from peers.finders import FINDERS, Finder
from peers.libraries import version_of
from tables import print_table
from true_limit import ChildError, TrueLimit, child, fits_by_hand, search

PARTS = ("limits", "peaks", "failures")
BOUND = 1e-12


@dataclass(frozen=True)
class Row:
    """Row of the table: result of one finder under one limit.

    Attributes:
        error: reason why there are no numbers, else "".
        wasted: samples of forwards without an update.
        looked: wasted samples of forwards that did not fail, such as in the loss check.
        seconds: CPU time without an update.
        rate: CPU seconds per sample after the search, if measured.
        largest: largest micro-batch tried.
        forwards: samples of each forward, in order.
    """

    work: str
    finder: str
    version: str
    true: int
    batch: int
    error: str = ""
    chosen: int = 0
    trains: bool = False
    failed: int = 0
    wasted: int = 0
    looked: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    largest: int = 0
    predicted: int = 0
    note: str = ""
    forwards: tuple[int, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()


def true_limits(
    name: str, limited: Limited, loops: set[str], known: dict[str, int], *, mapped: bool
) -> dict[str, TrueLimit]:
    """Find the true limit with new processes, for each requested kind of loop."""
    found = {}
    for loop in sorted(loops):
        given = known.get(f"{name}:{loop}", known.get(name))
        if given is not None:
            found[loop] = TrueLimit(given, given, [])
            continue
        about = next((limit.samples for limit in found.values()), limited.about)
        fits = fits_by_hand(name, limited.limit, loop, mapped=mapped)
        found[loop] = search(fits, about=about, most=limited.work.samples)
    return found


def run(finder: Finder, name: str, limited: Limited, true: int, *, mapped: bool) -> Row:
    """Run one finder in a child process."""
    version = version_of(finder.package)
    assert version is not None
    head = {"work": name, "finder": finder.name, "version": version, "true": true}
    batch = limited.work.samples
    try:
        found: dict[str, Any] = child(name, limited.limit, "find", finder.name, mapped=mapped)
    except ChildError as error:
        return Row(**head, batch=batch, error=str(error))
    forwards = tuple(found["forwards"])
    return Row(
        **head,
        batch=batch,
        chosen=found["chosen"],
        trains=found["trains"],
        failed=found["failed"],
        wasted=sum(forwards) - found["kept"],
        looked=found["looked"],
        seconds=found["seconds"],
        rate=found["rate"],
        largest=max(forwards, default=0),
        predicted=found["predicted"],
        note=found["note"],
        forwards=forwards,
        windows=tuple(map(tuple, found["windows"])),
    )


def limits(names: list[str], finders: list[Finder], known: dict[str, int], *, mapped: bool) -> dict[str, Any]:
    """Run the first part: the true limits and the result of each finder."""
    true, rows = {}, []
    for name in names:
        limited = LIMITED[name]()
        loops = {finder.loop for finder in finders}
        true[name] = true_limits(name, limited, loops, known, mapped=mapped)
        found = [
            run(finder, name, limited, true[name][finder.loop].samples, mapped=mapped) for finder in finders
        ]
        print_limits(name, limited, true[name], found)
        rows += [asdict(row) for row in found]
    searched = {name: {loop: asdict(limit) for loop, limit in loops.items()} for name, loops in true.items()}
    return {"true": searched, "rows": rows}


def print_limits(name: str, limited: Limited, true: dict[str, TrueLimit], rows: list[Row]) -> None:
    """Print the table of one training."""
    print(f"\n{name}: {limited.limit / 2**20:.0f} MiB; the wanted batch has {limited.work.samples} samples")
    for loop, limit in true.items():
        how = f"found with {len(limit.tried)} processes" if limit.tried else "given"
        sharp = "" if limit.sharp else f", not sharp: {limit.highest} fitted too"
        print(f"  true limit of the hand-written loop ({loop}): {limit.samples} samples ({how}{sharp})")
    header = [
        "finder",
        "chosen",
        "true limit",
        "ratio",
        "largest tried",
        "failed trials",
        "wasted / true",
        "wasted / batch",
        "only checked",
        "CPU s lost",
        "trains",
        "ms / sample",
    ]
    print_table("", header, [_cells(row) for row in rows])
    for row in rows:
        if row.error or row.note:
            print(f"  {FINDERS[row.finder].title}: {row.error or row.note}")


def _cells(row: Row) -> list[str]:
    title = FINDERS[row.finder].title
    if row.error:
        return [title, "-", str(row.true), *["-"] * 9]
    share = row.chosen / row.true if row.true else 0.0
    return [
        title,
        str(row.chosen),
        str(row.true),
        f"{share:.3f}",
        str(row.largest),
        str(row.failed),
        f"{row.wasted / row.true:.2f}" if row.true else "-",
        f"{row.wasted / row.batch:.2f}",
        f"{row.looked / row.batch:.2f}",
        f"{row.seconds:.2f}",
        "yes" if row.trains else "NO",
        f"{row.rate * 1e3:.3f}" if row.rate else "-",
    ]


def show_peaks(measured: list[peaks.Peak]) -> list[dict[str, Any]]:
    """Print the table of the second part."""
    base = measured[0].bytes
    lines = [[p.name, f"{p.bytes / 2**20:.2f}", f"{p.units:.2f}", f"{p.bytes / base:.3f}"] for p in measured]
    title = "\nPeak in training, large vocabulary: (peak - gradients) in units of a micro-batch's logits"
    print_table(title, ["loop", "peak MiB", "units U", "against best"], lines)
    return [asdict(peak) for peak in measured]


def show_failures(outcomes: list[failures.Outcome]) -> list[dict[str, Any]]:
    """Print the table of the third part."""
    places = [*failures.PLACES, "half way"]
    lines = [
        [
            f"{o.model}, {o.how}",
            str(o.windows),
            *(str(count) for count in (*o.counts.values(), o.half_way)),
            "ended" if o.error is None else f"{o.error:.1e}",
            "equal" if o.buffers else "DIFFERENT",
        ]
        for o in outcomes
    ]
    title = f"\nOne out-of-memory failure per window; largest error of the final weights (bound {BOUND:.0e})"
    print_table(title, ["training", "windows", *places, "error", "buffers"], lines)
    for outcome in outcomes:
        if outcome.note:
            print(f"  {outcome.model}, {outcome.how}: {outcome.note}")
    return [asdict(outcome) for outcome in outcomes]


def is_exact(outcome: failures.Outcome) -> bool:
    """Return True if the failures did not change the weights."""
    return outcome.error is not None and outcome.error <= BOUND and outcome.buffers


def installed(names: str) -> list[Finder]:
    """Return the finders whose library is installed, and print the missing ones.

    Raises:
        ValueError: a name is not in the table.
    """
    ours = [finder.name for finder in FINDERS.values() if finder.package is None]
    wanted = {"all": list(FINDERS), "none": ours}.get(names, names.split(","))
    unknown = [name for name in wanted if name not in FINDERS]
    if unknown:
        raise ValueError(
            f"--finders {', '.join(unknown)} is unknown. Pass all, none (superbatch only), or some of "
            f"{', '.join(FINDERS)}."
        )
    chosen = [finder for name, finder in FINDERS.items() if name in wanted]
    for finder in chosen:
        if version_of(finder.package) is None:
            print(f"{finder.title}: not installed (pip install {finder.package})")
    return [finder for finder in chosen if version_of(finder.package) is not None]


def main() -> int:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="limits,peaks,failures")
    parser.add_argument("--work", default="mlp,convnet,transformer")
    parser.add_argument(
        "--finders", default="all", help='"all", "none" (superbatch) or names separated by commas'
    )
    parser.add_argument("--true", default="", help="known true limits: convnet=5002,mlp:plain=914")
    parser.add_argument("--malloc", choices=["mapped", "default"], default="mapped")
    parser.add_argument("--quick", action="store_true", help="one small training, to test the program")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    try:
        finders = installed(options.finders)
        known = {
            name: int(size) for name, _, size in (p.partition("=") for p in options.true.split(",") if p)
        }
        names = ["small"] if options.quick else options.work.split(",")
        parts = options.parts.split(",")
        if not set(parts) <= set(PARTS):
            raise ValueError(f"--parts {options.parts!r} is unknown. Pass some of {', '.join(PARTS)}.")
        if not {name.partition(":")[0] for name in (*names, *known)} <= set(LIMITED):
            raise ValueError(f"--work or --true has an unknown name. Pass some of {', '.join(LIMITED)}.")
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results, good = {}, True
    if "limits" in parts:
        results["limits"] = limits(names, finders, known, mapped=options.malloc == "mapped")
    if "peaks" in parts:
        results["peaks"] = show_peaks(peaks.measure(peers=any(finder.package for finder in finders)))
    if "failures" in parts:
        outcomes = failures.measure(20 if options.quick else 200)
        results["failures"] = show_failures(outcomes)
        good = all(is_exact(o) for o in outcomes if o.how == "superbatch")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
