"""Two gloo ranks; one leaves a window before its first collective: `python -m ... RANK FOLDER BAD`.

Both ranks catch every error and continue with the next batch, as a loop with ``try`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import SuperbatchError
from superbatch.torch import Accumulator, WholeBatch, Window
from tests.torch.fault_ranks import BATCHES, FAILS_AT, FaultError, error_of, net, rows
from tests.torch.sharded_training import full, fully, join, leave, run


class Loop:
    """Training on four batches; one window fails on one rank.

    Args:
        how: ``"DDP"``, ``"FSDP2"`` or ``"WholeBatch"``.
        case: cause of the failure.
        here: True on the failing rank.
    """

    def __init__(self, how: str, case: str, *, here: bool) -> None:
        self.case, self.here, self.batch = case, here, -1
        model: Any = net()
        self.model: Any = (
            fully(model, init_device_mesh("cpu", (2,))) if how == "FSDP2" else DistributedDataParallel(model)
        )
        whole = how == "WholeBatch"
        options: dict[str, Any] = {} if whole else {"weight": self.weigh, "check": case == "check"}
        self.accumulate: Any = (WholeBatch if whole else Accumulator)(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9),
            self.loss,
            microbatch_size=2,
            **options,
        )
        self.old: Any = None

    @property
    def fails_now(self) -> bool:
        """True in the failing window, on the failing rank."""
        # The check runs in the first window that makes an update; its failure therefore comes at the start.
        return self.here and self.batch == (0 if self.case == "check" else FAILS_AT)

    def weigh(self, x: Tensor) -> Any:
        """Return the number of samples, or an invalid weight."""
        return torch.ones(2) if self.fails_now and self.case == "weight" else len(x)

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss, or fail."""
        if self.fails_now and self.case == "check":
            raise FaultError("no such label")
        return error_of(self.model, x)

    def update(self, x: Tensor) -> Any:
        """Make an update, or fail."""
        if not self.fails_now:
            return self.owned(x) if self.case in OWNED else self.accumulate(x)
        wrong: dict[str, Any] = {
            "None": None,
            "empty window": Window([]),
            "empty list": [],
            "no rows": x[:0],
            "lengths": (x, x[:2]),
            "iterator": iter([x]),
            "object": object(),
            "device": x.to("meta"),
        }
        return self.owned(x) if self.case in OWNED else self.accumulate(wrong.get(self.case, x))

    def owned(self, x: Tensor) -> Any:
        """Make an update in a user-defined loop."""
        if self.fails_now and self.case == "used twice":
            with self.old:
                raise AssertionError("it was entered")
        with self.accumulate.window(x) as self.old:
            for microbatch in self.old:
                self.old.backward(self.loss(microbatch))
            if self.fails_now and self.case == "inside":
                self.accumulate(x)
            if self.fails_now and self.case == "inside, caught":
                try:
                    self.accumulate(x)
                except SuperbatchError:
                    return None  # leaves the block without an exception
            if self.fails_now and self.case == "after":
                raise FaultError("behind the loop")
        return None


OWNED = ("used twice", "inside", "inside, caught", "after")
CASES = {
    "DDP": (
        *("empty window", "empty list", "no rows", "lengths", "iterator", "object", "device", "weight"),
        *("check", *OWNED),
    ),
    "FSDP2": ("empty window", "empty list", "lengths", "weight", "used twice", "after"),
    "WholeBatch": ("None", "empty window", "empty list", "no rows", "iterator"),
}


def trained(rank: int, bad: int, how: str, case: str) -> dict[str, Any]:
    """Train on all batches; return the outcome of each, and the parameters after it."""
    loop = Loop(how, case, here=rank == bad)
    outcomes: list[str] = []
    states: list[dict[str, Tensor]] = []
    for loop.batch in range(BATCHES):
        try:
            loop.update(rows(rank, loop.batch))
            outcomes.append("made")
        except (FaultError, SuperbatchError, RuntimeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        states.append({n.removeprefix("module."): full(p) for n, p in loop.model.named_parameters()})
    return {"outcomes": outcomes, "states": states}


def cells(rank: int, bad: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return all cells by name."""
    return {f"{h}, {c}": partial(trained, rank, bad, h, c) for h, cases in CASES.items() for c in cases}


def main(rank: int, folder: Path, bad: int, chosen: list[str]) -> None:
    """Run the cells, and write the results into the folder."""
    join(rank, folder, 2)
    leave(run(cells(rank, bad), chosen), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
