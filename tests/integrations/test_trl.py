"""Trainers of TRL with the mixin against the stock trainers with the large batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install superbatch[trl]")
pytest.importorskip("datasets", reason="datasets is not installed: pip install superbatch[trl]")

from torch import Tensor
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

from superbatch.errors import InputError
from superbatch.integrations import hf
from superbatch.integrations.trl import Exact
from tests.integrations.arguments import arguments
from tests.integrations.trl_cases import HOSTS, ExactDPO, ExactSFT, data, model, tokenizer, train
from tests.torch.two_ranks import found_by_both

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # from TRL's use of transformers
]

# TRL computes the heads of sft and dpo in float32.
EXACT = dict.fromkeys(HOSTS, 1e-12) | dict.fromkeys(("sft", "gpt2", "assistant", "dpo"), 1e-6)
STOCK_IS_OFF = {"router": 0.1, "dpo": 0.05, "reward": 0.1, "margin": 0.1}


def gap(name: str, right: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Return the largest difference of a parameter, relative to the largest change of any parameter."""
    start = {each: parameter.detach() for each, parameter in model(name).named_parameters()}
    moved = max(float((right[each] - start[each]).abs().max()) for each in right)
    assert moved > 1e-3, "nothing was trained"
    return max(float((found[each] - right[each]).abs().max()) for each in right) / moved


def assert_logs(right: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert len(right) == len(found) == 3
    for wanted, got in zip(right, found, strict=True):
        assert wanted.keys() == got.keys()
        for key in wanted.keys() - {"epoch"}:
            assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-3), key


@pytest.mark.parametrize("name", HOSTS)
def test_update_and_metrics_equal_the_large_batch(name: str, tmp_path: Path) -> None:
    stock, exact, _ = HOSTS[name]
    in_threes = type("InThrees", (exact,), {"microbatch_size": 3})
    right, logs = train(stock, name, 8, 1, tmp_path)

    for kind, size, steps in ((exact, 2, 4), (in_threes, 8, 1), (exact, 8, 1)):
        found, found_logs = train(kind, name, size, steps, tmp_path)

        assert gap(name, right, found) <= EXACT[name]
        assert_logs(logs, found_logs)


@pytest.mark.parametrize("name", STOCK_IS_OFF)
def test_premise_the_stock_accumulation_is_wrong(name: str, tmp_path: Path) -> None:
    stock = HOSTS[name][0]
    right, logs = train(stock, name, 8, 1, tmp_path)
    found, stock_logs = train(stock, name, 2, 4, tmp_path)

    assert gap(name, right, found) > STOCK_IS_OFF[name]
    with pytest.raises(AssertionError):
        assert_logs(logs, stock_logs)


def test_premise_the_metrics_of_the_stock_accumulation_are_wrong(tmp_path: Path) -> None:
    _, logs = train(HOSTS["sft"][0], "sft", 8, 1, tmp_path)
    _, stock_logs = train(HOSTS["sft"][0], "sft", 2, 4, tmp_path)

    with pytest.raises(AssertionError, match="mean_token_accuracy"):
        assert_logs(logs, stock_logs)


def test_two_ranks(tmp_path: Path) -> None:
    found = found_by_both("tests.integrations.trl_ranks", tmp_path, warnings="default")

    for name in found[0]:
        right, logs = train(HOSTS[name][0], name, 8, 1, tmp_path, rows=16)
        for rank in found:
            parameters, rank_logs = rank[name]
            assert gap(name, right, parameters) <= EXACT[name]
            for wanted, got in zip(logs, rank_logs, strict=True):
                for key in wanted.keys() - {"epoch"}:
                    assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-3), key


def test_evaluation_equals_that_of_the_stock_trainer(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1}
    runs = [
        train(kind, "dpo", size, steps, tmp_path, evaluation=True, **options)[1]
        for kind, size, steps in ((HOSTS["dpo"][0], 8, 1), (ExactDPO, 2, 4))
    ]

    assert_logs(*runs)


def test_the_tail_of_data_of_unknown_length(tmp_path: Path) -> None:
    options = {"stream": True, "max_steps": 3}
    right, logs = train(HOSTS["reward"][0], "reward", 8, 1, tmp_path, **options)
    found, found_logs = train(HOSTS["reward"][1], "reward", 2, 4, tmp_path, **options)

    assert gap("reward", right, found) <= EXACT["reward"]
    assert_logs(logs, found_logs)


@pytest.mark.filterwarnings("ignore:.*[Pp]adding-free")
@pytest.mark.parametrize(("size", "steps"), [(2, 4), (8, 1), (1, 8)])
def test_padding_free_rows_give_the_update_of_the_large_batch(size: int, steps: int, tmp_path: Path) -> None:
    free = {"padding_free": True, "max_length": None}
    right, logs = train(HOSTS["sft"][0], "sft", 8, 1, tmp_path)
    found, found_logs = train(ExactSFT, "sft", size, steps, tmp_path, **free)

    assert gap("sft", right, found) <= EXACT["sft"]
    assert_logs(logs, found_logs)


def test_mutant_mean_of_means_without_padding(tmp_path: Path) -> None:
    mutant = type("Mutant", (ExactSFT,), {"weight_of": lambda self, microbatch: 1})
    right, _ = train(HOSTS["sft"][0], "sft", 8, 1, tmp_path)
    found, _ = train(mutant, "sft", 2, 4, tmp_path, padding_free=True, max_length=None)

    assert gap("sft", right, found) > 1e-2


@pytest.mark.parametrize("loss", ["aot", "sft"])
def test_losses_other_than_means_over_pairs_are_refused(loss: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"loss_type='{loss}' is not a mean over pairs.*`coupled = True`"):
        train(ExactDPO, "dpo", 2, 4, tmp_path, loss_type=[loss])


class _Coupled(ExactDPO):
    coupled = True


def test_sorted_pairs_as_one_batch(tmp_path: Path) -> None:
    right, logs = train(HOSTS["dpo"][0], "dpo", 8, 1, tmp_path, loss_type=["aot"])
    stock, _ = train(HOSTS["dpo"][0], "dpo", 2, 4, tmp_path, loss_type=["aot"])
    found, found_logs = train(_Coupled, "dpo", 8, 1, tmp_path, loss_type=["aot"])

    assert gap("dpo", right, found) <= EXACT["dpo"]
    assert gap("dpo", right, stock) > 0.05
    assert_logs(logs, found_logs)


class _ExactGRPO(Exact, GRPOTrainer):
    pass


def test_grpo_is_refused(tmp_path: Path) -> None:
    config = GRPOConfig(
        str(tmp_path), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, num_generations=2
    )
    trainer = _ExactGRPO(
        model("sft").float(),
        reward_funcs=lambda completions, **given: [0.0 for _ in completions],
        args=config,
        train_dataset=data("dpo", 8).select_columns(["prompt"]),
        processing_class=tokenizer(),
    )

    with pytest.raises(InputError, match=r"does not support GRPOTrainer\. Use SFTTrainer, DPOTrainer or"):
        trainer.train()


class _ExactKTO(Exact, KTOTrainer):
    pass


def test_kto_is_refused(tmp_path: Path) -> None:
    """Its loss compares each answer with a mean over answers to other prompts in the micro-batch."""
    config = KTOConfig(**arguments(tmp_path, 2, 2, bf16=False, activation_checkpointing=False))
    rows = data("dpo", 8).rename_column("chosen", "completion").remove_columns("rejected")
    trainer = _ExactKTO(
        model("sft").float(),
        model("sft").float(),
        args=config,
        train_dataset=rows.add_column("label", [True, False] * 4),
        processing_class=tokenizer(),
    )

    with pytest.raises(InputError, match=r"does not support KTOTrainer\. Use SFTTrainer, DPOTrainer or"):
        trainer.train()


class _Own(ExactSFT):
    def compute_loss(self, *given: Any, **others: Any) -> Any:
        return 2 * super().compute_loss(*given, **others)


_OfAnotherMixin = type("_OfAnotherMixin", (hf.Exact, HOSTS["sft"][0]), {})


def test_unknown_trainers_and_losses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"_Own\.compute_loss replaces TRL's.*Define `weight_of"):
        train(_Own, "sft", 2, 4, tmp_path)
    with pytest.raises(InputError, match=r"SFTTrainer\.training_step would .* superbatch\.integrations\.trl"):
        train(_OfAnotherMixin, "sft", 2, 4, tmp_path)
    assert issubclass(Exact, Trainer)
    assert torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:.*compute_loss_func.* is deprecated")
def test_an_own_loss_function_needs_a_weight(tmp_path: Path) -> None:
    class WithFunction(ExactSFT):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, compute_loss_func=lambda *_: torch.zeros(()), **options)

    with pytest.raises(InputError, match=r"compute_loss_func replaces TRL's.*Define `weight_of"):
        train(WithFunction, "sft", 2, 2, tmp_path, rows=4)
