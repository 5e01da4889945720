"""Training arguments for all trainers of transformers: one epoch, every update logged, no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqdm import tqdm

tqdm.monitor_interval = 0  # otherwise a thread outlives a test
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def arguments(folder: Path, size: int, steps: int, **options: Any) -> dict[str, Any]:
    """Return keywords of `TrainingArguments` for this micro-batch size and number of micro-batches."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
