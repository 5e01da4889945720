"""Train two encoders with a contrastive loss over 256 pairs.

    python examples/contrastive.py [--updates 150]

Plain accumulation in micro-batches of 8 has 7 negatives for each pair; the batch of 256 has 255. `WholeBatch`
computes the loss of the large batch in the memory of 8 pairs.
"""

import argparse
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

from superbatch.torch import WholeBatch

BATCH, MICROBATCH = 256, 8


def pairs(count, seed):
    """Return two noisy views of the same 16 hidden numbers."""
    views = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)) / 4
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 16, generator=draw)
    return [torch.tanh(hidden @ view) + torch.randn(count, 64, generator=draw) for view in views]


class Towers(nn.Module):
    """An encoder for each view, and a learnt temperature."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.second = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def similarity(self, batch):
        first, second = self.first(batch[0]), self.second(batch[1])
        return self.scale.exp() * F.normalize(first, dim=1) @ F.normalize(second, dim=1).T

    def loss(self, batch):
        logits = self.similarity(batch)
        partner = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


def real(model, optimizer):
    def update(batch):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def plain(model, optimizer):
    def update(batch):
        for part in zip(*(view.split(MICROBATCH) for view in batch), strict=True):
            (model.loss(part) / (BATCH // MICROBATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def exact(model, optimizer):
    return WholeBatch(model, optimizer, model.loss, microbatch_size=MICROBATCH)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=150)
    updates = parser.parse_args().updates
    torch.manual_seed(0)
    start = Towers()

    def gradient(make):
        """Return the gradient of the first batch, in float64."""
        model = deepcopy(start).double()
        update = make(model, torch.optim.SGD(model.parameters(), lr=1.0))
        update([view.double() for view in pairs(BATCH, seed=0)])
        changed = zip(model.parameters(), start.parameters(), strict=True)
        return torch.cat([(after - before).detach().flatten() for after, before in changed])

    def recall(make):
        """Train, and return the recall among 1000 new pairs, in %."""
        model = deepcopy(start)
        update = make(model, torch.optim.Adam(model.parameters(), lr=3e-3))
        for index in range(updates):
            update(pairs(BATCH, seed=index + 2))
        with torch.no_grad():
            found = model.similarity(pairs(1000, seed=10_000)).argmax(1)
        return 100 * float((found == torch.arange(1000)).float().mean())

    truth = gradient(real)
    print("                          error, first gradient   recall@1, %")
    for name, make in (
        ("large batch of 256", real),
        ("plain accumulation, 8", plain),
        ("superbatch, 8", exact),
    ):
        off = float((gradient(make) - truth).norm() / truth.norm())
        print(f"{name:25s} {off:21.1e}   {recall(make):.1f}")


if __name__ == "__main__":
    main()
