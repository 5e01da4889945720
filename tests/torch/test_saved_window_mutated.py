"""A saved window that was changed raises without any change of state, or gives the same update."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch import NoiseMeter
from superbatch.errors import InputError, SuperbatchError, WindowError
from superbatch.torch import Accumulator
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import GhostBatchNorm
from superbatch.torch.window import saved_checks

F64 = torch.float64
DELETED: Any = object()
MODES: dict[str, dict[str, Any]] = {
    "grad": {},
    "noise": {"observers": [NoiseMeter()]},
    "momentum": {"gradient_sum": "momentum"},
    "terms": {"weight": {"a": None, "b": None}},
    "norms": {"participants": [GhostBatchNorm()]},
}
Run = tuple[nn.Sequential, Any, Accumulator, Any]


def run(mode: str) -> Run:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(4, dtype=F64)] if mode == "norms" else []
    model = nn.Sequential(nn.Linear(3, 4, dtype=F64), *norm, nn.Tanh(), nn.Linear(4, 1, dtype=F64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(x: Tensor) -> Any:
        out = model(x)
        return {"a": out.square().mean(), "b": out.abs().mean()} if mode == "terms" else out.square().mean()

    options: Any = {"microbatch_size": 2, "check": False, **MODES[mode]}
    return model, optimizer, Accumulator(model, optimizer, loss_fn, **options), loss_fn


def batch(seed: int) -> Tensor:
    return torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(seed))


def saved(mode: str) -> tuple[list[Any], list[Tensor]]:
    """Return the states after two of four micro-batches, and the parameters after the window."""
    model, optimizer, accumulate, loss_fn = run(mode)
    accumulate(batch(0))
    states: list[Any] = []
    with accumulate.window(batch(1)) as window:
        for index, microbatch in enumerate(window):
            window.backward(loss_fn(microbatch))
            if index == 1:
                states = deepcopy([each.state_dict() for each in (model, optimizer, accumulate)])
    return states, [parameter.detach().clone() for parameter in model.parameters()]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list | tuple):
        keys = list(value) if isinstance(value, dict) else range(min(len(value), 2))
        for key in keys:
            yield from paths(value[key], (*path, key))


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    key, *rest = path
    if isinstance(value, tuple):
        return tuple(replace_at(list(value), path, new))
    if rest:
        value[key] = replace_at(value[key], tuple(rest), new)
    elif new is DELETED:
        del value[key]
    else:
        value[key] = new
    return value


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutations(value: Any) -> list[Any]:
    plain = [DELETED, None, "x", -3, 10**6, float("nan"), [], {}, torch.zeros(()), {1}, 1.5, True]
    if not isinstance(value, Tensor):
        return plain
    wrong = [torch.zeros(7), value.to(torch.int32), value.to("meta"), torch.ones(3, 3).to_sparse()]
    return [*plain, *wrong, *([value.double().float(), value.half()] if value.is_floating_point() else [])]


def outcome(mode: str, states: list[Any], state: Any, expected: list[Tensor]) -> str:
    model, optimizer, accumulate, _ = run(mode)
    model.load_state_dict(deepcopy(states[0]))
    optimizer.load_state_dict(deepcopy(states[1]))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        accumulate.load_state_dict(state)
        accumulate(batch(1))
    except SuperbatchError:
        return "refused" if all(map(torch.equal, before, model.parameters())) else "torn"
    except Exception as error:  # noqa: BLE001  (any other is a failure of the test)
        return f"{type(error).__name__}: {error}"
    return "same" if all(map(torch.equal, expected, model.parameters())) else "another update"


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("mode", MODES)
def test_a_changed_window_is_refused_or_changes_nothing(mode: str, stride: int) -> None:
    """Make every change of every entry; by default every fifth of them."""
    states, expected = saved(mode)
    assert outcome(mode, states, deepcopy(states[2]), expected) == "same", "premise: it can be resumed"
    found: dict[str, list[Any]] = {}
    changes = [
        (path, new)
        for path in paths(states[2])
        if path != ("window",) and path[0] != "digest"  # without a window, there is nothing to resume
        for new in mutations(value_at(states[2], path))
    ]
    for path, new in changes[::stride]:
        state = replace_at(deepcopy(states[2]), path, new)
        found.setdefault(outcome(mode, states, state, expected), []).append((path, new))
    assert set(found) <= {"refused", "same"}, {
        kind: cases[:5] for kind, cases in found.items() if len(kind) > 7
    }
    assert len(found["refused"]) > 300 / stride, "premise: most are detected"


def test_without_the_digest_lost_losses_are_not_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: each entry is valid, but together they are not the saved window."""
    states, expected = saved("grad")
    state = replace_at(deepcopy(states[2]), ("window", "losses"), {})
    assert outcome("grad", states, deepcopy(state), expected) == "refused"
    monkeypatch.setattr(saved_checks, "digest_of", lambda state: state["digest"])
    assert outcome("grad", states, state, expected) == "another update"


def test_the_error_says_that_the_window_was_changed() -> None:
    states, _ = saved("grad")
    model, _, accumulate, _ = run("grad")
    model.load_state_dict(states[0])
    accumulate.load_state_dict(replace_at(states[2], ("window", "pending_factor"), 0.5))
    with pytest.raises(WindowError, match="changed after it was saved"):
        accumulate(batch(1))


def test_masters_of_another_type_are_refused() -> None:
    model = nn.Linear(2, 1).bfloat16()
    masters = fp32_masters(model)
    optimizer = torch.optim.SGD(masters.values(), lr=0.1)
    accumulate = Accumulator(model, MasterWeights(optimizer, masters), lambda x: model(x).mean())
    state = accumulate.state_dict()
    rounded = {name: master.bfloat16() for name, master in state["masters"].items()}
    with pytest.raises(InputError, match="a conversion rounds it"):
        accumulate.load_state_dict({**state, "masters": rounded})
