"""Two gloo ranks, whose loss couples the samples of one rank or none: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superbatch.errors import CoupledSamplesError
from superbatch.torch import WholeBatch
from tests.torch.sharded_training import join, leave

SAMPLES, SIZES = 12, (5, 12)
Batch = dict[str, Tensor]


class Bag(nn.Module):
    """Mean of word embeddings by `nn.EmbeddingBag`, an operator without a batching rule."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(30, 6, mode="mean"), nn.Linear(6, 4)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.words(batch["words"]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, batch: Batch) -> Tensor:
        return self.layers(batch["x"])


def contrast(z: Tensor, _: Batch) -> Tensor:
    """Contrastive loss within a rank: the next row is the positive of each row."""
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, (torch.arange(len(z)) + 1) % len(z))


def errors(z: Tensor, batch: Batch) -> Tensor:
    """Return the cross entropy of each sample."""
    return F.cross_entropy(z, batch["y"], reduction="none")


def hardest(z: Tensor, batch: Batch) -> Tensor:
    """Return the largest cross entropy of a sample."""
    each = errors(z, batch)
    return each[each.detach().argmax()]


Loss = Callable[[Tensor, Batch], Tensor]
COUPLED: dict[str, tuple[type[nn.Module], Loss]] = {
    "contrast": (Net, contrast),
    "of a bag": (Bag, contrast),
    "of chosen rows": (Net, lambda z, batch: contrast(z[batch["y"] > 0], batch)),
    "of shuffled rows": (Net, lambda z, batch: contrast(z[batch["order"]], batch)),
    "ranks": (Net, lambda z, _: (z[:, 0].sort().values * torch.linspace(0, 1, len(z)).double()).mean()),
    "hardest": (Net, hardest),
    "largest": (Net, lambda z, batch: errors(z, batch).topk(4).values.mean()),
    "neighbours": (Net, lambda z, _: (z * z.roll(1, 0)).mean()),
    "mirrored": (Net, lambda z, _: (z - z.flip(0)).square().mean()),
    "sums": (Net, lambda z, _: z.cumsum(0).square().mean()),
    "root": (Net, lambda z, batch: (z[:, 0] - batch["x"][:, 0]).square().mean().sqrt()),
    "softmax over samples": (Net, lambda z, _: z.softmax(0).square().sum()),
    "correlation": (Net, lambda z, _: (z.T @ z / len(z)).square().sum()),
}
SEPARATE: dict[str, tuple[type[nn.Module], Loss]] = {
    "cross entropy": (Net, lambda z, batch: errors(z, batch).mean()),
    "squares": (Net, lambda z, batch: (z - batch["x"][:, :4]).square().mean()),
}


def batch_of(rank: int) -> Batch:
    """Return the samples of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "x": torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64),
        "words": torch.randint(0, 30, (SAMPLES, 5), generator=generator),
        "y": torch.arange(SAMPLES) % 4,
        "order": torch.randperm(SAMPLES, generator=generator),
    }


def outcome(rank: int, name: str, size: int) -> str:
    """Run one update. Return "raises", the text of the warnings, or "" without either."""
    torch.manual_seed(1)
    kind, loss = (COUPLED | SEPARATE)[name]
    model = kind().double()
    accumulate = WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda batch: loss(model(batch), batch),
        microbatch_size=size,
        sync="all_reduce",
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            accumulate(batch_of(rank))
        except CoupledSamplesError:
            return "raises"
    return "\n".join({str(each.message) for each in said})


def main(rank: int, folder: Path) -> None:
    """Run all cases."""
    join(rank, folder, 2)
    cells = [(name, size) for name in COUPLED | SEPARATE for size in SIZES]
    leave({f"{name}, {size}": outcome(rank, name, size) for name, size in cells}, rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
