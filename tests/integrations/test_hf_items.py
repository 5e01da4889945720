"""Losses divided by the number of items of the batch, and models that count labels differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from torch import nn
from transformers import BertConfig, BertForMaskedLM, Trainer, ViltConfig, ViltForQuestionAnswering
from transformers.training_args import OptimizerNames

from superbatch.errors import CoupledSamplesError, InputError, LossSpecError
from superbatch.integrations import hf_weights
from tests.integrations.arguments import SMALL
from tests.integrations.hf_cases import (
    CASES,
    NO_DROPOUT,
    Case,
    ExactTrainer,
    InThrees,
    Row,
    copies,
    gap,
    model_of,
    rows,
    train,
)
from tests.integrations.hf_sums import RUNS, bart, by_items, luke, named, named_together, text

pytestmark = pytest.mark.integrations


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", RUNS)
def test_the_update_equals_the_large_batch(name: str, tmp_path: Path) -> None:
    case, options = RUNS[name]
    big = train(Trainer, case, 8, 1, tmp_path, optim="sgd", **options)

    for kind, size, steps in ((ExactTrainer, 1, 8), (InThrees, 8, 1)):
        ours = train(kind, case, size, steps, tmp_path, optim="sgd", **options)
        assert gap(big, ours) <= 1e-12
        assert ours.logged("grad_norm") == pytest.approx(big.logged("grad_norm"), rel=1e-10)
        assert ours.logged("loss") == pytest.approx(big.logged("loss"), rel=1e-6)


def test_unshifted_labels_are_an_error(tmp_path: Path) -> None:
    for size, steps in ((2, 4), (1, 8)):
        with pytest.raises(LossSpecError, match=r"than the declared weight.*weight_of.* BartForCausalLM"):
            train(ExactTrainer, Case(bart, text), size, steps, tmp_path)


class PenalizedForMaskedLM(BertForMaskedLM):
    """Add a mean over all tokens to the mean over masked tokens; transformers reads the class name."""

    def forward(self, *given: Any, **inputs: Any) -> Any:
        outputs = super().forward(*given, **inputs)
        outputs["loss"] = outputs["loss"] + 5 * outputs["logits"].square().mean()
        return outputs


def _bert() -> nn.Module:
    return PenalizedForMaskedLM(BertConfig(vocab_size=40, max_position_embeddings=32, **SMALL, **NO_DROPOUT))


class _Unchecked(ExactTrainer):
    """Trainer that declares the same weight without a check."""

    _checks = False

    def weight_of(self, microbatch: Any) -> int | float:
        return hf_weights.weigh(self.model, microbatch)


SEVERAL = {
    "two cross entropies": Case(luke, named, collate=named_together),
    "a second mean": Case(_bert, CASES["masked"].row),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", SEVERAL)
def test_means_with_several_divisors_are_an_error_for_single_samples(name: str, tmp_path: Path) -> None:
    case, options = SEVERAL[name], {"optim": "sgd", "remove_unused_columns": False}
    big = train(Trainer, case, 8, 1, tmp_path, **options)

    assert gap(big, train(_Unchecked, case, 1, 8, tmp_path, **options)) > 1e-2
    for size, steps in ((1, 8), (2, 4)):
        model = model_of(case)
        before = copies(model)
        with pytest.raises(CoupledSamplesError, match=r"terms that are means over different counts"):
            train(ExactTrainer, case, size, steps, tmp_path, model=model, **options)
        assert all(torch.equal(value, before[each]) for each, value in copies(model).items())


def test_a_known_loss_name_with_other_inputs_is_refused(tmp_path: Path) -> None:
    def answered(generator: torch.Generator, length: int) -> Row:
        pixels = torch.randn(3, 8, 8, generator=generator).double()
        return {**text(generator, 6), "pixel_values": pixels, "labels": torch.rand(3).double()}

    def model() -> nn.Module:
        sizes = {"image_size": 8, "patch_size": 4, "max_image_length": 4, "num_labels": 3}
        return ViltForQuestionAnswering(ViltConfig(vocab_size=40, **sizes, **SMALL, **NO_DROPOUT))

    def together(rows: list[Row]) -> Row:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    with pytest.raises(
        InputError, match=r"ViltForQuestionAnswering has loss_type='ForQuestionAnswering'\. De"
    ):
        train(ExactTrainer, Case(model, answered, collate=together), 2, 4, tmp_path)


def test_drop_last_keeps_the_short_window_as_in_the_trainer(
    tmp_path: Path,
) -> None:
    case, options = CASES["masked"], {"optim": "sgd", "train_sampling_strategy": "sequential"}
    data = rows(case, 19)
    big = train(Trainer, case, 8, 1, tmp_path, data=data[:18], **options)
    ours, stock = (
        train(kind, case, 2, 4, tmp_path, data=data, dataloader_drop_last=True, **options)
        for kind in (ExactTrainer, Trainer)
    )

    assert ours.trainer.state.global_step == stock.trainer.state.global_step == 3  # 8, 8 and 2 samples
    assert gap(big, ours) <= 1e-6  # the head is in float64, its losses in float32
    assert gap(big, stock) > 0.05


def _penalized(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return by_items(outputs, labels, num_items_in_batch) + outputs.logits.square().mean()


def test_a_loss_that_needs_the_number_of_items_and_has_another_term_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs num_items_in_batch but is not a sum divided by it"):
        train(ExactTrainer, CASES["tokens"], 2, 4, tmp_path, more={"compute_loss_func": _penalized})


@pytest.mark.parametrize("name", ["lomo", "galore_adamw_layerwise"])
def test_an_optimizer_that_steps_in_the_backward_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ExactTrainer.get_batch_samples

    def with_optimizer(self: Any, *given: Any) -> Any:  # the optimizer itself is not installed
        self.args.optim = OptimizerNames(name)
        return take(self, *given)

    monkeypatch.setattr(ExactTrainer, "get_batch_samples", with_optimizer)
    with pytest.raises(InputError, match=rf"optim='{name}' steps during each backward"):
        train(ExactTrainer, CASES["classes"], 2, 4, tmp_path)


def test_single_samples_of_unequal_lengths_give_no_warning(tmp_path: Path) -> None:
    data = rows(CASES["causal"], 8)
    big = train(Trainer, CASES["causal"], 8, 1, tmp_path, data=data)
    ours = train(ExactTrainer, CASES["causal"], 1, 8, tmp_path, data=data)  # warnings are errors in tests

    assert len({len(row["input_ids"]) for row in data}) > 4
    assert gap(big, ours) <= 1e-5


class _Scaled(ExactTrainer):
    """Trainer with Accelerate's GradScaler for float16 on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)


@pytest.mark.parametrize("name", ["causal", "no loss_type"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first update is skipped
def test_a_scaler_skips_an_update_without_labels(name: str, tmp_path: Path) -> None:
    case = CASES[name] if name in CASES else RUNS[name][0]
    data = rows(case, 16)
    # Accelerate unscales before clipping only for float16.
    options = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    ignored = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in data[:8]]
    once = train(_Scaled, case, 2, 4, tmp_path, data=data[8:], **options)
    sequential = {**options, "train_sampling_strategy": "sequential"}
    ours = train(_Scaled, case, 2, 4, tmp_path, data=[*ignored, *data[8:]], **sequential)

    assert ours.trainer.state.global_step == 2
    assert gap(once, ours) <= 1e-6
