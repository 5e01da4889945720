"""CUDA kernels emulated on the CPU, with the signatures of their schemas.

They return tensors of the schemas' shapes, and assert the preconditions of the real kernels. A forward saves
a fingerprint of its tensors; a backward fails for that of another forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CALLED: list[tuple[str, int]] = []  # kernel and number of samples of each call


def _gradients(
    function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor | None]
) -> list[Tensor]:
    """Return autograd's gradients, computed in a thread: autograd is off only in the kernel's own thread."""

    def work() -> Any:
        given = [x.detach().requires_grad_() for x in inputs]
        found = function(*given)
        pairs = [(y, g) for y, g in zip(found, grads, strict=True) if g is not None]
        return torch.autograd.grad([y for y, _ in pairs], given, [g for _, g in pairs], allow_unused=True)

    with ThreadPoolExecutor(1) as thread:
        return [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(inputs, thread.submit(work).result(), strict=True)
        ]


def _fingerprint(*tensors: Tensor) -> Tensor:
    """Return a fingerprint of tensors as bytes."""
    return torch.stack([x.detach().contiguous().sum() for x in tensors]).view(torch.uint8)


# -- attention ----------------------------------------------------------------------------------------------


MASKS: list[Tensor] = []  # dropout masks drawn by forwards


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: Any = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of the scores."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1)
    return (weights if mask is None else weights * mask) @ v, scores.logsumexp(-1)


def _draw_mask(q: Tensor, k: Tensor, p: float) -> tuple[Tensor | None, Tensor]:
    """Draw a dropout mask from the device's generator; return it with the generator's earlier state."""
    state = torch.default_generator.get_state()
    if not p:
        return None, state
    return (torch.rand(*q.shape[:3], k.shape[2], dtype=q.dtype) >= p) / (1 - p), state


def _redraw_mask(state: Tensor, q: Tensor, k: Tensor, p: float) -> Tensor | None:
    """Draw the mask of a forward again, from its saved generator state."""
    now = torch.default_generator.get_state()
    if p:
        torch.default_generator.set_state(state)
    mask, _ = _draw_mask(q, k, p)
    torch.default_generator.set_state(now)
    return mask


def _checked(name: str, tensors: list[Tensor], bias: Tensor | None, aligned: int) -> None:
    CALLED.append((name, len(tensors[0])))
    assert all(x.dim() == 4 and x.stride(-1) == 1 for x in tensors)
    assert len({len(x) for x in tensors}) == 1, "inputs of different batch sizes"
    if bias is not None:
        assert bias.stride(-1) == 1
        assert all(step % aligned == 0 for step in bias.stride()[:-1])
        assert bias.dim() == 2 or len(bias) in (1, len(tensors[0]))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *rest: Any, scale: Any = None
) -> Any:
    _checked("flash", [q, k, v], None, 1)
    mask, state = _draw_mask(q, k, p)
    MASKS.extend([] if mask is None else [mask])
    out, sums = attention(q, k, v, None, causal, scale, mask)
    drawn = _fingerprint(q, k, v, out), state
    return out, sums, None, None, q.shape[2], k.shape[2], *drawn, torch.empty(0, dtype=q.dtype)


def _flash_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cq: Any, ck: Any, mq: int, mk: int,
    p: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: Any = None,
) -> Any:  # fmt: skip
    _checked("flash backward", [g, q, k, v], None, 1)
    assert cq is None and ck is None and (mq, mk) == (q.shape[2], k.shape[2])
    assert torch.equal(seed, _fingerprint(q, k, v, out)), "saved tensors of another forward"
    assert torch.equal(sums, attention(q, k, v, None, causal, scale)[1])
    mask = _redraw_mask(offset, q, k, p)
    return tuple(
        _gradients(lambda q, k, v: attention(q, k, v, None, causal, scale, mask)[:1], [q, k, v], [g])
    )


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, p: float = 0.0, causal: bool = False,
    *, scale: Any = None,
) -> Any:  # fmt: skip
    _checked("efficient", [q, k, v], bias, 8)
    mask, state = _draw_mask(q, k, p)
    MASKS.extend([] if mask is None else [mask])
    out, found = attention(q, k, v, bias, causal, scale, mask)
    found = F.pad(found, (0, -found.shape[-1] % 32), value=torch.nan) if sums else found[..., :0]
    return out, found, _fingerprint(q, k, v, out), state


def _efficient_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, p: float, wanted: list[bool], causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    _checked("efficient backward", [g, q, k, v], bias, 8)
    assert torch.equal(seed, _fingerprint(q, k, v, out)), "saved tensors of another forward"
    assert sums.shape[-1] % 32 == 0
    assert torch.equal(sums[..., : q.shape[2]], attention(q, k, v, bias, causal, scale)[1])
    inputs = [q, k, v, *([] if bias is None else [bias])]
    mask = _redraw_mask(offset, q, k, p)
    found = _gradients(lambda q, k, v, b=None: attention(q, k, v, b, causal, scale, mask)[:1], inputs, [g])
    return (*found[:3], found[3] if bias is not None and wanted[3] else None)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    _checked("cudnn", [q, k, v], bias, 1)
    mask, state = _draw_mask(q, k, p)
    MASKS.extend([] if mask is None else [mask])
    out, found = attention(q, k, v, bias, causal, scale, mask)
    # In some torch releases the meta kernel gives the log-sum-exp another shape.
    return out, found, None, None, q.shape[2], k.shape[2], _fingerprint(q, k, v, out), state, None


def _cudnn_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cq: Any, ck: Any, mq: int, mk: int, p: float, causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    _checked("cudnn backward", [g, q, k, v], bias, 1)
    assert cq is None and ck is None and (mq, mk) == (q.shape[2], k.shape[2])
    assert torch.equal(seed, _fingerprint(q, k, v, out)), "saved tensors of another forward"
    assert torch.equal(sums, attention(q, k, v, bias, causal, scale)[1])
    mask = _redraw_mask(offset, q, k, p)
    return tuple(
        _gradients(lambda q, k, v: attention(q, k, v, bias, causal, scale, mask)[:1], [q, k, v], [g])
    )


# -- recurrent layers ---------------------------------------------------------------------------------------

LSTM, GRU = 2, 3  # values of `mode`


def layers(
    x: Tensor, hx: Tensor, cx: Tensor | None, weights: list[Tensor], biases: int, **arguments: Any
) -> tuple[Tensor, ...]:
    """Return the output and the final states."""
    arguments = {"dropout": 0.0, "train": False, **arguments}
    if cx is None:
        return torch.gru(x, hx, weights, biases == 4, **arguments)
    return torch.lstm(x, (hx, cx), weights, biases == 4, **arguments)


_RNN = [argument.name for argument in torch.ops.aten._cudnn_rnn.default._schema.arguments]
_RNN_BACK = [argument.name for argument in torch.ops.aten._cudnn_rnn_backward.default._schema.arguments]


def _run_layers(arguments: dict[str, Any]) -> Callable[..., Any]:
    batch_sizes, names = arguments["batch_sizes"], ("num_layers", "bidirectional", "batch_first")
    options = {name: arguments[name] for name in names}
    assert not batch_sizes
    return lambda x, hx, cx, *weights: layers(
        x, hx, cx, list(weights), arguments["weight_stride0"], **options
    )


def _rnn(*args: Any) -> Any:
    arguments = dict(zip(_RNN, args, strict=True))
    x, hx, cx, weights = (arguments[name] for name in ("input", "hx", "cx", "weight"))
    samples = x.shape[0 if arguments["batch_first"] else 1]
    CALLED.append(("rnn", samples))
    assert hx.is_contiguous() and (cx is None or cx.is_contiguous())
    assert hx.shape[1] == samples and (arguments["mode"] == LSTM) == (cx is not None)
    flat = torch.cat([weight.reshape(-1) for weight in weights])
    assert arguments["weight_buf"] is None or torch.equal(arguments["weight_buf"], flat)
    out, hy, *cy = _run_layers(arguments)(x, hx, cx, *weights)
    if arguments["batch_first"]:
        out = out.transpose(0, 1).contiguous().transpose(0, 1)
    kept = _fingerprint(x, hx, out) if arguments["train"] else torch.empty(0, dtype=torch.uint8)
    return out, hy, cy[0] if cy else torch.empty(0, dtype=x.dtype), kept, flat


def _rnn_back(*args: Any) -> Any:
    arguments = dict(zip(_RNN_BACK, args, strict=True))
    x, hx, cx, weights = (arguments[name] for name in ("input", "hx", "cx", "weight"))
    CALLED.append(("rnn backward", x.shape[0 if arguments["batch_first"] else 1]))
    assert arguments["train"], "backward needs train mode"
    assert hx.is_contiguous() and (cx is None or cx.is_contiguous())
    assert torch.equal(arguments["reserve"], _fingerprint(x, hx, arguments["output"])), (
        "saved tensors of another forward"
    )
    assert torch.equal(arguments["weight_buf"], torch.cat([weight.reshape(-1) for weight in weights]))
    arguments["reserve"].zero_()  # the backward consumes it
    run = _run_layers(arguments)
    grads = [arguments["grad_output"], arguments["grad_hy"], *([] if cx is None else [arguments["grad_cy"]])]
    if cx is None:
        dx, dhx, *dw = _gradients(lambda x, hx, *w: run(x, hx, None, *w), [x, hx, *weights], grads)
        dcx = None
    else:
        dx, dhx, dcx, *dw = _gradients(run, [x, hx, cx, *weights], grads)
    mask = arguments["output_mask"]
    return (
        dx,
        dhx if mask[1] else torch.empty(0),
        torch.empty(0) if dcx is None else dcx,
        dw if mask[3] else [],
    )


# -- fused cells --------------------------------------------------------------------------------------------


def _lstm_cell(gates: Tensor, more: Tensor, cx: Tensor, b1: Any = None, b2: Any = None) -> Any:
    CALLED.append(("lstm cell", len(cx)))
    total = gates + more + (0 if b1 is None else b1 + b2)
    i, f, g, o = total.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_back(hy: Any, cy_grad: Any, cx: Tensor, cy: Tensor, kept: Tensor, biased: bool) -> Any:
    CALLED.append(("lstm cell backward", len(cx)))
    assert kept.is_contiguous() and len(kept) == len(cx)
    i, f, g, o = kept.chunk(4, 1)
    hy = torch.zeros_like(cx) if hy is None else hy
    c = hy * o * (1 - cy.tanh() ** 2) + (0 if cy_grad is None else cy_grad)
    parts = [c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g**2), hy * cy.tanh() * o * (1 - o)]
    grad = torch.cat(parts, 1)
    return grad, c * f, grad.sum(0) if biased else None


def _gru_cell(gates: Tensor, more: Tensor, hx: Tensor, b1: Any = None, b2: Any = None) -> Any:
    CALLED.append(("gru cell", len(hx)))
    ir, iz, i_n = (gates if b1 is None else gates + b1).chunk(3, 1)
    hr, hz, hn = (more if b2 is None else more + b2).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_cell_back(hy: Tensor, kept: Tensor, biased: bool) -> Any:
    CALLED.append(("gru cell backward", len(hy)))
    r, z, n, hx, hn = kept.chunk(5, 1)
    dz, dn = hy * (hx - n) * z * (1 - z), hy * (1 - z) * (1 - n**2)
    dr = dn * hn * r * (1 - r)
    first, second = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    return first, second, hy * z, *((first.sum(0), second.sum(0)) if biased else (None, None))


_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_back,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_back,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_back,
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn_back,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_back,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_back,
}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace CPU operators by the emulated kernels inside the context."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU")
        yield
