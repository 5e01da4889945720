"""Losses that divide by the number of items of the batch, and labels that a model counts otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from torch import nn
from transformers import BartConfig, BartForCausalLM, GPT2Config, GPT2LMHeadModel, JetMoeConfig, Trainer
from transformers import JetMoeForCausalLM as JetMoe

from superbatch.errors import LossSpecError
from tests.integrations.hf_cases import CASES, SMALL, Case, ExactTrainer, InThrees, Row, gap, train

pytestmark = pytest.mark.integrations


def _gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, **dropout)
    )


def _bart() -> nn.Module:
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    return BartForCausalLM(BartConfig(vocab_size=40, dropout=0.0, max_position_embeddings=32, **sizes))


def _jetmoe() -> nn.Module:
    experts = {"num_local_experts": 4, "output_router_logits": True, "aux_loss_coef": 0.5}
    return JetMoe(JetMoeConfig(vocab_size=40, num_key_value_heads=2, kv_channels=8, **experts, **SMALL))


def _text(generator: torch.Generator, length: int) -> Row:
    ids = torch.randint(1, 39, (length,), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _by_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


RUNS: dict[str, tuple[Case, dict[str, Any]]] = {
    "no loss_type": (Case(_gpt2, _text), {}),
    "a function": (CASES["tokens"], {"more": {"compute_loss_func": _by_items}}),
    "another name of the router's share": (Case(_jetmoe, _text, equal=True), {}),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", RUNS)
def test_the_update_is_that_of_the_large_batch(name: str, tmp_path: Path) -> None:
    case, options = RUNS[name]
    big = train(Trainer, case, 8, 1, tmp_path, optim="sgd", **options)

    for kind, size, steps in ((ExactTrainer, 1, 8), (InThrees, 8, 1)):
        ours = train(kind, case, size, steps, tmp_path, optim="sgd", **options)
        assert gap(big, ours) <= 1e-12
        assert ours.logged("grad_norm") == pytest.approx(big.logged("grad_norm"), rel=1e-10)
        assert ours.logged("loss") == pytest.approx(big.logged("loss"), rel=1e-6)


def test_labels_that_a_model_does_not_shift_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LossSpecError, match=r"BartForCausalLM is a mean over \d+ labels .* weight_of"):
        train(ExactTrainer, Case(_bart, _text), 2, 4, tmp_path)
