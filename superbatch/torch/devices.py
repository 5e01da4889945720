"""Helpers for devices: their index, their random generators, their dtypes, and tensors grouped by device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import fastpaths


def resolved(device: torch.device) -> torch.device:
    """Return a device with its index: ``"cuda"`` becomes the current device, such as ``"cuda:0"``.

    Tensors, autograd and generators name a device with its index, and
    ``torch.device("cuda") != torch.device("cuda:0")``.

    Raises:
        RuntimeError, AssertionError: this build of torch, or this machine, has no such device.

    Examples:
        >>> resolved(torch.device("cuda:1")), resolved(torch.device("cpu"))
        (device(type='cuda', index=1), device(type='cpu'))
    """
    # An empty tensor has the index of the current device, and takes no memory.
    return device if device.index is not None else torch.empty(0, device=device).device


def accelerators(models: Iterable[nn.Module], *others: Tensor | torch.device | None) -> list[torch.device]:
    """Return the devices of these models' parameters and buffers, and of `others`, without the CPU.

    Examples:
        >>> accelerators([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])
        [device(type='meta')]
    """
    # Buffers too, because a model without parameters may still draw random numbers on its device.
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    named = (one.device if isinstance(one, Tensor) else one for one in others if one is not None)
    # dict.fromkeys keeps the order, so that saved states list devices as the models have them.
    found = dict.fromkeys((*(tensor.device for tensor in tensors), *named))
    return [device for device in found if device.type != "cpu"]


def generator_states(devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """Return the state of each device's default generator, by the device's name.

    The CPU is left out, and so are devices without a generator (``meta``).

    Examples:
        >>> generator_states([torch.device("cpu"), torch.device("meta")])
        {}
    """
    states: dict[str, Tensor] = {}
    for device in devices:
        module = None if device.type == "cpu" else module_of(device)
        # meta has no generator, and mps has one in its own module.
        state_of = getattr(module, "get_rng_state", None)
        if state_of is not None:
            states[str(device)] = state_of(device)
    return states


def module_of(device: torch.device) -> Any:
    """Return torch's module for a kind of device, such as `torch.cuda`; None if it has none.

    Examples:
        >>> module_of(torch.device("meta")) is None, module_of(torch.device("cuda:1")) is torch.cuda
        (True, True)
    """
    try:
        return torch.get_device_module(device)
    except RuntimeError:  # meta has none
        return None


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed a device's default generator with an int below 2**63 during the block, then restore its state.

    Examples:
        >>> draws = []
        >>> for _ in range(2):
        ...     with seeded(torch.device("cpu"), 7):
        ...         draws.append(float(torch.rand(())))
        >>> draws[0] == draws[1]
        True
    """
    # Only the default generator: operators with generator= use the user's own.
    generator = generator_of(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def generator_of(device: torch.device) -> Any:
    """Return the generator that a device's random operators draw from.

    Args:
        device: a device; without an index it is the current device of its kind.

    Returns:
        A `torch.Generator`. For devices such as MPS, an object with ``get_state``, ``set_state`` and
        ``manual_seed``.

    Raises:
        NotImplementedError: torch has no generator for that device.

    Examples:
        >>> generator_of(torch.device("cpu")) is torch.default_generator
        True
    """
    if device.type == "cpu":
        return torch.default_generator
    module = module_of(device)
    if not hasattr(module, "get_rng_state"):
        raise NotImplementedError(f"torch has no random generator for the device {device}")
    generators = getattr(module, "default_generators", ())  # empty before the first use of the device
    if generators:
        # CUDA keeps one generator for each index.
        return generators[module.current_device() if device.index is None else device.index]
    return _ByModule(module, device)


class _ByModule:
    """The generator of a device, such as MPS, that torch controls by functions of the device's module."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device

    def get_state(self) -> Tensor:
        return self._module.get_rng_state(self._device)

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self._device)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups of one device and one dtype, so that one kernel can process a group.

    Examples:
        >>> [len(group) for group in alike([torch.ones(1), torch.ones(2).half(), torch.ones(3)])]
        [2, 1]
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        # foreach kernels take lists of one device and one dtype.
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def copy_alike(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shape, dtype and device, by one kernel per device and dtype.

    Examples:
        >>> targets = [torch.zeros(1), torch.zeros(2)]
        >>> copy_alike(targets, [torch.ones(1), torch.ones(2)])
        >>> targets[1]
        tensor([1., 1.])
    """
    # Both lists have the same devices and dtypes in the same order, so their groups correspond.
    for to, source in zip(alike(targets), alike(sources), strict=True):
        fastpaths.copy(to, source)


# Types of devices without float64 tensors: Metal has no double precision.
NO_FLOAT64 = {"mps"}


def has_float64(device: torch.device) -> bool:
    """Return whether float64 tensors can be made on a device.

    Examples:
        >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
        (True, False)
    """
    return device.type not in NO_FLOAT64


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 (complex128): on its own device, or on the CPU if its device has no float64.

    Examples:
        >>> in_float64(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float64
    """
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return where_float64_is(tensor).to(dtype)


def where_float64_is(tensor: Tensor) -> Tensor:
    """Return a tensor itself, or its copy on the CPU if its device has no float64.

    Examples:
        >>> tensor = torch.ones(2)
        >>> where_float64_is(tensor) is tensor
        True
    """
    return tensor if has_float64(tensor.device) else tensor.cpu()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same memory; any other tensor itself.

    Operations on a DTensor may communicate, and raise for DTensors of two meshes in one call.

    Examples:
        >>> local_part(torch.ones(2))
        tensor([1., 1.])
    """
    part: Any = tensor
    return part.to_local() if hasattr(part, "to_local") else tensor
