"""Language models that return their loss: the check and `verify` name the same cause and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.torch import Accumulator, count_tokens
from superbatch.torch.checks import coupling
from superbatch.torch.options import PerSampleRandom
from superbatch.torch.verify import verify

WORDS, TIMES = 13, 9


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Causal(nn.Module):
    """Causal model that shifts labels and computes its loss in float32, as Llama and GPT-2 do."""

    def __init__(self, *, dropout: float = 0.0, balance: float = 0.0) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, 8), nn.Dropout(dropout)
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head, self.balance = nn.Linear(8, WORDS, bias=False), balance

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        x = self.drop(self.embed(input_ids) * attention_mask[..., None])
        routing = self.gate(x).softmax(-1)
        out = x + sum(routing[..., n, None] * torch.tanh(expert(x)) for n, expert in enumerate(self.experts))
        logits = self.head(self.drop(out)).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.balance:
            chosen = F.one_hot(routing.argmax(-1).flatten(), 4).to(routing.dtype)
            loss = loss + self.balance * 4 * (chosen.mean(0) * routing.flatten(0, 1).mean(0)).sum()
        return Output(loss, logits)


def sentences(samples: int = 8, words: int = WORDS) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, words, (samples, TIMES), generator=draw)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row in range(samples):
        mask[row, 3 + row * 5 % 7 :], labels[row, 3 + row * 5 % 7 :] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def outcome(model: Any, batch: Any, **declared: Any) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Return the error of the check, and the causes and findings of `verify`."""
    loss_fn = lambda microbatch: model(**microbatch).loss  # noqa: E731
    report = verify(model, loss_fn, batch, microbatch_size=4, participants=[PerSampleRandom()], **declared)
    assert report.exact == (not report.causes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accumulate = Accumulator(
        model, optimizer, loss_fn, microbatch_size=4, participants=[PerSampleRandom()], **declared
    )
    try:
        accumulate(batch)
    except (LossSpecError, CoupledSamplesError) as error:
        return error, list(report.causes), report.findings
    return None, [], report.findings


SHIFTED = 'weight=count_tokens("labels", shift=True)'
WEIGHTS = {"samples": None, "tokens": count_tokens("labels")}


def assert_wrong_weight(model: Any, batch: Any, weight: Any, remedy: str = SHIFTED) -> None:
    error, causes, _ = outcome(model, batch, weight=weight)
    assert isinstance(error, LossSpecError)
    assert str(error).endswith(f"Instead pass {remedy}.")
    assert [(cause.kind, cause.remedy) for cause in causes] == [("weight", f"pass {remedy}")]


def assert_coupled(model: Any, batch: Any, weight: Any) -> None:
    error, causes, _ = outcome(model, batch, weight=weight)
    assert isinstance(error, CoupledSamplesError)
    assert "weight=" not in str(error)
    assert [cause.kind for cause in causes] == ["coupled_loss"]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.sampled(2)
def test_a_wrong_weight_is_not_taken_for_coupling(weight: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Causal(dropout=0.2).train(training)
    assert_wrong_weight(model, sentences(), WEIGHTS[weight])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_right_weight_passes_without_findings(training: bool) -> None:
    torch.manual_seed(0)
    model = Causal(dropout=0.2).train(training)
    error, causes, findings = outcome(model, sentences(), weight=count_tokens("labels", shift=True))
    assert (error, causes, findings) == (None, [], ())


def test_tolerances_of_float64_take_float32_for_coupling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: the tolerance is that of float64, but the model computes its loss in float32."""
    monkeypatch.setattr(coupling, "_computed_in", lambda dtype, problem: problem.in_dtype(dtype))
    with pytest.raises(AssertionError):
        test_the_right_weight_passes_without_findings(training=False)


@pytest.mark.parametrize("share", [0.02, 0.001])
@pytest.mark.parametrize("weight", [*WEIGHTS, "shifted"])
@pytest.mark.sampled(2)
def test_an_auxiliary_loss_over_the_batch_is_a_coupled_loss(weight: str, share: float) -> None:
    torch.manual_seed(0)
    weights = {**WEIGHTS, "shifted": count_tokens("labels", shift=True)}
    assert_coupled(Causal(balance=share), sentences(), weights[weight])


# -- Hugging Face models --------------------------------------------------------------------------------


def hf_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    heads = {**small, "num_key_value_heads": 2}
    options: dict[str, dict[str, Any]] = {
        "Llama": heads,
        "GPT2": {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "Bert": small,
        "Mixtral": {
            **heads, "num_local_experts": 4, "num_experts_per_tok": 2,
            "output_router_logits": True, "router_aux_loss_coef": 0.02,
        },
    }  # fmt: skip
    head = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}.get(name, f"{name}ForCausalLM")
    torch.manual_seed(0)
    return getattr(transformers, head)(getattr(transformers, f"{name}Config")(**options[name])).train()


@pytest.mark.slow
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_wrong_weight_of_a_hugging_face_model(name: str, weight: str) -> None:
    assert_wrong_weight(hf_model(name), sentences(words=50), WEIGHTS[weight])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
def test_the_right_weight_of_a_hugging_face_model(name: str) -> None:
    weight = count_tokens("labels", shift=name != "Bert")
    assert outcome(hf_model(name), sentences(words=50), weight=weight) == (None, [], ())


@pytest.mark.slow
def test_a_masked_language_model_is_not_shifted() -> None:
    assert_wrong_weight(hf_model("Bert"), sentences(words=50), None, 'weight=count_tokens("labels")')


@pytest.mark.slow
def test_the_router_loss_of_mixtral_is_a_coupled_loss() -> None:
    assert_coupled(hf_model("Mixtral"), sentences(words=50), count_tokens("labels", shift=True))
