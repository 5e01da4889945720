"""Seq2SeqTrainer with the mixin against the stock trainer with the large batch, also with label smoothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from superbatch.integrations.hf import Exact
from tests.integrations import hf_cases
from tests.integrations.hf_cases import CASES, Case, Row, collate, gap, train

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the models in float64, and use the arguments of this trainer."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(hf_cases, "TrainingArguments", Seq2SeqTrainingArguments)


class ExactSeq2Seq(Exact, Seq2SeqTrainer):
    """Trainer of a user with the mixin."""


class InThrees(ExactSeq2Seq):
    """Trainer that splits each batch into micro-batches of three samples."""

    microbatch_size = 3


def _shifted(rows: list[Row]) -> Row:
    """Collate as `DataCollatorForSeq2Seq`: with label smoothing the model gets no labels."""
    batch = collate(rows)
    labels = batch["labels"]
    start = torch.zeros(len(labels), 1, dtype=torch.long)
    return batch | {"decoder_input_ids": torch.cat([start, labels[:, :-1].clamp(min=0)], 1)}


CASE = Case(CASES["seq2seq"].model, CASES["seq2seq"].row, collate=_shifted)


@pytest.mark.parametrize(
    ("smoothing", "exact"),
    [(0.0, 1e-12), (0.2, 1e-7)],  # the Trainer adds up smoothed labels in float32
)
def test_the_update_equals_the_large_batch(smoothing: float, exact: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": "sgd", "label_smoothing_factor": smoothing}
    big = train(Seq2SeqTrainer, CASE, 8, 1, tmp_path, **options)
    if not smoothing:  # the Trainer passes the number of items
        assert gap(big, train(Seq2SeqTrainer, CASE, 2, 4, tmp_path, **options)) > 0.02

    for kind, size, steps in ((ExactSeq2Seq, 2, 4), (InThrees, 8, 1), (ExactSeq2Seq, 1, 8)):
        ours = train(kind, CASE, size, steps, tmp_path, **options)
        assert gap(big, ours) <= exact
        assert ours.logged("loss") == pytest.approx(big.logged("loss"), rel=1e-6)
        assert ours.logged("grad_norm") == pytest.approx(big.logged("grad_norm"), rel=max(exact, 1e-10))


def test_smoothing_changes_the_update(tmp_path: Path) -> None:
    smooth, plain = (
        train(ExactSeq2Seq, CASE, 2, 4, tmp_path, optim="sgd", label_smoothing_factor=factor)
        for factor in (0.2, 0.0)
    )
    assert gap(plain, smooth) > 1e-2


class _MeanOfMeans(ExactSeq2Seq):
    _checks = False

    def weight_of(self, microbatch: Any) -> int:
        return 1


def test_mutant_mean_of_means_of_smoothed_labels(tmp_path: Path) -> None:
    options = {"optim": "sgd", "label_smoothing_factor": 0.2}
    big = train(Seq2SeqTrainer, CASE, 8, 1, tmp_path, **options)

    assert gap(big, train(_MeanOfMeans, CASE, 2, 4, tmp_path, **options)) > 1e-2
