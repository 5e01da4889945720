"""Cases of `test_ddp` for two gloo ranks, and the program that runs all of them in one process.

A case defines the data of each rank; the test builds the large batch from both. Each case has its own process
group with a short timeout, so that a collective without its partner fails only that case.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator, Window, count_tokens, sample_weights
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm, PerSampleRandom
from superbatch.torch.window.sync.ddp_buckets import Buckets
from tests.torch import cached_ranks, virtual_ranks
from tests.torch.helpers import TinyLM, mlp, rows, sgd, tiny_lm, token_mean, tokens

TIMEOUT = 8.0  # seconds that a rank waits for the other
Data = Sequence[Sequence[Any]]  # for each update, its micro-batches; () without data


@dataclass
class Case:
    """Training on two ranks.

    Attributes:
        make: builds the model, the same on both ranks.
        loss: loss of a micro-batch.
        data: for each rank and update: micro-batches, or a list of one batch that `microbatch_size` splits.
        objective: loss of the large batch (default: `loss`).
        options: options of the `Accumulator`.
        wrap: options of `DistributedDataParallel`.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    data: tuple[Data, Data]
    objective: Callable[[nn.Module, Any], Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    wrap: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    masters: bool = False
    mutant: str = ""


def cut(batch: Any, *sizes: int) -> list[Any]:
    """Split a batch into micro-batches of given sizes."""
    if isinstance(batch, dict):
        columns = {key: value.split([*sizes]) for key, value in batch.items()}
        return [{key: columns[key][i] for key in batch} for i in range(len(sizes))]
    columns = [value.split([*sizes]) for value in batch]
    return [tuple(column[i] for column in columns) for i in range(len(sizes))]


def mse(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def mse_sum(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def mse_per_sample(model: nn.Module, batch: Any) -> Tensor:
    return mse_sum(model, batch) / len(batch[0])


def weighted(model: nn.Module, batch: Any) -> Tensor:
    """Mean weighted by hand; loss and gradient are NaN if no sample has weight."""
    x, y, w = batch
    return ((model(x) - y).square().mean(1) * w).sum() / w.sum()


def token_mean_and_count(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return token_mean(model, batch), (batch["labels"] != -100).sum()


def background_sum(model: nn.Module, batch: Any) -> Tensor:
    """Sum over labelled tokens, plus a sum over all positions, which needs no token."""
    logits = model(batch["ids"])
    counted = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return counted + 0.1 * logits.square().sum()


def background_per_token(model: nn.Module, batch: Any) -> Tensor:
    return background_sum(model, batch) / int((batch["labels"] != -100).sum())


def terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"tokens": token_mean(model, batch), "size": 0.1 * model(batch["ids"]).square().mean()}


def terms_and_count(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    return terms(model, batch), {"tokens": int((batch["labels"] != -100).sum())}


def sum_of_terms(model: nn.Module, batch: Any) -> Tensor:
    return sum(terms(model, batch).values(), torch.zeros(()))


class TwoHeads(nn.Module):
    """The second head is used only by samples with a positive flag; the third is unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])
        self.double()

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        y = self.heads[0](h)
        if flags.any():
            y = y + self.heads[1](h) * flags.unsqueeze(1)
        return y  # heads[2] is unused


def two_heads_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y, flags = batch
    return nn.functional.mse_loss(model(x, flags), y)


def normalised() -> nn.Module:
    """The first layer is a BatchNorm: its input does not depend on the micro-batches."""
    torch.manual_seed(6)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def sparse_lm() -> nn.Module:
    torch.manual_seed(3)
    return TinyLM(sparse=True).double()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


TOKENS = "labels"
# Three updates. Token counts and numbers of micro-batches differ between the ranks; one micro-batch of each
# update has no token.
UNEQUAL: tuple[Data, Data] = (
    [cut(tokens([7, 1, 0, 0, 2], seed=s), 2, 2, 1) for s in (10, 11, 12)],
    [cut(tokens([3, 5, 6, 7, 7, 1, 4], seed=s), 1, 1, 2, 2, 1) for s in (20, 21, 22)],
)
# Rank 1 has no weight in the first and the last window.
LOPSIDED: tuple[Data, Data] = (
    [cut(tokens([7, 1, 4], seed=s), 2, 1) for s in (13, 14, 15)],
    [cut(tokens([0, 0, 0], seed=23), 1, 2), cut(tokens([3, 5], seed=24), 1, 1), cut(tokens([0], seed=25), 1)],
)
ROWS: tuple[Data, Data] = (
    [[batch] for batch in rows(7, seed=30)],
    [[batch] for batch in rows(4, seed=31)],
)
ROWS_CUT: tuple[Data, Data] = (
    [cut(batch, 3, 2, 2) for batch in rows(7, seed=30)],
    [cut(batch, 3, 1) for batch in rows(4, seed=31)],
)


def flagged(seed: int, *, flags: bool) -> list[Any]:
    return [cut((*batch, torch.ones(4) * flags), 2, 2) for batch in rows(4, seed=seed)]


FLAGS: tuple[Data, Data] = (flagged(32, flags=False), flagged(33, flags=True))


def with_weights(data: Data, *weights: float) -> list[Any]:
    """Give each sample of micro-batch i the weight `weights[i]`, in every window."""
    return [
        [
            (x, y, torch.full((len(x),), w, dtype=torch.float64))
            for (x, y), w in zip(window, weights, strict=True)
        ]
        for window in data
    ]


WEIGHTED: tuple[Data, Data] = (with_weights(ROWS_CUT[0], 0.25, 1.5, 0.7), with_weights(ROWS_CUT[1], 0.0, 0.0))
BATCHNORM: tuple[Data, Data] = (
    [cut(batch, 3, 2, 2) for batch in rows(7, seed=34)],
    [cut(batch, 4, 6) for batch in rows(10, seed=35)],
)


def low(data: tuple[Data, Data]) -> tuple[Data, Data]:
    return tuple([[tuple(t.bfloat16() for t in mb) for mb in window] for window in rank] for rank in data)  # type: ignore[return-value]


MANY: tuple[Data, Data] = low(
    (
        [cut(batch, *[1] * 20) for batch in rows(20, seed=36)],
        [cut(batch, *[1] * 4) for batch in rows(4, seed=37)],
    )
)

EXACT: dict[str, Case] = {
    "tokens": Case(tiny_lm, token_mean, UNEQUAL, options={"weight": count_tokens(TOKENS)}),
    "tokens_bucket_view": Case(
        tiny_lm,
        token_mean,
        UNEQUAL,
        options={"weight": count_tokens(TOKENS)},
        wrap={"gradient_as_bucket_view": True},
    ),
    "tokens_clipped": Case(
        tiny_lm, token_mean, UNEQUAL, options={"weight": count_tokens(TOKENS), "max_grad_norm": 0.05}
    ),
    "tokens_returned": Case(
        tiny_lm, token_mean_and_count, UNEQUAL, objective=token_mean, options={"weight": "returned"}
    ),
    # Without the check of the loss: a rank without weight has nothing to check, and reports that.
    "rank_without_weight": Case(
        tiny_lm, token_mean, LOPSIDED, options={"weight": count_tokens(TOKENS), "check": False}
    ),
    "rank_without_weight_returned": Case(
        tiny_lm,
        token_mean_and_count,
        LOPSIDED,
        objective=token_mean,
        options={"weight": "returned", "check": False},
    ),
    "samples": Case(mlp, mse, ROWS, options={"microbatch_size": 2}),
    "sum": Case(
        mlp, mse_sum, ROWS, objective=mse_per_sample, options={"microbatch_size": 3, "reduction": "sum"}
    ),
    "float_weights": Case(mlp, weighted, WEIGHTED, options={"weight": sample_weights("2"), "check": False}),
    "sum_of_weight_0": Case(
        tiny_lm,
        background_sum,
        LOPSIDED,
        objective=background_per_token,
        options={"reduction": "sum", "weight": count_tokens(TOKENS), "check": False},
    ),
    "total": Case(mlp, mse_sum, ROWS, options={"microbatch_size": 3, "reduction": "total"}),
    "terms": Case(
        tiny_lm,
        terms,
        UNEQUAL,
        objective=sum_of_terms,
        options={"weight": {"tokens": count_tokens(TOKENS), "size": None}},
    ),
    "terms_of_a_rank_without_weight": Case(
        tiny_lm,
        terms,
        LOPSIDED,
        objective=sum_of_terms,
        options={"weight": {"tokens": count_tokens(TOKENS), "size": None}, "check": False},
    ),
    "terms_returned": Case(
        tiny_lm,
        terms_and_count,
        UNEQUAL,
        objective=sum_of_terms,
        options={"weight": {"tokens": "returned", "size": None}},
    ),
    "unused_on_one_rank": Case(TwoHeads, two_heads_loss, FLAGS),
    "unused_found": Case(TwoHeads, two_heads_loss, FLAGS, wrap={"find_unused_parameters": True}),
    "adamw": Case(mlp, mse, ROWS_CUT, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)),
    "sparse": Case(
        sparse_lm, token_mean, UNEQUAL, options={"weight": count_tokens(TOKENS)}, optimizer=plain_sgd
    ),
    "sparse_without_weight": Case(
        sparse_lm,
        token_mean,
        LOPSIDED,
        options={"weight": count_tokens(TOKENS), "check": False},
        optimizer=plain_sgd,
    ),
    "mutant_unweighted_ranks": Case(tiny_lm, token_mean, UNEQUAL, mutant="own weights"),
    "mutant_sync_on_the_wrong_microbatch": Case(tiny_lm, token_mean, UNEQUAL, mutant="first synced"),
}
EXACT |= {
    f"{name}_bucket_view": replace(EXACT[name], wrap={**EXACT[name].wrap, "gradient_as_bucket_view": True})
    for name in (
        "tokens_clipped",
        "rank_without_weight",
        "unused_on_one_rank",
        "unused_found",
        "adamw",
        "sparse_without_weight",
    )
}
OTHER: dict[str, Case] = {
    "fp32_buffers": Case(
        lambda: mlp(torch.bfloat16),
        mse,
        MANY,
        options={"gradient_sum": torch.float32, "check": False},
        masters=True,
    ),
    "auto_buffers": Case(lambda: mlp(torch.bfloat16), mse, MANY, options={"check": False}),
    "batchnorm": Case(normalised, mse, BATCHNORM, options={"participants": [GhostBatchNorm()]}),
    "batchnorm_frozen": Case(normalised, mse, BATCHNORM, options={"participants": [FrozenBatchNorm()]}),
    "batchnorm_rank_without_weight": Case(
        normalised,
        weighted,
        (with_weights(BATCHNORM[0], 1.0, 1.0, 1.0), with_weights(BATCHNORM[1], 0.0, 0.0)),
        options={"participants": [GhostBatchNorm()], "weight": sample_weights("2"), "check": False},
    ),
}


# -- one rank ----------------------------------------------------------------------------------------------


def gather_case(case: Case, rank: int, group: Any) -> dict[str, Any]:
    """Train as a user would: DDP, one optimizer, one accumulator."""
    model = case.make()
    wrapped = DistributedDataParallel(model, process_group=group, **case.wrap)
    if case.mutant:
        return {"parameters": mutant(case, wrapped, rank), "updates": []}
    masters = fp32_masters(wrapped) if case.masters else None
    optimizer = case.optimizer(list(masters.values() if masters else wrapped.parameters()))
    stepped = MasterWeights(optimizer, masters) if masters else optimizer
    accumulate = Accumulator(wrapped, stepped, lambda mb: case.loss(wrapped, mb), **case.options)
    split = "microbatch_size" in case.options
    with warnings.catch_warnings():
        # Only one rank has enough micro-batches to report its choice of dtype.
        warnings.filterwarnings("ignore", message="The gradients of bfloat16")
        updates = [accumulate(window[0] if split else Window(window)) for window in case.data[rank]]
    return {
        "parameters": state_of(model),
        "masters": [m.detach().clone() for m in masters.values()] if masters else [],
        "updates": updates,
        "left": [name for name, p in model.named_parameters() if p.grad is not None],
        "syncs": wrapped.require_backward_grad_sync,
    }


def mutant(case: Case, wrapped: DistributedDataParallel, rank: int) -> dict[str, Tensor]:
    """Mutant: each rank divides by its own weight, or only the first micro-batch is all-reduced."""
    optimizer = case.optimizer(wrapped.parameters())
    for window in case.data[rank]:
        optimizer.zero_grad()
        counts = [int((mb["labels"] != -100).sum()) for mb in window]
        total = torch.tensor(float(sum(counts)))
        if case.mutant == "first synced":
            dist.all_reduce(total, group=wrapped.process_group)
        for index, (mb, count) in enumerate(zip(window, counts, strict=True)):
            with wrapped.no_sync():
                if count:
                    (case.loss(wrapped, mb) * (count / total)).backward()
            if index == 0 and case.mutant == "first synced":
                _reduce(wrapped)
        if case.mutant == "own weights":
            _reduce(wrapped)
            for parameter in wrapped.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2
        optimizer.step()
    return state_of(wrapped.module)


def _reduce(wrapped: DistributedDataParallel) -> None:
    for parameter in wrapped.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=wrapped.process_group)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def spoil(data: Data, update: int, microbatch: int, value: float = float("nan")) -> list[list[Any]]:
    """Set the first input of one micro-batch to a non-finite value."""
    spoiled = [list(window) for window in data]
    x, *rest = spoiled[update][microbatch]
    x = x.clone()
    x[0, 0] = value
    spoiled[update][microbatch] = (x, *rest)
    return spoiled


def nonfinite(rank: int, group: Any, policy: Any, **options: Any) -> dict[str, Any]:
    """Train on three windows; in the second, micro-batch 1 of rank 1 has a NaN."""
    model = mlp()
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = sgd(wrapped.parameters())
    accumulate = Accumulator(wrapped, optimizer, lambda mb: mse(wrapped, mb), nonfinite=policy, **options)
    data = spoil(ROWS_CUT[1], 1, 1) if rank == 1 else ROWS_CUT[0]
    seen: dict[str, Any] = {"updates": [], "errors": []}
    for window in data:
        before = state_of(model), [v.clone() for s in optimizer.state.values() for v in s.values()]
        try:
            seen["updates"].append(accumulate(Window(window)))
        except ArithmeticError as error:
            seen["errors"].append((type(error).__name__, str(error)))
            now = state_of(model), [v.clone() for s in optimizer.state.values() for v in s.values()]
            seen["as_before"] = all(
                torch.equal(a, b) for a, b in zip(before[0].values(), now[0].values(), strict=True)
            )
            seen["as_before"] &= all(torch.equal(a, b) for a, b in zip(before[1], now[1], strict=True))
    return {**seen, "parameters": state_of(model)}


def whole_rank_dropped(rank: int, group: Any) -> dict[str, Any]:
    """All micro-batches of rank 1 are left out; the remaining weight is 5.15, not an integer."""
    model = mlp()
    wrapped = DistributedDataParallel(model, process_group=group)
    accumulate = Accumulator(
        wrapped,
        sgd(wrapped.parameters()),
        lambda mb: weighted(wrapped, mb),
        weight=sample_weights("2"),
        nonfinite="skip_microbatch",
        check=False,
    )
    mine = WEIGHTED[0] if rank == 0 else with_weights(spoil(spoil(ROWS_CUT[1], 0, 0), 0, 1), 0.3, 0.4)
    return {"updates": [accumulate(Window(mine[0]))], "parameters": state_of(model)}


def batchnorm_dropped(rank: int, group: Any) -> dict[str, Any]:
    """All micro-batches of rank 1 are left out: it has no statistics to pool."""
    model = normalised()
    wrapped = DistributedDataParallel(model, process_group=group)
    accumulate = Accumulator(
        wrapped,
        sgd(wrapped.parameters()),
        lambda mb: mse(wrapped, mb),
        participants=[GhostBatchNorm()],
        nonfinite="skip_microbatch",
        check=False,
    )
    mine = BATCHNORM[0] if rank == 0 else spoil(spoil(BATCHNORM[1], 0, 0), 0, 1)
    return {"updates": [accumulate(Window(mine[0]))], "parameters": state_of(model)}


def nobody_has_weight(rank: int, group: Any) -> dict[str, Any]:
    model = tiny_lm()
    wrapped = DistributedDataParallel(model, process_group=group)
    accumulate = Accumulator(
        wrapped, sgd(wrapped.parameters()), lambda mb: token_mean(wrapped, mb), weight=count_tokens(TOKENS)
    )
    first = accumulate(Window(UNEQUAL[rank][0]))
    before = state_of(model)
    nothing = accumulate(Window(cut(tokens([0] * (rank + 1), seed=1), *[1] * (rank + 1))))
    same = all(torch.equal(a, b) for a, b in zip(before.values(), state_of(model).values(), strict=True))
    rest = [accumulate(Window(window)) for window in UNEQUAL[rank][1:]]
    return {"updates": [first, *rest], "nothing": nothing, "as_before": same, "parameters": state_of(model)}


def collectives(rank: int, group: Any) -> dict[str, Any]:
    """Record the order of forwards, backwards and collectives in two windows."""
    events: list[str] = []
    model = mlp()
    wrapped = DistributedDataParallel(model, process_group=group)

    def reduced_by_ddp(state, bucket):  # torch rejects annotations that are strings
        events.append("DDP reduction")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # Not by DDP's register_comm_hook: an Accumulator refuses a model with such a hook.
    dist._register_comm_hook(wrapped.reducer, None, reduced_by_ddp)  # pyright: ignore[reportPrivateImportUsage]
    handle = next(model.parameters()).register_hook(lambda _: events.append("backward"))
    original, original_all_to_all = dist.all_reduce, dist.all_to_all_single

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        events.append(f"all_reduce {tensor.numel()}")
        return original(tensor, *args, **kwargs)

    def all_to_all_single(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        events.append(f"numbers {rows[0].numel()}")
        return original_all_to_all(rows, *args, **kwargs)

    def loss_fn(microbatch: Any) -> Tensor:
        events.append("forward")
        return mse(wrapped, microbatch)

    accumulate = Accumulator(wrapped, sgd(wrapped.parameters()), loss_fn, check=False)
    dist.all_reduce, dist.all_to_all_single = all_reduce, all_to_all_single
    try:
        for window in ROWS_CUT[rank][:2]:
            accumulate(Window(window))
            events.append("end")
    finally:
        dist.all_reduce, dist.all_to_all_single = original, original_all_to_all
        handle.remove()
    parameters = list(model.parameters())
    announced = accumulate.engine.config.sync.count_announced(parameters)
    return {"events": events, "parameters": sum(p.numel() for p in parameters), "announced": announced}


def in_buckets(
    rank: int,
    group: Any,
    *,
    view: bool = True,
    ignored: str = "",
    frozen: str = "",
    hooked: str = "",
    mutant: bool = False,
) -> dict[str, Any]:
    """Train in DDP's buckets; at each step, count the gradients that share one storage."""
    model, found = mlp(), []
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [ignored])
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=view)
    if frozen:
        model.get_parameter(frozen).requires_grad = False
    if hooked:
        model.get_parameter(hooked).register_hook(lambda gradient: gradient.clone())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = sgd(trained)
    if mutant:
        Buckets.reduce = mean_over_ranks

    def count_shared(*_: Any) -> None:
        addresses = [p.grad.untyped_storage().data_ptr() for p in trained if p.grad is not None]
        found.append(max(map(addresses.count, addresses)))
        assert len(addresses) == len(trained), "premise: all have gradients"

    optimizer.register_step_pre_hook(count_shared)
    accumulate = Accumulator(wrapped, optimizer, lambda mb: mse(wrapped, mb))
    try:
        updates = [accumulate(Window(window)) for window in ROWS_CUT[rank]]
    finally:
        Buckets.reduce = reduce_in_buckets
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    shared = [each if each > 1 else 0 for each in found]
    return {"in buckets": shared, "parameters": state_of(model), "left": left, "updates": updates}


reduce_in_buckets = Buckets.reduce


def mean_over_ranks(self: Buckets, gradients: Any, parameters: Any) -> list[int]:
    """Mutant: leave the mean over the ranks, as DDP computes it."""
    missed = reduce_in_buckets(self, gradients, parameters)
    for each in parameters:
        each.grad.div_(2)
    return missed


def overflow(rank: int, group: Any) -> dict[str, Any]:
    """A scale overflows on rank 1 only: both ranks skip the update and lower the scale."""
    model = mlp()
    wrapped = DistributedDataParallel(model, process_group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    optimizer = sgd(wrapped.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    spoiled = [False]

    def loss_fn(microbatch: Any) -> Tensor:
        loss = mse(wrapped, microbatch)
        if rank == 1 and spoiled[0]:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    accumulate = Accumulator(wrapped, optimizer, loss_fn, scaler=scaler, scheduler=scheduler)
    updates = []
    for number, window in enumerate(ROWS_CUT[rank]):
        spoiled[0] = number == 1
        updates.append(accumulate(Window(window)))
    return {
        "updates": updates,
        "scale": scaler.get_scale(),
        "lr": optimizer.param_groups[0]["lr"],
        "parameters": state_of(model),
    }


def scaler_without_weight(rank: int, group: Any) -> dict[str, Any]:
    """Rank 1 has no weight in the first window: it has scaled no loss when gradients are unscaled."""
    model = tiny_lm()
    wrapped = DistributedDataParallel(model, process_group=group)
    accumulate = Accumulator(
        wrapped,
        sgd(wrapped.parameters()),
        lambda mb: token_mean(wrapped, mb),
        weight=count_tokens(TOKENS),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        check=False,
    )
    return {"updates": [accumulate(Window(mbs)) for mbs in LOPSIDED[rank]], "parameters": state_of(model)}


def forward_between(rank: int, group: Any) -> dict[str, Any]:
    """A model with buffers, no weight on rank 1, and a forward with a graph between windows.

    After a forward that may be followed by a reduction, DDP broadcasts buffers in the next forward. A rank
    without micro-batches to compute would not join the broadcast.
    """
    model = normalised()
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.eval()
    accumulate = Accumulator(
        wrapped,
        sgd(wrapped.parameters()),
        lambda mb: weighted(wrapped, mb),
        weight=sample_weights("2"),
        check=False,
    )
    updates = []
    for window in WEIGHTED[rank]:
        updates.append(accumulate(Window(window)))
        wrapped(window[0][0])  # with a graph, as in validation code without no_grad
    return {"updates": updates, "parameters": state_of(model)}


def wrong_statement(rank: int, group: Any) -> dict[str, Any]:
    """The loss is a sum on rank 1 and a mean on rank 0: both ranks must raise."""
    model = mlp()
    wrapped = DistributedDataParallel(model, process_group=group)
    before = state_of(model)
    accumulate = Accumulator(
        wrapped, sgd(wrapped.parameters()), lambda mb: (mse_sum if rank else mse)(wrapped, mb)
    )
    errors = []
    for window in ROWS_CUT[rank][:2]:
        try:
            accumulate(Window(window))
        except ValueError as error:  # noqa: PERF203
            errors.append(str(error))
    same = all(torch.equal(a, b) for a, b in zip(before.values(), state_of(model).values(), strict=True))
    return {"errors": errors, "as_before": same}


def dropout(rank: int, group: Any) -> dict[str, Any]:
    """Random streams per sample do not depend on the sample's rank."""
    model = mlp(dropout=0.4)
    wrapped = DistributedDataParallel(model, process_group=group)
    accumulate = Accumulator(
        wrapped,
        sgd(wrapped.parameters()),
        lambda mb: mse(wrapped, mb),
        participants=[PerSampleRandom()],
        microbatch_size=2,
    )
    torch.manual_seed(5 + rank)  # ranks may have different seeds
    return {"updates": [accumulate(window[0]) for window in ROWS[rank]], "parameters": state_of(model)}


def refused(rank: int, group: Any) -> dict[str, Any]:
    model = DistributedDataParallel(mlp(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        Accumulator(model, optimizer, lambda mb: mse(model, mb), gradient_sum="momentum")
    except ValueError as error:
        return {"error": str(error)}
    return {}


SPECIAL: dict[str, Callable[[int, Any], dict[str, Any]]] = {
    "nan_raise": lambda rank, group: nonfinite(rank, group, "raise"),
    "nan_skip_microbatch": lambda rank, group: nonfinite(rank, group, "skip_microbatch"),
    "nan_skip_update": lambda rank, group: nonfinite(rank, group, "skip_update"),
    "whole_rank_dropped": whole_rank_dropped,
    "batchnorm_dropped": batchnorm_dropped,
    "nobody_has_weight": nobody_has_weight,
    "collectives": collectives,
    "beside_buckets": partial(in_buckets, view=False),
    "in_buckets": in_buckets,
    "in_buckets_ignored": partial(in_buckets, ignored="0.bias"),
    "in_buckets_frozen": partial(in_buckets, frozen="0.bias"),
    "in_buckets_hooked": partial(in_buckets, hooked="0.bias"),
    "in_buckets_mutant": partial(in_buckets, mutant=True),
    "overflow": overflow,
    "scaler_without_weight": scaler_without_weight,
    "forward_between": forward_between,
    "wrong_statement": wrong_statement,
    "dropout": dropout,
    "momentum_refused": refused,
}


def main(rank: int, folder: Path, names: Sequence[str] = ()) -> None:
    """Run the cases in order; write each result or traceback into `folder`, one file per case.

    Mismatched collectives make gloo abort the process; files already written remain.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]  (documented)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    for name in names or [*EXACT, *OTHER, *SPECIAL]:
        group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
        started = time.perf_counter()
        try:
            run = SPECIAL.get(name) or cached_ranks.CASES.get(name) or virtual_ranks.CASES.get(name)
            case = EXACT.get(name) or OTHER.get(name)
            result: dict[str, Any] = run(rank, group) if run else gather_case(case, rank, group)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001  (the test reports it)
            result = {"traceback": traceback.format_exc()}
        result["seconds"] = time.perf_counter() - started
        torch.save(result, folder / f"{name}.{rank}.pt")
    # Without joining threads: a failed case may have left one waiting.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
