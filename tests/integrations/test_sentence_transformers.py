"""`cached` gives losses of sentence-transformers the gradient of the large batch, also in the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

from sentence_transformers.multi_vector_encoder import losses as multi_vector_losses
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sparse_encoder import losses as sparse_losses

from superbatch import CoupledSamplesError, InputError
from superbatch.integrations import sentence_transformers as integration
from superbatch.integrations.sentence_transformers import cached
from superbatch.torch.memory.meter import peak_bytes
from tests.integrations.encoders import (
    columns,
    dense,
    gradients,
    largest_difference,
    multi_vector,
    rows_seen,
    sparse,
    updates,
)
from tests.torch.two_ranks import found_by_both

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
]

Ranking = losses.MultipleNegativesRankingLoss
SCORES = torch.linspace(0, 1, 12, dtype=torch.float64)
CLASSES = torch.arange(12) % 3
DENSE: dict[str, tuple[Callable[[Any], nn.Module], int, Tensor | None]] = {
    "ranking": (Ranking, 2, None),
    "ranking, two negatives in one forward": (Ranking, 4, None),
    "symmetric": (
        lambda m: Ranking(m, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"),
        2,
        None,
    ),
    "CoSENT": (losses.CoSENTLoss, 2, SCORES),
    "AnglE": (losses.AnglELoss, 2, SCORES),
    "hardest triplets": (losses.BatchHardTripletLoss, 1, CLASSES),
    "hardest pairs": (losses.OnlineContrastiveLoss, 2, CLASSES % 2),
    "own classifier": (lambda m: losses.SoftmaxLoss(m, 16, 3).double(), 2, CLASSES),
    "nested dimensions": (lambda m: losses.MatryoshkaLoss(m, Ranking(m), [16, 8, 4]), 2, None),
    "several terms": (losses.GlobalOrthogonalRegularizationLoss, 2, None),
    "two copies of the model": (losses.ContrastiveTensionLossInBatchNegatives, 1, None),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_loss_over_the_large_batch(name: str, tmp_path: Path) -> None:
    make, number, labels = DENSE[name]
    model = dense(tmp_path)
    features, loss = columns(model, 12, number), make(model)
    value, real = gradients(loss, features, labels)
    seen = rows_seen(model)
    found_value, found = gradients(cached(loss, microbatch_size=5), features, labels)
    assert found_value == pytest.approx(value, rel=1e-12)
    assert largest_difference(found, real) < 1e-12
    assert len(seen) >= 6, "the premise: there are micro-batches, each encoded twice"
    assert max(seen) <= 5


def test_a_loss_with_a_guide(tmp_path: Path) -> None:
    model, guide = dense(tmp_path / "model"), dense(tmp_path / "guide", seed=5)
    loss, features = losses.GISTEmbedLoss(model, guide), columns(model)
    _, real = gradients(loss, features)
    seen = rows_seen(guide)
    assert largest_difference(gradients(cached(loss, microbatch_size=5), features)[1], real) < 1e-12
    assert seen == [4] * 6, "the guide encodes in micro-batches too, once"


def test_losses_with_caching_of_their_own(tmp_path: Path) -> None:
    model, guide = dense(tmp_path / "model"), dense(tmp_path / "guide", seed=5)
    features = columns(model)
    pairs = [
        (Ranking(model), losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=5)),
        (
            losses.GISTEmbedLoss(model, guide),
            losses.CachedGISTEmbedLoss(model, guide, mini_batch_size=5),
        ),
    ]
    for plain, host in pairs:
        ours = gradients(cached(plain, microbatch_size=5), features)[1]
        assert largest_difference(ours, gradients(host, features)[1]) < 1e-12


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sparse_encoders(tmp_path: Path) -> None:
    model = sparse(tmp_path)
    inner = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    loss = sparse_losses.SpladeLoss(
        model, inner, document_regularizer_weight=3e-3, query_regularizer_weight=5e-3
    )
    features = columns(model)
    _, real = gradients(loss, features)
    assert largest_difference(gradients(cached(loss, microbatch_size=5), features)[1], real) < 1e-12


def test_multi_vector_encoders(tmp_path: Path) -> None:
    model = multi_vector(tmp_path)
    loss = multi_vector_losses.MultiVectorMultipleNegativesRankingLoss(model)
    features = columns(model)
    _, real = gradients(loss, features)
    assert largest_difference(gradients(cached(loss, microbatch_size=5), features)[1], real) < 1e-12


def gradient_with_the_same_dropout(
    model: nn.Module, features: list[dict[str, Any]], seed: int
) -> dict[str, Tensor]:
    """Return the gradient of the loss over embeddings of micro-batches of 4, each encoded once in order."""

    class Parts(nn.Module):
        def forward(self, column: dict[str, Tensor]) -> dict[str, Tensor]:
            cut = [{n: v[i : i + 4] for n, v in column.items() if isinstance(v, Tensor)} for i in (0, 4, 8)]
            return {"sentence_embedding": torch.cat([model(part)["sentence_embedding"] for part in cut])}

    loss = Ranking(model)
    loss.model = Parts()
    model.zero_grad()
    torch.manual_seed(seed)
    loss(features, None).backward()
    return {f"model.{name}": each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_both_forwards_have_the_same_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense(tmp_path, dropout=0.3)
    features = columns(model)
    real = {name: each.clone() for name, each in gradient_with_the_same_dropout(model, features, 1).items()}
    other = gradient_with_the_same_dropout(model, features, 2)
    assert largest_difference(other, real) > 1e-2, "the premise: there is dropout"
    loss = cached(Ranking(model), microbatch_size=5)
    torch.manual_seed(1)
    assert largest_difference(gradients(loss, features)[1], real) < 1e-12

    def forgetful(*arguments: Any, **options: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(*arguments, preserve_rng_state=False, **options)

    monkeypatch.setattr(integration, "checkpoint", forgetful)
    torch.manual_seed(1)
    assert largest_difference(gradients(loss, features)[1], real) > 1e-2, (
        "the mutant: other masks in the second forward"
    )


def test_prompts(tmp_path: Path) -> None:
    model = dense(tmp_path, include_prompt=False)
    features = columns(model, prompt="the big red ")
    assert features[0]["prompt_length"] > 1, "the premise"
    loss = Ranking(model)
    _, real = gradients(loss, features)
    for length in (features[0]["prompt_length"], torch.tensor([features[0]["prompt_length"]])):
        given = [{**column, "prompt_length": length} for column in features]
        assert largest_difference(gradients(cached(loss, microbatch_size=5), given)[1], real) < 1e-12


def test_a_module_that_writes_into_its_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Masks(nn.Module):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            features["attention_mask"][:, :3] = 0
            return features

    model = dense(tmp_path)
    model.append(Masks())
    loss, features = Ranking(model), columns(model)
    _, real = gradients(loss, features)
    assert largest_difference(gradients(cached(loss, microbatch_size=5), features)[1], real) < 1e-12
    monkeypatch.setattr(integration, "_copy", lambda value: value)
    assert largest_difference(gradients(cached(loss, microbatch_size=5), features)[1], real) > 1e-3, (
        "the mutant"
    )


def test_a_compiled_model(tmp_path: Path) -> None:
    model = dense(tmp_path)
    loss, features = Ranking(model), columns(model)
    _, real = gradients(loss, features)
    wrapped = cached(loss, microbatch_size=5)
    loss.model = torch.compile(model, backend="eager")
    found = {name.replace("_orig_mod.", ""): each for name, each in gradients(wrapped, features)[1].items()}
    assert largest_difference(found, real) < 1e-12


def test_autocast(tmp_path: Path) -> None:
    model = dense(tmp_path).float()
    loss, features = Ranking(model), columns(model)
    _, real = gradients(loss, features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, stock = gradients(loss, features)
        _, found = gradients(cached(loss, microbatch_size=5), features)
    rounding = largest_difference(stock, real)
    assert 1e-4 < rounding < 0.1, "the premise: bfloat16 rounds"
    assert largest_difference(found, real) < 2 * rounding


def test_peak_memory_is_that_of_a_microbatch(tmp_path: Path) -> None:
    model = dense(tmp_path)
    peaks = []
    for count, loss in (
        (64, Ranking(model)),
        (64, cached(Ranking(model), microbatch_size=4)),
        (4, Ranking(model)),
    ):
        features = columns(model, count)
        gradients(loss, features)  # allocates the gradients before the measurement
        peaks.append(peak_bytes(lambda loss=loss, features=features: loss(features, None).backward()))
    large, ours, small = peaks
    assert large > 8 * small, "the premise: activations dominate the memory"
    assert ours < 2.5 * small
    assert ours < large / 4


@pytest.mark.filterwarnings("ignore")  # several kinds, from the host's Trainer
def test_in_the_trainer(tmp_path: Path) -> None:
    model = dense(tmp_path / "model")
    real, norms = updates(tmp_path, model, Ranking, 12)
    found, found_norms = updates(tmp_path, model, lambda m: cached(Ranking(m), microbatch_size=4), 12)
    assert largest_difference(found, real) < 1e-12
    assert found_norms == pytest.approx(norms, rel=1e-12)
    assert len(norms) == 2 and min(norms) > 0
    stock, _ = updates(tmp_path, model, Ranking, 4, 3)
    assert largest_difference(stock, real) > 0.05, "accumulation by the Trainer gives another loss"


@pytest.mark.filterwarnings("ignore")  # likewise
def test_mixed_precision_in_the_trainer(tmp_path: Path) -> None:
    """Accelerate wraps the forward of the model; the loss is the same."""

    def ours(model: Any) -> nn.Module:
        return cached(Ranking(model), microbatch_size=4)

    model = dense(tmp_path / "model").float()
    real, _ = updates(tmp_path, model, Ranking, 12)
    stock, norms = updates(tmp_path, model, Ranking, 12, bf16=True)
    found, found_norms = updates(tmp_path, model, ours, 12, bf16=True)
    rounding = largest_difference(stock, real)
    assert 1e-4 < rounding < 0.2, "the premise: bfloat16 rounds"
    assert largest_difference(found, real) < 2 * rounding
    assert found_norms == pytest.approx(norms, rel=0.05)


@pytest.mark.filterwarnings("ignore")  # likewise
def test_two_ranks(tmp_path: Path) -> None:
    """DistributedDataParallel with gathered negatives equals the large batch in one process."""
    ranks = found_by_both("tests.integrations.encoder_ranks", tmp_path, warnings="ignore")
    model = dense(tmp_path / "model")
    _, real = gradients(Ranking(model), columns(model))
    for found in ranks:
        assert largest_difference(found["plain"], real) < 1e-12, (
            "the premise: the host's own loss is exact on ranks"
        )
        assert largest_difference(found["cached"], real) < 1e-12
    # The Trainer makes two updates on each rank, on the joint batch.
    moved, norms = updates(tmp_path, model, Ranking, 12)
    for rank in ranks:
        for gathered in ("gathered", "gathered, cached"):
            assert largest_difference(rank[gathered][0], moved) < 1e-12, gathered
            assert rank[gathered][1] == pytest.approx(norms, rel=1e-10)
        assert largest_difference(rank["own"][0], moved) > 0.05, (
            "the premise: a rank's own negatives are fewer"
        )
        assert largest_difference(rank["own, cached"][0], rank["own"][0]) < 1e-12
        assert max(rank["rows"]) == 2, "the model gets only micro-batches"


def test_refusals(tmp_path: Path) -> None:
    model = dense(tmp_path)
    ranking = Ranking(model)
    features = columns(model)
    with pytest.raises(InputError, match=r"CachedMultipleNegativesRankingLoss caches gradients already\."):
        cached(losses.CachedMultipleNegativesRankingLoss(model), microbatch_size=4)
    with pytest.raises(InputError, match=r"CachedLoss caches gradients already"):
        cached(cached(ranking, microbatch_size=4), microbatch_size=4)
    with pytest.raises(InputError, match=r"hooks of AdaptiveLayerLoss are active only during its forward"):
        cached(losses.AdaptiveLayerLoss(model, ranking), microbatch_size=4)
    with pytest.raises(InputError, match=r"found no SentenceTransformer, .* in MSELoss\. Pass a loss"):
        cached(nn.MSELoss(), microbatch_size=4)
    with pytest.raises(InputError, match=r"microbatch_size"):
        cached(ranking, microbatch_size=0)
    with pytest.raises(InputError, match=r"Apply cached\(\) to the outermost loss: cached\(MatryoshkaLoss\("):
        losses.MatryoshkaLoss(model, cached(ranking, microbatch_size=4), [16, 8])(features, None)
    ranking.model = nn.DataParallel(model)
    with pytest.raises(
        InputError, match=r"does not support torch\.nn\.DataParallel\. Start one process per GPU"
    ):
        cached(ranking, microbatch_size=4)(features)
    ranking.model = model
    flat = [{"input_ids": torch.ones(9, dtype=torch.long), "offsets": torch.tensor([0, 2, 5])}] * 2
    with pytest.raises(InputError, match=r"these have 'offsets', so they are flattened\. Make the"):
        cached(ranking, microbatch_size=4)(flat)
    model.append(nn.BatchNorm1d(16))
    with pytest.raises(CoupledSamplesError, match="BatchNorm in training mode"):
        cached(ranking, microbatch_size=4)(features)


def test_an_error_restores_the_model(tmp_path: Path) -> None:
    model = dense(tmp_path)
    features = columns(model)
    before = dict(vars(model))
    with pytest.raises(RuntimeError, match="scalar types"):
        cached(Ranking(model), microbatch_size=5)([features[0], {"input_ids": torch.zeros(3, 2)}])
    assert vars(model).keys() == before.keys()


def test_evaluation_keeps_no_graph(tmp_path: Path) -> None:
    model = dense(tmp_path)
    loss, features = Ranking(model), columns(model)
    seen = rows_seen(model)
    with torch.no_grad():
        value = cached(loss, microbatch_size=5)(features)
        assert value.item() == pytest.approx(loss(features, None).item(), rel=1e-12)
    assert not value.requires_grad
    assert seen == [4] * 6 + [12] * 2
