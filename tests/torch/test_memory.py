"""`peak_bytes` against peaks computed by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from superbatch.errors import InputError
from superbatch.torch import virtual_batch
from superbatch.torch.memory.ledger import Ledger
from superbatch.torch.memory.meter import peak_bytes

KIB = 1024


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def two_at_once() -> None:
    a, b = block(3), block(4)
    del a, b


def one_after_the_other() -> None:
    a = block(3)
    del a
    b = block(4)
    del b


def freed_and_made_again() -> None:
    for _ in range(50):  # the allocator hands out the same address again
        block(5)


def views() -> None:
    a = block(3)
    b = a.view(3, KIB)[1:].t().detach()
    del a
    c = block(2)  # the whole storage of `a` is still alive through `b`
    del b, c


def in_place() -> None:
    block(3).fill_(1).add_(1).mul_(2)


def resized() -> None:
    a = block(1)
    a.resize_(6 * KIB)


def out_argument() -> None:
    a = torch.empty(0, dtype=torch.uint8)
    torch.add(block(2), 1, out=a)  # grows to 2 KiB


def from_python() -> None:
    torch.tensor([0] * KIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("fn", "kib"),
    [
        (two_at_once, 7),
        (one_after_the_other, 4),
        (freed_and_made_again, 5),
        (views, 5),
        (in_place, 3),
        (resized, 6),
        (out_argument, 4),
        (from_python, 1),
        (lambda: None, 0),
    ],
)
def test_known_peaks(fn: Callable[[], None], kib: int):
    assert peak_bytes(fn) == kib * KIB


def test_storage_allocated_before_is_not_counted():
    before = block(100)
    assert peak_bytes(lambda: before.view(-1, KIB).add_(1)) == 0
    assert peak_bytes(lambda: before[: 2 * KIB].clone()) == 2 * KIB


def test_growth_of_an_earlier_storage_is_counted():
    before = block(1)
    assert peak_bytes(lambda: before.resize_(4 * KIB)) == 3 * KIB


def test_linear_relu_forward_backward_by_hand():
    """Peak of y = relu(x W^T), L = sum y: in the backward, when relu's gradient is allocated."""
    n, i, o, f = 64, 32, 128, 8
    x = torch.randn(n, i, dtype=torch.float64)
    layer = torch.nn.Linear(i, o, bias=False, dtype=torch.float64)
    pre = post = n * o * f
    weight = i * o * f

    def fn() -> None:
        torch.relu(layer(x)).sum().backward()

    # relu saves its result, so the linear's output is freed when relu returns. Forward: pre + post.
    # Backward: relu's result and the gradient of pre, plus 2 numbers (L and its gradient). The gradient of
    # `sum` is an expanded view of one number. The weight's gradient comes later, beside relu's gradient.
    assert peak_bytes(fn) == max(pre + post, post + pre + 2 * f)
    assert layer.weight.grad is not None and layer.weight.grad.any()
    assert layer.weight.grad.nbytes == weight


def test_gradients_are_counted():
    layer = torch.nn.Linear(300, 200, bias=False)
    x = torch.ones(1, 300)
    peak = peak_bytes(lambda: layer(x).sum().backward())
    assert layer.weight.grad is not None
    grad = layer.weight.grad.nbytes
    assert grad <= peak <= 1.01 * grad + 4096


def peak_by_hand(microbatches: int, n: int, width: int, keep: bool) -> int:
    """Peak of `exp` twice and `sum`, which save both results; `keep` keeps the last graph alive."""
    one = 2 * n * width * 8
    return one * (2 if keep and microbatches > 1 else 1)


def test_loss_left_alive_in_a_loop_raises_the_peak():
    """A classic mistake: `out` of the last micro-batch stays alive during the next forward."""
    n, width = 50, 400
    w = torch.zeros(width, dtype=torch.float64, requires_grad=True)
    x = torch.ones(n, width, dtype=torch.float64)

    def forward() -> torch.Tensor:
        return (x * w).exp().exp()

    def clean() -> None:
        for _ in range(3):
            forward().sum()

    def classic() -> None:
        for _ in range(3):
            out = forward()
            out.sum()  # `out` and its graph stay alive until the name is bound again

    free, kept = peak_bytes(clean), peak_bytes(classic)
    assert free == pytest.approx(peak_by_hand(3, n, width, keep=False), rel=0.01)
    assert kept == pytest.approx(peak_by_hand(3, n, width, keep=True), rel=0.01)


def test_nothing_is_left_behind():
    held: list[torch.Tensor] = []
    peak_bytes(lambda: held.append(block(1)))
    assert _get_current_dispatch_mode() is None
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is Ledger]
    held.clear()  # must not call a freed ledger


def test_nothing_is_left_behind_after_an_exception():
    def fails() -> None:
        block(1)
        raise KeyError("user code")

    with pytest.raises(KeyError, match="user code"):
        peak_bytes(fails)
    assert _get_current_dispatch_mode() is None


def test_nested_measurements_agree():
    inner: list[int] = []
    outer = peak_bytes(lambda: inner.append(peak_bytes(two_at_once)))
    assert outer == 7 * KIB
    assert inner == [7 * KIB]


def test_other_devices_are_refused():
    with pytest.raises(
        InputError, match=r"device='meta' cannot be measured, only that of CPU and CUDA.*Pass device"
    ):
        peak_bytes(lambda: None, device="meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda():
    before = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert (
        peak_bytes(lambda: torch.empty(1 << 22, dtype=torch.uint8, device="cuda"), device="cuda") == 1 << 22
    )
    del before


def test_tensors_of_a_virtual_batch_have_no_memory():
    # The ledger sees the decomposition of a softmax over the samples, which runs on virtual tensors.
    rows = 512
    model, x = torch.nn.Linear(4, 8), torch.randn(rows, 4)
    y = torch.arange(rows)
    model.weight.grad, model.bias.grad = torch.zeros_like(model.weight), torch.zeros_like(model.bias)

    def update(microbatch_size):
        with virtual_batch(model, microbatch_size) as batch:
            z = model(batch(x))
            torch.nn.functional.cross_entropy((z @ z.T).T, batch(y)).backward()

    logits = 4 * rows * rows
    assert peak_bytes(lambda: update(rows)) >= logits, "premise"
    assert peak_bytes(lambda: update(8)) < 1.5 * logits
