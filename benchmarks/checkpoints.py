"""Time and size of a checkpoint, against torch.save and torch.distributed.checkpoint.

    python benchmarks/checkpoints.py [--width 1024] [--rounds 9] [--json FILE]

The model is a stack of linear layers with AdamW. Most programs call `torch.save` over the last file, and a
kill during it loses both checkpoints. The row "flushed" writes another file, flushes it and renames it, as
superbatch does. Methods take turns; each time is a median, each ratio one of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rounds import in_rounds
from tables import print_table
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from superbatch.torch import Accumulator
from superbatch.torch.checkpoint import load_checkpoint, save_checkpoint

Way = tuple[Callable[[Path], object], Callable[[Path], object]]


class Training:
    """Model and optimizer after one update, so that the optimizer's state exists."""

    def __init__(self, width: int) -> None:
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.accumulate = Accumulator(self.model, self.optimizer, self.loss, check=False)
        self.accumulate(torch.randn(2, width))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean over samples."""
        return self.model(batch).square().mean()

    def state(self) -> dict[str, object]:
        """Return the state that the other methods save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, dict[str, object]]) -> None:
        """Load the state that the other methods saved."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def ways(training: Training) -> dict[str, Way]:
    """Return the functions that write and load a checkpoint, by name of the method."""

    def flushed(folder: Path) -> None:
        aside = folder / "aside.pt"
        with aside.open("wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(folder / "last.pt")

    def read(folder: Path) -> None:
        training.load(torch.load(folder / "last.pt", weights_only=True))

    def read_dcp(folder: Path) -> None:
        state = training.state()
        load(state, checkpoint_id=str(folder / "last"), no_dist=True)
        training.load(state)  # type: ignore[arg-type]

    return {
        "torch.save": (lambda folder: torch.save(training.state(), folder / "last.pt"), read),
        "torch.save, flushed": (flushed, read),
        "distributed.checkpoint": (
            lambda folder: save(training.state(), checkpoint_id=str(folder / "last"), no_dist=True),
            read_dcp,
        ),
        "superbatch": (
            lambda folder: save_checkpoint(folder, training.accumulate, keep=1),
            lambda folder: load_checkpoint(folder, training.accumulate),
        ),
    }


def main() -> int:
    """Measure, print, and check that the loaded state equals the saved one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
    training = Training(options.width)
    times: dict[str, list[list[float]]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        chosen = ways(training)
        for name in chosen:
            (Path(place) / name).mkdir()
            sizes[name] = 0  # fixes the order of the rows
        for name in in_rounds(list(chosen), options.rounds):
            folder, parts = Path(place) / name, times.setdefault(name, [[], []])
            for kind, work in enumerate(chosen[name]):
                start = time.perf_counter()
                work(folder)
                parts[kind].append(time.perf_counter() - start)
            sizes[name] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        exact = _is_exact(training, Path(place) / "superbatch")
        shutil.rmtree(place, ignore_errors=True)
    rows = _rows(times, sizes)
    header = ["", "write ms", "of flushed", "load ms", "of torch.load", "MiB"]
    cells = [[name, *(f"{row[key]:.3g}" for key in row)] for name, row in rows.items()]
    print_table(f"{sizes['torch.save'] / 2**20:.0f} MiB", header, cells)
    equal = "equals the saved one, bit for bit" if exact else "DIFFERS from the saved one"
    print(f"The loaded state {equal}.")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "exact": exact}))
    return 0 if exact else 1


def _is_exact(training: Training, folder: Path) -> bool:
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    save_checkpoint(folder, training.accumulate, keep=1)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    load_checkpoint(folder, training.accumulate)
    return all(torch.equal(before[name], value) for name, value in training.model.state_dict().items())


def _rows(times: dict[str, list[list[float]]], sizes: dict[str, int]) -> dict[str, dict[str, float]]:
    medians = {name: [1e3 * statistics.median(part) for part in parts] for name, parts in times.items()}
    base, loads = medians["torch.save, flushed"][0], medians["torch.save"][1]
    return {
        name: {
            "write": write,
            "write to flushed": write / base,
            "load": read,
            "load to torch.load": read / loads,
            "size": sizes[name] / 2**20,
        }
        for name, (write, read) in ((name, medians[name]) for name in sizes)
    }


if __name__ == "__main__":
    sys.exit(main())
