"""Test case of an operator's batching rule: the operator and its inputs."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.torch.coupled import data

N = -1  # in a shape: the number of samples
Spec = Callable[[int, int], Tensor]  # (n, seed) -> an input


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """Call of a function.

    Attributes:
        name: unique.
        function: called with the inputs; returns a tensor or a tuple of tensors.
        specs: functions that make the inputs. Tests call `inputs`.
        virtual: indices of the inputs with the batch in dimension 0; the others are plain tensors.
        random: the function draws random numbers.
        min_n: least number of samples that the function accepts.
    """

    name: str
    function: Callable[..., Any]
    specs: tuple[Spec, ...]
    virtual: tuple[int, ...]
    random: bool = False
    min_n: int = 1

    def __str__(self) -> str:
        return self.name

    def inputs(self, n: int) -> tuple[Tensor, ...]:
        """Return the inputs for n samples, the same at every call; they require gradients unless integer."""
        assert n >= self.min_n, f"{self.name} needs {self.min_n} samples"
        seed = zlib.crc32(self.name.encode()) % 10_000
        made = [spec(n, seed + index) for index, spec in enumerate(self.specs)]
        return tuple(x.requires_grad_(x.is_floating_point() or x.is_complex()) for x in made)


def call(case: OperatorCase, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor | None]:
    """Call the function.

    Args:
        case: the case.
        inputs: from `case.inputs`, or virtual tensors in their place.

    Returns:
        The outputs, and a scalar to run backward from that weights every element of each output differently;
        None if no output requires a gradient.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        found = case.function(*inputs)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    terms = []
    for index, out in enumerate(outputs):
        if out.requires_grad:
            weights = data.normal(*out.shape, seed=100 + index)
            terms.append((out * weights).sum() if not out.is_complex() else (out.abs() * weights).sum())
    return outputs, torch.stack(terms).sum() if terms else None


def real(*shape: int) -> Spec:
    """Normal random numbers; `N` in the shape stands for the number of samples."""
    return lambda n, seed: data.normal(*_sized(shape, n), seed=seed)


def positive(*shape: int) -> Spec:
    return lambda n, seed: data.normal(*_sized(shape, n), seed=seed).abs() + 0.3


def unit(*shape: int) -> Spec:
    """Numbers strictly between -1 and 1."""
    return lambda n, seed: data.normal(*_sized(shape, n), seed=seed).tanh() * 0.95


def ints(high: int, *shape: int, low: int = 0) -> Spec:
    return lambda n, seed: data.integers(high, *_sized(shape, n), seed=seed, low=low)


def boolean(*shape: int) -> Spec:
    return lambda n, seed: data.integers(2, *_sized(shape, n), seed=seed).bool()


def complex_numbers(*shape: int) -> Spec:
    def make(n: int, seed: int) -> Tensor:
        sized = _sized(shape, n)
        return torch.complex(data.normal(*sized, seed=seed), data.normal(*sized, seed=seed + 5000))

    return make


def definite(*shape: int) -> Spec:
    """Symmetric positive definite matrices; `shape` omits the last dimension."""

    def make(n: int, seed: int) -> Tensor:
        a = data.normal(*_sized((*shape, shape[-1]), n), seed=seed)
        return a @ a.mT + torch.eye(shape[-1], dtype=a.dtype)

    return make


def order(n: int, seed: int) -> Tensor:
    """Permutation of the samples: one index tensor for the batch, not one index per sample."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def _sized(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(n if size == N else size for size in shape)


def operator(
    name: str,
    function: Callable[..., Any],
    *specs: Spec,
    plain: tuple[int, ...] = (),
    random: bool = False,
    min_n: int = 1,
) -> OperatorCase:
    """Make a case. All inputs with `N` first carry the batch, except those in `plain`."""
    batched = [index for index, spec in enumerate(specs) if _batch_first(spec) and index not in plain]
    return OperatorCase(
        name=name, function=function, specs=specs, virtual=tuple(batched), random=random, min_n=min_n
    )


def _batch_first(spec: Spec) -> bool:
    """Return True if the first dimension is the number of samples."""
    small, large = spec(13, 0).shape, spec(17, 0).shape
    return (small[:1], large[:1]) == ((13,), (17,))
