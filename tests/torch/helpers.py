"""The large-batch reference, the comparison with it, and small training tasks, for all tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from superbatch.torch import Accumulator, Update, Window
from superbatch.torch.options import ClipValue

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
TOLERANCE = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-6}


def start_of(*models: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, to detect changes later."""
    return {name: value.detach().clone() for name, value in _named(models)}


def _named(models: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    return [
        (name if len(models) == 1 else f"{index}.{name}", parameter)
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    ]


def assert_same_parameters(
    reference: nn.Module | Sequence[nn.Module],
    model: nn.Module | Sequence[nn.Module],
    tolerance: float,
    *,
    start: Mapping[str, Tensor],
    still: Sequence[str] = (),
) -> None:
    """Compare all named parameters, and fail with a list of all differences.

    The error is the 2-norm of the difference. In float64 it is relative to the reference's *change* since
    `start`; in float32 to the parameter if that is larger, because its rounding exceeds a small change.

    Args:
        reference: trained on the real large batch.
        model: trained by the code under test.
        tolerance: largest relative error.
        start: parameters before training (`start_of`). Each must have changed in the reference: two
            untrained models would compare equal.
        still: names of parameters that must not change in either model.
    """
    references, models = _as_sequence(reference), _as_sequence(model)
    ours = dict(_named(models))
    assert ours.keys() == dict(_named(references)).keys() == start.keys()
    failures = []
    for name, expected in _named(references):
        before, actual, expected = start[name], ours[name].detach(), expected.detach()
        if name in still:
            if not torch.equal(actual, before) or not torch.equal(expected, before):
                failures.append(f"{name}: moved, and must not")
            continue
        change = float(torch.linalg.vector_norm(expected - before))
        size = float(torch.linalg.vector_norm(before))
        assert change > 1e-5 * size and change > 0, f"premise: {name} of the reference has not moved"
        scale = change if expected.dtype in (torch.float64, torch.complex128) else max(change, size)
        error = float(torch.linalg.vector_norm(actual - expected)) / scale
        if not error <= tolerance:
            failures.append(f"{name}: relative error {error:.2e} > {tolerance:.0e}")
    assert not failures, "not the update of the large batch:\n" + "\n".join(failures)


def _as_sequence(model: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


@dataclass
class LargeBatch:
    """Records of `large_batch`, one entry per update."""

    losses: list[float]
    norms: list[float]
    rates: list[tuple[float, ...]]


def large_batch(
    optimizer: Optimizer | Sequence[Optimizer],
    objective: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    max_grad_norm: float | None = None,
    clip: ClipValue | None = None,
    scheduler: Any = None,
) -> LargeBatch:
    """Train on each whole batch in one forward and backward: the reference of all comparisons."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    seen = LargeBatch([], [], [])
    for batch in batches:
        for parameter in parameters:
            parameter.grad = None
        loss = objective(batch)
        loss.backward()
        present = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in present])
        assert float(norm) > 0, "premise: the gradient of the large batch is not zero"
        seen.rates.append(tuple(group["lr"] for one in optimizers for group in one.param_groups))
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        if clip is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip.limit)
        for one in optimizers:
            one.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(float(loss.detach()))
        elif scheduler is not None:
            scheduler.step()
        seen.losses.append(float(loss.detach()))
        seen.norms.append(float(norm))
    for parameter in parameters:
        parameter.grad = None
    return seen


@dataclass
class Both:
    """Reference and model from the same start, trained on the large batch and by the accumulator."""

    reference: nn.Module
    model: nn.Module
    start: dict[str, Tensor]
    seen: LargeBatch
    updates: list[Update]
    accumulate: Accumulator

    def check(self, tolerance: float | None = None, *, still: Sequence[str] = ()) -> None:
        """Assert that parameters, losses, norms and learning rates are those of the large batch."""
        dtype = next(iter(self.start.values())).dtype
        tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        assert_same_parameters(self.reference, self.model, tolerance, start=self.start, still=still)
        assert all(update.made for update in self.updates)
        assert [update.learning_rates for update in self.updates] == self.seen.rates
        for update, loss, norm in zip(self.updates, self.seen.losses, self.seen.norms, strict=True):
            assert abs(update.loss - loss) <= 10 * tolerance * max(abs(loss), 1.0)
            if update.grad_norm is not None:
                assert abs(update.grad_norm - norm) <= 10 * tolerance * max(norm, 1.0)
        assert all(parameter.grad is None for parameter in self.model.parameters())


def sgd(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def train_both(
    make: Callable[[], nn.Module],
    loss: Loss,
    batches: Sequence[Any],
    make_optimizer: MakeOptimizer = sgd,
    *,
    objective: Loss | None = None,
    scheduler: Callable[[Any], Any] = lambda optimizer: None,
    windows: Sequence[Window] | None = None,
    max_grad_norm: float | None = None,
    clip: ClipValue | None = None,
    **options: Any,
) -> Both:
    """Train two copies of a model on `batches`: by `large_batch`, and by an `Accumulator`.

    Args:
        make: builds the model; called once, then copied.
        loss: loss of a micro-batch, for `loss_fn`.
        batches: one whole batch per update.
        make_optimizer: builds an optimizer from parameters.
        objective: loss of a whole batch (default: `loss`, which is then a mean).
        scheduler: builds a scheduler from an optimizer, or returns None.
        windows: replace `batches` for the accumulator.
        max_grad_norm, clip: clipping of both.
        options: options of the `Accumulator`.
    """
    reference = make()
    model = copy.deepcopy(reference)
    start = start_of(reference)
    theirs = make_optimizer([p for p in reference.parameters() if p.requires_grad])
    ours = make_optimizer([p for p in model.parameters() if p.requires_grad])
    seen = large_batch(
        theirs,
        lambda batch: (objective or loss)(reference, batch),
        batches,
        max_grad_norm=max_grad_norm,
        clip=clip,
        scheduler=scheduler(theirs),
    )
    accumulate = Accumulator(
        model,
        ours,
        lambda microbatch: loss(model, microbatch),
        max_grad_norm=max_grad_norm,
        clip=clip,
        scheduler=scheduler(ours),
        **options,
    )
    updates = [accumulate(batch) for batch in (batches if windows is None else windows)]
    assert accumulate.updates == len(updates) == len(seen.losses)
    return Both(reference, model, start, seen, updates, accumulate)


# -- small tasks: (make, loss, batches) -------------------------------------------------------------------


def mlp(dtype: torch.dtype = torch.float64, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)]
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers).to(dtype)


def rows(
    samples: int, updates: int = 3, dtype: torch.dtype = torch.float64, *, seed: int = 2
) -> list[tuple[Tensor, Tensor]]:
    """Return batches (x, y) for `mlp` and `mse`; samples differ in scale, so that a wrong weight shows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    spread = torch.linspace(0.2, 2.0, samples, dtype=dtype).unsqueeze(1)
    return [(draw(samples, 4) * spread, draw(samples, 3) + spread) for _ in range(updates)]


def mse(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def squared_sum(model: nn.Module, batch: Any) -> Tensor:
    """Sum over samples; the loss of the large batch is the mean per sample."""
    x, y = batch
    return (model(x) - y).square().sum()


def per_sample(model: nn.Module, batch: Any) -> Tensor:
    return squared_sum(model, batch) / len(batch[0])


class TinyLM(nn.Module):
    """Byte-like next-token model: (samples, length) ids -> logits."""

    def __init__(self, vocabulary: int = 11, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 5, sparse=sparse)
        self.mixer = nn.Linear(5, 5)
        self.head = nn.Linear(5, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mixer(self.embedding(ids).cumsum(1))))


def tiny_lm(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return TinyLM().to(dtype)


def tokens(lengths: Sequence[int], *, seed: int = 4, width: int = 7) -> dict[str, Tensor]:
    """Return a batch of sequences; labels beyond each length are -100 (length 0: no token)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (len(lengths), width), generator=generator)
    labels = torch.randint(0, 11, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"ids": ids, "labels": labels}


def token_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
