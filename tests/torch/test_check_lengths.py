"""Micro-batches of unequal lengths: a mean over all entries is distinguished from one over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from superbatch.errors import LossSpecError
from superbatch.torch import Accumulator, Window, count_tokens
from superbatch.torch.checks import check_schedule, lengths
from tests.torch.helpers import assert_same_parameters, large_batch, sgd, start_of

LABELS, PATCHES = 5, ("patches", "counts")
Loss = Callable[[nn.Module, Any], Tensor]


def window(*lengths: int, samples: int = 2, seed: int = 0) -> Window:
    generator = torch.Generator().manual_seed(seed)
    return Window(
        [
            {
                "x": torch.randn(samples, length, 3, dtype=torch.float64, generator=generator),
                "labels": torch.randint(0, LABELS, (samples, length), generator=generator),
                "keep": torch.ones(samples, length, dtype=torch.float64),
                "kind": torch.randint(0, LABELS, (samples,), generator=generator),
            }
            for length in lengths
        ]
    )


def every(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).transpose(1, 2), batch["labels"], reduction="none")


def of_classes(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).transpose(1, 2), batch["labels"])


def flat(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def shifted(model: nn.Module, batch: Any) -> Tensor:
    logits, labels = model(batch["x"])[:, :-1], batch["labels"][:, 1:]
    each = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum() / labels.numel()


def masked(model: nn.Module, batch: Any) -> Tensor:
    return (every(model, batch) * batch["keep"]).sum() / batch["keep"].sum()


def squares(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch["x"])[..., :3], batch["x"])


# Means over all entries, by the way in which the entries are counted.
OVER_ENTRIES: dict[str, Loss] = {
    "cross entropy": of_classes,
    "flat": flat,
    "mean": lambda model, batch: every(model, batch).mean(),
    "a sum over the labels": shifted,
    "a sum over a mask": masked,
    "squares": squares,
}


def sample_by_sample(model: nn.Module, batch: Any) -> Tensor:
    pairs = zip(model(batch["x"]), batch["labels"], strict=True)
    return torch.stack([functional.cross_entropy(*pair) for pair in pairs]).mean()


OVER_SAMPLES: dict[str, Loss] = {
    "means of means": lambda model, batch: every(model, batch).mean(1).mean(),
    "sums": lambda model, batch: every(model, batch).sum(1).mean(),
    "sample by sample": sample_by_sample,
    "a label for each sample": lambda model, batch: functional.cross_entropy(
        model(batch["x"]).mean(1), batch["kind"]
    ),
    "with an accuracy beside it": lambda model, batch: (
        every(model, batch).sum(1).mean()
        + 0 * (model(batch["x"]).argmax(2) == batch["labels"]).double().mean()
    ),
    "a sum over samples": lambda model, batch: every(model, batch).mean(1).sum() / len(batch["x"]),
}


def accumulator(loss: Loss, **options: Any) -> tuple[Accumulator, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, LABELS, dtype=torch.float64)
    return Accumulator(model, sgd(model.parameters()), lambda mb: loss(model, mb), **options), model


def joined_with_padding(batch: Any) -> dict[str, Tensor]:
    labels = [functional.pad(mb["labels"], (0, 6 - mb["x"].shape[1]), value=-100) for mb in batch]
    inputs = [functional.pad(mb["x"], (0, 0, 0, 6 - mb["x"].shape[1])) for mb in batch]
    return {"x": torch.cat(inputs), "labels": torch.cat(labels)}


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("case", OVER_ENTRIES)
def test_a_mean_over_entries_is_found_in_the_first_window_that_shows_it(case: str, samples: int) -> None:
    accumulate, model = accumulator(OVER_ENTRIES[case])
    for seed in range(2):
        assert accumulate(window(6, 6, samples=samples, seed=seed)).made
    before = start_of(model)
    with pytest.raises(LossSpecError, match=r"mean over all entries.*have 3 entries.*6.*Update 2, which"):
        accumulate(window(6, 3, 4, samples=samples, seed=3))
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


def test_a_mean_over_entries_is_found_in_the_first_window_and_the_remedy_is_exact() -> None:
    accumulate, _ = accumulator(of_classes)
    with pytest.raises(LossSpecError, match=r"weight=count_tokens\(.labels.\)"):
        accumulate(window(6, 3))
    accumulate, model = accumulator(of_classes, weight=count_tokens("labels"))
    _, reference = accumulator(of_classes)
    start, batch = start_of(model), window(6, 3, 4)
    assert accumulate(batch).made
    padded = joined_with_padding(batch)
    large_batch(sgd(reference.parameters()), lambda whole: of_classes(reference, whole), [padded])
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("case", OVER_SAMPLES)
def test_a_mean_over_samples_passes(case: str, samples: int) -> None:
    accumulate, _ = accumulator(OVER_SAMPLES[case])
    assert accumulate(window(6, 6, samples=samples)).made
    for seed in range(4):
        assert accumulate(window(6, 3, 4, samples=samples, seed=seed)).made


@pytest.mark.parametrize("case", OVER_ENTRIES)
def test_a_declared_weight_is_accepted(case: str) -> None:
    for weight in (lambda mb: len(mb["x"]), count_tokens("labels", shift=OVER_ENTRIES[case] is shifted)):
        accumulate, _ = accumulator(OVER_ENTRIES[case], weight=weight)
        for seed in range(3):
            assert accumulate(window(6, 3, 4, seed=seed)).made


WRONG_WEIGHTS: dict[str, Callable[[Any], float]] = {
    "shifted": count_tokens("labels", shift=True),
    "squares": lambda mb: len(mb["x"]) * mb["x"].shape[1] ** 2,
    "roots": lambda mb: len(mb["x"]) * mb["x"].shape[1] ** 0.5,
}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("weight", WRONG_WEIGHTS)
@pytest.mark.parametrize("case", ["cross entropy", "mean", "a sum over a mask"])
def test_a_wrong_declared_weight_is_found_in_ragged_windows(case: str, weight: str, samples: int) -> None:
    accumulate, model = accumulator(OVER_ENTRIES[case], weight=WRONG_WEIGHTS[weight])
    assert accumulate(window(6, 6, samples=samples)).made
    before = start_of(model)
    with pytest.raises(
        LossSpecError, match=r"weight= gives a sample with 3 entries .* needs 0\.5 times the weight"
    ):
        accumulate(window(6, 3, samples=samples, seed=1))
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


@pytest.mark.filterwarnings("ignore:superbatch could not check")
def test_a_right_weight_that_ignores_labels_passes() -> None:
    batch = window(6, 3, 4)
    for number, microbatch in enumerate(batch):
        microbatch["labels"][0, : number + 1] = -100
    accumulate, _ = accumulator(of_classes, weight=count_tokens("labels"))
    assert accumulate(batch).made
    accumulate, _ = accumulator(of_classes, weight=lambda mb: mb["labels"].numel(), check=True)
    with pytest.raises(LossSpecError):
        accumulate(batch)


def test_mutant_without_the_check_of_declared_weights_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lengths, "_check_weights", lambda *_: None)
    accumulate, model = accumulator(of_classes, weight=WRONG_WEIGHTS["shifted"])
    right, other = accumulator(of_classes, weight=count_tokens("labels"))
    start = start_of(model)
    assert accumulate(window(6, 2)).made and right(window(6, 2)).made
    with pytest.raises(AssertionError, match="not the update of the large batch"):
        assert_same_parameters(other, model, 1e-2, start=start)


def test_each_loss_term_is_checked_by_itself() -> None:
    def losses(model: nn.Module, batch: Any) -> Any:
        return {"words": of_classes(model, batch), "samples": every(model, batch).sum(1).mean()}

    accumulate, _ = accumulator(losses, weight={"words": count_tokens("labels"), "samples": None})
    assert accumulate(window(6, 3)).made
    accumulate, _ = accumulator(losses, weight={"words": None, "samples": None})
    with pytest.raises(LossSpecError, match="mean over all entries"):
        accumulate(window(6, 3))


def test_mutant_without_the_check_of_lengths_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, the update is not that of the padded batch."""
    monkeypatch.setattr(check_schedule, "ragged", lambda *_: None)
    accumulate, model = accumulator(of_classes)
    right, other = accumulator(of_classes, weight=count_tokens("labels"))
    start = start_of(model)
    assert accumulate(window(6, 1)).made and right(window(6, 1)).made
    with pytest.raises(AssertionError, match="not the update of the large batch"):
        assert_same_parameters(other, model, 1e-2, start=start)


def with_patches(model: nn.Module, batch: Any) -> Tensor:
    seen = [each.mean(0) for each in batch["patches"].split(batch["counts"].tolist())]
    return of_classes(model, {**batch, "x": batch["x"] + torch.stack(seen)[:, None]})


@pytest.mark.filterwarnings("ignore:superbatch could not check")
def test_microbatches_that_cannot_be_split_are_accepted() -> None:
    """The patches of all samples are rows of one tensor, as in vision-language models."""
    counts = [torch.tensor([3, 1]), torch.tensor([2, 2]), torch.tensor([1, 4])]
    batch = [
        {**mb, "patches": torch.randn(int(each.sum()), 3, dtype=torch.float64), "counts": each}
        for mb, each in zip(window(6, 3, 4), counts, strict=True)
    ]
    accumulate, model = accumulator(with_patches, weight=count_tokens("labels"))
    _, reference = accumulator(with_patches)
    start = start_of(model)
    assert accumulate(Window(batch)).made
    padded = joined_with_padding(batch) | {name: torch.cat([mb[name] for mb in batch]) for name in PATCHES}
    large_batch(sgd(reference.parameters()), lambda whole: with_patches(reference, whole), [padded])
    assert_same_parameters(reference, model, 1e-12, start=start)
