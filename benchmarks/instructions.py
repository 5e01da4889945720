"""Number of instructions of a window, against the best hand-written loop; unlike a time it has no noise.

    python benchmarks/instructions.py [--peers none|all|NAMES] [--work mlp,convnet,transformer] [--windows N]
                                      [--warm-up N] [--json FILE]

Each contestant runs some windows under valgrind's callgrind (`apt install valgrind`) in its own process,
after enough windows for Python to specialise its code. All threads count, because a Trainer runs in its own
thread. Waiting for memory does not count, and valgrind has no AVX-512, so use `overhead.py` for times.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from overhead import Entry, entries
from peers import choose
from tables import print_table

ROWS = ("by hand", "by hand, cuts the batch")  # the other hand-written loops are variants of these
CHILD = """
import gc, sys, warnings
sys.path[:0] = {path!r}
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from overhead import choose, entries
from workloads import workloads
(entry,) = [entry for entry in entries(choose({peers!r})) if entry.name == {name!r}]
window = entry.make(workloads()[{work!r}], entry.variant)
for _ in range({warm_up}):
    window.timed()
gc.collect()
gc.disable()
torch._C._valgrind_toggle_and_dump_stats()  # writes the counts of set-up and warm-up to a file of their own
torch._C._valgrind_toggle()
for _ in range({windows}):
    window.timed()
torch._C._valgrind_toggle_and_dump_stats()
window.close()
"""


@dataclass(frozen=True)
class Count:
    """Row of the table: instructions of a window."""

    work: str
    name: str
    against: str
    instructions: float
    ratio: float


def count(work: str, entry: Entry, peers: str, windows: int, warm_up: int) -> float:
    """Return the instructions of one window, a mean over several."""
    path = [str(Path(__file__).parent), *sys.path]
    code = CHILD.format(path=path, peers=peers, name=entry.name, work=work, windows=windows, warm_up=warm_up)
    with tempfile.TemporaryDirectory() as folder:
        tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/found"]
        done = subprocess.run(
            [*tool, sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        # The program writes a dump before and one after the windows; valgrind writes a third at the end.
        return _total(Path(folder, "found.2")) / windows


def _total(dump: Path) -> int:
    """Return the number after "summary:" or "totals:" in a dump of callgrind."""
    for line in dump.read_text(encoding="utf-8").splitlines():
        kind, _, number = line.partition(": ")
        if kind in ("summary", "totals"):
            return int(number)
    raise ValueError(f"no total in {dump}")


def measure(work: str, rows: list[Entry], peers: str, windows: int, warm_up: int) -> list[Count]:
    """Return all rows of one training."""
    counts = {row.name: count(work, row, peers, windows, warm_up) for row in rows}
    return [
        Count(work, row.name, row.against, counts[row.name], counts[row.name] / counts[row.against])
        for row in rows
    ]


def main() -> int:
    """Count, print, and write JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="none", help='"all", "none" or names separated by commas')
    parser.add_argument("--work", default="mlp")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed. Install it with: apt install valgrind")
        return 1
    try:
        found_entries = entries(choose(options.peers))
    except ValueError as error:
        parser.error(str(error))
    rows = [e for e in found_entries if e.name in ROWS or not e.name.startswith("by hand")]
    found: list[Count] = []
    for name in options.work.split(","):
        results = measure(name, rows, options.peers, options.windows, options.warm_up)
        found += results
        print_table(
            f"{name}: instructions of a window",
            ("contestant", "million", "ratio", "compared with"),
            [(r.name, f"{r.instructions / 1e6:.2f}", f"{r.ratio:.4f}", r.against) for r in results],
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
