"""Two gloo ranks of the Trainer, and what each has trained. Arguments: rank, folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OPTIONS = {"optim": "sgd", "ddp_backend": "gloo"}
ROWS = 24  # which both ranks share evenly


def main(rank: int, folder: Path) -> None:
    """Train the same models on two ranks in each way."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'store'}")
    torch.set_num_threads(1)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    from transformers import Trainer

    from tests.integrations.hf_cases import CASES, ExactTrainer, InThrees, Run, rows, train

    def kept(run: Run) -> dict[str, Any]:
        return {"parameters": run.parameters, "loss": run.logged("loss"), "norm": run.logged("grad_norm")}

    found: dict[str, Any] = {}
    for name in ("classes", "router"):
        case, place = CASES[name], folder / f"of {rank}"
        options = {**OPTIONS, "data": rows(case, ROWS)}
        found[name] = {
            "big": kept(train(Trainer, case, 4, 1, place, **options)),
            "stock": kept(train(Trainer, case, 2, 2, place, **options)),
            "cut": kept(train(InThrees, case, 4, 1, place, **options)),
        }
        if name == "classes":  # coupled samples would be dealt out to the ranks in another way
            found[name]["accumulated"] = kept(train(ExactTrainer, case, 2, 2, place, **options))
            # Windows of 20 and 4 samples.
            found[name]["tail"] = kept(train(ExactTrainer, case, 2, 5, place, **options))
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
