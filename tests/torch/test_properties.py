"""Windows, weights and models drawn by hypothesis: the update is that of the large batch."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from superbatch.torch import Accumulator, TokenBudget, Window, count_tokens, sample_weights, windows
from superbatch.torch.options import ClipValue
from tests.torch.helpers import (
    TOLERANCE,
    Both,
    assert_same_parameters,
    large_batch,
    mse,
    per_sample,
    rows,
    squared_sum,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
    train_both,
)

DTYPES = st.sampled_from([torch.float64, torch.float32])
SEEDS = st.integers(0, 2**31)
EXAMPLES = settings(max_examples=40, deadline=None)
FEWER = settings(max_examples=20, deadline=None)


def net(seed: int, width: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


@given(
    samples=st.integers(2, 40),
    size=st.integers(1, 45),
    width=st.integers(1, 9),
    clip=st.one_of(st.none(), st.floats(1e-3, 10)),
    value=st.one_of(st.none(), st.floats(1e-3, 1)),
    into=st.sampled_from(["grad", "momentum"]),
    reduction=st.sampled_from(["mean", "sum"]),
    seed=SEEDS,
    dtype=DTYPES,
)
@EXAMPLES
def test_any_split_of_any_batch(
    samples: int,
    size: int,
    width: int,
    clip: float | None,
    value: float | None,
    into: str,
    reduction: str,
    seed: int,
    dtype: torch.dtype,
) -> None:
    if into == "momentum":
        clip = value = None
    summed = reduction == "sum"
    both = train_both(
        lambda: net(seed, width, dtype),
        squared_sum if summed else mse,
        rows(samples, 3, dtype, seed=seed),
        optimizer,
        objective=per_sample if summed else None,
        microbatch_size=size,
        max_grad_norm=clip,
        clip=None if value is None else ClipValue(value),
        gradient_sum="momentum" if into == "momentum" else "auto",
        reduction=reduction,
    )
    both.check()


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=14),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=SEEDS,
)
@EXAMPLES
def test_any_windows_under_any_schedule(sizes: list[int], steps: list[int], seed: int) -> None:
    loader = [rows(size, 1, seed=seed + number)[0] for number, size in enumerate(sizes)]
    grouped = list(windows(loader, lambda update: steps[update % len(steps)]))
    assume(any(len(mb[0]) > 1 for mb in grouped[0]))  # else the first window cannot be checked, and warns
    batches = [tuple(torch.cat(leaves) for leaves in zip(*window, strict=True)) for window in grouped]
    train_both(lambda: net(seed, 5, torch.float64), mse, batches, optimizer, windows=grouped).check()


@given(
    lengths=st.lists(st.integers(0, 7), min_size=2, max_size=16),
    size=st.one_of(st.integers(1, 8), st.integers(7, 30).map(lambda n: TokenBudget(n, "lengths"))),
    returned=st.booleans(),
    seed=SEEDS,
)
@example(lengths=[0, 0, 0, 1], size=1, returned=False, seed=0)
@example(lengths=[0, 0, 0, 1], size=1, returned=True, seed=0)
@EXAMPLES
def test_any_token_counts(lengths: list[int], size: int | TokenBudget, returned: bool, seed: int) -> None:
    assume(any(lengths))
    batch = tokens(lengths, seed=seed)
    batch["lengths"] = torch.tensor(lengths)
    reference, model = tiny_lm(), tiny_lm()
    start = start_of(reference)
    seen = large_batch(optimizer(reference.parameters()), lambda b: token_mean(reference, b), [batch])
    count = count_tokens("labels")

    def loss_fn(microbatch: Any) -> Any:
        loss = token_mean(model, microbatch)
        return (loss, count(microbatch)) if returned else loss

    accumulate = Accumulator(
        model,
        optimizer(model.parameters()),
        loss_fn,
        microbatch_size=size,
        weight="returned" if returned else count,
        check=False,  # with few tokens the check may have no probe, and warns
    )
    update = accumulate(batch)
    assert update.weight == sum(lengths)
    assert abs(update.loss - seen.losses[0]) <= 1e-12 * max(1, abs(seen.losses[0]))
    still = [name for name, p in reference.named_parameters() if torch.equal(p, start[name])]
    assert not still
    assert_same_parameters(reference, model, 1e-12, start=start)


@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.floats(1e-9, 1e9)), min_size=2, max_size=16
    ),
    size=st.integers(1, 9),
    seed=SEEDS,
)
@EXAMPLES
def test_any_sample_weights(weights: list[float], size: int, seed: int) -> None:
    assume(any(weights))
    (x, y), weight = rows(len(weights), 1, seed=seed)[0], torch.tensor(weights, dtype=torch.float64)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, counts = batch
        each = (model(inputs) - targets).square().mean(1)
        return (counts * each).sum() / counts.sum()

    both = train_both(
        lambda: net(seed, 5, torch.float64),
        loss,
        [(x, y, weight)],
        optimizer,
        microbatch_size=size,
        weight=sample_weights("2"),
        check=False,
    )
    both.check()


@given(
    order=st.lists(st.sampled_from(["update", "break", "raise"]), min_size=1, max_size=8).filter(
        lambda events: "update" in events
    ),
    size=st.integers(1, 6),
    into=st.sampled_from(["grad", "momentum"]),
    data=st.data(),
)
@FEWER
def test_any_order_of_updates_breaks_and_exceptions(
    order: list[str], size: int, into: Any, data: st.DataObject
) -> None:
    """Windows that were left early leave no trace: only the updates that were made count."""
    batches = rows(6, len(order))
    reference, model = net(0, 5, torch.float64), net(0, 5, torch.float64)
    start = start_of(reference)
    made = [batch for batch, event in zip(batches, order, strict=True) if event == "update"]
    large_batch(optimizer(reference.parameters()), lambda b: mse(reference, b), made)
    accumulator = Accumulator(
        model, optimizer(model.parameters()), lambda mb: mse(model, mb), microbatch_size=size,
        gradient_sum="momentum" if into == "momentum" else "auto",
    )  # fmt: skip
    for batch, event in zip(batches, order, strict=True):
        if event == "update":
            assert accumulator(batch).made
            continue
        leave = data.draw(st.integers(0, -(-6 // size) - 1))
        before = copy.deepcopy(model.state_dict())
        try:
            with accumulator.window(batch) as window:
                for index, microbatch in enumerate(window):
                    if index == leave and event == "break":
                        break
                    window.backward(mse(model, microbatch))
                    if index == leave:
                        raise LookupError
        except LookupError:
            pass
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert accumulator.updates == len(made)
    assert_same_parameters(reference, model, 1e-12, start=start)


@given(cuts=st.lists(st.integers(1, 11), max_size=6), dtype=DTYPES, seed=SEEDS)
@FEWER
def test_any_two_splits_of_one_batch_agree(cuts: list[int], dtype: torch.dtype, seed: int) -> None:
    """Split invariance holds for sizes that no accumulator would choose."""
    batch = rows(12, 1, dtype, seed=seed)[0]
    edges = [0, *sorted(set(cuts)), 12]
    sizes = [stop - start for start, stop in pairwise(edges)]
    leaves = [leaf.split(sizes) for leaf in batch]
    window = Window(zip(*leaves, strict=True))
    assume(max(sizes) > 1)
    both: Both = train_both(lambda: net(seed, 6, dtype), mse, [batch], optimizer, windows=[window])
    both.check(TOLERANCE[dtype])
    assert both.updates[0].microbatches == len(sizes)
