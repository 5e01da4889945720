"""Two gloo ranks with unequal numbers of batches: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superbatch.torch import Accumulator
from superbatch.torch.ranks import until_all_end
from tests.torch.fault_ranks import error_of, net, rows
from tests.torch.sharded_training import join, leave, whole

COUNTS = (5, 2)
"""Number of batches of each rank."""


def trained(rank: int) -> dict[str, Any]:
    """Train until no rank has batches left."""
    model = net()
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        partial(error_of, model),
        microbatch_size=2,
        sync="all_reduce",
    )
    batches = (rows(rank, index) for index in range(COUNTS[rank]))
    samples = [accumulate(batch).samples for batch in until_all_end(batches)]
    return {"state": whole(model), "samples": samples}


def failing(rank: int) -> str:
    """Load batches; loading fails on rank 1. Return the number of batches and the error."""

    def batches() -> Iterator[Tensor]:
        yield rows(rank, 0)
        if rank == 1:
            raise OSError("no such file")
        yield rows(rank, 1)

    taken = 0
    try:
        for _ in until_all_end(batches()):
            taken += 1
    except Exception as error:  # noqa: BLE001  (the test checks it)
        return f"{taken}: {type(error).__name__}: {error}"
    return f"{taken}: no error"


def main(rank: int, folder: Path) -> None:
    """Run all cases."""
    join(rank, folder, 2)
    none = list(until_all_end([]))
    leave({"trained": trained(rank), "failing": failing(rank), "none": none}, rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
