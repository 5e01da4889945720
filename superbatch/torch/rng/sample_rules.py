"""Rules for random operations per sample, and the error for operations without a rule.

* The values have torch's distributions, but are not torch's numbers.
* A rule requests random bits once, in the shape of the operation's random tensor, and returns the result of
  the operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from superbatch.errors import InputError

from ..devices import in_float64, where_float64_is
from .counter import below, integers, normal, uniform

Arguments = dict[str, Any]
Values = Callable[[Tensor, torch.dtype, Arguments], Tensor]
Rule = Callable[["Draws", str, Arguments], Any]


class Draws(Protocol):
    """Source of random bits for a rule."""

    samples: int

    def bits(self, op: str, shape: tuple[int, ...], device: torch.device, *, rows: bool = False) -> Tensor:
        """Return 64 random bits per element; with ``rows`` the samples can only be the first dimension."""
        ...


# Values: (bits, dtype, arguments) -> tensor.


def _rand(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    return uniform(bits, _real(dtype))


def _randn(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    return normal(bits, _real(dtype))


def _uniform(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    return _rand(bits, dtype, a).mul_(a["to"] - a["from"]).add_(a["from"])


def _normal(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    return _randn(bits, dtype, a) * a["std"] + a["mean"]


def _log_normal(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    # In float32 at least, because exp magnifies the rounding of 16-bit numbers.
    return _normal(bits, _wide(dtype), a).exp_()


def _exponential(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    # open, because log(0) is infinite.
    return uniform(bits, _wide(_real(dtype)), open=True).log_().div_(-a["lambd"])


def _cauchy(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    return (
        # open, because the tangent is infinite at the end.
        uniform(bits, _wide(dtype), open=True)
        .sub_(0.5)
        .mul_(math.pi)
        .tan_()
        .mul_(a["sigma"])
        .add_(a["median"])
    )


def _geometric(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    return (
        # In float64, because ceil turns a rounding error into a whole step.
        uniform(where_float64_is(bits), torch.float64, open=True)
        .log_()
        .div_(math.log1p(-a["p"]) if a["p"] < 1 else -math.inf)
        .ceil_()
        .clamp_(min=1)
        .to(dtype)
        .to(bits.device)
    )


def _bernoulli(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    p = a["p"]
    if not isinstance(p, Tensor):
        return below(bits, p)
    # In float64, to use all digits of a float32 probability.
    return (uniform(where_float64_is(bits), torch.float64) < where_float64_is(p)).to(bits.device)


def _integers(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    return integers(bits, a.get("low", 0), a["high"])


def _random(bits: Tensor, dtype: torch.dtype, a: Arguments) -> Tensor:
    """Return integers: by default all of an integer dtype, or all that a floating dtype holds exactly."""
    low = a.get("from", 0)
    high = a.get("to")
    if high is None:
        # As torch: up to 2 ** digits for a floating dtype.
        high = (
            2 ** round(1 - math.log2(torch.finfo(dtype).eps))
            if dtype.is_floating_point
            else _integer_end(dtype)
        )
    return integers(bits, low, high)


def _integer_end(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.bool else torch.iinfo(dtype).max + 1


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for logarithms and tangents, which for 16-bit dtypes is float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _real(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype if `counter.uniform` and `counter.normal` support it; else raise."""
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise InputError(
            f"Random numbers of {dtype} cannot be drawn under PerSampleRandom, only real numbers of 16, 32 "
            "or 64 bits. Draw real numbers of such a dtype, and convert them."
        )
    return dtype


# Rules: (draws, op, arguments) -> result of the operation.


def _into(values: Values) -> Rule:
    def rule(stream: Draws, op: str, a: Arguments) -> Tensor:
        target: Tensor = a["self"]
        # copy_ converts the dtype, and writes to any strides.
        return target.copy_(values(stream.bits(op, target.shape, target.device), target.dtype, a))

    return rule


def _like(values: Values) -> Rule:
    def rule(stream: Draws, op: str, a: Arguments) -> Tensor:
        layout = {"memory_format": a["memory_format"]} if a.get("memory_format") is not None else {}
        target = torch.empty_like(a["self"], dtype=a.get("dtype"), device=a.get("device"), **layout)
        return target.copy_(values(stream.bits(op, target.shape, target.device), target.dtype, a))

    return rule


def _new(values: Values) -> Rule:
    def rule(stream: Draws, op: str, a: Arguments) -> Tensor:
        default = torch.int64 if "randint" in op else torch.get_default_dtype()
        dtype = a["dtype"] if isinstance(a["dtype"], torch.dtype) else default
        bits = stream.bits(op, a["size"], a["device"] or torch.device("cpu"))
        result = values(bits, dtype, a).to(dtype)
        return result.pin_memory() if a["pin_memory"] else result

    return rule


def _normal_of_tensors(stream: Draws, op: str, a: Arguments) -> Tensor:
    mean_and_std = [x for x in (a["mean"], a["std"]) if isinstance(x, Tensor)]
    like = functools.reduce(lambda x, y: x + y, mean_and_std)  # their common shape, type and device
    return _normal(stream.bits(op, like.shape, like.device), like.dtype, a)


def _bernoulli_of_self(stream: Draws, op: str, a: Arguments) -> Tensor:
    return _like(_bernoulli)(stream, op, {**a, "p": a["self"]})


def _native_dropout(stream: Draws, op: str, a: Arguments) -> tuple[Tensor, Tensor]:
    x: Tensor = a["input"]
    mask = below(stream.bits(op, x.shape, x.device), 1 - a["p"])
    # For p = 1, which drops everything, the factor would be infinite.
    return x * mask * (1 / (1 - a["p"]) if a["p"] < 1 else 0.0), mask


def _rrelu(stream: Draws, op: str, a: Arguments) -> Tensor:
    x: Tensor = a["self"]
    slope = _uniform(stream.bits(op, x.shape, x.device), x.dtype, {"from": a["lower"], "to": a["upper"]})
    a["noise"].copy_(torch.where(x <= 0, slope, 1))  # the backward multiplies with it
    return x.mul_(a["noise"]) if "rrelu_with_noise_" in op else x * a["noise"]


def _multinomial(stream: Draws, op: str, a: Arguments) -> Tensor:
    """Sample categories of each row; without replacement by the largest p / exponential, as torch does."""
    p, draws, again = in_float64(a["self"]), a["num_samples"], a["replacement"]
    device = a["self"].device
    # With one weight per sample, it would be a draw among the samples.
    if p.dim() == 1 and len(p) == stream.samples > 1:
        raise refusal(op)
    if again and draws > 1:
        bits = stream.bits(op, (*p.shape[:-1], draws), p.device, rows=p.dim() == 2)
        share = p.cumsum(-1)
        # Weights need not add up to 1.
        point = uniform(bits, torch.float64).mul_(share[..., -1:])
        return torch.searchsorted(share, point, right=True).clamp_(max=p.shape[-1] - 1).to(device)
    bits = stream.bits(op, p.shape, p.device, rows=p.dim() == 2)
    return (p / _exponential(bits, torch.float64, {"lambd": 1})).topk(draws, dim=-1).indices.to(device)


RULES: dict[str, Rule] = {
    "aten.rand.default": _new(_rand),
    "aten.rand.generator": _new(_rand),
    "aten.rand_like.default": _like(_rand),
    "aten.uniform_.default": _into(_uniform),
    "aten.randn.default": _new(_randn),
    "aten.randn.generator": _new(_randn),
    "aten.randn_like.default": _like(_randn),
    "aten.normal_.default": _into(_normal),
    "aten.normal.float_float": _new(_normal),
    "aten.normal.Tensor_float": _normal_of_tensors,
    "aten.normal.float_Tensor": _normal_of_tensors,
    "aten.normal.Tensor_Tensor": _normal_of_tensors,
    "aten.log_normal_.default": _into(_log_normal),
    "aten.exponential_.default": _into(_exponential),
    "aten.cauchy_.default": _into(_cauchy),
    "aten.geometric_.default": _into(_geometric),
    "aten.bernoulli.default": _bernoulli_of_self,
    "aten.bernoulli.p": _like(_bernoulli),
    "aten.bernoulli_.float": _into(_bernoulli),
    "aten.bernoulli_.Tensor": _into(_bernoulli),
    "aten.native_dropout.default": _native_dropout,
    "aten.rrelu_with_noise.default": _rrelu,
    "aten.rrelu_with_noise_.default": _rrelu,
    "aten.randint.default": _new(_integers),
    "aten.randint.generator": _new(_integers),
    "aten.randint.low": _new(_integers),
    "aten.randint.low_generator": _new(_integers),
    "aten.randint_like.default": _like(_integers),
    "aten.randint_like.low_dtype": _like(_integers),
    "aten.random_.default": _into(_random),
    "aten.random_.to": _into(_random),
    "aten.random_.from": _into(_random),
    "aten.multinomial.default": _multinomial,
}
"""Rules by operation; the values have torch's distributions, but are not torch's numbers."""


_WHY = {
    "randperm": ("a permutation belongs to the whole batch", "Make the permutation where the batch is made"),
    "multinomial": ("a draw among the samples of a batch couples them", "Draw where the batch is made"),
    "attention": (
        "the fused kernel draws its dropout itself",
        "Call torch.nn.functional.scaled_dot_product_attention, which then uses the math backend",
    ),
    "PackedSequence": (
        "its rows mix samples and times, in an order that depends on the other samples",
        "Use padded sequences, or single layers with dropout on the padded output between them",
    ),
}


def refusal(op: str) -> InputError:
    """Return the error for a random operation without a rule.

    Examples:
        >>> str(refusal("aten.randperm.default"))[:44]
        'aten.randperm.default cannot be drawn sample'
    """
    other = (
        "there is no rule for it",
        "Use uniform, normal or Bernoulli numbers instead",
    )
    wrong, do = next((why for part, why in _WHY.items() if part in op), other)
    return InputError(
        f"{op} cannot be drawn sample by sample under PerSampleRandom: {wrong}. {do}, or remove "
        "PerSampleRandom."
    )
