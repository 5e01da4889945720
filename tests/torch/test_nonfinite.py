"""NaN and infinity in a window: messages, skipped micro-batches and updates, and restored state."""

# ruff: noqa: PT012  (the block of a window raises, with a loop in it)

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import NonFiniteError
from superbatch.torch import Accumulator, Window, sample_weights
from superbatch.torch.options import GhostBatchNorm
from tests.torch.helpers import assert_same_parameters, large_batch, mlp, mse, rows, sgd, start_of
from tests.torch.states import assert_unchanged, draw_everywhere, fingerprint

NAN, INF = float("nan"), float("inf")
BATCHES = rows(9, updates=4)
SPLIT = 3


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class SpoilGradient(torch.autograd.Function):
    """Identity that multiplies its gradient by a number: finite losses with non-finite gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def spoil_input(batch: Any, row: int, value: float = NAN) -> Any:
    x, *rest = batch
    x = x.clone()
    x[row, 0] = value
    return (x, *rest)


class Task:
    """Model with dropout and an updated buffer, trained with AdamW and a scheduler.

    An input above 1e6 gives a finite loss with an infinite gradient, of the second layer only.
    """

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)).double()
        self.model.register_buffer("seen", torch.zeros(()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.draws = False
        self.accumulate = Accumulator(
            self.model,
            self.optimizer,
            self.loss_fn,
            microbatch_size=SPLIT,
            scheduler=self.scheduler,
            **options,
        )

    def loss_fn(self, microbatch: Any) -> Tensor:
        x, y = microbatch
        if self.draws:
            draw_everywhere()
        self.model.seen += len(x)  # type: ignore[operator]
        hidden = self.model[1](self.model[0](x))
        weight, bias = self.model.get_parameter("3.weight"), self.model.get_parameter("3.bias")
        if x.abs().max() > 1e6:
            weight = SpoilGradient.apply(weight, INF)
        return nn.functional.mse_loss(nn.functional.linear(self.model[2](hidden), weight, bias), y)

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint(self.model, self.optimizer, self.scheduler, self.accumulate)


BAD: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "nan loss": (lambda b: spoil_input(b, 4), "micro-batch 1 of 0..2 with loss nan", "'0.weight'"),
    "-inf": (
        lambda b: (b[0], torch.where(torch.arange(9).unsqueeze(1) == 8, -1e200, b[1])),
        "micro-batch 2 of 0..2 with loss inf",
        "the loss is not finite",
    ),
    "finite loss, infinite gradient": (
        lambda b: spoil_input(b, 0, 1e7),
        "micro-batch 0 of 0..2 with loss ",
        "'3.weight'",
    ),
}


@pytest.mark.parametrize("draws", [False, True], ids=["", "draws"])
@pytest.mark.parametrize("name", list(BAD))
def test_raise_names_the_bad_micro_batch_and_restores_all_state(name: str, draws: bool):
    spoil, microbatch, where = BAD[name]
    task = Task(check=False)
    task.draws = draws
    task.accumulate(BATCHES[0])
    before = task.fingerprint()
    with pytest.raises(NonFiniteError, match=microbatch) as caught:
        task.accumulate(spoil(BATCHES[1]))
    assert where in str(caught.value)
    assert "No update was made" in str(caught.value)
    assert all(word in str(caught.value) for word in ("skip_microbatch", "skip_update"))
    assert_unchanged(before, task.fingerprint())


def test_generators_unused_in_the_first_window_are_restored_too():
    task = Task(check=False)
    task.accumulate(BATCHES[0])
    task.accumulate(BATCHES[1])
    task.draws = True  # from now on Python's and NumPy's generators are used
    before = task.fingerprint()
    with pytest.raises(NonFiniteError):
        task.accumulate(spoil_input(BATCHES[2], 4))
    assert_unchanged(before, task.fingerprint())


def test_the_next_window_is_that_of_a_run_without_the_bad_window():
    one, other = Task(check=False), Task(check=False)
    for batch in BATCHES[:2]:
        torch.manual_seed(1)
        one.accumulate(batch)
        torch.manual_seed(1)
        other.accumulate(batch)
    with pytest.raises(NonFiniteError):
        one.accumulate(spoil_input(BATCHES[2], 4))
    torch.manual_seed(2)
    one.accumulate(BATCHES[3])
    torch.manual_seed(2)
    other.accumulate(BATCHES[3])
    expected, actual = other.fingerprint(), one.fingerprint()
    identities = [key for key in expected if key.endswith("identity")]
    assert_unchanged(
        {k: v for k, v in expected.items() if k not in identities},
        {k: v for k, v in actual.items() if k not in identities},
    )


def test_skip_update_continues_exactly():
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model, optimizer, lambda mb: mse(model, mb), microbatch_size=SPLIT, nonfinite="skip_update"
    )
    accumulate(BATCHES[0])
    before = fingerprint(model, optimizer)
    skipped = accumulate(spoil_input(BATCHES[1], 4))
    assert_unchanged(before, fingerprint(model, optimizer))
    assert not skipped.made and skipped.grad_norm is None and math.isnan(skipped.loss)
    assert skipped.skipped is not None and "micro-batch 1 of 0..2 with loss nan" in skipped.skipped
    assert skipped.skipped.endswith(
        'Check that micro-batch, or pass nonfinite="skip_microbatch" to leave it and its weight out.'
    )
    accumulate(BATCHES[2])
    assert accumulate.updates == 2
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), [BATCHES[0], BATCHES[2]])
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_skip_microbatch_is_the_large_batch_without_it(value: float):
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model,
        optimizer,
        lambda mb: mse(model, mb),
        microbatch_size=4,
        nonfinite="skip_microbatch",
        max_grad_norm=0.1,
    )
    batches = rows(10, updates=3)
    updates = [accumulate(batches[0]), accumulate(spoil_input(batches[1], 4, value)), accumulate(batches[2])]
    assert [update.dropped for update in updates] == [(), (1,), ()]
    assert [update.weight for update in updates] == [10, 7, 10]
    left = tuple(torch.cat([t[:4], t[7:]]) for t in batches[1])
    seen = large_batch(
        sgd(reference.parameters()),
        lambda b: mse(reference, b),
        [batches[0], left, batches[2]],
        max_grad_norm=0.1,
    )
    assert all(norm > 0.2 for norm in seen.norms), "premise: the norms are clipped"
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert updates[1].loss == pytest.approx(seen.losses[1], rel=1e-12)
    assert updates[1].grad_norm == pytest.approx(seen.norms[1], rel=1e-12)


def test_skip_microbatch_detects_a_finite_loss_with_an_infinite_gradient():
    task = Task(nonfinite="skip_microbatch", check=False)
    update = task.accumulate(spoil_input(BATCHES[1], 0, 1e7))
    assert update.made and update.dropped == (0,) and update.weight == 6
    assert all(torch.isfinite(parameter).all() for parameter in task.model.parameters())
    assert float(task.model.seen) == 6, "a buffer that the micro-batch updated is restored"  # type: ignore[arg-type]


def test_a_window_of_bad_micro_batches_only():
    task = Task(nonfinite="skip_microbatch", check=False)
    task.accumulate(BATCHES[0])
    before = task.fingerprint()
    batch = BATCHES[1][0] * NAN, BATCHES[1][1]
    update = task.accumulate(batch)
    assert not update.made and update.dropped == (0, 1, 2) and update.weight == 0
    assert update.skipped is not None and "no weight" in update.skipped
    assert_unchanged(before, task.fingerprint())
    assert task.accumulate(BATCHES[2]).made


def test_skip_microbatch_excludes_its_running_statistics():
    torch.manual_seed(8)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    reference = copy.deepcopy(model)
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: mse(model, mb),
        microbatch_size=3,
        nonfinite="skip_microbatch",
        participants=[GhostBatchNorm()],
    )
    for number, batch in enumerate(BATCHES):
        bad = number % 2 == 1
        update = accumulate(spoil_input(batch, 4) if bad else batch)
        assert update.dropped == ((1,) if bad else ())
        reference(torch.cat([batch[0][:3], batch[0][6:]]) if bad else batch[0])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(
            getattr(model[0], name), getattr(reference[0], name), rtol=1e-12, atol=1e-12
        )


# -- weight 0 ----------------------------------------------------------------------------------------------


def weighted(model: nn.Module, batch: Any) -> Tensor:
    """Weighted mean. Its value and gradient are NaN if no sample has weight."""
    x, y, w = batch
    return ((model(x) - y).square().mean(1) * w).sum() / w.sum()


WEIGHTED = [(*batch, torch.tensor([1.0, 2, 3, 0, 0, 0, 4, 0, 5]).double()) for batch in rows(9, updates=2)]


@pytest.mark.parametrize("nonfinite", ["raise", "skip_microbatch", "skip_update"])
@pytest.mark.parametrize("returned", [False, True], ids=["ahead", "returned"])
def test_a_microbatch_without_weight_contributes_nothing(returned: bool, nonfinite: Any):
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    assert weighted(model, tuple(t[3:6] for t in WEIGHTED[0])).isnan(), "premise"

    def loss_fn(microbatch: Any) -> Any:
        loss = weighted(model, microbatch)
        return (loss, microbatch[2].sum()) if returned else loss

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=3,
        weight="returned" if returned else sample_weights("2"),
        nonfinite=nonfinite,
        check=False,
    )
    updates = [accumulate(batch) for batch in WEIGHTED]
    seen = large_batch(sgd(reference.parameters()), lambda b: weighted(reference, b), WEIGHTED)
    assert all(update.made for update in updates)
    assert [update.weight for update in updates] == [15.0, 15.0]
    assert [update.loss for update in updates] == pytest.approx(seen.losses, rel=1e-12)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_the_error_names_a_micro_batch_with_weight():
    """Micro-batch 0 has no weight and a NaN gradient; micro-batch 2 has an infinite gradient."""
    model = mlp()

    def loss_fn(microbatch: Any) -> Tensor:
        loss = weighted(model, microbatch)
        return SpoilGradient.apply(loss, INF) if float(microbatch[2].sum()) == 9.0 else loss

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, microbatch_size=3, weight=sample_weights("2"), check=False
    )
    x, y, w = WEIGHTED[0]
    order = torch.tensor([3, 4, 5, 0, 1, 2, 6, 7, 8])
    with pytest.raises(NonFiniteError, match=r"micro-batch 2 of 0\.\.2"):
        accumulate((x, y, w[order]))


def test_a_window_without_any_weight():
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model, optimizer, lambda mb: weighted(model, mb), weight=sample_weights("2"), check=False
    )
    accumulate(WEIGHTED[0])
    before = fingerprint(model, optimizer)
    x, y, w = WEIGHTED[1]
    update = accumulate((x, y, w * 0))
    assert not update.made and update.weight == 0 and math.isnan(update.loss)
    assert_unchanged(before, fingerprint(model, optimizer))


# -- the scaler --------------------------------------------------------------------------------------------


def test_an_overflow_skips_update_and_scheduler_and_training_continues_exactly():
    """A simulated overflow, as at the start of fp16 training."""
    torch.manual_seed(9)
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    optimizer, theirs = sgd(model.parameters()), sgd(reference.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    spoiled = [False]

    def loss_fn(microbatch: Any) -> Tensor:
        loss = mse(model, microbatch)
        return SpoilGradient.apply(loss, INF) if spoiled[0] else loss

    accumulate = Accumulator(
        model,
        optimizer,
        loss_fn,
        microbatch_size=SPLIT,
        scaler=scaler,
        scheduler=scheduler,
        max_grad_norm=0.1,
    )
    updates = []
    for number, batch in enumerate(BATCHES):
        spoiled[0] = number == 1
        before = fingerprint(model, optimizer, scheduler)
        updates.append(accumulate(batch))
        if spoiled[0]:
            assert_unchanged(before, fingerprint(model, optimizer, scheduler))
            assert scaler.get_scale() == 2.0**9
    assert [update.made for update in updates] == [True, False, True, True]
    assert updates[1].skipped is not None and "overflow" in updates[1].skipped
    assert scaler.get_scale() == 2.0**9
    large_batch(
        theirs,
        lambda b: mse(reference, b),
        [BATCHES[0], *BATCHES[2:]],
        max_grad_norm=0.1,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5),
    )
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_nan_loss_does_not_change_the_scaler():
    model = mlp()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accumulate = Accumulator(
        model,
        optimizer,
        lambda mb: mse(model, mb),
        microbatch_size=SPLIT,
        scaler=scaler,
        nonfinite="skip_update",
    )
    accumulate(BATCHES[0])
    before = fingerprint(model, optimizer, scaler)
    assert not accumulate(spoil_input(BATCHES[1], 4)).made
    assert_unchanged(before, fingerprint(model, optimizer, scaler))
    assert accumulate(BATCHES[2]).made


def test_a_window_without_gradient_does_not_change_the_scaler():
    model, other = mlp(), mlp()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    used = [other]
    accumulate = Accumulator(
        model, optimizer, lambda mb: mse(used[0], mb), microbatch_size=SPLIT, scaler=scaler, check=False
    )
    before = fingerprint(model, optimizer, scaler)
    with pytest.raises(TypeError, match="No parameter of the optimizer received a gradient"):
        accumulate(BATCHES[0])
    assert_unchanged(before, fingerprint(model, optimizer, scaler))
    used[0] = model
    assert accumulate(BATCHES[0]).made


def test_a_scaler_with_two_optimizers_one_without_a_gradient():
    first, second = mlp(), mlp()
    optimizers = [sgd(first.parameters()), sgd(second.parameters())]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    both = [False]

    def loss_fn(microbatch: Any) -> Tensor:
        return mse(first, microbatch) + (mse(second, microbatch) if both[0] else 0.0)

    accumulate = Accumulator(
        [first, second], optimizers, loss_fn, microbatch_size=SPLIT, scaler=scaler, check=False
    )
    reference, start = copy.deepcopy(second), start_of(second)
    assert accumulate(BATCHES[0]).made
    both[0] = True
    assert accumulate(BATCHES[1]).made
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), [BATCHES[1]])
    assert_same_parameters(reference, second, 1e-12, start=start)


def test_the_users_loop_names_the_parameter():
    task = Task(check=False)
    accumulate = Accumulator(task.model, task.optimizer, microbatch_size=SPLIT)
    before = fingerprint(task.model, task.optimizer)
    with (
        pytest.raises(NonFiniteError, match=r"'3\.weight'"),
        accumulate.window(spoil_input(BATCHES[0], 0, 1e7)) as window,
    ):
        for microbatch in window:
            window.backward(task.loss_fn(microbatch))
    assert_unchanged(before, fingerprint(task.model, task.optimizer))


def test_momentum_accumulation_restores_the_buffers():
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model, optimizer, lambda mb: mse(model, mb), microbatch_size=SPLIT, gradient_sum="momentum"
    )
    for updates in range(2):  # before the first update there is no buffer yet
        before = fingerprint(model, optimizer)
        with pytest.raises(NonFiniteError, match="micro-batch 1"):
            accumulate(spoil_input(BATCHES[1], 4))
        assert_unchanged(before, fingerprint(model, optimizer))
        accumulate(BATCHES[updates])


def test_a_window_of_given_microbatches():
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb))
    microbatches = [tuple(t[i : i + 3] for t in BATCHES[0]) for i in (0, 3, 6)]
    microbatches[2] = spoil_input(microbatches[2], 1)
    with pytest.raises(NonFiniteError, match=r"micro-batch 2 of 0\.\.2 with loss nan"):
        accumulate(Window(microbatches))


ADVISED: dict[str, dict[str, Any]] = {
    "a mean": {},
    "a sum": {"reduction": "sum"},
    "a total": {"reduction": "total"},
    "terms": {"weight": {"one": None, "other": None}},
    "the momentum buffer": {"gradient_sum": "momentum"},
}


@pytest.mark.parametrize("nonfinite", ["raise", "skip_update"])
@pytest.mark.parametrize("case", ADVISED)
def test_the_advised_policies_work_with_the_other_options(case: str, nonfinite: str) -> None:
    model, options = mlp(), ADVISED[case]
    several = isinstance(options.get("weight"), dict)

    def make(policy: Any) -> Accumulator:
        def loss_fn(microbatch: Any) -> Any:
            loss = mse(model, microbatch)
            return {"one": loss, "other": 2 * loss} if several else loss

        optimizer, given = sgd(model.parameters()), dict(options)
        return Accumulator(
            model, optimizer, loss_fn, microbatch_size=SPLIT, check=False, nonfinite=policy, **given
        )

    batch = spoil_input(BATCHES[0], 4)
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError) as caught:
            make(nonfinite)(batch)
        text = str(caught.value)
    else:
        text = make(nonfinite)(batch).skipped or ""
    advised = re.findall(r'nonfinite="(\w+)"', text)
    assert advised == [
        *(["skip_microbatch"] if case in ("a mean", "a sum") else []),
        *(["skip_update"] if nonfinite == "raise" else []),
    ]
    for policy in advised:
        update = make(policy)(batch)
        assert update.made == (policy == "skip_microbatch")
