"""The trainings of `workloads.py`, scaled so that tens or hundreds of samples reach a limit of memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from peers.work import Work
from torch import nn
from workloads import CLASSES, images, text, workloads

MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class Limited:
    """A training under a limit.

    Attributes:
        work: its batch is all the data, and at the same time the batch that the user wants for one update.
        limit: bytes of address space for everything from the making of the model on.
        about: a size near the true limit, where the search for it begins.
    """

    work: Work
    limit: int
    about: int


def deep_mlp() -> nn.Module:
    """Gradients and activations of the same order: 25 MB of parameters, 0.1 MB of activations per sample."""
    width, layers = 512, [nn.Linear(64, 512), nn.GELU()]
    for _ in range(24):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def small_mlp() -> nn.Module:
    """For a test of the benchmark itself: 0.06 MB of activations per sample."""
    return nn.Sequential(nn.Linear(64, 16384), nn.GELU(), nn.Linear(16384, CLASSES))


def _mlp() -> Limited:
    work = replace(workloads()["mlp"], model=deep_mlp, batch=images(4096, 64))
    return Limited(work=work, limit=120 * MEBIBYTE, about=700)


def _small() -> Limited:
    work = replace(workloads()["mlp"], name="small", model=small_mlp, batch=images(2048, 64))
    return Limited(work=work, limit=64 * MEBIBYTE, about=270)


def _convnet() -> Limited:
    work = replace(workloads()["convnet"], batch=images(4096, 3, 32, 32))
    return Limited(work=work, limit=160 * MEBIBYTE, about=700)


def _transformer() -> Limited:
    work = replace(workloads()["transformer"], batch=text(256))
    return Limited(work=work, limit=240 * MEBIBYTE, about=48)


LIMITED: dict[str, Callable[[], Limited]] = {
    "mlp": _mlp,
    "convnet": _convnet,
    "transformer": _transformer,
    "small": _small,
}
"""By name; "small" is for tests."""


def samples_of(work: Work) -> torch.utils.data.Dataset[dict[str, torch.Tensor]]:
    """The data as a loader wants them, one sample at a time."""
    return _Samples(work)


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, work: Work) -> None:
        self.batch, self.samples = work.batch, work.samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: leaf[index] for name, leaf in self.batch.items()}
