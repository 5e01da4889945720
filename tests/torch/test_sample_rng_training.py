"""With `PerSampleRandom` trained weights do not depend on `microbatch_size`, also with dropout and noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superbatch.torch import Accumulator, TokenBudget, Window, count_tokens
from superbatch.torch.options import PerSampleRandom
from tests.torch.helpers import TinyLM, assert_same_parameters, mlp, mse, rows, start_of, token_mean, tokens

SIZES = [1, 3, 7, None]


def dropouts() -> nn.Sequential:
    """Two layers of dropout: for a single one, the CPU generator draws the same masks under every split."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(6, 3),
    ).double()


class Recomputed(nn.Module):
    """Net with dropout inside a checkpoint: the backward must repeat the masks."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.net = dropouts()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant:  # else the checkpoint gets no gradient
            x = x.requires_grad_()
        return self.net[3:](checkpoint(self.net[:3], x, use_reentrant=self.reentrant))


class NoisyNet(nn.Module):
    """Net with dropout, Gaussian noise at the input and uniform noise at the output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.randn_like(x)) * (1 + 0.1 * torch.rand(len(x), 1, dtype=x.dtype))


MODELS: dict[str, Any] = {
    "dropout": dropouts,
    "noise": NoisyNet,
    "checkpoint": lambda: Recomputed(reentrant=False),
    "reentrant checkpoint": lambda: Recomputed(reentrant=True),
}


def train(make: Any, batches: Any, loss: Any = mse, *, streams: bool = True, **options: Any) -> nn.Module:
    model = make()
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    participants = [PerSampleRandom()] if streams else []
    accumulate = Accumulator(
        model, optimizer, lambda mb: loss(model, mb), participants=participants, **options
    )
    for batch in batches:
        assert accumulate(batch).made
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_trained_weights_do_not_depend_on_the_split(name: str) -> None:
    make, batches = MODELS[name], rows(10, 5)
    reference = train(make, batches)
    start = start_of(make())
    for size in SIZES:
        # Another order of summation changes float64's last digits over five updates of Adam.
        assert_same_parameters(reference, train(make, batches, microbatch_size=size), 1e-10, start=start)


@pytest.mark.parametrize("name", MODELS)
def test_without_per_sample_streams_weights_depend_on_the_split(name: str) -> None:
    """Premise: the models have random noise, which changes the weights."""
    make, batches = MODELS[name], rows(10, 5)
    reference, start = train(make, batches, streams=False), start_of(make())
    for size in SIZES[:-1]:
        other = train(make, batches, streams=False, microbatch_size=size)
        with pytest.raises(AssertionError, match="not the update of the large batch"):
            assert_same_parameters(reference, other, 1e-2, start=start)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_the_masks_of_the_plain_net(reentrant: bool) -> None:
    plain = train(dropouts, rows(10, 3), microbatch_size=3)
    model: Any = train(lambda: Recomputed(reentrant=reentrant), rows(10, 3), microbatch_size=7)
    assert_same_parameters(plain, model.net, 1e-10, start=start_of(dropouts()))


class DropoutLM(TinyLM):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(ids), 0.3, self.training)


def test_tokens_under_a_budget() -> None:
    """A micro-batch without tokens is left out, and later samples keep their streams."""
    batches = [tokens([5, 1, 0, 0, 7, 3, 2, 6], seed=seed) for seed in range(3)]
    for batch in batches:
        batch["lengths"] = (batch["labels"] != -100).sum(1)
    options = {"loss": token_mean, "weight": count_tokens("labels")}
    reference, start = train(DropoutLM, batches, **options), start_of(DropoutLM())
    for size in (1, 2, 5, TokenBudget(8, "lengths")):
        model = train(DropoutLM, batches, microbatch_size=size, **options)
        assert_same_parameters(reference, model, 1e-10, start=start)


@pytest.mark.parametrize("sizes", [[10], [1, 9], [4, 4, 2], [2, 1, 3, 1, 3]])
def test_windows_of_any_micro_batches(sizes: list[int]) -> None:
    batches = rows(10, 3)
    reference, start = train(MODELS["dropout"], batches), start_of(dropouts())
    windows = [Window(zip(*(leaf.split(sizes) for leaf in batch), strict=True)) for batch in batches]
    assert_same_parameters(reference, train(MODELS["dropout"], windows), 1e-10, start=start)


def test_the_generator_after_an_update_does_not_depend_on_the_split() -> None:
    """Code between updates draws the same numbers, whatever the split."""
    drawn = []
    for size in SIZES:
        train(MODELS["dropout"], rows(10, 2), microbatch_size=size)
        drawn.append(torch.rand(3))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])


def test_every_window_and_every_sample_draws_anew() -> None:
    model = mlp(dropout=0.5)
    masks: list[Any] = []
    model[2].register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    batch = (torch.ones(8, 4).double(), torch.zeros(8, 3).double())
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-9),
        lambda mb: mse(model, mb),
        participants=[PerSampleRandom()],
        microbatch_size=8,
        check=False,
    )
    accumulate(batch)
    accumulate(batch)
    one, two = masks
    assert not torch.equal(one, two)
    assert len(one.unique(dim=0)) > 4, "equal samples get different masks"


def test_the_users_loop() -> None:
    batches, models = rows(10, 3), []
    for size in (2, 10):
        model = dropouts()
        torch.manual_seed(11)
        accumulator = Accumulator(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            microbatch_size=size,
            participants=[PerSampleRandom()],
        )
        for batch in batches:
            with accumulator.window(batch) as window:
                for microbatch in window:
                    window.backward(mse(model, microbatch))
        models.append(model)
    assert_same_parameters(models[0], models[1], 1e-10, start=start_of(dropouts()))


def test_a_window_after_a_break_repeats_the_masks() -> None:
    """After a `break` the next window draws the masks of the one that was left."""
    models = []
    for leave in (True, False):
        model = dropouts()
        torch.manual_seed(11)
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda mb, m=model: mse(m, mb),
            microbatch_size=3, participants=[PerSampleRandom()],
        )  # fmt: skip
        batch = rows(10, 1)[0]
        if leave:
            with accumulator.window(batch) as window:
                for microbatch in window:
                    window.backward(mse(model, microbatch))
                    break
        assert accumulator(batch).made
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
