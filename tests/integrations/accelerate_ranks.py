"""Run the loop of Accelerate on one of two gloo ranks.

``python -m tests.integrations.accelerate_ranks RANK FOLDER``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import DataLoaderConfiguration
from torch.distributed.nn.functional import all_gather

from superbatch.errors import CoupledSamplesError, InputError
from superbatch.integrations.accelerate import make_gradient
from tests.integrations.accelerate_loop import Loop, Way, fresh
from tests.torch.two_ranks import end_rank


def trained(way: Way) -> dict[str, Any]:
    """Run the loop; return the results of this rank."""
    loop = Loop(way, fresh(gradient_accumulation_steps=4 if way == "stock" else 1), max_norm=0.5).run()
    return {
        "parameters": {name: each.detach().clone() for name, each in loop.bare.named_parameters()},
        "norms": loop.norms,
        "losses": loop.losses,
        "rates": loop.rates,
        "kind": loop.accelerator.distributed_type.value,
    }


def coupled_on(ranks: int, rank: int, *, coupled: bool, gathered: bool) -> dict[str, Any]:
    """Make two updates with a contrastive loss on this rank's share of twelve samples."""
    accelerator = fresh()
    torch.manual_seed(0)
    bare = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).double()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        if gathered:
            out = torch.cat(all_gather(out))
        return torch.nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))

    gradient_of = (
        make_gradient(accelerator, model, loss_fn, coupled=True, microbatch_size=2) if coupled else None
    )
    for batch in torch.randn(2, 12, 3, dtype=torch.float64):
        mine = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        if gradient_of is None:
            accelerator.backward(loss_fn(mine))
        else:
            gradient_of(mine)
        optimizer.step()
    return {name: each.detach().clone() for name, each in bare.named_parameters()}


def main(rank: int, folder: Path) -> None:
    """Write ``RANK.pt``."""
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (folder / "port").read_text()}
    torch.set_num_threads(1)
    ways: tuple[Way, ...] = ("large", "stock", "exact")
    found: dict[str, Any] = {way: trained(way) for way in ways}
    uneven = fresh(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loop = Loop("exact", uneven, max_norm=0.5, first=42).run()
    found["uneven"] = {name: each.detach().clone() for name, each in loop.bare.named_parameters()}
    found["batches"] = len(loop.loader)
    found["coupled"] = coupled_on(2, rank, coupled=True, gathered=True)
    found["own negatives"] = coupled_on(2, rank, coupled=False, gathered=False)
    try:
        coupled_on(2, rank, coupled=True, gathered=False)
    except CoupledSamplesError as error:
        found["not gathered"] = str(error)
    loop = Loop("exact", fresh())
    try:
        make_gradient(loop.accelerator, loop.bare, loop.loss)
    except InputError as error:
        found["refused"] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
