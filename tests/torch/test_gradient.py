"""`Gradient` and `WholeGradient` add the gradient of the real large batch to ``.grad``, without a step."""

from __future__ import annotations

import copy
import math
import random
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch import NoiseMeter
from superbatch.errors import InputError, LossSpecError, NonFiniteError, WindowError
from superbatch.torch import (
    Accumulator,
    Gradient,
    WholeBatch,
    WholeGradient,
    Window,
    at_least,
    count_tokens,
    gradient,
)
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm, PerSampleRandom
from superbatch.torch.window.participants.earlier_gradients import EarlierGradients
from tests.torch.helpers import mlp, mse, rows, sgd, start_of, tiny_lm, token_mean, tokens
from tests.torch.test_out_of_memory import FailAt

Loss = Callable[[nn.Module, Any], Any]
TOLERANCE = 1e-12


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def large(model: nn.Module, loss: Loss, batch: Any) -> dict[str, Tensor]:
    """Return the gradient of the real large batch, without changing `model`."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss(twin, batch).backward()
    found = gradients(twin)
    assert found and all(float(each.norm()) > 0 for each in found.values()), "premise: no gradient is zero"
    return found


def assert_alike(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        error = float((actual[name] - wanted).norm() / wanted.norm())
        assert error <= TOLERANCE, f"{name}: {error:.1e}"


def one(samples: int, *, seed: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return rows(samples, 1, dtype, seed=seed)[0]


def batchnorm_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def small_mlp() -> nn.Module:
    return mlp().double()


SIZES = [None, 1, 3, 4, 7]


@pytest.mark.parametrize("size", SIZES)
def test_gradient_is_that_of_the_large_batch(size: int | None) -> None:
    model, batch = small_mlp(), one(10)
    expected, start = large(model, mse, batch), start_of(model)
    record = Gradient(model, lambda mb: mse(model, mb), microbatch_size=size)(batch)
    assert_alike(gradients(model), expected)
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters()), "no step is made"
    assert record.loss == pytest.approx(float(mse(model, batch).detach()), rel=1e-12)
    norm = math.sqrt(sum(float(each.square().sum()) for each in expected.values()))
    assert record.grad_norm == pytest.approx(norm, rel=1e-12)
    assert (record.samples, record.weight, record.learning_rates) == (10, 10, ())
    assert record.microbatches == (1 if size is None else -(-10 // size))


def test_a_token_mean_and_a_window_with_a_tail() -> None:
    model = tiny_lm().double()
    batch = tokens([5, 2, 7, 1, 4])
    expected = large(model, token_mean, batch)
    microbatches = [{name: value[i : i + 2] for name, value in batch.items()} for i in (0, 2, 4)]
    assert len(microbatches[-1]["labels"]) == 1, "premise: the tail is short"
    gradient_of = Gradient(model, lambda mb: token_mean(model, mb), weight=count_tokens("labels"))
    gradient_of(Window(microbatches))
    assert_alike(gradients(model), expected)


def test_gradient_is_added_in_place_to_earlier_gradients() -> None:
    model, first, second = small_mlp(), one(6), one(9, seed=5)
    expected = large(model, mse, first)
    for name, each in large(model, mse, second).items():
        expected[name] += each
    mse(model, first).backward()
    tensors = {name: p.grad for name, p in model.named_parameters()}
    Gradient(model, lambda mb: mse(model, mb), microbatch_size=4)(second)
    assert_alike(gradients(model), expected)
    assert all(p.grad is tensors[name] for name, p in model.named_parameters())


class Table(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(7, 3, sparse=sparse, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).tanh().sum(-1)


@pytest.mark.parametrize("earlier_is_sparse", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_are_added(*, earlier_is_sparse: bool, sparse: bool) -> None:
    model, twin = Table(sparse=True), Table(sparse=False)
    first, second = torch.tensor([[1, 2], [3, 1]]), torch.tensor([[1, 5], [6, 6], [2, 0]])
    for net in (model, twin):
        net(first).square().mean().backward()
    grad = model.table.weight.grad
    assert grad is not None
    assert grad.is_sparse, "premise"
    if not earlier_is_sparse:
        model.table.weight.grad = grad.to_dense()
    model.table.sparse = sparse
    Gradient(model, lambda ids: model(ids).square().mean(), microbatch_size=1)(second)
    twin(second).square().mean().backward()
    found = gradients(model)["table.weight"]
    assert_alike(
        {"table": found.to_dense() if found.is_sparse else found}, {"table": gradients(twin)["table.weight"]}
    )


def test_gradient_and_a_step_equal_an_update_of_the_accumulator() -> None:
    model = small_mlp()
    other = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    gradient_of = Gradient(model, lambda mb: mse(model, mb), microbatch_size=4)
    accumulate = Accumulator(other, sgd(other.parameters()), lambda mb: mse(other, mb), microbatch_size=4)
    for seed in range(3):
        batch = one(10, seed=seed)
        gradient_of(batch)
        optimizer.step()
        optimizer.zero_grad()
        accumulate(batch)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_the_function_equals_the_class() -> None:
    model, batch = small_mlp(), one(10)
    expected = large(model, mse, batch)
    assert gradient(model, lambda mb: mse(model, mb), batch, microbatch_size=3).microbatches == 4
    assert_alike(gradients(model), expected)


@pytest.mark.parametrize("how", ["raises", "nan", "wrong weight"])
def test_a_failure_restores_everything(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    batch, earlier = one(8), one(8, seed=9)
    mse(model, earlier).backward()
    calls = 0

    def loss_fn(mb: Any) -> Tensor:
        nonlocal calls
        calls += 1
        random.random()
        loss = mse(model, mb)
        if calls > 1 and how == "raises":
            raise ZeroDivisionError
        if how == "wrong weight":
            return loss * len(mb[0])
        return loss * math.nan if calls > 1 and how == "nan" else loss

    before = copy.deepcopy((gradients(model), model.state_dict(), random.getstate(), torch.get_rng_state()))
    error = {"raises": ZeroDivisionError, "nan": NonFiniteError, "wrong weight": LossSpecError}[how]
    gradient_of = Gradient(
        model,
        loss_fn,
        microbatch_size=4,
        check=how == "wrong weight",
        participants=[GhostBatchNorm()] if how != "wrong weight" else [FrozenBatchNorm()],
    )
    with pytest.raises(error):
        gradient_of(batch)
    after = (gradients(model), model.state_dict(), random.getstate(), torch.get_rng_state())
    assert calls > 1, "premise: it fails inside the window"
    for mine, theirs in zip(before[:2], after[:2], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])


def test_a_batch_without_weight_adds_nothing() -> None:
    model, batch = small_mlp(), one(4)
    mse(model, batch).backward()
    before = gradients(model)
    record = Gradient(model, lambda mb: mse(model, mb), microbatch_size=2, weight=lambda mb: 0)(batch)
    assert record.skipped is not None
    assert all(torch.equal(before[name], each) for name, each in gradients(model).items())


def test_a_scaler_keeps_the_gradient_scaled() -> None:
    model, batch = small_mlp().float(), one(8, dtype=torch.float32)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), sgd(model.parameters())
    expected = large(model, mse, batch)
    record = Gradient(model, lambda mb: mse(model, mb), microbatch_size=3, scaler=scaler, check=False)(batch)
    for name, each in gradients(model).items():
        torch.testing.assert_close(each, 1024 * expected[name], rtol=1e-5, atol=1e-3)
    norm = math.sqrt(sum(float(each.square().sum()) for each in expected.values()))
    assert record.grad_norm == pytest.approx(norm, rel=1e-5)
    start = start_of(model)
    scaler.step(optimizer)
    scaler.update()
    assert all(not torch.equal(p, start[name]) for name, p in model.named_parameters())


def test_an_overflow_of_scaled_losses_is_left_for_the_scaler() -> None:
    model, (x, y) = small_mlp().float(), one(8, dtype=torch.float32)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**80), sgd(model.parameters())
    gradient_of = Gradient(model, lambda mb: mse(model, mb), microbatch_size=3, scaler=scaler, check=False)
    start = start_of(model)
    record = gradient_of((x, y * 1e18))
    assert math.isfinite(record.loss), "premise: the loss is finite"
    assert not all(bool(each.isfinite().all()) for each in gradients(model).values()), "premise: an overflow"
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
    assert scaler.get_scale() == 2.0**79


class Host:
    """A host with its own backward, like Accelerate."""

    def __init__(self, scaler: Any = None) -> None:
        self.losses: list[float] = []
        self._scaler = scaler

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.losses.append(float(loss.detach()))
        (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_host_runs_the_backward(scaled: bool) -> None:
    model, batch = small_mlp(), one(10)
    expected = large(model, mse, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    host = Host(scaler)
    record = Gradient(
        model, lambda mb: mse(model, mb), microbatch_size=4, backward=host.backward, scaler=scaler
    )(batch)
    assert len(host.losses) == record.microbatches == 3
    assert sum(host.losses) == pytest.approx(record.loss, rel=1e-12), "the losses add up to that of the batch"
    found = {name: each / (8 if scaled else 1) for name, each in gradients(model).items()}
    assert_alike(found, expected)


def test_loss_terms_with_different_weights() -> None:
    model = tiny_lm().double()
    batch = tokens([5, 2, 7, 1, 4, 3])

    def terms(mb: Any) -> dict[str, Tensor]:
        scores = model(mb["ids"])  # one graph for both: the host must retain it
        tokens = nn.functional.cross_entropy(scores.flatten(0, 1), mb["labels"].flatten())
        return {"tokens": tokens, "samples": scores.square().mean()}

    def whole(net: nn.Module, mb: Any) -> Tensor:
        return token_mean(net, mb) + net(mb["ids"]).square().mean()

    expected, host = large(model, whole, batch), Host()
    weight = {"tokens": at_least(1, count_tokens("labels")), "samples": None}
    record = Gradient(model, terms, microbatch_size=2, weight=weight, backward=host.backward)(batch)
    assert_alike(gradients(model), expected)
    assert record.losses.keys() == {"tokens", "samples"}


def test_out_of_memory_does_not_change_the_sum() -> None:
    model, batch, earlier = small_mlp(), one(8), one(8, seed=4)
    expected = large(model, mse, batch)
    for name, each in large(model, mse, earlier).items():
        expected[name] += each
    survived = 0
    for at in range(60):
        model.zero_grad()
        mse(model, earlier).backward()
        before = gradients(model)
        gradient_of = Gradient(model, lambda mb: mse(model, mb), microbatch_size=4, check=False)
        with FailAt() as failing, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each recovery warns
            failing.arm(at)
            try:
                record = gradient_of(batch)
            except MemoryError:
                record = None
        if record is None:
            assert all(torch.equal(before[name], each) for name, each in gradients(model).items()), at
        else:
            assert_alike(gradients(model), expected)
            survived += record.failures
    assert survived > 3, "premise: some failures are survived"


def test_an_open_window_is_resumed_bit_for_bit() -> None:
    model, batch = small_mlp(), one(9)

    def of(net: nn.Module) -> Gradient:
        return Gradient(net, lambda mb: mse(net, mb), microbatch_size=3, check=False)

    of(model)(batch)
    expected = gradients(model)
    model.zero_grad()
    first = of(model)
    state: dict[str, Any] = {}
    with first.window(batch) as window:
        for number, mb in enumerate(window):
            window.backward(mse(model, mb))
            if number == 1:
                state = copy.deepcopy(first.state_dict())
                break
    assert not gradients(model), "premise: the window was discarded"
    second = of(model)
    second.load_state_dict(state)
    with second.window(batch) as window:
        left = 0
        for mb in window:
            window.backward(mse(model, mb))
            left += 1
    assert left == 1
    assert all(torch.equal(expected[name], each) for name, each in gradients(model).items())


def test_bfloat16_is_summed_in_float32() -> None:
    model, batch = small_mlp(), one(64)
    expected = large(model, mse, batch)
    low, low_batch = copy.deepcopy(model).bfloat16(), tuple(each.bfloat16() for each in batch)

    def error(gradient_sum: Any) -> float:
        low.zero_grad()
        Gradient(low, lambda mb: mse(low, mb), microbatch_size=1, gradient_sum=gradient_sum, check=False)(
            low_batch
        )
        return max(
            float((each.double() - expected[name]).norm() / expected[name].norm())
            for name, each in gradients(low).items()
        )

    assert error(torch.float32) < error(None)


def test_a_parameter_that_is_frozen_later_gets_no_gradient() -> None:
    model, batch = small_mlp(), one(6)
    gradient_of = Gradient(model, lambda mb: mse(model, mb), microbatch_size=2)
    gradient_of(batch)
    model.zero_grad()
    next(model.parameters()).requires_grad = False
    expected = large(model, mse, batch)
    gradient_of(batch)
    assert_alike(gradients(model), expected)


def test_streams_per_sample_make_dropout_independent_of_the_split() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double(), one(8)

    def gradient(size: int, participants: list[Any], seed: int = 7) -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        options: dict[str, Any] = {"participants": participants, "check": False}
        Gradient(model, lambda mb: mse(model, mb), microbatch_size=size, **options)(batch)
        return gradients(model)

    whole = gradient(8, [PerSampleRandom()])
    for size in (1, 2, 3):
        assert_alike(gradient(size, [PerSampleRandom()]), whole)
    for other in (gradient(2, [PerSampleRandom()], seed=8), gradient(2, [])):
        with pytest.raises(AssertionError):  # premise: another seed, or one stream for all, changes the masks
            assert_alike(other, whole)


def test_the_noise_is_that_of_the_accumulator() -> None:
    model, meters = small_mlp(), (NoiseMeter(every=1), NoiseMeter(every=1))
    options: dict[str, Any] = {"microbatch_size": 2, "check": False}
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    gradient_of = Gradient(model, lambda mb: mse(model, mb), observers=[meters[0]], **options)
    accumulate = Accumulator(model, still, lambda mb: mse(model, mb), observers=[meters[1]], **options)
    for seed in range(8):
        model.zero_grad()
        gradient_of(one(8, seed=seed))
        accumulate(one(8, seed=seed))
    noise = gradient_of.noise
    assert noise is not None and noise == accumulate.noise
    assert noise.windows == 8 and noise.variance > 0, "premise: the windows were measured"


@pytest.mark.parametrize("size", [1, 3, 5])
def test_coupled_samples(size: int) -> None:
    model, batch = batchnorm_net(), one(10)
    twin = copy.deepcopy(model)
    mse(twin, batch).backward()
    once = gradients(twin)
    WholeGradient(model, lambda mb: mse(model, mb), microbatch_size=size)(batch)
    assert_alike(gradients(model), once)
    assert all(
        torch.allclose(mine, theirs) for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True)
    )
    WholeGradient(model, lambda mb: mse(model, mb), microbatch_size=size)(batch)
    mse(twin, batch).backward()
    assert_alike(gradients(model), gradients(twin))


def test_whole_gradient_calls_the_host_and_restores_everything_after_a_failure() -> None:
    model, batch = batchnorm_net(), one(10)
    mse(model, batch).backward()
    before, buffers = gradients(model), copy.deepcopy(model.state_dict())
    host = Host()

    def loss_fn(mb: Any) -> Tensor:
        loss = mse(model, mb)
        return loss * math.nan if host.losses else loss

    gradient_of = WholeGradient(model, loss_fn, microbatch_size=3, backward=host.backward)
    record = gradient_of(batch)
    assert host.losses == [pytest.approx(record.loss)]
    model.load_state_dict(buffers)
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.grad = before[name].clone()
    with pytest.raises(NonFiniteError):
        gradient_of(batch)
    assert all(torch.equal(before[name], each) for name, each in gradients(model).items())
    assert all(torch.equal(buffers[name], each) for name, each in model.state_dict().items())


def test_whole_batch_equals_whole_gradient_and_a_step() -> None:
    model, batch = batchnorm_net(), one(10)
    other = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    WholeGradient(model, lambda mb: mse(model, mb), microbatch_size=3)(batch)
    optimizer.step()
    WholeBatch(other, sgd(other.parameters()), lambda mb: mse(other, mb), microbatch_size=3)(batch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradient_sum": "momentum"}, "has no optimizer"),
        ({"backward": 3}, "is not a function"),
        ({"participants": FrozenBatchNorm()}, "is not a list"),
        ({"split": ["x"]}, "is not a Split"),
        ({"accumulation_steps": 4}, "has no option"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    model = small_mlp()
    with pytest.raises(InputError, match=text):
        Gradient(model, lambda mb: mse(model, mb), **options)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = small_mlp().requires_grad_(requires_grad=False)
    with pytest.raises(InputError, match="No parameter of the models needs a gradient"):
        Gradient(model, lambda mb: mse(model, mb))


def test_an_open_window_has_no_update() -> None:
    model, batch = small_mlp(), one(4)
    with Gradient(model, microbatch_size=2).window(batch) as window:
        with pytest.raises(WindowError, match="has no update"):
            _ = window.update
        for mb in window:
            window.backward(mse(model, mb))
    assert window.update.made


MUTANTS: dict[str, tuple[str, Callable[..., Any], Callable[[], None]]] = {
    "earlier gradients are dropped": (
        "commit",
        lambda self: None,
        test_gradient_is_added_in_place_to_earlier_gradients,
    ),
    "earlier gradients stay in the sum": (
        "begin",
        lambda self: None,
        test_gradient_is_added_in_place_to_earlier_gradients,
    ),
    "earlier gradients are not restored": (
        "restore",
        lambda self: None,
        lambda: test_a_failure_restores_everything("raises"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_earlier_gradients_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, wrong, test = MUTANTS[name]
    monkeypatch.setattr(EarlierGradients, method, wrong)
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize("kind", ["inference", "expanded"])
def test_an_earlier_gradient_that_cannot_be_written_is_replaced_by_the_sum(kind: str) -> None:
    model, batch = small_mlp(), one(6)
    expected = large(model, mse, batch)
    with torch.inference_mode(kind == "inference"):
        for name, each in model.named_parameters():
            number = torch.ones((), dtype=each.dtype)
            each.grad = number.expand(each.shape) if kind == "expanded" else number.repeat(each.shape)
            expected[name] = expected[name] + 1
    Gradient(model, lambda mb: mse(model, mb), microbatch_size=4)(batch)
    assert_alike(gradients(model), expected)


def test_earlier_gradients_are_not_kept_alive_by_a_window_that_failed() -> None:
    model, batch = small_mlp(), one(6)
    mse(model, batch).backward()
    kept = [weakref.ref(each.grad) for each in model.parameters()]
    gradient_of = Gradient(model, lambda mb: mse(model, mb) * math.nan, microbatch_size=4, check=False)
    with pytest.raises(NonFiniteError):
        gradient_of(batch)
    assert all(each() is not None for each in kept), "premise: they are in .grad again"
    model.zero_grad()
    assert not any(each() is not None for each in kept)


def test_a_sum_in_buffers_is_added_to_an_earlier_gradient() -> None:
    """bfloat16 gradients are summed in buffers and reach ``.grad`` only at the end of the window."""
    torch.manual_seed(0)
    model, batch = mlp(torch.bfloat16), tuple(each.bfloat16() for each in one(6))
    gradient_of = Gradient(
        model, lambda mb: mse(model, mb), microbatch_size=2, gradient_sum=torch.float32, check=False
    )
    gradient_of(batch)
    expected = gradients(model)
    for each in model.parameters():
        each.grad = torch.ones((), dtype=torch.bfloat16).expand(each.shape)
    gradient_of(batch)
    for name, each in gradients(model).items():
        assert torch.equal(each, 1 + expected[name])
