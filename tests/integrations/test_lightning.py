"""Lightning's Trainer with ExactAccumulation, against its large batch and its own accumulation."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from superbatch.errors import CoupledSamplesError
from superbatch.integrations.lightning import ExactAccumulation
from tests.integrations.lightning_models import (
    MARKS,
    ByTokens,
    Exact,
    Halved,
    Rows,
    Tokens,
    count,
    largest_difference,
    loader,
    train,
)
from tests.integrations.lightning_ranks import IGNORED
from tests.torch.two_ranks import found_by_both

pytestmark = MARKS


class AdamW:
    optimizer, lr = torch.optim.AdamW, 0.05


class ExactAdamW(AdamW, Exact): ...


class TokensAdamW(AdamW, Tokens): ...


PAIRS = {"SGD": (Tokens, Exact), "AdamW": (TokensAdamW, ExactAdamW)}


@pytest.mark.parametrize("optimizer", PAIRS)
@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_the_update_equals_the_large_batch_unlike_lightnings_own(optimizer: str, clip: str | None) -> None:
    host, ours = PAIRS[optimizer]
    options: dict[str, Any] = {}
    if clip:
        options = {"gradient_clip_val": 0.2 if clip == "norm" else 0.03, "gradient_clip_algorithm": clip}
    large, stock, exact = host(), host(), ours()
    trainers = [train(large, 16, 1, **options), train(stock, 4, 4, **options), train(exact, 4, 4, **options)]
    assert largest_difference(large, host()) > 0.05  # it learns
    assert largest_difference(large, stock) > 0.01
    assert largest_difference(large, exact) <= 1e-12
    assert [each.global_step for each in trainers] == [6, 6, 6]
    assert len(large.norms) == len(exact.norms) == 6
    assert exact.norms == pytest.approx(large.norms, rel=1e-12)
    assert stock.norms != pytest.approx(large.norms, rel=1e-2)


def test_each_update_logs_the_values_of_the_large_batch_once() -> None:
    large, stock, exact = Tokens(), Tokens(), Exact()
    rows: list[list[Any]] = []
    shown: list[dict[str, Any]] = []
    for module, size, batches in ((large, 16, 1), (stock, 4, 4), (exact, 4, 4)):
        trainer = train(module, size, batches, enable_progress_bar=True)
        assert isinstance(trainer.logger, Rows)
        rows.append(trainer.logger.rows)
        metrics = trainer.callback_metrics
        shown.append(trainer.progress_bar_metrics)
        assert metrics["loss_epoch"] == pytest.approx(rows[-1][-1][1]["loss_epoch"])
    assert [(step, set(row)) for step, row in rows[2]] == [(step, set(row)) for step, row in rows[0]]
    assert len([row for _, row in rows[0] if "loss_step" in row]) == 6
    for (_, ours), (_, wanted) in zip(rows[2], rows[0], strict=True):
        assert ours == pytest.approx(wanted, rel=1e-12)
    assert any(a != pytest.approx(b, rel=1e-2) for (_, a), (_, b) in zip(rows[1], rows[0], strict=True))
    assert shown[2] == pytest.approx(shown[0], rel=1e-6)
    assert "loss_step" in shown[0]
    losses = [loss for loss in exact.outputs if not math.isnan(loss)]
    assert losses == pytest.approx(large.outputs, rel=1e-12)
    assert len(losses) == 6
    assert len(exact.outputs) == 22  # NaN for batches before the last of a window


def test_callback_hooks_run_as_in_lightnings_own_accumulation(tmp_path: Path) -> None:
    found: list[list[str]] = []
    for module in (Tokens(), Exact()):
        events: list[str] = []
        checkpoint = ModelCheckpoint(tmp_path / type(module).__name__, every_n_train_steps=2, save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [_Noting(events), checkpoint]}
        train(module, 4, 4, val_check_interval=5, **options)
        found.append(events)
        saved = {path.name for path in (tmp_path / type(module).__name__).iterdir()}
        assert {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=1-step=6.ckpt"} == saved
    stock, exact = found
    assert stock == exact
    assert len([event for event in exact if event.startswith("on_before_optimizer_step")]) == 6
    assert len([event for event in exact if event.startswith("on_validation_end")]) == 4


class _Noting(lightning.Callback):
    """Callback that records each hook with the step and the learning rate."""

    def __init__(self, events: list[str]) -> None:
        for name in dir(lightning.Callback):
            if name.startswith("on_") and not name.endswith("checkpoint"):
                setattr(self, name, self._noting(name, events))

    def _noting(self, name: str, events: list[str]) -> Any:
        def note(trainer: Any, *_: Any) -> None:
            rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
            events.append(f"{name} {trainer.global_step} {rates}")

        return note


def test_training_resumes_from_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    class Momentum:
        options = {"momentum": 0.9}

    class ExactMomentum(Momentum, Exact): ...

    without, first, second = ExactMomentum(), ExactMomentum(), ExactMomentum()
    train(without, 4, 4)
    train(first, 4, 4, max_epochs=1).save_checkpoint(tmp_path / "after_one.ckpt")
    trainer = train(second, 4, 4, ckpt_path=tmp_path / "after_one.ckpt")
    assert largest_difference(first, without) > 0.01
    assert largest_difference(second, without) == 0
    assert trainer.global_step == 6


@pytest.mark.parametrize("steps", [1, 4])
def test_max_steps_counts_updates(steps: int) -> None:
    large, exact = Tokens(), Exact()
    train(large, 16, 1, max_epochs=-1, max_steps=steps)
    trainer = train(exact, 4, 4, max_epochs=-1, max_steps=steps)
    assert trainer.global_step == steps
    assert largest_difference(large, exact) <= 1e-12


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_is_closer_to_the_large_batch_than_lightnings_own(precision: str) -> None:
    modules = [kind().float() for kind in (Tokens, Tokens, Exact)]
    for module, (size, batches) in zip(modules, ((16, 1), (4, 4), (4, 4)), strict=True):
        train(module, size, batches, precision=precision)
    large, stock, exact = modules
    assert large.net[0].weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert largest_difference(large, stock) > 0.02
    assert largest_difference(large, exact) < 5e-3


def test_float64_by_lightning_is_exact() -> None:
    large, exact = Tokens().float(), Exact().float()
    train(large, 16, 1, precision="64-true")
    train(exact, 4, 4, precision="64-true")
    assert exact.net[0].weight.dtype == torch.float64
    assert largest_difference(large, exact) <= 1e-12


def _in_float16(kind: type[Tokens], size: int, batches: int, scale: float) -> tuple[Tokens, Any]:
    module, scaler = kind().float(), torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
    train(module, size, batches, max_epochs=4, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    return module, scaler


def test_the_scaler_of_lightning_scales_and_unscales() -> None:
    (large, before), (exact, after) = _in_float16(Tokens, 16, 1, 2.0**9), _in_float16(Exact, 4, 4, 2.0**9)
    assert before.get_scale() == after.get_scale() == 2.0**12  # it grew three times in twelve updates
    assert exact.norms == pytest.approx(large.norms, rel=0.02)
    assert largest_difference(large, Tokens().float()) > 0.05
    assert largest_difference(large, exact) < 2e-3


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first update is skipped
def test_the_scaler_of_lightning_skips_an_update_that_overflows() -> None:
    module, scaler = _in_float16(Exact, 4, 4, 2.0**40)
    assert not any(map(math.isfinite, module.norms))
    assert scaler.get_scale() == 2.0 ** (40 - 12)
    assert largest_difference(module, Tokens().float()) == 0


def test_sums_and_torchmetrics_count_each_sample_once() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen(float(len(batch[0])))
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            self.log("longest", float(count(batch)), reduce_fx="max", on_epoch=True, on_step=False)
            self.log("tokens", float(count(batch)), reduce_fx="sum", on_epoch=True, on_step=False)
            self.log_dict({"per_sample": self.loss(batch).detach()}, batch_size=len(batch[0]))
            return {"loss": self.loss(batch), "first": batch[1][0, 0]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not math.isnan(outputs["loss"]):
                assert outputs["first"] == batch[1][0, 0]

    class ExactMeasured(ByTokens, Measured): ...

    metrics: list[dict[str, Any]] = []
    for module, batches in ((Measured(), 4), (ExactMeasured(), 4)):
        metrics.append(train(module, 4, batches, max_epochs=1).callback_metrics)
    tokens = sum(count(batch) for batch in loader(4))
    assert metrics[1]["seen"] == metrics[0]["seen"] == 44
    assert metrics[1]["tokens"] == metrics[0]["tokens"] == tokens
    assert metrics[1]["longest"] == metrics[0]["longest"] == max(count(batch) for batch in loader(4))


def test_a_batch_of_the_loader_can_be_split() -> None:
    class Cut(Exact):
        sizes: list[int] = []

        def gradient_options(self) -> dict[str, Any]:
            return {"microbatch_size": 5}

        def loss(self, batch: Any) -> Any:
            self.sizes.append(len(batch[0]))
            return super().loss(batch)

    large, exact = Tokens(), Cut()
    trainer = train(large, 16, 1)
    ours = train(exact, 16, 1)
    assert Cut.sizes[-5:] == [4, 4, 4, 4, 44] or Cut.sizes[-4:] == [4, 4, 4, 44]  # the last is validation
    assert largest_difference(large, exact) <= 1e-12
    assert float(ours.callback_metrics["loss_epoch"]) == pytest.approx(
        float(trainer.callback_metrics["loss_epoch"]), rel=1e-12
    )


class _Norm(Tokens):
    """Module with samples coupled by BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def loss(self, batch: Any) -> Any:
        x, _ = batch
        logits = self.net[2](self.norm(self.net[0](x).mean(1)))
        return nn.functional.cross_entropy(logits, x[:, 0])


def test_coupled_samples_give_the_update_of_the_large_batch() -> None:
    class ExactNorm(ExactAccumulation, _Norm):
        coupled = True

    large, stock, exact = _Norm(), _Norm(), ExactNorm()
    trainer = train(large, 16, 1)
    train(stock, 4, 4)
    ours = train(exact, 4, 4)
    assert largest_difference(large, stock) > 0.01
    assert largest_difference(large, exact) <= 1e-12
    assert torch.allclose(large.norm.running_mean, exact.norm.running_mean, rtol=1e-12)
    assert float(ours.callback_metrics["loss_epoch"]) == pytest.approx(
        float(trainer.callback_metrics["loss_epoch"]), rel=1e-12
    )


def test_undeclared_coupled_samples_are_an_error() -> None:
    class Contrastive(Tokens):
        def loss(self, batch: Any) -> Any:
            rows = self.net[0](batch[0]).mean(1)
            return nn.functional.cross_entropy(5 * rows @ rows.T, torch.arange(len(rows)))

    class Undeclared(ExactAccumulation, Contrastive):
        pass

    with pytest.raises(CoupledSamplesError, match=r"In Lightning, write `coupled = True` in the class"):
        train(Undeclared(), 4, 4)


def test_running_out_of_memory_changes_neither_update_nor_log() -> None:
    large = Tokens()
    trainer = train(large, 16, 1)

    class Failing(Tokens):
        failures = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 3:
                Failing.failures += 1
                raise torch.OutOfMemoryError("out of memory, as a test")
            return loss

    class ExactFailing(ByTokens, Failing):
        def gradient_options(self) -> dict[str, Any]:
            return {"check": False}

    exact = ExactFailing()
    with pytest.warns(UserWarning, match="memory ran out in micro-batch"):
        ours = train(exact, 4, 4)
    assert Failing.failures > 0
    assert largest_difference(large, exact) <= 1e-12
    assert float(ours.callback_metrics["loss_epoch"]) == pytest.approx(
        float(trainer.callback_metrics["loss_epoch"]), rel=1e-12
    )


def test_two_ranks_give_the_update_of_the_joint_batch(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(probe.getsockname()[1]))
    found = found_by_both("tests.integrations.lightning_ranks", tmp_path, warnings="default", patience=280)
    # With ignored labels, one rank has no label in the first window.
    cases = {"exact": (Tokens, None), "idle": (Tokens, IGNORED), "hooks": (Halved, None)}
    for name, (kind, ignored) in cases.items():
        alone = kind()
        trainer = train(alone, 16, 1, ignored=ignored)
        for rank in found:
            _assert_same(rank[name], alone, trainer)
        assert isinstance(trainer.logger, Rows)
        for (_, ours), (_, theirs) in zip(found[0][name]["rows"], trainer.logger.rows, strict=True):
            if "val" not in ours:  # validation is per rank
                assert ours == pytest.approx(theirs, rel=1e-12)
    alone = Tokens()
    train(alone, 16, 1)
    for rank in found:
        for one in ("large", "stock"):  # Lightning averages ranks of unequal token counts
            assert _largest(rank[one], alone) > 0.01


def _largest(run: dict[str, Any], alone: Tokens) -> float:
    wanted = dict(alone.named_parameters())
    return max(float((each - wanted[name]).detach().abs().max()) for name, each in run["parameters"].items())


def _assert_same(run: dict[str, Any], alone: Tokens, trainer: Any) -> None:
    assert run["strategy"] == "DDPStrategy"
    assert run["steps"] == trainer.global_step
    assert _largest(run, alone) <= 1e-12
    assert run["norms"] == pytest.approx(alone.norms, rel=1e-12)
    losses = [loss for loss in run["outputs"] if not math.isnan(loss)]
    assert losses == pytest.approx(alone.outputs, rel=1e-12)
