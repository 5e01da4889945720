"""ExactAccumulation for Lightning: errors, unusual hooks and batches, failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning.pytorch as lightning
from lightning.pytorch.plugins.precision import MixedPrecision

from superbatch.errors import InputError, LossSpecError
from superbatch.integrations import versions
from superbatch.integrations.lightning import ExactAccumulation
from tests.integrations.lightning_models import (
    MARKS,
    SAMPLES,
    ByTokens,
    Exact,
    ExactHalved,
    Halved,
    Tokens,
    Unchecked,
    count,
    largest_difference,
    loader,
    samples,
    train,
)

pytestmark = MARKS


def train_by_hand(module: Tokens, batches: Sequence[tuple[int, int]], *, schedule: bool = False) -> None:
    """Make one update for each slice of samples."""
    rows = torch.utils.data.TensorDataset(*samples())
    made = module.configure_optimizers()
    optimizer = made["optimizer"]
    for start, stop in batches:
        optimizer.zero_grad()
        module.loss(rows[start:stop]).backward()
        optimizer.step()
        if schedule:
            made["lr_scheduler"]["scheduler"].step()


def test_accumulation_may_grow_and_an_epoch_may_end_inside_a_window() -> None:
    class Growing(lightning.Callback):
        """Two batches of 4 per update in the first epoch, then four; or one batch of that size."""

        def __init__(self, accumulates: bool) -> None:
            self.accumulates = accumulates

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if self.accumulates:
                trainer.accumulate_grad_batches = 2 if trainer.current_epoch == 0 else 4

    class Constant(Tokens):
        def configure_optimizers(self) -> Any:  # Lightning's schedule counts an unfinished update
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Leaves(ByTokens, Constant):
        """Callback that ends the first epoch at its sixth batch, inside the third update."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.trainer.current_epoch == 0 and batch_idx == 5 else None

    exact, by_hand = Leaves(), Tokens()
    train(exact, 4, 2, callbacks=[Growing(accumulates=True)])
    train_by_hand(by_hand, ((0, 8), (8, 16), (0, 16), (16, 32), (32, 44)))
    assert exact.trainer.global_step == 5
    assert largest_difference(exact, by_hand) <= 1e-12


def test_lbfgs_reevaluates_the_loss_of_the_whole_batch() -> None:
    class LBFGS:
        optimizer, lr = torch.optim.LBFGS, 0.3
        options = {"max_iter": 3}

    class TokensLBFGS(LBFGS, Tokens): ...

    class ExactLBFGS(LBFGS, Exact): ...

    large, exact = TokensLBFGS(), ExactLBFGS()
    train(large, SAMPLES, 1)
    train(exact, 4, 11)
    assert len(large.norms) == len(exact.norms) > 4
    assert largest_difference(large, Tokens()) > 0.1
    assert largest_difference(large, exact) <= 1e-10  # its secant steps amplify rounding


def test_hooks_of_the_user_are_called() -> None:
    class Hooked(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[str] = []

        def backward(self, loss: Any, **kwargs: Any) -> None:
            self.called.append("backward")
            (2 * loss).backward(**kwargs)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.called.append("step")
            super().optimizer_step(*args, **kwargs)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            self.called.append("clip")
            super().configure_gradient_clipping(*args, **kwargs)

        def on_fit_start(self) -> None:
            self.called.append("start")

    class ExactHooked(ByTokens, Hooked): ...

    large, exact = Hooked(), ExactHooked()
    train(large, 16, 1, max_steps=1, gradient_clip_val=9.0)
    train(exact, 4, 4, max_steps=1, gradient_clip_val=9.0)
    assert large.called == ["start", "step", "backward", "clip"]
    assert exact.called == ["start", "step", "backward", "backward", "backward", "backward", "clip"]
    assert largest_difference(large, exact) <= 1e-12


def test_each_batch_keeps_its_index_which_a_step_may_omit() -> None:
    class Numbered(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.numbers: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.numbers.append(batch_idx)
            return self.loss(batch)

    class Bare(Tokens):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override] - Lightning looks at the names
            return self.loss(batch)

    options: dict[str, Any] = {
        "weight_of": lambda self, batch: count(batch),
        "gradient_options": lambda self: {"check": False},
    }
    numbered = type("ExactNumbered", (ExactAccumulation, Numbered), options)()
    bare = type("ExactBare", (ExactAccumulation, Bare), options)()
    train(numbered, 4, 4, max_epochs=1)
    train(bare, 4, 4, max_epochs=1)
    assert numbered.numbers == list(range(11))
    assert largest_difference(bare, numbered) == 0


def test_after_a_failed_fit_the_module_is_ordinary_and_can_be_copied() -> None:
    class Fails(Exact):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert deepcopy(self)._windows is None
            raise RuntimeError("as a test")

    module = Fails()
    with pytest.raises(RuntimeError, match="as a test"):
        train(module, 4, 4)
    module.zero_grad()
    module.backward(module.loss(next(iter(loader(4)))))
    assert module.net[2].weight.grad is not None


def test_a_batch_of_weight_zero_is_left_out_and_one_without_a_loss_is_an_error() -> None:
    class WithoutFirst(Tokens):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            return super().loss((x[count_of(x) :], y[count_of(x) :]))

    def count_of(x: Any) -> int:
        return 4 if len(x) == 16 and torch.equal(x[0], samples()[0][0]) else 0

    class SkipsFirst(Exact):
        def weight_of(self, batch: Any) -> int:
            return 0 if torch.equal(batch[0][0], samples()[0][0]) else count(batch)

        def gradient_options(self) -> dict[str, Any]:
            return {"check": False}

    large, exact = WithoutFirst(), SkipsFirst()
    train(large, 16, 1, max_steps=1)
    train(exact, 4, 4, max_steps=1)
    assert largest_difference(large, exact) <= 1e-12

    class ReturnsNone(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(
        InputError, match=r"training_step returned NoneType, not a tensor\. Return the loss of the batch"
    ):
        train(type("ExactNone", (ExactAccumulation, ReturnsNone), {})(), 4, 4)


def test_a_compiled_module_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"was passed to torch\.compile, which would compile the accumulation"
    ):
        train(torch.compile(Exact(), backend="eager"), 4, 4)  # type: ignore[arg-type] - it is no module


def test_a_wrong_weight_is_an_error_before_the_first_step() -> None:
    class BySamples(ExactAccumulation, Tokens): ...

    module = BySamples()
    with pytest.raises(LossSpecError, match="weight"):
        train(module, 4, 4)
    assert largest_difference(module, Tokens()) == 0
    assert module.norms == []


def test_an_unchecked_wrong_weight_gives_another_update() -> None:
    large, wrong = Tokens(), type("BySamples", (Unchecked, Tokens), {})()
    train(large, 16, 1)
    train(wrong, 4, 4)
    assert largest_difference(large, wrong) > 0.01


def test_a_training_step_before_the_mixin_is_refused_at_class_definition() -> None:
    with pytest.raises(InputError, match=r"Wrong overrides ExactAccumulation"):

        class Wrong(ExactAccumulation):
            def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    with pytest.raises(InputError, match=r"class Exact\(ExactAccumulation, YourModule\)"):
        type("Reversed", (Tokens, ExactAccumulation), {})


def test_unsupported_options_are_refused_before_the_first_step() -> None:
    module = Exact()
    module.automatic_optimization = False
    with pytest.raises(
        InputError, match=r"automatic_optimization is False\. In manual optimization, call superbatch"
    ):
        train(module, 4, 1)
    with pytest.raises(
        InputError, match="microbatch_size=2 splits a batch, but accumulate_grad_batches=4 joins batches"
    ):
        train(type("Both", (Exact,), {"gradient_options": lambda self: {"microbatch_size": 2}})(), 4, 4)

    class FromIterator(Tokens):
        def training_step(self, dataloader_iter: Any) -> Any: ...

    with pytest.raises(InputError, match="training_step takes dataloader_iter"):
        train(type("ExactIterator", (ExactAccumulation, FromIterator), {})(), 4, 4)


def test_a_sharding_strategy_is_refused() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    module = Exact()
    trainer = lightning.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(InputError, match="FSDPStrategy is not supported by superbatch"):
        module.on_fit_start()


def test_an_untested_version_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.TESTED, "lightning", ("2.4", "2.5"))
    with pytest.warns(UserWarning, match="was tested with lightning 2.4 to 2.5"):
        train(Exact(), 4, 4, max_steps=1)


def test_a_module_is_an_ordinary_one_outside_of_fit() -> None:
    module = Exact()
    loss = module.loss(next(iter(loader(4))))
    module.backward(loss)
    assert module.net[2].weight.grad is not None
    train(module, 4, 4, max_steps=1)
    assert module._windows is None


def test_a_hook_after_the_backward_finds_gradients_after_each_batch() -> None:
    whole, large, exact = Tokens(), Halved(), ExactHalved()
    for module, size, batches in ((whole, 16, 1), (large, 16, 1), (exact, 4, 4)):
        train(module, size, batches)
    assert largest_difference(large, whole) > 0.01
    assert largest_difference(large, exact) <= 1e-12


class _Untouched(Exact):
    """Module that records its parameters before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before.append(self.net[2].weight.detach().clone())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first update is skipped
def test_an_update_without_weight_changes_nothing(scaled: bool) -> None:
    module, options = _Untouched().float(), {}
    if scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    trainer = train(module, 4, 4, max_epochs=1, ignored=slice(0, 16), **options)

    assert trainer.global_step == 3
    assert torch.equal(module.before[0], module.before[1])
    assert not torch.equal(module.before[1], module.before[2])
    assert math.isfinite(float(trainer.callback_metrics["loss_epoch"]))


def test_a_batch_of_weight_zero_among_others_does_not_count() -> None:
    large, exact = Tokens(), Exact()
    trainer = train(large, 16, 1, ignored=slice(4, 8))
    ours = train(exact, 4, 4, ignored=slice(4, 8))
    assert largest_difference(large, exact) <= 1e-12
    assert float(ours.callback_metrics["loss_epoch"]) == pytest.approx(
        float(trainer.callback_metrics["loss_epoch"]), rel=1e-12
    )


def test_drop_last_keeps_the_short_window_as_in_lightning() -> None:
    def fit(module: Tokens, size: int, batches: int, rows: int) -> Any:
        given = torch.utils.data.TensorDataset(*(each[:rows] for each in samples()))
        loader = torch.utils.data.DataLoader(given, batch_size=size, drop_last=True)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
        options |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(accumulate_grad_batches=batches, **options)
        trainer.fit(module, loader, loader)
        return trainer.global_step

    stock, exact, large = Tokens(), Exact(), Tokens()
    # 40 of 43 samples are in batches of 4; the last two batches make the third update.
    assert fit(stock, 4, 4, 43) == fit(exact, 4, 4, 43) == 3
    train_by_hand(large, ((0, 16), (16, 32), (32, 40)), schedule=True)
    assert largest_difference(large, exact) <= 1e-12
