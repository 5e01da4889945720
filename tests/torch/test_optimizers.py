"""Every optimizer, scheduler and clipping of PyTorch makes the update of the large batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from superbatch.errors import OptimizerError
from superbatch.torch import Accumulator, count_tokens
from superbatch.torch.options import ClipValue
from tests.torch.helpers import (
    TinyLM,
    assert_same_parameters,
    large_batch,
    mlp,
    mse,
    rows,
    sgd,
    start_of,
    token_mean,
    tokens,
    train_both,
)

optim = torch.optim

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD maximize": partial(optim.SGD, lr=0.01, momentum=0.9, maximize=True),
    "SGD foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam fused": partial(optim.Adam, lr=0.01, fused=True),
    "Adam capturable lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=1),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    both = train_both(mlp, mse, rows(11, 6), OPTIMIZERS[name], microbatch_size=3, max_grad_norm=1.0)
    both.check()
    assert both.updates[0].microbatches == 4 and max(both.seen.norms) > 1.0


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW fused", "Adagrad", "NAdam"])
def test_in_float32(name: str) -> None:
    train_both(
        lambda: mlp(torch.float32), mse, rows(11, 6, torch.float32), OPTIMIZERS[name], microbatch_size=3
    ).check()


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this release of torch has no Muon")
def test_muon_beside_adamw() -> None:
    def optimizers(network: Any) -> list[torch.optim.Optimizer]:
        matrices = [p for p in network.parameters() if p.ndim == 2]
        others = [p for p in network.parameters() if p.ndim != 2]
        return [optim.Muon(matrices, lr=0.02), optim.AdamW(others, lr=0.01)]

    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(11, 4)
    large_batch(optimizers(reference), lambda batch: mse(reference, batch), batches)
    accumulate = Accumulator(model, optimizers(model), lambda mb: mse(model, mb), microbatch_size=3)
    for batch in batches:
        accumulate(batch)
    # Muon orthogonalises in bfloat16: a difference in float64's last bit may change a rounding there.
    assert_same_parameters(reference, model, 1e-2, start=start)


@pytest.mark.parametrize("microbatch_size", [1, 3])
@pytest.mark.parametrize("clip", [{}, {"max_grad_norm": 0.05}, {"clip": ClipValue(0.003)}])
def test_sparse_embedding_gradients(microbatch_size: int, clip: dict[str, Any]) -> None:
    """SparseAdam for the embedding and SGD for the rest, clipped by the norm of the summed values."""

    def make(sparse: bool) -> TinyLM:
        torch.manual_seed(3)
        return TinyLM(40, sparse=sparse).double()

    def optimizers(network: TinyLM) -> list[torch.optim.Optimizer]:
        dense = [*network.mixer.parameters(), *network.head.parameters()]
        return [optim.SparseAdam(list(network.embedding.parameters()), lr=0.01), optim.SGD(dense, lr=0.1)]

    batches = [tokens([7, 1, 4, 6, 2, 3], seed=seed) for seed in range(3)]
    dense, reference, model = make(sparse=False), make(sparse=True), make(sparse=True)
    start = start_of(reference)
    theirs = optimizers(reference)
    norms = []
    for batch in batches:
        # torch cannot clip sparse gradients, so a dense copy of the model gives the clipped values.
        dense.load_state_dict(reference.state_dict())
        dense.zero_grad()
        token_mean(dense, batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(dense.parameters(), clip.get("max_grad_norm", 1e9))))
        if "clip" in clip:
            nn.utils.clip_grad_value_(dense.parameters(), clip["clip"].limit)
        reference.zero_grad()
        token_mean(reference, batch).backward()
        for ours, twin in zip(reference.parameters(), dense.parameters(), strict=True):
            assert ours.grad is not None and twin.grad is not None
            ours.grad = twin.grad.sparse_mask(ours.grad.coalesce()) if ours.grad.is_sparse else twin.grad
        for optimizer in theirs:
            optimizer.step()
    accumulate = Accumulator(
        model,
        optimizers(model),
        lambda mb: token_mean(model, mb),
        microbatch_size=microbatch_size,
        weight=count_tokens("labels"),
        **clip,
    )
    updates = [accumulate(batch) for batch in batches]
    assert [update.grad_norm for update in updates] == pytest.approx(norms, rel=1e-12)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_lbfgs_is_refused() -> None:
    model = mlp()
    with pytest.raises(OptimizerError, match=r"LBFGS.*closure.*SGD"):
        Accumulator(model, optim.LBFGS(model.parameters()), lambda mb: mse(model, mb))


@pytest.mark.parametrize("scheduled", [False, True])
def test_lbfgs_is_refused_with_and_without_a_scheduler(scheduled: bool) -> None:
    model = mlp()
    optimizer = optim.LBFGS(model.parameters())
    if scheduled:
        lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OptimizerError, match="closure"):
        Accumulator(model, optimizer, lambda mb: mse(model, mb))


# -- optimizers that step inside the backward --------------------------------------------------------------


def step_in_backward(model: nn.Module) -> torch.optim.Optimizer:
    """Make one optimizer per parameter that steps inside the backward, as in PyTorch's tutorial."""
    optimizers = {parameter: optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_that_steps_inside_backward_is_refused() -> None:
    model = mlp()
    optimizer = step_in_backward(model)
    start = copy.deepcopy(model.state_dict())
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=4)
    with pytest.raises(OptimizerError, match=r"steps the parameter .* inside the backward"):
        accumulate(rows(10, 1)[0])
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
    assert accumulate.updates == 0


# Importing torch.distributed.optim runs parts of torch.jit, which is deprecated since torch 2.9.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_apply_optimizer_in_backward_is_refused_before_any_forward() -> None:
    from torch.distributed.optim import (
        _apply_optimizer_in_backward,  # pyright: ignore[reportPrivateImportUsage]
    )

    model = mlp()
    _apply_optimizer_in_backward(optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(OptimizerError, match="_apply_optimizer_in_backward"):
        Accumulator(model, optim.SGD(model.parameters(), lr=0.1), lambda mb: mse(model, mb))


def test_a_hook_that_only_reads_gradients_is_accepted() -> None:
    seen = []
    both = train_both(mlp, mse, rows(10, 1), microbatch_size=4)
    model = both.model
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    assert Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=4)(
        rows(10, 1)[0]
    ).made
    assert seen == [True] * 3


# -- groups, clipping, schedules ----------------------------------------------------------------------------


def test_parameter_groups() -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 4)

    def optimizer(network: Any) -> torch.optim.Optimizer:
        return optim.AdamW(
            [
                {"params": network[0].parameters(), "lr": 0.003, "weight_decay": 0.0},
                {"params": [network[2].weight], "betas": (0.5, 0.9)},
                {"params": [network[2].bias], "amsgrad": True},
            ],
            lr=0.01,
        )

    seen = large_batch(optimizer(reference), lambda batch: mse(reference, batch), batches)
    accumulate = Accumulator(model, optimizer(model), lambda mb: mse(model, mb), microbatch_size=3)
    updates = [accumulate(batch) for batch in batches]
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert [update.learning_rates for update in updates] == seen.rates == [(0.003, 0.01, 0.01)] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("norm", "value"), [(0.3, None), (None, 0.02), (0.3, 0.02), (1e6, 1e6)])
def test_clipping_is_that_of_torch(norm: float | None, value: float | None, dtype: torch.dtype) -> None:
    both = train_both(
        lambda: mlp(dtype),
        mse,
        rows(10, 4, dtype),
        microbatch_size=4,
        max_grad_norm=norm,
        clip=None if value is None else ClipValue(value),
    )
    assert 0.3 < min(both.seen.norms) < 1e6, "premise: clipped, except in the last case"
    both.check()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda update: 1 / (1 + update)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[3],
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.3),
}


def scheduler_named(name: str) -> Any:
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
    # SequentialLR passes its schedulers an argument that they warn about (pytorch/pytorch#149392).
    theirs = "ignore:The epoch parameter in `scheduler.step:UserWarning"
    marks = [pytest.mark.filterwarnings(theirs)] if old and name == "SequentialLR" else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [scheduler_named(name) for name in SCHEDULERS])
def test_schedulers_count_updates(name: str) -> None:
    both = train_both(mlp, mse, rows(10, 1) * 6, scheduler=SCHEDULERS[name], microbatch_size=2)
    assert both.updates[0].microbatches == 5
    assert len(set(both.seen.rates)) > 1, "premise: the learning rate changes"
    both.check()


def test_several_schedulers() -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 5)
    optimizer, theirs = sgd(reference.parameters()), []
    theirs = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    for batch in batches:
        large_batch(optimizer, lambda b: mse(reference, b), [batch])
        for one in theirs:
            one.step()
    optimizer = sgd(model.parameters())
    both = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=4, scheduler=both)
    for batch in batches:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_hooks_of_the_optimizer_run_once_per_update() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    counts = {"before": 0, "after": 0}

    def count(key: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[key] += 1

        return hook

    optimizer.register_step_pre_hook(count("before"))
    optimizer.register_step_post_hook(count("after"))
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=1)
    for batch in rows(5, 3):
        accumulate(batch)
    assert counts == {"before": 3, "after": 3}


def test_the_optimizer_gets_the_gradient_of_the_large_batch() -> None:
    """When the optimizer steps, `.grad` is the gradient of the large batch."""
    model = mlp()
    batch = rows(10, 1)[0]
    expected = torch.autograd.grad(mse(model, batch), list(model.parameters()))
    seen: list[Tensor] = []
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=3)(batch)
    assert len(seen) == len(expected) == 4
    for ours, theirs in zip(seen, expected, strict=True):
        assert theirs.norm() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


def test_a_scheduler_error_leaves_a_complete_update_or_none() -> None:
    """OneCycleLR raises after `total_steps`; the update is complete and counted, or not made at all."""
    model = nn.Sequential(mlp(), nn.Dropout(0.1))
    optimizer = sgd(model.parameters())
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    accumulate = Accumulator(
        model, optimizer, lambda mb: mse(model, mb), microbatch_size=4, scheduler=scheduler
    )
    batch = rows(10, 1)[0]
    accumulate(batch)
    accumulate(batch)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), accumulate.updates
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        accumulate(batch)
    moved = not all(torch.equal(before[0][name], value) for name, value in model.state_dict().items())
    drawn = not torch.equal(before[1], torch.get_rng_state())
    counted = accumulate.updates != before[2]
    assert moved == drawn == counted
    assert all(parameter.grad is None for parameter in model.parameters())
