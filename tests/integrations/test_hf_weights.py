"""Weights of micro-batches for the losses of Hugging Face, without the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from superbatch.errors import InputError
from superbatch.integrations.hf_weights import weigh

IDS = torch.arange(10).reshape(2, 5)
LABELS = torch.tensor([[3, -100, 4, 5, -100], [-100, 1, 2, -100, -100]])


def model(loss: str | None, **config: Any) -> Any:
    return SimpleNamespace(loss_type=loss, config=SimpleNamespace(**config))


@pytest.mark.parametrize(
    ("loss", "config", "inputs", "weight"),
    [
        ("ForCausalLM", {}, {"labels": LABELS}, 4),
        ("ForCausalLM", {}, {"labels": LABELS, "shift_labels": LABELS[:, 2:]}, 3),
        ("ForConditionalGeneration", {"is_encoder_decoder": True}, {"labels": LABELS}, 5),
        ("ForConditionalGeneration", {"is_encoder_decoder": False}, {"labels": LABELS}, 4),
        ("ForMaskedLM", {}, {"labels": LABELS}, 5),
        ("ForTokenClassification", {}, {"labels": LABELS}, 5),
        ("ForSequenceClassification", {"num_labels": 3}, {"labels": torch.tensor([1, -100, 2])}, 2),
        ("ForSequenceClassification", {"num_labels": 1}, {"labels": torch.tensor([1, -100, 2])}, 3),
        ("ForImageClassification", {"num_labels": 4}, {"labels": torch.ones(3, 4)}, 3),
        ("ForImageClassification", {"problem_type": "regression"}, {"labels": torch.ones(3, 4)}, 3),
        ("ForSemanticSegmentation", {}, {"labels": torch.tensor([[0, 255], [3, 1]])}, 3),
        (
            "ForSemanticSegmentation",
            {"semantic_loss_ignore_index": 0},
            {"labels": torch.tensor([[0, 255]])},
            1,
        ),
        ("ForSemanticSegmentation", {"loss_ignore_index": 0}, {"labels": torch.tensor([[0, 255]])}, 1),
        ("ForSemanticSegmentation", {"num_labels": 1}, {"labels": torch.tensor([[0, 255]])}, 2),
        ("ForCTC", {"ctc_loss_reduction": "mean"}, {"labels": LABELS}, 2),
    ],
)
def test_weight_is_the_divisor_of_the_loss(
    loss: str, config: dict[str, Any], inputs: dict[str, Any], weight: int
) -> None:
    assert weigh(model(loss, **config), inputs) == weight


@pytest.mark.parametrize(
    ("given", "inputs", "why"),
    [
        (model(None), {}, "SimpleNamespace has no loss_type of transformers"),
        (model("ForObjectDetection"), {}, "SimpleNamespace has loss_type='ForObjectDetection'"),
        (model("ForMaskedLM"), {"input_ids": IDS}, r"the batch has no 'labels', only \['input_ids'\]"),
        (model("ForCTC", ctc_loss_reduction="none"), {"labels": LABELS}, 'ctc_loss_reduction is not "mean"'),
    ],
)
def test_unknown_losses_are_refused(given: Any, inputs: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=rf"{why}\. Define `weight_of\(self, microbatch\)`"):
        weigh(given, inputs)


def test_tokens_that_peft_adds_are_refused() -> None:
    prompted = model("ForCausalLM")
    prompted.active_peft_config = SimpleNamespace(is_prompt_learning=True)

    with pytest.raises(InputError, match="PEFT adds virtual tokens before the prompt"):
        weigh(prompted, {"labels": LABELS})
    prompted.loss_type = "ForSequenceClassification"
    assert weigh(prompted, {"labels": torch.tensor([1, 0])}) == 2
