"""`lr_survey`: its measurements, its options, its ends, and that it does not change the training."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from superbatch import InputError, LossSpecError, OptimizerError, WindowError
from superbatch.torch import Accumulator, WholeBatch, Window, count_tokens, windows
from superbatch.torch.options import GhostBatchNorm
from superbatch.torch.tuning import lr_survey, option_setter
from superbatch.torch.virtual.trace.tensor import VirtualTensor
from superbatch.tuning.survey import Sweep
from tests.torch.helpers import mlp, mse, rows, tiny_lm, token_mean, tokens
from tests.torch.states import assert_unchanged, fingerprint

module = sys.modules["superbatch.torch.tuning.lr_survey"]  # the attribute of this name is the function
POINTS = 14

# ---------------------------------------------------------------------------------------------- measurements


def simple(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, rate: float = 0.1, **options: Any
) -> tuple[nn.Module, Accumulator]:
    model = mlp()
    sgd = optimizer(model.parameters(), lr=rate)
    return model, Accumulator(model, sgd, lambda batch: mse(model, batch), **options)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, sweep: Sweep) -> list[float]:
    """Run the survey in plain PyTorch with unsplit batches."""
    losses = []
    for value, batch in zip(sweep.values, itertools.cycle(batches), strict=False):
        optimizer.param_groups[0]["lr"] = value
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        losses.append(loss.item())
        if not sweep.add(losses[-1]):
            break
        optimizer.step()
    return losses


@pytest.mark.parametrize("size", [None, 1, 4, 7])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_a_survey_is_training_with_a_growing_rate(size: int | None, make: Any) -> None:
    """Losses, suggestions and the end are those of a plain loop, for any size of micro-batches."""
    batches = rows(40, 4)
    _, accumulate = simple(make, microbatch_size=size)
    report = lr_survey(accumulate, batches, updates=60, low=1e-5, high=100.0)
    reference = mlp()
    sweep = Sweep("lr", 1e-5, 100.0, 60)
    by_hand(reference, make(reference.parameters(), lr=0.1), batches, sweep)
    expected = sweep.report()
    assert len(report.losses) == len(expected.losses) > 20
    lowest = 1 + expected.losses.index(min(expected.losses))
    assert report.losses[:lowest] == pytest.approx(expected.losses[:lowest], rel=1e-10)
    assert report.suggestions == expected.suggestions
    assert report.suggestions.reason is None, "premise: a rule suggests something"
    assert report.values == expected.values
    assert report.epochs == math.ceil(len(report.losses) / 4)


def test_the_loss_of_the_last_micro_batch_is_another_curve() -> None:
    """Lightning's range test records the loss of the last micro-batch."""
    batches, last = rows(10, 4), []
    model = mlp()

    def loss_fn(batch: Any) -> Tensor:
        loss = mse(model, batch)
        last.append(loss.item())
        return loss

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(model, sgd, loss_fn, microbatch_size=5, check=False)
    report = lr_survey(accumulate, batches, updates=40, low=1e-6, high=1e-2)
    assert len(last) == 80
    means = [(a + b) / 2 for a, b in zip(last[::2], last[1::2], strict=True)]
    assert report.losses == pytest.approx(means, rel=1e-12)
    errors = [abs(one - loss) / loss for one, loss in zip(last[1::2], report.losses, strict=True)]
    assert min(errors) > 0.05


def test_the_loss_is_weighted_by_tokens() -> None:
    batch = tokens([7, 1, 2, 7, 3, 1])
    model = tiny_lm()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(
        model, sgd, lambda b: token_mean(model, b), microbatch_size=2, weight=count_tokens("labels")
    )
    report = lr_survey(accumulate, [batch], updates=POINTS)
    assert report.losses[0] == pytest.approx(token_mean(model, batch).item(), rel=1e-12)
    means = [token_mean(model, {k: v[i : i + 2] for k, v in batch.items()}).item() for i in (0, 2, 4)]
    assert abs(sum(means) / 3 - report.losses[0]) > 1e-3, "premise: a mean of means is another number"


def test_the_stop_uses_the_smoothed_loss_of_the_window() -> None:
    """The survey continues although the loss of one window exceeds 4 times the best."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    ordinary = (torch.ones(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))
    loud = (torch.ones(4, 1, dtype=torch.float64), torch.tensor([[1.0], [1.0], [1.0], [6.0]]).double())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(model, sgd, lambda b: mse(model, b), microbatch_size=1)
    batches = [ordinary] * 20 + [loud] + [ordinary] * 79
    report = lr_survey(accumulate, batches, updates=100, low=1e-9, high=1e-8)
    assert report.losses[20] == pytest.approx(39 / 4, rel=1e-6)
    assert report.losses[20] > 4 * min(report.smooth), "premise: a rule on the raw loss would stop"
    assert (len(report.losses), report.stopped) == (100, None)


def test_windows_of_a_loader() -> None:
    """Three forms give the same survey. The tail is a shorter window, and then the batches restart."""
    microbatches = [rows(3, 1, seed=number)[0] for number in range(7)]
    model, accumulate = simple()
    grouped = lr_survey(accumulate, microbatches, accumulation_steps=3, updates=POINTS)
    called = lr_survey(accumulate, lambda: windows(microbatches, 3), updates=POINTS)
    listed = lr_survey(accumulate, list(windows(microbatches, 3)), updates=POINTS)
    assert grouped.losses == called.losses == listed.losses
    assert grouped.epochs == called.epochs == listed.epochs == 5, "14 points, 3 windows per epoch"
    tail = mse(model, microbatches[6]).item()
    assert grouped.losses[2] == pytest.approx(tail, rel=1e-3), "the rate is 1e-5 there"


def test_a_schedule_of_windows_continues_when_the_loader_restarts() -> None:
    """Windows of 1, 2, 3, ... micro-batches, with 6 per epoch: the second epoch ends inside the fifth one."""
    microbatches = [rows(3, 1, seed=number)[0] for number in range(6)]
    _, accumulate = simple()
    asked = []

    def grows(update: int) -> int:
        asked.append(update)
        return update + 1

    found = lr_survey(accumulate, microbatches, accumulation_steps=grows, updates=12)
    assert asked == list(range(12))
    assert found.epochs == 9, "1 + 2 + 3; 4 + a tail of 2; then one window per epoch, 7 times"
    _, accumulate = simple()
    slices = [slice(0, 1), slice(1, 3), slice(3, 6), slice(0, 4), slice(4, 6), *[slice(0, 6)] * 7]
    listed = lr_survey(accumulate, [Window(microbatches[each]) for each in slices], updates=12)
    assert found.losses == listed.losses


def test_a_function_makes_new_batches_for_each_epoch() -> None:
    begun = []

    def fresh() -> list[Any]:
        begun.append(len(begun))
        return rows(6, 5, seed=len(begun))

    _, accumulate = simple()
    report = lr_survey(accumulate, fresh, updates=POINTS)
    assert begun == [0, 1, 2]
    assert report.epochs == 3
    assert report.losses[0] != pytest.approx(report.losses[5], rel=1e-3), "premise: new data"


class Stateful(list[Any]):
    """A loader that saves its position, like those of torchdata."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self):
            self.position += 1
            yield self[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_stateful_loader_returns_to_its_position() -> None:
    loader = Stateful(rows(6, 5))
    loader.position = 2
    _, accumulate = simple()
    lr_survey(accumulate, loader, updates=POINTS)
    assert loader.position == 2


def test_a_survey_does_not_change_the_order_of_a_seeded_loader() -> None:
    x, y = rows(30, 1)[0]

    def loader() -> DataLoader[Any]:
        seeded = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True, generator=seeded)

    surveyed, plain = loader(), loader()
    _, accumulate = simple()
    lr_survey(accumulate, surveyed, updates=POINTS)
    for a, b in zip(surveyed, plain, strict=True):
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_suggestions_do_not_depend_on_the_split(split: int) -> None:
    batches = rows(48, 1)  # one batch, so that noise does not prevent a suggestion
    _, whole = simple()
    _, divided = simple(microbatch_size=split)
    one, other = (lr_survey(each, batches, updates=50) for each in (whole, divided))
    assert one.suggestions == other.suggestions
    assert one.suggestion is not None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_coupled_batch_is_surveyed_as_the_whole_batch(reduction: str) -> None:
    """The curve is that of the unsplit batch; separate micro-batches have another one."""
    batches, kinds = rows(12, 4), set[type[Tensor]]()

    def curve(accumulator: Callable[..., Any], **options: Any) -> tuple[float, ...]:
        torch.manual_seed(1)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)]
        model = nn.Sequential(*layers).double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_fn(batch: Any) -> Tensor:
            kinds.add(type(batch[0]))
            return nn.functional.mse_loss(model(batch[0]), batch[1], reduction=reduction)

        accumulate = accumulator(model, sgd, loss_fn, **options)
        losses = lr_survey(accumulate, batches, updates=POINTS, high=1e-2).losses
        assert not isinstance(accumulate, WholeBatch) or accumulate.coupling is None, "not its own window"
        assert losses[12] < 0.999 * losses[0], "premise: the third pass over the batches has other losses"
        return losses

    of_microbatches = {"participants": [GhostBatchNorm()], "check": False}
    unsplit = curve(Accumulator, reduction="total", **of_microbatches)
    assert kinds == {Tensor}
    coupled = curve(WholeBatch, microbatch_size=4)
    assert kinds == {Tensor, VirtualTensor}, "premise: the survey runs on a virtual batch"
    assert coupled == pytest.approx(unsplit, rel=1e-10)
    split = curve(Accumulator, reduction="total", microbatch_size=4, **of_microbatches)
    if reduction == "mean":
        split = tuple(loss / 3 for loss in split)  # three micro-batches
    assert split[0] != pytest.approx(unsplit[0], rel=1e-3), "premise: the samples are coupled"


# --------------------------------------------------------------------------------- options, groups, scheduler


def test_groups_keep_their_ratios() -> None:
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters(), "lr": 0.2},
    ]
    sgd = torch.optim.SGD(groups)
    seen: list[tuple[float, ...]] = []

    def loss_fn(batch: Any) -> Tensor:
        seen.append(tuple(group["lr"] for group in sgd.param_groups))
        return mse(model, batch)

    accumulate = Accumulator(model, sgd, loss_fn, check=False)
    report = lr_survey(accumulate, rows(6, 2), updates=POINTS, high=1e-2)
    assert report.ratios == pytest.approx((0.1, 1.0))
    assert [rate for _, rate in seen] == pytest.approx(report.values)
    assert [rate for rate, _ in seen] == pytest.approx([0.1 * value for value in report.values])
    assert [group["lr"] for group in sgd.param_groups] == [0.02, 0.2]


def test_a_scheduler_is_not_stepped_and_does_not_set_the_surveyed_rate() -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(sgd, lambda update: update / 10)
    assert sgd.param_groups[0]["lr"] == 0.0, "premise: the warm-up begins at zero"
    accumulate = Accumulator(model, sgd, lambda b: mse(model, b), scheduler=warm_up)
    plain = simple()[1]
    with_scheduler = lr_survey(accumulate, rows(6, 2), updates=POINTS)
    assert with_scheduler.losses == lr_survey(plain, rows(6, 2), updates=POINTS).losses
    assert (warm_up.last_epoch, sgd.param_groups[0]["lr"]) == (0, 0.0)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    model = mlp()
    rate = torch.tensor(0.01)
    adam = torch.optim.Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    accumulate = Accumulator(model, adam, lambda b: mse(model, b))
    report = lr_survey(accumulate, rows(6, 2), updates=POINTS, high=0.1)
    assert adam.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.01)
    other = lr_survey(simple(torch.optim.Adam, 0.01)[1], rows(6, 2), updates=POINTS, high=0.1)
    assert report.losses == pytest.approx(other.losses, rel=1e-5), "the rate is a float32"


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_momentum_is_surveyed(make: Any) -> None:
    model = mlp()
    optimizer = make(model.parameters(), lr=0.01)
    seen = []

    def loss_fn(batch: Any) -> Tensor:
        group = optimizer.param_groups[0]
        seen.append(group["betas"][0] if "betas" in group else group["momentum"])
        return mse(model, batch)

    accumulate = Accumulator(model, optimizer, loss_fn, check=False)
    report = lr_survey(accumulate, rows(6, 2), what="momentum", updates=20)
    assert seen == pytest.approx(report.values, rel=1e-15, abs=1e-200)
    assert (report.values[0], report.low, report.high) == (0.0, 0.0, 0.999)
    group = optimizer.param_groups[0]
    assert group.get("momentum", 0) == 0
    assert group.get("betas", (0.9, 0.999)) == (0.9, 0.999)


def test_momentum_is_surveyed_with_gradients_summed_into_its_buffer() -> None:
    curves = []
    for into in ("grad", "momentum"):
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        accumulate = Accumulator(
            model,
            sgd,
            lambda b, model=model: mse(model, b),
            gradient_sum="momentum" if into == "momentum" else "auto",
            microbatch_size=2,
        )
        curves.append(lr_survey(accumulate, rows(6, 2), what="momentum", updates=20).losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-12)


def test_weight_decay_is_surveyed_in_the_groups_with_weight_decay() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5)
    seen = []

    def loss_fn(batch: Any) -> Tensor:
        seen.append(tuple(group["weight_decay"] for group in optimizer.param_groups))
        return mse(model, batch)

    accumulate = Accumulator(model, optimizer, loss_fn, check=False)
    report = lr_survey(accumulate, rows(6, 2), what="weight_decay", updates=20, high=100.0)
    assert [decay for _, decay in seen] == pytest.approx(report.values)
    assert {decay for decay, _ in seen} == {0.0}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]


def test_an_optimizer_without_the_option_is_refused() -> None:
    _, accumulate = simple(torch.optim.Adagrad)
    with pytest.raises(OptimizerError, match=r"a parameter group has no such option"):
        lr_survey(accumulate, rows(6, 2), what="momentum")
    assert accumulate.updates == 0


def test_rates_of_several_optimizers_grow_together() -> None:
    model = mlp()
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    other = torch.optim.Adam(model[2].parameters(), lr=0.001)
    accumulate = Accumulator(model, [one, other], lambda b: mse(model, b))
    report = lr_survey(accumulate, rows(6, 2), updates=POINTS)
    assert report.ratios == pytest.approx((1.0, 0.01))
    assert (report.low, report.high) == (1e-7, 1.0)
    assert (one.state, other.state) == ({}, {})


def test_a_survey_of_a_model_an_optimizer_and_a_loss() -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    report = lr_survey((model, sgd, lambda b: mse(model, b)), rows(6, 2), updates=POINTS)
    assert report.losses == lr_survey(simple()[1], rows(6, 2), updates=POINTS).losses


def test_an_overflow_of_the_scaler_is_a_point_without_an_update() -> None:
    model = mlp(torch.float32)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    accumulate = Accumulator(model, sgd, lambda b: 100 * mse(model, b), scaler=scaler)
    report = lr_survey(accumulate, rows(6, 1, torch.float32), updates=POINTS, high=1e-4)
    assert 1 <= len(report.skipped) < POINTS
    assert report.skipped[0] == 0
    assert len(report.losses) == POINTS
    assert report.losses[0] == report.losses[1], "the skipped update changed nothing"
    assert scaler.state_dict()["scale"] == 2.0**127
    assert scaler._scale is None, "the next window initializes the scale again"


def test_a_survey_does_not_change_the_search_for_a_size() -> None:
    _, accumulate = simple(microbatch_size="largest")
    batches = rows(64, 2)
    before = accumulate.state_dict()
    lr_survey(accumulate, batches, updates=POINTS)
    assert accumulate.state_dict() == before
    assert accumulate.memory is None
    accumulate(batches[0])
    found = accumulate.state_dict()["sizing"]
    lr_survey(accumulate, rows(48, 2), updates=POINTS)
    assert accumulate.state_dict()["sizing"] == found


# ------------------------------------------------------------------------------------------- ends and errors


@pytest.mark.parametrize("nonfinite", ["raise", "skip_update", "skip_microbatch"])
def test_a_nonfinite_loss_ends_a_survey_without_an_error(nonfinite: Any) -> None:
    model = nn.Linear(2, 1).double()
    calls = itertools.count()

    def loss_fn(batch: Any) -> Tensor:
        loss = mse(model, batch)
        return loss * math.nan if next(calls) >= 14 else loss

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(model, sgd, loss_fn, microbatch_size=2, nonfinite=nonfinite, check=False)
    batch = (torch.randn(4, 2).double(), torch.randn(4, 1).double())
    report = lr_survey(accumulate, [batch], updates=20, low=1e-9, high=1e-8)
    assert len(report.losses) == 7
    assert report.stopped is not None
    assert "not finite" in report.stopped or "no weight" in report.stopped or "left out" in report.stopped


def test_a_wrong_declaration_is_refused_and_nothing_changes() -> None:
    model = tiny_lm()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(model, sgd, lambda b: token_mean(model, b), microbatch_size=2)
    before = fingerprint(model, sgd, accumulate)
    with pytest.raises(LossSpecError):
        lr_survey(accumulate, [tokens([7, 1, 2, 7])], updates=POINTS)
    assert_unchanged(before, fingerprint(model, sgd, accumulate))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (iter([1, 2]), "an iterator .*cannot start again.*Pass the DataLoader"),
        ((n for n in range(3)), "generator"),
        (windows([1, 2], 2), r"lambda: windows\(loader, 8\)"),
        (3, "A survey cannot iterate over batches of type int"),
        ([], "batches are empty, but"),
        (lambda: iter([]), "batches are empty, but"),
    ],
)
def test_batches_that_cannot_be_restarted(batches: Any, message: str) -> None:
    _, accumulate = simple()
    with pytest.raises(InputError, match=message):
        lr_survey(accumulate, batches)
    assert accumulate.updates == 0


def test_batches_that_are_empty_the_second_time_raise() -> None:
    once = iter(rows(6, 3))
    _, accumulate = simple()
    with pytest.raises(InputError, match="are empty the second time"):
        lr_survey(accumulate, lambda: once)


def test_a_survey_in_a_window_is_refused() -> None:
    model, accumulate = simple(microbatch_size=2)
    batch = rows(4, 1)[0]
    with accumulate.window(batch) as window:
        for microbatch in window:
            with pytest.raises(WindowError, match="in the middle of a window"):
                lr_survey(accumulate, [batch])
            window.backward(mse(model, microbatch))
    assert accumulate.updates == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "rate"}, "what='rate'"),
        ({"updates": 5}, r"an int of at least 12\. Pass at least 16"),
        ({"low": 1.0, "high": 0.1}, "not increasing positive numbers"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    _, accumulate = simple()
    with pytest.raises(InputError, match=message):
        lr_survey(accumulate, rows(4, 1), **options)


def test_a_model_in_place_of_an_accumulator_is_refused() -> None:
    with pytest.raises(InputError, match="cannot use a Linear"):
        lr_survey(nn.Linear(1, 1), [])  # pyright: ignore[reportArgumentType]


def test_an_accumulator_without_loss_fn_is_refused() -> None:
    model = mlp()
    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match="An Accumulator without loss_fn cannot make an update from a batch"):
        lr_survey(accumulate, rows(4, 1))


def test_a_survey_leaves_nothing_in_memory() -> None:
    import gc
    import weakref

    _, accumulate = simple(torch.optim.Adam)
    kept: list[Any] = []

    def watch(done: int, total: int) -> None:
        if done == 3:
            optimizer = accumulate.engine.config.rule.optimizers[0]
            kept.extend(weakref.ref(state["exp_avg"]) for state in optimizer.state.values())

    lr_survey(accumulate, rows(6, 2), updates=POINTS, progress=watch)
    gc.collect()
    assert len(kept) == 4
    assert [reference() for reference in kept] == [None] * 4
    assert accumulate.engine.config.until_next == []


def test_the_default_range_depends_on_the_optimizer() -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    assert option_setter.range_of([torch.optim.SGD(parameters, lr=1.0)], "lr") == (1e-6, 10.0)
    assert option_setter.range_of([torch.optim.RMSprop(parameters)], "lr") == (1e-7, 1.0)


def test_the_copy_shares_the_model_and_no_counter() -> None:
    _, accumulate = simple(microbatch_size=2, max_grad_norm=0.5)
    copied = accumulate.engine.copy_for_survey()
    assert copied.config.models == accumulate.engine.config.models
    assert copied.config.rule.max_grad_norm == 0.5
    copied.update(rows(4, 1)[0])
    assert (copied.updates, accumulate.updates, accumulate.engine.checked) == (1, 0, False)


def test_sums_in_the_momentum_buffer_give_the_same_survey_and_keep_the_buffer() -> None:
    curves = []
    for into in ("grad", "momentum"):
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        accumulate = Accumulator(
            model,
            sgd,
            lambda b, model=model: mse(model, b),
            microbatch_size=4,
            gradient_sum="momentum" if into == "momentum" else "auto",
        )
        accumulate(rows(10, 1)[0])
        before = fingerprint(model, sgd, accumulate)
        buffers = [state["momentum_buffer"] for state in sgd.state.values()]
        curves.append(lr_survey(accumulate, rows(10, 3), updates=30, high=0.01).losses)
        assert_unchanged(before, fingerprint(model, sgd, accumulate))
        now = [state["momentum_buffer"] for state in sgd.state.values()]
        assert all(a is b for a, b in zip(buffers, now, strict=True))
    assert curves[0] == pytest.approx(curves[1], rel=1e-11)
