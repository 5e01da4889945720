"""Log of a training: a row of JSON for each update, and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from superbatch.errors import InputError
from superbatch.results.update import Update


class TrainLog:
    """Log that a resumed training continues: rows of updates after its checkpoint are removed."""

    def __init__(self, file: Path | None, tensorboard: Path | None, done: int) -> None:
        self.file, self.board = file, None if tensorboard is None else _board(tensorboard, done)
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = file.read_text(encoding="utf-8").splitlines() if done and file.exists() else []
            # The last line may be half of one, after a kill; it is of an update after the checkpoint.
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["update"] <= done]
            file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"--log-file {file} cannot be continued ({error}). Name another file."
            ) from error

    def write(self, done: int, update: Update, samples: int, metric: float | None) -> None:
        """Write the row of an update; samples are those of all ranks."""
        row: dict[str, Any] = {
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rates[0],
        }
        if metric is not None:
            row["metric"] = metric
        if self.file is not None:
            facts = {"samples": samples, "weight": update.weight, "microbatches": update.microbatches}
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"update": done, **row, **facts, "seconds": update.seconds}) + "\n")
        if self.board is not None:
            for name, value in row.items():
                if value is not None:
                    self.board.add_scalar(name, value, done)
            self.board.flush()


def _board(folder: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            f"--tensorboard {folder} needs the package tensorboard, which is not installed. "
            "Use pip install tensorboard, or --log-file FILE."
        ) from error
    return SummaryWriter(str(folder), purge_step=done + 1)
