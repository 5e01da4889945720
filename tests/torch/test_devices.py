"""Device indices, and generators and caches of all devices, with stand-ins for accelerators."""

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
    """Stand-in for a device module such as `torch.cuda`, with one CPU generator per device."""

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
    """Replace the device module of every device type, including `meta`, by a stand-in."""
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    return module


class TwoDevices(nn.Module):
    """One layer on the CPU, and an unused one on a stand-in for an accelerator."""

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


def _changes_generator_in_failure(fake: FakeModule) -> bool:
    """Return whether a failed window changes the accelerator's generator."""
    model = TwoDevices()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    loss_fn = _fail_in_second(model, fake)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=2, check=False, device=None)
    before = fake.default_generators[0].get_state()
    with pytest.raises(KeyError):
        accumulate(torch.randn(4, 3))
    return not torch.equal(before, fake.default_generators[0].get_state())


def test_a_failed_window_restores_the_generators_of_all_devices(fake: FakeModule) -> None:
    assert not _changes_generator_in_failure(fake)


def test_mutant_that_restores_only_the_device_of_microbatches(
    fake: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superbatch.torch.window.build.accelerators", lambda *_: [])
    assert _changes_generator_in_failure(fake)


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
def test_each_device_index_has_its_own_generator(kind: str, fake: FakeModule) -> None:
    first, second = fake.default_generators
    assert devices.generator_of(torch.device(kind, 0)) is first
    assert devices.generator_of(torch.device(kind, 1)) is second
    assert devices.generator_of(torch.device(kind)) is second, "the current device, not device 0"


def test_a_device_without_generator_objects_is_seeded_by_functions(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_device_without_a_generator_raises() -> None:
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


def _make_cuda_3_current(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(*size: Any, device: Any = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            return SimpleNamespace(device=torch.device("cuda", 3))
        return real(*size, device=device, **options)

    monkeypatch.setattr(torch, "empty", empty)


def test_cuda_is_resolved_once_to_the_current_index(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_cuda_3_current(monkeypatch)
    assert virtual_options.checked_device("cuda", []) == torch.device("cuda", 3)
    assert options.as_device("cuda", []) == torch.device("cuda", 3)
    assert options.as_device("cuda:1", []) == torch.device("cuda", 1)
    assert options.as_device("cpu", []) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_device_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="not a device of torch on this machine"):
        options.as_device("cuda", [])
