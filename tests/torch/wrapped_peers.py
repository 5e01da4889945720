"""Compare training with a real library's optimizer to the large batch; `test_wrapped_optimizers` runs it."""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator
from tests.torch.helpers import assert_same_parameters, large_batch, mlp, mse, rows, start_of


def train(rank: int, ranks: int, wrap: Any, size: Any) -> None:
    """Compare three updates with those of the large batch."""
    model, batches = mlp(), rows(12, 3)
    reference, start = copy.deepcopy(model), start_of(model)
    by_hand = torch.optim.Adam(reference.parameters(), lr=0.01)
    large_batch(by_hand, lambda batch: mse(reference, batch), batches)
    trained: Any = DistributedDataParallel(model) if ranks > 1 else model
    accumulate = Accumulator(
        trained, wrap(model.parameters()), lambda mb: mse(trained, mb), microbatch_size=size, check=False
    )
    for x, y in batches:
        assert accumulate((x[rank::ranks], y[rank::ranks])).made
    assert_same_parameters(reference, model, 1e-12, start=start)


def zero(parameters: Any) -> Any:
    """Return an optimizer whose state is sharded over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


def of_rank(rank: int, ranks: int, file: str, size: Any) -> None:
    """Run one process of a group."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    try:
        train(rank, ranks, zero, size)
    finally:
        dist.destroy_process_group()


def by_ranks(ranks: int, size: Any) -> None:
    """Train with ZeroRedundancyOptimizer in `ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            of_rank, (ranks, f"{folder}/group", size), nprocs=ranks, start_method="fork"
        )


def by_accelerate(size: Any) -> None:
    """Train with Accelerate's optimizer; then let it skip a step."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train(0, 1, lambda parameters: accelerator.prepare(torch.optim.Adam(parameters, lr=0.01)), size)
    model = mlp()
    optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), lr=0.01))
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=size, check=False)
    with accelerator.accumulate(model):  # the first of two
        update = accumulate(rows(12, 1)[0])
    assert update.skipped == "the optimizer did not step: AcceleratedOptimizer.step() did not step Adam"


def by_fabric(size: Any) -> None:
    """Train with Fabric's optimizer."""
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    fabric: Any = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    train(0, 1, lambda parameters: fabric.setup_optimizers(torch.optim.Adam(parameters, lr=0.01)), size)


if __name__ == "__main__":
    name, size = sys.argv[1:]
    chosen = int(size) if size.isdigit() else size
    {
        "accelerate": lambda: by_accelerate(chosen),
        "fabric": lambda: by_fabric(chosen),
        "zero 1": lambda: by_ranks(1, chosen),
        "zero 2": lambda: by_ranks(2, chosen),
    }[name]()
    print("right")
