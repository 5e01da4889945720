"""First-window check of the declared loss: wrong declarations raise, right ones never do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.torch import Accumulator, Window, class_weights, count_tokens, sample_weights
from tests.torch.helpers import Loss, mlp, mse, rows, sgd, squared_sum, tiny_lm, token_mean, tokens

LENGTHS = [5, 1, 2, 7, 3, 6]  # tokens per sample; micro-batches of 3 have 8 and 16


def first_window(
    model: nn.Module, loss: Loss, batch: Any, *, microbatch_size: int | None = 3, **options: Any
) -> Accumulator:
    """Make one update, preceded by the check of the declared loss."""
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: loss(model, mb),
        microbatch_size=microbatch_size,
        **options,
    )
    assert accumulate(batch).made
    return accumulate


# -- wrong declarations -------------------------------------------------------------------------------------


def hugging_face(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Loss of a head with a constant num_items_in_batch: losses of micro-batches add up."""
    logits = model(batch["ids"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / 24


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    one, two = (nn.functional.normalize(view, dim=1) for view in (model(batch[0]), batch[1]))
    return nn.functional.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))


def depends_on_batch_size(model: nn.Module, batch: Any) -> Tensor:
    return mse(model, batch) * len(batch[0]) ** 0.5


def centred(model: nn.Module, batch: Any) -> Tensor:
    """Center outputs over the batch without a normalization layer."""
    out = model(batch[0])
    return nn.functional.mse_loss(out - out.mean(0), batch[1])


def weighted_by_hand(model: nn.Module, batch: Any) -> Tensor:
    x, y, weight = batch
    return (weight * (model(x) - y).square().mean(1)).sum() / weight.sum()


def classes(model: nn.Module, batch: Any) -> Tensor:
    weight = torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64)
    return nn.functional.cross_entropy(model(batch[0]), batch[1], weight=weight)


def masked(model: nn.Module, batch: Any) -> Tensor:
    """Mean over tokens with the mask `keep`."""
    keep = batch["keep"].double()
    each = nn.functional.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
    return (each * keep).sum() / keep.sum()


def with_weights(batch: Any) -> Any:
    return (*batch, torch.linspace(0.1, 3.0, len(batch[0]), dtype=torch.float64))


X = rows(9, 1)[0]
TOKENS = tokens(LENGTHS)
KEEP = {"ids": TOKENS["ids"], "keep": TOKENS["labels"] != -100}
LABELLED = (X[0], torch.tensor([0, 1, 1, 2, 0, 2, 1, 1, 0]))

WRONG: dict[str, tuple[Callable[[], nn.Module], Loss, Any, dict[str, Any], Any, str]] = {
    "a mean declared a sum": (mlp, mse, X, {"reduction": "sum"}, LossSpecError, 'pass reduction="mean"'),
    "a sum declared a mean": (mlp, squared_sum, X, {}, LossSpecError, 'pass reduction="sum"'),
    "a token mean weighted by samples": (
        tiny_lm, token_mean, TOKENS, {}, LossSpecError, r'pass weight=count_tokens\("labels"\)',
    ),
    "a constant num_items_in_batch": (
        tiny_lm, hugging_face, TOKENS, {"weight": count_tokens("labels")}, LossSpecError,
        "num_items_in_batch",
    ),
    "sample weights forgotten": (
        mlp, weighted_by_hand, with_weights(X), {}, LossSpecError, r'pass weight=sample_weights\("2"\)',
    ),
    "class weights forgotten": (mlp, classes, LABELLED, {}, (LossSpecError, CoupledSamplesError), "weight"),
    "a mask that is not counted": (
        tiny_lm, masked, KEEP, {}, (LossSpecError, CoupledSamplesError), "weight",
    ),
    "tokens counted for a mean over samples": (
        tiny_lm,
        lambda m, b: m(b["ids"]).square().mean(),
        TOKENS,
        {"weight": count_tokens("labels")},
        (LossSpecError, CoupledSamplesError),
        "weight",
    ),
    "InfoNCE": (mlp, info_nce, X, {}, CoupledSamplesError, "contrastive"),
    "normalised over the batch": (mlp, centred, X, {}, CoupledSamplesError, "influence each other"),
    "depends on the batch size": (mlp, depends_on_batch_size, X, {}, CoupledSamplesError, "batch size"),
    "a weight that is a mean": (
        mlp, mse, X, {"weight": lambda mb: float(mb[0].abs().mean())}, LossSpecError, "is not additive",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["split", "one micro-batch", "window", "single samples"])
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.sampled(2)
def test_a_wrong_declaration_raises_before_anything_changes(case: str, form: str) -> None:
    make, loss, batch, options, error, text = WRONG[case]
    model = make()
    optimizer = sgd(model.parameters())
    before = copy.deepcopy(model.state_dict())
    generators = (torch.get_rng_state(), random.getstate())
    size = {"split": 3, "one micro-batch": None, "window": None, "single samples": 1}[form]
    accumulate = Accumulator(model, optimizer, lambda mb: loss(model, mb), microbatch_size=size, **options)
    with pytest.raises(error, match=text):
        accumulate(Window([batch, batch]) if form == "window" else batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state and accumulate.updates == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(generators[0], torch.get_rng_state()) and generators[1] == random.getstate()


def test_after_an_error_the_next_call_is_checked_again() -> None:
    model = tiny_lm()
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: token_mean(model, mb), microbatch_size=2
    )
    for _ in range(2):
        with pytest.raises(LossSpecError, match="count_tokens"):
            accumulate(TOKENS)
    full = tokens([7, 7, 7, 7])
    assert accumulate(full).made, "with equal token counts the declaration is right"


class OutOfMemoryInBackward(torch.autograd.Function):
    """Identity whose backward runs out of memory above `most` rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grad_outputs
        if len(gradient) > ctx.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return gradient, None


@pytest.mark.parametrize("most", [8, 4])
def test_a_wrong_gradient_raises_even_if_the_backward_runs_out_of_memory(most: int) -> None:
    def wrong_gradient_of_the_right_loss(model: nn.Module, batch: Any) -> Tensor:
        out = OutOfMemoryInBackward.apply(model(batch[0]), most)
        assert isinstance(out, Tensor)
        total = out.square().sum()
        return nn.functional.mse_loss(out, batch[1]) + (total - total.detach()) * len(batch[0])

    with pytest.raises((LossSpecError, CoupledSamplesError)):
        first_window(mlp(), wrong_gradient_of_the_right_loss, rows(16)[0], microbatch_size=8)


def test_check_false_accepts_a_wrong_declaration() -> None:
    """Without the check, wrong declarations do not raise."""
    for case, (make, loss, batch, options, _, _) in WRONG.items():
        if case != "a weight that is a mean":
            first_window(make(), loss, batch, check=False, **options)


# -- right declarations --------------------------------------------------------------------------------------


def relu_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(
        dtype
    )


def noisy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return mse(model, (x + 0.5 * torch.randn_like(x), y))


def flipped(model: nn.Module, batch: Any) -> Tensor:
    """Flip each sample with probability 0.5."""
    x, y = batch
    turn = torch.rand(len(x), 1, dtype=x.dtype) < 0.5
    return mse(model, (torch.where(turn, x.flip(1), x), y))


def in_bfloat16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def penalised(model: nn.Module, batch: Any) -> Tensor:
    """Mean squared error plus weight decay, which is the same for every micro-batch."""
    return mse(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


RIGHT: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Any], dict[str, Any]]] = {
    "mean": (mlp, mse, lambda: X, {}),
    "sum": (mlp, squared_sum, lambda: X, {"reduction": "sum"}),
    "dropout": (lambda: mlp(dropout=0.5), mse, lambda: X, {}),
    "noise in the loss": (mlp, noisy, lambda: X, {}),
    "random flips": (mlp, flipped, lambda: X, {}),
    "dropout and noise in float32": (
        lambda: mlp(torch.float32, dropout=0.5), noisy, lambda: rows(9, 1, torch.float32)[0], {},
    ),
    "tokens": (tiny_lm, token_mean, lambda: TOKENS, {"weight": count_tokens("labels")}),
    "tokens, some without any": (
        tiny_lm, token_mean, lambda: tokens([0, 0, 0, 4, 1, 7, 0, 2]), {"weight": count_tokens("labels")},
    ),
    "sample weights": (mlp, weighted_by_hand, lambda: with_weights(X), {"weight": sample_weights("2")}),
    "class weights": (
        mlp, classes, lambda: LABELLED,
        {"weight": class_weights(torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64), "1")},
    ),
    "ReLU in float32": (relu_net, mse, lambda: rows(33, 1, torch.float32)[0], {}),
    "bfloat16 autocast": (relu_net, in_bfloat16, lambda: rows(33, 1, torch.float32)[0], {}),
    "bfloat16 parameters": (
        lambda: relu_net(torch.bfloat16), mse, lambda: rows(33, 1, torch.bfloat16)[0],
        {"gradient_sum": torch.float32},
    ),
    "weight decay in the loss": (mlp, penalised, lambda: X, {}),
    "a sum of huge losses": (mlp, lambda m, b: squared_sum(m, b) * 1e12, lambda: X, {"reduction": "sum"}),
    "tiny losses": (mlp, lambda m, b: mse(m, b) * 1e-12, lambda: X, {}),
    "negative losses": (mlp, lambda m, b: -mse(m, b), lambda: X, {}),
}  # fmt: skip


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, None])
@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.sampled(3)
def test_a_right_declaration_never_raises(case: str, microbatch_size: int | None) -> None:
    make, loss, batch, options = RIGHT[case]
    for seed in range(3):
        torch.manual_seed(seed)
        first_window(make(), loss, batch(), microbatch_size=microbatch_size, **options)


@pytest.mark.parametrize("seed", range(10))
def test_random_relu_nets_in_float32_never_raise(seed: int) -> None:
    torch.manual_seed(seed)
    model = relu_net()
    batch = (torch.randn(40, 4) * 30, torch.randint(0, 3, (40,)))
    first_window(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batch, microbatch_size=16)


def test_a_weight_returned_with_the_loss_is_checked() -> None:
    model = tiny_lm()

    def loss_fn(microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return token_mean(model, microbatch), int((microbatch["labels"] != -100).sum())

    def by_samples(microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return token_mean(model, microbatch), len(microbatch["ids"])

    optimizer = sgd(model.parameters())
    assert Accumulator(model, optimizer, loss_fn, microbatch_size=3, weight="returned")(TOKENS).made
    with pytest.raises(LossSpecError, match="count_tokens"):
        Accumulator(model, optimizer, by_samples, microbatch_size=3, weight="returned")(TOKENS)


# -- the check leaves no trace -------------------------------------------------------------------------


class Stateful(nn.Module):
    """Model whose forward draws dropout and updates a counter and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dropout=0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return self.net(x)


@pytest.mark.filterwarnings(r"ignore:forward\(\) updates the state")  # so that the check has state to restore
def test_training_with_the_check_is_bitwise_equal_to_training_without() -> None:
    def train(check: bool) -> tuple[dict[str, Tensor], Tensor, Any, int]:
        torch.manual_seed(0)
        random.seed(0)
        model = Stateful()
        accumulate = first_window(model, mse, X, check=check, microbatch_size=2)
        accumulate(X)
        return model.state_dict(), torch.get_rng_state(), random.getstate(), int(model.calls)

    checked, unchecked = train(check=True), train(check=False)
    assert checked[0].keys() == unchecked[0].keys()
    assert all(torch.equal(value, unchecked[0][name]) for name, value in checked[0].items())
    assert torch.equal(checked[1], unchecked[1]) and checked[2:] == unchecked[2:]
    assert checked[3] == 10, "five forwards in each of two windows, and none from the check"


def test_only_the_first_window_is_checked() -> None:
    model = mlp()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    accumulate = first_window(model, mse, X)
    first = len(forwards)
    accumulate(X)
    assert len(forwards) - first == 3 < first


def test_training_and_evaluation_modes_are_restored() -> None:
    model = mlp(dropout=0.5)
    model[2].eval()
    first_window(model, mse, X)
    assert [module.training for module in model.modules()] == [True, True, True, False, True]


def test_a_window_loop_without_a_loss_function_is_not_checked() -> None:
    model = tiny_lm()
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=2)
    with accumulator.window(TOKENS) as window:
        for microbatch in window:
            window.backward(token_mean(model, microbatch))
    assert window.update is not None and window.update.made


def test_a_batch_of_one_sample_warns_that_it_cannot_be_checked() -> None:
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb))
    with pytest.warns(UserWarning, match=r"could not check the declared loss.*check=False"):
        assert accumulate(rows(1, 1)[0]).made
    accumulate(rows(1, 1)[0])  # no second warning: pytest turns warnings into errors


def test_the_weight_is_named_when_a_sample_has_no_padding() -> None:
    """The first sample has no padding, so only the other samples show the token count."""
    model = tiny_lm()
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: token_mean(model, mb), microbatch_size=3
    )
    with pytest.raises(LossSpecError, match=r'pass weight=count_tokens\("labels"\)'):
        accumulate(tokens([7, 1, 2, 6, 3, 4]))
