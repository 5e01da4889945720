"""Differences that rounding explains: by dtype, by the precision of float32 products, and as measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from superbatch.batch.tree import count_samples
from superbatch.torch.devices import accelerators, generator_states

from ..measure import Measured, Setting, largest, whole
from .resample import select

# Two relative differences: the usual rounding of a correct accumulation, and the upper bound of rounding. The
# bound applies if the large batch's own gradient is that inexact, e.g. because of activations near a kink.
ROUNDING = {torch.float32: (1e-5, 1e-2), torch.bfloat16: (3e-2, 0.3), torch.float16: (5e-3, 0.1)}
_TF32 = (2e-3, 1e-2)  # products of numbers with 10 bits; the kernel depends on the batch size
_EIGHT_BITS = (0.25, 0.8)  # floats with a mantissa of two or three bits
_TIMES = 8  # factor on the measured floor, because two passes do not show the largest difference


def rounding_of(dtype: torch.dtype, model: nn.Module) -> tuple[float, float]:
    """Return the relative difference of a correct accumulation, and the largest that counts as rounding.

    Args:
        dtype: dtype that the model computes in.
        model: model whose float32 products may run in TF32.

    Examples:
        >>> rounding_of(torch.float32, nn.Linear(1, 1)), rounding_of(torch.float8_e5m2, nn.Linear(1, 1))
        ((1e-05, 0.01), (0.25, 0.8))
    """
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return _EIGHT_BITS
    if dtype == torch.float32 and any(device.type == "cuda" for device in accelerators([model])):
        return _TF32 if products_in_tf32(model) else ROUNDING[dtype]
    return ROUNDING.get(dtype, ROUNDING[torch.float32])


def products_in_tf32(model: nn.Module) -> bool:
    """Return whether CUDA may round factors to 10 bits (TF32): in cuDNN by default, in matmul if enabled.

    Examples:
        >>> products_in_tf32(nn.Linear(1, 1)), products_in_tf32(nn.Conv1d(1, 1, 1))
        (False, True)
    """
    cudnn = torch.backends.cudnn
    by_cudnn = any(isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase) for module in model.modules())
    settings: list[Callable[[], Any]] = [lambda: torch.backends.cuda.matmul.allow_tf32]
    settings += [lambda: cudnn.allow_tf32] if by_cudnn else []
    return any(map(_is_on, settings))


def _is_on(setting: Callable[[], Any]) -> bool:
    try:
        return bool(setting())
    except RuntimeError:  # raised if it was set by torch's newer interface, so it may be on
        return True


def measured_floor(setting: Setting, reference: Measured) -> float:
    """Return eight times the difference between `reference` and repeated gradients of the large batch.

    The gradient is computed again, which shows kernels that add in a random order. If the loss draws no
    random numbers, it is also computed with the samples reversed, which shows the effect of the order of
    summation.
    """
    setting.begin()
    before = _states(setting)
    again = whole(setting)
    drawn = any(not torch.equal(state, before[name]) for name, state in _states(setting).items())
    floor = largest(again, reference)
    problem = setting.problem
    if not drawn:
        paths = problem.paths
        order = list(reversed(range(count_samples(setting.batch, **paths))))
        turned = setting.but(batch=select(setting.batch, order, **paths))
        floor = max(floor, largest(whole(turned), reference))
    return _TIMES * floor if floor == floor else 0.0  # a NaN is not rounding


def _states(setting: Setting) -> dict[str, Any]:
    devices = accelerators([setting.problem.model])
    return {"cpu": torch.get_rng_state(), **generator_states(devices)}
