"""The cases that sentence-transformers tests for cached losses.

Docstrings name tests of tests/sentence_transformer/losses/test_gradcache.py and related files. Four cases
that sentence-transformers refuses are exact here: a guide model, parameters of the loss, several outputs of
one model, and a column that the loss ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.batch.split import TokenBudget
from superbatch.errors import InputError
from superbatch.torch.gradcache.cached import cached_gradients
from tests.torch.embedding_tasks import F64, assert_same_gradients, check, gradients, info_nce, normal, tower

N = 7
F = nn.functional


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def columns(count: int) -> list[Tensor]:
    return [normal(N, 6, seed=20 + number) for number in range(count)]


def cosine_scores(z: list[Tensor]) -> Tensor:
    return F.cosine_similarity(z[0], z[1])


def cosent(z: list[Tensor], labels: Tensor) -> Tensor:
    scores = 20 * cosine_scores(z)
    differences = scores.unsqueeze(0) - scores.unsqueeze(1)
    ordered = labels.unsqueeze(0) < labels.unsqueeze(1)
    return torch.cat([torch.zeros(1, dtype=F64), differences[ordered]]).logsumexp(0)


def batch_all_triplet(z: list[Tensor], labels: Tensor) -> Tensor:
    """Mean of the positive losses of all triplets (anchor, positive, negative) that the labels allow."""
    distance = torch.cdist(z[0], z[0]).square()
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    others = ~torch.eye(len(labels), dtype=torch.bool)
    valid = (same & others).unsqueeze(2) & ~same.unsqueeze(1)
    violations = (distance.unsqueeze(2) - distance.unsqueeze(1) + 5.0)[valid].relu()
    return violations.sum() / (violations > 0).sum()


def contrastive(z: list[Tensor], labels: Tensor) -> Tensor:
    distance = 1 - cosine_scores(z)
    return (labels * distance.square() + (1 - labels) * (0.5 - distance).relu().square()).mean() / 2


LOSSES: dict[str, tuple[Callable[[list[Tensor], Tensor], Tensor], int, Tensor]] = {
    "multiple negatives ranking": (lambda z, _: info_nce(z[0], torch.cat(z[1:]), 20.0), 2, torch.zeros(N)),
    "with hard negatives": (lambda z, _: info_nce(z[0], torch.cat(z[1:]), 20.0), 3, torch.zeros(N)),
    "cosine": (lambda z, y: F.mse_loss(cosine_scores(z), y), 2, torch.linspace(0, 1, N, dtype=F64)),
    "triplet": (lambda z, _: F.triplet_margin_loss(z[0], z[1], z[2], margin=5.0), 3, torch.zeros(N)),
    "cosent": (cosent, 2, torch.linspace(0, 1, N, dtype=F64)),
    "contrastive": (contrastive, 2, torch.arange(N) % 2),
    "batch all triplet": (batch_all_triplet, 1, torch.arange(N) // 2),
}


@pytest.mark.parametrize("size", [2, 3, 5, 50])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_that_of_the_large_batch_for_any_size(name: str, size: int):
    """test_gradcache_matches_the_wrapped_loss, test_cached_mnrl_matches_mnrl."""
    loss, count, labels = LOSSES[name]
    check(
        [tower()],
        lambda m, b: ([torch.tanh(m[0](x)) for x in b[0]], b[1]),  # or the last bias has no gradient
        lambda _, z: loss(*z),
        (columns(count), labels),
        size,
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: info_nce(z[0], z[1], 50.0) + info_nce(z[1], z[0], 50.0),
        # Hard negatives get larger weights, which have no gradient.
        lambda z: (
            -F.log_softmax(z[0] @ z[1].T, 1).diagonal() * (z[0] @ z[1].T).detach().softmax(1).sum(0)
        ).sum(),
        # All similarities within and between the columns in one partition function.
        lambda z: torch.cat([z[0] @ z[1].T, z[0] @ z[0].T, z[1] @ z[1].T]).logsumexp((0, 1)),
        # Matryoshka: the same loss on the first dimensions.
        lambda z: sum(info_nce(z[0][:, :d], z[1][:, :d], 20.0) for d in (4, 3, 2)),
        # Global orthogonal regularisation: the sum of several losses.
        lambda z: info_nce(*z) + (z[0] @ z[1].T).square().mean() + z[0].mean(0).square().sum(),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_other_losses_of_two_columns(loss: Any, size: int):
    """test_gradcache_matches_cached_mnrl, ..._matryoshka, ..._dict_valued_loss (the sum)."""
    check([tower()], lambda m, b: [m[0](x) for x in b], lambda _, z: loss(z), columns(2), size)


def loss_terms(z: list[Tensor]) -> dict[str, Tensor]:
    return {"ranking": info_nce(z[0], z[1], 20.0), "orthogonal": (z[0] @ z[1].T).square().mean()}


def test_a_dict_of_losses_is_refused_with_advice():
    """test_gradcache_dict_valued_loss, which sums them: a total among its terms would count twice."""
    model = tower()

    def cached(loss: Any) -> Tensor:
        return cached_gradients(lambda b: [model(x) for x in b], loss, columns(2), 2, models=model)

    with pytest.raises(
        InputError, match=r"loss of type dict.*one tensor.*Return one tensor, such as sum\(losses\.values"
    ):
        cached(loss_terms)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("size", [2, 3, 50])
def test_the_sum_of_a_dict_of_losses(size: int):
    """test_gradcache_dict_valued_loss: the sum, which the error above advises, is exact."""
    check(
        [tower()],
        lambda m, b: [m[0](x) for x in b],
        lambda _, z: torch.stack([*loss_terms(z).values()]).sum(),
        columns(2),
        size,
    )


def test_two_calls_before_one_update_add_up():
    """test_gradcache_two_forwards_before_one_backward."""
    model, batches = tower(), [columns(2), [x * 2 for x in columns(2)]]

    def encode(b: Any) -> Any:
        return [model(x) for x in b]

    sum(info_nce(*encode(batch)) for batch in batches).backward()  # type: ignore[union-attr]
    expected = gradients(model)
    model.zero_grad()
    for batch in batches:
        cached_gradients(encode, lambda z: info_nce(*z), batch, 2, models=model)
    assert_same_gradients(expected, gradients(model))


@pytest.mark.parametrize("training", [True, False])
def test_no_grad_gives_the_loss_without_gradients(training: bool):
    """test_gradcache_under_no_grad."""
    model = tower().train(training)
    calls: list[bool] = []

    def encode(b: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return [model(x) for x in b]

    with torch.no_grad():
        loss = cached_gradients(encode, lambda z: info_nce(*z), columns(2), 2, models=model)
        expected = info_nce(*encode(columns(2)))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(calls) == 4 + 1 and not any(calls)


def test_a_guide_model_and_a_head_of_the_loss():
    """test_gradcache_rejects_unwrappable_losses: GISTEmbedLoss, SoftmaxLoss."""
    model, guide, head = tower(), tower(seed=9).requires_grad_(requires_grad=False), nn.Linear(12, 2).to(F64)

    def encode(m: Any, b: Any) -> Any:
        return [m[0](x) for x in b], [m[1](x) for x in b]

    def loss(m: Any, z: Any) -> Tensor:
        (a, b), (guide_a, guide_b) = z
        # False negatives. Without the margin, rounding would decide about the diagonal.
        sure = guide_a @ guide_b.T > (guide_a * guide_b).sum(1, keepdim=True) + 1e-6
        assert sure.any() and not sure.all()
        logits = (a @ b.T).masked_fill(sure, -1e9)
        pair = torch.cat([a, b, (a - b).abs()], 1)
        return F.cross_entropy(logits, torch.arange(N)) + F.cross_entropy(m[2](pair), torch.arange(N) % 2)

    frozen = [f"1.{name}" for name, _ in guide.named_parameters()]
    check([model, guide, head], encode, loss, columns(2), 3, zero=frozen)


def test_one_loss_per_layer():
    """test_gradcache_adaptive_layer_warns: several outputs of one model."""

    def encode(m: Any, b: Tensor) -> list[Tensor]:
        layers = [b]
        for layer in m[0]:
            layers.append(layer(layers[-1]))
        return layers[1:]

    check(
        [tower()],
        encode,
        lambda _, z: sum(info_nce(layer, layer.roll(1, 0)) for layer in z),
        normal(N, 6),
        3,
    )


def test_a_bag_of_embeddings_with_offsets():
    """test_gradcache_rejects_static_embedding: a list of samples, whose ids the encoder concatenates."""
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(11, 4).to(F64)
    ids = [torch.tensor(sample) for sample in ([1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [0, 1])]

    def encode(m: Any, samples: list[Tensor]) -> Tensor:
        offsets = torch.tensor([0, *map(len, samples[:-1])]).cumsum(0)
        return m[0](torch.cat(samples), offsets)

    check([bag], encode, lambda _, z: info_nce(z, z.roll(1, 0)), ids, 2, per_sample=[""])


def test_a_budget_of_tokens():
    """`mini_batch_num_tokens`: no micro-batch has more tokens than the budget."""
    lengths = torch.tensor([5, 1, 1, 2, 4, 3, 1])
    seen: list[int] = []

    def encode(m: Any, b: Any) -> Tensor:
        seen.append(int(b[1].sum()))
        return m[0](b[0])

    budget = TokenBudget(6, "1")
    check([tower()], encode, lambda _, z: info_nce(z, z.roll(1, 0)), (normal(N, 6), lengths), budget)
    assert max(seen[1:]) <= 6 and len(set(seen[1:])) > 1
