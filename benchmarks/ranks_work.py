"""Update of `ranks.py` on one rank: one model, one window, and the loops that train it.

Every loop makes the clipped AdamW update of the weighted mean over all ranks. The hand-written loops are the
best known: one all-reduce of the weights before the first backward, one of the loss after the last, and no
avoidable communication in between.
"""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator, Window

MAX_NORM = 1.0
Microbatch = tuple[Tensor, Tensor, float]
Loop = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """Size of the training.

    Attributes:
        blocks: number of blocks of the model.
        width: width of each block.
        samples: samples of a micro-batch.
        microbatches: micro-batches of a window on each rank.
    """

    blocks: int = 6
    width: int = 192
    samples: int = 32
    microbatches: int = 4


SMALL = Shape(blocks=2, width=16, samples=4, microbatches=2)


class Block(nn.Module):
    """Feed-forward layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the layers to the input."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclass(frozen=True)
class Contestant:
    """Loop that makes an update.

    Attributes:
        name: name of the row.
        against: row of the hand-written loop to compare with.
        make: function that makes and shards a model, and returns the update and the model.
    """

    name: str
    against: str
    make: Callable[["Setting"], tuple[Loop, nn.Module]]


@dataclass
class Setting:
    """Common settings of all contestants of a rank."""

    shape: Shape
    rank: int
    ranks: int
    mesh: DeviceMesh = field(init=False)

    def __post_init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (self.ranks,))

    def model(self) -> nn.Module:
        """Return the model with its initial parameters, the same for all contestants."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.shape.width) for _ in range(self.shape.blocks)))

    def window(self) -> list[Microbatch]:
        """Return the micro-batches of this rank; their weights differ, also between ranks."""
        generator = torch.Generator().manual_seed(self.rank)
        size = (self.shape.samples, self.shape.width)
        return [
            (
                torch.randn(size, generator=generator),
                torch.randn(size, generator=generator),
                float(1 + i + self.rank),
            )
            for i in range(self.shape.microbatches)
        ]


def loss_of(model: nn.Module, microbatch: Any) -> Tensor:
    """Return the mean over the samples of a micro-batch."""
    return nn.functional.mse_loss(model(microbatch[0]), microbatch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def replicated(setting: Setting, *, view: bool) -> nn.Module:
    """Return the model in DDP."""
    return DistributedDataParallel(setting.model(), gradient_as_bucket_view=view)


def sharded(setting: Setting) -> nn.Module:
    """Return the model with each block sharded."""
    model: Any = setting.model()
    for block in model:
        fully_shard(block, mesh=setting.mesh)
    return fully_shard(model, mesh=setting.mesh)


def by_hand_ddp(setting: Setting, *, view: bool = True) -> tuple[Loop, nn.Module]:
    """Return a loop around DDP that reduces in the last backward; gradients may be views of its buckets."""
    model: Any = replicated(setting, view=view)
    optimizer, window = adamw(model), setting.window()

    def update() -> None:
        factors = _factors(window, setting.ranks)
        total = torch.zeros(())
        for index, (microbatch, factor) in enumerate(zip(window, factors, strict=True)):
            with nullcontext() if index == len(window) - 1 else model.no_sync():
                loss = loss_of(model, microbatch) * factor
                loss.backward()
                total += loss.detach()
        _finish(model, optimizer, total)

    return update, model


def by_hand_bare(setting: Setting) -> tuple[Loop, nn.Module]:
    """Return a loop that sums the gradients of a bare model in one all-reduce."""
    model = setting.model()
    optimizer, window = adamw(model), setting.window()

    def update() -> None:
        factors = _factors(window, 1)
        total = torch.zeros(())
        for microbatch, factor in zip(window, factors, strict=True):
            loss = loss_of(model, microbatch) * factor
            loss.backward()
            total += loss.detach()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        _finish(model, optimizer, total)

    return update, model


def by_hand_fsdp(setting: Setting, *, once: bool) -> tuple[Loop, nn.Module]:
    """Return a loop around FSDP2 that reduces in the last backward only, or in each backward."""
    model: Any = sharded(setting)
    optimizer, window = adamw(model), setting.window()

    def update() -> None:
        factors = _factors(window, setting.ranks)
        total = torch.zeros(())
        for index, (microbatch, factor) in enumerate(zip(window, factors, strict=True)):
            last = index == len(window) - 1
            if once:
                model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            loss = loss_of(model, microbatch) * factor
            loss.backward()
            total += loss.detach()
        _finish(model, optimizer, total)

    return update, model


def _factors(window: list[Microbatch], ranks: int) -> list[float]:
    weight = torch.tensor(sum(weight for *_, weight in window), dtype=torch.float64)
    dist.all_reduce(weight)
    return [own * ranks / weight.item() for *_, own in window]


def _finish(model: nn.Module, optimizer: torch.optim.Optimizer, total: Tensor) -> None:
    dist.all_reduce(total)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def ours(setting: Setting, wrap: Callable[[Setting], nn.Module], **options: Any) -> tuple[Loop, nn.Module]:
    """Return the update of an `Accumulator`."""
    model = wrap(setting)
    window = setting.window()
    accumulate = Accumulator(
        model,
        adamw(model),
        partial(loss_of, model),
        weight=lambda microbatch: microbatch[2],
        max_grad_norm=MAX_NORM,
        check=False,
        **options,
    )
    return lambda: accumulate(Window(window)) and None, model


def by_accelerate(setting: Setting) -> tuple[Loop, nn.Module]:
    """Return the loop of Accelerate's guide; it has no weights, so its update differs."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  (it need not be there)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=setting.shape.microbatches)
    model, optimizer = accelerator.prepare(setting.model(), None)
    optimizer = accelerator.prepare(adamw(model))
    window = setting.window()

    def update() -> None:
        for microbatch in window:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, microbatch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return update, model


def by_fabric(setting: Setting) -> tuple[Loop, nn.Module]:
    """Return the loop of Fabric's guide; it has no weights, so its update differs."""
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]  (it need not be there)
    from lightning.fabric.plugins.environments import (  # pyright: ignore[reportMissingImports]
        LightningEnvironment,
    )

    fabric = Fabric(accelerator="cpu", devices=setting.ranks, strategy="ddp", plugins=LightningEnvironment())
    fabric.launch()
    bare = setting.model()
    model, optimizer = fabric.setup(bare, adamw(bare))
    window = setting.window()

    def update() -> None:
        for index, microbatch in enumerate(window):
            with fabric.no_backward_sync(model, enabled=index < len(window) - 1):
                fabric.backward(loss_of(model, microbatch) / len(window))
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update, model


PEERS = {"Accelerate": ("accelerate", by_accelerate), "Fabric": ("lightning", by_fabric)}
"""Loops of other libraries, by name: the module that must be installed, and the loop."""


def missing_peers() -> list[str]:
    """Return the names of missing libraries."""
    return [name for name, (module, _) in PEERS.items() if importlib.util.find_spec(module) is None]


def contestants(peers: bool) -> list[Contestant]:
    """Return the rows, each hand-written loop before the loops to compare with it."""
    ddp, beside = "DDP by hand", "DDP by hand, default"
    once, each = "FSDP2 by hand, once", "FSDP2 by hand, each micro-batch"
    rows = [
        Contestant(ddp, ddp, by_hand_ddp),
        Contestant("superbatch, DDP", ddp, partial(ours, wrap=partial(replicated, view=True))),
        Contestant(beside, beside, partial(by_hand_ddp, view=False)),
        Contestant("superbatch, DDP, default", beside, partial(ours, wrap=partial(replicated, view=False))),
        Contestant("bare by hand", "bare by hand", by_hand_bare),
        Contestant(
            "superbatch, all_reduce", "bare by hand", partial(ours, wrap=Setting.model, sync="all_reduce")
        ),
        Contestant(once, once, partial(by_hand_fsdp, once=True)),
        Contestant("superbatch, FSDP2, window", once, partial(ours, wrap=sharded, sync="window")),
        Contestant(each, each, partial(by_hand_fsdp, once=False)),
        Contestant("superbatch, FSDP2, microbatch", each, partial(ours, wrap=sharded, sync="microbatch")),
    ]
    there = PEERS.keys() - missing_peers() if peers else set()
    return rows + [Contestant(name, beside, make) for name, (_, make) in PEERS.items() if name in there]
