"""Encoders, losses and batches for `cached_gradients`, and its comparison with the large batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.torch.gradcache.cached import cached_gradients

F64 = torch.float64
Encode = Callable[..., Any]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def tower(inputs: int = 6, size: int = 4, *, seed: int = 3, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(inputs, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, size)]
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers).to(F64)


class Pair(nn.Module):
    """CLIP-like pair of two towers with a learnt temperature."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = tower(6, seed=3, dropout=dropout)
        self.text = tower(5, seed=4, dropout=dropout)
        self.logit_scale = nn.Parameter(torch.tensor(1.2, dtype=F64))

    def encode(self, batch: Any) -> dict[str, Tensor]:
        return {"image": self.image(batch["image"]), "text": self.text(batch["text"])}

    def loss(self, z: Mapping[str, Tensor]) -> Tensor:
        return info_nce(z["image"], z["text"], self.logit_scale.exp())


def pairs(samples: int, *, seed: int = 5) -> dict[str, Tensor]:
    return {"image": normal(samples, 6, seed=seed), "text": normal(samples, 5, seed=seed + 1)}


def info_nce(a: Tensor, b: Tensor, scale: Tensor | float = 5.0) -> Tensor:
    """Symmetric InfoNCE: row i of `b` is the positive of row i of `a`; further rows are hard negatives."""
    logits = scale * nn.functional.normalize(a, dim=-1) @ nn.functional.normalize(b, dim=-1).T
    target = torch.arange(len(a))
    return (
        nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T[: len(a)], target)
    ) / 2


def gradients(*models: nn.Module) -> dict[str, Tensor | None]:
    """Return gradients by name."""
    return {
        f"{number}.{name}": None if parameter.grad is None else parameter.grad.detach().clone()
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def assert_same_gradients(
    expected: Mapping[str, Tensor | None],
    actual: Mapping[str, Tensor | None],
    tolerance: float = 1e-12,
    *,
    zero: Sequence[str] = (),
) -> None:
    """Fail with a list of all differences, relative to each parameter's own gradient.

    Args:
        expected: gradients of the large batch; each must be nonzero, except those in `zero`.
        actual: gradients under test.
        tolerance: largest relative error in the 2-norm.
        zero: names whose gradients are missing or zero in both.
    """
    assert expected.keys() == actual.keys() and expected
    failures = []
    for name, one in expected.items():
        other = actual[name]
        if name in zero:
            assert one is None or not one.any(), f"premise: {name} has a gradient"
            if (one is None) != (other is None) or (other is not None and other.any()):
                failures.append(f"{name}: {one} != {other}")
            continue
        assert one is not None, f"premise: {name} has no gradient"
        if other is None:
            failures.append(f"{name}: no gradient")
            continue
        assert one.is_sparse == other.is_sparse
        one, other = one.to_dense().double(), other.to_dense().double()
        size = float(one.norm())
        assert size > 1e-8, f"premise: the gradient of {name} is zero"
        error = float((other - one).norm()) / size
        if not error <= tolerance:
            failures.append(f"{name}: relative error {error:.2e} > {tolerance:.0e}")
    assert not failures, "not the gradient of the large batch:\n" + "\n".join(failures)


def check(
    models: Sequence[nn.Module],
    encode: Encode,
    loss: Encode,
    batch: Any,
    microbatch_size: Any,
    *,
    tolerance: float = 1e-12,
    zero: Sequence[str] = (),
    **options: Any,
) -> Tensor:
    """Compare `cached_gradients` with the large batch: loss, gradients, buffers, random state.

    Args:
        models: copied for the large batch.
        encode: maps models and a micro-batch to embeddings.
        loss: maps models and all embeddings to the loss.
        batch: the whole batch.
        microbatch_size: of `cached_gradients`.
        tolerance, zero: as `assert_same_gradients`.
        options: of `cached_gradients`.
    """
    references = copy.deepcopy(list(models))  # in one call, so that shared tensors stay shared
    state = torch.get_rng_state()
    expected = loss(references, encode(references, batch))
    expected.backward()
    if "models" not in options:
        options["models"] = list(models)
    torch.set_rng_state(state)
    actual = cached_gradients(
        lambda microbatch: encode(models, microbatch),
        lambda z: loss(models, z),
        batch,
        microbatch_size,
        **options,
    )
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected.detach(), rtol=tolerance, atol=0)
    assert_same_gradients(gradients(*references), gradients(*models), tolerance, zero=zero)
    for reference, model in zip(references, models, strict=True):
        for (name, one), other in zip(reference.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(other, one, rtol=tolerance, atol=0, msg=name)
    return actual
