"""Every form of batch gives the update of the real large batch, compared per parameter."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import (
    Accumulator,
    TokenBudget,
    Window,
    class_weights,
    count_tokens,
    sample_weights,
    windows,
)
from superbatch.torch.options import Split
from tests.torch.helpers import (
    assert_same_parameters,
    large_batch,
    mlp,
    mse,
    per_sample,
    rows,
    sgd,
    squared_sum,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
    train_both,
)

DTYPES = [torch.float64, torch.float32]


def whole(microbatches: Any) -> tuple[Tensor, Tensor]:
    """Return the batch of all micro-batches of a window."""
    return torch.cat([x for x, _ in microbatches]), torch.cat([y for _, y in microbatches])


# -- batches that the accumulator splits ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("microbatch_size", [None, *range(1, 12)])
def test_every_split_of_a_batch(microbatch_size: int | None, dtype: torch.dtype) -> None:
    both = train_both(lambda: mlp(dtype), mse, rows(11, 4, dtype), microbatch_size=microbatch_size)
    both.check()
    expected = 1 if microbatch_size is None else -(-11 // microbatch_size)
    assert {update.microbatches for update in both.updates} == {expected}
    assert {update.samples for update in both.updates} == {update.weight for update in both.updates} == {11}


def test_changing_the_split_during_a_run_does_not_change_updates() -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(12, 5)
    optimizer, ours = sgd(reference.parameters()), sgd(model.parameters())
    large_batch(optimizer, lambda batch: mse(reference, batch), batches)
    for size, batch in zip([1, 12, 5, 7, 3], batches, strict=True):
        Accumulator(model, ours, lambda mb: mse(model, mb), microbatch_size=size)(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_token_budget() -> None:
    batches = [tokens([1, 7, 3, 2, 5, 4, 6, 2], seed=seed) for seed in range(3)]
    for batch in batches:
        batch["lengths"] = (batch["labels"] != -100).sum(1)
    both = train_both(
        tiny_lm, token_mean, batches, microbatch_size=TokenBudget(9, "lengths"), weight=count_tokens("labels")
    )
    both.check()
    assert both.updates[0].microbatches >= 4
    assert both.updates[0].weight == 30


# -- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("tail", [1, 2, 3, 4, 5])
@pytest.mark.sampled(2)
def test_windows_of_unequal_microbatches_with_every_tail(steps: int, tail: int, dtype: torch.dtype) -> None:
    if tail >= steps:
        tail = 0  # no tail of that length exists for this window: test the case without a tail
    sizes = [3, 1, 5, 2, 4, 2, 6, 1, 3, 2, 2, 7, 1, 4, 3, 2, 5][: 2 * steps + tail]
    loader = [rows(size, 1, dtype, seed=number)[0] for number, size in enumerate(sizes)]
    grouped = list(windows(loader, steps))
    assert [len(window) for window in grouped] == [steps, steps] + [tail] * (tail > 0)
    both = train_both(lambda: mlp(dtype), mse, [whole(window) for window in grouped], windows=grouped)
    both.check()
    if tail:
        assert both.updates[-1].samples == sum(sizes[-tail:])


def test_the_tail_can_be_dropped() -> None:
    loader = [rows(2, 1, seed=number)[0] for number in range(7)]
    grouped = list(windows(loader, 3, tail="drop"))
    assert len(loader) == 7 and [len(window) for window in grouped] == [3, 3]
    train_both(mlp, mse, [whole(window) for window in grouped], windows=grouped).check()


def test_schedules_of_windows() -> None:
    loader = [rows(2 + number % 4, 1, seed=number)[0] for number in range(16)]
    grouped = list(windows(iter(loader), lambda update: 2**update))
    assert [len(window) for window in grouped] == [1, 2, 4, 8, 1]
    train_both(mlp, mse, [whole(window) for window in grouped], windows=grouped).check()


def test_a_window_is_not_split() -> None:
    window = Window([rows(9, 1)[0]])
    both = train_both(mlp, mse, [window[0]], windows=[window], microbatch_size=2)
    both.check()
    assert both.updates[0].microbatches == 1


# -- loops over windows, several accumulators -------------------------------------------------------------


def test_a_loop_over_a_window_equals_the_call() -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 3)
    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), batches)
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=3)
    for batch in batches:
        with accumulator.window(batch) as window:
            for microbatch in window:
                window.backward(mse(model, microbatch))
        assert window.update is not None and window.update.made
    assert accumulator.updates == 3
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_several_losses_of_one_microbatch_add_up() -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 2)

    def penalty(network: nn.Module, batch: Any) -> Tensor:
        return network(batch[0]).abs().mean()

    seen = large_batch(
        sgd(reference.parameters()), lambda b: mse(reference, b) + 0.3 * penalty(reference, b), batches
    )
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=4)
    for batch, loss in zip(batches, seen.losses, strict=True):
        with accumulator.window(batch) as window:
            for microbatch in window:
                window.backward(mse(model, microbatch))
                window.backward(0.3 * penalty(model, microbatch))
        assert window.update is not None and window.update.loss == pytest.approx(loss, rel=1e-12)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_interleaved_accumulators_do_not_disturb_each_other() -> None:
    one, two = (train_both(mlp, mse, rows(10, 1, seed=s), microbatch_size=4) for s in (5, 6))
    for both, seed in ((one, 7), (two, 8), (one, 9)):
        batch = rows(6, 1, seed=seed)[0]
        before = start_of(both.reference)
        large_batch(
            torch.optim.SGD(both.reference.parameters(), lr=0.1),
            lambda b, m=both.reference: mse(m, b),
            [batch],
        )
        model = both.model
        Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda b, m=model: mse(m, b),
            microbatch_size=1,
        )(batch)
        assert_same_parameters(both.reference, model, 1e-12, start=before)


class Gan:
    """A generator and a critic whose losses are coupled."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.generator = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4)).double()

    def critic_loss(self, batch: dict[str, Tensor]) -> Tensor:
        fake = self.generator(batch["noise"]).detach()
        real = nn.functional.softplus(-self.critic(batch["real"])).mean()
        return real + nn.functional.softplus(self.critic(fake)).mean()

    def generator_loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.softplus(-self.critic(self.generator(batch["noise"]))).mean()


def gan_batches(samples: int, updates: int) -> list[dict[str, Tensor]]:
    return [
        {"real": torch.randn(samples, 4).double() + 1, "noise": torch.randn(samples, 2).double()}
        for _ in range(updates)
    ]


def train_gan_by_large_batch(gan: Gan, batches: list[dict[str, Tensor]]) -> None:
    """Compute both losses with the same networks, then make both updates."""
    critic, generator = sgd(gan.critic.parameters()), sgd(gan.generator.parameters())
    for batch in batches:
        on_critic = torch.autograd.grad(gan.critic_loss(batch), list(gan.critic.parameters()))
        on_generator = torch.autograd.grad(gan.generator_loss(batch), list(gan.generator.parameters()))
        for network, gradients in ((gan.critic, on_critic), (gan.generator, on_generator)):
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter.grad = gradient
        critic.step()
        generator.step()
        critic.zero_grad()
        generator.zero_grad()


def test_gan_with_nested_windows_over_the_same_microbatches() -> None:
    reference, gan = Gan(), Gan()
    start, batches = start_of(reference.critic, reference.generator), gan_batches(10, 4)
    train_gan_by_large_batch(reference, batches)
    networks = [gan.critic, gan.generator]
    critic = Accumulator(networks, sgd(gan.critic.parameters()), microbatch_size=3)
    generator = Accumulator(networks, sgd(gan.generator.parameters()), microbatch_size=3)
    for batch in batches:
        with critic.window(batch) as on_critic, generator.window(batch) as on_generator:
            for one, two in zip(on_critic, on_generator, strict=True):
                on_critic.backward(gan.critic_loss(one))
                on_generator.backward(gan.generator_loss(two))
    assert critic.updates == generator.updates == 4
    assert_same_parameters([reference.critic, reference.generator], networks, 1e-12, start=start)


def test_gan_with_windows_one_after_the_other() -> None:
    reference, gan = Gan(), Gan()
    start, batches = start_of(reference.critic, reference.generator), gan_batches(9, 3)
    theirs = sgd(reference.critic.parameters()), sgd(reference.generator.parameters())
    for batch in batches:
        large_batch(theirs[0], reference.critic_loss, [batch])
        large_batch(theirs[1], reference.generator_loss, [batch])
    critic = Accumulator(gan.critic, sgd(gan.critic.parameters()), gan.critic_loss, microbatch_size=4)
    generator = Accumulator(
        gan.generator, sgd(gan.generator.parameters()), gan.generator_loss, microbatch_size=2
    )
    for batch in batches:
        critic(batch)
        generator(batch)
    assert_same_parameters(
        [reference.critic, reference.generator], [gan.critic, gan.generator], 1e-12, start=start
    )


def test_two_optimizers_in_one_accumulator() -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 4)

    def optimizers(network: Any) -> list[torch.optim.Optimizer]:
        return [sgd(network[0].parameters()), torch.optim.Adam(network[2].parameters(), lr=0.01)]

    seen = large_batch(optimizers(reference), lambda batch: mse(reference, batch), batches, max_grad_norm=0.4)
    assert min(seen.norms) > 0.4, "premise: every update is clipped, over both optimizers"
    accumulate = Accumulator(
        model, optimizers(model), lambda mb: mse(model, mb), microbatch_size=4, max_grad_norm=0.4
    )
    updates = [accumulate(batch) for batch in batches]
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert [update.learning_rates for update in updates] == seen.rates == [(0.1, 0.01)] * 4


def test_a_loop_that_ends_after_the_last_backward_makes_the_update() -> None:
    """A loop such as ``zip(range(3), window)`` does not exhaust the iterator."""
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 1)
    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), batches)
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=4)
    with accumulator.window(batches[0]) as window:
        for _, microbatch in zip(range(3), window, strict=False):
            window.backward(mse(model, microbatch))
    assert window.update is not None and window.update.made
    assert_same_parameters(reference, model, 1e-12, start=start)


# -- leaving a window early -------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_at", [0, 1, 2])
@pytest.mark.parametrize("by", ["break", "exception"])
@pytest.mark.parametrize("into", ["auto", "momentum"])
def test_leaving_a_window_discards_it_and_the_next_is_exact(leave_at: int, by: str, into: Any) -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 3)
    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), batches)
    ours = sgd(model.parameters())
    accumulator = Accumulator(model, ours, lambda mb: mse(model, mb), microbatch_size=4, gradient_sum=into)
    accumulator(batches[0])
    before = copy.deepcopy((model.state_dict(), ours.state_dict(), torch.get_rng_state()))
    window = accumulator.window(batches[0])
    try:
        with window:
            for index, microbatch in enumerate(window):
                torch.rand(3)
                if by == "exception" and index == leave_at:
                    raise KeyboardInterrupt
                if by == "break" and index == leave_at:
                    break
                window.backward(mse(model, microbatch))
    except KeyboardInterrupt:
        assert by == "exception"
    assert window.update is not None and not window.update.made
    assert_identical(before, (model.state_dict(), ours.state_dict(), torch.get_rng_state()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert accumulator.updates == 1
    for batch in batches[1:]:
        accumulator(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def assert_identical(one: Any, other: Any, path: str = "") -> None:
    """Compare bit for bit, through containers."""
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_identical(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_identical(a, b, f"{path}.{index}")
    else:
        assert one == other, path


# -- reductions and weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("microbatch_size", [1, 4, 11])
def test_a_sum_loss_gives_the_mean_per_sample(microbatch_size: int, dtype: torch.dtype) -> None:
    both = train_both(
        lambda: mlp(dtype),
        squared_sum,
        rows(11, 3, dtype),
        objective=per_sample,
        microbatch_size=microbatch_size,
        reduction="sum",
        max_grad_norm=0.8,
    )
    assert max(both.seen.norms) > 0.8
    both.check()


LENGTHS = [7, 1, 2, 6, 0, 0, 0, 3, 5, 1]  # split in sizes 1, 2 or 4, one micro-batch has no token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("microbatch_size", [1, 2, 4, 10])
def test_token_mean(microbatch_size: int, dtype: torch.dtype) -> None:
    batches = [tokens(LENGTHS, seed=seed) for seed in range(3)]
    if microbatch_size <= 2:
        assert not sum(LENGTHS[4:6]), "premise: a micro-batch without tokens"
    both = train_both(
        lambda: tiny_lm(dtype),
        token_mean,
        batches,
        microbatch_size=microbatch_size,
        weight=count_tokens("labels"),
    )
    both.check()
    assert both.updates[0].weight == sum(LENGTHS)


def shifted_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def test_token_mean_of_shifted_labels() -> None:
    batches = [tokens(LENGTHS, seed=seed) for seed in range(3)]
    both = train_both(
        tiny_lm, shifted_mean, batches, microbatch_size=3, weight=count_tokens("labels", shift=True)
    )
    both.check()
    assert both.updates[0].weight == sum(max(length - 1, 0) for length in LENGTHS) != sum(LENGTHS)


def test_sum_over_tokens() -> None:
    def token_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")

    train_both(
        tiny_lm,
        token_sum,
        [tokens(LENGTHS, seed=seed) for seed in range(3)],
        objective=token_mean,
        microbatch_size=2,
        reduction="sum",
        weight=count_tokens("labels"),
    ).check()


@pytest.mark.parametrize("into", ["auto", "momentum"])
def test_a_window_without_any_weight_changes_nothing(into: Any) -> None:
    model = tiny_lm()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accumulate = Accumulator(
        model,
        optimizer,
        lambda mb: token_mean(model, mb),
        microbatch_size=2,
        weight=count_tokens("labels"),
        scheduler=scheduler,
        gradient_sum=into,
    )
    accumulate(tokens(LENGTHS))  # so that a momentum buffer exists
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    random = torch.get_rng_state()
    update = accumulate(tokens([0, 0, 0, 0, 0]))
    assert not update.made and "weight" in str(update.skipped)
    assert update.weight == 0 and accumulate.updates == 1
    assert_identical(before, (model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def weighted_mean(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, weight = batch
    return (weight * (model(x) - y).square().mean(1)).sum() / weight.sum()


def weighted_rows(samples: int, updates: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    weight = torch.linspace(0.1, 3.0, samples, dtype=torch.float64)
    weight[2] = 0.0
    return [(x, y, weight) for x, y in rows(samples, updates)]


@pytest.mark.parametrize("microbatch_size", [1, 3, 4])
def test_sample_weights(microbatch_size: int) -> None:
    train_both(
        mlp, weighted_mean, weighted_rows(11, 3), microbatch_size=microbatch_size, weight=sample_weights("2")
    ).check()


PER_CLASS = torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64)


def labelled(samples: int, updates: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    labels = torch.arange(samples) % 3
    labels[1], labels[-1] = -100, 1
    return [(x, labels.roll(number)) for number, (x, _) in enumerate(rows(samples, updates, dtype))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("microbatch_size", [2, 3, 5])
def test_class_weights(microbatch_size: int, dtype: torch.dtype) -> None:
    criterion = nn.CrossEntropyLoss(weight=PER_CLASS.to(dtype))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    both = train_both(
        lambda: mlp(dtype),
        loss,
        labelled(11, 3, dtype),
        microbatch_size=microbatch_size,
        weight=class_weights(PER_CLASS.to(dtype), "1"),
    )
    both.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("microbatch_size", [1, 3, 4])
def test_weight_returned_after_the_forward(microbatch_size: int, dtype: torch.dtype) -> None:
    batches = [tokens(LENGTHS, seed=seed) for seed in range(3)]
    reference, model = tiny_lm(dtype), tiny_lm(dtype)
    start = start_of(reference)

    def loss_fn(microbatch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        # The token count is a tensor, and cross entropy over no tokens is NaN.
        return token_mean(model, microbatch), (microbatch["labels"] != -100).sum()

    seen = large_batch(
        sgd(reference.parameters()), lambda b: token_mean(reference, b), batches, max_grad_norm=0.4
    )
    assert min(seen.norms) > 0.4
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=microbatch_size,
        weight="returned",
        max_grad_norm=0.4,
    )
    updates = [accumulate(batch) for batch in batches]
    assert_same_parameters(reference, model, {torch.float64: 1e-12, torch.float32: 1e-6}[dtype], start=start)
    assert [update.weight for update in updates] == [sum(LENGTHS)] * 3
    assert [update.loss for update in updates] == pytest.approx(seen.losses, rel=1e-5)


# -- nested batches ---------------------------------------------------------------------------------------


@dataclass
class Record:
    inputs: dict[str, Any]
    target: Tensor


class Named(NamedTuple):
    x: Tensor
    y: list[Tensor]


def _dictionary(x: Tensor, y: Tensor) -> Any:
    return {"inputs": {"x": x, "names": [str(i) for i in range(len(x))]}, "y": y.numpy(), "scale": 0.5}


SHAPES: dict[str, tuple[Any, Any]] = {
    "dict": (_dictionary, lambda b: (b["inputs"]["x"], torch.as_tensor(b["y"]))),
    "tuple of tuples": (lambda x, y: ((x,), [y, "constant"]), lambda b: (b[0][0], b[1][0])),
    "dataclass": (lambda x, y: Record({"x": x, "flag": True}, y), lambda b: (b.inputs["x"], b.target)),
    "namedtuple": (lambda x, y: Named(x, [y]), lambda b: (b.x, b.y[0])),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_nested_batches(shape: str) -> None:
    build, read = SHAPES[shape]
    pairs = rows(10, 3)
    reference, model = mlp(), mlp()
    start = start_of(reference)
    large_batch(sgd(reference.parameters()), lambda batch: mse(reference, batch), pairs)
    accumulate = Accumulator(model, sgd(model.parameters()), lambda b: mse(model, read(b)), microbatch_size=4)
    assert [accumulate(build(*pair)).microbatches for pair in pairs] == [3, 3, 3]
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_unsplit_leaves() -> None:
    anchors = torch.randn(5, 3, dtype=torch.float64)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) @ batch["anchors"].T - batch["y"].sum(1, keepdim=True)).square().mean()

    batches = [{"x": x, "y": y, "anchors": anchors} for x, y in rows(10, 3)]
    train_both(mlp, loss, batches, microbatch_size=3, split=Split(unsplit=["anchors"])).check()


def packed(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    x = torch.randn(1, int(offsets[-1]), 4, generator=generator, dtype=torch.float64)
    y = torch.randn(1, int(offsets[-1]), 3, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y, "cu_seqlens": offsets}


def test_packed_sequences() -> None:
    """The samples are sequences, and each token depends only on its own sequence."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        lengths = batch["cu_seqlens"].diff().tolist()
        sums = torch.cat([sequence.cumsum(0) for sequence in batch["x"][0].split(lengths)])
        return nn.functional.mse_loss(model(sums), batch["y"][0])

    lengths = [3, 1, 6, 2, 5, 4, 1]
    both = train_both(
        mlp,
        loss,
        [packed(lengths, seed) for seed in range(3)],
        microbatch_size=TokenBudget(8, "cu_seqlens"),
        weight=lambda batch: int(batch["cu_seqlens"][-1]),
    )
    both.check()
    assert both.updates[0].samples == 7 and both.updates[0].weight == 22 and both.updates[0].microbatches >= 3


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    """A common masked mean: its loss and gradient are 0/0 if no sample counts."""
    x, y, keep = batch
    return ((model(x) - y).square().mean(1) * keep).sum() / keep.sum()


@pytest.mark.parametrize("returned", [True, False])
def test_a_nan_of_weight_zero_adds_nothing(returned: bool) -> None:
    keep = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 1, 1, 0], dtype=torch.float64)
    assert not keep.split([4, 3, 3])[1].any(), "premise: the second micro-batch has no weight"
    batches = [(x, y, keep) for x, y in rows(10, 3)]
    reference, model = mlp(), mlp()
    start = start_of(reference)
    seen = large_batch(sgd(reference.parameters()), lambda b: masked_mean(reference, b), batches)

    def loss_fn(microbatch: Any) -> Any:
        loss = masked_mean(model, microbatch)
        return (loss, microbatch[2].sum()) if returned else loss

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=4,
        weight="returned" if returned else sample_weights("2"),
    )
    updates = [accumulate(batch) for batch in batches]
    assert [update.loss for update in updates] == pytest.approx(seen.losses, rel=1e-12)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_two_losses_of_one_micro_batch_that_share_a_graph_add_up() -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 2)

    def losses(net: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = net(batch[0])
        return (outputs - batch[1]).square().mean(), outputs.abs().mean()

    large_batch(
        sgd(reference.parameters()), lambda batch: torch.stack(losses(reference, batch)).sum(), batches
    )
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=3)
    for batch in batches:
        with accumulator.window(batch) as window:
            for microbatch in window:
                first, second = losses(model, microbatch)
                window.backward(first, retain_graph=True)
                window.backward(second)
    assert_same_parameters(reference, model, 1e-12, start=start)
