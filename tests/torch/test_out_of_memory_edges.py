"""Out of memory in rare places: before a window, in the first update, in a user's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import LossSpecError, NonFiniteError, OutOfMemoryError
from superbatch.torch import Accumulator, windows
from superbatch.torch.memory.out_of_memory import out_of_memory
from superbatch.torch.options import GhostBatchNorm
from tests.torch.helpers import assert_same_parameters, mlp, mse, rows, sgd, start_of
from tests.torch.test_out_of_memory import TEXT, FailAt, quiet


def make(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: mse(model, mb),
        check=False,
        microbatch_size=4,
        **options,
    )


@pytest.mark.parametrize("at", range(0, 40, 2))
def test_out_of_memory_in_the_first_window_into_momentum(at: int) -> None:
    model, reference = mlp(), mlp()
    start = start_of(reference)
    make(reference, gradient_sum="momentum")(rows(8)[0])
    accumulate, fail, batch = make(model, gradient_sum="momentum"), FailAt(), rows(8)[0]
    with fail, quiet():
        fail.arm(at)
        update = accumulate(batch)
    assert fail.failed and update.failures == 1
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_window_that_cannot_be_opened_does_not_stay_open() -> None:
    """A GradScaler that has not scaled yet refuses to restore a scale."""
    model = mlp()
    accumulate, fail, batch = make(model, scaler=torch.amp.GradScaler("cpu")), FailAt(), rows(8)[0]
    with fail:
        fail.arm(0)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            accumulate(batch)
    assert accumulate(batch).made


def test_a_random_state_that_was_not_saved_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    accumulate = make(model)
    accumulate(rows(8)[0])
    torch.rand(3)
    before = torch.get_rng_state()

    def fails(*_: Any) -> Any:
        raise RuntimeError(TEXT)

    monkeypatch.setattr("superbatch.torch.window.participants.snapshot.torch_random_state", fails)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        accumulate(rows(8)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{"nonfinite": "skip_microbatch"}, {"gradient_sum": "momentum"}], ids=str)
def test_a_window_continues_after_a_late_failure_in_the_forward(options: dict[str, Any]) -> None:
    model, seen = mlp(), []

    def loss(mb: Any) -> Tensor:
        seen.append(len(mb[0]))
        if len(seen) == 3:
            raise RuntimeError(TEXT)
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4, **options)
    with pytest.warns(UserWarning, match="the window continues in micro-batches of at most 2"):
        assert accumulate(rows(12)[0]).failures == 1
    assert seen == [4, 4, 4, 2, 2], "micro-batches in the sum are not recomputed"


def test_float32_weights_that_round_differently_in_smaller_micro_batches() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(4096, 4), torch.rand(4096)
    model, reference = nn.Linear(4, 1), nn.Linear(4, 1)
    reference.load_state_dict(model.state_dict())
    start = start_of(reference)

    def loss_of(model: nn.Module, mb: Any) -> Tensor:
        return (model(mb[0])[:, 0].square() * mb[1]).sum() / mb[1].sum()

    def loss(mb: Any) -> Tensor:
        if len(mb[0]) > 1024:
            raise RuntimeError(TEXT)
        return loss_of(model, mb)

    sums = [float(chunk.sum()) for chunk in weights.split(1024)]
    assert sum(sums) != sum(float(chunk.sum()) for chunk in weights.split(2048)), "premise: other roundings"
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss,
        check=False,
        microbatch_size=2048,
        weight=lambda mb: mb[1].sum(),
    )
    with quiet():
        assert accumulate((x, weights)).failures == 1
    large = Accumulator(
        reference, sgd(reference.parameters()), lambda mb: loss_of(reference, mb), check=False
    )
    large((x, weights))
    assert_same_parameters(reference, model, 1e-6, start=start)


@pytest.mark.parametrize("weight", [lambda mb: 1, lambda mb: 1.0], ids=["int", "float"])
def test_weights_that_are_not_additive_are_refused(weight: Any) -> None:
    model = mlp()

    def loss(mb: Any) -> Tensor:
        if len(mb[0]) > 2:
            raise RuntimeError(TEXT)
        return mse(model, mb)

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss, check=False, microbatch_size=4, weight=weight
    )
    with quiet(), pytest.raises(LossSpecError, match="weight= is not additive"):
        accumulate(rows(8)[0])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_micro_batch_that_was_changed_in_place_is_not_retried(failing: int) -> None:
    """On the CPU micro-batches are views of the batch: halved twice, they would give another update."""
    model, calls = mlp(), []
    before = start_of(model)

    def loss(mb: Any) -> Tensor:
        calls.append(1)
        mb[0].mul_(0.5)
        if len(calls) == failing:
            raise RuntimeError(TEXT)
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with pytest.raises(OutOfMemoryError, match=r"has changed micro-batch \d in place.*Copy the tensors"):
        accumulate(rows(8)[0])
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("form", ["dict", "nested", "dataclass", "list"])
def test_a_change_in_place_is_detected_in_every_kind_of_batch(form: str) -> None:
    @dataclass
    class Batch:
        names: list[str]
        x: Tensor

    model, calls = mlp(), []
    x, names = rows(8)[0][0], list("abcdefgh")
    batch: Any = {"names": names, "x": x}
    batch = {"nested": {"inner": [batch]}, "dataclass": Batch(names, x), "list": [names, x]}.get(form, batch)

    def tensor_of(mb: Any) -> Tensor:
        mb = mb["inner"][0] if form == "nested" else mb
        return mb.x if form == "dataclass" else mb[1 if form == "list" else "x"]

    def loss(mb: Any) -> Tensor:
        calls.append(1)
        inputs = tensor_of(mb).mul_(0.5)
        if len(calls) == 1:
            raise RuntimeError(TEXT)
        return model(inputs).square().mean()

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with pytest.raises(OutOfMemoryError, match=r"has changed micro-batch \d in place"):
        accumulate(batch)


def test_a_non_finite_gradient_raises_without_memory_to_find_its_cause() -> None:
    model, calls = mlp(), []

    def loss(mb: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError(TEXT)
        return (
            mse(model, mb) + (next(model.parameters()).sum() * 0).sqrt() * 0
        )  # its gradient is 0 x infinity

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        accumulate(rows(8)[0])
    assert len(calls) == 3, "premise: memory ran out in the search"


def test_an_earlier_change_in_place_does_not_matter_without_a_retry() -> None:
    model, reference, armed = mlp(), mlp(), [True]
    start = start_of(reference)

    def loss(model: nn.Module, mb: Any, *, fails: bool) -> Tensor:
        if fails and len(mb[0]) == 3 and armed and armed.pop():
            raise RuntimeError(TEXT)
        mb[0].mul_(0.5)
        return mse(model, mb)

    for module, fails in ((model, True), (reference, False)):
        accumulate = Accumulator(
            module,
            sgd(module.parameters()),
            lambda mb, module=module, fails=fails: loss(module, mb, fails=fails),
            check=False,
            microbatch_size=4,
        )
        with quiet():
            assert accumulate(rows(7)[0]).failures == fails
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_the_wait_doubles_once_per_window() -> None:
    model, seen = mlp(), []

    def loss(mb: Any) -> Tensor:
        seen.append(len(mb[0]))
        if len(mb[0]) > 2:
            raise RuntimeError(TEXT)
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=16)
    batch = rows(16)[0]
    with quiet():
        updates = [accumulate(batch) for _ in range(60)]
    assert [number for number, update in enumerate(updates) if update.failures] == [0, 50]
    assert updates[0].failures == updates[50].failures == 3 and seen[:3] == [16, 8, 4]


def test_a_users_loop_keeps_its_statistics_per_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    accumulator = Accumulator(
        model, sgd(model.parameters()), check=False, microbatch_size=4, participants=[GhostBatchNorm()]
    )
    batch = torch.randn(8, 4, dtype=torch.float64)

    def run_out() -> None:
        with accumulator.window(batch) as window:
            for _ in window:
                raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run_out()
    with accumulator.window(batch) as window:
        sizes = [(len(mb), window.backward(model(mb).square().mean()))[0] for mb in window]
    assert sizes == [4, 4], "smaller ones would change the update"


def test_a_window_of_a_loader_saved_before_memory_ran_out_is_resumed() -> None:
    model = mlp()
    accumulator = Accumulator(model, sgd(model.parameters()), check=False)
    window_of_two = next(iter(windows(rows(4, 2), accumulation_steps=2)))
    states: list[Any] = []

    def run_out() -> None:
        with accumulator.window(window_of_two) as window:
            for mb in window:
                if states:
                    raise MemoryError("no room")
                window.backward(mse(model, mb))
                states.append(accumulator.state_dict())

    with pytest.raises(MemoryError, match="no room"):
        run_out()
    accumulator.load_state_dict(states[0])
    with accumulator.window(window_of_two) as window:
        assert [(len(mb[0]), window.backward(mse(model, mb)))[0] for mb in window] == [4]


def test_the_error_of_an_inner_accumulator_is_not_swallowed() -> None:
    inner_model, model, steps = mlp(), mlp(), []

    class TornSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(1)
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError(TEXT)

    inner = Accumulator(
        inner_model, TornSGD(inner_model.parameters(), lr=0.1), lambda mb: mse(inner_model, mb), check=False
    )

    def loss(mb: Any) -> Tensor:
        inner(mb)
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with pytest.raises(OutOfMemoryError, match=r"some parameters or states have changed"):
        accumulate(rows(8)[0])
    assert len(steps) == 1 and not out_of_memory(OutOfMemoryError("verdict"))


class CountingSGD(torch.optim.SGD):
    """SGD that counts steps as Python numbers, per parameter and group, then runs out of memory."""

    armed, replaces = False, False

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if self.replaces:
                    state["momentum_buffer"] = state["momentum_buffer"] * 2
        if self.armed:
            raise RuntimeError(TEXT)
        return super().step(closure)


def test_numbers_in_the_optimizer_state_are_restored() -> None:
    model = mlp()
    optimizer = CountingSGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), check=False)
    accumulate(rows(4)[0])
    optimizer.armed = True
    with pytest.raises(OutOfMemoryError, match="Everything is as before the window"):
        accumulate(rows(4)[0])
    assert {state["step"] for state in optimizer.state.values()} == {1}
    assert optimizer.param_groups[0]["steps"] == 1
    optimizer.replaces = True
    with pytest.raises(OutOfMemoryError, match="some parameters or states have changed"):
        accumulate(rows(4)[0])


def test_a_fused_step_of_one_group_of_two_is_detected() -> None:
    """Fused steps do not change version counters, so the parameters alone do not reveal the step."""
    model = mlp()

    class FirstGroupOnly(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            groups = self.param_groups
            self.param_groups = groups[:1]
            try:
                super().step(closure)
            finally:
                self.param_groups = groups
            raise RuntimeError(TEXT)

    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others}]
    optimizer = FirstGroupOnly(groups, lr=0.1, momentum=0.9, fused=True)
    before, version = first.detach().clone(), first._version
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), check=False)
    with pytest.raises(OutOfMemoryError, match="some parameters or states have changed"):
        accumulate(rows(4)[0])
    assert not torch.equal(before, first) and first._version == version, (
        "premise: the version does not reveal it"
    )


def test_a_smaller_size_is_kept_after_a_resume() -> None:
    model, seen, most = mlp(), [], 2

    def loss(mb: Any) -> Tensor:
        seen.append(len(mb[0]))
        if len(mb[0]) > most:
            raise RuntimeError(TEXT)
        return mse(model, mb)

    def new() -> Accumulator:
        return Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=8)

    accumulate, resumed = new(), new()
    with quiet():
        assert accumulate(rows(8)[0]).failures == 2
    resumed.load_state_dict(accumulate.state_dict())
    seen.clear()
    assert resumed(rows(8)[0]).failures == 0 and set(seen) == {2}


@pytest.mark.parametrize(("size", "asks"), [("largest", True), (4, False)])
def test_memory_for_every_update_is_reserved_if_micro_batches_fill_the_machine(
    size: Any, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fixed size only the first update needs a reserve: it makes the optimizer's state."""
    model = nn.Sequential(nn.Linear(300, 1000), nn.Linear(1000, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    accumulate = Accumulator(
        model, optimizer, lambda x: model(x).square().mean(), microbatch_size=size, check=False
    )
    batch = torch.randn(8, 300)
    assert accumulate(batch).made
    before, empty = start_of(model), torch.empty

    def limited(*shape: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.uint8:  # the reserve
            raise RuntimeError(TEXT)
        return empty(*shape, **options)

    monkeypatch.setattr("superbatch.torch.sizes.reserve.torch.empty", limited)
    if asks:
        with pytest.raises(
            OutOfMemoryError, match=r"the optimizer's state and temporary tensors need .* MiB"
        ):
            accumulate(batch)
        assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    else:
        assert accumulate(batch).made
