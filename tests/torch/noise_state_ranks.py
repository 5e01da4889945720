"""Worker for one of the two gloo ranks of `test_noise_state_ranks`: noise state on one rank only."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError, RankError
from superbatch.noise.meter import Estimate, NoiseMeter
from superbatch.torch import Accumulator, Window
from tests.torch.helpers import mlp, mse, sgd
from tests.torch.noise_ranks import ALONE, SIZES, leave, parts


def windows(accumulate: Accumulator, rank: int, count: int) -> list[str]:
    """Run windows; return the error text of each."""

    def one() -> str:
        try:
            accumulate(Window(parts(SIZES[rank], sum(SIZES[0]) if rank else 0)))
        except (InputError, RankError) as error:
            return str(error)
        return ""

    return [one() for _ in range(count)]


def make(*observers: NoiseMeter) -> tuple[Accumulator, torch.nn.Module]:
    """Return an accumulator and its model in DDP."""
    model = DistributedDataParallel(mlp())
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda microbatch: mse(model, microbatch), observers=observers
    )
    return accumulate, model


def restore_case(rank: int, every: int, where: str) -> dict[str, Any]:
    """Save after three windows. Restore on some of the ranks, then on all of them."""
    accumulate, _ = make(NoiseMeter(every=every))
    assert windows(accumulate, rank, 3) == ["", "", ""]
    state = accumulate.state_dict()
    observers = [NoiseMeter(every=every)] if where == "state" or rank == 0 else []
    accumulate, model = make(*observers)
    if where == "state" and rank == 0:
        accumulate.load_state_dict(state)
    before = [parameter.clone() for parameter in model.parameters()]
    said = windows(accumulate, rank, 2)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    accumulate, _ = make(NoiseMeter(every=every))
    accumulate.load_state_dict(state)
    after = windows(accumulate, rank, 3)
    assert accumulate.noise is not None
    return {"said": said, "unchanged": same, "after": after, "windows": accumulate.noise.windows}


def beside(rank: int) -> dict[str, Any]:
    """Run windows of one micro-batch per rank; return noise by Adam's preconditioner and by sample."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)).double()
    wrapped = DistributedDataParallel(model)
    adam = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    meter = Recorder()
    accumulate = Accumulator(wrapped, adam, lambda microbatch: mse(wrapped, microbatch), observers=[meter])
    batch = Window(parts(ALONE[rank], sum(ALONE[0]) if rank else 0))
    accumulate(batch)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [adam.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
    accumulate(batch)
    return {"said": meter.beside[-1], "model": weights, "moments": moments}


class Recorder(NoiseMeter):
    """Records the estimates of each window, besides the plain noise."""

    def __init__(self) -> None:
        super().__init__(every=1, preconditioned=True, proxy=True)
        self.beside: list[dict[str, tuple[float, ...]]] = []

    def add(self, estimates: dict[str, Estimate], *, samples: float) -> None:  # type: ignore[override]
        self.beside.append({})
        super().add(estimates, samples=samples)

    def add_beside(self, name: str, one: Estimate, *, samples: float) -> None:
        self.beside[-1][name] = tuple(one)
        super().add_beside(name, one, samples=samples)


def main(rank: int, folder: Path) -> None:
    """Run all cases, and write the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]  (documented)
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    said = {
        f"{where}, every {every}": restore_case(rank, every, where)
        for every, where in ((2, "state"), (1, "state"), (1, "option"))
    }
    said |= {"beside": beside(rank)}
    leave(said, rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
