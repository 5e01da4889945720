"""Token budgets: sorted, trimmed and packed windows give the update of the large batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from superbatch.batch.split import split
from superbatch.lab.recipes.text import IGNORE, text
from superbatch.torch import Accumulator, TokenBudget, Update, count_tokens, verify
from superbatch.torch.options import PerSampleRandom
from superbatch.torch.rng.sample_rng import sample_stream
from superbatch.torch.window.microbatches import microbatches_of
from tests.torch.helpers import (
    TinyLM,
    assert_same_parameters,
    large_batch,
    sgd,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
    train_both,
)

LENGTHS = [1, 7, 3, 2, 5, 4, 6, 2]
OPTIONS: dict[str, dict[str, Any]] = {
    "padded": {"padded": True},
    "sort": {"sort": True},
    "padded, sort": {"padded": True, "sort": True},
    "trim": {"trim": ("ids", "labels")},
    "sort, trim": {"sort": True, "trim": ("ids", "labels")},
    "padded, sort, trim": {"padded": True, "sort": True, "trim": ("ids", "labels")},
}


def padded(lengths: list[int], *, seed: int = 4, width: int = 7) -> dict[str, Tensor]:
    """Return `tokens` with padded ids and their lengths."""
    batch = tokens(lengths, seed=seed, width=width)
    batch["lengths"] = torch.tensor(lengths)
    batch["ids"][torch.arange(width) >= batch["lengths"][:, None]] = 0
    return batch


@pytest.mark.parametrize("name", OPTIONS)
def test_the_update_is_that_of_the_large_batch(name: str) -> None:
    batches = [padded(LENGTHS, seed=seed) for seed in range(3)]
    budget = TokenBudget(9, **OPTIONS[name])
    both = train_both(tiny_lm, token_mean, batches, microbatch_size=budget, weight=count_tokens("labels"))
    both.check()
    assert both.updates[0].microbatches >= 4
    assert both.updates[0].weight == 30
    assert both.updates[0].samples == 8
    microbatches, sizes, order = microbatches_of(batches[0], budget, {}, need_samples=True)
    assert sizes == [len(mb["ids"]) for mb in microbatches]
    assert (order is not None) == ("sort" in name)  # premise: samples are reordered
    narrow = {mb["ids"].shape[1] for mb in microbatches}
    assert (min(narrow) < 7) == ("trim" in name)  # premise: padding was cut off


@given(
    lengths=st.lists(st.integers(0, 7), min_size=2, max_size=16),
    budget=st.integers(7, 30),
    options=st.sampled_from(list(OPTIONS)),
    by=st.sampled_from(["samples", "tokens", "returned"]),
    seed=st.integers(0, 2**16),
)
def test_random_lengths(lengths: list[int], budget: int, options: str, by: str, seed: int) -> None:
    assume(any(lengths))
    batch = padded(lengths, seed=seed)
    reference, model = tiny_lm(), tiny_lm()
    count = count_tokens("labels")

    def objective(model: nn.Module, batch: Any) -> Tensor:
        if by != "samples":
            return token_mean(model, batch)
        logits = model(batch["ids"]).transpose(1, 2)
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none").sum(1).mean()

    def loss_fn(microbatch: Any) -> Any:
        loss = objective(model, microbatch)
        return (loss, count(microbatch)) if by == "returned" else loss

    start = start_of(reference)
    seen = large_batch(sgd(reference.parameters()), lambda b: objective(reference, b), [batch])
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=TokenBudget(budget, **OPTIONS[options]),
        weight={"samples": None, "tokens": count, "returned": "returned"}[by],
        check=False,
    )
    update = accumulate(batch)
    assert update.loss == pytest.approx(seen.losses[0], rel=1e-12)
    assert_same_parameters(reference, model, 1e-12, start=start)


# ---- random streams


class NoisyLM(TinyLM):
    """Model whose dropout draws do not depend on the width of the padding."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embedding(ids), 0.2, self.training)
        x = x * (1 + 0.1 * torch.randn(len(ids), 1, 1, dtype=x.dtype))
        return self.head(nn.functional.dropout1d(torch.tanh(self.mixer(x.cumsum(1))), 0.3, self.training))


def results_per_sample(batch: Any, size: int | TokenBudget, draw: Any) -> list[Any]:
    """Return the result of `draw(microbatch)` for each sample, in the order of the batch."""
    microbatches, sizes, order = microbatches_of(batch, size, {}, need_samples=True)
    assert sizes is not None
    order = list(range(sum(sizes))) if order is None else order
    results: dict[int, Any] = {}
    start = 0
    for microbatch, count in zip(microbatches, sizes, strict=True):
        indices = order[start : start + count]
        with sample_stream(5, indices=indices):
            results.update(zip(indices, draw(microbatch), strict=True))
        start += count
    return [results[i] for i in range(start)]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_sample_keeps_its_random_stream(name: str) -> None:
    batch, model = padded(LENGTHS), NoisyLM()
    reference = results_per_sample(batch, 8, lambda microbatch: model(microbatch["ids"]))
    again = results_per_sample(batch, 8, lambda microbatch: model(microbatch["ids"]))
    assert all(torch.equal(a, b) for a, b in zip(reference, again, strict=True))
    assert not torch.equal(reference[0][0], model.eval()(batch["ids"])[0][0])  # premise: there is noise
    model.train()
    ours = results_per_sample(
        batch, TokenBudget(9, **OPTIONS[name]), lambda microbatch: model(microbatch["ids"])
    )
    for mine, whole, length in zip(ours, reference, LENGTHS, strict=True):
        torch.testing.assert_close(mine[:length], whole[:length], rtol=1e-12, atol=1e-12)


def noisy_accumulator(model: nn.Module, size: int | TokenBudget | None, loss_fn: Any = None) -> Accumulator:
    return Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn or (lambda microbatch: token_mean(model, microbatch)),
        microbatch_size=size,
        weight=count_tokens("labels"),
        participants=[PerSampleRandom()],
        check=loss_fn is None,
    )


def trained(size: int | TokenBudget | None, batches: list[Any]) -> tuple[nn.Module, list[Update]]:
    model = NoisyLM()
    torch.manual_seed(11)
    accumulate = noisy_accumulator(model, size)
    return model, [accumulate(batch) for batch in batches]


@pytest.mark.parametrize("name", OPTIONS)
def test_training_with_dropout_does_not_depend_on_the_packing(name: str) -> None:
    batches = [padded(LENGTHS, seed=seed) for seed in range(3)]
    reference, updates = trained(None, batches)
    model, packed = trained(TokenBudget(9, **OPTIONS[name]), batches)
    assert packed[0].microbatches >= 4
    assert_same_parameters(reference, model, 1e-10, start=start_of(NoisyLM()))
    assert [update.loss for update in packed] == pytest.approx([update.loss for update in updates], rel=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_saved_window_resumes_in_its_order(name: str) -> None:
    """A new accumulator resumes a window that was saved after two micro-batches."""
    batch, reference = padded(LENGTHS), trained(None, [padded(LENGTHS)])[0]
    model = NoisyLM()
    torch.manual_seed(11)
    accumulator = noisy_accumulator(model, TokenBudget(9, **OPTIONS[name]))
    state: Any = None
    with accumulator.window(batch) as window:
        for number, microbatch in enumerate(window):
            window.backward(token_mean(model, microbatch))
            if number == 1:
                state = copy.deepcopy((model.state_dict(), accumulator.state_dict()))
                break
    again = NoisyLM()
    again.load_state_dict(state[0])
    accumulator = noisy_accumulator(again, TokenBudget(9, **OPTIONS[name]))
    accumulator.load_state_dict(state[1])
    with accumulator.window(batch) as window:
        for microbatch in window:
            window.backward(token_mean(again, microbatch))
    assert window.update is not None
    assert window.update.made
    assert_same_parameters(reference, again, 1e-10, start=start_of(NoisyLM()))


@pytest.mark.parametrize("name", OPTIONS)
def test_out_of_memory_in_a_sorted_window_continues_in_smaller_micro_batches(name: str) -> None:
    batch, reference = padded(LENGTHS), trained(None, [padded(LENGTHS)])[0]
    model = NoisyLM()
    torch.manual_seed(11)
    failures: list[int] = []

    def loss_fn(microbatch: Any) -> Tensor:
        if len(microbatch["ids"]) > 1:
            failures.append(len(microbatch["ids"]))
            raise MemoryError
        return token_mean(model, microbatch)

    accumulate = noisy_accumulator(model, TokenBudget(30, **OPTIONS[name]), loss_fn)
    with pytest.warns(UserWarning, match="memory ran out"):
        update = accumulate(batch)
    assert failures  # premise
    assert update.microbatches == len(LENGTHS)
    assert_same_parameters(reference, model, 1e-10, start=start_of(NoisyLM()))


# ---- the recipe


def text_lengths(batch: Any) -> list[int]:
    return (batch["labels"] != IGNORE).sum(1).tolist()


def test_the_text_recipe_pads_less() -> None:
    """Packing lines of the Python library reduces padding from about 24 % to 5 % of positions."""
    recipe = text(lines=2048)
    batch = recipe.batch(torch.arange(128))
    longest = batch["ids"].shape[1]
    budget = TokenBudget(8 * longest, text_lengths, padded=True, sort=True, trim=("ids", "labels"))
    plain, packed = split(batch, 8), split(batch, budget)
    tokens = sum(text_lengths(batch))
    before, after = (sum(mb["ids"].numel() for mb in microbatches) for microbatches in (plain, packed))
    assert sum(sum(text_lengths(mb)) for mb in packed) == tokens  # no token is lost
    assert before == batch["ids"].numel()
    assert 1 - tokens / before > 0.15  # premise: lines differ in length
    assert after - tokens < 0.3 * (before - tokens)
    assert len(packed) < len(plain)  # and no micro-batch is larger than before
    assert max(mb["ids"].numel() for mb in packed) <= max(mb["ids"].numel() for mb in plain)


def test_the_packed_text_recipe_gives_the_update_of_the_large_batch() -> None:
    recipe = text(lines=2048)
    batches = [recipe.batch(torch.arange(first, first + 64)) for first in (0, 64, 128)]
    both = train_both(
        lambda: recipe.model(0).double(),
        lambda model, batch: recipe.loss_fn(model)(batch),
        batches,
        microbatch_size=TokenBudget(384, text_lengths, padded=True, sort=True, trim=("ids", "labels")),
        weight=recipe.weight,
    )
    both.check()
    assert all(update.microbatches > 4 for update in both.updates)


# ---- verify


def verified(model: nn.Module, loss_fn: Any, options: dict[str, Any]) -> Any:
    size = TokenBudget(9, **options)
    return verify(model, loss_fn, padded(LENGTHS), microbatch_size=size, weight=count_tokens("labels"))


@pytest.mark.parametrize("name", OPTIONS)
def test_verify_packs_as_training_does(name: str) -> None:
    model = tiny_lm()
    report = verified(model, lambda microbatch: token_mean(model, microbatch), OPTIONS[name])
    assert report.exact
    assert len(report.comparisons[0].split) >= 4


def test_verify_finds_a_model_whose_outputs_depend_on_padding() -> None:
    """Trimming is exact only if padding does not change the outputs of the model."""
    model = tiny_lm()

    def loss_fn(microbatch: Any) -> Tensor:
        logits = model(microbatch["ids"])
        logits = logits + logits.mean(1, keepdim=True)  # over padding too
        return nn.functional.cross_entropy(logits.flatten(0, 1), microbatch["labels"].flatten())

    assert verified(model, loss_fn, OPTIONS["padded, sort"]).exact
    assert not verified(model, loss_fn, OPTIONS["padded, sort, trim"]).exact
