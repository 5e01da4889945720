"""Losses that divide by the number of items of the batch, and labels that a model counts otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from transformers import Trainer

from superbatch.errors import InputError, LossSpecError
from tests.integrations.hf_cases import CASES, Case, ExactTrainer, InThrees, gap, rows, train
from tests.integrations.hf_sums import RUNS, bart, by_items, text

pytestmark = pytest.mark.integrations


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", RUNS)
def test_the_update_is_that_of_the_large_batch(name: str, tmp_path: Path) -> None:
    case, options = RUNS[name]
    big = train(Trainer, case, 8, 1, tmp_path, optim="sgd", **options)

    for kind, size, steps in ((ExactTrainer, 1, 8), (InThrees, 8, 1)):
        ours = train(kind, case, size, steps, tmp_path, optim="sgd", **options)
        assert gap(big, ours) <= 1e-12
        assert ours.logged("grad_norm") == pytest.approx(big.logged("grad_norm"), rel=1e-10)
        assert ours.logged("loss") == pytest.approx(big.logged("loss"), rel=1e-6)


def test_labels_that_a_model_does_not_shift_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LossSpecError, match=r"BartForCausalLM is a mean over \d+ labels .* weight_of"):
        train(ExactTrainer, Case(bart, text), 2, 4, tmp_path)


def _penalized(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return by_items(outputs, labels, num_items_in_batch) + outputs.logits.square().mean()


def test_a_loss_that_needs_the_number_of_items_and_has_another_term_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs num_items_in_batch, and is no sum that is divided by it"):
        train(ExactTrainer, CASES["tokens"], 2, 4, tmp_path, more={"compute_loss_func": _penalized})


def test_an_optimizer_that_steps_in_the_backward_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ExactTrainer.get_batch_samples

    def with_lomo(self: Any, *given: Any) -> Any:  # which is not installed here
        self.args.optim = "lomo"
        return take(self, *given)

    monkeypatch.setattr(ExactTrainer, "get_batch_samples", with_lomo)
    with pytest.raises(InputError, match=r"optim='lomo' steps inside of each backward"):
        train(ExactTrainer, CASES["classes"], 2, 4, tmp_path)


def test_samples_of_unequal_lengths_one_by_one_raise_no_warning(tmp_path: Path) -> None:
    data = rows(CASES["causal"], 8)
    big = train(Trainer, CASES["causal"], 8, 1, tmp_path, data=data)
    ours = train(ExactTrainer, CASES["causal"], 1, 8, tmp_path, data=data)  # the tests raise warnings

    assert len({len(row["input_ids"]) for row in data}) > 4
    assert gap(big, ours) <= 1e-5


class _Scaled(ExactTrainer):
    """With the scaler that Accelerate has for float16 on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)


@pytest.mark.parametrize("name", ["causal", "no loss_type"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first update is skipped
def test_a_scaler_skips_an_update_without_labels(name: str, tmp_path: Path) -> None:
    case = CASES[name] if name in CASES else RUNS[name][0]
    data = rows(case, 16)
    # Accelerate unscales before it clips for float16 alone.
    options = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    ignored = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in data[:8]]
    once = train(_Scaled, case, 2, 4, tmp_path, data=data[8:], **options)
    sequential = {**options, "train_sampling_strategy": "sequential"}
    ours = train(_Scaled, case, 2, 4, tmp_path, data=[*ignored, *data[8:]], **sequential)

    assert ours.trainer.state.global_step == 2
    assert gap(once, ours) <= 1e-6
