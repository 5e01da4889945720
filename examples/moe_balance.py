"""Train a mixture of experts with a balance loss over the large batch.

    python examples/moe_balance.py [--updates 100]

The balance loss is a product of two means over the batch: how often an expert is chosen, and its mean
probability. In micro-batches it is another loss, which forces each micro-batch to use all experts. Here each
micro-batch has samples of one domain.
"""

import argparse
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

from superbatch.torch import WholeBatch

BATCH, MICROBATCH, EXPERTS, BALANCE = 256, 32, 8, 0.1


def samples(seed):
    """Return samples of 8 domains, 32 of each, sorted by domain."""
    tasks = torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(seed)
    domain = torch.arange(8).repeat_interleave(32)
    x = torch.randn(BATCH, 8, generator=draw)
    return {
        "x": torch.cat([x, 2 * F.one_hot(domain, 8)], dim=1),
        "y": torch.einsum("ni,nio->no", x, tasks[domain]),
    }


class Experts(nn.Module):
    """A gate that chooses one of 8 linear experts for each sample."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 16, 4) / 4)

    def loss(self, batch):
        probabilities = self.gate(batch["x"]).softmax(-1)
        weight, chosen = probabilities.max(-1)
        choice = F.one_hot(chosen, EXPERTS).to(weight.dtype)
        outputs = torch.einsum("ni,eio->neo", batch["x"], self.experts)
        output = (choice[:, :, None] * outputs).sum(1) * weight[:, None]
        balance = EXPERTS * (choice.mean(0) * probabilities.mean(0)).sum()
        return F.mse_loss(output, batch["y"]) + BALANCE * balance


def real(model, optimizer):
    def update(batch):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def plain(model, optimizer):
    def update(batch):
        for first in range(0, BATCH, MICROBATCH):
            part = {key: value[first : first + MICROBATCH] for key, value in batch.items()}
            (model.loss(part) * MICROBATCH / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def exact(model, optimizer):
    return WholeBatch(model, optimizer, model.loss, microbatch_size=MICROBATCH)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=100)
    updates = parser.parse_args().updates
    torch.manual_seed(0)
    start = Experts().double()

    def trained(make):
        model = deepcopy(start)
        update = make(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        changes = []
        for index in range(updates):
            update({key: value.double() for key, value in samples(index + 2).items()})
            changes.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return changes

    origin = torch.cat([p.detach().flatten() for p in start.parameters()])
    truth = trained(real)
    print(f"                            error of first update   after {updates} updates")
    for name, make in (("plain accumulation, 32", plain), ("superbatch, 32", exact)):
        found = trained(make)
        first, last = (float((found[i] - truth[i]).norm() / (truth[i] - origin).norm()) for i in (0, -1))
        print(f"{name:27s} {first:19.1e}   {last:.1e}")


if __name__ == "__main__":
    main()
