"""Float32 masters: exact save and load in any order, and copies of parameters that the user writes."""

from __future__ import annotations

import io
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.torch import Accumulator
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.window import engine
from superbatch.torch.window.participants.gradient_sum import ManagedParameter
from tests.torch.helpers import mlp, mse, rows

BF16 = torch.bfloat16
BATCHES = rows(8, 10, BF16)


class Run:
    """Model with masters, optimizer and accumulator, as a new process would create them."""

    def __init__(self, seed: int = 0, masters: dict[str, Tensor] | None = None) -> None:
        torch.manual_seed(seed)
        self.model: Any = mlp(BF16)
        self.masters = fp32_masters(self.model)
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-3)
        self.accumulate = Accumulator(
            self.model,
            MasterWeights(self.optimizer, self.masters),
            lambda mb: mse(self.model, mb),
            microbatch_size=3,
        )

    def train(self, batches: list[Any]) -> None:
        assert all(self.accumulate(batch).made for batch in batches)

    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "accumulate": self.accumulate}

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save({name: component.state_dict() for name, component in self.components().items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: dict[str, Any], order: tuple[str, ...]) -> None:
        for name in order:
            self.components()[name].load_state_dict(saved[name])

    def values(self) -> list[Tensor]:
        return [each.detach().clone() for pair in self.masters.items() for each in pair]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def uninterrupted_and_resumed(order: tuple[str, ...]) -> tuple[Run, Run]:
    """Return a run without interruption and a run resumed after five of ten updates."""
    uninterrupted, first = Run(), Run()
    uninterrupted.train(BATCHES)
    first.train(BATCHES[:5])
    kept = first.values()
    saved = first.save()
    second = Run(seed=7)
    assert not same(kept, second.values()), "premise: the new run has other initial values"
    parameter, master = next(iter(first.masters.items()))
    assert not torch.equal(parameter.float(), master), "premise: the parameter is rounded"
    second.load(saved, order)
    second.train(BATCHES[5:])
    assert not same(kept, second.values()), "premise: the parameters changed"
    return uninterrupted, second


@pytest.mark.parametrize("order", list(permutations(["model", "optimizer", "accumulate"])))
@pytest.mark.sampled(2)
def test_a_run_is_resumed_bit_for_bit_in_any_order(order: tuple[str, ...]) -> None:
    uninterrupted, second = uninterrupted_and_resumed(order)
    assert same(uninterrupted.values(), second.values())


def test_a_mutant_that_copies_every_written_parameter_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(owned: list[ManagedParameter], written: Any) -> None:
        for entry in owned:
            if written.get(entry.name) != (entry.parameter._version, entry.target._version):
                with torch.no_grad():
                    entry.target.copy_(entry.parameter)

    monkeypatch.setattr(engine, "take_over", always)
    uninterrupted, second = uninterrupted_and_resumed(("accumulate", "model", "optimizer"))
    assert not same(uninterrupted.values(), second.values())


@pytest.mark.parametrize("model_first", [False, True])
def test_masters_saved_and_loaded_by_the_user(model_first: bool) -> None:
    uninterrupted, first, second = Run(), Run(), Run(seed=7)
    uninterrupted.train(BATCHES)
    first.train(BATCHES[:5])
    saved, masters = first.save(), [master.detach().clone() for master in first.masters.values()]
    second.optimizer.load_state_dict(saved["optimizer"])
    if model_first:
        second.model.load_state_dict(saved["model"])
    with torch.no_grad():
        for master, kept in zip(second.masters.values(), masters, strict=True):
            master.copy_(kept)
    if not model_first:
        second.model.load_state_dict(saved["model"])
    second.train(BATCHES[5:])
    assert same(uninterrupted.values(), second.values())


def test_an_open_window_is_saved_with_its_masters() -> None:
    uninterrupted, first, second = Run(), Run(), Run(seed=7)
    uninterrupted.train(BATCHES[:6])
    first.train(BATCHES[:5])
    saved: dict[str, Any] = {}
    with first.accumulate.window(BATCHES[5]) as window:
        for number, microbatch in enumerate(window):
            window.backward(mse(first.model, microbatch))
            if number == 1:
                saved = first.save()
    second.load(saved, ("accumulate", "model", "optimizer"))
    second.train(BATCHES[5:6])
    assert same(uninterrupted.values(), second.values()) and same(uninterrupted.values(), first.values())


def swap_average_in(run: Run) -> None:
    """Overwrite the parameters with an average, as an EMA does."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5).add_(0.25)


def write_one_row(run: Run) -> None:
    with torch.no_grad():
        run.model[0].weight[1] = 3.0


def load_other_values(run: Run) -> None:
    run.model.load_state_dict({name: value + 1 for name, value in run.model.state_dict().items()})


@pytest.mark.parametrize("write", [write_one_row, load_other_values, swap_average_in])
@pytest.mark.parametrize("after_loading", [False, True])
def test_values_written_to_a_parameter_are_copied_to_its_master(write: Any, after_loading: bool) -> None:
    run = Run()
    run.train(BATCHES[:5])
    if after_loading:
        saved, run = run.save(), Run(seed=7)
        run.load(saved, ("model", "optimizer", "accumulate"))
    before = [parameter.detach().clone() for parameter in run.masters]
    write(run)
    written = [parameter.detach().clone() for parameter in run.masters]
    assert not same(before, written), "premise: something was written"
    masters = [master.detach().clone() for master in run.masters.values()]
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.train(BATCHES[5:6])
    for was, now, kept, (parameter, master) in zip(
        before, written, masters, run.masters.items(), strict=True
    ):
        assert torch.equal(parameter, now)
        assert torch.equal(master, kept if torch.equal(was, now) else now.float())


def test_values_written_to_a_master_are_copied_to_its_parameter() -> None:
    run = Run()
    run.train(BATCHES[:5])
    with torch.no_grad():
        for master in run.masters.values():
            master.mul_(0.5)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    seen: list[Tensor] = []
    run.model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    run.train(BATCHES[5:6])
    assert torch.equal(seen[0], run.masters[run.model[0].weight].to(BF16))


def test_nan_in_parameter_and_master_is_not_a_change() -> None:
    run = Run()
    run.train(BATCHES[:1])
    with torch.no_grad():
        for parameter, master in run.masters.items():
            master.view(-1)[0] = torch.nan
            parameter.copy_(master)
    kept = run.masters[run.model[0].weight].detach().clone()
    assert not torch.equal(kept, kept.to(BF16).float()), "premise: the parameter is rounded"
    with run.accumulate.window(BATCHES[1]):
        assert torch.equal(run.masters[run.model[0].weight].nan_to_num(), kept.nan_to_num())


def test_masters_of_another_model_are_refused() -> None:
    run, narrow = Run(), nn.Linear(4, 1).bfloat16()
    saved = run.save()["accumulate"]
    before = run.values()
    plain = Accumulator(narrow, torch.optim.SGD(narrow.parameters()), narrow)
    with pytest.raises(InputError, match=r"Only the saved state has a float32 master of '0\.bias'"):
        plain.load_state_dict(saved)
    with pytest.raises(InputError, match=r"shape \(9,\), but the parameter has shape \(6,\)"):
        run.accumulate.load_state_dict({**saved, "masters": {**saved["masters"], "0.bias": torch.ones(9)}})
    with pytest.raises(InputError, match=r"Only this Accumulator has a float32 master of '0\.bias'"):
        run.accumulate.load_state_dict({**saved, "masters": {}})
    with pytest.raises(InputError, match="not a dict of names and tensors"):
        run.accumulate.load_state_dict({**saved, "masters": [1]})
    assert same(before, run.values())


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda master: torch.full_like(master, torch.nan), r"'0\.bias' contains nan: 6 of 6 values"),
        (
            lambda master: master.index_fill(0, torch.tensor([1]), torch.inf),
            r"'0\.bias' contains inf: 1 of 6",
        ),
        (lambda master: master.to(BF16), r"'0\.bias' has dtype torch\.bfloat16, not torch\.float32"),
        (lambda master: master[:-1], r"'0\.bias' has shape \(5,\), but the parameter has shape \(6,\)"),
        (lambda master: master.to("meta"), r"'0\.bias' is on the meta device"),
    ],
)
def test_invalid_masters_are_refused_before_any_change(spoil: Any, text: str) -> None:
    run = Run()
    run.train(BATCHES[:2])
    saved = run.save()["accumulate"]
    run.train(BATCHES[2:4])
    before, state = run.values(), run.accumulate.state_dict()
    spoilt = {**saved, "masters": {**saved["masters"], "0.bias": spoil(saved["masters"]["0.bias"])}}
    with pytest.raises(InputError, match=text):
        run.accumulate.load_state_dict(spoilt)
    assert same(before, run.values())
    after = run.accumulate.state_dict()
    assert [after[key] for key in ("updates", "check")] == [state[key] for key in ("updates", "check")]


def test_an_infinite_mask_is_loaded() -> None:
    model = nn.Linear(2, 2).bfloat16()
    with torch.no_grad():
        model.weight[0, 1] = -torch.inf
    masters = fp32_masters(model)
    accumulate = Accumulator(model, MasterWeights(torch.optim.SGD(masters.values()), masters), model)
    saved = {name: value.clone() for name, value in accumulate.state_dict()["masters"].items()}
    accumulate.load_state_dict({**accumulate.state_dict(), "masters": saved})
    assert masters[model.weight][0, 1] == -torch.inf


def stale_masters(model: nn.Module) -> dict[Tensor, Tensor]:
    masters = fp32_masters(model)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    return masters


def nan_masters(model: nn.Module) -> dict[Tensor, Tensor]:
    masters = fp32_masters(model)
    with torch.no_grad():
        next(iter(masters.values()))[0] = torch.nan
    return masters


@pytest.mark.parametrize("make", [stale_masters, nan_masters])
def test_masters_that_differ_from_their_parameters_are_refused(make: Any) -> None:
    model = nn.Linear(2, 1).bfloat16()
    masters = make(model)
    with pytest.raises(InputError, match=r"master of 'weight' differs .* then call fp32_masters\(model\)"):
        Accumulator(model, MasterWeights(torch.optim.SGD(masters.values()), masters), model)


def test_masters_narrower_than_their_parameters_are_refused() -> None:
    model = nn.Linear(2, 1)
    masters: dict[Tensor, Tensor] = {p: nn.Parameter(p.detach().to(BF16)) for p in model.parameters()}
    with pytest.raises(InputError, match="the same shape and the same or a wider dtype"):
        Accumulator(model, MasterWeights(torch.optim.SGD(masters.values()), masters), model)
