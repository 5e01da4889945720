"""Train a residual network with BatchNorm, two images at a time.

    python examples/resnet_batchnorm.py [--updates 20]

Plain accumulation normalises each pair of images separately, which gives another gradient. `WholeBatch`
normalises over the large batch of 16, in the memory of two images.
"""

import argparse
from copy import deepcopy

import torch
from torch import nn

from superbatch.torch import WholeBatch

BATCH, MICROBATCH = 16, 2


class Block(nn.Module):
    """Two convolutions beside a shortcut; the output is half as high and wide."""

    def __init__(self, ins, outs):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(ins, outs, 3, 2, 1, bias=False),
            nn.BatchNorm2d(outs),
            nn.ReLU(),
            nn.Conv2d(outs, outs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outs),
        )
        self.shortcut = nn.Conv2d(ins, outs, 1, 2)

    def forward(self, x):
        return (self.layers(x) + self.shortcut(x)).relu()


def images(count, seed):
    """Return images of 16 x 16 with 0 to 20 spots, and the numbers of spots."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(21, (count,), generator=draw)
    x = 0.1 * torch.randn(count, 1, 16, 16, generator=draw)
    for image, number in zip(x, numbers.tolist(), strict=True):
        rows, columns = torch.randint(16, (2, number), generator=draw)
        image[0, rows, columns] += 1
    return x.double(), (numbers.double() - 10) / 10


def real(model, optimizer, loss_fn):
    def update(batch):
        loss_fn(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def plain(model, optimizer, loss_fn):
    def update(batch):
        for part in zip(*(leaf.split(MICROBATCH) for leaf in batch), strict=True):
            (loss_fn(part) / (BATCH // MICROBATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def exact(model, optimizer, loss_fn):
    return WholeBatch(model, optimizer, loss_fn, microbatch_size=MICROBATCH)


def trained(start, make, updates):
    """Return weights and running statistics after training."""
    model = deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_fn(batch):
        x, numbers = batch
        return nn.functional.mse_loss(model(x)[:, 0], numbers)

    update = make(model, optimizer, loss_fn)
    for index in range(updates):
        update(images(BATCH, seed=index))
    running = [value for name, value in model.named_buffers() if "running" in name]
    return [torch.cat([t.detach().flatten() for t in part]) for part in (model.parameters(), running)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=20)
    updates = parser.parse_args().updates
    torch.manual_seed(0)
    layers = [Block(1, 8), Block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)]
    start = nn.Sequential(*layers).double()
    weights, running = trained(start, real, updates)
    origin = torch.cat([p.detach().flatten() for p in start.parameters()])
    print(f"{updates} updates                   error of weights   error of running statistics")
    for name, make in (("plain accumulation, 2", plain), ("superbatch, 2", exact)):
        found, statistics = trained(start, make, updates)
        off = float((found - weights).norm() / (weights - origin).norm())
        print(f"{name:25s} {off:17.1e}   {float((statistics - running).norm() / running.norm()):.1e}")


if __name__ == "__main__":
    main()
