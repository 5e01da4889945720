"""A learning-rate survey restores the state of the loader, its sampler and its dataset."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)

from superbatch.torch import Accumulator
from superbatch.torch.tuning import lr_survey

POINTS = 14
EPOCH = 24


class Noisy(Dataset[Any]):
    """Dataset with noise from its own generator and a counter of reads."""

    def __init__(self, generator: Any = None) -> None:
        self.generator, self.read = generator, 0

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        noise = 0.0 if self.generator is None else self.generator.random()
        seeded = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=seeded) + noise, torch.randn(3, generator=seeded) + self.read / 1000


class Stream(IterableDataset[Any]):
    """Stream with other samples in every epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epoch += 1
        for number in range(EPOCH):
            yield torch.full((4,), float(number + self.epoch)) / EPOCH, torch.ones(3)


class EpochSampler(Sampler[int]):
    """Sampler that counts epochs and shuffles with the count as seed."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(EPOCH, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class PythonSampler(Sampler[int]):
    """Sampler that shuffles with a Python generator."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(EPOCH), EPOCH))


def persistent_loader() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=1, persistent_workers=True)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "a sampler that counts epochs": lambda: DataLoader(Noisy(), batch_size=6, sampler=EpochSampler()),
    "a random sampler": lambda: DataLoader(Noisy(), batch_size=6, sampler=PythonSampler()),
    "a seeded sampler": lambda: DataLoader(
        Noisy(), batch_size=6, sampler=RandomSampler(range(EPOCH), generator=torch.Generator().manual_seed(1))
    ),
    "a dataset with NumPy's generator": lambda: DataLoader(Noisy(np.random.default_rng(0)), batch_size=6),
    "a dataset with NumPy's old generator": lambda: DataLoader(Noisy(np.random.RandomState(0)), batch_size=6),
    "a subset of a dataset": lambda: DataLoader(Subset(Noisy(random.Random(0)), range(12)), batch_size=6),
    "several datasets": lambda: DataLoader(
        ConcatDataset([Noisy(random.Random(0)), Noisy(random.Random(1))]), batch_size=6
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=6),
    "persistent workers": persistent_loader,
}


class Training:
    """Updates over two epochs, with an optional survey before, within or between them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        torch.manual_seed(3)
        self.loader = loader
        model = nn.Linear(4, 3)
        self.accumulate = Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda b: nn.functional.mse_loss(model(b[0]), b[1]),
            microbatch_size=3,
        )

    def losses(self, survey_at: int | None) -> list[float]:
        found: list[float] = []
        self._survey(survey_at == 0)
        for _ in range(2):
            for batch in self.loader:
                found.append(self.accumulate(batch).loss)
                self._survey(survey_at == len(found))
        return found

    def _survey(self, wanted: bool) -> None:
        if wanted:
            assert len(lr_survey(self.accumulate, self.loader, updates=POINTS, high=0.1).losses) == POINTS


@pytest.mark.parametrize("name", LOADERS)
def test_a_survey_does_not_change_the_batches_of_a_training(name: str) -> None:
    plain = Training(LOADERS[name]()).losses(None)
    assert len(set(plain)) == len(plain), "premise: all losses differ"
    for survey_at in (0, 1, len(plain) // 2):
        assert Training(LOADERS[name]()).losses(survey_at) == plain


def test_a_cache_filled_during_a_survey_is_kept() -> None:
    """Containers are not restored: the training can use the samples that the survey cached."""

    class Caching(Noisy):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, Any] = {}

        def __getitem__(self, index: int) -> Any:
            if index not in self.cache:
                self.cache[index] = super().__getitem__(index)
            return self.cache[index]

    dataset = Caching()
    lr_survey(
        Training(DataLoader(dataset, batch_size=6)).accumulate,
        DataLoader(dataset, batch_size=6),
        updates=POINTS,
    )
    assert (len(dataset.cache), dataset.read) == (EPOCH, 0)
