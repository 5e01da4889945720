"""Gloo ranks without data in some windows: `python -m ... RANK FOLDER RANKS`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import SuperbatchError
from superbatch.torch import Accumulator, Window
from superbatch.torch.options import Split
from tests.torch.fault_ranks import FaultError, error_of, net, rows
from tests.torch.sharded_training import fully, join, leave, run, whole

NONE = {  # (rank, window) pairs without data, by the number of ranks
    2: {(1, 0), (1, 2), (0, 3), (0, 4), (1, 4)},
    3: {(0, 0), (2, 0), (1, 1), (2, 1), (0, 3), (0, 4), (1, 4), (2, 4)},
}
WINDOWS = 6
SMALL: dict[str, Any] = {"microbatch_size": 2, "max_grad_norm": 0.1}
CASES: dict[str, dict[str, Any]] = {  # options of the Accumulator
    "DDP": SMALL,
    "all_reduce": SMALL | {"sync": "all_reduce"},
    "FSDP2": SMALL,
    "FSDP2, microbatch": SMALL | {"sync": "microbatch"},
    "FSDP2, auto": {"microbatch_size": "auto", "max_grad_norm": 0.1},
    "FSDP2, windows": {"microbatch_size": "auto", "max_grad_norm": 0.1},
    "FSDP2, tokens": SMALL | {"weight": lambda batch: int(batch["mask"].sum())},
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over samples, or over those that the mask selects."""
    if isinstance(batch, Tensor):
        return error_of(model, batch)
    errors = (model(batch["x"]) - batch["x"][:, :3].cos()).square().mean(1)
    return (errors * batch["mask"]).sum() / batch["mask"].sum() if "mask" in batch else errors.mean()


class Unpicklable:
    """Object that cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("it has no pickle")


def batch_of(case: str, rank: int, window: int) -> Any:
    """Return the batch of a rank in the form of a case."""
    x = rows(rank, window)
    if case == "FSDP2, windows":
        return Window(x.split([1, 3, len(x) - 4]))
    if case == "FSDP2, tokens":
        return {"x": x, "mask": torch.arange(len(x)) % 3 != 1}
    return x


def trained(rank: int, ranks: int, case: str, *, check: bool) -> dict[str, Any]:
    """Train on six windows."""
    model: Any = net()
    if case == "DDP":
        model = DistributedDataParallel(model)
    elif case.startswith("FSDP2"):
        model = fully(model, init_device_mesh("cpu", (ranks,)))
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        partial(loss_of, model),
        check=check,
        **CASES[case],
    )
    none = NONE[ranks]
    updates = [accumulate(None if (rank, w) in none else batch_of(case, rank, w)) for w in range(WINDOWS)]
    return {"state": whole(model), "made": [u.made for u in updates], "samples": [u.samples for u in updates]}


def failing(rank: int, ranks: int, where: str) -> dict[str, Any]:
    """Run three updates; in the second, a rank fails and rank 0 has no data."""
    model: Any = fully(net(), init_device_mesh("cpu", (ranks,)))
    window = 0

    def loss_fn(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        if window == 1 and where == ("without data" if rank == 0 else "with data"):
            raise FaultError("behind the model")
        return loss

    unsplit = ["ids"] if where == "no pickle" else []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(
        model, optimizer, loss_fn, microbatch_size=2, check=False, split=Split(unsplit=unsplit)
    )
    outcomes: list[str] = []
    for window in range(3):
        x = rows(rank, window)
        batch: Any = {"x": x, "ids": Unpicklable()} if unsplit else x
        try:
            accumulate(None if (rank, window) == (0, 1) else batch)
            outcomes.append("made")
        except (FaultError, SuperbatchError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return {"outcomes": outcomes}


def cells(rank: int, ranks: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return all cells by name."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in CASES:
        for check in (False, True):
            if ranks == 2 or (case in ("FSDP2", "FSDP2, auto") and check):
                found[f"{case}, {check}"] = partial(trained, rank, ranks, case, check=check)
    if ranks == 2:
        for where in ("with data", "without data", "no pickle"):
            found[where] = partial(failing, rank, ranks, where)
    return found


def main(rank: int, folder: Path, ranks: int, chosen: list[str]) -> None:
    """Run all cells."""
    join(rank, folder, ranks)
    leave(run(cells(rank, ranks), chosen), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
