"""Sums, totals and bounded weights: the update is that of the large batch, also with weight 0."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from superbatch import normalize
from superbatch.errors import InputError, LossSpecError, NonFiniteError
from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, Window, at_least
from tests.torch.helpers import assert_same_parameters, large_batch, mlp, rows, sgd, start_of

Batch = tuple[Tensor, Tensor, Tensor]


def images(found: list[int], *, seed: int = 0) -> Batch:
    """Images with the given numbers of objects, as for RetinaNet: also those without have a loss."""
    x, y = rows(len(found), updates=1, seed=seed + 2)[0]
    return x, y, torch.tensor(found, dtype=torch.float64)


def focal_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum over images of a loss over their objects and one over their background."""
    x, y, objects = batch
    return ((model(x) - y).square().sum(1) * (objects + 0.5)).sum()


def count(batch: Batch) -> float:
    return float(batch[2].sum())


def split_batch(batch: Batch, *sizes: int) -> list[Batch]:
    assert sum(sizes) == len(batch[0])
    columns = [leaf.split(list(sizes)) for leaf in batch]
    return [(x, y, o) for x, y, o in zip(*columns, strict=True)]


def assert_exact(batch: Batch, window: Any, objective: Any, **options: Any) -> None:
    reference = mlp()
    model = copy.deepcopy(reference)
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda b: objective(reference, b), [batch])
    options.setdefault("check", False)
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: focal_sum(model, mb), **options)
    update = accumulate(window)
    assert update.made
    assert_same_parameters(reference, model, 1e-12, start=start)


WEIGHTS: dict[str, Any] = {"function": count, "returned": "returned"}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_microbatch_of_weight_0_is_in_the_sum(weight: str, order: tuple[int, ...]) -> None:
    batch = images([3, 0, 0, 1, 2])
    microbatches = split_batch(batch, 1, 2, 2)
    assert [count(mb) for mb in microbatches] == [3.0, 0.0, 3.0]
    assert focal_sum(mlp(), microbatches[1]) > 0
    options: dict[str, Any] = {"reduction": "sum", "weight": WEIGHTS[weight]}
    if weight == "returned":
        model = mlp()
        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            lambda mb: (focal_sum(model, mb), count(mb)),
            check=False,
            **options,
        )
    else:
        model = mlp()
        accumulate = Accumulator(
            model, sgd(model.parameters()), lambda mb: focal_sum(model, mb), check=False, **options
        )
    reference, start = mlp(), start_of(mlp())
    seen = large_batch(sgd(reference.parameters()), lambda b: focal_sum(reference, b) / count(b), [batch])
    update = accumulate(Window([microbatches[i] for i in order]))
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert update.loss == pytest.approx(seen.losses[0], rel=1e-12)
    assert update.grad_norm == pytest.approx(seen.norms[0], rel=1e-12)
    assert update.weight == 6


@pytest.mark.parametrize("into", ["grad", "momentum"])
def test_weight_0_in_a_sum_with_every_gradient_sum(into: Any) -> None:
    batch = images([3, 0, 0, 1, 2])
    assert_exact(
        batch,
        Window(split_batch(batch, 1, 2, 2)),
        lambda model, b: focal_sum(model, b) / count(b),
        reduction="sum",
        weight=count,
        gradient_sum="momentum" if into == "momentum" else "auto",
    )


def test_a_single_image_without_objects_passes_the_check() -> None:
    batch = images([0, 0, 0, 4, 1, 0])
    assert_exact(
        batch,
        Window(split_batch(batch, 3, 3)),
        lambda model, b: focal_sum(model, b) / count(b),
        reduction="sum",
        weight=count,
        check=True,
    )


def test_mutant_that_leaves_weight_0_out_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalize, "takes_part", lambda weight, *, reduction: weight != 0)
    with pytest.raises(AssertionError, match="not the update of the large batch"):
        test_weight_0_in_a_sum_with_every_gradient_sum("grad")


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_sum_without_any_weight_raises_and_names_the_bound(weight: str) -> None:
    model = mlp()
    start = start_of(model)

    def loss_fn(mb: Batch) -> Any:
        loss = focal_sum(model, mb)
        return (loss, count(mb)) if weight == "returned" else loss

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, reduction="sum", weight=WEIGHTS[weight], check=False
    )
    with pytest.raises(LossSpecError, match=r"weight of the window is 0.*weight=at_least\(1, \.\.\.\)"):
        accumulate(Window(split_batch(images([0, 0, 0]), 1, 2)))
    assert all(torch.equal(p, start[n]) and p.grad is None for n, p in model.named_parameters())
    assert accumulate(Window(split_batch(images([0, 2, 0]), 1, 2))).made


def test_a_sum_of_zeros_without_weight_is_no_update() -> None:
    model = mlp()
    start = start_of(model)
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: (model(mb[0]) * mb[2].unsqueeze(1)).sum(),
        reduction="sum",
        weight=count,
        check=False,
    )
    update = accumulate(Window(split_batch(images([0, 0, 0]), 1, 2)))
    assert not update.made
    assert "no weight" in str(update.skipped)
    assert update.weight == 0
    assert math.isnan(update.loss)
    assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("found", [[0, 0, 0], [0, 1, 0], [2, 3, 0]])
def test_at_least_is_a_clamp(found: list[int], weight: str) -> None:
    batch, bound = images(found), 2.0
    model, reference = mlp(), mlp()
    start = start_of(reference)
    seen = large_batch(
        sgd(reference.parameters()), lambda b: focal_sum(reference, b) / max(count(b), bound), [batch]
    )

    def loss_fn(mb: Batch) -> Any:
        loss = focal_sum(model, mb)
        return (loss, count(mb)) if weight == "returned" else loss

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        reduction="sum",
        weight=at_least(bound, WEIGHTS[weight]),
        check=False,
    )
    update = accumulate(Window(split_batch(batch, 1, 2)))
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert update.loss == pytest.approx(seen.losses[0], rel=1e-12)
    assert update.weight == max(sum(found), bound)


def with_nan(mb: Batch, value: Tensor) -> Tensor:
    """Replace the value by NaN for a micro-batch of weight 0."""
    return value * math.nan if not count(mb) else value


def _with_a_nan_of_weight_0(reduction: Any, **options: Any) -> tuple[Accumulator, nn.Module, Batch]:
    model = mlp()

    def loss_fn(mb: Batch) -> Tensor:
        value = focal_sum(model, mb)
        return with_nan(mb, value if reduction == "sum" else value / max(count(mb), 1))

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, reduction=reduction, weight=count, check=False, **options
    )
    return accumulate, model, images([3, 0, 0, 1, 2])


def test_nan_of_weight_0_is_left_out_of_a_mean() -> None:
    accumulate, model, batch = _with_a_nan_of_weight_0("mean")
    kept = tuple(column[[0, 3, 4]] for column in batch)
    reference, start = mlp(), start_of(mlp())
    large_batch(sgd(reference.parameters()), lambda b: focal_sum(reference, b) / count(b), [kept])
    assert accumulate(Window(split_batch(batch, 1, 2, 2))).made
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_nan_of_weight_0_in_a_sum_is_not_finite() -> None:
    accumulate, model, batch = _with_a_nan_of_weight_0("sum")
    start = start_of(model)
    with pytest.raises(NonFiniteError, match="micro-batch 1"):
        accumulate(Window(split_batch(batch, 1, 2, 2)))
    assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())
    accumulate, model, batch = _with_a_nan_of_weight_0("sum", nonfinite="skip_update")
    update = accumulate(Window(split_batch(batch, 1, 2, 2)))
    assert not update.made
    accumulate, model, batch = _with_a_nan_of_weight_0("sum", nonfinite="skip_microbatch")
    kept = tuple(column[[0, 3, 4]] for column in batch)
    reference, start = mlp(), start_of(mlp())
    large_batch(sgd(reference.parameters()), lambda b: focal_sum(reference, b) / count(b), [kept])
    update = accumulate(Window(split_batch(batch, 1, 2, 2)))
    assert update.dropped == (1,)
    assert_same_parameters(reference, model, 1e-12, start=start)


LEFT_OUT = "0 windows measured; 8 needed (2 left out: a micro-batch of weight 0 took part in a sum)"


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(count, LEFT_OUT), (lambda batch: len(batch[0]), "2 windows measured; 8 needed")],
    ids=["weight 0", "positive weights"],
)
def test_noise_leaves_out_a_window_with_a_microbatch_of_weight_0(weight: Any, reason: str) -> None:
    """With a positive weight for each micro-batch, the same windows are measured."""
    model = mlp()
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: focal_sum(model, mb),
        reduction="sum",
        weight=weight,
        observers=[NoiseMeter(every=1)],
        check=False,
    )
    microbatches = split_batch(images([3, 0, 0, 1, 2]), 1, 2, 2)
    has_weight_0 = [weight(mb) == 0 for mb in microbatches]
    assert has_weight_0 == [False, reason == LEFT_OUT, False], "premise"
    for _ in range(2):
        assert accumulate(Window(microbatches)).made
    assert accumulate.noise is not None and accumulate.noise.reason == reason
    assert accumulate.noise.windows == int(reason[0])


def test_a_total_is_not_divided() -> None:
    for size in (1, 2, 5):
        batch = images([3, 0, 0, 1, 2])
        assert_exact(batch, batch, focal_sum, reduction="total", microbatch_size=size, check=size > 1)
    model, reference = mlp(), mlp()
    seen = large_batch(sgd(reference.parameters()), lambda b: focal_sum(reference, b), [batch])
    update = Accumulator(
        model, sgd(model.parameters()), lambda mb: focal_sum(model, mb), reduction="total", microbatch_size=2
    )(batch)
    assert update.loss == pytest.approx(seen.losses[0], rel=1e-12)
    assert update.weight == 1


def test_a_total_of_batches_without_a_length() -> None:
    model, reference = mlp(), mlp()
    batch = images([3, 0, 0, 1, 2])
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda b: focal_sum(reference, b), [batch])

    class Opaque:
        def __init__(self, batch: Batch) -> None:
            self.batch = batch

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: focal_sum(model, mb.batch),
        reduction="total",
        check=False,
        device=None,
    )
    accumulate(Window([Opaque(mb) for mb in split_batch(batch, 1, 2, 2)]))
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_mean_declared_as_a_total_is_detected() -> None:
    model = mlp()
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: (model(mb[0]) - mb[1]).square().mean(),
        reduction="total",
        microbatch_size=6,
    )
    with pytest.raises(LossSpecError, match='reduction="mean"'):
        accumulate(rows(12, updates=1)[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduction": "total", "weight": count}, 'reduction="total" is not divided by a weight'),
        ({"reduction": "total", "weight": "returned"}, 'reduction="total" is not divided by a weight'),
        ({"reduction": "total", "weight": at_least(1)}, "weight= has no meaning"),
        ({"reduction": "total", "nonfinite": "skip_microbatch"}, "skip_microbatch"),
        ({"weight": at_least(0)}, r"at_least\(0\) is not positive and finite"),
        ({"weight": at_least(math.nan)}, r"at_least\(nan\) is not positive and finite"),
        ({"weight": at_least(minimum=True)}, r"at_least\(True\) is not a number"),
        ({"weight": at_least(cast("Any", "1"))}, r"at_least\('1'\) is not a number"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"reduction": ["sum"]}, "not a reduction"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str) -> None:
    model = mlp()
    with pytest.raises(InputError, match=text):
        Accumulator(model, sgd(model.parameters()), lambda mb: focal_sum(model, mb), **options)
