"""Unusual batches in the Trainer: flattened patches and tuples; rounding of losses in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from superbatch.errors import SplitError
from superbatch.integrations.hf import Exact
from tests.integrations.arguments import SMALL
from tests.integrations.hf_cases import CASES, Case, ExactTrainer, Row, collate, gap, rows, train

pytestmark = pytest.mark.integrations
SGD = {"optim": "sgd"}


class Seeing(LlamaForCausalLM):
    """Model that adds the mean of a text's patches to its tokens; texts have different numbers of patches."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.project = nn.Linear(4, 16)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, patches: Tensor, counts: Tensor, labels: Tensor | None = None, **inputs: Any
    ) -> Any:
        seen = torch.stack([each.mean(0) for each in self.project(patches).split(counts.tolist())])
        embedded = self.model.embed_tokens(input_ids) + seen[:, None]
        return super().forward(inputs_embeds=embedded, labels=labels, **inputs)


def seeing() -> nn.Module:
    return Seeing(LlamaConfig(vocab_size=40, num_key_value_heads=2, **SMALL))


def with_patches(generator: torch.Generator, length: int) -> Row:
    count = int(torch.randint(1, 5, (), generator=generator))
    text = CASES["causal"].row(generator, length)
    return {**text, "patches": torch.randn(count, 4, generator=generator).double()}


def flatten(rows: list[Row]) -> Row:
    """Collate as for Qwen2-VL: the patches of all samples are rows of one tensor."""
    batch = collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
    patches = [row["patches"] for row in rows]
    return {**batch, "patches": torch.cat(patches), "counts": torch.tensor([len(each) for each in patches])}


PATCHES = Case(seeing, with_patches, collate=flatten)


class _OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class _ExactOwnLoss(Exact, _OwnLoss):
    def weight_of(self, microbatch: Mapping[str, Any]) -> int:
        return int((microbatch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("own", [False, True], ids=["items", "weight_of"])
@pytest.mark.filterwarnings("ignore:superbatch could not check")
def test_patches_without_a_row_axis_are_not_split(own: bool, tmp_path: Path) -> None:
    data = rows(PATCHES, 12)
    stock, exact = (_OwnLoss, _ExactOwnLoss) if own else (Trainer, ExactTrainer)
    big = train(stock, PATCHES, 8, 1, tmp_path, data=data, **SGD)
    for size, steps in ((2, 4), (1, 8)):
        ours = train(exact, PATCHES, size, steps, tmp_path, data=data, **SGD)
        assert len(big.logged("loss")) == len(ours.logged("loss")) == 2
        assert gap(big, ours) <= (1e-6 if own else 1e-12)  # the stock mean is rounded to float32


def test_a_batch_of_patches_that_would_be_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SplitError, match=r"'patches': .* In a Trainer, set gradient_accumulation_steps"):
        train(ExactTrainer, PATCHES, 8, 1, tmp_path, **SGD)


class _Pair(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        ids, mask, labels = inputs
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class _ExactPair(Exact, _Pair):
    microbatch_size = 3

    def weight_of(self, microbatch: Any) -> int:
        return int((microbatch[2] != -100).sum())


def _unnamed(rows: list[Row]) -> Any:
    batch = collate(rows)
    return batch["input_ids"], batch["attention_mask"], batch["labels"]


def test_a_batch_may_be_a_tuple(tmp_path: Path) -> None:
    case = Case(CASES["tokens"].model, CASES["tokens"].row, collate=_unnamed)
    data = rows(case, 12)
    big = train(_Pair, case, 8, 1, tmp_path, data=data, **SGD)
    assert gap(big, train(_Pair, case, 2, 4, tmp_path, data=data, **SGD)) > 0.01
    for size, steps in ((2, 4), (8, 1)):
        assert gap(big, train(_ExactPair, case, size, steps, tmp_path, data=data, **SGD)) <= 1e-12


def test_a_loss_in_float32_rounds_like_the_large_batch(tmp_path: Path) -> None:
    """Causal models cast logits to float32, where scaled means and a sum over items round differently."""
    case, data = CASES["causal"], rows(CASES["causal"], 12)
    mean = type("Mean", (ExactTrainer,), {"weight_of": lambda self, batch: Exact.weight_of(self, batch)})
    big = train(Trainer, case, 8, 1, tmp_path, data=data, **SGD)
    assert gap(big, train(mean, case, 2, 4, tmp_path, data=data, **SGD)) > 1e-10
    for kind, size, steps in ((ExactTrainer, 2, 4), (ExactTrainer, 1, 8)):
        assert gap(big, train(kind, case, size, steps, tmp_path, data=data, **SGD)) <= 1e-12
