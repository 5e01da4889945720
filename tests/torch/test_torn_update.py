"""Updates that fail half way: statistics are pooled before the step, and a torn state raises."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from superbatch.errors import OptimizerError, OutOfMemoryError
from superbatch.torch import Accumulator
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import GhostBatchNorm
from superbatch.torch.window.contents import Contents
from superbatch.torch.window.participants import batchnorm

F64 = torch.float64


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.BatchNorm1d(4, momentum=None),
        nn.Linear(4, 1),
    )
    return nn.Sequential(*layers).to(F64)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = (value for state in optimizer.state.values() for value in state.values())
    return [value.detach().clone() for value in (*model.state_dict().values(), *states)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def accumulator(model: nn.Module, optimizer: Any, **options: Any) -> Accumulator:
    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    return Accumulator(model, optimizer, loss_fn, microbatch_size=4, check=False, **options)


@pytest.mark.parametrize("module", [0, 1])
@pytest.mark.parametrize("windows", [0, 1])
def test_out_of_memory_while_pooling_statistics_is_rolled_back(
    model: nn.Sequential, module: int, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics are pooled before the optimizer steps, so a failure is rolled back."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    accumulate = accumulator(model, optimizer, participants=[GhostBatchNorm()])
    batch = torch.randn(8, 3, dtype=F64)
    for _ in range(windows):
        accumulate(batch)
    before, calls = contents(model, optimizer), [0]
    computed = batchnorm._pooled

    def failing(*args: Any) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        if calls[0] == module + 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return computed(*args)

    with monkeypatch.context() as patch:
        patch.setattr(batchnorm, "_pooled", failing)
        with pytest.raises(OutOfMemoryError, match="as before the window"):
            accumulate(batch)
    assert calls == [module + 1], "premise: pooling failed"
    assert same(before, contents(model, optimizer))
    assert [each.momentum for each in model if isinstance(each, nn.BatchNorm1d)] == [0.1, None]
    assert accumulate(batch).made
    assert not same(before, contents(model, optimizer))


class TornAdam(torch.optim.Adam):
    """Adam that runs out of memory once, after it wrote one parameter."""

    fails = True

    def step(self, closure: Any = None) -> Any:
        parameters = list(self._all())
        with torch.no_grad():
            parameters[0].add_(1.0)
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)

    def _all(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def test_after_a_torn_update_calls_raise_until_a_state_is_loaded() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=F64)
    optimizer = TornAdam(model.parameters(), lr=0.1)
    accumulate, batch = accumulator(model, optimizer), torch.randn(8, 3, dtype=F64)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = accumulate.state_dict()
    with pytest.raises(OutOfMemoryError, match="Load a checkpoint"):
        accumulate(batch)
    torn = contents(model, optimizer)
    for _ in range(2):
        with pytest.raises(OptimizerError, match="torn"):
            accumulate(batch)
    with pytest.raises(OptimizerError, match="torn"), accumulate.window(batch):
        pass
    assert same(torn, contents(model, optimizer))
    model.load_state_dict(saved)
    accumulate.load_state_dict(state)
    assert accumulate(batch).made


def test_a_failure_before_the_step_tears_nothing() -> None:
    """The state of this optimizer cannot be compared, but its step did not begin."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = [object()]
    calls = torch.zeros(())

    def loss_fn(x: Tensor) -> Tensor:
        calls.add_(1)
        return model(x).square().sum()

    accumulate = Accumulator(
        model, optimizer, loss_fn, microbatch_size=4, reduction="sum", weight=lambda x: 0, check=False
    )
    with pytest.raises(Exception, match="the weight of the window is 0"):
        accumulate(torch.randn(8, 3, dtype=F64))
    assert calls == 0, "discarding the window restores this count"


@pytest.mark.parametrize("windows", [0, 1])
def test_an_error_while_pooling_statistics_propagates_unchanged(
    model: nn.Sequential, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No KeyError of a window that is closed twice replaces it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    accumulate = accumulator(model, optimizer, participants=[GhostBatchNorm()])
    batch = torch.randn(8, 3, dtype=F64)
    for _ in range(windows):
        accumulate(batch)
    before = contents(model, optimizer)

    def failing(*args: Any) -> None:
        raise ZeroDivisionError("pooled")

    with monkeypatch.context() as patch:
        patch.setattr(batchnorm, "_pooled", failing)
        with pytest.raises(ZeroDivisionError, match="pooled"):
            accumulate(batch)
    assert same(before, contents(model, optimizer))
    assert [each.momentum for each in model if isinstance(each, nn.BatchNorm1d)] == [0.1, None]
    assert not any(each._forward_hooks for each in model)
    assert accumulate(batch).made


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_masters_are_copied_if_a_hook_after_the_step_fails(error: type[BaseException]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).bfloat16()
    masters = fp32_masters(model)
    optimizer = torch.optim.SGD(masters.values(), lr=0.5)
    accumulate, batch = accumulator(model, MasterWeights(optimizer, masters)), torch.randn(8, 3).bfloat16()
    state = accumulate.state_dict()
    before = contents(model, optimizer)

    def fails(*_: Any) -> None:
        raise error

    handle = optimizer.register_step_post_hook(fails)
    with pytest.raises(OptimizerError if error is ZeroDivisionError else error) as caught:
        accumulate(batch)
    handle.remove()
    if error is ZeroDivisionError:
        assert isinstance(caught.value.__cause__, error)
    assert not same(before, contents(model, optimizer)), "premise: the optimizer stepped"
    for parameter, master in masters.items():
        assert torch.equal(parameter, master.bfloat16())
    with pytest.raises(OptimizerError, match="torn"):
        accumulate(batch)
    accumulate.load_state_dict(state)
    assert accumulate(batch).made


@pytest.mark.parametrize("what", ["scaler", "global hook", "step of a subclass"])
def test_a_failure_after_a_fused_step_is_torn(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused step changes no version counter; only the call shows that it ran."""

    class After(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise ZeroDivisionError

    failed: list[bool] = []

    def fails(*_: Any) -> None:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    kind = After if what == "step of a subclass" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if what == "scaler" else None
    accumulate, batch = accumulator(model, optimizer, scaler=scaler), torch.randn(8, 3)
    before = contents(model, optimizer)
    if scaler is not None:
        monkeypatch.setattr(scaler, "update", fails)
    handle = register_optimizer_step_post_hook(fails) if what == "global hook" else None
    try:
        with pytest.raises(OptimizerError, match="torn"):
            accumulate(batch)
    finally:
        if handle is not None:
            handle.remove()
    assert not same(before, contents(model, optimizer)), "premise: the optimizer stepped"
    with pytest.raises(OptimizerError, match="torn"):
        accumulate(batch)


def test_a_torch_function_mode_that_outlives_the_window_stays_active() -> None:
    model = nn.Linear(3, 1, dtype=F64)
    accumulate = accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def leave() -> None:
        with ExitStack() as stack, accumulate.window(torch.randn(8, 3, dtype=F64)) as window:
            for _ in window:
                stack.enter_context(torch.device("cpu"))
                raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        leave()
    assert accumulate(torch.randn(8, 3, dtype=F64)).made


class WritesData(torch.optim.SGD):
    """SGD that writes through `.data`, which changes no version counter, and fails once."""

    fails = True

    def write(self, parameter: Any) -> None:
        parameter.data.sub_(0.1 * parameter.grad)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.write(parameter)
            if self.fails:
                self.fails = False
                raise ValueError("half way")


def write_through_numpy(parameter: Any) -> None:
    memory = parameter.detach().numpy()
    memory -= 0.1 * parameter.grad.numpy()


class WritesNumpy(WritesData):
    def write(self, parameter: Any) -> None:
        write_through_numpy(parameter)


@pytest.mark.parametrize("kind", [WritesData, WritesNumpy])
def test_a_failed_step_with_writes_unseen_by_version_counters_is_torn(kind: type[WritesData]) -> None:
    model = nn.Linear(3, 1, dtype=F64)
    accumulate, batch = accumulator(model, kind(model.parameters(), lr=0.1)), torch.randn(8, 3, dtype=F64)
    versions = [each._version for each in model.parameters()]
    with pytest.raises(OptimizerError, match="torn"):
        accumulate(batch)
    assert versions == [each._version for each in model.parameters()], "premise"
    with pytest.raises(OptimizerError, match="torn"):
        accumulate(batch)
    accumulate.load_state_dict(accumulate.state_dict())
    assert accumulate(batch).made


class Lookahead(torch.optim.Optimizer):
    """Lookahead with slow weights and a step count in attributes, not in `state`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.count, self.fails = inner, 0, False
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [each.detach().clone() for group in inner.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.fails:
            raise ValueError("after the count")
        self.inner.step()
        if self.count % 2 == 0:
            fast = [each for group in self.param_groups for each in group["params"]]
            for slow, each in zip(self.slow, fast, strict=True):
                slow.add_(each - slow, alpha=0.5)
                each.copy_(slow)


def test_a_count_in_an_attribute_is_rolled_back() -> None:
    def trained(*, fails: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, batch = nn.Linear(3, 1, dtype=F64), torch.randn(8, 3, dtype=F64)
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
        accumulate = accumulator(model, optimizer)
        for step in range(4):
            optimizer.fails = fails and step == 1
            if optimizer.fails:
                with pytest.raises(ValueError, match="after the count"):
                    accumulate(batch)
                optimizer.fails = False
            assert accumulate(batch).made
        return [each.detach().clone() for each in model.parameters()]

    assert same(trained(fails=False), trained(fails=True))


def test_a_failed_step_that_wrote_slow_weights_is_torn() -> None:
    class Early(Lookahead):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.slow[0].mul_(2)
            raise ValueError("half way")

    model = nn.Linear(3, 1, dtype=F64)
    optimizer = Early(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="torn"):
        accumulator(model, optimizer)(torch.randn(8, 3, dtype=F64))


def test_a_failed_hook_that_wrote_the_learning_rate_is_torn() -> None:
    model = nn.Linear(3, 1, dtype=F64)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False, capturable=False)

    def decay(*_: object) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)
        raise ValueError("after the rate was written")

    optimizer.register_step_pre_hook(decay)
    with pytest.raises(OptimizerError, match="torn"):
        accumulator(model, optimizer)(torch.randn(8, 3, dtype=F64))
    assert float(rate) == pytest.approx(0.05), "premise: the hook wrote to this tensor"


@pytest.mark.parametrize("scaled", [False, True])
def test_a_skipped_step_keeps_the_scale(scaled: bool) -> None:
    model, other = nn.Linear(3, 1, dtype=F64), nn.Linear(3, 1, dtype=F64)
    optimizer, unused = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if scaled else None
    both = Accumulator(
        [model, other],
        [optimizer, unused],
        lambda x: model(x).square().mean(),
        microbatch_size=4,
        check=False,
        scaler=scaler,
    )
    update = both(torch.randn(8, 3, dtype=F64))  # the second optimizer has no gradients: not torn
    assert update.skipped == "the optimizer did not step: SGD.step() did nothing"
    assert scaler is None or scaler.get_scale() == 8.0
    del optimizer.step
    assert both(torch.randn(8, 3, dtype=F64)).made
    assert scaler is None or scaler.get_scale() == 16.0


def with_failing_hook(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay in a hook that fails after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def decay(*_: object) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        raise ValueError("half way")

    optimizer.register_step_pre_hook(decay)
    return optimizer


def with_replaced_step(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with `step` replaced on the instance by a wrapped function that fails."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @functools.wraps(optimizer.step)
    def step(closure: Any = None) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
            raise ValueError("half way")

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


class FailsAfterChange(torch.optim.SGD):
    """SGD that calls `change`, then fails once before its own step."""

    def __init__(self, parameters: Any, change: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.change, self.fails = change, True
        self.box, self.numbers = SimpleNamespace(count=0), [1.0, 2.0]
        self.generator, self.param_groups[0]["scale"] = torch.Generator(), torch.ones(2)

    def step(self, closure: Any = None) -> Any:
        self.change(self)
        if self.fails:
            self.fails = False
            raise ValueError("half way")
        return super().step(closure)


def write_fused(optimizer: FailsAfterChange) -> None:
    """Write a parameter with a kernel that changes no version counter."""
    (parameter, *_) = optimizer.param_groups[0]["params"]
    options: dict[str, Any] = {"weight_decay": 0, "momentum": 0, "lr": 0.1, "dampening": 0}
    kernels: Any = torch
    kernels._fused_sgd_(
        [parameter], [parameter.grad], [], **options, nesterov=False, maximize=False, is_first_step=True
    )


CHANGES: dict[str, Any] = {
    "a fused kernel": write_fused,
    "a tensor of a group": lambda o: o.param_groups[0]["scale"].mul_(2),
    "an object": lambda o: setattr(o.box, "count", o.box.count + 1),
    "a list": lambda o: o.numbers.__setitem__(0, o.numbers[0] + 1.5),
    "a generator": lambda o: torch.rand((), generator=o.generator),
}


OPTIMIZERS: dict[str, Any] = {
    "a hook": with_failing_hook,
    "a replaced step": with_replaced_step,
    **dict.fromkeys(CHANGES),
}


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_failed_step_that_changed_anything_is_torn(make: str) -> None:
    model = nn.Linear(3, 1, dtype=F64)
    optimizer = (
        FailsAfterChange(model.parameters(), CHANGES[make])
        if OPTIMIZERS[make] is None
        else OPTIMIZERS[make](model)
    )
    accumulate, batch = accumulator(model, optimizer), torch.randn(8, 3, dtype=F64)
    with pytest.raises(OptimizerError, match="torn"):
        accumulate(batch)
    with pytest.raises(OptimizerError, match="torn"):
        accumulate(batch)


@pytest.mark.parametrize("large", [False, True])
def test_contents_detect_the_smallest_change_of_a_tensor(large: bool) -> None:
    parameter = nn.Parameter(torch.randn(100_001 if large else 7))
    optimizer = torch.optim.SGD([parameter])
    parameter.data[3] = torch.nan
    before = Contents(optimizer, [parameter])
    assert before.is_unchanged() and not before.parameters_changed()
    parameter.data[-1] = parameter.data[-1].nextafter(torch.tensor(9.0))
    assert not before.is_unchanged() and before.parameters_changed()


class ShardOfTensor(Tensor):
    """Shard of a tensor; each operation on it would all-gather."""

    calls = 0

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        ShardOfTensor.calls += 1
        return NotImplemented


def test_contents_do_not_read_tensor_subclasses() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([parameter])
    optimizer.buffer = torch.ones(2).as_subclass(ShardOfTensor)
    ShardOfTensor.calls = 0
    assert not Contents(optimizer, [parameter]).is_unchanged()
    assert ShardOfTensor.calls == 0


class WarmUp(torch.optim.Optimizer):
    """Wrapper that skips its first two steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.calls = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return self.inner.step() if self.calls > 2 else None


def test_a_wrapper_keeps_its_count_of_skipped_steps() -> None:
    model, batch = nn.Linear(3, 1, dtype=F64), torch.randn(8, 3, dtype=F64)
    accumulate = accumulator(model, WarmUp(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert [accumulate(batch).made for _ in range(4)] == [False, False, True, True]


def test_a_step_with_writes_unseen_by_version_counters_is_made() -> None:
    model, batch = nn.Linear(3, 1, dtype=F64), torch.randn(8, 3, dtype=F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(closure: Any = None) -> None:
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * parameter.grad)  # type: ignore[operator]

    optimizer.step = step  # type: ignore[method-assign, assignment]
    assert accumulator(model, optimizer)(batch).made
    optimizer.unknown = iter([])  # type: ignore[attr-defined]  # an attribute that cannot be read
    assert accumulator(model, optimizer)(batch).made


def test_an_optimizer_may_hold_tensors_in_attributes() -> None:
    model, batch = nn.Linear(3, 1, dtype=F64), torch.randn(8, 3, dtype=F64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.buffer, optimizer.mask = torch.zeros(5), torch.zeros(3).numpy()
    assert accumulator(model, optimizer)(batch).made
