"""Mutants: wrong ways to accumulate that the comparison of the other tests must reject.

They show that the comparison can fail. Each mutant is a mistake of some tool or tutorial. It is patched
into the library, or run as a separate loop, and checked by `assert_same_parameters`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch import normalize
from superbatch.torch import Accumulator, count_tokens, windows
from superbatch.torch.options import ClipValue
from superbatch.torch.window import update_rule
from superbatch.torch.window.norm import finite_norm
from superbatch.torch.window.participants import gradient_sum, parameter_gradients
from superbatch.torch.window.participants.parameter_gradients import GradientVersions
from tests.torch.helpers import (
    assert_same_parameters,
    large_batch,
    mlp,
    mse,
    per_sample,
    rows,
    sgd,
    squared_sum,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
    train_both,
)

Patch = pytest.MonkeyPatch


def train_unequal() -> Any:
    """Ten samples in micro-batches of 4, 3 and 3, clipped, under a schedule."""
    both = train_both(
        mlp,
        mse,
        rows(10, 4),
        microbatch_size=4,
        max_grad_norm=0.9,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    assert min(both.seen.norms) > 0.9, "premise: every update is clipped"
    return both


def train_tail() -> Any:
    loader = [rows(2, 1, seed=number)[0] for number in range(9)]
    grouped = list(windows(loader, 4))
    assert len(grouped[-1]) == 1, "premise: the tail is short"
    batches = [tuple(torch.cat(leaves) for leaves in zip(*window, strict=True)) for window in grouped]
    return train_both(mlp, mse, batches, windows=grouped)


def train_sum() -> Any:
    return train_both(mlp, squared_sum, rows(10), objective=per_sample, microbatch_size=4, reduction="sum")


def train_tokens() -> Any:
    batches = [tokens([7, 1, 1, 2, 0, 0, 6, 3], seed=seed) for seed in range(3)]
    return train_both(tiny_lm, token_mean, batches, microbatch_size=2, weight=count_tokens("labels"))


def train_by_value() -> Any:
    both = train_both(mlp, mse, rows(10), microbatch_size=4, clip=ClipValue(0.05))
    assert min(both.seen.norms) > 0.2, "premise: values are clipped"
    return both


def train_returned() -> Any:
    """The weight is known only after the forward, so the sums are divided at the end of the window."""
    batches = [tokens([7, 1, 1, 2, 4, 4, 6, 3], seed=seed) for seed in range(3)]
    reference, model = tiny_lm(), tiny_lm()
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda b: token_mean(reference, b), batches, max_grad_norm=0.3)
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: (token_mean(model, mb), int((mb["labels"] != -100).sum())),
        microbatch_size=2,
        weight="returned",
        max_grad_norm=0.3,
    )
    for batch in batches:
        accumulate(batch)

    class Result:
        def check(self) -> None:
            assert_same_parameters(reference, model, 1e-12, start=start)

    return Result()


EXACT = [train_unequal, train_tail, train_sum, train_tokens, train_by_value, train_returned]


@pytest.mark.parametrize("train", EXACT)
def test_without_a_mutant_each_case_is_exact(train: Callable[[], Any]) -> None:
    train().check()


def mean_of_means(patch: Patch) -> None:
    patch.setattr(normalize, "scale", lambda weight, total, *, reduction, ranks=1: 1 / 3 if weight else 0.0)


def mean_of_token_means(patch: Patch) -> None:
    patch.setattr(normalize, "scale", lambda weight, total, *, reduction, ranks=1: 1 / 4 if weight else 0.0)


def fixed_divisor_on_the_tail(patch: Patch) -> None:
    patch.setattr(normalize, "scale", lambda weight, total, *, reduction, ranks=1: weight / 8)


def sum_scaled_as_a_mean(patch: Patch) -> None:
    patch.setattr(normalize, "scale", lambda weight, total, *, reduction, ranks=1: weight / total)


def sum_divided_by_microbatches(patch: Patch) -> None:
    patch.setattr(normalize, "scale", lambda weight, total, *, reduction, ranks=1: 1 / 3)


def not_divided_at_all(patch: Patch) -> None:
    patch.setattr(normalize, "scale", lambda weight, total, *, reduction, ranks=1: 1.0)


def weights_rounded(patch: Patch) -> None:
    """A weight in bfloat16, wrong by less than one per cent."""

    def scale(weight: float, total: float, *, reduction: str, ranks: int = 1) -> float:
        return float(torch.tensor(weight / total, dtype=torch.bfloat16))

    patch.setattr(normalize, "scale", scale)


def weights_in_float32(patch: Patch) -> None:
    """A divisor in float32: wrong by 1e-8, which only float64 shows."""

    def scale(weight: float, total: float, *, reduction: str, ranks: int = 1) -> float:
        return float(torch.tensor(weight) / torch.tensor(total))

    patch.setattr(normalize, "scale", scale)


def divided_once_too_often(patch: Patch) -> None:
    patch.setattr(normalize, "divisor", lambda planned, counted: 2.0)


def sum_never_divided(patch: Patch) -> None:
    patch.setattr(normalize, "divisor", lambda planned, counted: 1.0)


def clip_before_normalising(patch: Patch) -> None:
    batch_gradient = update_rule.batch_gradient

    def clipped_first(
        step: Any, place: Any, ranks: Any, owned: Any, divisor: float, announced: Any
    ) -> list[Tensor | None]:
        summed = batch_gradient(step, place, ranks, owned, 1.0, announced)
        update_rule.clip(step, summed, finite_norm(summed)[0])
        return [None if gradient is None else gradient / divisor for gradient in summed]

    patch.setattr(update_rule, "batch_gradient", clipped_first)


def clip_forgotten(patch: Patch) -> None:
    patch.setattr(update_rule, "clip", lambda step, gradient_sum, norm: None)


def clip_per_parameter(patch: Patch) -> None:
    def each(step: Any, present: Sequence[Tensor], norm: float) -> None:
        for gradient in present:
            gradient.mul_(min(1.0, step.max_grad_norm / float(gradient.norm())))

    patch.setattr(update_rule, "clip", each)


def clip_by_value_scaled(patch: Patch) -> None:
    """Clip the values of a gradient that is still multiplied by the number of micro-batches."""
    clip = update_rule.clip

    def scaled(step: Any, present: list[Tensor], norm: float) -> None:
        for gradient in present:
            gradient.mul_(3)
        clip(step, present, norm * 3)  # type: ignore[arg-type]
        for gradient in present:
            gradient.div_(3)

    patch.setattr(update_rule, "clip", scaled)


def zero_grad_forgotten(patch: Patch) -> None:
    right = gradient_sum.clear
    for name, module in list(sys.modules.items()):
        if name.startswith("superbatch.torch.") and getattr(module, "clear", None) is right:
            patch.setattr(module, "clear", lambda owned: None)
    # Otherwise the first backward would detect the mutant.
    patch.setattr(GradientVersions, "require_unchanged", lambda self, **options: None)


def scheduler_per_microbatch(patch: Patch) -> None:
    steps = update_rule.scheduler_steps
    patch.setattr(update_rule, "scheduler_steps", lambda *of: [*steps(*of), *steps(*of), *steps(*of)])
    patch.setattr("superbatch.torch.window.slip_watch.warn", lambda *args, **kwargs: None)  # else it warns


def optimizer_twice(patch: Patch) -> None:
    steps_of = update_rule.OptimizerSteps.__init__

    def twice(self: Any, rule: Any, *arguments: Any) -> None:
        steps_of(self, rule, *arguments)
        for optimizer in rule.optimizers:
            optimizer.step()

    patch.setattr(update_rule.OptimizerSteps, "__init__", twice)


def last_microbatch_only(patch: Patch) -> None:
    backward = parameter_gradients.ParameterGradientSum.backward

    def clear_then_backward(
        self: parameter_gradients.ParameterGradientSum, loss: Tensor, factor: float, **options: Any
    ) -> None:
        gradient_sum.clear(self._owned)
        self._versions.clear_recorded()
        backward(self, loss, factor, **options)

    patch.setattr(parameter_gradients.ParameterGradientSum, "backward", clear_then_backward)


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[], Any]]] = [
    (mean_of_means, train_unequal),
    (mean_of_token_means, train_tokens),
    (fixed_divisor_on_the_tail, train_tail),
    (sum_scaled_as_a_mean, train_sum),
    (sum_divided_by_microbatches, train_sum),
    (not_divided_at_all, train_tail),
    (not_divided_at_all, train_sum),
    (weights_rounded, train_unequal),
    (weights_in_float32, train_tokens),
    (divided_once_too_often, train_tail),
    (sum_never_divided, train_returned),
    (clip_before_normalising, train_returned),
    (clip_forgotten, train_unequal),
    (clip_per_parameter, train_unequal),
    (clip_by_value_scaled, train_by_value),
    (zero_grad_forgotten, train_tail),
    (scheduler_per_microbatch, train_unequal),
    (optimizer_twice, train_tail),
    (last_microbatch_only, train_tail),
]


@pytest.mark.parametrize(("mutate", "train"), MUTANTS)
def test_the_comparison_rejects_the_mutant(
    mutate: Callable[[Patch], None], train: Callable[[], Any], monkeypatch: Patch
) -> None:
    # The first-window check calls the same functions, and would stop some mutants early.
    monkeypatch.setattr("superbatch.torch.window.engine.check_first_window", lambda *args, **kwargs: None)
    mutate(monkeypatch)
    both = train()
    with pytest.raises(AssertionError, match="not the update of the large batch"):
        both.check()


def tutorial_loop(
    model: nn.Module, optimizer: Any, loss: Any, microbatches: Sequence[Any], steps: int
) -> None:
    """Run the loop of most tutorials: every loss is divided by a fixed number, a tail is carried over."""
    for index, microbatch in enumerate(microbatches):
        (loss(model, microbatch) / steps).backward()
        if (index + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("sizes", "wrong"), [([3, 3, 3, 3], False), ([5, 1, 4, 2], True), ([3, 3, 3], True)])
def test_the_comparison_rejects_the_tutorial_loop_where_it_is_wrong(sizes: list[int], wrong: bool) -> None:
    """The loop passes on equal micro-batches, and fails on unequal ones and on a tail."""
    microbatches = [rows(size, 1, seed=number)[0] for number, size in enumerate(sizes)]
    batches = [
        tuple(torch.cat(leaves) for leaves in zip(*microbatches[first : first + 2], strict=True))
        for first in range(0, len(sizes), 2)
    ]
    reference, model = mlp(), mlp()
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), batches)
    tutorial_loop(model, sgd(model.parameters()), mse, microbatches, 2)
    if wrong:
        with pytest.raises(AssertionError, match="not the update of the large batch"):
            assert_same_parameters(reference, model, 1e-12, start=start)
    else:
        assert_same_parameters(reference, model, 1e-12, start=start)


def test_the_comparison_refuses_models_that_were_never_trained() -> None:
    model = mlp()
    with pytest.raises(AssertionError, match=r"premise: 0\.weight of the reference has not moved"):
        assert_same_parameters(mlp(), model, 1e-12, start=start_of(model))


def test_the_comparison_lists_every_parameter_that_differs() -> None:
    reference, model = mlp(), mlp()
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), rows(4, 1))
    with pytest.raises(AssertionError) as caught:
        assert_same_parameters(reference, model, 1e-12, start=start)
    assert all(name in str(caught.value) for name in start)
