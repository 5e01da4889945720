"""One of two ranks with half of the batch, in DistributedDataParallel."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from superbatch.integrations.sentence_transformers import cached
from tests.integrations.encoders import columns, dense, gradients


def main(rank: int, folder: Path) -> None:
    model = dense(folder / f"model{rank}")  # once the ranks have met, rank 0 alone writes weights
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    found = {}
    for kind in ("plain", "cached"):
        features = [
            {n: v[6 * rank : 6 * rank + 6] for n, v in column.items() if isinstance(v, Tensor)}
            for column in columns(model)
        ]
        loss = MultipleNegativesRankingLoss(model, gather_across_devices=True)
        loss = cached(loss, microbatch_size=2) if kind == "cached" else loss
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        (loss.loss if kind == "cached" else loss).model = wrapped  # as the Trainer does
        found[kind] = {n.replace(".module", ""): each for n, each in gradients(loss, features)[1].items()}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
