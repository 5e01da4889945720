"""Five trainings: two dominated by overhead, two intermediate, and one with negligible overhead."""

from dataclasses import replace

import torch
from peers.task import Batch
from peers.work import Work
from torch import Tensor, nn

CLASSES = 10


def mlp() -> nn.Module:
    """MLP: about 0.2 ms for a micro-batch of 32 on one CPU core."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def convnet() -> nn.Module:
    """Convolutional network: about 6 ms for a micro-batch of 16 images of 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, CLASSES),
    )


class Transformer(nn.Module):
    """Small language model: about 80 ms for a micro-batch of 4 sequences of 64 tokens."""

    VOCABULARY, WIDTH, LENGTH, LAYERS = 1024, 256, 64, 4

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, self.WIDTH)
        layer = nn.TransformerEncoderLayer(self.WIDTH, 4, 4 * self.WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, self.LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids)))


class SmallTransformer(Transformer):
    """Smaller model: about 10 ms for a micro-batch, short enough to measure overhead."""

    WIDTH, LAYERS = 64, 2


class NarrowTransformer(Transformer):
    """As many modules and parameters as the small model with little arithmetic, so overhead dominates."""

    WIDTH, LAYERS = 8, 2


def images(count: int, *shape: int) -> Batch:
    """Return random samples of a shape with random classes."""
    torch.manual_seed(0)
    return {"inputs": torch.randn(count, *shape), "labels": torch.randint(CLASSES, (count,))}


def text(count: int) -> Batch:
    """Return random tokens; the labels are the next tokens."""
    torch.manual_seed(0)
    ids = torch.randint(Transformer.VOCABULARY, (count, Transformer.LENGTH + 1))
    return {"inputs": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def workloads() -> dict[str, Work]:
    """Return the trainings by name."""
    transformer = Work(
        name="transformer",
        model=Transformer,
        batch=text(16),
        microbatch_size=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        rounds=30,
    )
    works = (
        Work(
            name="mlp",
            model=mlp,
            batch=images(256, 64),
            microbatch_size=32,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            rounds=600,
        ),
        Work(
            name="convnet",
            model=convnet,
            batch=images(128, 3, 32, 32),
            microbatch_size=16,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            rounds=100,
        ),
        replace(transformer, name="narrow-transformer", model=NarrowTransformer, rounds=100),
        replace(transformer, name="small-transformer", model=SmallTransformer, rounds=100),
        transformer,
    )
    return {work.name: work for work in works}


def works_named(names: str) -> list[Work]:
    """Return the trainings for ``--work``; ``mlp:16`` is the MLP in 16 micro-batches.

    Raises:
        ValueError: unknown name, or no number of micro-batches after the colon.
    """
    known = workloads()
    works = []
    for each in names.split(","):
        name, colon, count = each.partition(":")
        if name not in known:
            raise ValueError(f"--work {name!r} is unknown. Pass one of {', '.join(known)}.")
        if colon and not (count.isdecimal() and int(count)):
            raise ValueError(f"--work {each!r} has no number after the colon. Pass one, such as {name}:16.")
        work = known[name]
        works.append(replace(work, name=each, batch=_repeated(work, int(count))) if colon else work)
    return works


def _repeated(work: Work, microbatches: int) -> Batch:
    """Return a batch that repeats the first micro-batch; the data do not affect the time."""
    return {name: torch.cat([leaf] * microbatches) for name, leaf in work.part(0).items()}
