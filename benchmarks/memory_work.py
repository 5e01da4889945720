"""Trainings of `workloads.py`, scaled so that tens or hundreds of samples reach a memory limit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from peers.work import Work
from torch import nn
from workloads import CLASSES, images, text, workloads

MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class Limited:
    """Training under a memory limit.

    Attributes:
        work: the training; all of its data are the wanted batch of one update.
        limit: bytes of address space for the model and everything after it.
        about: a size near the true limit, the start of the search.
    """

    work: Work
    limit: int
    about: int


def deep_mlp() -> nn.Module:
    """MLP with 25 MB of parameters and 0.1 MB of activations per sample: both are of the same order."""
    width, layers = 512, [nn.Linear(64, 512), nn.GELU()]
    for _ in range(24):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def small_mlp() -> nn.Module:
    """MLP to test the benchmark itself: 0.06 MB of activations per sample."""
    return nn.Sequential(nn.Linear(64, 16384), nn.GELU(), nn.Linear(16384, CLASSES))


def _small() -> Limited:
    work = replace(workloads()["mlp"], name="small", model=small_mlp, batch=images(2048, 64))
    return Limited(work=work, limit=64 * MEBIBYTE, about=270)


def _mlp(samples: int, limit: int, about: int) -> Limited:
    work = replace(workloads()["mlp"], model=deep_mlp, batch=images(samples, 64))
    return Limited(work=work, limit=limit * MEBIBYTE, about=about)


def _convnet(samples: int, limit: int, about: int) -> Limited:
    work = replace(workloads()["convnet"], batch=images(samples, 3, 32, 32))
    return Limited(work=work, limit=limit * MEBIBYTE, about=about)


def _transformer(samples: int, limit: int, about: int) -> Limited:
    work = replace(workloads()["transformer"], batch=text(samples))
    return Limited(work=work, limit=limit * MEBIBYTE, about=about)


LIMITED: dict[str, Callable[[], Limited]] = {
    "mlp": partial(_mlp, 16384, 512, 4600),
    "convnet": partial(_convnet, 16384, 1024, 5000),
    "transformer": partial(_transformer, 384, 512, 117),
    "mlp-tiny": partial(_mlp, 4096, 120, 700),
    "convnet-tiny": partial(_convnet, 4096, 160, 700),
    "transformer-tiny": partial(_transformer, 256, 240, 48),
    "small": _small,
}
"""Trainings by name. The tiny ones are the hard case: the kernels that oneDNN caches for each size take some
megabytes, which are a few per cent of these limits. "small" is for tests."""


def samples_of(work: Work) -> torch.utils.data.Dataset[dict[str, torch.Tensor]]:
    """Return the data as a dataset of single samples."""
    return _Samples(work)


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, work: Work) -> None:
        self.batch, self.samples = work.batch, work.samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: leaf[index] for name, leaf in self.batch.items()}
