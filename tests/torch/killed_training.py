"""Training that saves after each update: `python -m ... FOLDER UPDATES FILE`; FILE gets the parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from superbatch.torch import Accumulator
from superbatch.torch.checkpoint import StopSignals, load_checkpoint, save_checkpoint

SAMPLES = 12  # of each update


class Training:
    """Model with dropout; the number of samples so far determines its data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 128), nn.Dropout(0.2), nn.Linear(128, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.accumulate = Accumulator(self.model, self.optimizer, self.loss, microbatch_size=5)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return a mean over samples."""
        return self.model(batch).square().mean()

    def update(self, samples: int) -> None:
        """Run the update that follows the given number of samples."""
        generator = torch.Generator().manual_seed(samples)
        self.accumulate(torch.randn(SAMPLES, 32, generator=generator))


def main(folder: Path, updates: int, file: Path) -> int:
    """Train to the end or to a signal; return the exit code."""
    torch.set_num_threads(1)
    training = Training()
    found = load_checkpoint(folder, training.accumulate)
    samples = found.samples if found else 0
    with StopSignals() as stop:
        while training.accumulate.updates < updates:
            training.update(samples)
            samples += SAMPLES
            save_checkpoint(folder, training.accumulate, samples=samples, keep=2)
            print(training.accumulate.updates, flush=True)
            if stop.requested(training.accumulate):
                return stop.exit_code
    torch.save(training.model.state_dict(), file)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
