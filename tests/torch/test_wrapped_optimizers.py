"""Optimizers that wrap another one, as in Accelerate, Lightning, Fabric and ZeroRedundancyOptimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from superbatch.errors import OptimizerError
from superbatch.torch import Accumulator
from superbatch.torch.sizes import stand_ins
from superbatch.torch.sizes.predict import predict_peak
from superbatch.torch.sizes.reserve import Reserve
from superbatch.torch.window import wrapped
from superbatch.torch.window.before_step import BeforeStep
from tests import forked
from tests.torch.helpers import assert_same_parameters, large_batch, mlp, mse, rows, start_of

_Base: Any = Optimizer  # Any: subclasses replace its attributes by properties, as libraries do


class ByProperty(_Base):
    """Wrapper as in Accelerate: attributes are properties, and a step may be skipped."""

    def __init__(self, optimizer: Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.gradient_state = SimpleNamespace(sync_gradients=True)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)


class ByDictionary:
    """Wrapper as in Lightning: of a subclass of the inner class, with shared attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        excluded = ("state_dict", "load_state_dict", "step", "zero_grad", "__setstate__")
        self.__dict__ = {name: value for name, value in vars(optimizer).items() if name not in excluded}
        kind = type("Dictionary" + type(optimizer).__name__, (ByDictionary, type(optimizer)), {})
        object.__setattr__(self, "__class__", kind)
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class ByGetattr:
    """Wrapper as in Fabric: of a subclass of the inner class, with delegated attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._strategy = SimpleNamespace(optimizer_step=lambda inner, **given: inner.step(**given))
        kind = type("Getattr" + type(optimizer).__name__, (ByGetattr, type(optimizer)), {})
        object.__setattr__(self, "__class__", kind)

    def step(self, closure: Any = None) -> Any:
        return self._strategy.optimizer_step(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class ByShare(_Base):
    """Wrapper as ZeroRedundancyOptimizer: the inner one has a shard of the parameters, here all."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], {})
        self.optim = optimizer

    def step(self, closure: Any = None) -> None:
        for mine, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update({name: value for name, value in mine.items() if name != "params"})
        self.optim.step()


class Hidden(_Base):
    """Wrapper that hides the inner optimizer in a closure."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._get: Callable[[], Optimizer] = lambda: optimizer

    state = property(lambda self: self._get().state)
    param_groups = property(lambda self: self._get().param_groups)

    def step(self, closure: Any = None) -> None:
        self._get().step()


class History(_Base):
    """Optimizer that stores gradients in lists, in an attribute and in another object."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.seen: list[Tensor] = []
        self.book = SimpleNamespace(sums={})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                past = self.state[parameter].setdefault("past", [])
                past.append(parameter.grad.clone())
                self.seen.append(past[-1])
                self.book.sums[parameter] = past[-1] + self.book.sums.get(parameter, 0)
                parameter.add_(self.book.sums[parameter], alpha=-group["lr"])


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def twice(optimizer: Optimizer) -> Any:
    return ByProperty(ByGetattr(optimizer))  # type: ignore[arg-type]


WRAPPERS: dict[str, Callable[[Optimizer], Any]] = {
    "by property": ByProperty,
    "by dictionary": ByDictionary,
    "by getattr": ByGetattr,
    "by share": ByShare,
    "twice": twice,
    "hidden": Hidden,
}


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor reached through containers and attributes."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type | str):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors_of(key, seen)
            yield from tensors_of(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from tensors_of(each, seen)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from tensors_of(vars(value), seen)


def train(wrap: Callable[[Optimizer], Any], make: Any = adam, size: Any = "largest") -> None:
    model, batches = mlp(), rows(10, 3)
    reference, start = copy.deepcopy(model), start_of(model)
    large_batch(make(reference.parameters()), lambda batch: mse(reference, batch), batches)
    inner = make(model.parameters())
    accumulate = Accumulator(model, wrap(inner), lambda mb: mse(model, mb), microbatch_size=size, check=False)
    assert all(accumulate(batch).made for batch in batches)
    assert_same_parameters(reference, model, 1e-12, start=start)
    found = list(tensors_of(vars(inner)))
    assert len(found) > 4, "premise: there is state"
    assert not any(isinstance(each, FakeTensor) for each in found)
    assert [id(p) for group in inner.param_groups for p in group["params"]] == list(
        map(id, model.parameters())
    )


@pytest.mark.parametrize("size", ["auto", "largest", 3])
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_wrapped_optimizer_makes_the_update(name: str, size: Any) -> None:
    train(WRAPPERS[name], size=size)


@pytest.mark.parametrize("size", ["auto", "largest"])
def test_lists_and_objects_of_an_optimizer_hold_real_tensors(size: str) -> None:
    train(lambda optimizer: optimizer, History, size)


def test_the_wrapped_optimizer_is_found() -> None:
    inner = adam(mlp().parameters())
    other = adam(mlp().parameters())
    inner.partner = other  # type: ignore[attr-defined]  (of other parameters, as in a GAN)
    for name, wrap in WRAPPERS.items():
        wrapper = wrap(inner)
        assert wrapped.leaves_of(wrapper) == ([wrapper] if name == "hidden" else [inner])


def test_the_predicted_peak_is_that_of_the_wrapped_optimizer() -> None:
    model, batch = mlp(), rows(10, 1)[0]

    def peak(wrap: Callable[[Optimizer], Any]) -> Any:
        optimizer = wrap(adam(model.parameters()))
        return predict_peak(lambda mb: mse(model, mb), batch, models=model, optimizers=optimizer)

    expected = peak(lambda optimizer: optimizer)
    assert expected.optimizer_state > 0
    for name, wrap in WRAPPERS.items():
        if name != "hidden":
            assert peak(wrap) == expected, name
    with pytest.raises(RuntimeError, match="The optimizer Hidden has no 'state' of its own"):
        peak(Hidden)


# -- `made` --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["largest", 3])
def test_an_update_is_made_only_if_the_optimizer_stepped(size: Any) -> None:
    model, batches = mlp(), rows(10, 3)
    wrapper = ByProperty(adam(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(wrapper.optimizer, 1)
    accumulate = Accumulator(
        model, wrapper, lambda mb: mse(model, mb), microbatch_size=size, scheduler=schedule, check=False
    )
    assert accumulate(batches[0]).made
    before, rate = start_of(model), schedule.get_last_lr()
    state = copy.deepcopy(wrapper.optimizer.state_dict())
    wrapper.gradient_state.sync_gradients = False
    update = accumulate(batches[1])
    assert not update.made and accumulate.updates == 1
    assert update.skipped == "the optimizer did not step: ByProperty.step() did not step Adam"
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert schedule.get_last_lr() == rate, "the scheduler did not step"
    after = wrapper.optimizer.state_dict()["state"]
    assert all(torch.equal(state["state"][i][k], after[i][k]) for i in after for k in after[i])
    assert all(parameter.grad is None for parameter in model.parameters())
    wrapper.gradient_state.sync_gradients = True
    assert accumulate(batches[1]).made and accumulate.updates == 2


def test_a_step_replaced_by_a_no_op_makes_no_update() -> None:
    model, batch = mlp(), rows(10, 1)[0]
    optimizer = adam(model.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=3, check=False)
    assert accumulate(batch).skipped == "the optimizer did not step: Adam.step() did nothing"


def test_a_hidden_optimizer_that_does_not_step_makes_no_update() -> None:
    class Idle(Hidden):
        def step(self, closure: Any = None) -> None:
            pass

    model, batch = mlp(), rows(10, 1)[0]
    accumulate = Accumulator(
        model, Idle(adam(model.parameters())), lambda mb: mse(model, mb), microbatch_size=3, check=False
    )
    assert accumulate(batch).skipped == "the optimizer did not step: Idle.step() did nothing"


def test_half_of_an_update_raises() -> None:
    model, batch = mlp(), rows(10, 1)[0]
    first, last = ByProperty(adam(model[0].parameters())), adam(model[2].parameters())
    first.gradient_state.sync_gradients = False
    accumulate = Accumulator(model, [first, last], lambda mb: mse(model, mb), microbatch_size=3, check=False)
    with pytest.raises(OptimizerError, match="another optimizer stepped: half of the update was made"):
        accumulate(batch)


def test_a_wrapped_optimizer_with_a_gradient_scaler() -> None:
    model: Any = mlp(torch.float32)
    wrapper = ByProperty(adam(model.parameters()))
    accumulate = Accumulator(
        model,
        wrapper,
        lambda mb: mse(model, mb),
        microbatch_size=3,
        check=False,
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0),  # pyright: ignore[reportPrivateImportUsage]
    )
    batch = rows(10, 1, torch.float32)[0]
    assert accumulate(batch).made
    wrapper.gradient_state.sync_gradients = False
    assert not accumulate(batch).made
    wrapper.gradient_state.sync_gradients = True
    assert accumulate(batch).made


# -- a step that fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_failed_step_of_a_wrapped_optimizer_is_rolled_back(name: str) -> None:
    model, batch = mlp(), rows(10, 1)[0]
    inner = adam(model.parameters())

    def fail(*_: Any) -> None:
        for parameter in model.parameters():
            inner.state[parameter]["step"] = torch.zeros(())
        raise KeyError("no")

    handle = inner.register_step_pre_hook(fail)
    accumulate = Accumulator(
        model, WRAPPERS[name](inner), lambda mb: mse(model, mb), microbatch_size=3, check=False
    )
    before = start_of(model)
    with pytest.raises(KeyError):
        accumulate(batch)
    assert not inner.state, "new state is removed"
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    handle.remove()
    assert accumulate(batch).made


# -- mutants -------------------------------------------------------------------------------------------------


def _shallow_copy(optimizer: Any) -> Any:
    """Copy that shares unknown attributes."""
    made: Any = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    made.state = defaultdict(dict, {key: dict(value) for key, value in optimizer.state.items()})
    return made


def test_mutant_that_ignores_the_wrapped_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (stand_ins, wrapped):
        monkeypatch.setattr(place, "leaves_of", lambda optimizer: [optimizer])
    monkeypatch.setattr(stand_ins, "copy_of", _shallow_copy)
    monkeypatch.setattr(stand_ins, "_restore", lambda holder, contents: None)
    with pytest.raises(Exception):  # noqa: B017  (a wrong update, or an error of fake tensors)
        train(ByProperty)


def test_mutant_that_shares_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_restore", lambda holder, contents: None)
    with pytest.raises(Exception):  # noqa: B017  (as above)
        train(lambda optimizer: optimizer, History)


def test_mutant_that_takes_every_step_as_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeforeStep, "is_unchanged", lambda self, optimizer: False)
    with pytest.raises(AssertionError):
        test_an_update_is_made_only_if_the_optimizer_stepped(3)


def test_memory_is_reserved_for_the_wrapped_optimizer() -> None:
    layer = nn.Linear(1000, 500)
    optimizer = adam(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected = Reserve([layer], [optimizer], []).bytes_of_update()
    assert expected > layer.weight.nbytes
    for wrap in (ByProperty, ByDictionary, ByGetattr, ByShare):
        assert Reserve([layer], [wrap(optimizer)], []).bytes_of_update() == expected  # type: ignore[list-item]
    assert not optimizer.state


# -- real libraries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "library"),
    [
        ("zero 1", "auto", "torch"),
        ("zero 2", "largest", "torch"),
        ("accelerate", "largest", "accelerate"),
        ("fabric", "largest", "lightning.fabric"),
    ],
)
def test_with_the_real_library(name: str, size: str, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    done = forked.run(["-W", "ignore", "-m", "tests.torch.wrapped_peers", name, size])
    assert done.returncode == 0 and "right" in done.stdout, done.stderr[-2000:]
