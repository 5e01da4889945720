"""Linear algebra within samples and over the batch, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.torch.coupled.operator_case import (
    N,
    complex_numbers,
    definite,
    operator,
    positive,
    real,
)

# Autograd's formula depends on the matrix's memory layout, which may differ in a micro-batch of one.
_LAYOUT_DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.slogdet(a)[1],
    "solve": lambda a: torch.linalg.solve(a, a[..., :2].cos()),
}


# These broadcast leading dimensions: the batch of one input aligns with another dimension of the other.
_BROADCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "solve": torch.linalg.solve,
    "solve_triangular": lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
    "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a),
}


def _of_pairs(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, x: function(a, x[:, None] * x[None])


def _in_each_layout(function: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "contiguous": lambda x: function(x[:, 0].contiguous()),
        "a slice": lambda x: function(x[:, 0]),
        "transposed": lambda x: function(x[:, 1].mT),
        "permuted": lambda x: function(x.permute(1, 0, 2, 3)[2]),
    }


OPERATORS = [
    operator(
        "inv, det and slogdet",
        lambda a: (torch.linalg.inv(a), torch.linalg.det(a), *torch.slogdet(a)),
        definite(N, 3),
    ),
    *(
        operator(f"{kind} of matrices that are {order}", of_them, real(N, 3, 4, 4))
        for kind, function in _LAYOUT_DEPENDENT.items()
        for order, of_them in _in_each_layout(function).items()
    ),
    operator(
        "slogdet of a permuted batch",
        lambda x: torch.slogdet(x.permute(1, 2, 0)[..., :3])[1],
        real(N, 4, 3),
        min_n=3,
    ),
    operator("slogdet of some samples", lambda x: torch.slogdet(x[:3, 0, :3])[1], real(N, 2, 3), min_n=3),
    operator("slogdet of sums", lambda x: torch.slogdet(x.sum(0).permute(2, 0, 1))[1], real(N, 3, 3, 2)),
    operator("cholesky", torch.linalg.cholesky, definite(N, 3)),
    operator(
        "cholesky of the batch's covariance",
        lambda x: torch.linalg.cholesky(x.T @ x + torch.eye(3, dtype=x.dtype)),
        real(N, 3),
    ),
    operator("solve", torch.linalg.solve, definite(N, 3), real(N, 3, 2)),
    operator("solve with one matrix", lambda a, x: torch.linalg.solve(a, x.T).T, definite(3), real(N, 3)),
    operator(
        "solve_triangular",
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
        definite(N, 3),
        real(N, 3, 2),
    ),
    # The tests use seven samples.
    *(
        operator(f"{name} with one matrix of seven rows", function, definite(7), real(N, 7, 2))
        for name, function in _BROADCAST.items()
    ),
    *(
        operator(f"{name} of pairs", _of_pairs(function), definite(N, 3), real(N, 3, 2))
        for name, function in _BROADCAST.items()
    ),
    *(
        operator(f"{name} of one matrix for each sample", function, definite(N, 3), real(3, 2))
        for name, function in _BROADCAST.items()
    ),
    operator("solve for a vector of each sample", torch.linalg.solve, definite(N, 3), real(N, 3)),
    operator("eigvalsh", torch.linalg.eigvalsh, definite(N, 3)),
    operator("eigh of the batch's covariance", lambda x: torch.linalg.eigh(x.T @ x / len(x))[0], real(N, 3)),
    # The kernel sets torch's conjugate bit, which is invisible where operators are intercepted.
    operator("pinv of complex matrices", torch.linalg.pinv, complex_numbers(N, 4, 3)),
    operator(
        "pinv of a complex matrix beside the batch",
        lambda z, x: x @ torch.linalg.pinv(z).abs(),
        complex_numbers(4, 3),
        real(N, 3),
    ),
    operator("svdvals", torch.linalg.svdvals, real(N, 3, 4)),
    operator("svdvals over the batch", torch.linalg.svdvals, real(N, 3)),
    operator("qr", lambda a: torch.linalg.qr(a)[1].abs(), real(N, 4, 3)),
    operator("qr over the batch", lambda a: torch.linalg.qr(a)[1].abs(), real(N, 3), min_n=3),
    operator(
        "matrix_exp and matrix_power",
        lambda a: (torch.matrix_exp(a / 9), torch.linalg.matrix_power(a, 2)),
        definite(N, 3),
    ),
    operator(
        "lstsq over the batch",
        lambda x, y: torch.linalg.lstsq(x, y).solution,
        real(N, 3),
        real(N, 2),
        min_n=4,
    ),
    operator(
        "matrix_norm",
        lambda a: (torch.linalg.matrix_norm(a), torch.linalg.norm(a, dim=(1, 2))),
        real(N, 3, 4),
    ),
    operator("cholesky_solve", torch.cholesky_solve, real(N, 3, 2), definite(N, 3)),
    operator("cholesky_inverse", lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a)), definite(N, 3)),
    operator(
        "householder_product",
        lambda a, t: torch.linalg.householder_product(a.tril(-1) / 3, t),
        real(N, 4, 3),
        positive(N, 3),
    ),
    operator("eig", lambda a: (torch.linalg.eig(a)[0].abs(), torch.linalg.eigvals(a).abs()), real(N, 3, 3)),
    operator("lu", lambda a: torch.linalg.lu(a), real(N, 3, 3)),
    operator("lu_factor and lu_unpack", lambda a: torch.lu_unpack(*torch.linalg.lu_factor(a)), real(N, 3, 3)),
    operator(
        "lu_solve",
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
        real(N, 3, 3),
        real(N, 3, 2),
    ),
    operator("nuclear norm over the batch", lambda x: torch.linalg.matrix_norm(x, "nuc"), real(N, 3)),
    operator("trace of pairs", lambda x: torch.trace(x @ x.T), real(N, 3)),
    operator("fft of features", lambda x: torch.fft.fft(x).abs(), real(N, 5)),
    operator(
        "rfft and irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=6, dim=1), real(N, 6)
    ),
    operator("fft2", lambda x: torch.fft.fft2(x).real, real(N, 2, 4, 4)),
    operator("fft over the batch", lambda x: torch.fft.fft(x, dim=0).real, real(N, 3)),
    operator("fftshift", lambda x: torch.fft.fftshift(x, dim=1), real(N, 5)),
]
