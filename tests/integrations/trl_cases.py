"""Tiny models and data for the trainers of TRL; no downloads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from superbatch.integrations.trl import Exact
from tests.integrations.arguments import SMALL, arguments

disable_progress_bars()
CHAT = """{% for message in messages %}{% if message.role == "assistant" %}
{% generation %}{{ message.content }} <eos>{% endgeneration %}
{% else %}{{ message.content }}{% endif %} {% endfor %}"""
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(29))]


class ExactSFT(Exact, SFTTrainer):
    """SFTTrainer with the mixin."""


class ExactDPO(Exact, DPOTrainer):
    """DPOTrainer with the mixin."""


class ExactReward(Exact, RewardTrainer):
    """RewardTrainer with the mixin."""


HOSTS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, ExactSFT, SFTConfig),
    "gpt2": (SFTTrainer, ExactSFT, SFTConfig),
    "assistant": (SFTTrainer, ExactSFT, SFTConfig),
    "router": (SFTTrainer, ExactSFT, SFTConfig),
    "dpo": (DPOTrainer, ExactDPO, DPOConfig),
    "reward": (RewardTrainer, ExactReward, RewardConfig),
    "margin": (RewardTrainer, ExactReward, RewardConfig),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHAT, **special)


def model(name: str) -> nn.Module:
    """Return the model for a trainer, with the same weights in every call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "num_key_value_heads": 2, "pad_token_id": 0, **SMALL}
    if name == "router":
        experts = {"num_local_experts": 4, "experts_implementation": "eager", "output_router_logits": True}
        return MixtralForCausalLM(MixtralConfig(**sizes, **experts, router_aux_loss_coef=0.5)).double()
    if name == "gpt2":
        gpt2 = GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0)
        gpt2.embd_pdrop = gpt2.attn_pdrop = 0.0
        return GPT2LMHeadModel(gpt2).double()
    if name in ("reward", "margin"):
        return LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1)).double()
    return LlamaForCausalLM(LlamaConfig(**sizes)).double()


def data(name: str, count: int) -> Dataset:
    """Return rows of unequal lengths, or of equal lengths for the router."""
    draw = random.Random(0)

    def words(fewest: int, most: int) -> str:
        return " ".join(draw.choices(WORDS[3:], k=8 if name == "router" else draw.randint(fewest, most)))

    if name in ("sft", "gpt2", "router"):
        return Dataset.from_list([{"text": words(3, 14)} for _ in range(count)])
    prompts = [words(2, 5) for _ in range(count)]
    rows = [(prompt, words(2, 9), words(2, 9)) for prompt in prompts]
    if name == "assistant":
        chats = [[("user", p), ("assistant", a), ("user", b), ("assistant", p)] for p, a, b in rows]
        return Dataset.from_list(
            [{"messages": [{"role": who, "content": text} for who, text in chat]} for chat in chats]
        )
    if name == "dpo":
        return Dataset.from_list([{"prompt": p, "chosen": f" {a}", "rejected": f" {b}"} for p, a, b in rows])
    scored = [{"chosen": f"{p} {a}", "rejected": f"{p} {b}"} for p, a, b in rows]
    if name == "margin":
        scored = [{**each, "margin": draw.random() * 4} for each in scored]
    return Dataset.from_list(scored)


def train(
    kind: type,
    name: str,
    size: int,
    steps: int,
    folder: Path,
    *,
    rows: int = 19,
    evaluation: bool = False,
    stream: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Train by a kind of trainer; return the parameters and the logs of updates."""
    defaults = {"bf16": False, "activation_checkpointing": False, "learning_rate": 0.5, "optim": "sgd"}
    defaults |= {"assistant_only_loss": True} if name == "assistant" else {}
    config = HOSTS[name][2](**arguments(folder, size, steps, **{**defaults, **options}))
    trained = model(name)
    more: dict[str, Any] = {"ref_model": model(name)} if name == "dpo" else {}
    more |= {"eval_dataset": data(name, 6)} if evaluation else {}
    trainer = kind(
        model=trained,
        args=config,
        train_dataset=data(name, rows).to_iterable_dataset() if stream else data(name, rows),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {each: parameter.detach().clone() for each, parameter in trained.named_parameters()}, logs
