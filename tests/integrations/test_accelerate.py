"""A loop of Accelerate with superbatch, against its large batch and its own accumulation."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.utils import DistributedType

from superbatch.errors import InputError, LossSpecError
from superbatch.integrations import versions
from superbatch.integrations.accelerate import make_gradient
from superbatch.torch import Window, windows
from tests.integrations.accelerate_loop import Loop, count, fresh, largest_difference, reset
from tests.integrations.accelerate_ranks import coupled_on
from tests.torch.two_ranks import found_by_both

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    reset()


@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_the_update_equals_the_large_batch_unlike_accelerates_own(max_norm: float | None) -> None:
    large = Loop("large", fresh(), max_norm=max_norm).run()
    stock = Loop("stock", fresh(gradient_accumulation_steps=4), max_norm=max_norm).run()
    exact = Loop("exact", fresh(), max_norm=max_norm).run()
    assert largest_difference(large, Loop("large", fresh())) > 0.05  # it learns
    assert largest_difference(large, stock) > 0.01
    assert largest_difference(large, exact) <= 1e-12
    assert large.steps == stock.steps == exact.steps == 6
    assert exact.norms == pytest.approx(large.norms, rel=1e-12)
    assert exact.losses == pytest.approx(large.losses, rel=1e-12)
    assert exact.rates == large.rates
    assert len(exact.rates) == 6


def test_bf16_is_closer_to_the_large_batch_than_accelerates_own() -> None:
    large = Loop("large", fresh(mixed_precision="bf16"), dtype=torch.float32).run()
    stock = Loop(
        "stock", fresh(mixed_precision="bf16", gradient_accumulation_steps=4), dtype=torch.float32
    ).run()
    exact = Loop("exact", fresh(mixed_precision="bf16"), dtype=torch.float32).run()
    assert largest_difference(large, stock) > 0.02
    assert largest_difference(large, exact) < 2e-3


def _scaled(way: Any, scale: float) -> tuple[Loop, Any]:
    """Train with a GradScaler, which Accelerate makes only for GPUs."""
    accelerator = fresh()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    return Loop(way, accelerator).run(), accelerator.scaler


def test_the_scaler_of_accelerate_scales_and_unscales() -> None:
    (large, before), (exact, after) = _scaled("large", 2.0**10), _scaled("exact", 2.0**10)
    assert before.get_scale() == after.get_scale() == 2.0**13
    assert exact.norms == pytest.approx(large.norms, rel=1e-12)
    assert largest_difference(large, exact) <= 1e-12
    assert exact.steps == 6


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_scaler_of_accelerate_skips_an_update_that_overflows() -> None:
    exact, scaler = _scaled("exact", float("inf"))
    assert exact.steps == 0
    assert exact.rates == [0.5] * 6  # the prepared scheduler waits for the optimizer
    assert scaler.get_scale() == float("inf")
    assert largest_difference(exact, Loop("large", fresh())) == 0


def test_coupled_samples_give_the_update_of_the_large_batch() -> None:
    def trained(*, coupled: bool) -> nn.Module:
        accelerator = fresh()
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        batch = torch.randn(12, 3, dtype=torch.float64)

        def loss_fn(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        if coupled:
            record = make_gradient(accelerator, model, loss_fn, coupled=True, microbatch_size=4)(batch)
            assert record.microbatches == 3
        else:
            accelerator.backward(loss_fn(batch))
        optimizer.step()
        return bare

    large, exact = trained(coupled=False), trained(coupled=True)
    for (name, a), (_, b) in zip(large.named_parameters(), exact.named_parameters(), strict=True):
        assert (a - b).detach().abs().max() <= 1e-12, name


def test_several_models_with_one_loss() -> None:
    large, loop = Loop("large", fresh()).run(), Loop("exact", fresh(), epochs=0)
    first, *rest = loop.bare  # of one optimizer
    models = [loop.accelerator.prepare_model(each) for each in (first, nn.Sequential(*rest))]
    loop.model = nn.Sequential(*models)
    gradient_of = make_gradient(loop.accelerator, models, loop.loss, microbatch_size=None, weight=count)
    for _ in range(2):
        for window in windows(loop.loader, 4):
            gradient_of(window)
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()
    assert largest_difference(large, loop) <= 1e-12


def test_a_wrong_weight_is_an_error_before_the_first_step() -> None:
    loop = Loop("exact", fresh())
    gradient_of = make_gradient(loop.accelerator, loop.model, loop.loss, microbatch_size=4)
    with pytest.raises(LossSpecError, match="weight"):
        gradient_of(next(iter(Loop("large", loop.accelerator).loader)))
    assert all(parameter.grad is None for parameter in loop.bare.parameters())


def test_accelerates_own_accumulation_is_refused() -> None:
    loop = Loop("exact", fresh(gradient_accumulation_steps=4))
    with pytest.raises(
        InputError,
        match=r"gradient_accumulation_steps=4, Accelerate would divide each loss.*windows\(loader, 4\)",
    ):
        make_gradient(loop.accelerator, loop.model, loop.loss)


def test_a_call_inside_accumulate_without_a_step_is_refused() -> None:
    loop = Loop("exact", fresh())
    gradient_of = make_gradient(loop.accelerator, loop.model, loop.loss, weight=count, microbatch_size=None)
    batches = list(loop.loader)
    loop.accelerator.gradient_state._set_sync_gradients(sync_gradients=False)
    with pytest.raises(
        InputError, match=r"sync_gradients is False, so the prepared optimizer would skip its"
    ):
        gradient_of(Window(batches[:4]))
    assert all(parameter.grad is None for parameter in loop.bare.parameters())
    loop.accelerator.gradient_state._set_sync_gradients(sync_gradients=True)
    assert gradient_of(Window(batches[:4])).microbatches == 4
    loop.accelerator.gradient_accumulation_steps = 2
    with pytest.raises(InputError, match="gradient_accumulation_steps=2, Accelerate would divide each loss"):
        gradient_of(Window(batches[:4]))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_sharded_models_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("exact", fresh())
    monkeypatch.setattr(loop.accelerator.state, "distributed_type", DistributedType(kind))
    with pytest.raises(
        InputError, match=f"Accelerate runs with {kind}, which superbatch.integrations does not"
    ):
        make_gradient(loop.accelerator, loop.model, loop.loss)


def test_an_untested_version_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.TESTED, "accelerate", ("1.2", "1.3"))
    loop = Loop("exact", fresh())
    with pytest.warns(UserWarning, match=r"was tested with accelerate 1\.2 to 1\.3"):
        make_gradient(loop.accelerator, loop.model, loop.loss, weight=count)


def test_two_ranks_give_the_update_of_the_joint_batch(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(probe.getsockname()[1]))
    found = found_by_both("tests.integrations.accelerate_ranks", tmp_path, warnings="default")
    alone = Loop(
        "large", fresh(), max_norm=0.5, gamma=0.9**2
    ).run()  # a prepared scheduler steps once per rank
    wanted = dict(alone.bare.named_parameters())

    def largest(parameters: dict[str, Any]) -> float:
        return max(float((each - wanted[name]).detach().abs().max()) for name, each in parameters.items())

    coupled = coupled_on(1, 0, coupled=False, gathered=False)
    for rank in found:
        for name, each in coupled.items():
            assert (rank["coupled"][name] - each).abs().max() <= 1e-12, name
        # With only the rank's own negatives the loss is different, and superbatch refuses it.
        own = [(rank["own negatives"][name] - each).abs().max() for name, each in coupled.items()]
        assert float(max(own)) > 1e-4
        assert "couples the samples of this rank without those of the other ranks" in rank["not gathered"]
        assert rank["exact"]["kind"] == "MULTI_CPU"
        assert largest(rank["stock"]["parameters"]) > 0.01
        assert (
            largest(rank["large"]["parameters"]) > 0.01
        )  # Accelerate averages ranks of unequal token counts
        assert rank["exact"]["losses"] == pytest.approx(alone.losses, rel=1e-12)
        assert rank["exact"]["norms"] == pytest.approx(alone.norms, rel=1e-12)
        assert largest(rank["exact"]["parameters"]) <= 1e-12
        assert "The model was not prepared" in rank["refused"]
    assert [rank["batches"] for rank in found] == [11, 10]  # even_batches=False
    fewer = Loop("large", fresh(), max_norm=0.5, gamma=0.9**2, first=42).run()
    wanted = dict(fewer.bare.named_parameters())
    assert all(largest(rank["uneven"]) <= 1e-12 for rank in found)
    assert found[0]["exact"]["rates"] == found[0]["large"]["rates"]


def test_training_resumes_from_a_saved_state_of_accelerate(tmp_path: Path) -> None:
    without = Loop("exact", fresh()).run()
    first = Loop("exact", fresh(), epochs=1).run()
    first.accelerator.save_state(str(tmp_path))
    second = Loop("exact", fresh(), epochs=1)
    second.accelerator.load_state(str(tmp_path))
    second.run()
    assert largest_difference(first, without) > 0.01
    assert largest_difference(second, without) == 0
    assert second.rates[-1] == without.rates[-1]
