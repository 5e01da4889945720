"""Rounding error of float32 gradients over many batches: full batch and virtual_batch.

    python benchmarks/coupled_rounding.py [--work convnet] [--samples 256] [--sizes 1,4,16,64] [--draws 20]
                                          [--json FILE]

One batch is not enough: near the kink of a ReLU or of a maximum, rounding decides the side of a unit, and the
gradient of either method jumps. So each draw has another batch and another model. Columns: median and largest
error over draws, relative to the gradient; for virtual_batch also the median ratio to the full batch's error
in the same draw, the number of draws in which it is more than twice as large, and the number in which the
full batch's error is more than twice as large.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from coupled_ways import WAYS, error, gradient
from coupled_work import Work, works
from tables import print_table

OURS = next(way for way in WAYS if way.name == "virtual")


@dataclass(frozen=True)
class Errors:
    """Errors of one micro-batch size (None: the full batch), one for each draw."""

    work: str
    samples: int
    size: int | None
    float32: list[float]


def measure(work: Work, samples: int, sizes: Sequence[int], draws: int) -> list[Errors]:
    """Return the errors of the full batch, then those of each micro-batch size."""
    found: dict[int | None, list[float]] = {size: [] for size in (None, *sizes)}
    for draw in range(draws):
        drawn = replace(work, seed=draw)
        real, _ = gradient(WAYS[0], drawn, samples, samples, torch.float64)
        for size, errors in found.items():
            way = WAYS[0] if size is None else OURS
            single, _ = gradient(way, drawn, samples, size or samples, torch.float32)
            errors.append(error(single, real))
    return [Errors(work.name, samples, size, errors) for size, errors in found.items()]


def row_of(own: Errors, full: Errors) -> list[str]:
    """Return a line of the table."""
    head = ["full batch" if own.size is None else f"virtual_batch, m = {own.size}"]
    head += [f"{statistics.median(own.float32):.1e}", f"{max(own.float32):.1e}"]
    if own.size is None:
        return [*head, "-", "-", "-"]
    pairs = list(zip(own.float32, full.float32, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    worse, better = sum(a > 2 * b for a, b in pairs), sum(b > 2 * a for a, b in pairs)
    return [*head, f"{ratio:.2f}", f"{worse} of {len(pairs)}", f"{better} of {len(pairs)}"]


def main() -> int:
    """Measure, print, and write JSON on request."""
    known = works()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", default=",".join(known))
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--sizes", default="1,4,16,64")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.work.split(",")) - set(known):
        parser.error(f"--work {', '.join(sorted(unknown))} is unknown. Pass some of {', '.join(known)}.")
    if options.draws < 1:
        parser.error(f"--draws {options.draws} is too small. Pass 1 or more.")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[Errors] = []
    for name in options.work.split(","):
        rows = measure(known[name], options.samples, list(map(int, options.sizes.split(","))), options.draws)
        found += rows
        print_table(
            f"{name}, N = {options.samples}: errors of the gradient in float32",
            ("", "median", "largest", "ratio to full batch", "> 2 x full batch", "< full batch / 2"),
            [row_of(row, rows[0]) for row in rows],
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
