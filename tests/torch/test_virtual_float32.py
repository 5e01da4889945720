"""Rounding of a virtual batch in float32: at most twice that of the large batch.

The reference is the float64 gradient of the large batch on the same float32 values, so only the arithmetic
differs. Each case has one draw, seeded by its name. Rounding could flip a ReLU or a maximum, but does not in
these draws.

The case "matrix exponential" is not listed: `torch.matrix_exp` rounds more for one matrix than for several
(4e-6 against 3e-7), as the last test shows.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from superbatch.batch import tree
from superbatch.torch import virtual_batch
from tests.torch.coupled.case import Case
from tests.torch.coupled.cases import CASES
from tests.torch.coupled.compare import SEED, Result, gradient_error

EPS = torch.finfo(torch.float32).eps

NAMES = [
    "conv net with BatchNorm",
    "ResNet-20",
    "ResNet-50",
    "MLP with BatchNorm",
    "MLP with LayerNorm",
    "U-Net with BatchNorm",
    "ConvNeXt",
    "MobileNet-like block",
    "DenseNet-like block",
    "LSTM with BatchNorm",
    "GRU with BatchNorm",
    "RNN with BatchNorm",
    "BERT-like classifier",
    "vision transformer, norm last",
    "BatchNorm3d",
    "mean and variance by hand",
    "ghost BatchNorm",
    "whitening by Cholesky",
    "attention over the batch",
    "two towers with InfoNCE",
    "BERT-like pair with InfoNCE",
    "CLIP with a learnt temperature",
    "CLIP with BatchNorm",
    "SimCLR",
    "BatchNorm encoder and head with InfoNCE",
    "both views in one forward",
    "SigLIP",
    "Barlow twins",
    "VICReg",
    "SupCon",
    "SimSiam",
    "BYOL",
    "SwAV",
    "MoCo with BatchNorm",
    "DINO",
    "spectral norm and BatchNorm",
    "running sums over the batch",
    "pairs by broadcasting",
    "in-place residual",
    "checkpoint",
    "WGAN-GP with BatchNorm",
    "energies and forces",
    "cross entropy, mean",
    "multi-head attention, then BatchNorm",
]


def gradient(case: Case, dtype: torch.dtype, microbatch: int | None = None) -> Result:
    """Return the gradient of the large batch, or of a virtual batch."""

    def cast(leaf: Tensor) -> Tensor:
        return leaf.float().to(dtype) if leaf.is_floating_point() else leaf

    model, batch = case.make().float().to(dtype), tree.map_arrays(cast, case.batch())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)  # some models draw negatives or permutations
        if microbatch is None:
            case.loss(model, batch).backward()
        else:
            with virtual_batch(model, microbatch, rng="batch") as virtual:
                case.loss(model, virtual(batch)).backward()
    kinds = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    assert kinds == {dtype}, "premise: all is computed in this precision"
    found = {name: None if p.grad is None else p.grad.double() for name, p in model.named_parameters()}
    return Result(torch.zeros(()), found, {})


@cache
def float64_reference(name: str) -> tuple[Result, float]:
    """Return the float64 gradient, and the float32 error of the large batch."""
    exact = gradient(CASES[name], torch.float64)
    return exact, gradient_error(exact, gradient(CASES[name], torch.float32))


def bound(own: float) -> float:
    return 2 * own + 2 * EPS


@pytest.mark.parametrize("name", NAMES)
def test_float32_error_is_at_most_twice_that_of_the_large_batch(name: str) -> None:
    case = CASES[name]
    assert not case.random, "premise: both batches draw the same numbers"
    exact, own = float64_reference(name)
    assert 0 < own < 1e-3, "premise: float32 rounds, and only rounds"
    errors = {
        size: gradient_error(exact, gradient(case, torch.float32, size)) for size in (1, case.microbatch)
    }
    assert max(errors.values()) <= bound(own), (own, errors)


@pytest.mark.parametrize("name", ["MLP with BatchNorm", "two towers with InfoNCE", "LSTM with BatchNorm"])
def test_rounding_to_20_bits_exceeds_the_bound(name: str) -> None:
    """A gradient with 20 correct bits instead of 24 exceeds the bound."""
    exact, own = float64_reference(name)
    found = gradient(CASES[name], torch.float32, 1)
    rounded = {key: None if g is None else g * (1 + 16 * EPS) for key, g in found.gradients.items()}
    assert gradient_error(exact, Result(found.loss, rounded, {})) > bound(own)


def test_matrix_exp_of_one_matrix_rounds_more_than_of_several() -> None:
    """If torch fixes this, "matrix exponential" can join the list."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(64, 3, 3, generator=generator) * 0.15
    exact = torch.matrix_exp(matrices.double())

    def error(size: int) -> float:
        found = torch.cat([torch.matrix_exp(chunk) for chunk in matrices.split(size)])
        return float((found - exact).abs().max())

    assert error(64) < 1e-6 and error(2) < 1e-6
    assert error(1) > 3e-6
