"""Devices by index, generators of all devices, caches of all devices: with stand-ins for accelerators."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from superbatch.errors import InputError
from superbatch.torch import Accumulator, devices, virtual_batch
from superbatch.torch.memory.out_of_memory import release_caches
from superbatch.torch.virtual import options as virtual_options
from superbatch.torch.virtual.trace import randomness
from superbatch.torch.window import options


class FakeModule:
    """A module of torch for a kind of device, with one generator of the CPU for each of its devices."""

    def __init__(self, count: int = 2) -> None:
        self.default_generators = tuple(torch.Generator().manual_seed(i) for i in range(count))
        self.emptied = 0

    def current_device(self) -> int:
        return 1

    def _of(self, device: Any) -> torch.Generator:
        index = torch.device(device).index
        return self.default_generators[0 if index is None else index]

    def get_rng_state(self, device: Any) -> torch.Tensor:
        return self._of(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any) -> None:
        self._of(device).set_state(state)

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Tensors on `meta` belong to a kind of device with generators and a cache."""
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    return module


class TwoDevices(nn.Module):
    """The first parameter on the CPU, another on an accelerator (one that computes nothing here)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 1)
        self.second = nn.Linear(3, 1, device="meta").requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def _fail_in_second(model: nn.Module, fake: FakeModule) -> Any:
    calls: list[int] = []

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand((), generator=fake.default_generators[0])  # as a dropout on that device does
        calls.append(len(x))
        if len(calls) == 2:
            raise KeyError("user code")
        return model(x).square().mean()

    return loss_fn


def _left_after_failure(fake: FakeModule) -> bool:
    """Whether a failed window has moved the accelerator's generator."""
    model = TwoDevices()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    loss_fn = _fail_in_second(model, fake)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=2, check=False, device=None)
    before = fake.default_generators[0].get_state()
    with pytest.raises(KeyError):
        accumulate(torch.randn(4, 3))
    return not torch.equal(before, fake.default_generators[0].get_state())


def test_a_failed_window_restores_the_generators_of_all_devices(fake: FakeModule) -> None:
    assert not _left_after_failure(fake)


def test_mutant_restores_only_where_microbatches_are_moved(
    fake: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superbatch.torch.window.build.accelerators", lambda *_: [])
    assert _left_after_failure(fake)


def test_caches_of_each_kind_of_device_are_emptied_once(fake: FakeModule) -> None:
    release_caches(torch.device("cpu"))
    assert fake.emptied == 0
    release_caches(torch.device("cpu"), torch.device("meta"), torch.device("meta"))
    assert fake.emptied == 1


def test_out_of_memory_empties_the_caches_of_all_parameters(fake: FakeModule) -> None:
    model = TwoDevices()
    calls: list[int] = []

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x).square().mean()

    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=4, check=False, device=None)
    with pytest.warns(UserWarning, match="memory ran out"):
        update = accumulate(torch.randn(4, 3))
    assert update.made
    assert calls == [4, 2, 2]
    assert fake.emptied == 1


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_generator_is_that_of_the_index(kind: str, fake: FakeModule) -> None:
    first, second = fake.default_generators
    assert devices.generator_of(torch.device(kind, 0)) is first
    assert devices.generator_of(torch.device(kind, 1)) is second
    assert devices.generator_of(torch.device(kind)) is second, "the current device, not device 0"


def test_a_device_with_functions_alone_is_seeded_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()
    module = SimpleNamespace(
        get_rng_state=lambda device: generator.get_state(),
        set_rng_state=lambda state, device: generator.set_state(state),
        manual_seed=generator.manual_seed,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    before, drawn = generator.get_state(), []
    for _ in range(2):
        with devices.seeded(torch.device("mps"), 5):
            drawn.append(float(torch.rand((), generator=generator)))
    assert drawn[0] == drawn[1]
    assert torch.equal(before, generator.get_state())


def test_a_device_without_a_generator_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="no random generator"):
        devices.generator_of(torch.device("meta"))


def test_sweeps_seed_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sweep over a dropout seeds the generator that the dropout draws from."""
    seen: list[torch.device] = []
    real = randomness.seeded

    def recorded(device: torch.device, seed: int) -> Any:
        seen.append(device)
        return real(device, seed)

    monkeypatch.setattr(randomness, "seeded", recorded)
    model = nn.Linear(3, 2)
    with virtual_batch(model, 2) as batch:
        hidden = F.dropout(model(batch(torch.randn(6, 3))), 0.5)
        ((hidden - hidden.mean(0)) ** 2).mean().backward()
    assert len(seen) >= 3
    assert set(seen) == {torch.device("cpu")}


def _indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(*size: Any, device: Any = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            return SimpleNamespace(device=torch.device("cuda", 3))
        return real(*size, device=device, **options)

    monkeypatch.setattr(torch, "empty", empty)


def test_cuda_is_resolved_once_to_the_current_index(monkeypatch: pytest.MonkeyPatch) -> None:
    _indexed(monkeypatch)
    assert virtual_options.checked_device("cuda", []) == torch.device("cuda", 3)
    assert options.as_device("cuda", []) == torch.device("cuda", 3)
    assert options.as_device("cuda:1", []) == torch.device("cuda", 1)
    assert options.as_device("cpu", []) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="not a device of torch on this machine"):
        options.as_device("cuda", [])
