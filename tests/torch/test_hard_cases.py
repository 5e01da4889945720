"""Hard cases: shared, overlapping and replaced gradients, mixed dtypes, overflows and changing state."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch import LossSpecError, NonFiniteError, OptimizerError, WindowError
from superbatch.torch import Accumulator
from superbatch.torch.masters import MasterWeights, fp32_masters
from tests.torch.helpers import assert_same_parameters, large_batch, mlp, mse, rows, sgd, start_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_wrong_token_mean_is_found_in_an_untrained_language_model(dtype: torch.dtype) -> None:
    """With a head of zeros, all tokens have the same loss, so only gradients show the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).to(dtype)
    head: Any = model[1]
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    labels = torch.randint(50, (8, 32))
    for row, length in enumerate([32, 5, 5, 20, 32, 3, 15, 6]):
        labels[row, length:] = -100
    batch = {"tokens": torch.randint(50, (8, 32)), "labels": labels}

    def loss_fn(microbatch: Any) -> Tensor:
        logits = model(microbatch["tokens"]).flatten(0, 1)
        return F.cross_entropy(logits.float(), microbatch["labels"].flatten())

    large, single = (float(loss_fn({k: v[:n] for k, v in batch.items()}).detach()) for n in (8, 1))
    assert large == pytest.approx(single, rel=1e-6)  # premise: losses do not show it
    before = start_of(model)
    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=4)
    with pytest.raises(LossSpecError, match=r'pass weight=count_tokens\("labels"\)'):
        accumulate(batch)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


def test_a_gradient_of_two_parameters_is_not_summed_twice() -> None:
    """Autograd gives the same tensor to both terms of `a.view(3, 4) + b.view(3, 4)`."""

    def made() -> nn.ParameterList:
        torch.manual_seed(0)
        return nn.ParameterList([torch.randn(12, dtype=torch.float64) for _ in range(2)])

    def loss_of(model: Any, batch: Any) -> Tensor:
        weight = model[0].view(3, 4) + model[1].view(3, 4)
        return (batch[0] @ weight.T - batch[1]).square().mean()

    reference, batches = made(), rows(10, 2)
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda batch: loss_of(reference, batch), batches)
    ways: list[dict[str, Any]] = [{}, {"nonfinite": "skip_microbatch"}, {"weight": "returned"}]
    for options in ways:
        model = made()

        def loss_fn(microbatch: Any, model: Any = model, options: Any = options) -> Any:
            loss = loss_of(model, microbatch)
            return (loss, len(microbatch[0])) if "weight" in options else loss

        accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=3, **options)
        for batch in batches:
            accumulate(batch)
        assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_later_gradient_of_two_parameters_is_not_summed_twice() -> None:
    """The first micro-batch uses a third parameter, so the two have no gradient after it."""

    def made() -> nn.ParameterList:
        torch.manual_seed(0)
        return nn.ParameterList([torch.randn(12, dtype=torch.float64) for _ in range(3)])

    def loss_of(model: Any, batch: Any) -> Tensor:
        x, y, shared = batch
        weight = model[0].view(3, 4) + model[1].view(3, 4)
        rows_of_all = torch.where(
            shared[:, None], x @ weight.T if shared.any() else y * 0, x @ model[2].view(3, 4).T
        )
        return (rows_of_all - y).square().mean()

    reference, model = made(), made()
    start = start_of(reference)
    batch = (*rows(12)[0], torch.arange(12) >= 3)
    large_batch(sgd(reference.parameters()), lambda batch: loss_of(reference, batch), [batch])
    accumulate = Accumulator(model, sgd(model.parameters()), lambda b: loss_of(model, b), microbatch_size=3)
    accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("term", ["squeeze", "view", "sum"])
def test_a_parameter_that_is_a_term_of_the_loss(shape: tuple[int, ...], term: str) -> None:
    """Its gradient may be the very tensor with which the backward starts."""
    terms = {"squeeze": Tensor.squeeze, "view": lambda p: p.view(()), "sum": Tensor.sum}

    def made() -> nn.ParameterDict:
        ones = torch.ones(3, dtype=torch.float64)
        return nn.ParameterDict({"w": ones, "s": nn.Parameter(torch.zeros(shape, dtype=torch.float64))})

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return (x * model["w"]).sum(1).mean() + terms[term](model["s"])

    reference, model, batch = made(), made(), torch.randn(13, 3, dtype=torch.float64)
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda x: loss_of(reference, x), [batch])
    Accumulator(model, sgd(model.parameters()), lambda x: loss_of(model, x), microbatch_size=2)(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("when", ["before", "in the second window"])
@pytest.mark.parametrize("how", ["on the parameter", "on the AccumulateGrad node"])
def test_a_hook_may_replace_a_gradient(how: str, when: str) -> None:
    reference, model, batches = mlp(), mlp(), rows(13, 3)
    start, nodes = start_of(reference), []

    def hook(parameter: Any) -> None:
        def renew(*_: Any) -> None:
            parameter.grad = parameter.grad.clone()

        if how == "on the parameter":
            parameter.register_post_accumulate_grad_hook(renew)
        else:
            nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(renew)

    calls = 0

    def loss_fn(microbatch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == (1 if when == "before" else 12):
            for parameter in model.parameters():
                hook(parameter)
        return mse(model, microbatch)

    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), batches)
    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2, check=False)

    def train() -> None:
        for batch in batches:
            accumulate(batch)

    train()
    assert calls > 12
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_parameter_without_elements_does_not_hide_a_nan() -> None:
    model = nn.ParameterDict({"none": torch.zeros(0), "w": torch.ones(2)})

    def loss_fn(x: Tensor) -> Tensor:
        return (x * model["w"].sqrt()).mean() + model["none"].sum()

    model["w"].data.zero_()  # the square root has an infinite derivative there
    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2, check=False)
    with pytest.raises(NonFiniteError, match="w"):
        accumulate(torch.ones(4, 2))


def test_the_norm_of_a_model_in_bfloat16_and_float64() -> None:
    model = nn.Sequential(nn.Linear(4, 300).double(), nn.Linear(300, 1).bfloat16())

    def loss_fn(x: Tensor) -> Tensor:
        return model[1](model[0](x).bfloat16()).float().square().mean()

    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=2)
    norms: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: norms.extend(p.grad.double().norm() for p in model.parameters() if p.grad is not None)
    )
    update = accumulate(torch.randn(6, 4, dtype=torch.float64))
    assert len(norms) == 4
    assert update.grad_norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-6)


@pytest.mark.parametrize("widths", [(4, 3, 2), (4, 300, 200), (40, 3, 200)])
def test_the_norm_is_that_of_large_and_small_tensors(widths: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(widths[0], widths[1]), nn.Linear(widths[1], widths[2])).double()
    x = torch.randn(6, widths[0], dtype=torch.float64)
    model(x).square().mean().backward()
    real = float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, lambda mb: model(mb).square().mean(), microbatch_size=2)
    assert accumulate(x).grad_norm == pytest.approx(real, rel=1e-12)


class Overlapping(torch.autograd.Function):
    """Adds two shifted vectors of three numbers; both gradients are overlapping views of one tensor."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, last: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.pad(first, (0, 1)) + F.pad(last, (1, 0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient[:3], gradient[1:]


def test_overlapping_gradients_are_summed_separately() -> None:
    def made() -> nn.ParameterList:
        return nn.ParameterList([torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return (x @ Overlapping.apply(model[0], model[1])).mean()

    reference, model, batch = made(), made(), torch.randn(12, 4, dtype=torch.float64)
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda x: loss_of(reference, x), [batch])
    Accumulator(model, sgd(model.parameters()), lambda x: loss_of(model, x), microbatch_size=2)(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_sparse_and_a_dense_gradient_in_a_later_window() -> None:
    def made() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(5, 3, sparse=True).double()

    def loss_of(model: nn.Embedding, batch: Any) -> Tensor:
        tokens, dense = batch
        loss = model(tokens).square().sum(1)
        return (loss + (model.weight.square().sum() * dense if dense.any() else 0)).mean()

    reference, model = made(), made()
    start = start_of(reference)
    tokens = torch.tensor([0, 1, 2, 3, 4, 1, 2, 0])
    batches = [(tokens, torch.zeros(8)), (tokens, torch.zeros(8)), (tokens, (torch.arange(8) >= 4).double())]
    large_batch(
        torch.optim.SGD(reference.parameters(), lr=0.1), lambda batch: loss_of(reference, batch), batches
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(model, optimizer, lambda b: loss_of(model, b), microbatch_size=2, check=False)
    for batch in batches:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_hook_registered_between_windows_of_two_microbatches() -> None:
    reference, model, batches = mlp(), mlp(), rows(4, 3)
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), batches)
    accumulate = Accumulator(model, sgd(model.parameters()), lambda b: mse(model, b), microbatch_size=2)
    for number, batch in enumerate(batches):
        if number == 2:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clone()))
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_an_overflow_in_one_of_two_optimizers_skips_both() -> None:
    models = [mlp().float(), mlp().float()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizers = [sgd(model.parameters()) for model in models]

    def loss_fn(microbatch: Any) -> Tensor:
        x, y = microbatch
        return F.mse_loss(models[0](x), y) + models[1](x).square().mean()

    x, y = (tensor.float() for tensor in rows(6, 1)[0])
    accumulate = Accumulator(models, optimizers, loss_fn, microbatch_size=2, scaler=scaler)
    assert accumulate((x, y)).made
    before = [start_of(model) for model in models]
    parameter = next(models[1].parameters())
    handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
    update = accumulate((x, y))
    handle.remove()
    assert update.skipped is not None and update.skipped.startswith("overflow")
    assert scaler.get_scale() == 1.0
    for model, old in zip(models, before, strict=True):
        assert all(torch.equal(old[name], value) for name, value in model.named_parameters())


def test_a_window_does_not_resume_with_another_scale() -> None:
    model = mlp().float()
    x, y = (tensor.float() for tensor in rows(6, 1)[0])

    def made(scale: float) -> Accumulator:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return Accumulator(model, sgd(model.parameters()), microbatch_size=2, scaler=scaler)

    first, state = made(8.0), {}
    with pytest.raises(KeyboardInterrupt), first.window((x, y)) as window:  # noqa: PT012  (the loop is under test)
        for microbatch in window:
            window.backward(mse(model, microbatch))
            state = first.state_dict()
            raise KeyboardInterrupt
    other = made(64.0)
    other.load_state_dict(state)
    with pytest.raises(WindowError, match=r"the scale of the saved sums is 8\.0"), other.window((x, y)):
        pass


def test_unused_masters_are_refused_and_masters_follow_written_parameters() -> None:
    model = mlp().bfloat16()
    masters = fp32_masters(model)
    with pytest.raises(OptimizerError, match=r"Make the optimizer with masters\.values"):
        Accumulator(model, MasterWeights(sgd(model.parameters()), masters))
    accumulate = Accumulator(
        model, MasterWeights(torch.optim.SGD(masters.values(), lr=1e-4), masters), lambda mb: mse(model, mb)
    )
    batch = tuple(tensor.bfloat16() for tensor in rows(6, 1)[0])
    accumulate(batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # as if a checkpoint were loaded
    loaded = start_of(model)
    accumulate(batch)
    for name, parameter in model.named_parameters():
        assert (parameter - loaded[name]).abs().max() < 0.1


def test_autocast_around_the_training_loop_uses_updated_weights() -> None:
    def train(outside: bool) -> dict[str, Tensor]:
        model = mlp().float()
        x, y = (tensor.float() for tensor in rows(12, 1)[0])
        accumulate = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.5), lambda mb: mse(model, mb), microbatch_size=4
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            for _ in range(5):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    accumulate((x, y))
        return start_of(model)

    for name, value in train(outside=True).items():
        assert torch.allclose(value, train(outside=False)[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("layer", "state"),
    [
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "0.parametrizations.weight.0._u"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "0.running_mean"),
    ],
    ids=["spectral_norm", "InstanceNorm"],
)
def test_a_forward_that_changes_its_state_warns_once(layer: nn.Module, state: str) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(1)).double()
    x = torch.randn(8, 4, 4, dtype=torch.float64)
    model.eval()(x)
    accumulate = Accumulator(
        model.train(), sgd(model.parameters()), lambda mb: model(mb).square().mean(), microbatch_size=4
    )
    with pytest.warns(UserWarning, match=r"forward\(\) updates the state") as caught:
        accumulate(x)
    assert any(state in str(one.message) for one in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate(x)


def test_a_replaced_parameter_is_summed_from_the_next_window_on() -> None:
    """Users replace a head between two windows."""
    head = nn.Linear(4, 1, bias=False)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), head).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    accumulate = Accumulator(model, optimizer, lambda mb: model(mb).square().mean(), microbatch_size=4)
    norm = accumulate(x).grad_norm
    old = head.weight
    head.weight = nn.Parameter(old.detach().clone())
    (group,) = optimizer.param_groups
    group["params"] = [head.weight if each is old else each for each in group["params"]]
    for _ in range(2):
        assert accumulate(x).grad_norm == norm
        assert head.weight.grad is None
