"""Cases of the scorecard: small deterministic trainings, each with one difference from the first.

Weights and data are made in float32 (bfloat16 for the bfloat16 case) and cast. So every precision starts from
the same numbers, and the float64 large batch is the reference for all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from case_models import (
    CLASS_WEIGHTS,
    CLASSES,
    FEATURES,
    IGNORED,
    LENGTH,
    VOCABULARY,
    NestedModel,
    classifier,
    cross_entropy,
    dropout_classifier,
    sum_of_class_weights,
    sum_of_weights,
    token_model,
    tokens,
    weighted_mean,
    weighted_sum,
    zero_classifier,
)
from peers.task import Batch, Parameters, Task, parameters_of
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Case:
    """Case of the scorecard: the task in a precision, the operation on it, and the premise to check."""

    name: str
    why: str
    task: Callable[[torch.dtype], Task]
    premise: Callable[[Task], bool]
    tutorial_is_wrong: bool = True
    action: Literal["train", "resume", "leave"] = "train"
    against_itself: bool = False  # compared with the tool's own large batch (random numbers)
    dtype: torch.dtype | None = None  # fixed precision, measured once
    bound: float | None = None  # bound for superbatch, if not the default


# Tasks --------------------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def far_sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with a high rate, so that the change exceeds the rounding of float32 parameters."""
    return torch.optim.SGD(parameters, lr=64.0)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def labelled(count: int, dtype: torch.dtype, *, made_in: torch.dtype = torch.float32) -> list[Batch]:
    """Labelled points whose spread grows with the index, so that the gradients of micro-batches differ."""
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(count, FEATURES, generator=generator) * torch.linspace(0.5, 2, count)[:, None]
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return [
        {"inputs": point.to(made_in).to(dtype), "labels": label}
        for point, label in zip(points, labels, strict=True)
    ]


def classify(
    dtype: torch.dtype,
    *,
    count: int = 16,
    microbatch_size: int = 4,
    accumulation_steps: int = 4,
    **changes: Any,
) -> Task:
    """Classification of sixteen points, by default in four micro-batches."""
    task = Task(
        model=partial(classifier, dtype),
        samples=labelled(count, dtype),
        microbatch_size=microbatch_size,
        accumulation_steps=accumulation_steps,
        loss=cross_entropy,
        loss_sum=partial(cross_entropy, reduction="sum"),
        weigh=tokens,  # one label for each sample
        optimizer=far_sgd if count <= microbatch_size * accumulation_steps else sgd,
    )
    return replace(task, **changes)


def token_task(dtype: torch.dtype, lengths: tuple[int, ...]) -> Task:
    """Sequences with the given numbers of labelled tokens, in micro-batches of two."""
    generator = torch.Generator().manual_seed(7)
    samples: list[Batch] = []
    for length in lengths:
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels[length:] = IGNORED
        samples.append({"inputs": ids, "labels": labels})
    model = partial(token_model, dtype)
    return classify(
        dtype, microbatch_size=2, model=model, samples=samples, weight="tokens", optimizer=far_sgd
    )


def sample_weight_task(dtype: torch.dtype) -> Task:
    samples = labelled(16, dtype)
    for index, sample in enumerate(samples):
        sample["weights"] = torch.tensor(0.25 + index % 5 + index // 8, dtype=dtype)
    return classify(
        dtype,
        samples=samples,
        weigh=sum_of_weights,
        weight="sample_weights",
        loss=weighted_mean,
        loss_sum=weighted_sum,
    )


def class_weight_task(dtype: torch.dtype) -> Task:
    loss = partial(cross_entropy, weight=CLASS_WEIGHTS)
    loss_sum = partial(cross_entropy, weight=CLASS_WEIGHTS, reduction="sum")
    return classify(dtype, loss=loss, loss_sum=loss_sum, weigh=sum_of_class_weights, weight="class_weights")


def sum_task(dtype: torch.dtype) -> Task:
    """Task whose loss is a sum, not a mean."""
    total = partial(cross_entropy, reduction="sum")
    share = lambda batch: tokens(batch) / 16  # noqa: E731  # adds up to 1 over the window: the sum stays a sum
    return classify(dtype, loss=total, loss_sum=total, weigh=share, weight="share", reduction="sum")


def schedule_task(dtype: torch.dtype) -> Task:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))

    return classify(dtype, count=32, microbatch_size=2, scheduler=scheduler)


def bf16_task(dtype: torch.dtype) -> Task:
    """Gradients with the same sign, so that the sum outgrows its terms, as early in training."""
    samples = labelled(256, dtype, made_in=torch.bfloat16)
    for index, sample in enumerate(samples):
        sample["inputs"] = sample["inputs"].abs()
        sample["labels"] = torch.tensor(index % 16 % 4 if index % 16 < 4 else 0)
    model = partial(zero_classifier, dtype)
    return classify(dtype, samples=samples, model=model, microbatch_size=1, accumulation_steps=256)


def nan_task(dtype: torch.dtype) -> Task:
    samples = labelled(16, dtype)
    samples[5]["inputs"] = torch.full_like(samples[5]["inputs"], float("nan"))
    return classify(dtype, samples=samples, skip_nonfinite=True)


def nested_task(dtype: torch.dtype) -> Task:
    samples = labelled(16, dtype)
    for index, sample in enumerate(samples):
        left, right = sample["inputs"].split(FEATURES // 2)
        scale = torch.tensor(1 + index / 16, dtype=dtype)
        sample["inputs"] = {"pair": (left, right), "meta": {"scale": scale, "ids": f"sample-{index}"}}
    return classify(dtype, samples=samples, model=partial(NestedModel, dtype))


# References ---------------------------------------------------------------------------------------


def large_batches(task: Task, samples: list[list[Batch]]) -> Parameters:
    """Train plain torch on real large batches: one update for each list of samples."""
    model, optimizer, scheduler = task.build()
    for chosen in samples:
        batch = torch.utils.data.default_collate(chosen)
        optimizer.zero_grad()
        task.loss(model(batch["inputs"]), batch).backward()
        if task.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return parameters_of(model)


def references(case: Case, task: Task) -> list[Parameters]:
    """Return the correct parameters: two, if an interrupted window may be discarded or flushed."""
    batch = task.microbatch_size * task.accumulation_steps
    windows = [list(task.samples[first : first + batch]) for first in range(0, len(task.samples), batch)]
    if task.skip_nonfinite:
        windows = [_without_nan_microbatches(task, window) for window in windows]
    if case.action == "leave":
        begun = list(task.samples[: task.stop_after * task.microbatch_size])
        return [large_batches(task, windows), large_batches(task, [begun, *windows])]
    return [large_batches(task, windows * task.epochs)]


def _without_nan_microbatches(task: Task, window: list[Batch]) -> list[Batch]:
    """Drop each micro-batch with a NaN, because its loss does not show which sample has it."""
    size, kept = task.microbatch_size, []
    for first in range(0, len(window), size):
        part = window[first : first + size]
        if all(sample["inputs"].isfinite().all() for sample in part):
            kept += part
    return kept


# Premises -----------------------------------------------------------------------------------------


def weights_are(task: Task, *, equal: bool) -> bool:
    return (len({task.weigh(batch) for batch in task.loader()}) == 1) is equal


def has_tail(task: Task) -> bool:
    return len(task.loader()) % task.accumulation_steps > 0 and weights_are(task, equal=True)


def has_zero(task: Task) -> bool:
    return min(map(tokens, task.loader())) == 0 < max(map(tokens, task.loader()))


def gradient_norm(task: Task) -> float:
    model = task.model()
    batch = next(iter(task.whole().loader()))
    task.loss(model(batch["inputs"]), batch).backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def clips(task: Task) -> bool:
    return task.max_grad_norm is not None and gradient_norm(task) > 1.5 * task.max_grad_norm


def schedules(task: Task) -> bool:
    return task.scheduler is not None and len(list(task.windows())) >= 3


def stops_inside(task: Task) -> bool:
    return task.stop_after % task.accumulation_steps > 0


def is_nan_once(task: Task) -> bool:
    return sum(bool(batch["inputs"].isnan().any()) for batch in task.loader()) == 1


def is_nested(task: Task) -> bool:
    return isinstance(task.samples[0]["inputs"], dict) and weights_are(task, equal=True)


def draws(task: Task) -> bool:
    model, inputs = task.model(), next(iter(task.loader()))["inputs"]
    return not torch.equal(model(inputs), model(inputs))


CASES = (
    Case(
        name="equal micro-batches",
        why="4 micro-batches of 4 samples, the simplest case",
        task=classify,
        premise=partial(weights_are, equal=True),
        tutorial_is_wrong=False,
    ),
    Case(
        name="unequal micro-batches 4+4+2",
        why="4, 4 and 2 samples: the mean of means is not the mean",
        task=partial(classify, count=10, accumulation_steps=3),
        premise=partial(weights_are, equal=False),
    ),
    Case(
        name="tail window",
        why="10 samples in micro-batches of 2, K=4: the second window has one micro-batch",
        task=partial(classify, count=10, microbatch_size=2),
        premise=has_tail,
    ),
    Case(
        name="token mask",
        why="a mean over tokens, with unequal numbers of tokens",
        task=partial(token_task, lengths=(5, 5, 1, 1, 4, 2, 3, 1)),
        premise=partial(weights_are, equal=False),
    ),
    Case(
        name="zero-token micro-batch",
        why="one micro-batch without a label: its mean is 0 / 0",
        task=partial(token_task, lengths=(5, 4, 0, 0, 3, 3, 5, 2)),
        premise=has_zero,
    ),
    Case(
        name="sample weights",
        why="a mean with a weight for each sample",
        task=sample_weight_task,
        premise=partial(weights_are, equal=False),
    ),
    Case(
        name="class weights",
        why="CrossEntropyLoss(weight=...) divides by the labels' weights",
        task=class_weight_task,
        premise=partial(weights_are, equal=False),
    ),
    Case(
        name="clip by norm",
        why="the normalised gradient is clipped once per update",
        task=partial(classify, max_grad_norm=0.05),
        premise=clips,
        tutorial_is_wrong=False,
    ),
    Case(
        name="LR scheduler, 4 updates",
        why="the schedule counts updates, not micro-batches",
        task=schedule_task,
        premise=schedules,
        tutorial_is_wrong=False,
    ),
    Case(
        name="AdamW, 4 updates",
        why="Adam's moments use one gradient per update",
        task=partial(classify, count=32, microbatch_size=2, optimizer=adamw),
        premise=partial(weights_are, equal=True),
        tutorial_is_wrong=False,
    ),
    Case(
        name="bf16 parameters, K=256",
        why="256 gradients that are exact in bfloat16: only their sum is rounded",
        task=bf16_task,
        premise=partial(weights_are, equal=True),
        dtype=torch.bfloat16,
        # Two roundings to bfloat16, of the mean and of its product with the learning rate: 2 x 2^-9.
        bound=2.0**-8,
    ),
    Case(
        name="resume in a window",
        why="saved and restored after micro-batch 2 of 4 of the second window",
        task=partial(classify, microbatch_size=2, stop_after=6),
        premise=stops_inside,
        action="resume",
    ),
    Case(
        name="break in a window",
        why="an epoch that ends after micro-batch 2 of 4: the next window must not contain its gradients",
        task=partial(classify, count=8, microbatch_size=2, epochs=2, stop_after=2, optimizer=sgd),
        premise=stops_inside,
        action="leave",
    ),
    Case(
        name="sum loss",
        why="the update is that of the sum over the batch",
        task=sum_task,
        premise=partial(weights_are, equal=True),
    ),
    Case(
        name="one NaN micro-batch",
        why="the update is that of the other micro-batches",
        task=nan_task,
        premise=is_nan_once,
    ),
    Case(
        name="nested inputs",
        why="a batch of dict, tuple and strings",
        task=nested_task,
        premise=is_nested,
        tutorial_is_wrong=False,
    ),
    Case(
        name="dropout, another split",
        why="the same seed for 4 micro-batches of 4 and for 16 samples at once",
        task=lambda dtype: classify(dtype, model=partial(dropout_classifier, dtype), sample_rng=True),
        premise=draws,
        against_itself=True,
    ),
)
"""The rows from top to bottom."""
