"""Cases of other tools' test suites, with inputs and expectations of our own.

Each docstring names the tool and its tests. Where their expectation is inexact (a fixed divisor on the tail),
ours is the large batch. Distributed cases are tested with real processes elsewhere.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.batch.split import TokenBudget, split
from superbatch.batch.tree import count_samples
from superbatch.torch import Accumulator, count_tokens, windows
from superbatch.torch.options import PerSampleRandom, Split
from tests.torch.helpers import (
    assert_same_parameters,
    large_batch,
    mlp,
    mse,
    rows,
    sgd,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
    train_both,
)

F64 = torch.float64


def joined(window: Any) -> tuple[Tensor, ...]:
    return tuple(torch.cat(leaves) for leaves in zip(*window, strict=True))


class Line(nn.Module):
    """y = a x + b, the model of several of these suites."""

    def __init__(self, a: float = 0.5, b: float = -0.3) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=F64))
        self.b = nn.Parameter(torch.tensor(b, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x + self.b


def line_data(samples: int, seed: int = 42) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, generator=generator, dtype=F64)
    return x, 2 * x + 3 + 0.1 * torch.randn(samples, generator=generator, dtype=F64)


# -- row 1: Accelerate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_parameters_change_only_at_the_end_of_a_window(steps: int) -> None:
    """Row 1, Accelerate, `test_gradient_accumulation`: 80 samples in micro-batches of 3, and tails."""
    x, y = line_data(80)
    loader = list(zip(x.split(3), y.split(3), strict=True))
    assert len(loader[-1][0]) == 2, "premise: the last micro-batch is short"
    reference, model = Line(), Line()
    start = start_of(reference)
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=None)
    grouped = list(windows(loader, steps))
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), [joined(w) for w in grouped])
    for group in grouped:
        before = start_of(model)
        with accumulator.window(group) as window:
            for microbatch in window:
                window.backward(mse(model, microbatch))
                assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
                assert all(p.grad is not None and p.grad != 0 for p in model.parameters())
        assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())
        assert all(p.grad is None for p in model.parameters())
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("samples", [13, 16])
def test_the_learning_rate_follows_the_updates(samples: int) -> None:
    """Row 1, Accelerate, `test_gradient_accumulation_with_opt_and_scheduler`: LambdaLR with 0.65^update."""
    x, y = line_data(samples)
    grouped = list(windows(zip(x.split(2), y.split(2), strict=True), 2))
    both = train_both(
        Line,
        mse,
        [joined(window) for window in grouped],
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        windows=grouped,
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda update: 0.65**update),
    )
    both.check()
    assert [u.learning_rates[0] for u in both.updates] == pytest.approx(
        [1e-3 * 0.65**n for n in range(len(grouped))]
    )


def test_several_forwards_before_the_backward_of_a_microbatch() -> None:
    """Row 1, Accelerate, `test_distributed_sync_multiple_fwd`: three forwards, then three backwards."""
    reference, model = Line(), Line()
    start, batch = start_of(reference), line_data(12)
    large_batch(sgd(reference.parameters()), lambda b: 3 * mse(reference, b), [batch])
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=5)
    with accumulator.window(batch) as window:
        for microbatch in window:
            losses = [mse(model, microbatch) for _ in range(3)]
            for loss in losses:
                window.backward(loss)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_another_loader_inside_a_window_does_not_end_it() -> None:
    """Row 1, Accelerate, `test_dataloader_break`: an evaluation in a window, whose loop ends early."""
    reference, model = Line(), Line()
    start, batches = start_of(reference), [line_data(8, seed) for seed in range(3)]
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches)
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=2)
    held_out = list(windows([line_data(2, seed) for seed in range(10, 15)], 2))
    for batch in batches:
        with accumulator.window(batch) as window:
            for microbatch in window:
                window.backward(mse(model, microbatch))
                with torch.no_grad():
                    for number, validation in enumerate(held_out):
                        assert math.isfinite(float(mse(model, validation[0])))
                        if number == 1:
                            break
    assert accumulator.updates == 3
    assert_same_parameters(reference, model, 1e-12, start=start)


# -- row 2: Accelerate's memory utilities, for a failure inside a window ------------------------------


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyError])
def test_an_error_of_the_loss_is_raised_and_changes_nothing(error: type[Exception]) -> None:
    """Row 2, Accelerate, `test_any_other_error` and `test_release_memory`: no error is swallowed or kept."""
    model = mlp()
    optimizer = sgd(model.parameters())
    fail_at = [2]
    calls = []

    def loss_fn(microbatch: Any) -> Tensor:
        calls.append(len(microbatch[0]))
        if len(calls) == fail_at[0]:
            raise error("out of something")
        return mse(model, microbatch)

    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=4, check=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match="out of something"):
        accumulate(rows(10, 1)[0])
    assert calls == [4, 3], "the window ends at once"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    reference = mlp()
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), rows(10, 1))
    assert accumulate(rows(10, 1)[0]).made
    assert_same_parameters(reference, model, 1e-12, start=before)


def test_a_smaller_microbatch_after_a_failure_gives_the_same_update() -> None:
    """Row 2, Accelerate, `test_memory_implicit`: 128, 64, 32, 16, 8 until it fits, to the same update."""
    model, sizes = mlp(), []
    start = start_of(model)
    batch = rows(128, 1)[0]

    def loss_fn(microbatch: Any) -> Tensor:
        sizes.append(len(microbatch[0]))
        if len(microbatch[0]) > 8:
            raise torch.OutOfMemoryError("fake")
        return mse(model, microbatch)

    optimizer = sgd(model.parameters())
    with pytest.warns(UserWarning, match="memory ran out"):
        update = Accumulator(model, optimizer, loss_fn, microbatch_size=128, check=False)(batch)
    assert sizes[:5] == [128, 64, 32, 16, 8] and set(sizes[5:]) == {8}
    assert update.microbatches == 16 and update.failures == 4
    reference = mlp()
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), [batch])
    assert_same_parameters(reference, model, 1e-12, start=start)


# -- row 4: Hugging Face Trainer -----------------------------------------------------------------------


def test_batch_8_is_twice_4_over_an_epoch() -> None:
    """Row 4, transformers, `test_gradient_accumulation`: 64 samples, 8 at once or 4 twice."""
    x, y = line_data(64)
    eights = list(zip(x.split(8), y.split(8), strict=True))
    fours = list(windows(zip(x.split(4), y.split(4), strict=True), 2))
    train_both(Line, mse, eights * 3, windows=fours * 3).check()


@pytest.mark.parametrize("labelled", [True, False])
def test_losses_align_for_sequences_of_unequal_length(labelled: bool) -> None:
    """Row 4, transformers, `..._loss_alignment_with_model_loss` and `..._with_loss_func`.

    The loss of shifted labels is computed in the model, or by a function.
    """

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = tiny_lm()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return shifted(self.lm, batch)

    def shifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"])[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())

    lengths = [7, 2, 3, 5, 2, 7, 4, 6]
    both = train_both(
        WithLoss if labelled else tiny_lm,
        (lambda model, batch: model(batch)) if labelled else shifted,
        [tokens(lengths, seed=seed) for seed in range(5)],
        microbatch_size=4,
        weight=count_tokens("labels", shift=True),
    )
    both.check()
    naive = [sum(n - 1 for n in half) / 4 for half in (lengths[:4], lengths[4:])]
    assert naive[0] != naive[1], "premise: a mean of means would be wrong"
    for update, loss in zip(both.updates, both.seen.losses, strict=True):
        assert update.loss == pytest.approx(loss, rel=1e-12)


# -- row 8: sentence-transformers' cached losses, without the contrastive part -------------------------


@pytest.mark.parametrize("mini", [3, 50])
def test_a_microbatch_that_does_not_divide_the_batch_or_is_larger(mini: int) -> None:
    """Row 8, sentence-transformers, `test_cached_mnrl_matches_mnrl`: sizes 3 and 50 for 7 samples."""
    both = train_both(mlp, mse, rows(7, 2), microbatch_size=mini)
    both.check()
    assert both.updates[0].microbatches == (3 if mini == 3 else 1)


def test_columns_of_different_kinds_are_split_alike() -> None:
    """Row 8, sentence-transformers, `_create_minibatch`: two columns of tokens with masks, and texts."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        side: {
            "ids": torch.randint(0, 11, (7, length), generator=generator),
            "attention_mask": torch.ones(7, length, dtype=torch.int64),
        }
        for side, length in (("query", 3), ("document", 5))
    } | {"text": [f"sample {n}" for n in range(7)], "y": torch.arange(7, dtype=F64)}

    def loss(model: nn.Module, b: dict[str, Any]) -> Tensor:
        assert len(b["text"]) == len(b["query"]["ids"]) == len(b["y"]), "a column was split elsewhere"
        assert b["text"] == [f"sample {int(y)}" for y in b["y"]]
        one, two = (model(b[side]["ids"]).mean((1, 2)) for side in ("query", "document"))
        return (one + 0.5 * two - b["y"]).square().mean()

    train_both(
        tiny_lm, loss, [batch, batch], lambda p: torch.optim.SGD(p, lr=0.01), microbatch_size=3
    ).check()


def test_dropout_is_replayed_for_every_microbatch_size() -> None:
    """Row 8, sentence-transformers, `test_gradcache_replays_dropout_in_the_backward_pass`."""
    models = []
    for size in (2, 7):
        model = nn.Sequential(nn.Dropout(0.3), mlp(dropout=0.5))
        torch.manual_seed(0)
        accumulate = Accumulator(
            model, sgd(model.parameters()), lambda mb, m=model: mse(m, mb), microbatch_size=size,
            participants=[PerSampleRandom()],
        )  # fmt: skip
        for batch in rows(7, 3):
            accumulate(batch)
        models.append(model)
    start = start_of(nn.Sequential(nn.Dropout(0.3), mlp(dropout=0.5)))
    assert_same_parameters(models[0], models[1], 1e-11, start=start)


def test_token_budgets_keep_order_and_every_sample() -> None:
    """Row 8, sentence-transformers, token budgets: no micro-batch above it, every sample once, in order."""
    lengths = [5, 1, 9, 3, 3, 2, 8, 1]
    batch = {"lengths": torch.tensor(lengths), "id": torch.arange(8)}
    microbatches = split(batch, TokenBudget(10, "lengths"))
    assert [int(i) for mb in microbatches for i in mb["id"]] == list(range(8))
    assert all(int(mb["lengths"].sum()) <= 10 for mb in microbatches) and len(microbatches) == 4


# -- row 9: Lightning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_last_window_of_an_epoch_updates_too(steps: int) -> None:
    """Row 9, Lightning, `test_gradient_accumulation_scheduling_last_batch`: every window updates."""
    loader = [rows(2, 1, seed=number)[0] for number in range(7)]
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb))
    changed = []
    for _ in range(2):  # epochs; no gradient leaks into the next one
        for window in windows(loader, steps):
            before = start_of(model)
            accumulate(window)
            changed.append(not any(torch.equal(before[n], p) for n, p in model.named_parameters()))
    assert changed == [True] * 2 * math.ceil(7 / steps) and accumulate.updates == len(changed)


def test_a_number_of_updates_ends_the_training() -> None:
    """Row 9, Lightning, `test_trainer_max_steps_accumulate_batches`: 10 updates of 10 micro-batches each."""
    model, read = mlp(), []
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb))

    def endless() -> Any:
        while True:
            read.append(1)
            yield rows(2, 1)[0]

    for window in windows(endless(), 10):
        accumulate(window)
        if accumulate.updates == 10:
            break
    assert accumulate.updates == 10 and len(read) == 100, "no further micro-batch is read"


def test_validation_inside_a_window_keeps_its_gradients() -> None:
    """Row 9, Lightning, `test_validation_during_gradient_accumulation_window`: eval mode, no gradients."""
    reference, model = mlp(), mlp()
    start, batch = start_of(reference), rows(10, 1)[0]
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), [batch])
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=4)
    with accumulator.window(batch) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.eval()
            with torch.no_grad():
                mse(model, rows(5, 1)[0])
            model.train()
            now = [p.grad for p in model.parameters() if p.grad is not None]
            assert len(now) == 4 and all(torch.equal(a, b) for a, b in zip(gradients, now, strict=True))
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_schedule_of_windows_by_update() -> None:
    """Row 9, Lightning, `test_gradient_accumulation_scheduler`: {0: 1, 2: 4}, counted in updates."""
    from superbatch.schedule import piecewise

    loader = [rows(2, 1, seed=number)[0] for number in range(13)]
    grouped = list(windows(loader, piecewise({0: 1, 2: 4})))
    assert [len(window) for window in grouped] == [1, 1, 4, 4, 3]
    train_both(mlp, mse, [joined(window) for window in grouped], windows=grouped).check()


@pytest.mark.parametrize("steps", [0, -1, "4", 2.5, {0: 2}])
def test_impossible_schedules_are_refused(steps: Any) -> None:
    """Row 9, Lightning, `test_invalid_values_for_gradient_accumulation_scheduler`."""
    with pytest.raises(ValueError, match="accumulation_steps"):
        windows([1, 2], steps)


@pytest.mark.parametrize(("samples", "steps", "updates"), [(64, 1, 64), (64, 4, 16), (63, 4, 16), (7, 9, 1)])
def test_the_number_of_updates_of_an_epoch_is_known(samples: int, steps: int, updates: int) -> None:
    """Row 9, Lightning, `test_estimated_stepping_batches`: ceil(micro-batches / accumulation_steps)."""
    assert len(list(windows(range(samples), steps))) == updates


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_an_exception_in_a_window_loses_that_window_only(fail_at: int) -> None:
    """Row 9, Lightning, `test_loop_state_on_exception`: the state is that of the last update."""

    class CustomError(Exception):
        pass

    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(9, 3)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches)
    armed = []

    def loss_fn(microbatch: Any) -> Tensor:
        if armed and armed.pop(0) == "fail":
            raise CustomError
        return mse(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=3)
    accumulate(batches[0])
    armed += ["pass"] * fail_at + ["fail"]
    with pytest.raises(CustomError):
        accumulate(batches[1])
    assert accumulate.updates == 1
    for batch in batches[1:]:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


# -- row 10: Composer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(12, 3),
        (torch.randn(12, 3), torch.randint(0, 2, (12,))),
        [torch.randn(12, 3), torch.randint(0, 2, (12,))],
        {"image": torch.randn(12, 3), "label": torch.randint(0, 2, (12,)), "text": ["x"] * 12},
        (torch.randn(12, 3), [torch.randn(12, 2), torch.randn(12, 1)]),
        (torch.randn(12, 3), {"boxes": torch.randn(12, 4), "labels": torch.arange(12)}),
        {"size": 7, "image": torch.randn(12, 3), "nested": {"meta": "constant", "x": torch.randn(12)}},
    ],
    ids=["tensor", "tuple", "list", "dict", "tuple-list", "tuple-dict", "with constants"],
)
@pytest.mark.parametrize("size", [1, 3, 5, 12, 40])
def test_kinds_of_batches_are_split(batch: Any, size: int) -> None:
    """Row 10, Composer, `test_split_without_error`, `..._size_greater_than_batch_size` and others."""
    microbatches = split(batch, size)
    assert len(microbatches) == math.ceil(12 / min(size, 12))
    assert sum(count_samples(mb) for mb in microbatches) == 12
    assert all(type(mb) is type(batch) for mb in microbatches)


def test_detection_batches() -> None:
    """Row 10, Composer, `test_split_maskrcnn`: images of different shapes and one target dict for each."""
    images = [torch.randn(3, 4 + n, 5, dtype=F64) for n in range(7)]
    targets = [{"boxes": torch.full((n + 1, 4), float(n), dtype=F64)} for n in range(7)]
    batch = (images, targets)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 4).double()

    def loss(model: Any, b: Any) -> Tensor:
        assert [len(target["boxes"]) for target in b[1]] == [len(image[0]) - 3 for image in b[0]]
        each = [
            (model.layer(image.mean((1, 2))) - target["boxes"]).square().mean()
            for image, target in zip(*b, strict=True)
        ]
        return torch.stack(each).mean()

    both = train_both(Mean, loss, [batch] * 2, microbatch_size=3, split=Split(per_sample=["0", "1"]))
    both.check()
    assert both.updates[0].microbatches == 3


def test_a_model_with_branches_has_the_gradients_computed_by_hand() -> None:
    """Row 10, Composer, `test_ddp_sync_strategy`: a branch for each micro-batch.

    With x = 1, 1, 2 (one sample each), `a` gets the ones and `b` the two: L = (w_a + w_a + 2 w_b) / 3.
    """

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.tensor(1.0, dtype=F64)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a * x if bool((x == 1).all()) else self.b * x).mean()

    model = Branches()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), microbatch_size=1)
    seen = []
    with accumulator.window(torch.tensor([1.0, 1.0, 2.0], dtype=F64)) as window:
        for microbatch in window:
            window.backward(model(microbatch))
            seen.append(
                [None if p.grad is None else round(float(p.grad) * 3, 12) for p in model.parameters()]
            )
    assert seen == [[1.0, None, None], [2.0, None, None], [2.0, 2.0, None]]
    assert [float(p.detach()) for p in model.parameters()] == pytest.approx([1 - 2 / 3, 1 - 2 / 3, 1.0])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_loss_with_padding_is_the_metric_over_the_batch(size: int) -> None:
    """Row 10, Composer, `test_loss_vs_ce_metric_with_padding_and_microbatching`."""
    batch = tokens([7, 1, 2, 6, 0, 3, 5, 1])
    model = tiny_lm()
    with torch.no_grad():
        metric = float(token_mean(model, batch))
    update = Accumulator(
        model, sgd(model.parameters()), lambda mb: token_mean(model, mb), microbatch_size=size,
        weight=count_tokens("labels"),
    )(batch)  # fmt: skip
    assert update.loss == pytest.approx(metric, rel=1e-13)


# -- row 11: Caffe -------------------------------------------------------------------------------------

SOLVERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, decay, momentum: torch.optim.SGD(p, lr=0.01, weight_decay=decay, momentum=momentum),
    "Nesterov": lambda p, decay, momentum: torch.optim.SGD(
        p, lr=0.01, weight_decay=decay, momentum=momentum or 0.9, nesterov=True
    ),
    "AdaGrad": lambda p, decay, momentum: torch.optim.Adagrad(p, lr=0.01, weight_decay=decay),
    "RMSProp": lambda p, decay, momentum: torch.optim.RMSprop(
        p, lr=0.01, alpha=0.95, weight_decay=decay, momentum=momentum
    ),
    "AdaDelta": lambda p, decay, momentum: torch.optim.Adadelta(p, lr=0.1, rho=0.95, weight_decay=decay),
    "Adam": lambda p, decay, momentum: torch.optim.Adam(
        p, lr=0.01, betas=(momentum or 0.9, 0.999), weight_decay=decay
    ),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("decay", "momentum"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.9), (0.5, 0.9)])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.sampled(3)
def test_iter_size_is_the_batch(solver: str, decay: float, momentum: float, clip: float | None) -> None:
    """Row 11, Caffe, `TestLeastSquaresUpdateWithEverythingAccum`: 4 updates of 4 x 5 are 4 updates of 20.

    A clip applies to the mean here; Caffe applies it to the sum (its issue 6199).
    """

    def least_squares(model: nn.Module, batch: Any) -> Tensor:
        return 0.5 * (model(batch[0]) - batch[1]).square().sum(1).mean()

    both = train_both(
        lambda: mlp()[0],
        least_squares,
        [(x, y.repeat(1, 2)) for x, y in rows(20, 4)],
        lambda p: SOLVERS[solver](p, decay, momentum),
        microbatch_size=5,
        max_grad_norm=clip,
    )
    assert {update.microbatches for update in both.updates} == {4}
    assert clip is None or min(both.seen.norms) > clip, "premise: clipped"
    both.check()


def test_weights_shared_between_layers() -> None:
    """Row 11, Caffe, `...AccumShare`: two layers with one weight, with decay and momentum."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one = nn.Linear(4, 4).double()
            self.two = nn.Linear(4, 4).double()
            self.two.weight, self.two.bias = self.one.weight, self.one.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))[:, :3]

    train_both(Shared, mse, rows(20, 4), microbatch_size=5).check()


# -- row 12: Opacus ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 10, 64])
def test_physical_batches_never_exceed_their_limit(size: int) -> None:
    """Row 12, Opacus, `test_basic` and `test_equivalent_to_one_batch`: 10 samples, `size` at a time."""
    model, seen = mlp(), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=size, check=False
    )
    accumulate(rows(10, 1)[0])
    assert max(seen) <= size and sum(seen) == 10 and max(seen) - min(seen) <= 1
    train_both(mlp, mse, rows(10, 3), microbatch_size=size).check()


def test_an_empty_logical_batch_changes_nothing() -> None:
    """Row 12, Opacus, `test_empty_batch`: Poisson sampling draws no sample at times."""
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=4)
    accumulate(rows(10, 1)[0])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match="sample"):  # the user has to skip such a batch
        accumulate(tuple(leaf[:0] for leaf in rows(10, 1)[0]))
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert accumulate(rows(10, 1)[0]).made


# -- row 13: torchtitan --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["weights known", "weights returned", "sum"])
def test_microbatches_of_8_4_and_2_tokens(form: str) -> None:
    """Row 13, torchtitan, `test_ignore_index_gradient_accumulation_consistency`: 8, 4 and 2 labels."""
    generator = torch.Generator().manual_seed(42)
    ids = torch.randint(0, 11, (3, 8), generator=generator)
    labels = torch.randint(0, 11, (3, 8), generator=generator)
    labels[1, 4:], labels[2, 2:] = -100, -100
    batch = {"ids": ids, "labels": labels}
    assert (labels != -100).sum(1).tolist() == [8, 4, 2]
    count = count_tokens("labels")

    def summed(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return token_mean(model, b) * count(b)

    reference, model = tiny_lm(), tiny_lm()
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda b: token_mean(reference, b), [batch] * 2)
    options: dict[str, Any] = {"weight": count}
    loss_fn: Any = lambda mb: token_mean(model, mb)  # noqa: E731  (one of three)
    if form == "weights returned":
        options = {"weight": "returned"}
        loss_fn = lambda mb: (token_mean(model, mb), count(mb))  # noqa: E731
    elif form == "sum":
        options["reduction"] = "sum"
        loss_fn = lambda mb: summed(model, mb)  # noqa: E731
    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, microbatch_size=1, check=False, **options
    )
    for _ in range(2):
        assert accumulate(batch).weight == 14
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_sum_of_scaled_gradients_is_that_of_the_global_count(count: int) -> None:
    """Row 13, torchtitan, `TestGradAccumulator`: the loss reported is that of all tokens."""
    batch = tokens([7, 2, 5, 1, 4, 6, 3, 7])
    model = tiny_lm()
    with torch.no_grad():
        expected = float(token_mean(model, batch))
    gradients = torch.autograd.grad(token_mean(model, batch), list(model.parameters()))
    norm = float(torch.nn.utils.get_total_norm(gradients))
    update = Accumulator(
        model, sgd(model.parameters()), lambda mb: token_mean(model, mb), microbatch_size=8 // count,
        weight=count_tokens("labels"),
    )(batch)  # fmt: skip
    assert update.microbatches == count
    assert update.loss == pytest.approx(expected, rel=1e-13)
    assert update.grad_norm == pytest.approx(norm, rel=1e-12)
