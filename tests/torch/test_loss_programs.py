"""Common losses: every wrong declaration is found, and no right one is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.torch import Accumulator, Window
from superbatch.torch.checks import check_samples, declared_loss
from tests.torch.helpers import sgd

SAMPLES, LENGTH, CLASSES = 8, 6, 5
Loss = Callable[[nn.Module, Any], Tensor]


def batch_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=generator)
    return {
        "rows": {"x": normal(SAMPLES, 4), "other": normal(SAMPLES, 4), "target": normal(SAMPLES, CLASSES)},
        "words": normal(SAMPLES, LENGTH, 4),
        "labels": torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator),
        "mask": torch.arange(LENGTH) < lengths[:, None],
        "kind": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        "weight": torch.rand(SAMPLES, dtype=torch.float64, generator=generator) + 0.1,
        "boxes": torch.randint(0, 2, (SAMPLES, CLASSES), generator=generator).double(),
    }


def rows(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return functional.cross_entropy(model(batch["rows"]["x"]), batch["kind"], **options)


def words(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    labels = torch.where(batch["mask"], batch["labels"], -100)
    return functional.cross_entropy(model(batch["words"]).transpose(1, 2), labels, **options)


def weighted(model: nn.Module, batch: Any) -> Tensor:
    return (rows(model, batch, reduction="none") * batch["weight"]).sum() / batch["weight"].sum()


def by_positives(model: nn.Module, batch: Any) -> Tensor:
    each = functional.binary_cross_entropy_with_logits(
        model(batch["rows"]["x"]), batch["boxes"], pos_weight=torch.tensor(3.0).double(), reduction="sum"
    )
    return each / batch["boxes"].sum()


def targets_of(batch: Any) -> Tensor:
    return batch["mask"].sum(1) % 3 + 1


def ctc(model: nn.Module, batch: Any) -> Tensor:
    steps = torch.full((len(batch["words"]),), LENGTH)
    logits = model(batch["words"]).log_softmax(-1).transpose(0, 1)
    targets, lengths = batch["labels"][:, :3] % (CLASSES - 1) + 1, targets_of(batch)
    sums = functional.ctc_loss(logits, targets, steps, lengths, reduction="sum", zero_infinity=True)
    return sums / lengths.sum()


def dice(model: nn.Module, batch: Any, *dims: int) -> Tensor:
    found, boxes = model(batch["rows"]["x"]).sigmoid(), batch["boxes"]
    dims = dims or (0, 1)
    return (1 - (2 * (found * boxes).sum(dims) + 1) / (found.sum(dims) + boxes.sum(dims) + 1)).mean()


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    one, other = (functional.normalize(model(batch["rows"][name]), dim=1) for name in ("x", "other"))
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def experts(model: nn.Module, batch: Any) -> Tensor:
    shares = model(batch["words"]).softmax(-1).flatten(0, 1)
    used = functional.one_hot(shares.argmax(-1), CLASSES).double().mean(0)
    return rows(model, batch) + 0.01 * CLASSES * (shares.mean(0) * used).sum()


def ranking(model: nn.Module, batch: Any) -> Tensor:
    score, kind = model(batch["rows"]["x"])[:, 0], batch["kind"]
    valid = kind[:, None] > kind
    each = functional.softplus(score - score[:, None])
    return (each * valid).sum() / valid.sum().clamp(min=1)


def by_frequency(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.bincount(batch["kind"], minlength=CLASSES)
    return rows(model, batch, weight=1 / (1 + counts).double())


def focal(model: nn.Module, batch: Any) -> Tensor:
    each = rows(model, batch, reduction="none")
    return ((1 - (-each).exp()).square() * each).mean()


def advantage(model: nn.Module, batch: Any) -> Tensor:
    gain = (batch["weight"] - batch["weight"].mean()) / (batch["weight"].std() + 1e-6)
    return (gain * rows(model, batch, reduction="none")).mean()


def per_sample(model: nn.Module, batch: Any) -> Tensor:
    return (words(model, batch, reduction="none").sum(1) / batch["mask"].sum(1)).mean()


def decay(model: nn.Module) -> Tensor:
    return model.get_parameter("weight").square().sum()


def tokens_in(batch: Any) -> int:
    return int(batch["mask"].sum())


# A loss, a wrong declaration, and the right declaration, or None if there is none.
PROGRAMS: dict[str, tuple[Loss, dict[str, Any], dict[str, Any] | None]] = {
    "token mean": (words, {}, {"weight": tokens_in}),
    "label smoothing": (lambda m, b: words(m, b, label_smoothing=0.1), {}, {"weight": tokens_in}),
    "token sum": (lambda m, b: words(m, b, reduction="sum"), {}, {"reduction": "total"}),
    "mean over samples": (per_sample, {"weight": tokens_in}, {}),
    "sample weights": (weighted, {}, {"weight": lambda b: float(b["weight"].sum())}),
    "positives": (by_positives, {}, {"weight": lambda b: float(b["boxes"].sum())}),
    "ctc": (ctc, {}, {"weight": lambda b: int(targets_of(b).sum())}),
    "dice of the batch": (dice, {}, None),
    "dice of each sample": (lambda m, b: dice(m, b, 1), {"reduction": "sum"}, {}),
    "contrastive": (contrastive, {}, None),
    "router": (experts, {}, None),
    "ranking": (ranking, {}, None),
    "class frequencies": (by_frequency, {}, None),
    "focal": (focal, {"reduction": "sum"}, {}),
    "advantages": (advantage, {}, None),
    "root": (lambda m, b: rows(m, b).sqrt(), {}, None),
    "first sample": (lambda m, b: rows(m, b, reduction="none")[0], {}, None),
    "hardest": (lambda m, b: rows(m, b, reduction="none").max(), {}, None),
    "decay in a mean": (lambda m, b: rows(m, b) + 0.1 * decay(m), {"reduction": "sum"}, {}),
    "decay in a sum": (
        lambda m, b: rows(m, b, reduction="sum") + 0.1 * decay(m),
        {"reduction": "sum"},
        None,
    ),
}


def train(loss: Loss, **options: Any) -> Accumulator:
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES, dtype=torch.float64)
    train_on = Accumulator(model, sgd(model.parameters()), lambda mb: loss(model, mb), **options)
    for seed in range(4):
        train_on(batch_of(seed))
    return train_on


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.sampled(2)
def test_a_wrong_declaration_is_found(case: str, microbatch_size: int) -> None:
    loss, wrong, _ = PROGRAMS[case]
    with pytest.raises((LossSpecError, CoupledSamplesError)):
        train(loss, microbatch_size=microbatch_size, **wrong)


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
@pytest.mark.parametrize("case", [name for name, (*_, right) in PROGRAMS.items() if right is not None])
@pytest.mark.sampled(2)
def test_a_right_declaration_passes(case: str, microbatch_size: int) -> None:
    loss, _, right = PROGRAMS[case]
    assert train(loss, microbatch_size=microbatch_size, **(right or {})).updates == 4


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_mutant_that_checks_only_pairs_misses_class_frequencies(
    monkeypatch: pytest.MonkeyPatch, microbatch_size: int
) -> None:
    """Two samples always have equal weights by class frequency."""
    monkeypatch.setattr(check_samples, "_several_samples", lambda *_: None)
    assert train(by_frequency, microbatch_size=microbatch_size).updates == 4


def window_of(kinds: list[int], sizes: list[int]) -> Window:
    batch = {"rows": {"x": batch_of(0)["rows"]["x"][: len(kinds)]}, "kind": torch.tensor(kinds)}
    ends = list(accumulate(sizes))
    return Window(
        [
            {"rows": {"x": batch["rows"]["x"][end - size : end]}, "kind": batch["kind"][end - size : end]}
            for end, size in zip(ends, sizes, strict=True)
        ]
    )


# The samples that are spread over the window have different classes, or all the same class.
KINDS = {"unlike": [0, 1, 1, 2, 3, 1, 2, 4], "alike": [1, 2, 1, 1, 3, 1, 1, 1]}


@pytest.mark.parametrize("sizes", [[1] * 8, [1, 2, 1, 2, 2], [2, 1, 1, 1, 3]], ids=str)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("case", ["class frequencies", "first sample"])
def test_windows_of_small_micro_batches_are_checked_with_several_samples(
    case: str, kinds: str, sizes: list[int]
) -> None:
    model = nn.Linear(4, CLASSES, dtype=torch.float64)
    loss, *_ = PROGRAMS[case]
    train_on = Accumulator(model, sgd(model.parameters()), lambda mb: loss(model, mb))
    with pytest.raises((LossSpecError, CoupledSamplesError)):
        train_on(window_of(KINDS[kinds], sizes))


BY_CLASS: dict[str, Loss] = {
    "class frequencies": by_frequency,
    "mean of means": lambda m, b: mean_of_class_means(m, b),
    "balanced": lambda m, b: rows(m, b, weight=1 / (b["kind"].bincount(minlength=CLASSES) + 1e-9).double()),
}
EQUALLY_FREQUENT = {
    "alternating": [0, 1] * 8,
    "in pairs": [0, 0, 1, 1] * 4,
    "sorted": [0] * 8 + [1] * 8,
    "four classes": [0, 1, 2, 3] * 4,
}


def mean_of_class_means(model: nn.Module, batch: Any) -> Tensor:
    each, kinds = rows(model, batch, reduction="none"), batch["kind"]
    return torch.stack([each[kinds == kind].mean() for kind in kinds.unique()]).mean()


def with_kinds(kinds: list[int], seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(kinds), 4, dtype=torch.float64, generator=generator)
    return {"rows": {"x": x}, "kind": torch.tensor(kinds)}


def updates_until_found(loss: Loss, first: list[int], size: int) -> int | None:
    """Return the number of updates before an error, or None; `first` are the labels of the first window."""
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES, dtype=torch.float64)
    train_on = Accumulator(model, sgd(model.parameters()), lambda mb: loss(model, mb), microbatch_size=size)
    try:
        train_on(with_kinds(first, 0))
        for seed in range(1, 6):
            kinds = torch.randint(0, 4, (len(first),), generator=torch.Generator().manual_seed(seed))
            train_on(with_kinds(kinds.tolist(), seed))
    except (LossSpecError, CoupledSamplesError):
        return train_on.updates
    return None


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kinds", EQUALLY_FREQUENT)
@pytest.mark.parametrize("case", BY_CLASS)
def test_a_loss_by_class_is_found_with_equally_frequent_labels(case: str, kinds: str, size: int) -> None:
    assert updates_until_found(BY_CLASS[case], EQUALLY_FREQUENT[kinds], size) == 0


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("case", BY_CLASS)
def test_a_window_of_one_label_is_followed_by_a_check(case: str, size: int) -> None:
    """The first window with other labels is checked with three samples, two of one label."""
    assert updates_until_found(BY_CLASS[case], [1] * 16, size) == 1


def test_mutant_that_checks_only_halves_misses_a_mean_of_class_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant compares only two halves and single samples."""

    def halves(samples: int, turn: int) -> list[tuple[tuple[int, ...], ...]]:
        every = tuple(range(samples))
        half = samples // 2
        return [(every[:half], every[half:]), tuple((place,) for place in every)]

    monkeypatch.setattr(declared_loss, "orders", halves)
    assert updates_until_found(mean_of_class_means, [0, 1] * 2, 2) != 0


def test_mutant_that_checks_only_spread_samples_misses_class_frequencies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four samples of four classes have equal weights."""
    monkeypatch.setattr(check_samples, "_with_unlike_labels", lambda picked, _: picked)
    model = nn.Linear(4, CLASSES, dtype=torch.float64)
    train_on = Accumulator(model, sgd(model.parameters()), lambda mb: by_frequency(model, mb))
    assert train_on(window_of(KINDS["unlike"], [1] * 8)).made
