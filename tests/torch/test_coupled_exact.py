"""`WholeBatch` makes the update of the real large batch for models and losses with coupled samples."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import (
    CoupledSamplesError,
    InputError,
    NonFiniteError,
    OutOfMemoryError,
    SplitError,
    WindowError,
)
from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, TokenBudget, WholeBatch, Window, windows
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm, PerSampleRandom, Split
from superbatch.torch.virtual.trace import recording
from tests.torch.helpers import assert_same_parameters, sgd, start_of
from tests.torch.states import assert_unchanged, fingerprint
from tests.torch.test_out_of_memory import FailAt, quiet

Batch = dict[str, Tensor]
EXACT = 1e-12
SAMPLES, SPLIT, UPDATES = 22, 4, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- tasks: a model and its loss over a batch ----------------------------------------------------------------


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6, momentum=None),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


class Towers(nn.Module):
    """Two towers and a learnt temperature, optionally with BatchNorm and dropout."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()

        def tower() -> nn.Module:
            between: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
            between += [nn.Dropout(dropout)] if dropout else []
            return nn.Sequential(nn.Flatten(), nn.Linear(49, 8), *between, nn.Tanh(), nn.Linear(8, 5))

        self.first, self.second = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = (nn.functional.normalize(z, dim=1) for z in (self.first(first), self.second(second)))
        return self.scale.exp() * a @ b.T


def info_nce(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["image"], batch["view"])
    partner = torch.arange(len(scores))
    return (nn.functional.cross_entropy(scores, partner) + nn.functional.cross_entropy(scores.T, partner)) / 2


def batches(updates: int = UPDATES, samples: int = SAMPLES) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.2, 2.0, samples).view(-1, 1, 1, 1)
    made = []
    for _ in range(updates):
        image = torch.randn(samples, 1, 7, 7, generator=generator) * spread + spread
        view = image + 0.3 * torch.randn(samples, 1, 7, 7, generator=generator)
        label = torch.randint(3, (samples,), generator=generator)
        made.append({"image": image.double(), "view": view.double(), "label": label})
    return made


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor]]] = {
    "BatchNorm": (conv_net, classify),
    "InfoNCE": (Towers, info_nce),
    "BatchNorm and InfoNCE": (lambda: Towers(norm=True), info_nce),
    "dropout": (lambda: Towers(norm=True, dropout=0.3), info_nce),
}


def model_of(task: str) -> nn.Module:
    torch.manual_seed(11)
    return TASKS[task][0]().double()


class Twins:
    """A reference, trained with the real large batch in plain PyTorch, and a model under test."""

    def __init__(
        self,
        task: str = "BatchNorm",
        *,
        clip: float | None = None,
        decay: float | None = None,
        **options: Any,
    ) -> None:
        self.loss = TASKS[task][1]
        self.reference = model_of(task)
        self.model = copy.deepcopy(self.reference)
        self.start = start_of(self.reference)
        self.clip = clip
        self.theirs, self.ours = sgd(self.reference.parameters()), sgd(self.model.parameters())
        schedulers = [
            None if decay is None else torch.optim.lr_scheduler.ExponentialLR(one, decay)
            for one in (self.theirs, self.ours)
        ]
        self.scheduler = schedulers[0]
        self.accumulate = WholeBatch(
            self.model,
            self.ours,
            lambda batch: self.loss(self.model, batch),
            max_grad_norm=clip,
            scheduler=schedulers[1],
            **{"microbatch_size": SPLIT, **options},
        )

    def plain(self, **options: Any) -> Accumulator:
        """Return an accumulator of the model under test, for which samples are not coupled."""
        return Accumulator(
            self.model,
            self.ours,
            lambda batch: self.loss(self.model, batch),
            microbatch_size=SPLIT,
            **options,
        )

    def large(self, batch: Batch) -> tuple[float, float]:
        """Make one update of the reference; return its loss and gradient norm."""
        loss = self.loss(self.reference, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.reference.parameters(), self.clip or float("inf"))
        self.theirs.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.theirs.zero_grad()
        return loss.item(), norm.item()

    def check(self, tolerance: float = EXACT) -> None:
        """Check that parameters and buffers equal those of the reference, which has been trained."""
        assert_same_parameters(self.reference, self.model, tolerance, start=self.start)
        ours = dict(self.model.named_buffers())
        for name, expected in self.reference.named_buffers():
            assert ours[name].dtype == expected.dtype
            error = (ours[name].double() - expected.double()).norm()
            assert error <= tolerance * expected.double().norm(), f"{name}: {error:.1e}"
        assert all(parameter.grad is None for parameter in self.model.parameters())


# -- equal to the large batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, SPLIT, 9, SAMPLES, None])
@pytest.mark.parametrize("task", TASKS)
def test_three_updates_are_those_of_the_large_batch(task: str, size: int | None) -> None:
    twins = Twins(task, microbatch_size=size, rng="batch")
    for number, batch in enumerate(batches()):
        torch.manual_seed(number)
        loss, norm = twins.large(batch)
        torch.manual_seed(number)
        update = twins.accumulate(batch)
        assert update.made
        assert abs(update.loss - loss) <= EXACT * abs(loss)
        assert update.grad_norm is not None and abs(update.grad_norm - norm) <= 10 * EXACT * norm
        assert (update.samples, update.weight) == (SAMPLES, SAMPLES)
        assert update.microbatches == -(-SAMPLES // (size or SAMPLES))
        assert update.seconds > 0 and update.failures == 0
    assert twins.accumulate.updates == UPDATES
    twins.check()


def test_plain_accumulation_is_not_that_update() -> None:
    """The premise of the test above: the samples of these tasks are coupled."""
    for task in ("BatchNorm", "InfoNCE"):
        twins = Twins(task)
        accumulate = twins.plain(participants=[GhostBatchNorm()], check=False)
        for batch in batches():
            twins.large(batch)
            assert accumulate(batch).made
        with pytest.raises(AssertionError, match="not the update of the large batch"):
            twins.check(1e-2)


def test_dropout_is_drawn_by_micro_batch_by_default() -> None:
    """The masks are not those of the large batch, but the same seed repeats them."""
    twins, again = Twins("dropout"), Twins("dropout")
    for one in (twins, again):
        torch.manual_seed(4)
        one.accumulate(batches()[0])
    assert_same_parameters(again.model, twins.model, 0.0, start=twins.start)
    torch.manual_seed(4)
    twins.large(batches()[0])
    with pytest.raises(AssertionError, match="not the update of the large batch"):
        twins.check()


def test_a_summed_loss_is_not_weighted_or_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum") / 7

    monkeypatch.setitem(TASKS, "sum", (conv_net, summed))
    twins = Twins("sum")
    for batch in batches():
        loss, _ = twins.large(batch)
        assert twins.accumulate(batch).loss == pytest.approx(loss, rel=EXACT)
    twins.check()


def test_clipping_and_a_scheduler_with_the_gradient_of_the_batch() -> None:
    twins = Twins("BatchNorm and InfoNCE", clip=0.05, decay=0.5)
    rates = []
    for batch in batches():
        _, norm = twins.large(batch)
        update = twins.accumulate(batch)
        assert norm > 0.05, "premise: there is something to clip"
        assert update.grad_norm == pytest.approx(norm, rel=1e-10)
        rates.append(update.learning_rates)
    assert rates == [(0.1,), (0.05,), (0.025,)]
    twins.check()


def test_a_clipped_gradient_that_two_parameters_share_is_clipped_once() -> None:
    """Autograd gives one gradient tensor to both terms of a sum."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(49)), nn.Parameter(torch.ones(49))
            self.norm = nn.BatchNorm1d(49)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(1)) * (self.a + self.b)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["image"]) - 1).square().mean()

    TASKS["shared"] = (Sum, loss)
    try:
        twins = Twins("shared", clip=0.01)
        for batch in batches():
            twins.large(batch)
            twins.accumulate(batch)
        assert twins.clip is not None
        unchanged = [
            name for name, value in twins.model.named_parameters() if torch.equal(value, twins.start[name])
        ]
        assert not unchanged
        twins.check()
    finally:
        del TASKS["shared"]


def test_several_models_and_optimizers_and_a_parameter_outside_of_them() -> None:
    """A temperature outside of the models is trained; a parameter of no optimizer keeps its gradient."""

    def train(*, whole: bool) -> dict[str, Tensor]:
        model = model_of("BatchNorm and InfoNCE")
        assert isinstance(model, Towers)
        outside = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
        other = nn.Parameter(torch.ones(5, dtype=torch.float64))
        model.register_parameter("other", other)
        other.grad = torch.full_like(other, 7.0)

        def loss_fn(batch: Batch) -> Tensor:
            return (
                info_nce(model, batch) * outside.exp() + (model.first(batch["image"]) * other).square().mean()
            )

        first = sgd([*model.first.parameters(), outside])
        second = torch.optim.SGD([*model.second.parameters(), model.scale], lr=0.3, weight_decay=0.1)
        if whole:
            accumulate = WholeBatch([model], [first, second], loss_fn, microbatch_size=SPLIT)
            for batch in batches():
                assert accumulate(batch).made
        else:
            for batch in batches():
                loss_fn(batch).backward()
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
                other.grad = torch.full_like(other, 7.0)
        assert other.grad is not None and bool((other.grad == 7).all())
        named = {name: value.detach() for name, value in model.named_parameters() if name != "other"}
        return {**named, "outside": outside.detach()}

    ours, theirs = train(whole=True), train(whole=False)
    start = {**start_of(model_of("BatchNorm and InfoNCE")), "outside": torch.tensor(0.5)}
    for name, expected in theirs.items():
        change = (expected - start[name]).norm()
        assert change > 0, f"premise: {name} was updated"
        assert (ours[name] - expected).norm() <= 1e-11 * change, name


def test_frozen_batchnorm_with_a_coupled_loss() -> None:
    twins = Twins("BatchNorm and InfoNCE", participants=[FrozenBatchNorm()])
    twins.reference.eval()
    for batch in batches():
        twins.large(batch)
        twins.accumulate(batch)
        assert twins.model.training
    twins.check()
    report = twins.accumulate.coupling
    assert report is not None
    assert not any(point.module.endswith(".2") for point in report.points), "BatchNorm is no coupling point"


def test_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    twins = Twins("BatchNorm and InfoNCE", scaler=scaler, clip=0.05)
    for batch in batches():
        _, norm = twins.large(batch)
        assert twins.accumulate(batch).grad_norm == pytest.approx(norm, rel=1e-10)
    assert scaler.get_scale() == 2.0**11, "it grows, so it was updated once per update"
    twins.check()


def test_masters_of_low_precision_parameters() -> None:
    """The engine sums in another order, so the error is measured against the large batch in float64."""
    reference = model_of("InfoNCE")
    model = copy.deepcopy(reference).bfloat16()
    masters = fp32_masters(model)
    with torch.no_grad():
        for name, value in reference.named_parameters():
            value.copy_(masters[dict(model.named_parameters())[name]].double())
    accumulate = WholeBatch(
        model,
        MasterWeights(torch.optim.SGD(masters.values(), lr=0.1), masters),
        lambda batch: info_nce(model, batch).float(),
        microbatch_size=SPLIT,
    )
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    start = start_of(reference)
    (batch,) = batches(1)
    info_nce(reference, batch).backward()
    theirs.step()
    update = accumulate({name: v.bfloat16() if v.is_floating_point() else v for name, v in batch.items()})
    assert update.made
    for name, parameter in model.named_parameters():
        master, expected = masters[parameter].double(), dict(reference.named_parameters())[name]
        assert masters[parameter].dtype == torch.float32
        assert torch.equal(masters[parameter].bfloat16(), parameter)
        change = (expected - start[name]).norm()
        assert (master - expected).norm() < 0.1 * change, name


# -- windows and batches -------------------------------------------------------------------------------------


def test_windows_of_a_loader_are_joined_into_one_batch() -> None:
    twins = Twins("BatchNorm and InfoNCE", microbatch_size=None)
    microbatches = [
        {name: value[start:stop] for name, value in batch.items()}
        for batch in batches()
        for start, stop in ((0, 9), (9, 13), (13, SAMPLES))
    ]
    assert len({len(mb["label"]) for mb in microbatches}) > 1, "premise: micro-batches of different sizes"
    for window, batch in zip(windows(microbatches, 3), batches(), strict=True):
        twins.large(batch)
        update = twins.accumulate(window)
        assert (update.samples, update.microbatches) == (SAMPLES, 3)
    twins.check()


def test_a_tail_is_a_batch_of_its_own_size() -> None:
    twins = Twins()
    made = batches()
    tail = {name: value[:5] for name, value in made[1].items()}
    for batch in (made[0], tail, made[2]):
        twins.large(batch)
        update = twins.accumulate(batch)
        assert update.microbatches == -(-len(batch["label"]) // SPLIT)
    twins.check()


@pytest.mark.parametrize(
    ("microbatches", "text"),
    [
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            r"samples of the shapes \(3,\), \(4,\).*Pad them to one shape",
        ),
        ([{"x": torch.ones(2), "rate": 1}, {"x": torch.ones(2), "rate": 2}], "parts 'rate' differ"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "different entries"),
        ([(torch.ones(2),), [torch.ones(2)]], "different types"),
    ],
)
def test_micro_batches_that_cannot_be_joined(microbatches: list[Any], text: str) -> None:
    twins = Twins()
    before = fingerprint(twins.model, twins.ours, twins.accumulate)
    with pytest.raises(SplitError, match=text):
        twins.accumulate(Window(microbatches))
    assert_unchanged(before, fingerprint(twins.model, twins.ours, twins.accumulate))


def test_structures_arrays_and_names_are_joined() -> None:
    from superbatch.torch.window.joining import joined

    def samples(start: int, stop: int) -> Any:
        x = torch.arange(start, stop)
        return {
            "x": (x, [x * 2.0]),
            "array": numpy.arange(start, stop),
            "names": [f"{i}" for i in x],
            "lr": 0.1,
        }

    whole, expected = joined([samples(0, 3), samples(3, 4)]), samples(0, 4)
    assert torch.equal(whole["x"][0], expected["x"][0])
    assert torch.equal(whole["x"][1][0], expected["x"][1][0])
    assert whole["array"].tolist() == expected["array"].tolist()
    assert (whole["names"], whole["lr"]) == (expected["names"], 0.1)


def test_the_report_names_the_coupling_points() -> None:
    assert Twins().accumulate.coupling is None
    accumulate = Twins("BatchNorm and InfoNCE").accumulate
    accumulate(batches()[0])
    report = accumulate.coupling
    assert report is not None
    assert (report.samples, report.microbatches) == (SAMPLES, 6)
    assert [point.module for point in report.points][:2] == ["first.2", "second.2"]
    assert not hasattr(Twins("BatchNorm").plain(participants=[FrozenBatchNorm()]), "coupling")


# -- errors --------------------------------------------------------------------------------------------------


def test_the_accumulator_refuses_coupled_samples_and_names_the_choices() -> None:
    with pytest.raises(
        CoupledSamplesError, match=r"Use superbatch\.torch\.WholeBatch.*FrozenBatchNorm.*GhostBatchNorm"
    ):
        Twins("BatchNorm").plain()(batches()[0])
    with pytest.raises(CoupledSamplesError, match=r"samples influence each other.*use WholeBatch"):
        Twins("InfoNCE").plain()(batches()[0])


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"gradient_sum": "momentum"},
        {"split": Split(unsplit=("view",))},
        {"observers": [NoiseMeter()]},
        {"check": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_for_separate_samples_do_not_exist(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(options))}'"):
        Twins("BatchNorm", **options)


def test_options_of_other_libraries_raise_with_the_right_name() -> None:
    with pytest.raises(InputError, match=r"WholeBatch has no option lr_scheduler=.*pass scheduler="):
        Twins("BatchNorm", lr_scheduler=None)
    with pytest.raises(InputError, match=r"WholeBatch has no option weights=.*pass weight="):
        Twins("BatchNorm", weights=None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"nonfinite": "skip_microbatch"},
            'of coupled samples cannot be left out.*nonfinite="skip_update" or "raise"',
        ),
        ({"participants": [GhostBatchNorm()]}, "GhostBatchNorm normalises each micro-batch by itself"),
        ({"participants": [PerSampleRandom()]}, 'needs samples that are not coupled.*rng="batch"'),
        *(
            (
                {"microbatch_size": size},
                f'{text} is not a number of samples. Pass a positive int, "auto", or',
            )
            for size, text in [
                ("largest", "microbatch_size='largest'"),
                (TokenBudget(9), r"microbatch_size=TokenBudget\(.*\)"),
                (0, "microbatch_size=0"),
                (True, "microbatch_size=True"),
                ("abc", "microbatch_size='abc'"),
                (numpy.array([1, 2]), r"microbatch_size=array\(.*\)"),
            ]
        ),
        ({"rng": "yes"}, "rng='yes'.*Pass one of 'microbatch', 'batch'"),
        ({"rng": None}, "rng=None.*Pass one of 'microbatch', 'batch'"),
    ],
)
def test_wrong_option_values(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Twins("BatchNorm", **options)


def test_loss_fn_is_required_and_there_is_no_window() -> None:
    model = model_of("BatchNorm")
    loss_fn: Any = None
    with pytest.raises(InputError, match=r"loss_fn=None.*called once, with the whole batch"):
        WholeBatch(model, sgd(model.parameters()), loss_fn)
    assert not hasattr(Twins().accumulate, "window")


def test_a_weight_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(InputError, match=r"weight='returned' is not a function.*count_tokens"):
        Twins("BatchNorm", weight="returned")


def test_a_packed_batch_is_refused() -> None:
    twins = Twins()
    packed = {"x": torch.ones(6, 2), "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)}
    with pytest.raises(
        SplitError,
        match=r"^A batch of 2 coupled samples contains a tensor of length 6.*Pass a padded batch",
    ):
        twins.accumulate(packed)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"x": torch.ones(6, 2), "mask": torch.ones(5, 5)},
            "'x': 6, 'mask': 5.*loss_fn read everything else",
        ),
        ({"x": torch.ones(6, 2), "graph": object()}, "path 'graph'.*loss_fn read everything else"),
        (
            {"x": torch.ones(2, 2), "boxes": [{"at": 1}, {"at": 2}]},
            "list of per-sample targets.*Pad the targets to",
        ),
        (3, "nothing to split.*Pass tensors with one row per sample"),
        ({"x": numpy.ones((6, 2)), "name": "six"}, "6 coupled samples contains no tensor.*torch.from_numpy"),
        (["a", "b"], "2 coupled samples contains no tensor.*Make tensors of them before the call"),
    ],
)
def test_a_batch_that_cannot_be_virtual(batch: Any, text: str) -> None:
    """The error does not advise options that WholeBatch refuses."""
    twins = Twins()
    before = fingerprint(twins.model, twins.ours, twins.accumulate)
    for given in (batch, Window([batch])):
        with pytest.raises(SplitError, match=text) as caught:
            twins.accumulate(given)
        assert "split=" not in str(caught.value) and "per_sample" not in str(caught.value)
    assert_unchanged(before, fingerprint(twins.model, twins.ours, twins.accumulate))


@pytest.mark.parametrize("size", [SPLIT, "auto"])
def test_a_loss_that_ignores_its_argument_warns(size: Any) -> None:
    """The update is right, but it takes the memory of the whole batch."""
    twins = Twins(microbatch_size=size)
    (batch,) = batches(1)
    twins.loss = lambda model, given: classify(model, batch)
    with pytest.warns(
        UserWarning, match=r"tensors from its closure.*whole batch.*at once.*argument of loss_fn"
    ):
        update = twins.accumulate(batch)
    assert twins.accumulate.coupling is not None
    assert update.microbatches == twins.accumulate.coupling.microbatches == 1
    twins.loss = classify
    twins.large(batch)
    twins.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twins.accumulate(batch).microbatches == (6 if size == SPLIT else 1)
        twins.loss = lambda model, given: classify(model, {**batch, "label": given["label"]})
        assert twins.accumulate(batch).microbatches == (6 if size == SPLIT else 1), "labels of the argument"


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda loss: (loss, 3), "The loss is a tuple, not a tensor. Return only the loss."),
        (lambda loss: loss.item(), "The loss is a float, not a tensor. Return the loss as a tensor"),
        (lambda loss: None, "The loss is a NoneType, not a tensor. Return the loss as a tensor"),
        (lambda loss: loss.detach(), "a loss without a graph"),
        (lambda loss: loss * torch.ones(2), r"a loss of shape \(2,\).*Return its mean over the batch"),
    ],
)
def test_a_wrong_result_of_loss_fn(returned: Callable[[Tensor], Any], text: str) -> None:
    twins = Twins("dropout")
    loss, twins.loss = twins.loss, lambda model, batch: returned(loss(model, batch))
    before = fingerprint(twins.model, twins.ours, twins.accumulate)
    with pytest.raises(InputError, match=text) as caught:
        twins.accumulate(batches()[0])
    for refused in ("weight=", "reduction=", "split=", "per_sample"):
        assert refused not in str(caught.value)
    assert_unchanged(before, fingerprint(twins.model, twins.ours, twins.accumulate))


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before_backward", [True, False])
def test_an_exception_restores_everything(before_backward: bool) -> None:
    twins = Twins("dropout", decay=0.5)
    first, second, third = batches()
    twins.accumulate(first)
    before = fingerprint(twins.model, twins.ours, twins.accumulate)
    loss = twins.loss

    def stop(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    def failing(model: nn.Module, batch: Batch) -> Tensor:
        value = loss(model, batch)
        random.random()
        value.item()  # materializes the loss
        if before_backward:
            raise KeyboardInterrupt
        value.register_hook(stop)
        return value

    twins.loss = failing
    with pytest.raises(KeyboardInterrupt):
        twins.accumulate(second)
    assert_unchanged(before, fingerprint(twins.model, twins.ours, twins.accumulate))
    twins.loss = loss
    assert twins.accumulate(third).made


class InfiniteGradient(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nonfinite_loss_or_gradient(where: str) -> None:
    def nonfinite_loss(model: nn.Module, batch: Batch) -> Tensor:
        value = classify(model, batch)
        return value * float("nan") if where == "loss" else InfiniteGradient.apply(value)  # pyright: ignore[reportReturnType]  (apply is untyped)

    twins = Twins(decay=0.5)
    skipping = Twins(decay=0.5, nonfinite="skip_update")
    first, second, third = batches()
    for one in (twins, skipping):
        one.accumulate(first)
        one.loss = nonfinite_loss
    before = fingerprint(twins.model, twins.ours, twins.accumulate)
    with pytest.raises(
        NonFiniteError, match=f"a batch with loss .* the {where} is not finite.*Check that batch, or pass"
    ):
        twins.accumulate(second)
    assert_unchanged(before, fingerprint(twins.model, twins.ours, twins.accumulate))
    before = fingerprint(skipping.model, skipping.ours)
    update = skipping.accumulate(second)
    assert_unchanged(before, fingerprint(skipping.model, skipping.ours))
    assert not update.made and update.microbatches == 6
    assert update.skipped is not None and f"the {where} is not finite" in update.skipped
    assert update.skipped.endswith("Check that batch.")
    for one in (twins, skipping):
        one.loss = classify
        assert one.accumulate(third).made
    skipping.large(first)
    skipping.large(third)
    skipping.check()


def test_an_overflow_lowers_the_scale_and_changes_nothing_else() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    twins = Twins(scaler=scaler, decay=0.5)
    first, second, third = batches()
    twins.accumulate(first)
    before = fingerprint(twins.model, twins.ours)
    twins.loss = lambda model, batch: InfiniteGradient.apply(classify(model, batch))  # pyright: ignore[reportAttributeAccessIssue]  (apply is untyped)
    update = twins.accumulate(second)
    assert update.skipped is not None and "overflow" in update.skipped
    assert scaler.get_scale() == 2.0**9
    parameters = {name for name in before if "num_batches" not in name and "running" not in name}
    after = fingerprint(twins.model, twins.ours)
    assert_unchanged({n: before[n] for n in parameters}, {n: after[n] for n in parameters})
    twins.loss = classify
    assert twins.accumulate(third).made


# -- memory --------------------------------------------------------------------------------------------------


def test_memory_runs_out_at_any_operation() -> None:
    """The batch is computed again in micro-batches of half the size, to the same update."""

    def train(at: int | None) -> tuple[Twins, FailAt, list[Any], str | None]:
        twins, fail, updates, error = Twins("dropout", rng="batch"), FailAt(), [], None
        torch.manual_seed(0)
        with quiet():
            for number, batch in enumerate(batches()):
                if number != 1:
                    updates += [] if error and "Load a checkpoint" in error else [twins.accumulate(batch)]
                    continue
                with fail:
                    fail.arm(-1 if at is None else at)
                    try:
                        updates.append(twins.accumulate(batch))
                    except (OutOfMemoryError, RuntimeError) as raised:
                        error = str(raised)
                        # After a torn update, no other is made until a state is loaded.
                        updates += [] if "Load a checkpoint" in error else [twins.accumulate(batch)]
        return twins, fail, updates, error

    reference, whole, updates, _ = train(None)
    assert [update.microbatches for update in updates] == [6, 6, 6]
    recovered = at_the_update = absorbed = 0
    for at in range(0, whole.count, 97):
        twins, fail, updates, error = train(at)
        assert len(fail.failed) == 1, "premise: memory ran out once"
        if error is not None and "Load a checkpoint" in error:
            continue
        assert_same_parameters(reference.model, twins.model, EXACT, start=reference.start)
        for name, buffer in reference.model.named_buffers():
            assert torch.allclose(dict(twins.model.named_buffers())[name], buffer, rtol=EXACT), name
        if error is None and not updates[1].failures:
            absorbed += 1
        elif error is None:
            assert (updates[1].failures, updates[1].microbatches) == (1, 11), fail.failed
            assert updates[2].microbatches == 11, "larger micro-batches are not tried at once"
            recovered += 1
        else:
            at_the_update += 1
    assert recovered > 5 * at_the_update, "premise: most failures are in the sweeps"
    # A failure while shapes are inferred is handled there: the operator runs on tensors without memory.
    assert absorbed < recovered / 10


def test_auto_runs_the_whole_batch_if_it_fits() -> None:
    twins = Twins("BatchNorm and InfoNCE", microbatch_size="auto")
    for batch in batches():
        twins.large(batch)
        assert twins.accumulate(batch).microbatches == 1, "there is plenty of memory"
        assert twins.accumulate.engine.memory is None, "this report is for separate samples"
    twins.check()


def test_a_sweep_without_memory_is_repeated_at_half_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = []
    original = recording.run

    def run(todo: Any, parts: Any, *args: Any, **more: Any) -> Any:
        sweeps.append(len(parts))
        if len(sweeps) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(todo, parts, *args, **more)

    monkeypatch.setattr(recording, "run", run)
    twins = Twins("BatchNorm", microbatch_size="auto")
    with pytest.warns(UserWarning, match=r"with 22 samples at a time; .* again with at most 11\."):
        update = twins.accumulate(batches()[0])
    assert (update.failures, update.microbatches, set(sweeps[1:])) == (1, 2, {2})
    twins.large(batches()[0])
    twins.check()


def test_a_sample_that_does_not_fit_is_a_typed_error_and_changes_nothing() -> None:
    twins = Twins("dropout")
    tried = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tried.append(len(batch["label"]))
        random.random()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    twins.loss = loss
    before = fingerprint(twins.model, twins.ours)
    with (
        quiet(),
        pytest.raises(
            OutOfMemoryError, match=r"22 samples, even with a single sample.*2\.00 GiB.*as before the window"
        ),
    ):
        twins.accumulate(batches()[0])
    assert tried == [SAMPLES] * 3, "micro-batches of 4, 2 and 1"
    assert_unchanged(before, fingerprint(twins.model, twins.ours))


def test_the_warning_of_a_failure_names_the_next_size() -> None:
    twins, loss = Twins(), classify
    failing = [True]

    def once(model: nn.Module, batch: Batch) -> Tensor:
        if failing.pop() if failing else False:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss(model, batch)

    twins.loss = once
    with pytest.warns(UserWarning, match=r"with 4 samples at a time; .* again with at most 2\. .*same"):
        twins.accumulate(batches()[0])


# -- saving --------------------------------------------------------------------------------------------------


def test_resuming_is_bit_for_bit() -> None:
    made = batches()

    def state(twins: Twins) -> Any:
        return copy.deepcopy(
            (
                twins.model.state_dict(),
                twins.ours.state_dict(),
                twins.accumulate.state_dict(),
                torch.get_rng_state(),
            )
        )

    torch.manual_seed(1)
    straight = Twins("dropout")
    straight.accumulate(made[0])
    saved = state(straight)
    for batch in made[1:]:
        straight.accumulate(batch)
    resumed = Twins("dropout")
    resumed.model.load_state_dict(saved[0])
    resumed.ours.load_state_dict(saved[1])
    resumed.accumulate.load_state_dict(saved[2])
    torch.set_rng_state(saved[3])
    assert resumed.accumulate.updates == 1
    for batch in made[1:]:
        resumed.accumulate(batch)
    assert resumed.accumulate.updates == UPDATES
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_a_window_in_flight_of_an_accumulator_is_not_resumed() -> None:
    other, state = Twins("InfoNCE"), {}
    plain = other.plain(check=False)
    with plain.window(batches()[0]) as window:
        for microbatch in window:
            window.backward(other.loss(other.model, microbatch))
            state = plain.state_dict()
            break
    twins = Twins("InfoNCE")
    twins.accumulate.load_state_dict(state)
    with pytest.raises(WindowError, match=r"other parameters or options.*or call discard"):
        twins.accumulate(batches()[0])
    twins.accumulate.discard()
    assert twins.accumulate(batches()[0]).made


def test_thirty_updates_leave_no_tensors() -> None:
    """No tensor of an earlier update stays alive."""
    import gc

    twins = Twins("BatchNorm and InfoNCE")

    def alive() -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        # Random states (uint8) are not counted: the accumulator keeps one more after a slow window.
        return sum(tensor.dtype is not torch.uint8 for tensor in tensors)

    (batch,) = batches(1)
    for _ in range(3):
        twins.accumulate(batch)
    before = alive()
    for _ in range(30):
        twins.accumulate(batch)
    assert alive() <= before
