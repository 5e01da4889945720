"""Trainings of models that are sharded over ranks, and their large-batch references."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superbatch.torch import count_tokens
from superbatch.torch.options import PerSampleRandom
from tests.torch.helpers import LargeBatch, large_batch, mse, rows, sgd, tiny_lm, token_mean, tokens

SAMPLES = ((7, 4, 3, 5), (5, 6, 6, 2), (8, 1, 3, 4))
"""Number of samples of each update, on each data-parallel rank: unequal, with short tails."""


class Block(nn.Module):
    """Feed-forward block of a transformer; its activations may be recomputed in the backward."""

    def __init__(self, *, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.drop = nn.Dropout(dropout)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, checkpointed or not."""
        if self.checkpointed:
            return checkpoint(self.mix, x, use_reentrant=False)
        return self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        """Run the layers."""
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Fragile(nn.Module):
    """Identity whose forward or backward may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[Tensor, str], None] = lambda x, where: None

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        self.fails(x, "forward")
        return _Identity.apply(x, self)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Fragile) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.module.fails(gradients[0], "backward")
        return gradients[0], None


class Net(nn.Module):
    """Blocks between two layers; some row counts are not divisible by the number of ranks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        self.fragile = Fragile()
        self.spare = nn.Linear(3, 3)  # no forward uses it

    def forward(self, x: Tensor) -> Tensor:
        """Run all but the spare layer."""
        x = self.first(x)
        x = self.blocks[0](x)
        x = self.fragile(x)
        return self.last(self.blocks[1](x))


def net(**options: Any) -> nn.Module:
    """Return the model of most tasks."""
    torch.manual_seed(0)
    return Net(**options).double()


def samples(rank: int) -> list[Any]:
    """Return one batch for each update."""
    return [rows(counts[rank], 1, seed=10 * rank + update)[0] for update, counts in enumerate(SAMPLES)]


LENGTHS = (
    ([5, 2, 7], [1, 4, 3], [2, 0, 0]),
    ([1, 4, 3], [0, 0, 0], [6, 6, 1]),
    ([3, 3], [7, 1, 2, 5], [4]),
    ([0], [2, 2], [1, 1, 3]),
)
"""Number of labels of the sequences of each rank and update; some batches have none."""


def sentences(rank: int) -> list[Any]:
    """Return one batch of tokens for each update."""
    return [labelled(lengths, seed=10 * rank + update) for update, lengths in enumerate(LENGTHS[rank])]


def labelled(lengths: Sequence[int], *, seed: int) -> dict[str, Tensor]:
    """Return sequences with labels for their first tokens only; length 0 means no label."""
    batch = tokens([max(1, length) for length in lengths], seed=seed)
    for row, length in enumerate(lengths):
        if not length:
            batch["labels"][row] = -100
    return batch


def with_count(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the mean over the labels, and their number."""
    return token_mean(model, batch), (batch["labels"] != -100).sum()


def marked(batch: Any) -> Tensor:
    """Return the number of samples with a large first input."""
    return (batch[0][:, 0] > 0.5).sum()


def two_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return an error, and the mean squared norm of the outputs of marked samples (NaN without any)."""
    outputs = model(batch[0])
    size = outputs[batch[0][:, 0] > 0.5].square().sum() / marked(batch)
    return {"error": (outputs - batch[1]).square().mean(), "size": size}


def marked_mean(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean squared norm of the outputs of marked samples (NaN without any)."""
    return two_terms(model, batch)["size"]


def autocast_mse(model: nn.Module, batch: Any) -> Tensor:
    """Return the error of a bfloat16 forward of a float32 model."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch[0])
    return (outputs.to(batch[1].dtype) - batch[1]).square().mean()


def both_terms(model: nn.Module, batch: Any) -> Tensor:
    """Return the sum of both terms on a large batch."""
    terms = two_terms(model, batch)
    return terms["error"] + terms["size"]


class Forked(Net):
    """Model with two additional layers, of which it uses one at most."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        """Use the second layer for inputs that only one rank has."""
        y = super().forward(x)
        return torch.where(x[:, :1] > 1.5, self.only[1](y), y) if (x[:, 0] > 1.5).any() else y


def forked() -> nn.Module:
    """Return a model with a layer that only some micro-batches use."""
    torch.manual_seed(0)
    return Forked().double()


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return AdamW, whose steps depend on the scale of each gradient element."""
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


@dataclass(frozen=True)
class Task:
    """Training of a model.

    Attributes:
        make: builds the model.
        loss: loss of a micro-batch.
        data: returns the batches of a rank.
        objective: loss of a large batch (default: `loss`).
        optimizer: builds the optimizer from parameters.
        options: options of the `Accumulator`.
        window_size: samples per micro-batch of a `Window`; 0: the library splits the batches.
        alone: the reference is an `Accumulator` in one process, with the same random numbers.
    """

    make: Callable[[], nn.Module] = net
    loss: Callable[[nn.Module, Any], Any] = mse
    data: Callable[[int], list[Any]] = samples
    objective: Callable[[nn.Module, Any], Tensor] | None = None
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = sgd
    options: dict[str, Any] = field(default_factory=lambda: {"microbatch_size": 2})
    window_size: int = 0
    alone: bool = False


CLIP = {"microbatch_size": 2, "max_grad_norm": 0.05}

TASKS: dict[str, Task] = {
    "clipped": Task(options=CLIP, optimizer=adamw),
    "windows": Task(window_size=2),
    "tokens": Task(
        make=tiny_lm,
        loss=token_mean,
        data=sentences,
        options={"microbatch_size": 1, "weight": count_tokens("labels")},
    ),
    "returned": Task(
        make=tiny_lm,
        loss=with_count,
        objective=token_mean,
        data=sentences,
        options={"microbatch_size": 1, "weight": "returned"},
    ),
    "dropout": Task(
        make=lambda: net(dropout=0.5),
        options={"microbatch_size": 2, "participants": [PerSampleRandom()]},
        alone=True,
    ),
    "checkpointed": Task(make=lambda: net(checkpointed=True), options=CLIP),
    "foreach": Task(optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True), options=CLIP),
    "fused": Task(optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, fused=True), options=CLIP),
    "terms": Task(
        loss=two_terms,
        objective=both_terms,
        options={"microbatch_size": 2, "weight": {"error": None, "size": marked}},
    ),
    "counted": Task(loss=marked_mean, options={"microbatch_size": 2, "weight": marked}),
    "forked": Task(make=forked),
    "auto": Task(options={"microbatch_size": "auto"}),
    "in float32": Task(
        make=lambda: net().float(),
        data=lambda rank: [tuple(each.float() for each in batch) for batch in samples(rank)],
    ),
    "autocast": Task(
        make=lambda: net().float(),
        loss=autocast_mse,
        data=lambda rank: [tuple(each.float() for each in batch) for batch in samples(rank)],
    ),
    # A factor such as 2/11 is wrong by 0.2 % in bfloat16, and so is the gradient of the loss.
    "bfloat16 loss": Task(
        make=lambda: net().float(),
        loss=lambda model, batch: mse(model, batch).bfloat16(),
        objective=mse,
        data=lambda rank: [tuple(each.float() for each in batch) for batch in samples(rank)],
    ),
    "largest": Task(options={"microbatch_size": "largest"}),
    "samples": Task(),
    "checked": Task(options={"microbatch_size": 2, "check": True}),
}


def joined(batches: Sequence[Any]) -> Any:
    """Concatenate batches."""
    if isinstance(batches[0], dict):
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    return tuple(map(torch.cat, zip(*batches, strict=True)))


def large_batches(task: Task, ranks: int) -> list[Any]:
    """Return the batches of all ranks, concatenated for each update."""
    return [joined(batches) for batches in zip(*(task.data(rank) for rank in range(ranks)), strict=True)]


def reference(task: Task, ranks: int) -> tuple[nn.Module, LargeBatch]:
    """Return the model trained on the large batches, and the records."""
    from superbatch.torch import Accumulator

    model = task.make().double()
    optimizer = task.optimizer(model.parameters())
    objective = task.objective or task.loss
    batches = [_in_float64(batch) for batch in large_batches(task, ranks)]
    if not task.alone:
        clip = task.options.get("max_grad_norm")
        return model, large_batch(optimizer, lambda b: objective(model, b), batches, max_grad_norm=clip)
    options = {**task.options, "microbatch_size": None, "check": False}
    torch.manual_seed(1)
    accumulate = Accumulator(model, optimizer, lambda b: task.loss(model, b), **options)
    updates = [accumulate(batch) for batch in batches]
    norms = [u.grad_norm or math.nan for u in updates]
    return model, LargeBatch([u.loss for u in updates], norms, [])


def rounded(task: Task, ranks: int) -> dict[str, Tensor]:
    """Return the parameters trained on the large batches in the task's own precision."""
    model = task.make()
    large_batch(task.optimizer(model.parameters()), lambda b: task.loss(model, b), large_batches(task, ranks))
    return {name: each.detach() for name, each in model.named_parameters()}


def _in_float64(batch: Any) -> Any:
    return tuple(each.double() for each in batch) if isinstance(batch, tuple) else batch


def errors(parameters: dict[str, Tensor], trained: nn.Module, start: nn.Module) -> dict[str, float]:
    """Return the error of each parameter, relative to the reference's change (inf if that is zero)."""
    before = start.state_dict()
    found: dict[str, float] = {}
    assert any(not torch.equal(each, before[name]) for name, each in trained.state_dict().items()), "premise"
    for name, value in trained.state_dict().items():
        moved = (value - before[name]).norm()
        error = (parameters[name].to(value.dtype) - value).norm()
        found[name] = float(error / moved) if moved else math.inf if error else 0.0
    return found
