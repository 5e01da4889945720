"""Check of losses that draw random numbers, and of models that behave differently in evaluation mode."""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.torch import Accumulator, count_tokens
from superbatch.torch.checks import evaluation
from superbatch.torch.checks.checked import NOT_EVALUATED, NOT_REPEATABLE
from superbatch.torch.checks.generators import Generators
from tests.torch.helpers import sgd
from tests.torch.statement_cases import CLASSES, FEATURES, Tokens, check, row_batch, token_batch, token_mean

Draw = Callable[[Tensor], Tensor]


class Augmenter:
    """Transform with its own random generators."""

    def __init__(self) -> None:
        self.random, self.numpy = random.Random(3), np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(3)

    def strength(self) -> float:
        return 1 + self.random.random() + self.numpy.random()


held = Augmenter()


def scale_each_sample(out: Tensor, numbers: Any) -> Tensor:
    return out * (1 + torch.as_tensor(numbers, dtype=out.dtype).view(-1, 1, 1))


def spec_augment(out: Tensor) -> Tensor:
    """SpecAugment: zero a random span of time steps in each sample."""
    keep = torch.ones(out.shape[:2], dtype=out.dtype)
    for row in keep:
        start = random.randint(0, 5)
        row[start : start + np.random.randint(1, 3)] = 0
    return out * keep[..., None]


def mixup(out: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return share * out + (1 - share) * out[torch.randperm(len(out))]


REPLAYED: dict[str, Draw] = {
    "NumPy once": lambda out: out * (1 + np.random.rand()),
    "NumPy per sample": lambda out: scale_each_sample(out, np.random.rand(len(out))),
    "NumPy's normal numbers": lambda out: out * (1 + abs(np.random.randn())),
    "Python once": lambda out: out * (1 + random.random()),
    "Python per sample": lambda out: scale_each_sample(out, [random.random() for _ in out]),
    "a random layer": lambda out: out * 2 if random.random() < 0.5 else out,
    "held generators": lambda out: out * held.strength(),
    "a held generator per sample": lambda out: scale_each_sample(out, held.numpy.random(len(out))),
    "a generator of torch": lambda out: scale_each_sample(out, torch.rand(len(out), generator=held.torch)),
    "SpecAugment": spec_augment,
    "Mixup": mixup,
}
NOT_REPLAYED: dict[str, Draw] = {
    "os.urandom": lambda out: out * (1 + os.urandom(1)[0] / 256),
    "a generator without seed": lambda out: out * (1 + np.random.default_rng().random()),
    "NumPy permutation": lambda out: out + out[torch.from_numpy(np.random.permutation(len(out)))],
    "Python permutation": lambda out: out + out[random.sample(range(len(out)), len(out))],
    "Poisson numbers": lambda out: out * (1 + torch.poisson(torch.ones(len(out), 1, 1, dtype=out.dtype))),
}


def random_loss(draw: Draw) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = Tokens(lambda d: nn.Linear(d, d))
    return model, lambda batch: token_mean(draw(model(batch["ids"])), batch)


@pytest.mark.parametrize("name", REPLAYED)
def test_draws_of_every_generator_are_replayed(name: str) -> None:
    model, loss_fn = random_loss(REPLAYED[name])
    states = (
        random.getstate(),
        held.random.getstate(),
        held.numpy.bit_generator.state,
        torch.get_rng_state(),
    )
    numpy_state, own = np.random.get_state(legacy=False), held.torch.get_state()
    assert len({float(loss_fn(token_batch()).detach()) for _ in range(20)}) > 1, "premise: the loss is random"
    random.setstate(states[0])
    held.random.setstate(states[1])
    held.numpy.bit_generator.state = states[2]
    held.torch.set_state(own)
    np.random.seed(0)
    torch.set_rng_state(states[3])
    assert check(model, loss_fn, token_batch(), weight=count_tokens("labels")).informative
    with pytest.raises(LossSpecError, match="count_tokens"):
        check(model, loss_fn, token_batch())
    assert random.getstate() == states[0] and held.random.getstate() == states[1]
    assert held.numpy.bit_generator.state == states[2] and torch.equal(torch.get_rng_state(), states[3])
    assert str(np.random.get_state(legacy=False)) == str(numpy_state) and torch.equal(
        held.torch.get_state(), own
    )


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_draws_that_cannot_be_replayed_warn_and_never_raise(name: str) -> None:
    """A few seeds may pass: a random permutation can be the identity in every micro-batch."""
    model, loss_fn = random_loss(NOT_REPLAYED[name])
    reasons: list[str] = []
    for seed in range(20):
        random.seed(seed)
        np.random.seed(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reasons.append(check(model, loss_fn, token_batch(), weight=count_tokens("labels")).reason)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (reasons[-1] == NOT_REPEATABLE)
        assert all("could not check" in text and "verify" in text for text in texts)
    assert reasons.count(NOT_REPEATABLE) >= 17 and set(reasons) <= {NOT_REPEATABLE, ""}


def test_without_replay_a_wrong_declaration_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: generators of Python and NumPy are not rewound between micro-batches."""
    monkeypatch.setattr(Generators, "set", lambda self, states: None)
    monkeypatch.setattr(Generators, "rewind", lambda self, start, end: None)
    for name in ("NumPy once", "Python once"):
        model, loss_fn = random_loss(REPLAYED[name])
        with pytest.warns(UserWarning, match="could not check"):
            check(model, loss_fn, token_batch())


# -- evaluation mode ----------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Detector like torchvision's: losses of random proposals in training, detections in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 12)
        self.scores, self.box = nn.Linear(12, CLASSES), nn.Linear(12, 1)

    def forward(self, x: Tensor, label: Tensor) -> Any:
        proposals = self.trunk(x).tanh().unflatten(1, (4, 3)).repeat(1, 1, 4)
        if not self.training:
            return [{"scores": self.scores(one)} for one in proposals]
        losses = []
        for one, wanted in zip(proposals, label, strict=True):
            sampled = one[torch.randperm(len(one))[:2]]
            losses.append(functional.cross_entropy(self.scores(sampled), wanted.repeat(2)))
        return {"scores": torch.stack(losses).mean(), "box": self.box(proposals).square().mean()}


class Packed(nn.Module):
    """LSTM on packed sequences: its dropout cannot be drawn per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.out = nn.Linear(6, 11)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(batch["ids"]), batch["lengths"], batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(
            self.body(packed)[0], batch_first=True, total_length=batch["ids"].shape[1]
        )
        return self.out(out)


def test_a_model_that_gives_no_losses_in_evaluation_is_checked_in_training() -> None:
    model = Detector()

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        return torch.stack(list(model(batch["x"], batch["label"]).values())).sum()

    model.eval()
    with pytest.raises(AttributeError):
        loss_fn(row_batch(torch.float32))
    model.train()
    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=4)
    assert accumulate(row_batch(torch.float32)).made
    with pytest.raises((LossSpecError, CoupledSamplesError)):
        check(model, lambda b: 2 * len(b["x"]) * loss_fn(b), row_batch(torch.float32))


def test_dropout_that_cannot_be_drawn_per_sample_is_disabled() -> None:
    model = Packed()
    loss = lambda batch: token_mean(model(batch), batch)  # noqa: E731
    assert check(model, loss, token_batch(), weight=count_tokens("labels")).informative
    with pytest.raises(LossSpecError, match="count_tokens"):
        check(model, loss, token_batch())
    assert model.training and model.body.dropout == 0.5


def test_an_error_on_smaller_micro_batches_becomes_a_warning() -> None:
    model = nn.Linear(FEATURES, CLASSES)

    def only_for_batches_of_4(batch: dict[str, Tensor]) -> Tensor:
        assert len(batch["x"]) == 4, "a batch of 4"
        return (model(batch["x"]) - batch["soft"]).square().mean()

    with pytest.warns(UserWarning, match=r"could not check .*AssertionError: a batch of 4"):
        assert check(model, only_for_batches_of_4, row_batch(torch.float32)).reason == NOT_EVALUATED


@pytest.mark.parametrize("by", [KeyError, RuntimeError, ZeroDivisionError])
def test_an_error_of_the_loss_propagates_unchanged(by: type[Exception]) -> None:
    model = nn.Linear(FEATURES, CLASSES)

    def broken(batch: dict[str, Tensor]) -> Tensor:
        raise by("the user's")

    with pytest.raises(by, match="the user's"):
        check(model, broken, row_batch(torch.float32))


def test_an_error_inside_the_check_becomes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise TypeError("a mode that this code does not bear")

    model = nn.Linear(FEATURES, CLASSES)
    monkeypatch.setattr(evaluation, "sample_stream", broken)
    with pytest.warns(UserWarning, match=r"could not check .*does not bear"):
        done = check(model, lambda b: (model(b["x"]) - b["soft"]).square().mean(), row_batch(torch.float32))
    assert done.reason == NOT_EVALUATED


def test_a_loss_that_raises_on_single_samples_is_checked_on_larger_splits() -> None:
    """BatchNorm raises on a single sample; parts of two samples still show the coupling."""
    model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 5)
    )
    raised, evaluated = Counter[int](), Counter[int]()

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        samples = len(batch["x"])
        try:
            out = model(batch["x"])
        except ValueError:  # more than 1 value per channel is needed
            raised[samples] += 1
            raise
        evaluated[samples] += 1
        return (out - batch["soft"]).square().mean()

    with pytest.raises(CoupledSamplesError, match=r"samples influence each other .* \(weight 2\)"):
        check(model, loss_fn, row_batch(torch.float32))
    assert set(raised) == {1}, "premise: the splits into single samples raised"
    assert 1 not in evaluated and evaluated[2] > 0


def test_a_reentrant_checkpoint_hides_no_gradient() -> None:
    """Reentrant checkpointing needs backward(); the check restores `.grad` afterwards."""
    torch.manual_seed(0)
    model = Tokens(lambda d: nn.Linear(d, d)).double()
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    model.out.bias.grad = torch.ones_like(model.out.bias)

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        hidden = model.embed(batch["ids"])
        out = checkpoint(lambda h: model.out(model.body(h)), hidden, use_reentrant=True)
        return token_mean(out, batch)

    batch = token_batch()
    halves = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 4), slice(4, 8))]
    one, two = (float(loss_fn(half).detach()) for half in halves)
    assert abs(one - two) < 1e-12, "premise: both halves have the same loss"
    with pytest.raises(LossSpecError, match="count_tokens"):
        check(model, loss_fn, batch)
    assert (
        torch.equal(model.out.bias.grad, torch.ones_like(model.out.bias)) and model.embed.weight.grad is None
    )


# -- losses that run in one precision only -----------------------------------------------------------------


def only_in_its_own_dtype(model: nn.Module, share: float) -> Callable[[Any], Tensor]:
    dtype = next(model.parameters()).dtype

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["ids"])
        assert out.dtype is dtype, "a kernel for one dtype"
        return token_mean(out, batch) + share * out.float().square().mean().to(dtype)

    return loss_fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_float64_a_large_difference_still_raises(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tokens(lambda d: nn.Linear(d, d)).to(dtype)
    with pytest.raises(LossSpecError, match="count_tokens"):
        check(model, only_in_its_own_dtype(model, 0.0), token_batch())


def test_without_float64_a_right_declaration_in_float32_passes_without_warning() -> None:
    torch.manual_seed(0)
    model = Tokens(lambda d: nn.Linear(d, d))
    loss_fn = only_in_its_own_dtype(model, 0.0)
    assert check(model, loss_fn, token_batch(), weight=count_tokens("labels")).informative


def test_the_warning_of_hidden_rounding_is_issued_once() -> None:
    torch.manual_seed(0)
    model = Tokens(lambda d: nn.Linear(d, d)).bfloat16()
    loss_fn = only_in_its_own_dtype(model, 0.2)
    with pytest.warns(UserWarning, match=r"rounding may hide .* does not run in float64") as caught:
        check(model, loss_fn, token_batch(), weight=count_tokens("labels"))
    assert len(caught) == 1
