"""Optimizers that wrap another, as Accelerate's, Lightning's, Fabric's and ZeroRedundancyOptimizer do."""

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

_Base: Any = Optimizer  # whose attributes are properties of what is wrapped, as the libraries do


class ByProperty(_Base):
    """As Accelerate's: everything is a property of the inner one, and a step may be left out."""

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
    """As Lightning's: of the class of the inner one, whose attributes it shares."""

    def __init__(self, optimizer: Optimizer) -> None:
        left_out = ("state_dict", "load_state_dict", "step", "zero_grad", "__setstate__")
        self.__dict__ = {name: value for name, value in vars(optimizer).items() if name not in left_out}
        kind = type("Dictionary" + type(optimizer).__name__, (ByDictionary, type(optimizer)), {})
        object.__setattr__(self, "__class__", kind)
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class ByGetattr:
    """As Fabric's: of the class of the inner one, which it asks for every attribute."""

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
    """As ZeroRedundancyOptimizer: the inner one has a share of the parameters, here all of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], {})
        self.optim = optimizer

    def step(self, closure: Any = None) -> None:
        for mine, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update({name: value for name, value in mine.items() if name != "params"})
        self.optim.step()


class Hidden(_Base):
    """Keeps the inner one where nobody finds it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._get: Callable[[], Optimizer] = lambda: optimizer

    state = property(lambda self: self._get().state)
    param_groups = property(lambda self: self._get().param_groups)

    def step(self, closure: Any = None) -> None:
        self._get().step()


class History(_Base):
    """Keeps what it has seen in lists, in an attribute and in an object of its own."""

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
    """Every tensor that is reached through containers and attributes."""
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
def test_the_update_is_made_by_the_optimizer_inside(name: str, size: Any) -> None:
    train(WRAPPERS[name], size=size)


@pytest.mark.parametrize("size", ["auto", "largest"])
def test_lists_and_objects_of_an_optimizer_stay_real(size: str) -> None:
    train(lambda optimizer: optimizer, History, size)


def test_what_is_inside_is_found() -> None:
    inner = adam(mlp().parameters())
    other = adam(mlp().parameters())
    inner.partner = other  # type: ignore[attr-defined]  (a GAN's, say: of other parameters)
    for name, wrap in WRAPPERS.items():
        wrapper = wrap(inner)
        assert wrapped.leaves_of(wrapper) == ([wrapper] if name == "hidden" else [inner])


def test_the_prediction_is_that_for_the_optimizer_inside() -> None:
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
    assert schedule.get_last_lr() == rate, "a scheduler counts updates"
    after = wrapper.optimizer.state_dict()["state"]
    assert all(torch.equal(state["state"][i][k], after[i][k]) for i in after for k in after[i])
    assert all(parameter.grad is None for parameter in model.parameters())
    wrapper.gradient_state.sync_gradients = True
    assert accumulate(batches[1]).made and accumulate.updates == 2


def test_a_step_that_is_replaced_by_nothing() -> None:
    model, batch = mlp(), rows(10, 1)[0]
    optimizer = adam(model.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=3, check=False)
    assert accumulate(batch).skipped == "the optimizer did not step: Adam.step() did nothing"


def test_a_hidden_one_that_does_not_step() -> None:
    class Idle(Hidden):
        def step(self, closure: Any = None) -> None:
            pass

    model, batch = mlp(), rows(10, 1)[0]
    accumulate = Accumulator(
        model, Idle(adam(model.parameters())), lambda mb: mse(model, mb), microbatch_size=3, check=False
    )
    assert accumulate(batch).skipped == "the optimizer did not step: Idle.step() did nothing"


def test_half_of_an_update_is_an_error() -> None:
    model, batch = mlp(), rows(10, 1)[0]
    first, last = ByProperty(adam(model[0].parameters())), adam(model[2].parameters())
    first.gradient_state.sync_gradients = False
    accumulate = Accumulator(model, [first, last], lambda mb: mse(model, mb), microbatch_size=3, check=False)
    with pytest.raises(OptimizerError, match="another optimizer stepped: half of the update was made"):
        accumulate(batch)


def test_with_a_scaler() -> None:
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
def test_a_step_that_fails_is_seen_through_a_wrapper(name: str) -> None:
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
    assert not inner.state, "new states are taken away again"
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    handle.remove()
    assert accumulate(batch).made


# -- mutants -------------------------------------------------------------------------------------------------


def _copied_as_before(optimizer: Any) -> Any:
    """The copy that shares what it does not know."""
    made: Any = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    made.state = defaultdict(dict, {key: dict(value) for key, value in optimizer.state.items()})
    return made


def test_a_mutant_that_does_not_look_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (stand_ins, wrapped):
        monkeypatch.setattr(place, "leaves_of", lambda optimizer: [optimizer])
    monkeypatch.setattr(stand_ins, "copy_of", _copied_as_before)
    monkeypatch.setattr(stand_ins, "_restore", lambda holder, contents: None)
    with pytest.raises(Exception):  # noqa: B017  (the update, or what is made with fake tensors)
        train(ByProperty)


def test_a_mutant_that_shares_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_restore", lambda holder, contents: None)
    with pytest.raises(Exception):  # noqa: B017  (as above)
        train(lambda optimizer: optimizer, History)


def test_a_mutant_that_believes_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeforeStep, "is_unchanged", lambda self, optimizer: False)
    with pytest.raises(AssertionError):
        test_an_update_is_made_only_if_the_optimizer_stepped(3)


def test_memory_is_made_sure_of_for_the_optimizer_inside() -> None:
    layer = nn.Linear(1000, 500)
    optimizer = adam(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected = Reserve([layer], [optimizer], []).bytes_of_update()
    assert expected > layer.weight.nbytes
    for wrap in (ByProperty, ByDictionary, ByGetattr, ByShare):
        assert Reserve([layer], [wrap(optimizer)], []).bytes_of_update() == expected  # type: ignore[list-item]
    assert not optimizer.state


# -- the libraries themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "library"),
    [
        ("zero 1", "auto", "torch"),
        ("zero 2", "largest", "torch"),
        ("accelerate", "largest", "accelerate"),
        ("fabric", "largest", "lightning.fabric"),
    ],
)
def test_with_the_library_itself(name: str, size: str, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    done = forked.run(["-W", "ignore", "-m", "tests.torch.wrapped_peers", name, size])
    assert done.returncode == 0 and "right" in done.stdout, done.stderr[-2000:]
