"""Tiny models of transformers in float64, batches for them, and training by the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from superbatch.integrations.hf import Exact
from tests.integrations.arguments import SMALL, arguments

logging.disable_progress_bar()
Row = dict[str, Any]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class ExactTrainer(Exact, Trainer):
    """Trainer of a user with one more base class."""


class InThrees(ExactTrainer):
    """Trainer that splits each batch into micro-batches of three samples."""

    microbatch_size = 3


@dataclass
class Case:
    """A model and its data."""

    model: Callable[[], nn.Module]
    row: Callable[[torch.Generator, int], Row]
    equal: bool = False  # equal lengths
    collate: Callable[[list[Row]], Row] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, **SMALL))


def _bert(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(
        BertConfig(vocab_size=40, max_position_embeddings=32, **SMALL, **NO_DROPOUT, **options)
    )


def _t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=40, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )


def _mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    options = {"num_key_value_heads": 2, "output_router_logits": True, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(vocab_size=40, **options, **experts, **SMALL))


def _clip() -> nn.Module:
    text = {**SMALL, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 39}
    vision = {**SMALL, "image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def _tokens(generator: torch.Generator, length: int) -> Tensor:
    return torch.randint(1, 39, (length,), generator=generator)


def _text(generator: torch.Generator, length: int) -> Row:
    ids = _tokens(generator, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(generator: torch.Generator, length: int) -> Row:
    ids = _tokens(generator, length)
    chosen = torch.rand(length, generator=generator) < 0.4
    chosen[0] = True
    return {"input_ids": ids, "labels": torch.where(chosen, ids, -100)}


def _labelled(generator: torch.Generator, length: int) -> Row:
    label = torch.randint(3, (), generator=generator)
    return {"input_ids": _tokens(generator, length), "labels": label}


def _scored(generator: torch.Generator, length: int) -> Row:
    return {"input_ids": _tokens(generator, length), "labels": torch.rand((), generator=generator).double()}


def _tagged(generator: torch.Generator, length: int) -> Row:
    tags = torch.randint(3, (length,), generator=generator)
    return {"input_ids": _tokens(generator, length), "labels": tags}


def _answered(generator: torch.Generator, length: int) -> Row:
    start, end = torch.randint(length, (2,), generator=generator)
    return {"input_ids": _tokens(generator, length), "start_positions": start, "end_positions": end}


def _pictured(generator: torch.Generator, length: int) -> Row:
    ids = torch.cat([_tokens(generator, length - 1) % 38 + 1, torch.tensor([39])])
    return {"input_ids": ids, "pixel_values": torch.randn(3, 8, 8, generator=generator).double()}


CASES = {
    "causal": Case(_llama, _text),
    "masked": Case(_bert(BertForMaskedLM), _masked),
    "seq2seq": Case(_t5, _text),
    "tokens": Case(_bert(BertForTokenClassification, num_labels=3), _tagged),
    "classes": Case(_bert(BertForSequenceClassification, num_labels=3), _labelled),
    "regression": Case(_bert(BertForSequenceClassification, num_labels=1), _scored),
    "answers": Case(_bert(BertForQuestionAnswering), _answered, equal=True),  # its softmax includes padding
    "router": Case(_mixtral, _text, equal=True),
    "clip": Case(_clip, _pictured, equal=True),
}


def rows(case: Case, count: int) -> list[Row]:
    """Return rows of data, of unequal lengths unless the case needs equal ones."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 14, (count,), generator=generator)
    return [case.row(generator, 8 if case.equal else int(length)) for length in lengths]


def collate(rows: list[Row]) -> Row:
    """Pad on the right, as collators of transformers do."""
    batch: Row = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        fill = -100 if name == "labels" else 0
        if values[0].ndim == 1:
            batch[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
        else:
            batch[name] = torch.stack(values)
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    return batch | ({"return_loss": True} if "pixel_values" in batch else {})


class Stream(IterableDataset[Row]):
    """Iterable data of unknown length."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


class Events(TrainerCallback):
    """Record the Trainer's callback events in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        grads = [parameter.grad for parameter in given["model"].parameters() if parameter.grad is not None]
        self.norms.append(sum(float(grad.square().sum()) for grad in grads) ** 0.5)
        self.seen.append("pre_optimizer_step")


for _name in (
    "step_begin",
    "substep_end",
    "optimizer_step",
    "step_end",
    "log",
    "evaluate",
    "save",
    "epoch_end",
):

    def _record(self: Events, *given: Any, name: str = _name, **others: Any) -> None:
        self.seen.append(name)

    setattr(Events, f"on_{_name}", _record)


@dataclass
class Run:
    """Result of a training."""

    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    logs: list[dict[str, Any]]
    events: Events
    trainer: Trainer

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.logs if name in entry]


def copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model().double()


def train(
    kind: type[Trainer],
    case: Case,
    size: int,
    steps: int,
    folder: Path,
    *,
    data: Any = None,
    model: nn.Module | None = None,
    resume: str | None = None,
    more: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Train a model by a kind of Trainer, with this micro-batch size and number of micro-batches."""
    model, events = model_of(case) if model is None else model, Events()
    defaults = {"max_grad_norm": 0.5, "learning_rate": 0.1, "lr_scheduler_type": "cosine", **case.options}
    given = arguments(folder, size, steps, **{**defaults, **options})
    trainer = kind(
        model,
        TrainingArguments(**given),
        train_dataset=rows(case, 20) if data is None else data,
        eval_dataset=rows(case, 6),
        data_collator=case.collate or collate,
        callbacks=[events],
        **(more or {}),
    )
    start = copies(model)
    trainer.train(resume_from_checkpoint=resume)
    return Run(start, copies(model), trainer.state.log_history, events, trainer)


def gap(one: Run, other: Run) -> float:
    """Return the largest difference of a parameter, relative to its largest change in training."""
    start = one.start
    moved = max(float((one.parameters[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-3, "nothing was trained"
    return max(float((one.parameters[name] - other.parameters[name]).abs().max()) for name in start) / moved
