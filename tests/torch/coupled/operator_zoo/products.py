"""Matrix products, distances and similarities: with weights, within samples, over the batch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.torch.coupled.operator_case import (
    N,
    operator,
    real,
)

OPERATORS = [
    operator("matmul with a weight", torch.matmul, real(N, 3), real(3, 4)),
    operator("mm", torch.mm, real(N, 3), real(3, 4)),
    operator("weight first", lambda w, x: w @ x.T, real(4, 3), real(N, 3)),
    operator("matrix times vector", torch.matmul, real(N, 3), real(3)),
    operator("mv and dot", lambda x, w: (x.mv(w), x.mv(w).dot(x.mv(w))), real(N, 3), real(3)),
    operator("over the batch", lambda x, y: x.T @ y, real(N, 3), real(N, 4)),
    operator("over the batch, one per sample", lambda x, y: x @ y, real(N), real(N, 3)),
    operator("all pairs", lambda x, y: x @ y.T, real(N, 3), real(N, 3)),
    operator("all pairs of itself", lambda x: x @ x.t(), real(N, 3)),
    operator("pairs times samples", lambda x: (x @ x.T).softmax(1) @ x, real(N, 3)),
    operator("pairs, columns first", lambda x: (x @ x.T).softmax(0).T @ x, real(N, 3)),
    operator("linear", F.linear, real(N, 3), real(4, 3), real(4)),
    operator("linear without bias", F.linear, real(N, 3), real(4, 3)),
    operator("linear of sequences", F.linear, real(N, 5, 3), real(4, 3), real(4)),
    operator("linear of samples as weights", lambda w, x: F.linear(w, x), real(4, 3), real(N, 3)),
    operator("linear of one sample vector", lambda x, w: F.linear(x.mean(0), w), real(N, 3), real(4, 3)),
    operator(
        "addmm", lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), real(4), real(N, 3), real(3, 4)
    ),
    operator("addmm of samples", torch.addmm, real(N, 4), real(N, 3), real(3, 4)),
    operator(
        "addmm over the batch", lambda b, x, y: torch.addmm(b, x.T, y), real(3, 4), real(N, 3), real(N, 4)
    ),
    operator("bmm", torch.bmm, real(N, 2, 3), real(N, 3, 4)),
    operator("bmm of transposed", lambda x: torch.bmm(x, x.transpose(1, 2)), real(N, 2, 3)),
    operator(
        "bmm over the batch",
        lambda x, y: torch.bmm(x.permute(1, 2, 0), y.transpose(0, 1)),
        real(N, 2, 3),
        real(N, 2, 4),
    ),
    operator(
        "baddbmm",
        lambda b, x, y: torch.baddbmm(b, x, y, alpha=0.5),
        real(N, 2, 4),
        real(N, 2, 3),
        real(N, 3, 4),
    ),
    operator("baddbmm with a broadcast", torch.baddbmm, real(2, 4), real(N, 2, 3), real(N, 3, 4)),
    operator("addbmm", lambda b, x, y: torch.addbmm(b, x, y), real(2, 4), real(N, 2, 3), real(N, 3, 4)),
    operator("matmul of batches", torch.matmul, real(N, 2, 5, 3), real(N, 2, 3, 4)),
    operator("matmul with a broadcast weight", torch.matmul, real(N, 2, 5, 3), real(3, 4)),
    operator("matmul, weight first", lambda w, x: w @ x, real(4, 5), real(N, 5, 3)),
    operator("matmul with stacked weights", torch.matmul, real(N, 1, 5, 3), real(2, 3, 4)),
    operator("batched vector", lambda x, v: (x @ v.unsqueeze(-1)).squeeze(-1), real(N, 4, 3), real(N, 3)),
    operator("einsum of features", lambda x, w: torch.einsum("nf,gf->ng", x, w), real(N, 3), real(4, 3)),
    operator("einsum over the batch", lambda x, y: torch.einsum("nf,ng->fg", x, y), real(N, 3), real(N, 4)),
    operator("einsum of pairs", lambda x: torch.einsum("if,jf->ij", x, x), real(N, 3)),
    operator(
        "einsum of heads",
        lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
        real(N, 4, 2, 3),
        real(N, 5, 2, 3),
    ),
    operator(
        "einsum of three",
        lambda x, w, y: torch.einsum("ni,ijk,nk->nj", x, w, y),
        real(N, 2),
        real(2, 3, 4),
        real(N, 4),
    ),
    operator("tensordot", lambda x, w: torch.tensordot(x, w, 2), real(N, 3, 4), real(3, 4, 5)),
    operator("tensordot over the batch", lambda x, y: torch.tensordot(x.T, y, 1), real(N, 3), real(N, 4)),  # pyright: ignore[reportArgumentType]
    operator("inner and kron", lambda x, w: (torch.inner(x, w), torch.kron(x, w)), real(N, 3), real(4, 3)),
    operator("bilinear", F.bilinear, real(N, 3), real(N, 2), real(4, 3, 2), real(4)),
    operator("cross", lambda x, y: torch.cross(x, y, dim=1), real(N, 3), real(N, 3)),
    operator("multi_dot and chain", lambda x, w: torch.linalg.multi_dot([x, w, w.T]), real(N, 3), real(3, 4)),
    operator("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=1), real(N, 3), real(N, 3)),
    operator(
        "cosine_similarity of pairs", lambda x: F.cosine_similarity(x[:, None], x[None], dim=-1), real(N, 3)
    ),
    operator(
        "cosine_similarity over the batch",
        lambda x, y: F.cosine_similarity(x, y, dim=0),
        real(N, 3),
        real(N, 3),
    ),
    operator("pairwise_distance", F.pairwise_distance, real(N, 3), real(N, 3)),
    operator("cdist of pairs", lambda x, y: torch.cdist(x, y), real(N, 3), real(N, 3)),
    operator("cdist with centres", torch.cdist, real(N, 3), real(4, 3)),
    operator("cdist of 1-norms", lambda x, y: torch.cdist(x, y, p=1), real(N, 3), real(N, 3)),
    operator("cdist within samples", lambda x: torch.cdist(x, x * 2 + 1), real(N, 4, 3)),
    operator("pdist", torch.pdist, real(N, 3), min_n=2),
]
