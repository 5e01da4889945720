"""A loop of Fabric with superbatch, against its large batch and the mean of its losses."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import FSDPStrategy
from torch import nn

from superbatch.errors import InputError
from superbatch.integrations import versions
from superbatch.integrations.lightning import make_gradient
from superbatch.torch import windows
from tests.integrations.fabric_loop import WORDS, Loop, count, largest_difference
from tests.integrations.lightning_models import loader
from tests.torch.two_ranks import found_by_both

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore:.*treespec")]


def fabric(**options: Any) -> Fabric:
    made = Fabric(accelerator="cpu", devices=1, **options)
    made.launch()
    return made


def test_the_update_equals_the_large_batch_unlike_the_mean_of_losses() -> None:
    large, stock, exact = (Loop(way, fabric()).run() for way in ("large", "stock", "exact"))
    assert largest_difference(large, Loop("large", fabric())) > 0.05  # it learns
    assert largest_difference(large, stock) > 0.01
    assert largest_difference(large, exact) <= 1e-12
    assert exact.norms == pytest.approx(large.norms, rel=1e-12)
    assert len(exact.losses) == 6


def test_bf16_mixed_is_closer_to_the_large_batch_than_the_mean_of_losses() -> None:
    ways = ("large", "stock", "exact")
    loops = [Loop(way, fabric(precision="bf16-mixed"), dtype=torch.float32).run() for way in ways]
    large, stock, exact = loops
    assert largest_difference(large, stock) > 0.01
    assert largest_difference(large, exact) < 2e-3


def _scaled(way: Any, scale: float) -> tuple[Loop, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return Loop(way, fabric(plugins=plugin), dtype=torch.float32).run(), scaler


def test_the_scaler_of_fabric_scales_unscales_and_skips() -> None:
    (large, before), (exact, after) = _scaled("large", 2.0**9), _scaled("exact", 2.0**9)
    assert before.get_scale() == after.get_scale() == 2.0**10
    assert exact.norms == pytest.approx(large.norms, rel=0.02)
    assert largest_difference(large, exact) < 2e-3
    skipped, scaler = _scaled("exact", 2.0**40)
    assert not any(map(math.isfinite, skipped.norms))
    assert scaler.get_scale() == 2.0**34
    assert largest_difference(skipped, Loop("large", fabric(), dtype=torch.float32)) == 0


def test_a_sharding_strategy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("exact", fabric())
    monkeypatch.setattr(loop.fabric, "_strategy", FSDPStrategy())
    with pytest.raises(InputError, match="FSDPStrategy is not supported by superbatch"):
        make_gradient(loop.fabric, loop.model, loop.loss)


def test_a_model_that_was_not_set_up_is_refused() -> None:
    loop = Loop("exact", fabric())
    with pytest.raises(InputError, match="The Sequential was not set up by Fabric"):
        make_gradient(loop.fabric, loop.bare, loop.loss)


def _several(way: str) -> list[nn.Module]:
    """Train an embedding and a head, each with its own optimizer; return both."""
    torch.manual_seed(0)
    host = fabric()
    body, head = nn.Embedding(WORDS, 6).double(), nn.Linear(6, WORDS).double()
    set_up = [host.setup(each, torch.optim.SGD(each.parameters(), 0.5)) for each in (body, head)]
    models = [model for model, _ in set_up]

    def loss_fn(batch: Any) -> Any:
        logits = models[1](models[0](batch[0]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    gradient_of = make_gradient(host, models, loss_fn, microbatch_size=None, weight=count)
    large = way == "large"
    for batch in loader(16) if large else windows(loader(4), 4):
        if large:
            host.backward(loss_fn(batch))
        else:
            gradient_of(batch)
        for _, optimizer in set_up:
            optimizer.step()
            optimizer.zero_grad()
    return [body, head]


def test_several_models_with_one_loss() -> None:
    for large, exact in zip(_several("large"), _several("exact"), strict=True):
        for real, found in zip(large.parameters(), exact.parameters(), strict=True):
            assert float((real - found).detach().abs().max()) <= 1e-12
    loop = Loop("exact", fabric())
    with pytest.raises(InputError, match="The Linear was not set up"):
        make_gradient(loop.fabric, [loop.model, nn.Linear(2, 2)], loop.loss)


def test_an_untested_version_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.TESTED, "lightning", ("2.4", "2.5"))
    loop = Loop("exact", fabric())
    with pytest.warns(UserWarning, match=r"was tested with lightning 2\.4 to 2\.5"):
        make_gradient(loop.fabric, loop.model, loop.loss, weight=count)


def test_two_ranks_give_the_update_of_the_joint_batch(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(probe.getsockname()[1]))
    found = found_by_both("tests.integrations.fabric_loop", tmp_path, warnings="default")
    alone = Loop("large", fabric()).run()
    wanted = dict(alone.bare.named_parameters())

    def largest(parameters: dict[str, Any]) -> float:
        return max(float((each - wanted[name]).detach().abs().max()) for name, each in parameters.items())

    for rank in found:
        assert rank["strategy"] == "DDPStrategy"
        assert largest(rank["exact"]["parameters"]) <= 1e-12
        assert rank["exact"]["norms"] == pytest.approx(alone.norms, rel=1e-12)
        assert largest(rank["stock"]["parameters"]) > 0.01
        assert largest(rank["large"]["parameters"]) > 0.01
