"""Time the all-reduce on two ranks; `test_exchange.py` starts this program with torchrun."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from superbatch.lab.studies import exchange
from superbatch.torch.window.sync.manual import Manual

SLEEP = 0.05


class Late(Manual):
    """Sync whose second rank is late in every all-reduce."""

    def reduce(self, gradients: Any, parameters: Any, zeros: Any, announced: Any = None) -> Any:
        result = super().reduce(gradients, parameters, zeros, announced)
        time.sleep(SLEEP if self.index == 1 else 0.0)
        return result


class Counting(Manual):
    """Sync that records the number of elements of each all-reduce."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.numbers: list[int] = []

    def reduce(self, gradients: Any, parameters: Any, zeros: Any, announced: Any = None) -> Any:
        self.numbers.append(sum(gradient.numel() for gradient in gradients))
        return super().reduce(gradients, parameters, zeros, announced)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, count = exchange.rank_and_count()
    frozen = nn.Linear(2000, 2000).requires_grad_(requires_grad=False)
    models = {
        "small": nn.Linear(3, 1),
        "large": nn.Linear(2000, 2000),
        "frozen": nn.Sequential(nn.Linear(3, 1), frozen),
    }
    with exchange.all_ranks(torch.device("cpu")) as sync:
        found: dict[str, Any] = {"rank": rank, "count": count, "numbers": {}}
        for name, model in models.items():
            counting = Counting(sync.group, sync.device)
            found[name] = exchange.exchange_seconds(model, counting)
            found["numbers"][name] = counting.numbers
        late = Late(sync.group, sync.device)
        found["late"] = exchange.exchange_seconds(models["small"], late)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
