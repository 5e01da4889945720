"""Elementwise operators: unary, binary with each kind of broadcasting, in-place, conditions, constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.torch.coupled.operator_case import (
    N,
    OperatorCase,
    Spec,
    boolean,
    complex_numbers,
    ints,
    operator,
    positive,
    real,
    unit,
)

_UNARY: list[tuple[Callable[..., Any], Spec]] = [
    *(
        (function, real(N, 3, 4))
        for function in (
            torch.abs, torch.neg, torch.sign, torch.exp, torch.expm1, torch.sin, torch.cos, torch.tan,
            torch.tanh, torch.sinh, torch.cosh, torch.asinh, torch.atan, torch.sigmoid, torch.square,
            torch.floor, torch.ceil, torch.round, torch.trunc, torch.frac, torch.erf, torch.erfc,
            torch.sinc, torch.isnan, torch.isfinite, torch.signbit, torch.logical_not, torch.nan_to_num,
            torch.clone, torch.positive, F.relu, F.relu6, F.elu, F.selu, F.celu, F.leaky_relu, F.gelu,
            F.silu, F.mish, F.softplus, F.softsign, F.tanhshrink, F.hardtanh, F.hardsigmoid, F.hardswish,
            F.logsigmoid, F.softshrink, F.hardshrink,
        )
    ),
    *(
        (function, positive(N, 3, 4))
        for function in (
            torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal,
            torch.lgamma, torch.digamma,
        )
    ),
    *((function, unit(N, 3, 4)) for function in (torch.acos, torch.asin, torch.atanh, torch.erfinv)),
]  # fmt: skip

_BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a * 2, b),
}

_BROADCAST: dict[str, tuple[Spec, Spec]] = {
    "both samples": (real(N, 3, 4), positive(N, 3, 4)),
    "with features": (real(N, 3, 4), positive(4)),
    "with a matrix": (real(N, 3, 4), positive(3, 4)),
    "with a batch of one": (real(N, 3, 4), positive(1, 3, 4)),
    "with a number": (real(N, 3, 4), positive()),
    "with samples of one feature": (real(N, 4), positive(N, 1)),
    "features first": (real(4), positive(N, 3, 4)),
    "number first": (real(), positive(N, 3, 4)),
    "batch of one first": (real(1, 3, 4), positive(N, 3, 4)),
    "grows": (real(N, 1, 4), positive(3, 1)),
    "into more dimensions": (real(N, 4), positive(5, 1, 4)),
}


def _conjugates_of_a_sum(z: Tensor) -> tuple[Tensor, ...]:
    s = z.sum(0)
    return s.conj().imag, (s.conj() * s * 1j).imag, torch.ops.aten._neg_view(s.real) * 3, z * s.conj()


_SIMPLE = [
    operator("pow with a number", lambda x: x**3 + x.pow(0.5), positive(N, 4)),
    operator("pow of both", torch.pow, positive(N, 4), real(N, 4)),
    operator("pow of a number", lambda x: 2**x, real(N, 4)),
    operator("rsub", lambda x: 1 - x, real(N, 4)),
    operator("division of a number", lambda x: 1 / x, positive(N, 4)),
    operator("add with alpha", lambda x, y: torch.add(x, y, alpha=0.3), real(N, 4), real(N, 4)),
    operator(
        "floor division and remainder",
        lambda x: x.detach() // 0.7 + torch.remainder(x, 0.6) + x % 0.4,
        real(N, 4),
    ),
    operator("fmod", lambda x: torch.fmod(x, 0.5), real(N, 4)),
    operator("atan2", torch.atan2, real(N, 4), positive(N, 4)),
    operator("hypot", torch.hypot, positive(N, 4), positive(4)),
    operator("logaddexp", torch.logaddexp, real(N, 4), real(N, 4)),
    operator("minimum", torch.minimum, real(N, 4), real(4)),
    operator("fmax and fmin", lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), real(N, 4), real(N, 4)),
    operator("xlogy", torch.xlogy, positive(N, 4), positive(N, 4)),
    operator("lerp", torch.lerp, real(N, 4), real(N, 4), unit(4)),
    operator("lerp with a number", lambda x, y: torch.lerp(x, y, 0.2), real(N, 4), real(4)),
    operator("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), real(N, 4), real(N, 4), real(4)),
    operator("addcdiv", torch.addcdiv, real(N, 4), real(4), positive(N, 4)),
    operator("clamp", lambda x: x.clamp(-0.5, 1), real(N, 4)),
    operator("clamp by tensors", lambda x, y: x.clamp(min=y, max=y + 1), real(N, 4), real(4)),
    operator("clip one-sided", lambda x: x.clip(min=0.1), real(N, 4)),
    operator("threshold", lambda x: F.threshold(x, 0.2, -1.0), real(N, 4)),
    operator("prelu", F.prelu, real(N, 3, 4), positive(3)),
    operator("glu", F.glu, real(N, 3, 4)),
    operator("gelu by tanh", lambda x: F.gelu(x, approximate="tanh"), real(N, 4)),
    operator("compare both", lambda x, y: (x > y, x >= y, x == y, x != y, x < y), real(N, 4), real(N, 4)),
    operator("compare with a number", lambda x: (x > 0, x.le(0.5), x.eq(1), x.ne(0)), real(N, 4)),
    operator("compare integers", lambda x: (x > 2).logical_or(x == 0), ints(5, N, 4)),
    operator(
        "boolean algebra", lambda a, b: (a & b, a | ~b, a ^ b, a.logical_and(b)), boolean(N, 4), boolean(4)
    ),
    operator("bits", lambda a: (a & 3, a << 1, a >> 1, a % 3, -a), ints(9, N, 4)),
    operator("isclose", lambda x, y: torch.isclose(x, y, atol=1.0), real(N, 4), real(4)),
    operator("masked_fill by samples", lambda x, m: x.masked_fill(m, 0.5), real(N, 3), boolean(N, 3)),
    operator(
        "masked_fill broadcast",
        lambda x, m: x.masked_fill(m[:, None], float("-inf")).exp(),
        real(N, 3, 4),
        boolean(N, 4),
    ),
    operator("masked_fill with features", lambda x, m: x.masked_fill(m, 2.0), real(N, 3), boolean(3)),
    operator("where with numbers", lambda m, x: torch.where(m, x, 0.0), boolean(N, 1), real(N, 4)),
    operator("where of features", torch.where, boolean(4), real(N, 4), real(4)),
    operator(
        "heaviside and copysign",
        lambda x, y: (torch.heaviside(x.detach(), y.detach()), torch.copysign(x, y)),
        real(N, 4),
        real(4),
    ),
    operator(
        "types",
        lambda x: (x.float().double(), x.long(), x.to(torch.bool), x.type(torch.float32).double()),
        real(N, 4),
    ),
    operator("type_as and to", lambda i, x: i.type_as(x) * x + i.to(x), ints(5, N, 4), real(N, 4)),
    operator("integers become real", lambda i, x: i * x + i / 2, ints(5, N, 4), real(4)),
    operator(
        "zeros_like and others",
        lambda x: x + torch.zeros_like(x) + torch.ones_like(x[:, :1]) * x + torch.full_like(x, 0.3),
        real(N, 4),
    ),
    operator(
        "new_zeros and others",
        lambda x: torch.cat(
            [x.new_zeros(x.shape[0], 2), x, x.new_ones(x.size(0), 1), x.new_full((len(x), 1), 2.0)], 1
        ),
        real(N, 4),
    ),
    operator(
        "complex numbers", lambda z: (z.real, z.imag, z.abs(), z.angle(), z.conj() * z), complex_numbers(N, 3)
    ),
    operator(
        "view_as_real", lambda z: torch.view_as_complex(torch.view_as_real(z) * 2), complex_numbers(N, 3)
    ),
    operator("complex", lambda x, y: torch.complex(x, y).abs(), real(N, 3), real(3)),
    operator(
        "conjugate and negative, worked out",
        lambda z: (torch.conj_physical(z) * 2, torch.ops.aten._neg_view(z.real) * 3, -z.conj().imag),
        complex_numbers(N, 3),
    ),
    # The out-of-place operator takes the number first.
    operator("polygamma_", lambda x: x.clone().polygamma_(1), positive(N, 3)),
    operator("conjugates of a sum", _conjugates_of_a_sum, complex_numbers(N, 3)),
    operator("_conj_physical", lambda z: torch.ops.aten._conj_physical(z.detach()), complex_numbers(N, 3)),
    operator(
        "quantized for show", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -8, 9), real(N, 4)
    ),
    operator("polar", lambda r, a: torch.polar(r, a).real, positive(N, 3), real(N, 3)),
    operator("detach", lambda x: x.detach() * x, real(N, 4)),
    operator(
        "special functions",
        lambda x: (
            torch.special.expit(x),
            torch.special.log_ndtr(x),
            torch.special.i0e(x),
            torch.special.entr(x.abs()),
        ),
        real(N, 4),
    ),
    operator("logit", lambda x: torch.logit(x, eps=1e-3), lambda n, seed: unit(N, 4)(n, seed).abs()),
    operator("fill with samples' shape", lambda x: torch.zeros(x.shape, dtype=x.dtype) + x, real(N, 4)),
]


def _in_place(name: str, write: Callable[[Tensor], Any]) -> OperatorCase:
    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        write(y)
        return y * x

    return operator(f"in place: {name}", function, positive(N, 3, 4))


def _write_columns(y: Tensor) -> None:
    y[:, 1] = 0.5
    y[..., 0] *= 2


def _write_by_mask(y: Tensor) -> None:
    y[y > 1] = 1.0


def _write_view(y: Tensor) -> None:
    y.view(-1, 12)[:, 3:5].add_(1.0)


def _write_rows(y: Tensor) -> None:
    y[0] = 0.5
    y[-1] += 1.0


_IN_PLACE = [
    _in_place("add_", lambda y: y.add_(2.0, alpha=0.5)),
    _in_place("mul_", lambda y: y.mul_(3)),
    _in_place("div_ and sub_", lambda y: y.div_(2).sub_(0.1)),
    _in_place("relu_", lambda y: y.relu_()),
    _in_place("sqrt_", lambda y: y.sqrt_()),
    _in_place("exp_", lambda y: y.exp_()),
    _in_place("clamp_", lambda y: y.clamp_(0.5, 1.0)),
    _in_place("masked_fill_", lambda y: y.masked_fill_(y.detach() > 1, 0.2)),
    _in_place("zero_", lambda y: y.zero_()),
    _in_place("fill_", lambda y: y.fill_(0.7)),
    _in_place("copy_", lambda y: y.copy_(torch.ones(4, dtype=y.dtype))),
    _in_place("pow_", lambda y: y.pow_(2)),
    _in_place("lerp_", lambda y: y.lerp_(torch.ones_like(y), 0.4)),
    _in_place("addcmul_", lambda y: y.addcmul_(torch.ones_like(y), torch.ones_like(y), value=2)),
    _in_place("columns", _write_columns),
    _in_place("a mask", _write_by_mask),
    _in_place("a view", _write_view),
    _in_place("rows", _write_rows),
]

OPERATORS = [
    *(operator(function.__name__, function, spec) for function, spec in _UNARY),
    *(
        operator(f"{name}, {how}", function, *specs)
        for name, function in _BINARY.items()
        for how, specs in _BROADCAST.items()
    ),
    *_SIMPLE,
    *_IN_PLACE,
]
