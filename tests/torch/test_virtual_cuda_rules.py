"""Rules of CUDA-only operators, tested on a CPU with stand-ins of the same schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import CoupledSamplesError
from superbatch.torch import virtual_batch
from superbatch.torch.virtual.ir.calls import Call, OpStrategy
from superbatch.torch.virtual.ir.reductions import First
from superbatch.torch.virtual.rules import attention_rules
from superbatch.torch.virtual.rules.lookup import OWN
from superbatch.torch.virtual.rules.table import ROWS
from superbatch.torch.virtual.run import memo
from superbatch.torch.virtual.trace import recurrent
from tests.torch import cuda_stand_ins
from tests.torch.coupled.operator_case import N, OperatorCase, operator, real
from tests.torch.cuda_stand_ins import CALLED, GRU, LSTM, MASKS, attention, layers
from tests.torch.test_virtual_operators import assert_same, on_virtual_tensors, on_whole_tensors

aten: Any = torch.ops.aten
SAMPLES = 7
LOGSUMEXP = True


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with cuda_stand_ins.stand_ins():
        yield


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    CALLED.clear()
    yield
    memo._cached.cache_clear()


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool | None = None, scale: float | None = None) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, bool(causal), scale=scale)[0]


def efficient(
    q: Tensor, k: Tensor, v: Tensor, b: Any = None, causal: bool | None = None, scale: Any = None
) -> Any:
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, b, LOGSUMEXP, 0.0, bool(causal), scale=scale
    )[0]


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, b: Any = None, causal: bool | None = None, scale: Any = None
) -> Any:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, b, LOGSUMEXP, 0.0, bool(causal), scale=scale)[0]


def math(*args: Any) -> Any:
    return attention(*args)[0]


Function = Callable[..., Any]
_Q, _K, _V = real(N, 2, 5, 4), real(N, 2, 6, 4), real(N, 2, 6, 4)


def _as_padded(bias: Tensor) -> Tensor:
    """Align the rows of a mask for the kernel, as torch does."""
    return F.pad(bias, (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]]


def _pair(name: str, kernel: Function, exact: Function, *specs: Any, **options: Any) -> Any:
    """Return a case of a CUDA operator, and its equivalent by other operators."""
    case = operator(name, kernel, *specs, **options)
    return pytest.param(case, replace(case, function=exact), id=name)


def _with(function: Function, *rest: Any) -> Function:
    return lambda q, k, v: function(q, k, v, *rest)


def _time_first(function: Function, *rest: Any) -> Function:
    """Take q, k and v from one tensor (samples, steps, heads, features), as models do."""
    return lambda x: function(*(tensor.transpose(1, 2) for tensor in x.chunk(3, -1)), *rest)


def _last_dimensions_swapped(function: Function) -> Function:
    return lambda q, k, v: function(q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3))


def _same_tensor(function: Function) -> Function:
    return lambda q: function(q, q, q)


def _repeated_bias(function: Function) -> Function:
    return lambda q, k, v, b: function(q, k, v, _as_padded(b).expand(len(q), -1, 5, -1))


def _own_bias(function: Function) -> Function:
    return lambda q, k, v, b: function(q, k, v, _as_padded(b) * 1.5, None, 0.3)


def _plain_bias(function: Function) -> Function:
    return lambda q, k, v, b: function(q, k, v, b)


def _fixed_bias(function: Function) -> Function:
    return lambda q, k, v: function(q, k, v, torch.ones(5, 8, dtype=q.dtype).tril()[:, :6])


ATTENTION = [
    *(
        _pair(f"{name}, {what}", turn(kernel, *rest), turn(exact, *rest), *specs)
        for name, kernel in (("flash", flash), ("efficient", efficient), ("cudnn", cudnn))
        for exact in [math if name != "flash" else lambda q, k, v, *rest: math(q, k, v, None, *rest)]
        for causal in [(True, 0.4) if name == "flash" else (None, True, 0.4)]
        for what, turn, rest, specs in (
            ("plain", _with, (), (_Q, _K, _V)),
            ("causal", _with, causal, (_Q, _K, _V)),
            ("time first", _time_first, causal, (real(N, 6, 2, 12),)),
            (
                "last dimension turned",
                _last_dimensions_swapped,
                (),
                (real(N, 2, 4, 5), real(N, 2, 4, 6), real(N, 2, 4, 6)),
            ),
            ("of one tensor", _same_tensor, (), (_Q,)),
        )
    ),
    *(
        _pair(f"{name}, {what}", turn(kernel), turn(math), _Q, _K, _V, *spec, plain=plain)
        for name, kernel in (("efficient", efficient), ("cudnn", cudnn))
        for what, turn, spec, plain in (
            ("a mask for all, repeated", _repeated_bias, (real(1, 2, 1, 6),), ()),
            ("a mask for each", _own_bias, (real(N, 2, 5, 6),), ()),
            ("a plain mask for each", _own_bias, (real(N, 2, 5, 6),), (3,)),
        )
        if name == "efficient" or plain
    ),
    _pair(
        "efficient, a mask for all",
        _plain_bias(efficient),
        _plain_bias(math),
        _Q,
        real(N, 2, 8, 4),
        real(N, 2, 8, 4),
        real(1, 2, 5, 8),
    ),
    _pair("cudnn, a mask without samples", _fixed_bias(cudnn), _fixed_bias(math), _Q, _K, _V),
]


def check(
    case: OperatorCase, exact: OperatorCase, microbatches: tuple[int, ...] = (3, 1, SAMPLES), **options: Any
) -> None:
    """Assert that micro-batches give the result on full tensors without gathering."""
    whole = on_whole_tensors(exact, SAMPLES)
    for microbatch in microbatches:
        CALLED.clear()
        found = on_virtual_tensors(case, SAMPLES, microbatch, on_gather="error", **options)
        assert_same(case, found, whole)
        assert CALLED
        assert options.get("paranoid") or max(samples for _, samples in CALLED) <= microbatch


each_attention = pytest.mark.parametrize(("case", "exact"), ATTENTION)


@each_attention
def test_attention(case: OperatorCase, exact: OperatorCase) -> None:
    if case.name.startswith("cudnn, a plain mask"):  # this mask has no gradient
        case, exact = (
            replace(one, function=lambda q, k, v, b, f=one.function: f(q, k, v, b.detach()))
            for one in (case, exact)
        )
    check(case, exact)
    check(case, exact, (3,), device_budget=0)
    found = on_virtual_tensors(case, 1, 4, on_gather="error")
    assert_same(case, found, on_whole_tensors(exact, 1))


@pytest.mark.parametrize(("case", "exact"), ATTENTION[::4])
def test_attention_in_paranoid_mode(case: OperatorCase, exact: OperatorCase) -> None:
    check(case, exact, (3, 1), paranoid=True)


def test_all_outputs_of_an_attention_kernel() -> None:
    """Log-sum-exps are returned per sample, lengths as ints, other outputs as None."""
    q = torch.randn(SAMPLES, 2, 5, 4, dtype=torch.float64)
    with virtual_batch(nn.Identity(), 3, on_gather="error") as batch:
        given: Any = batch(q)
        _, sums, *rest = aten._scaled_dot_product_flash_attention(given, given, given)
        ours = torch.as_tensor(sums.numpy())
    assert rest == [None, None, 5, 5, None, None, None]
    assert torch.allclose(ours, attention(q, q, q)[1])


DROPPING: dict[str, Callable[..., Any]] = {
    "flash": aten._scaled_dot_product_flash_attention,
    "efficient": lambda *x: aten._scaled_dot_product_efficient_attention(*x[:3], None, LOGSUMEXP, x[3]),
    "cudnn": lambda *x: aten._scaled_dot_product_cudnn_attention(*x[:3], None, LOGSUMEXP, x[3]),
}


def _coupled(out: Any) -> Any:
    """Couple samples twice, so that later sweeps recompute forwards."""
    out = (out - out.mean(0)).square()
    return (out - out.mean(0)).square().sum()


@pytest.mark.parametrize("kernel", DROPPING)
@pytest.mark.parametrize("size", [1, 3, SAMPLES])
def test_attention_with_dropout_runs_in_micro_batches(kernel: str, size: int) -> None:
    """All sweeps and the backward use one mask per micro-batch, without gathering."""
    q = torch.randn(SAMPLES, 2, 5, 4, dtype=torch.float64)
    MASKS.clear()
    with virtual_batch(nn.Identity(), size, on_gather="error") as batch:
        x = q.clone().requires_grad_()
        given: Any = batch(x)
        _coupled(DROPPING[kernel](given, given, given, 0.4)[0]).backward()
    assert max(samples for _, samples in CALLED) <= size
    assert any("backward" in name for name, _ in CALLED)
    microbatches = -(-SAMPLES // size)
    assert len(MASKS) >= 2 * microbatches, "premise: a forward ran again"
    assert all(any(torch.equal(mask, first) for first in MASKS[:microbatches]) for mask in MASKS)
    assert len({tuple(mask.flatten().tolist()) for mask in MASKS}) == microbatches, (
        "each micro-batch draws its own mask"
    )
    mask = torch.cat(MASKS[:microbatches])
    assert bool((mask == 0).any()) and bool((mask > 1).any())
    exact = q.clone().requires_grad_()
    _coupled(attention(exact, exact, exact, mask=mask)[0]).backward()
    assert x.grad is not None and exact.grad is not None and exact.grad.norm() > 0
    assert torch.allclose(x.grad, exact.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", DROPPING)
def test_with_rng_batch_attention_draws_the_mask_of_the_large_batch(kernel: str) -> None:
    q = torch.randn(SAMPLES, 2, 5, 4, dtype=torch.float64)
    gradients = []
    for virtual in (True, False):
        x = q.clone().requires_grad_()
        torch.manual_seed(4)
        CALLED.clear()
        if virtual:
            with virtual_batch(nn.Identity(), 3, rng="batch") as batch:
                given: Any = batch(x)
                _coupled(DROPPING[kernel](given, given, given, 0.4)[0]).backward()
        else:
            _coupled(DROPPING[kernel](x, x, x, 0.4)[0]).backward()
        assert {samples for _, samples in CALLED} == {SAMPLES}
        gradients.append(x.grad)
    assert gradients[1].norm() > 0
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", DROPPING)
def test_mutant_with_another_mask_in_the_backward(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_rules, "seeded", lambda device, seed: nullcontext())
    with pytest.raises(AssertionError):
        test_attention_with_dropout_runs_in_micro_batches(kernel, 3)


# -- recurrent layers ---------------------------------------------------------------------------------------


def _recurrent(
    kind: type[nn.Module], batch_first: bool, *, flat: bool = False, states: bool = True, **options: Any
) -> Any:
    """Return a case of a layer by cuDNN's operator, and its equivalent by CPU operators."""
    layer: Any = kind(3, 4, 2, batch_first=batch_first, **options)
    mode, biases = (LSTM, 4) if kind is nn.LSTM else (GRU, 4)
    directions = 2 if options.get("bidirectional") else 1
    weights = [real(*weight.shape) for weight in layer._flat_weights]
    flags = {"num_layers": 2, "bidirectional": directions == 2, "batch_first": batch_first}

    def ordered(x: Tensor, hx: Tensor, cx: Tensor) -> Any:
        x = x if batch_first else x.transpose(0, 1)
        hx, cx = hx.transpose(0, 1), cx.transpose(0, 1)
        return x, hx, cx if kind is nn.LSTM else None

    def used(found: Any) -> Any:
        out, hy, cy = found[:3] if kind is nn.LSTM else (*found[:2], found[1])
        return (out.transpose(0, 1) if not batch_first else out, hy * 2, cy.square()) if states else out

    def by_cudnn(x: Tensor, hx: Tensor, cx: Tensor, *w: Tensor) -> Any:
        x, hx, cx = ordered(x, hx, cx)
        buffer = torch.cat([weight.detach().reshape(-1) for weight in w]) if flat else None
        rest: Any = (mode, 4, 0, 2, batch_first, 0.0, True, directions == 2, [], None)
        return used(aten._cudnn_rnn(x, list(w), biases, buffer, hx, cx, *rest))

    def by_cpu(x: Tensor, hx: Tensor, cx: Tensor, *w: Tensor) -> Any:
        x, hx, cx = ordered(x, hx, cx)
        return used(layers(x, hx, cx, list(w), biases, **flags))

    name = f"{kind.__name__}, {batch_first=}, {flat=}, {states=}, {options}"
    state = real(N, 2 * directions, 4)
    return _pair(name, by_cudnn, by_cpu, real(N, 5, 3), state, state, *weights)


RECURRENT = [
    _recurrent(nn.LSTM, batch_first=True, flat=True),
    _recurrent(nn.LSTM, batch_first=False, bidirectional=True),
    _recurrent(nn.LSTM, batch_first=True, states=False),
    _recurrent(nn.GRU, batch_first=True, bidirectional=True, flat=True),
    _recurrent(nn.GRU, batch_first=False, states=False),
]
each_recurrent = pytest.mark.parametrize(("case", "exact"), RECURRENT)


@each_recurrent
def test_recurrent_layers(case: OperatorCase, exact: OperatorCase) -> None:
    check(case, exact)
    check(case, exact, (3,), device_budget=0)
    check(case, exact, (3,), paranoid=True)


def _layer_on(x: Any, train: bool = True, dropout: float = 0.0, batch_sizes: Any = ()) -> Any:
    layer = nn.LSTM(3, 4, 2).double()
    state = torch.zeros(2, SAMPLES, 4, dtype=torch.float64)
    weights: Any = layer._flat_weights
    rest = (LSTM, 4, 0, 2, True, dropout, train, False, list(batch_sizes), None)
    return aten._cudnn_rnn(x, weights, 4, None, state, state, *rest)


def test_a_recurrent_layer_in_evaluation() -> None:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 5, 3, dtype=torch.float64)
    with torch.no_grad(), virtual_batch(nn.Identity(), 3, on_gather="error") as batch:
        torch.manual_seed(1)
        ours = torch.as_tensor(_layer_on(batch(x), train=False, dropout=0.5)[0].numpy())
    torch.manual_seed(1)
    assert torch.allclose(ours, _layer_on(x, train=False)[0])


def test_dropout_between_recurrent_layers_runs_on_the_whole_batch() -> None:
    x = torch.randn(SAMPLES, 5, 3, dtype=torch.float64, requires_grad=True)
    with virtual_batch(nn.Identity(), 3) as batch:
        _layer_on(batch(x), dropout=0.5)[0].square().sum().backward()
    assert CALLED == [("rnn", SAMPLES), ("rnn backward", SAMPLES)]
    with (
        pytest.raises(CoupledSamplesError, match="_cudnn_rnn"),
        virtual_batch(nn.Identity(), 3, on_gather="error") as batch,
    ):
        _layer_on(batch(x) * 2, dropout=0.5)


# -- fused cells and BatchNorm ------------------------------------------------------------------------------


def _cell(kind: type[nn.Module], biased: bool) -> Any:
    packet, gates = (
        (aten._thnn_fused_lstm_cell, 16) if kind is nn.LSTMCell else (aten._thnn_fused_gru_cell, 12)
    )
    outputs = 2 if kind is nn.LSTMCell else 1
    biases = [real(gates), real(gates)] if biased else []
    kernel = {16: cuda_stand_ins._lstm_cell, 12: cuda_stand_ins._gru_cell}[gates]
    name = f"{kind.__name__}, {biased=}"
    inputs = [real(N, gates), real(N, gates), real(N, 4), *biases]
    return _pair(name, lambda *x: packet(*x)[:outputs], lambda *x: kernel(*x)[:outputs], *inputs)


CELLS = [_cell(kind, biased) for kind in (nn.LSTMCell, nn.GRUCell) for biased in (True, False)]


@pytest.mark.parametrize(("case", "exact"), CELLS)
def test_fused_cells(case: OperatorCase, exact: OperatorCase) -> None:
    check(case, exact)
    check(case, exact, (3,), device_budget=0)
    check(case, exact, (3,), paranoid=True)


@pytest.mark.parametrize("training", [True, False])
def test_cudnn_batch_norm(training: bool) -> None:
    """Forward, backward and running statistics equal those of F.batch_norm."""
    shape = real(N, 3, 4, 4)
    running = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5
    buffers: dict[str, list[tuple[Tensor, Tensor]]] = {"ours": [], "whole": []}

    def kept(which: str) -> tuple[Tensor, Tensor]:
        pair = running[0].clone(), running[1].clone()
        buffers[which].append(pair)
        return pair

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return aten.cudnn_batch_norm(x, w, b, *kept("ours"), training, 0.3, 1e-5)[0]

    def whole(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return F.batch_norm(x, *kept("whole"), w, b, training, 0.3, 1e-5)

    case = operator("cudnn BatchNorm", ours, shape, real(3), real(3))
    expected = on_whole_tensors(replace(case, function=whole), SAMPLES)
    for options in ({"microbatch": 3}, {"microbatch": 1}, {"microbatch": 3, "device_budget": 0}):
        assert_same(case, on_virtual_tensors(case, SAMPLES, on_gather="error", **options), expected)
    for pair in buffers["ours"]:
        for found, wanted in zip(pair, buffers["whole"][0], strict=True):
            assert torch.allclose(found, wanted, rtol=1e-12)


# -- mutants: wrong rules -----------------------------------------------------------------------------------


def _case(name: str) -> Callable[..., None]:
    (found,) = [one.values for one in [*ATTENTION, *RECURRENT, *CELLS] if one.id == name]
    return lambda **options: check(*found, (3,), **options)  # type: ignore[arg-type]


def _own(
    packet: Any, change: Callable[[Call, OpStrategy], OpStrategy]
) -> Callable[[pytest.MonkeyPatch], None]:
    rule = OWN[packet]

    def wrong(call: Call) -> OpStrategy | None:
        strategy = rule(call)
        return None if strategy is None else change(call, strategy)

    return lambda patch: patch.setitem(OWN, packet, wrong)


def _of_other_forward(call: Call, strategy: OpStrategy) -> OpStrategy:
    """Give the backward the saved tensors of a forward on other inputs."""

    def run(microbatch: Any, tensors: list[Tensor]) -> Any:
        kernel = attention_rules._FLASH.forward
        made = kernel(tensors[1] * 2, *tensors[2:])
        return call.func(*tensors, *made[:6], *call.args[10:12], *made[6:8])

    return strategy._replace(run=run)


_EFFICIENT_BACK = aten._scaled_dot_product_efficient_attention_backward.default
_LSTM_NAME = RECURRENT[0].id
MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]]] = {
    "gradient of a bias from one micro-batch": (
        _own(_EFFICIENT_BACK, lambda call, strategy: strategy._replace(reduce=First)),
        _case("efficient, a mask for all"),
    ),
    "saved tensors of another forward": (
        _own(aten._scaled_dot_product_flash_attention_backward.default, _of_other_forward),
        _case("flash, plain"),
    ),
    "strides unchanged": (
        lambda patch: patch.setattr(
            attention_rules, "_with_kernel_layout", lambda tensors, main, alignment: tensors
        ),
        _case("efficient, last dimension turned"),
    ),
    "gradients of last states split by layer": (
        lambda patch: patch.setattr(recurrent, "_STATES", ("hx", "cx")),
        _case(_LSTM_NAME),
    ),
    "gradients of biases per sample": (
        lambda patch: patch.setitem(ROWS, aten._thnn_fused_gru_cell_backward, [("00", "00000")]),
        _case("GRUCell, biased=True"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, run = MUTANTS[name]
    run()  # premise: the rule as it is passes
    patch(monkeypatch)
    memo._cached.cache_clear()
    with pytest.raises((AssertionError, RuntimeError)):
        run()
