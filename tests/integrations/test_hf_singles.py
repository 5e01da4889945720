"""Losses with a second mean in micro-batches of one: exact, or an error before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)

from superbatch.errors import CoupledSamplesError, LossSpecError, SplitError
from superbatch.integrations.hf_singles import together
from tests.integrations.arguments import SMALL
from tests.integrations.hf_cases import (
    CASES,
    NO_DROPOUT,
    Case,
    ExactTrainer,
    copies,
    gap,
    model_of,
    rows,
    train,
)

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("float64")]
OPTIONS = {"optim": "sgd", "remove_unused_columns": False}


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn casts to float32 inside the models into float64, so that rounding hides no error."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def _per_token(states: Tensor, mask: Tensor) -> Tensor:
    return (states.square() * mask).sum() / mask.sum()


def _per_sample(states: Tensor, mask: Tensor) -> Tensor:
    return ((states.square() * mask).sum((1, 2)) / mask.sum((1, 2))).mean()


def _balance(states: Tensor, mask: Tensor) -> Tensor:
    """Square of the mean over a router's rows."""
    return 10 * ((states.softmax(-1) * mask).sum((0, 1)) / mask.sum()).square().sum()


def _case(kind: Any, name: str, extra: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Case:
    class Extra(kind):
        """Add a term to the loss of the base class; transformers reads the class name."""

        def forward(self, *given: Any, **inputs: Any) -> Any:
            outputs = super().forward(*given, output_hidden_states=True, **inputs)
            mask = inputs["attention_mask"].unsqueeze(-1).double()
            outputs["loss"] = outputs["loss"] + 5 * extra(outputs["hidden_states"][-1], mask)
            outputs["hidden_states"] = None
            return outputs

    Extra.__name__ = f"Extra{kind.__name__}"
    if kind is LlamaForCausalLM:
        config: Any = LlamaConfig(vocab_size=40, num_key_value_heads=2, **SMALL)
    else:
        config = BertConfig(vocab_size=40, max_position_embeddings=32, **SMALL, **NO_DROPOUT, **options)
    return Case(lambda: Extra(config), CASES[name].row)


WRONG = {
    "tokens plus a mean over labels": _case(LlamaForCausalLM, "causal", _per_token),
    "samples plus a mean over labels": _case(BertForTokenClassification, "tokens", _per_sample, num_labels=3),
    "tokens plus a mean over samples": _case(
        BertForSequenceClassification, "regression", _per_token, num_labels=1
    ),
    "rows of a router": _case(BertForTokenClassification, "tokens", _balance, num_labels=3),
}


class _Unchecked(ExactTrainer):
    _checks = False


class _Coupled(ExactTrainer):
    coupled = True


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("alike", [False, True], ids=["unequal", "alike at first"])
def test_a_second_mean_is_an_error_before_the_first_step(name: str, alike: bool, tmp_path: Path) -> None:
    case = WRONG[name]
    data = rows(case, 20)
    if alike:  # in the first window, labels, tokens and samples cannot be distinguished
        data = [*rows(Case(case.model, case.row, equal=True), 8), *data]
    options = {**OPTIONS, "data": data, "train_sampling_strategy": "sequential"}
    big = train(Trainer, case, 8, 1, tmp_path, **options)
    assert gap(big, train(_Unchecked, case, 1, 8, tmp_path, **options)) > 1e-3

    model = model_of(case)
    before = copies(model)
    with pytest.raises(
        CoupledSamplesError, match=r"means over different counts.*In a Trainer, write `coupled = True`"
    ):
        train(ExactTrainer, case, 1, 8, tmp_path, model=model, **options)
    assert all(torch.equal(value, before[each]) for each, value in copies(model).items())


@pytest.mark.parametrize("name", WRONG)
def test_the_remedy_is_exact(name: str, tmp_path: Path) -> None:
    case = Case(WRONG[name].model, WRONG[name].row, equal=True)
    options = {**OPTIONS, "data": rows(case, 16)}
    big = train(Trainer, case, 8, 1, tmp_path, **options)

    assert gap(big, train(_Coupled, case, 1, 8, tmp_path, **options)) <= 1e-12


def test_a_second_mean_over_the_same_samples_is_exact(tmp_path: Path) -> None:
    case = _case(BertForSequenceClassification, "regression", _per_sample, num_labels=1)
    big = train(Trainer, case, 8, 1, tmp_path, **OPTIONS)

    assert gap(big, train(ExactTrainer, case, 1, 8, tmp_path, **OPTIONS)) <= 1e-12


class _Counted(ExactTrainer):
    """Trainer that counts samples, although the loss is a mean over labels."""

    def weight_of(self, microbatch: Any) -> int:
        return len(microbatch["labels"])


def test_a_wrong_weight_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LossSpecError, match=r"In a Trainer, define `weight_of.* BertForTokenClassific"):
        train(_Counted, CASES["tokens"], 1, 8, tmp_path, **OPTIONS)


class _OwnMean(Trainer):
    """Trainer with its own mean over labels, which does not declare that -100 is ignored."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


class _OwnMeanOfSamples(_OwnMean, ExactTrainer):
    """Trainer that counts samples."""

    def weight_of(self, microbatch: Any) -> int:
        return len(microbatch["labels"])


def test_a_weight_that_single_samples_cannot_verify_gives_a_warning(tmp_path: Path) -> None:
    case = CASES["tokens"]
    large = train(_OwnMean, case, 8, 1, tmp_path, **OPTIONS)
    with pytest.warns(UserWarning, match=r"the divisor of the loss may differ from weight_of\(\)"):
        single = train(_OwnMeanOfSamples, case, 1, 8, tmp_path, **OPTIONS)
    assert gap(large, single) > 1e-3, "the premise: it is wrong"


def test_a_first_window_without_labels(tmp_path: Path) -> None:
    case = WRONG["samples plus a mean over labels"]
    data = rows(case, 16)
    data = [
        {**row, "labels": torch.full_like(row["labels"], -100)} if place < 8 else row
        for place, row in enumerate(data)
    ]
    with pytest.raises(CoupledSamplesError, match="means over different counts"):
        train(ExactTrainer, case, 1, 8, tmp_path, data=data, train_sampling_strategy="sequential", **OPTIONS)


class _OneAtATime(nn.Module):
    """Model that accepts only one sample."""

    loss_type = "ForTokenClassification"

    def __init__(self) -> None:
        super().__init__()
        self.inner = CASES["tokens"].model()

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Any:
        if len(input_ids) > 1:
            raise ValueError("one sample, please")
        return self.inner(input_ids, labels=labels, attention_mask=attention_mask)


def test_a_model_of_single_samples_is_not_checked_and_warns(tmp_path: Path) -> None:
    case = CASES["tokens"]
    big = train(Trainer, case, 8, 1, tmp_path, **OPTIONS)
    words = r"could not check .* could not be run together \(one sample, please\)"
    with pytest.warns(UserWarning, match=words):
        ours = train(ExactTrainer, Case(_OneAtATime, case.row), 1, 8, tmp_path, **OPTIONS)

    ours.start, ours.parameters = (
        {name.removeprefix("inner."): value for name, value in each.items()}
        for each in (ours.start, ours.parameters)
    )
    assert gap(big, ours) <= 1e-12


class _OfOneSample(ExactTrainer):
    """Trainer whose weight function accepts only one sample."""

    def weight_of(self, microbatch: Any) -> int:
        return int((microbatch["labels"][0] != -100).sum())


def test_a_weight_of_single_samples_is_not_checked_and_warns(tmp_path: Path) -> None:
    big = train(Trainer, CASES["tokens"], 8, 1, tmp_path, **OPTIONS)
    with pytest.warns(
        UserWarning, match=r"weight_of\(\) of joined samples differs from the sum of their weights"
    ):
        ours = train(_OfOneSample, CASES["tokens"], 1, 8, tmp_path, **OPTIONS)
    assert gap(big, ours) <= 1e-12


def test_joined_samples_are_padded_with_their_last_entries() -> None:
    def sample(length: int) -> dict[str, Any]:
        ids = torch.arange(length)[None]
        more = {"picture": torch.zeros(1, 3, length, 2), "boxes": [length], "return_loss": False}
        return {"ids": ids, "attention_mask": torch.ones_like(ids), **more}

    batch = together([sample(length) for length in (9, 2, 4, 3, 8)], {"boxes"})

    assert batch["ids"].tolist()[:2] == [[0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 2, 2, 2, 2, 2]]
    assert batch["attention_mask"].sum(1).tolist() == [8, 4, 8, 4]
    assert batch["picture"].shape == (4, 3, 8, 2)
    assert (batch["boxes"], batch["return_loss"]) == ([2, 3, 4, 8], False)
    with pytest.raises(SplitError, match="'offsets' has no row for each sample"):
        together([{"offsets": torch.arange(3)}] * 2, ())
    with pytest.raises(SplitError, match="a sample has no entries"):
        together([{"ids": torch.zeros(1, 0)}] * 2, ())
