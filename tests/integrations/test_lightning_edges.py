"""ExactAccumulation of Lightning: what it refuses, hooks and batches out of the ordinary, failures."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning.pytorch as lightning

from superbatch.errors import InputError, LossSpecError
from superbatch.integrations import versions
from superbatch.integrations.lightning import ExactAccumulation
from tests.integrations.lightning_models import (
    SAMPLES,
    Exact,
    Tokens,
    apart,
    count,
    loader,
    samples,
    train,
)

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Lightning was unable to|.*litlogger|.*isinstance.treespec"),
]


def test_accumulation_may_grow_and_an_epoch_may_be_left_in_the_middle_of_an_update() -> None:
    class Growing(lightning.Callback):
        """Two batches of 4 for an update in the first epoch, and then four; or one batch of that size."""

        def __init__(self, accumulates: bool) -> None:
            self.accumulates = accumulates

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if self.accumulates:
                trainer.accumulate_grad_batches = 2 if trainer.current_epoch == 0 else 4

    class Constant(Tokens):
        def configure_optimizers(self) -> Any:  # Lightning's schedule counts an update that is left
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Leaves(ExactAccumulation, Constant):
        """Leaves the first epoch at its sixth batch, when one of the third update is collected."""

        def weight_of(self, batch: Any) -> int:
            return count(batch)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.trainer.current_epoch == 0 and batch_idx == 5 else None

    exact, by_hand = Leaves(), Tokens()
    train(exact, 4, 2, callbacks=[Growing(accumulates=True)])
    rows = torch.utils.data.TensorDataset(*samples())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for start, stop in ((0, 8), (8, 16), (0, 16), (16, 32), (32, 44)):
        optimizer.zero_grad()
        by_hand.loss(rows[start:stop]).backward()
        optimizer.step()
    assert exact.trainer.global_step == 5
    assert apart(exact, by_hand) <= 1e-12


def test_an_optimizer_that_asks_again_for_the_loss_gets_that_of_the_whole_batch() -> None:
    class LBFGS:
        optimizer, lr = torch.optim.LBFGS, 0.3
        options = {"max_iter": 3}

    class TokensLBFGS(LBFGS, Tokens): ...

    class ExactLBFGS(LBFGS, Exact): ...

    large, exact = TokensLBFGS(), ExactLBFGS()
    train(large, SAMPLES, 1)
    train(exact, 4, 11)
    assert len(large.norms) == len(exact.norms) > 4
    assert apart(large, Tokens()) > 0.1
    assert apart(large, exact) <= 1e-10  # its line of secants enlarges rounding


def test_hooks_of_the_users_own_are_called() -> None:
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

    class ExactHooked(ExactAccumulation, Hooked):
        def weight_of(self, batch: Any) -> int:
            return count(batch)

    large, exact = Hooked(), ExactHooked()
    train(large, 16, 1, max_steps=1, gradient_clip_val=9.0)
    train(exact, 4, 4, max_steps=1, gradient_clip_val=9.0)
    assert large.called == ["start", "step", "backward", "clip"]
    assert exact.called == ["start", "step", "backward", "backward", "backward", "backward", "clip"]
    assert apart(large, exact) <= 1e-12


def test_each_batch_keeps_its_number_and_a_step_may_leave_the_number_out() -> None:
    class Numbered(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.numbers: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.numbers.append(batch_idx)
            return self.loss(batch)

    class Bare(Tokens):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
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
    assert apart(bare, numbered) == 0


def test_a_fit_that_fails_leaves_an_ordinary_module_that_can_be_copied() -> None:
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


def test_a_batch_that_does_not_count_is_left_out_and_one_without_a_loss_is_named() -> None:
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
    assert apart(large, exact) <= 1e-12

    class ReturnsNone(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(
        InputError, match=r"training_step returned NoneType\. Return the loss of its batch; for"
    ):
        train(type("ExactNone", (ExactAccumulation, ReturnsNone), {})(), 4, 4)


def test_a_compiled_module_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"was given to torch\.compile, which would compile the accumulation"
    ):
        train(torch.compile(Exact(), backend="eager"), 4, 4)  # type: ignore[arg-type]


def test_a_wrong_weight_is_an_error_before_the_first_step() -> None:
    class BySamples(ExactAccumulation, Tokens): ...

    module = BySamples()
    with pytest.raises(LossSpecError, match="weight"):
        train(module, 4, 4)
    assert apart(module, Tokens()) == 0
    assert module.norms == []


def test_a_wrong_weight_that_is_not_checked_is_another_update() -> None:
    class Unchecked(ExactAccumulation, Tokens):
        def gradient_options(self) -> dict[str, Any]:
            return {"check": False}

    large, wrong = Tokens(), Unchecked()
    train(large, 16, 1)
    train(wrong, 4, 4)
    assert apart(large, wrong) > 0.01


def test_a_training_step_that_would_come_first_is_refused_where_the_class_is_made() -> None:
    with pytest.raises(InputError, match=r"Wrong has a training_step that comes before ExactAccumulation's"):

        class Wrong(ExactAccumulation):
            def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    with pytest.raises(InputError, match=r"class Exact\(ExactAccumulation, YourModule\)"):
        type("Reversed", (Tokens, ExactAccumulation), {})


def test_what_cannot_be_accumulated_is_refused_before_the_first_step() -> None:
    module = Exact()
    module.automatic_optimization = False
    with pytest.raises(
        InputError, match=r"automatic_optimization is False\. In a loop of your own, call superbatch"
    ):
        train(module, 4, 1)
    with pytest.raises(
        InputError, match="microbatch_size=2 cuts a batch, but accumulate_grad_batches=4 joins batches"
    ):
        train(type("Both", (Exact,), {"gradient_options": lambda self: {"microbatch_size": 2}})(), 4, 4)

    class FromIterator(Tokens):
        def training_step(self, dataloader_iter: Any) -> Any: ...

    with pytest.raises(InputError, match="training_step takes dataloader_iter"):
        train(type("ExactIterator", (ExactAccumulation, FromIterator), {})(), 4, 4)


def test_a_strategy_that_shards_is_refused() -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    module = Exact()
    trainer = lightning.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(
        InputError, match="FSDPStrategy is a strategy with which gradients cannot be accumulated"
    ):
        module.on_fit_start()


def test_a_version_that_was_not_tested_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
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
    class Halved(Tokens):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)

    class ExactHalved(ExactAccumulation, Halved):
        def weight_of(self, batch: Any) -> int:
            return count(batch)

    whole, large, exact = Tokens(), Halved(), ExactHalved()
    for module, size, batches in ((whole, 16, 1), (large, 16, 1), (exact, 4, 4)):
        train(module, size, batches)
    assert apart(large, whole) > 0.01
    assert apart(large, exact) <= 1e-12
