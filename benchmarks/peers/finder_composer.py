"""Composer's ``device_train_microbatch_size="auto"``, which keeps the batch and halves the micro-batch.

Composer searches on a GPU only. Its code runs here with two patched functions: the CPU counts as a device for
the search, and an error of the CPU's allocator counts as an out-of-memory error.
"""

import logging
from typing import Any

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.trainer import trainer as internals
from torch.utils.data import DataLoader

from .finders import UPDATES, Found, Stopwatch, Watch
from .work import Work


class Module(ComposerModel):
    """The work as a ComposerModel."""

    def __init__(self, net: torch.nn.Module, watch: Watch) -> None:
        super().__init__()
        self.net, self.watch = net, watch

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch["inputs"])

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return self.watch.loss(outputs, batch)


def _any_device(size: object, device: object) -> bool:
    return size == "auto"


def _out_of_memory(error: RuntimeError) -> bool:
    return "DefaultCPUAllocator: can't allocate memory" in str(error)


def find(work: Work, watch: Watch, variant: str | None) -> Found:
    """Train for some updates; a failed batch is retried in micro-batches of half the size."""
    logging.getLogger("composer").setLevel(logging.ERROR)
    internals._is_auto_microbatching = _any_device
    internals._is_cuda_oom = _out_of_memory
    net, optimizer = work.build()
    watch.see(net)
    # Every batch is the whole data set, loaded before the limit; a copy would count.
    indices: Any = range(work.samples)
    loader = DataLoader(indices, batch_size=work.samples, collate_fn=lambda _: work.batch)
    trainer = Trainer(
        model=Module(net, watch),
        train_dataloader=loader,
        optimizers=optimizer,
        max_duration=f"{UPDATES}ba",
        device="cpu",
        device_train_microbatch_size="auto",
        progress_bar=False,
    )
    clock = Stopwatch()
    trainer.fit()
    chosen = trainer.state.device_train_microbatch_size
    seconds = clock.seconds()
    kept = UPDATES * work.samples
    lost = seconds * (1 - kept / sum(watch.forwards))
    return Found(
        chosen=int(chosen),
        trains=True,
        kept=kept,
        seconds=lost,
        note="on a CPU, with its test for a GPU replaced",
    )
