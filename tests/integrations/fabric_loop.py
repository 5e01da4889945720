"""Training loop of Fabric, with its own accumulation or with superbatch.

``python -m tests.integrations.fabric_loop RANK FOLDER`` runs it as one of two gloo ranks.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from superbatch.integrations.lightning import make_gradient
from superbatch.torch import windows
from tests.integrations.lightning_models import LENGTH, WORDS, count, loader
from tests.torch.two_ranks import end_rank

Way = Literal["large", "stock", "exact"]


class Loop:
    """Two epochs in updates of 16 samples over all ranks; the last update of an epoch has 12.

    Args:
        way: ``"large"`` batches, the mean of the losses (``"stock"``), or ``"exact"``.
        fabric: launched Fabric.
        dtype: dtype of the model.
    """

    def __init__(self, way: Way, fabric: Fabric, *, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.way, self.fabric = way, fabric
        self.bare = nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS)).to(dtype)
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.5, momentum=0.5)
        set_up: Any = fabric.setup(self.bare, optimizer)
        self.model, self.optimizer = set_up
        size = (16 if way == "large" else 4) // fabric.world_size
        self.loader = loader(size, fabric.global_rank if fabric.world_size > 1 else None)
        self.norms: list[float] = []
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        """Return the mean over tokens."""
        x, y = batch
        logits = self.model(x)
        assert logits.shape[1:] == (LENGTH, WORDS)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def run(self) -> Loop:
        """Train."""
        gradient_of = None
        if self.way == "exact":
            gradient_of = make_gradient(
                self.fabric, self.model, self.loss, weight=count, microbatch_size=None
            )
        for _ in range(2):
            for window in windows(self.loader, 1 if self.way == "large" else 4):
                if gradient_of is None:
                    for batch in window:
                        self.fabric.backward(self.loss(batch) / len(window))
                else:
                    self.losses.append(gradient_of(window).loss)
                norm = self.fabric.clip_gradients(
                    self.model, self.optimizer, max_norm=0.3, error_if_nonfinite=False
                )
                self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


def largest_difference(a: Loop, b: Loop) -> float:
    """Return the largest difference of two loops' parameters."""
    pairs = zip(a.bare.parameters(), b.bare.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def main(rank: int, folder: Path) -> None:
    """Write ``RANK.pt``."""
    warnings.filterwarnings("ignore", ".*treespec")
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (folder / "port").read_text()}
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    found: dict[str, Any] = {"strategy": type(fabric.strategy).__name__}
    for way in ("large", "stock", "exact"):
        loop = Loop(way, fabric).run()
        named = {name: each.detach().clone() for name, each in loop.bare.named_parameters()}
        found[way] = {"parameters": named, "norms": loop.norms, "losses": loop.losses}
    torch.save(found, folder / f"{rank}.pt")
    end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
