"""Hugging Face's Trainer with a small Llama, for next tokens or classes of sequences."""

import os
import tempfile
from typing import Any

import torch
from peers.hf_trainer import arguments_for
from peers.work import TrainerWindow
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer
from transformers.trainer_callback import PrinterCallback

from superbatch.integrations.hf import Exact

from . import LENGTH, SIZE, STEPS

os.environ["HF_HUB_OFFLINE"] = "1"
VOCABULARY = 512


def window(training: str, exact: bool) -> TrainerWindow:
    """Return an endless `Trainer.train` that stops at every update."""
    model, microbatches = _model(training), [_microbatch(training, seed) for seed in range(STEPS)]

    def fit(loader: Any) -> None:
        kinds = (Exact, Trainer) if exact else (Trainer,)
        endless: Any = type(
            "Endless",
            kinds,
            {"get_train_dataloader": lambda self: loader, "coupled": training == "coupled" or None},
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = arguments_for(
                folder=folder, accumulation_steps=STEPS, max_steps=10**9, max_grad_norm=1.0
            )
            trainer = endless(model=model, args=arguments)
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    return TrainerWindow(fit, microbatches)


def _model(training: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=4,
        pad_token_id=0,
    )
    return (LlamaForSequenceClassification if training == "classes" else LlamaForCausalLM)(config)


def _microbatch(training: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (SIZE, LENGTH), generator=generator)
    labels = torch.randint(4, (SIZE,), generator=generator) if training == "classes" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
