"""Model heads whose loss has several terms with their own divisors: answers and boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")
pytest.importorskip("scipy", reason="scipy is not installed, with which DETR matches boxes")

from torch import nn
from transformers import (
    ConditionalDetrConfig,
    ConditionalDetrForObjectDetection,
    DetrConfig,
    DetrForObjectDetection,
    LayoutLMv3Config,
    LayoutLMv3ForQuestionAnswering,
    ResNetConfig,
    Trainer,
)

from superbatch.errors import InputError, LossSpecError
from superbatch.integrations import hf_terms
from superbatch.integrations.hf_losses import split_of
from tests.integrations.arguments import SMALL
from tests.integrations.hf_cases import CASES, NO_DROPOUT, Case, ExactTrainer, InThrees, Row, gap, train

pytestmark = pytest.mark.integrations
QUERIES, LENGTH = 5, 8


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the models' casts and constants float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _detector(kind: Any, config: Any) -> nn.Module:
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, **heads}
    return kind(
        config(
            backbone_config=backbone,
            num_queries=QUERIES,
            num_labels=3,
            decoder_ffn_dim=16,
            dropout=0.0,
            auxiliary_loss=True,
            **sizes,
        )
    )


def _boxed(generator: torch.Generator, length: int) -> Row:
    count = (length * 5) % 7  # 0 to 6: none, up to more than there are queries
    boxes = torch.rand(count, 4, generator=generator) * 0.4 + 0.2
    labels = {"class_labels": torch.randint(3, (count,), generator=generator), "boxes": boxes}
    return {"input_ids": torch.ones(length), "pixel_values": torch.randn(3, 32, 32), "labels": labels}


def _pictures(rows: list[Row]) -> Row:
    pictures = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pictures, "labels": [row["labels"] for row in rows]}


def _answered(generator: torch.Generator, length: int) -> Row:
    ids = torch.randint(1, 39, (length,), generator=generator)
    start, end = torch.randint(length + 4, (2,), generator=generator).clamp(
        max=length
    )  # some are outside the text
    return {"input_ids": ids, "start_positions": start, "end_positions": end.clamp(max=length)}


def _page() -> nn.Module:
    """Return a model with logits of the words and of the patches of a picture."""
    sizes = {"input_size": 8, "patch_size": 4, "coordinate_size": 2, "shape_size": 4}
    sizes |= {"max_2d_position_embeddings": 16, "max_position_embeddings": 32, "pad_token_id": 0}
    return LayoutLMv3ForQuestionAnswering(LayoutLMv3Config(vocab_size=40, **sizes, **SMALL, **NO_DROPOUT))


def _read(generator: torch.Generator, length: int) -> Row:
    start, end = torch.randint(LENGTH + 9, (2,), generator=generator)  # in words, in patches, or outside
    ids = torch.randint(1, 39, (LENGTH,), generator=generator)
    page = {"bbox": torch.zeros(LENGTH, 4).long(), "pixel_values": torch.randn(3, 8, 8, generator=generator)}
    return {"input_ids": ids, **page, "start_positions": start, "end_positions": end}


def _stacked(rows: list[Row]) -> Row:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _detr() -> nn.Module:
    return _detector(DetrForObjectDetection, DetrConfig)


def _focal() -> nn.Module:
    return _detector(ConditionalDetrForObjectDetection, ConditionalDetrConfig)


HEADS = {
    "classes and boxes": Case(_detr, _boxed, collate=_pictures),
    "boxes alone": Case(_focal, _boxed, collate=_pictures),
    "starts and ends": Case(CASES["answers"].model, _answered, equal=True),
    "more logits than words": Case(_page, _read, collate=_stacked),
}
OPTIONS = {"optim": "sgd", "learning_rate": 0.02, "remove_unused_columns": False}


@pytest.mark.parametrize("name", HEADS)
def test_the_update_equals_the_large_batch(name: str, tmp_path: Path) -> None:
    case = HEADS[name]
    big = train(Trainer, case, 8, 1, tmp_path, **OPTIONS)
    stock = train(Trainer, case, 2, 4, tmp_path, **OPTIONS)

    assert gap(big, stock) > 0.02
    for kind, size, steps in ((ExactTrainer, 2, 4), (InThrees, 8, 1), (ExactTrainer, 1, 8)):
        ours = train(kind, case, size, steps, tmp_path, **OPTIONS)
        assert gap(big, ours) <= 1e-12
        assert ours.logged("loss") == pytest.approx(big.logged("loss"), rel=1e-6)
        assert ours.logged("grad_norm") == pytest.approx(big.logged("grad_norm"), rel=1e-10)


def test_premise_some_answers_lie_outside_and_pictures_lack_boxes() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [_answered(generator, LENGTH) for _ in range(20)]
    inside = [(int(row["start_positions"]) < LENGTH, int(row["end_positions"]) < LENGTH) for row in rows]
    counts = {len(_boxed(generator, length)["labels"]["boxes"]) for length in range(4, 14)}

    reads = [int(_read(generator, LENGTH)["start_positions"]) for _ in range(20)]
    patches = 5  # 4 patches and a token for the whole picture
    assert len(set(inside)) == 4
    assert {(read >= LENGTH) + (read >= LENGTH + patches) for read in reads} == {0, 1, 2}
    assert counts >= {0, 1, QUERIES + 1}


def test_mutant_terms_with_one_divisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kind = HEADS["starts and ends"], "ForQuestionAnswering"
    big = train(Trainer, case, 8, 1, tmp_path, **OPTIONS)
    terms = hf_terms.TERMS[kind]
    alike = replace(terms, weights={"start": terms.weights["end"], "end": terms.weights["end"]})
    monkeypatch.setitem(hf_terms.TERMS, kind, alike)
    mutant = type("Mutant", (ExactTrainer,), {"_checks": False})

    with pytest.raises(LossSpecError):
        train(ExactTrainer, case, 4, 2, tmp_path, **OPTIONS)
    assert gap(big, train(mutant, case, 4, 2, tmp_path, **OPTIONS)) > 1e-2


class _Halved(nn.Module):
    """Model whose loss is half of the declared one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CASES["answers"].model()
        self.config, self.loss_type = self.inner.config, "ForQuestionAnswering"

    def forward(self, input_ids: Any, attention_mask: Any, start_positions: Any, end_positions: Any) -> Any:
        outputs = self.inner(input_ids, start_positions=start_positions, end_positions=end_positions)
        outputs["loss"] = outputs["loss"] * 0.5
        return outputs


class _Silent(_Halved):
    """Model that returns only its loss."""

    def forward(self, **inputs: Any) -> Any:
        return {"loss": super().forward(**inputs)["loss"]}


def test_a_loss_other_than_the_sum_of_its_terms_is_an_error(tmp_path: Path) -> None:
    case = HEADS["starts and ends"]
    with pytest.raises(
        LossSpecError, match=r"loss of _Halved is .* start, end add up to .* In a Trainer, define `weight_of"
    ):
        train(ExactTrainer, Case(_Halved, case.row, equal=True), 2, 4, tmp_path, **OPTIONS)
    with pytest.raises(
        InputError, match=r"divisor of the loss of _Silent: its outputs have no 'start_logits'"
    ):
        train(ExactTrainer, Case(_Silent, case.row, equal=True), 2, 4, tmp_path, **OPTIONS, label_names=["x"])


def test_boxes_that_are_counted_over_ranks_are_refused() -> None:
    model, inputs = _detr(), _pictures([_boxed(torch.Generator().manual_seed(0), 6)])

    assert hf_terms.terms_of(model, inputs) is not None
    with pytest.raises(InputError, match=r"DetrForObjectDetection divides its loss by the mean number of"):
        hf_terms.terms_of(model, inputs, ranks=2)


def test_coupled_samples_in_lists_are_refused(tmp_path: Path) -> None:
    kind = type("Coupled", (ExactTrainer,), {"coupled": True})
    with pytest.raises(InputError, match=r"coupled, but 'labels' is a list with an object for each"):
        train(kind, HEADS["classes and boxes"], 2, 4, tmp_path, **OPTIONS)


def test_lists_of_batch_tensors_are_not_lists_of_samples() -> None:
    maps = {"pixel_values": torch.zeros(2, 3), "maps": [torch.zeros(2, 4), torch.zeros(2, 5)]}

    assert split_of(maps).per_sample == ()
    assert split_of({**maps, "masks": [torch.zeros(1), torch.zeros(2)]}).per_sample == ("masks",)
