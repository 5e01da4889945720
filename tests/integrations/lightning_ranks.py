"""Train the modules of lightning_models on one of two gloo ranks with Lightning's DDP.

``python -m tests.integrations.lightning_ranks RANK FOLDER``
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.integrations.lightning_models import Exact, ExactHalved, Rows, Tokens, train
from tests.torch.two_ranks import end_rank

IGNORED = slice(1, 16, 2)  # the samples of one of two ranks in the first update


def trained(kind: type[Tokens], size: int, batches: int, ignored: slice | None = None) -> dict[str, Any]:
    """Train on two ranks; return the results of this rank."""
    module = kind()
    trainer = train(
        module,
        size,
        batches,
        strategy="ddp",
        devices=2,
        rank=int(os.environ["RANK"]),
        use_distributed_sampler=False,
        ignored=ignored,
    )
    assert isinstance(trainer.logger, Rows)
    return {
        "parameters": {name: each.detach().clone() for name, each in module.named_parameters()},
        "rows": trainer.logger.rows,
        "norms": module.norms,
        "outputs": module.outputs,
        "steps": trainer.global_step,
        "strategy": type(trainer.strategy).__name__,
    }


def main(rank: int, folder: Path) -> None:
    """Write ``RANK.pt``."""
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*isinstance.treespec|.*litlogger")
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (folder / "port").read_text()}
    torch.set_num_threads(1)
    found = {
        "large": trained(Tokens, 8, 1),
        "stock": trained(Tokens, 2, 4),
        "exact": trained(Exact, 2, 4),
        "idle": trained(Exact, 2, 4, IGNORED),
        "hooks": trained(ExactHalved, 2, 4),
    }
    torch.save(found, folder / f"{rank}.pt")
    end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
