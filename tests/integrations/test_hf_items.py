"""Losses that divide by the number of items of the batch, and labels that a model counts otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMultipleChoice,
    GPT2Config,
    GPT2LMHeadModel,
    JetMoeConfig,
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers import JetMoeForCausalLM as JetMoe

from superbatch.errors import InputError, LossSpecError
from tests.integrations.hf_cases import (
    CASES,
    NO_DROPOUT,
    SMALL,
    Case,
    ExactTrainer,
    InThrees,
    Row,
    gap,
    rows,
    train,
)

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


def _wav2vec2() -> nn.Module:
    sizes = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (5,), "num_conv_pos_embeddings": 4}
    none = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    options = {**dict.fromkeys(none, 0.0), "layerdrop": 0.0, "apply_spec_augment": False}
    options |= {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 1, "pad_token_id": 0}
    config = Wav2Vec2Config(vocab_size=20, ctc_loss_reduction="sum", **sizes, **options, **SMALL)
    return Wav2Vec2ForCTC(config)


def _choices() -> nn.Module:
    return BertForMultipleChoice(BertConfig(vocab_size=40, max_position_embeddings=32, **SMALL, **NO_DROPOUT))


def _spoken(generator: torch.Generator, length: int) -> Row:
    sound = torch.randn(100, generator=generator).double()
    return {"input_ids": sound, "labels": torch.randint(1, 19, (length // 4,), generator=generator)}


def _chosen(generator: torch.Generator, length: int) -> Row:
    ids = torch.randint(1, 39, (3, 6), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, (), generator=generator)}


class _Speech(nn.Module):
    """Takes the sounds by the name that the tests collate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _wav2vec2()
        self.config, self.loss_type = self.inner.config, self.inner.loss_type

    def forward(self, input_ids: Any, labels: Any, **given: Any) -> Any:
        return self.inner(input_ids, labels=labels)


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
    "a sum": (Case(_Speech, _spoken), {}),
    "a choice": (Case(_choices, _chosen), {}),
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


def _penalized(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return _by_items(outputs, labels, num_items_in_batch) + outputs.logits.square().mean()


def test_a_loss_that_needs_the_number_of_items_and_has_another_term_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs num_items_in_batch, and is no sum that is divided by it"):
        train(ExactTrainer, CASES["tokens"], 2, 4, tmp_path, more={"compute_loss_func": _penalized})


def test_an_optimizer_that_steps_in_the_backward_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ExactTrainer.get_batch_samples

    def with_lomo(self: Any, *given: Any) -> Any:  # which is not installed here
        self.args.optim = "lomo"
        return take(self, *given)

    monkeypatch.setattr(ExactTrainer, "get_batch_samples", with_lomo)
    with pytest.raises(InputError, match=r"optim='lomo' steps inside of each backward"):
        train(ExactTrainer, CASES["classes"], 2, 4, tmp_path)


def test_samples_of_unequal_lengths_one_by_one_raise_no_warning(tmp_path: Path) -> None:
    data = rows(CASES["causal"], 8)
    big = train(Trainer, CASES["causal"], 8, 1, tmp_path, data=data)
    ours = train(ExactTrainer, CASES["causal"], 1, 8, tmp_path, data=data)  # the tests raise warnings

    assert len({len(row["input_ids"]) for row in data}) > 4
    assert gap(big, ours) <= 1e-5
