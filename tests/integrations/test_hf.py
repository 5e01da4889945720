"""The Trainer with the mixin against the stock Trainer with the large batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from torch import nn
from transformers import Trainer

from superbatch.errors import CoupledSamplesError, InputError, LossSpecError
from superbatch.torch import count_tokens
from tests.integrations.hf_cases import (
    CASES,
    Case,
    ExactTrainer,
    InThrees,
    Run,
    Stream,
    collate,
    copies,
    gap,
    model_of,
    rows,
    train,
)
from tests.integrations.hf_hooks import RANK_CASES, Hooked
from tests.integrations.hf_ranks import ROWS
from tests.torch.two_ranks import found_by_both

pytestmark = pytest.mark.integrations

EXACT = 1e-12
# Least error of the stock Trainer's own accumulation on these batches.
STOCK_IS_OFF = {"masked": 0.05, "seq2seq": 0.05, "tokens": 0.1, "classes": 0.5, "router": 0.1, "clip": 0.5}


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn casts to float32 inside the models into float64, so that rounding hides no error."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def assert_same(big: Run, ours: Run) -> None:
    """Assert that two runs end with the same model and logged the same values."""
    assert gap(big, ours) <= EXACT
    assert ours.trainer.state.global_step == big.trainer.state.global_step
    assert ours.logged("learning_rate") == big.logged("learning_rate")
    assert ours.logged("grad_norm") == pytest.approx(big.logged("grad_norm"), rel=1e-10)
    assert ours.logged("loss") == pytest.approx(big.logged("loss"), rel=1e-6)  # the Trainer adds in float32
    assert ours.events.norms == pytest.approx(big.events.norms, rel=1e-10)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CASES)
def test_the_update_equals_the_large_batch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    options = {"optim": "sgd", "data": rows(case, 12)}
    big = train(Trainer, case, 8, 1, tmp_path, **options)
    stock = train(Trainer, case, 2, 4, tmp_path, **options)
    accumulated = train(ExactTrainer, case, 2, 4, tmp_path, **options)
    cut = train(InThrees, case, 8, 1, tmp_path, **options)

    assert len(big.logged("loss")) == 2  # the second has half the samples
    assert gap(big, stock) >= STOCK_IS_OFF.get(name, 0)
    assert_same(big, accumulated)
    assert_same(big, cut)
    # The Trainer clips.
    assert max(big.events.norms) == pytest.approx(min(0.5, max(big.logged("grad_norm"))), rel=1e-5)


def test_premise_the_lengths_are_unequal() -> None:
    lengths = [len(row["input_ids"]) for row in rows(CASES["causal"], 8)]

    assert len(set(lengths)) > 4


@pytest.mark.usefixtures("float64")
def test_events_evaluation_and_checkpoints_equal_those_of_the_trainer(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    case, options = CASES["masked"], {**options, "optim": "adamw_torch", "learning_rate": 1e-3}
    big = train(Trainer, case, 8, 1, tmp_path / "big", **options)
    stock = train(Trainer, case, 2, 4, tmp_path / "stock", **options)
    ours = train(ExactTrainer, case, 2, 4, tmp_path / "ours", **options)
    resumed = train(
        ExactTrainer, case, 2, 4, tmp_path / "ours", **options, resume=str(tmp_path / "ours" / "checkpoint-2")
    )

    assert_same(big, ours)
    assert ours.events.seen == stock.events.seen
    assert {"substep_end", "evaluate", "save", "optimizer_step"} <= set(ours.events.seen)
    assert ours.logged("eval_loss") == pytest.approx(big.logged("eval_loss"), rel=1e-6)
    assert [entry["epoch"] for entry in ours.logs] == [entry["epoch"] for entry in stock.logs]
    assert all(torch.equal(resumed.parameters[name], value) for name, value in ours.parameters.items())


def test_a_window_of_ignored_labels_changes_no_parameter(tmp_path: Path) -> None:
    case = CASES["causal"]
    data = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows(case, 8)]
    ours = train(ExactTrainer, case, 2, 4, tmp_path, data=data)

    assert ours.trainer.state.global_step == 1
    assert all(torch.equal(value, ours.start[name]) for name, value in ours.parameters.items())


@pytest.mark.usefixtures("float64")
def test_the_tail_of_data_of_unknown_length_makes_an_update(tmp_path: Path) -> None:
    case, options = CASES["classes"], {"max_steps": 6, "optim": "sgd", "include_num_input_tokens_seen": "all"}
    runs = [
        train(kind, case, size, steps, tmp_path, data=Stream(rows(case, 19)), **options)
        for kind, size, steps in ((Trainer, 8, 1), (Trainer, 2, 4), (ExactTrainer, 2, 4))
    ]
    big, stock, ours = runs

    assert big.trainer.state.global_step == 6  # two epochs of 8, 8 and 3 samples
    assert_same(big, ours)
    assert gap(big, stock) > 0.1
    # Only tokens of finished windows count; the stock Trainer reads more data for as many updates.
    tokens = sum(row["input_ids"].numel() for row in rows(case, 19))
    assert 2 * tokens <= ours.trainer.state.num_input_tokens_seen < stock.trainer.state.num_input_tokens_seen


@pytest.mark.usefixtures("float64")
def test_label_smoothing_and_an_own_loss_function(tmp_path: Path) -> None:
    smooth = {"label_smoothing_factor": 0.2, "optim": "sgd"}
    big = train(Trainer, CASES["causal"], 8, 1, tmp_path, **smooth)
    ours = train(ExactTrainer, CASES["causal"], 2, 4, tmp_path, **smooth)
    assert gap(big, ours) <= 1e-6  # the Trainer smooths in float32

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / (num_items_in_batch or (labels != -100).sum())

    own = {"more": {"compute_loss_func": loss_of}, "optim": "sgd"}
    big = train(Trainer, CASES["masked"], 8, 1, tmp_path, **own)
    assert_same(big, train(ExactTrainer, CASES["masked"], 2, 4, tmp_path, **own))


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_with_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install superbatch[hf] peft")

    def model() -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        return peft.get_peft_model(CASES["causal"].model(), config).double()

    case = CASES["causal"]
    big = train(Trainer, case, 8, 1, tmp_path, model=model(), optim="sgd")
    ours = train(ExactTrainer, case, 2, 4, tmp_path, model=model(), optim="sgd")

    assert_same(big, ours)


def test_in_bfloat16(tmp_path: Path) -> None:
    case, options = CASES["classes"], {"bf16": True, "optim": "sgd"}
    options |= {"data": rows(case, 8)}
    kinds = ((Trainer, 8, 1), (ExactTrainer, 2, 4), (Trainer, 2, 4))
    big, ours, stock = (
        train(kind, case, size, steps, tmp_path, model=model_of(case).float(), **options)
        for kind, size, steps in kinds
    )

    assert ours.logged("grad_norm") == pytest.approx(big.logged("grad_norm"), rel=0.05)
    assert stock.logged("grad_norm")[0] > 3 * big.logged("grad_norm")[0]


class _Weighted(ExactTrainer):
    """Trainer with the user's own loss, which divides by class weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weights)
        return (loss, outputs) if return_outputs else loss


class _WeightedRight(_Weighted):
    def weight_of(self, microbatch: Any) -> float:
        return float(torch.tensor([1.0, 3.0, 9.0])[microbatch["labels"]].sum())


@pytest.mark.usefixtures("float64")
def test_a_weight_from_the_user(tmp_path: Path) -> None:
    case = CASES["classes"]
    big = train(_StockWeighted, case, 8, 1, tmp_path, optim="sgd")

    assert_same(big, train(_WeightedRight, case, 2, 4, tmp_path, optim="sgd"))
    assert_same(big, train(_WeightedRight, case, 8, 1, tmp_path, optim="sgd"))


class _StockWeighted(Trainer):
    compute_loss = _Weighted.compute_loss


class _Unshifted(ExactTrainer):
    def weight_of(self, microbatch: Any) -> int:
        return int(count_tokens("input_ids", ignore_index=0)(microbatch))


class _MeanOfMeans(ExactTrainer):
    _checks = False

    def weight_of(self, microbatch: Any) -> int:
        return 1


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["causal", "masked", "tokens"])
def test_mutant_mean_of_means(name: str, tmp_path: Path) -> None:
    big = train(Trainer, CASES[name], 8, 1, tmp_path, optim="sgd")
    mutant = train(_MeanOfMeans, CASES[name], 2, 4, tmp_path, optim="sgd")

    assert gap(big, mutant) > 1e-2


@pytest.mark.parametrize(
    ("kind", "name", "size", "steps"),
    [
        (_Weighted, "classes", 2, 4),
        (_Weighted, "classes", 8, 1),
        (_Unshifted, "masked", 2, 4),
        (_Unshifted, "causal", 2, 4),
    ],
)
def test_a_wrong_weight_is_an_error_before_the_first_step(
    kind: type[Trainer], name: str, size: int, steps: int, tmp_path: Path
) -> None:
    model = model_of(CASES[name])
    before = copies(model)

    with pytest.raises(LossSpecError):
        train(kind, CASES[name], size, steps, tmp_path, model=model)

    assert all(torch.equal(value, before[name]) for name, value in copies(model).items())


class _Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 3)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
        logits = self.embedding(input_ids).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_an_unknown_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"_Headless has no loss_type of transformers\. Define `weight_of"):
        train(ExactTrainer, CASES["classes"], 2, 4, tmp_path, model=_Headless())


def test_an_own_loss_needs_a_weight_if_no_check_is_possible(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"micro-batches of one sample do not reveal.*Define `weight_of"):
        train(_Weighted, CASES["classes"], 1, 8, tmp_path)


class _Forgetful(Trainer):
    def training_step(self, *given: Any) -> Any:
        return super().training_step(*given)


class _Mixed(ExactTrainer, _Forgetful):
    pass


def test_a_training_step_of_another_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"_Forgetful\.training_step would not be called"):
        train(_Mixed, CASES["classes"], 2, 4, tmp_path)


@pytest.mark.parametrize(
    ("owner", "name", "value", "text"),
    [
        ("accelerator", "distributed_type", "FSDP", r"runs with FSDP, .* DistributedDataParallel"),
        (
            "accelerator",
            "distributed_type",
            "DEEPSPEED",
            r"runs with DEEPSPEED, .* without --fsdp or --deepsp",
        ),
        (
            "arguments",
            "n_gpu",
            2,
            r"DataParallel on 2 GPUs, which .* Start it with torchrun, or set CUDA_VISIBLE",
        ),
    ],
)
def test_other_kinds_of_parallelism_are_refused(
    owner: str, name: str, value: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator, DistributedType
    from transformers import TrainingArguments

    take = ExactTrainer.get_batch_samples

    def several(self: Any, *given: Any) -> Any:  # patched here, because its preparation needs several GPUs
        kind = Accelerator if owner == "accelerator" else TrainingArguments
        monkeypatch.setattr(kind, name, DistributedType[value] if isinstance(value, str) else value)
        return take(self, *given)

    monkeypatch.setattr(ExactTrainer, "get_batch_samples", several)
    with pytest.raises(InputError, match=text):
        train(ExactTrainer, CASES["classes"], 2, 4, tmp_path)


def test_coupled_samples_of_unequal_lengths_are_refused(tmp_path: Path) -> None:
    ragged = Case(CASES["router"].model, CASES["router"].row)

    with pytest.raises(InputError, match=r"different shapes.*Set gradient_accumulation_steps=1"):
        train(ExactTrainer, ragged, 2, 4, tmp_path)


class _Separate(ExactTrainer):
    coupled = False


@pytest.mark.usefixtures("float64")
def test_coupled_samples_that_are_declared_separate_are_an_error(tmp_path: Path) -> None:
    with pytest.raises((CoupledSamplesError, LossSpecError)):
        train(_Separate, CASES["router"], 4, 2, tmp_path)


COUPLED = ("router", "clip")  # coupled within each rank, as in the stock Trainer


@pytest.mark.usefixtures("float64")
def test_two_ranks_give_the_update_of_the_large_batch(tmp_path: Path) -> None:
    found = found_by_both("tests.integrations.hf_ranks", tmp_path, warnings="default", patience=280)

    def alone(name: str, size: int) -> dict[str, Any]:
        case, given = RANK_CASES[name]
        kind = Hooked if name == "hooks" else Trainer
        run = train(kind, case, size, 1, tmp_path, optim="sgd", data=rows(case, ROWS), **given)
        return {"parameters": run.parameters, "loss": run.logged("loss"), "norm": run.logged("grad_norm")}

    assert found[0].keys() == RANK_CASES.keys()
    for name in RANK_CASES:
        start = copies(model_of(RANK_CASES[name][0]))
        right = found[0][name]["big"] if name in COUPLED else alone(name, 8)
        tail = alone(name, 20) if "tail" in found[0][name] else None
        for runs in (rank[name] for rank in found):
            for way in runs.keys() - {"big", "stock"}:
                wanted = tail if way == "tail" else right
                assert _gap(wanted, runs[way], start) <= EXACT, (name, way)
                assert runs[way]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
                assert runs[way]["norm"] == pytest.approx(wanted["norm"], rel=1e-10)
            if "stock" in runs:  # the other losses divide by the number of items in the stock Trainer too
                assert _gap(right, runs["stock"], start) > 0.05, name
    for rank in found:
        runs = rank["hooks"]
        assert runs["accumulated"]["events"] == runs["stock"]["events"]
        # The first window is also checked.
        assert runs["accumulated"]["calls"][-5:] == ["forward", "gradient"] * 2 + ["step"]


def _gap(right: Any, run: Any, start: Any) -> float:
    right, found = right["parameters"], run["parameters"]
    moved = max(float((right[name] - start[name]).abs().max()) for name in start)
    return max(float((found[name] - right[name]).abs().max()) for name in start) / moved


def test_an_empty_batch_is_collated() -> None:
    assert collate(rows(CASES["clip"], 2))["return_loss"] is True
