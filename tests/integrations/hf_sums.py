"""Models whose losses are sums that the Trainer divides, or that count labels differently."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMultipleChoice,
    GPT2Config,
    GPT2LMHeadModel,
    JetMoeConfig,
    LukeConfig,
    LukeForMaskedLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers import JetMoeForCausalLM as JetMoe

from tests.integrations.arguments import SMALL
from tests.integrations.hf_cases import CASES, NO_DROPOUT, Case, Row, collate


def _gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, **dropout)
    )


def bart() -> nn.Module:
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


def _switch() -> nn.Module:
    """Return a mixture of experts with a router loss: a mean over tokens, padding included."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2}
    losses = {"router_z_loss_coef": 0.5, "router_aux_loss_coef": 0.0, "output_router_logits": True}
    options = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0}
    model = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(vocab_size=40, **sizes, **losses, **options)
    )
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.dtype = torch.float64  # its config does not allow float64
    return model


def luke() -> nn.Module:
    """Return a model that predicts words and entities: two means, each over its own labels."""
    sizes = {"entity_vocab_size": 10, "entity_emb_size": 8, "max_position_embeddings": 32}
    return LukeForMaskedLM(LukeConfig(vocab_size=40, **sizes, **SMALL, **NO_DROPOUT))


def named(generator: torch.Generator, length: int) -> Row:
    """Return a row for `luke`: 1 to 4 of its entities have a label."""
    ids = torch.randint(1, 39, (length,), generator=generator)
    entities = torch.randint(1, 9, (4,), generator=generator)
    places = {
        "entity_attention_mask": torch.ones_like(entities),
        "entity_position_ids": torch.zeros(4, 5).long(),
    }
    labels = {"labels": ids.masked_fill(torch.arange(length) > length // 2, -100)}
    labels |= {"entity_labels": entities.masked_fill(torch.arange(4) > length % 4, -100)}
    return {"input_ids": ids, "entity_ids": entities, **places, **labels}


def named_together(rows: list[Row]) -> Row:
    """Collate rows for `luke`."""
    text = collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
    return text | {name: torch.stack([row[name] for row in rows]) for name in rows[0] if "entity" in name}


def _choices() -> nn.Module:
    return BertForMultipleChoice(BertConfig(vocab_size=40, max_position_embeddings=32, **SMALL, **NO_DROPOUT))


def _spoken(generator: torch.Generator, length: int) -> Row:
    sound = torch.randn(100, generator=generator).double()
    return {"input_ids": sound, "labels": torch.randint(1, 19, (length // 4,), generator=generator)}


def _chosen(generator: torch.Generator, length: int) -> Row:
    ids = torch.randint(1, 39, (3, 6), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, (), generator=generator)}


class _Speech(nn.Module):
    """Accept sounds under the name `input_ids`, as the tests collate them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _wav2vec2()
        self.config, self.loss_type = self.inner.config, self.inner.loss_type

    def forward(self, input_ids: Any, labels: Any, **given: Any) -> Any:
        return self.inner(input_ids, labels=labels)


def text(generator: torch.Generator, length: int) -> Row:
    ids = torch.randint(1, 39, (length,), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def by_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


RUNS: dict[str, tuple[Case, dict[str, Any]]] = {
    "no loss_type": (Case(_gpt2, text), {}),
    "a function": (CASES["tokens"], {"more": {"compute_loss_func": by_items}}),
    "a sum": (Case(_Speech, _spoken), {}),
    "multiple choice": (Case(_choices, _chosen), {}),
    "aux_loss_coef for router_aux_loss_coef": (Case(_jetmoe, text, equal=True), {}),
    "a router without a balance loss": (Case(_switch, text, equal=True), {}),
}
