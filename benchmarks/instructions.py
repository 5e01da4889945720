"""Instructions of a window, against the best loop by hand: no clock, so no noise.

    python benchmarks/instructions.py [--work mlp,convnet,transformer] [--windows N] [--json FILE]

Each contestant works through some windows under valgrind's callgrind (`apt install valgrind`), one process
for each, after enough windows for Python to have specialised its code. An instruction that waits for memory
counts as one that does not, and valgrind has no AVX-512: this says how much is done, `overhead.py` how long
it takes.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from overhead import Entry, entries
from peers import choose
from tables import print_table
from torch.utils.benchmark import Timer

WARM_UP = 20
ROWS = ("by hand", "by hand, cuts the batch", "superbatch", "superbatch, whole batch")
SETUP = """
import gc, sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from overhead import choose, entries
from workloads import workloads
(entry,) = [entry for entry in entries(choose("none")) if entry.name == {name!r}]
window = entry.make(workloads()[{work!r}], entry.variant)
for _ in range({warm_up}):
    window.run()
gc.collect()
gc.disable()
"""


@dataclass(frozen=True)
class Count:
    """One row: instructions of a window."""

    work: str
    name: str
    against: str
    instructions: float
    ratio: float


def count(work: str, entry: Entry, windows: int) -> float:
    """Instructions of one window, the mean of some."""
    here = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([here, os.environ["PATH"]])  # torch starts `python`
    path = [str(Path(__file__).parent), *sys.path]
    setup = SETUP.format(path=path, name=entry.name, work=work, warm_up=WARM_UP)
    stats = Timer("window.run()", setup).collect_callgrind(
        number=windows, repeats=None, collect_baseline=False, retain_out_file=False
    )
    return stats.counts(denoise=False) / windows


def measure(work: str, rows: list[Entry], windows: int) -> list[Count]:
    """All rows of one training."""
    counts = {row.name: count(work, row, windows) for row in rows}
    return [
        Count(work, row.name, row.against, counts[row.name], counts[row.name] / counts[row.against])
        for row in rows
    ]


def main() -> int:
    """Count, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", default="mlp")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: nothing counted")
        return 1
    found: list[Count] = []
    for name in arguments.work.split(","):
        rows = [entry for entry in entries(choose("none")) if entry.name in ROWS]
        results = measure(name, rows, arguments.windows)
        found += results
        print_table(
            f"{name}: instructions of a window",
            ("contestant", "million", "ratio", "compared with"),
            [(r.name, f"{r.instructions / 1e6:.2f}", f"{r.ratio:.4f}", r.against) for r in results],
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in found], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
