"""Remedies for a wrong loss declaration: the check and `verify` name the same, tested one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.results.verification import Verification
from superbatch.torch import Accumulator, class_weights, count_tokens, sample_weights
from superbatch.torch.checks import declared_loss, remedy, weighting
from superbatch.torch.checks.weighting import Weighting
from superbatch.torch.options import Split
from superbatch.torch.verify import verify

WORDS, TIMES, WIDTH = 11, 8, 6
Loss = Callable[[nn.Module, Any], Any]


def words() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)
    )


def sentences(samples: int = 8) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, WORDS, (samples, TIMES), generator=draw) for _ in range(2))
    for row in range(samples):
        labels[row, 2 + row * 5 % 6 :] = -100
    return {"ids": ids, "labels": labels, "advantage": torch.randn(samples, generator=draw)}


def train(
    model: nn.Module, loss: Loss, batch: Any, *, size: int = 4, **declared: Any
) -> LossSpecError | CoupledSamplesError | None:
    """Make one update with the check; return its error."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda mb: loss(model, mb),
        microbatch_size=size,
        **declared,
    )
    try:
        assert accumulate(batch).made
    except (LossSpecError, CoupledSamplesError) as error:
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        return error
    assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    return None


def verified(model: nn.Module, loss: Loss, batch: Any, *, size: int = 4, **declared: Any) -> Verification:
    return verify(model, lambda mb: loss(model, mb), batch, microbatch_size=size, **declared)


def kinds(report: Verification) -> list[str]:
    assert report.exact == (not report.causes)
    return [cause.kind for cause in report.causes]


# -- losses that no weight explains ---------------------------------------------------------------------


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(
        model(batch["ids"]).transpose(1, 2), batch["labels"].clamp(min=0), reduction="none"
    )


def kl_cov(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Policy gradient with a penalty on the 5 % of tokens with the largest covariance (KL-Cov)."""
    kept, score = batch["labels"] >= 0, -token_losses(model, batch)
    advantage = batch["advantage"][:, None].expand_as(score).to(score.dtype)[kept]
    score = score[kept]
    covariance = (advantage - advantage.mean()) * (score - score.mean()).detach()
    top = covariance.topk(max(1, int(0.05 * len(covariance)))).indices
    penalty = torch.zeros_like(score).index_add(0, top, (score[top] + 2).abs())
    return (penalty - advantage * (score + 2).exp()).mean()


def hardest_half(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = token_losses(model, batch).mean(1)
    return each.topk(max(1, len(each) // 2)).values.mean()


def hardest_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = token_losses(model, batch)[batch["labels"] >= 0]
    return each.topk(max(1, int(0.3 * len(each)))).values.mean()


def hardest(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(model, batch).mean(1).max()


def with_whitened_advantages(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Policy gradient with advantages normalized over the batch."""
    advantage = batch["advantage"].to(next(model.parameters()).dtype)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    kept = batch["labels"] >= 0
    return (advantage[:, None] * token_losses(model, batch) * kept).sum() / kept.sum()


def divided_by_positives(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Focal loss over all positions, divided by the number of positive ones (at least 1)."""
    score = model(batch["ids"])[..., 0]
    positive = ((batch["labels"] > 2) & (batch["advantage"] > 0.3)[:, None]).to(score.dtype)
    each = F.binary_cross_entropy_with_logits(score, positive, reduction="none")
    sure = torch.where(positive > 0, score.sigmoid(), 1 - score.sigmoid())
    return (each * (1 - sure) ** 2).sum() / positive.sum().clamp(min=1)


def divided_by_root_of_batch_size(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(model, batch).mean(1).sum() / len(batch["ids"]) ** 0.5


def two_means(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    kept, each = batch["labels"] >= 0, token_losses(model, batch)
    return (each * kept).sum() / kept.sum() + 0.1 * each.square().mean()


COUPLED: dict[str, tuple[Loss, str]] = {
    "KL-Cov": (kl_cov, "coupled_loss"),
    "hardest half": (hardest_half, "coupled_loss"),
    "hardest tokens": (hardest_tokens, "coupled_loss"),
    "hardest sample": (hardest, "coupled_loss"),
    "whitened advantages": (with_whitened_advantages, "coupled_loss"),
    "divided by the positives": (divided_by_positives, "batch_size"),
    "divided by a root": (divided_by_root_of_batch_size, "batch_size"),
    "two means": (two_means, "coupled_loss"),
}


@pytest.mark.parametrize("weight", [None, count_tokens("labels")], ids=["samples", "tokens"])
@pytest.mark.parametrize("case", COUPLED)
@pytest.mark.sampled(5)
def test_no_weight_is_advised_if_none_explains_the_loss(case: str, weight: Any) -> None:
    loss, kind = COUPLED[case]
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        model = words().to(dtype)
        report = verified(model, loss, sentences(), weight=weight)
        assert kinds(report) == [kind]
        error = train(model, loss, sentences(), weight=weight)
        assert isinstance(error, CoupledSamplesError)
        assert str(error).startswith("No weight explains the loss")
        assert not re.search(r"\bweight=", f"{error} {report.causes[0].remedy}")


def test_weights_fitted_without_a_residual_check_are_wrong_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: fit the weights, but ignore the residual."""
    monkeypatch.setattr(weighting, "_agrees", lambda *_: True)
    monkeypatch.setattr(weighting, "_counts_nothing", lambda *_: False)
    torch.manual_seed(0)
    error = train(words().double(), kl_cov, sentences())
    assert isinstance(error, LossSpecError)
    assert "weight=" in str(error)


def test_a_sample_with_a_gradient_cannot_have_weight_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: fit weight 1 to the sample with the larger loss and weight 0 to the other."""
    torch.manual_seed(0)
    assert isinstance(train(words().double(), hardest, sentences(2), size=2), CoupledSamplesError)
    monkeypatch.setattr(weighting, "_counts_nothing", lambda *_: False)
    torch.manual_seed(0)
    error = train(words().double(), hardest, sentences(2), size=2)
    assert isinstance(error, LossSpecError)


# -- means over a count that is not in the batch ---------------------------------------------------------


def mean_by_root_lengths(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Token losses divided by the sum of the square roots of lengths."""
    kept, each = batch["labels"] >= 0, token_losses(model, batch)
    total = kept.sum(1).to(each.dtype).sqrt().sum()
    return (each * kept).sum() / total, float(total)


def mean_of_hard_samples(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Mean over samples whose loss exceeds a threshold."""
    each = (token_losses(model, batch).mean(1) - 2.36).relu()
    count = (each > 0).sum()
    return each.sum() / count.clamp(min=1), float(count)


@pytest.mark.parametrize("loss", [mean_by_root_lengths, mean_of_hard_samples])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.sampled(2)
def test_the_remedy_for_a_hidden_count_is_weight_returned(loss: Loss, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = words().to(dtype)
    batch = sentences()
    assert loss(model, batch)[1] != 8
    alone: Loss = lambda m, b: loss(m, b)[0]  # noqa: E731
    report = verified(model, alone, batch)
    assert kinds(report) == ["weight"]
    error = train(model, alone, batch)
    assert isinstance(error, LossSpecError)
    for text in (str(error), str(report.causes[0])):
        assert re.search(r"has [\d.]+ times the weight of one with", text)
        assert 'pass weight="returned"' in text
    assert kinds(verified(model, loss, batch, weight="returned")) == []
    assert train(model, loss, batch, weight="returned") is None


def test_the_error_states_the_ratio_of_weights() -> None:
    torch.manual_seed(0)
    model, batch = words().double(), sentences(2)
    counts = [
        mean_by_root_lengths(model, {key: value[row : row + 1] for key, value in batch.items()})[1]
        for row in (0, 1)
    ]
    error = train(model, lambda m, b: mean_by_root_lengths(m, b)[0], batch, size=2)
    assert f"has {counts[1] / counts[0]:.4g} times the weight" in str(error)


def test_a_mean_over_one_nonzero_micro_batch_is_not_taken_for_a_sum() -> None:
    """If one micro-batch alone has a nonzero loss, a sum and a mean over hard samples agree."""

    def hard(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.mse_loss(model(batch["x"])[:, 0], batch["y"], reduction="none")
        each = each * (batch["y"] > 50)
        return each.sum() / (each > 0).sum().clamp(min=1)

    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    batch = {"x": torch.randn(8, 3).double(), "y": torch.randn(8).double()}
    batch["y"][[1, 6]] = 99.0
    error = train(model, hard, batch)
    assert isinstance(error, LossSpecError)
    assert 'reduction="sum"' not in str(error)
    assert 'reduction="sum"' not in str(verified(model, hard, batch).causes)


def test_an_unconfirmed_sum_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: advise a sum whenever it agrees, even if a mean agrees too."""
    monkeypatch.setattr(declared_loss, "_shows", lambda seen: True)
    with pytest.raises(AssertionError):
        test_a_mean_over_one_nonzero_micro_batch_is_not_taken_for_a_sum()


# -- remedies after which the check and verify pass ------------------------------------------------------


class Critic(nn.Module):
    """Word model with its own loss module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = words()
        self.criterion = nn.CrossEntropyLoss(**options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids)


def cross_entropy(**options: Any) -> Loss:
    return lambda m, b: F.cross_entropy(m(b["ids"]).flatten(0, 1), b["labels"].flatten(), **options)


def padded_sentences(value: int) -> dict[str, Tensor]:
    batch = sentences()
    batch["labels"][batch["labels"] < 0] = value
    return batch


def shifting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def by_own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model.criterion(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def masked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    keep = batch["mask"].to(next(model.parameters()).dtype)
    each = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
    return (each * keep).sum() / keep.sum()


def masked_and_shifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    keep = batch["mask"][:, 1:].to(next(model.parameters()).dtype)
    each = F.cross_entropy(model(batch["ids"])[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    return (each * keep).sum() / keep.sum()


def with_mask(dtype: torch.dtype) -> dict[str, Tensor]:
    batch = sentences()
    return {"ids": batch["ids"], "mask": (batch["labels"] >= 0).to(dtype)}


def of_positive_labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    score = model(batch["ids"])[..., 0]
    positive = (batch["labels"] > 0).to(score.dtype)
    return F.binary_cross_entropy_with_logits(score, positive, reduction="sum") / positive.sum().clamp(min=1)


def by_lengths(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["ids"]).square().mean((1, 2)) * batch["lengths"]).sum() / batch["lengths"].sum()


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images.to(next(self.parameters()).dtype))


def seg_batch(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Images and segmentation maps with an ignored border of unequal width."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (8, 6, 6), generator=draw)
    for row in range(8):
        labels[row, : row % 5] = 255
    return torch.randn(8, 2, 6, 6, generator=draw), labels.to(dtype)


def segmented(**options: Any) -> Loss:
    return lambda m, b: F.cross_entropy(m(b[0]), b[1].long(), ignore_index=255, **options)


IN_GLOBALS = nn.NLLLoss(ignore_index=5)


def by_global_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return IN_GLOBALS(model(batch["ids"]).log_softmax(-1).flatten(0, 1), batch["labels"].flatten())


def nested() -> dict[str, Any]:
    batch = sentences()
    return {"inputs": (batch["ids"], {"labels": batch["labels"]})}


def nested_loss(model: nn.Module, batch: Any) -> Tensor:
    ids, inner = batch["inputs"]
    return cross_entropy()(model, {"ids": ids, "labels": inner["labels"]})


RARE = torch.tensor([0.1, 2.0, 0.5, 4.0, 1.0, 3.0, 0.2, 1.5, 0.7, 2.5, 0.3])
FEW = torch.tensor([0.2, 2.0, 1.0, 3.0])


def with_class_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(out, batch["labels"].flatten(), weight=RARE.to(out.dtype))


def segmented_by_class(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1], weight=FEW.to(out.dtype), ignore_index=255)


NAMES: dict[str, Any] = {
    "count_tokens": count_tokens,
    "sample_weights": sample_weights,
    "class_weights": class_weights,
}

MEANS: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Any], str, Any]] = {
    "tokens": (words, cross_entropy(), sentences, 'count_tokens("labels")', None),
    "smoothed labels": (words, cross_entropy(label_smoothing=0.1), sentences, 'count_tokens("labels")', None),
    "shifted inside": (words, shifting, sentences, 'count_tokens("labels", shift=True)', None),
    "padded with 0": (
        words, cross_entropy(ignore_index=0), lambda: padded_sentences(0),
        'count_tokens("labels", ignore_index=0)', None,
    ),
    "padded with -1": (
        words, cross_entropy(ignore_index=-1), lambda: padded_sentences(-1),
        'count_tokens("labels", ignore_index=-1)', None,
    ),
    "a loss module of the model": (
        lambda: Critic(ignore_index=7), by_own_loss, lambda: padded_sentences(7),
        'count_tokens("labels", ignore_index=7)', None,
    ),
    "a loss module in the globals": (
        words, by_global_loss, lambda: padded_sentences(5), 'count_tokens("labels", ignore_index=5)', None,
    ),
    "an integer mask": (
        words, masked, lambda: with_mask(torch.int64), 'count_tokens("mask", ignore_index=0)', None,
    ),
    "a boolean mask": (
        words, masked, lambda: with_mask(torch.bool), 'count_tokens("mask", ignore_index=0)', None,
    ),
    "a float mask": (
        words, masked, lambda: with_mask(torch.float32), 'sample_weights("mask")', None,
    ),
    "a shifted mask": (
        words, masked_and_shifted, lambda: with_mask(torch.int64),
        'count_tokens("mask", ignore_index=0, shift=True)', None,
    ),
    "a shifted float mask": (
        words, masked_and_shifted, lambda: with_mask(torch.float32),
        'sample_weights(lambda microbatch: microbatch["mask"][..., 1:])', None,
    ),
    "positive labels": (
        words, of_positive_labels, sentences,
        'sample_weights(lambda microbatch: microbatch["labels"] > 0)', None,
    ),
    "lengths": (
        words, by_lengths,
        lambda: {"ids": sentences()["ids"], "lengths": torch.arange(1, 9)}, 'sample_weights("lengths")', None,
    ),
    "segmentation maps": (Pixels, segmented(), seg_batch, 'count_tokens("1", ignore_index=255)', None),
    "segmentation maps of bytes": (
        Pixels, segmented(), lambda: seg_batch(torch.uint8), 'count_tokens("1", ignore_index=255)', None,
    ),
    "class weights": (words, with_class_weights, sentences, 'class_weights(weight, "labels")', RARE),
    "class weights of maps": (
        Pixels, segmented_by_class, seg_batch, 'class_weights(weight, "1", ignore_index=255)', FEW,
    ),
    "nested": (words, nested_loss, nested, 'count_tokens("inputs.1.labels")', None),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANS)
@pytest.mark.sampled(3)
def test_the_named_weight_passes_the_check_and_verify(case: str) -> None:
    make, loss, given, text, weight = MEANS[case]
    wrong: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float64, {}),
        (torch.float32, {"reduction": "sum"}),
    ]
    for dtype, declared in wrong:
        torch.manual_seed(0)
        model, batch = make().to(dtype), given()
        report = verified(model, loss, batch, **declared)
        assert kinds(report) == ["weight"]
        error = train(model, loss, batch, **declared)
        assert isinstance(error, LossSpecError)
        for advice in (f"{error}", f"{report.causes[0].remedy}."):
            assert advice.endswith(f"weight={text}."), advice
        named = eval(text, NAMES, {"weight": weight})
        assert kinds(verified(model, loss, batch, weight=named)) == []
        assert train(model, loss, batch, weight=named) is None


def test_a_weight_that_fits_only_one_micro_batch_is_not_named() -> None:
    """`length` is the token count of each sample in the first micro-batch only."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy()(model, batch)

    torch.manual_seed(0)
    batch = sentences()
    batch["length"] = (batch["labels"] >= 0).sum(1)
    batch["length"][4:] = batch["length"][4:].flip(0)
    batch = {"ids": batch["ids"], "length": batch["length"], "labels": batch["labels"]}
    assert len(set(batch["length"][4:].tolist())) > 1
    for first in ("length", "labels"):
        order = {"ids": batch["ids"], first: batch[first], **batch}
        error = train(words().double(), loss, order)
        assert 'weight=count_tokens("labels")' in str(error)


def test_an_untested_remedy_fits_only_one_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: name the first weight that fits the micro-batch with the error."""
    batch = sentences()
    lengths = (batch["labels"] >= 0).sum(1)
    wrong = lengths.double()
    wrong[4:] = wrong[4:].flip(0)
    torch.manual_seed(0)
    given = {"ids": batch["ids"], "wrong": wrong, "lengths": lengths}

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return by_lengths(model, b)

    assert 'sample_weights("lengths")' in str(train(words().double(), loss, given))
    tried = remedy.find_remedy
    monkeypatch.setattr(
        declared_loss,
        "find_remedy",
        lambda evaluation, found, holds, others: tried(
            evaluation, found, lambda p: p.reduction == "mean", others
        ),
    )
    torch.manual_seed(0)
    assert 'sample_weights("wrong")' in str(train(words().double(), loss, given))


def test_boxes_in_lists_are_counted() -> None:
    """Detection targets: a list with one dictionary of boxes per image."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out, targets = model(batch["x"]), batch["targets"]
        apart = torch.stack([(o - t["boxes"]).abs().sum() for o, t in zip(out, targets, strict=True)])
        return apart.sum() / sum(len(target["boxes"]) for target in targets)

    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    targets = [{"boxes": torch.randn(1 + row % 4, 4).double()} for row in range(8)]
    batch = {"x": torch.randn(8, 3).double(), "targets": targets}
    error = train(model, loss, batch, split=Split(per_sample=["targets"]))
    assert isinstance(error, LossSpecError)
    text = str(error).partition("pass weight=")[2].removesuffix(".")
    assert text == 'lambda microbatch: sum(len(one["boxes"]) for one in microbatch["targets"])'
    for named, expected in ((None, ["weight"]), (eval(text), [])):
        assert (
            kinds(verified(model, loss, batch, split=Split(per_sample=["targets"]), weight=named)) == expected
        )
    assert train(model, loss, batch, split=Split(per_sample=["targets"]), weight=eval(text)) is None


def test_a_sum_divided_by_a_constant() -> None:
    """A sum divided by a constant passes with reduction="sum" and with reduction="total"."""
    torch.manual_seed(0)
    model, batch = words().double(), sentences()
    loss: Loss = lambda m, b: cross_entropy(reduction="sum")(m, b) / 33  # noqa: E731
    error = train(model, loss, batch)
    assert isinstance(error, LossSpecError)
    assert 'reduction="sum"' in str(error) and 'reduction="total"' in str(error)
    for reduction in ("sum", "total"):
        assert kinds(verified(model, loss, batch, reduction=reduction)) == []
        assert train(model, loss, batch, reduction=reduction) is None


def test_the_weight_is_open_if_all_micro_batches_agree() -> None:
    seen = weighting.Evaluated(1.0, 1, torch.ones(1, 3, dtype=torch.float64))
    cut = weighting.Cut(seen, (seen, seen), ((0,), (1,)))
    assert weighting.find_weights([cut], weighting.Rounding(1e-7, 1e-6)) == Weighting("open")


def test_the_check_leaves_no_warning_gradient_or_random_state() -> None:
    torch.manual_seed(0)
    model = words().double()
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(model, kl_cov, sentences()) is not None
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
