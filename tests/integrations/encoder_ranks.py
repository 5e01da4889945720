"""Train one of two ranks on half of the batch in DistributedDataParallel, by hand and in the Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.integrations.sentence_transformers import cached
from tests.integrations.encoders import columns, dense, gradients, rows_seen, updates
from tests.torch.two_ranks import end_rank


def loss_of(*, gathers: bool, caches: bool) -> Callable[[Any], nn.Module]:
    def make(model: Any) -> nn.Module:
        loss = MultipleNegativesRankingLoss(model, gather_across_devices=gathers)
        return cached(loss, microbatch_size=2) if caches else loss

    return make


def by_hand(model: Any, rank: int, *, caches: bool) -> dict[str, Tensor]:
    features = [
        {n: v[6 * rank : 6 * rank + 6] for n, v in column.items() if isinstance(v, Tensor)}
        for column in columns(model)
    ]
    loss: Any = loss_of(gathers=True, caches=caches)(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    (loss.loss if caches else loss).model = wrapped  # as the Trainer does
    return {n.replace(".module", ""): each for n, each in gradients(loss, features)[1].items()}


def main(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    model = dense(folder / f"model{rank}")  # after process-group initialization only rank 0 writes weights
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    found: dict[str, Any] = {
        "plain": by_hand(model, rank, caches=False),
        "cached": by_hand(model, rank, caches=True),
    }
    place = folder / f"of {rank}"
    for gathers, name in ((True, "gathered"), (False, "own")):
        found[name] = updates(place, model, loss_of(gathers=gathers, caches=False), 6)

        def counted(trained: Any, gathers: bool = gathers) -> nn.Module:
            found["rows"] = rows_seen(trained)
            return loss_of(gathers=gathers, caches=True)(trained)

        found[f"{name}, cached"] = updates(place, model, counted, 6)
    torch.save(found, folder / f"{rank}.pt")
    end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
