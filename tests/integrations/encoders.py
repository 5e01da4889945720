"""Tiny sentence-transformers encoders with random weights, and sentences for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    MultiVectorEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizer

from tests.integrations.arguments import arguments

WORDS = ["red", "green", "blue", "big", "small", "cat", "dog", "bird", "tree", "house", "runs"]
WORDS += ["sleeps", "eats", "sees", "a", "the"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def weights(folder: Path, dropout: float = 0.0, seed: int = 0, kind: type = BertModel) -> str:
    """Write a transformer of two layers with its tokenizer, and return the path."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    folder.mkdir(exist_ok=True)
    kind(config).save_pretrained(folder)
    BertTokenizer(vocab={word: number for number, word in enumerate(VOCABULARY)}).save_pretrained(folder)
    return str(folder)


def dense(folder: Path, dropout: float = 0.0, seed: int = 0, **pooling: Any) -> SentenceTransformer:
    transformer = Transformer(weights(folder, dropout, seed))
    modules = [transformer, Pooling(16, **pooling)]
    return SentenceTransformer(modules=modules, device="cpu").double().train()


def sparse(folder: Path) -> SparseEncoder:
    transformer = Transformer(weights(folder, kind=BertForMaskedLM), transformer_task="fill-mask")
    return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu").double().train()


def multi_vector(folder: Path) -> MultiVectorEncoder:
    return MultiVectorEncoder(modules=[Transformer(weights(folder))], device="cpu").double().train()


def sentences(count: int, seed: int) -> list[str]:
    """Return sentences of two to eight words."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=random).tolist()
    return [
        " ".join(WORDS[int(word)] for word in torch.randint(len(WORDS), (length,), generator=random))
        for length in lengths
    ]


def columns(model: Any, count: int = 12, number: int = 2, **options: Any) -> list[dict[str, Any]]:
    found = [model.preprocess(sentences(count, seed), **options) for seed in range(number)]
    assert len(found[0]["input_ids"].unique()) > 10, "the premise: the tokenizer knows the words"
    return found


def gradients(
    loss: nn.Module, features: list[dict[str, Any]], labels: Tensor | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of its parameters by name."""
    loss.zero_grad()
    fresh = [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in each.items()}
        for each in features
    ]
    value = loss(fresh, labels)
    value = sum(value.values()) if isinstance(value, dict) else value
    value.backward()
    inner = getattr(loss, "loss", loss) if type(loss).__name__ == "CachedLoss" else loss
    found = {name: each.grad.clone() for name, each in inner.named_parameters() if each.grad is not None}
    return value.item(), found


def largest_difference(found: dict[str, Tensor], real: dict[str, Tensor]) -> float:
    """Return the largest relative difference; gradients near 0 are compared with the largest gradient."""
    assert found.keys() == real.keys()
    largest = max(float(each.norm()) for each in real.values())
    assert largest > 1e-3, "the premise: there is a gradient"
    return max(
        float((found[name] - real[name]).norm() / real[name].norm().clamp(min=1e-3 * largest))
        for name in real
    )


def rows_seen(model: nn.Module) -> list[int]:
    """Record the number of samples of each forward of the model."""
    seen: list[int] = []
    model[0].register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0]["input_ids"])))
    return seen


def updates(
    folder: Path, model: Any, make: Callable[[Any], nn.Module], size: int, steps: int = 1, **more: Any
) -> tuple[Any, Any]:
    """Make two updates of a copy in the Trainer; return the parameters' changes and the logged norms."""
    model = copy.deepcopy(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    data = Dataset.from_dict({"anchor": sentences(24, 1), "positive": sentences(24, 2)})
    options = {"max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.5, **more}
    given = arguments(folder / "out", size, steps, lr_scheduler_type="constant", **options)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**given),
        train_dataset=data,
        loss=make(model),
    )
    trainer.train()
    moved = {name: (each - before[name]).detach() for name, each in model.named_parameters()}
    return moved, [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
