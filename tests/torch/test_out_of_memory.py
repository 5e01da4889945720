"""Out of memory at any operation of a window: the update is that without the failure."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from superbatch.errors import OptimizerError, OutOfMemoryError
from superbatch.results.memory import Limit
from superbatch.torch import Accumulator, TokenBudget, count_tokens, windows
from superbatch.torch.memory.out_of_memory import out_of_memory
from superbatch.torch.options import GhostBatchNorm, PerSampleRandom
from tests.torch.helpers import (
    assert_same_parameters,
    mlp,
    mse,
    rows,
    sgd,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
)

TEXT = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


MakeAccumulator = Callable[[nn.Module], Accumulator]


class FailAt(TorchDispatchMode):
    """Mode that raises the error of torch's allocator in the n-th operation after `arm`."""

    def __init__(self, error: Callable[[], Exception] = lambda: RuntimeError(TEXT)) -> None:
        super().__init__()
        self.count, self.at, self._error = 0, -1, error
        self.failed: list[str] = []

    def arm(self, at: int) -> None:
        self.count, self.at = 0, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:  # views allocate nothing
            return func(*args, **(kwargs or {}))
        if self.count == self.at:
            self.at = -1
            self.failed.append(str(func))
            raise self._error()
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "memory ran out")
        yield


class Case:
    """One way to train for three windows, with a failure in the middle one."""

    def __init__(
        self, make: Callable[[], nn.Module], accumulator: Callable[[nn.Module], Accumulator]
    ) -> None:
        self.make, self.accumulator = make, accumulator

    def train(self, batches: list[Any], at: int | None) -> tuple[nn.Module, FailAt, list[Any], str | None]:
        """Return model, failure, updates, and the error, if any, after which the window is repeated.

        A torn update ends the training: it allows no window before a state is loaded.
        """
        torch.manual_seed(5)
        random.seed(5)
        model = self.make()
        accumulate = self.accumulator(model)
        fail, updates, error = FailAt(), [], None
        with quiet():
            for number, batch in enumerate(batches):
                if number != 1:
                    updates.append(accumulate(batch))
                    continue
                with fail:
                    fail.arm(-1 if at is None else at)
                    try:
                        updates.append(accumulate(batch))
                    except (OutOfMemoryError, RuntimeError) as raised:
                        error = str(raised)
                        if "Load a checkpoint" in error:
                            with pytest.raises(OptimizerError, match="torn"):
                                accumulate(batch)
                            break
                        updates.append(accumulate(batch))
        return model, fail, updates, error


def check_every_operation(case: Case, batches: list[Any], *, stride: int = 1) -> None:
    """Run out of memory at each operation of the second window in turn."""
    start = start_of(case.make())
    reference, undisturbed, updates, _ = case.train(batches, None)
    assert all(update.made and not update.failures for update in updates), "premise: it trains"
    recovered = at_the_update = torn = 0
    for at in range(0, undisturbed.count, stride):
        model, fail, updates, error = case.train(batches, at)
        assert len(fail.failed) == 1 and all(update.made for update in updates), "premise: it failed once"
        if error is not None and "Load a checkpoint" in error:
            torn += 1
            continue
        assert_same_parameters(reference, model, 1e-12, start=start)
        if error is None and not updates[1].failures:  # in the update from momentum buffers
            assert fail.failed == ["aten.add_.Tensor"] and updates[1].grad_norm is None
            at_the_update += 1
        elif error is None:
            assert updates[1].failures == 1, fail.failed
            recovered += 1
        elif "There is not enough memory for an update" in error:
            at_the_update += 1
        else:  # before the window began
            assert at < 12 and TEXT in error, (at, undisturbed.count, fail.failed, error)
    assert recovered > at_the_update > 0, "premise: failures in micro-batches, and some in the update"
    # These fail in the optimizer's loop over parameters, for which `Reserve` keeps memory free in practice.
    assert torn <= undisturbed.count // 4


def plain(**options: Any) -> Case:
    def accumulator(model: nn.Module) -> Accumulator:
        return Accumulator(
            model,
            sgd(model.parameters()),
            lambda mb: mse(model, mb),
            check=False,
            microbatch_size=4,
            **options,
        )

    return Case(mlp, accumulator)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "into momentum": {"gradient_sum": "momentum"},
    "skip micro-batches": {"nonfinite": "skip_microbatch"},
    "random numbers per sample": {"participants": [PerSampleRandom()]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_any_operation_may_run_out_of_memory(name: str) -> None:
    check_every_operation(plain(**OPTIONS[name]), rows(10, 3), stride=1 if name == "plain" else 4)


def test_weights_by_tokens_and_returned_with_the_loss() -> None:
    batches = [tokens([7, 1, 1, 2, 4, 3, 6, 3], seed=seed) for seed in range(3)]

    def counted(model: nn.Module) -> Accumulator:
        weight = count_tokens("labels")
        return Accumulator(
            model,
            sgd(model.parameters()),
            lambda mb: token_mean(model, mb),
            check=False,
            microbatch_size=4,
            weight=weight,
        )

    def returned(model: nn.Module) -> Accumulator:
        def loss(mb: Any) -> tuple[Tensor, int]:
            return token_mean(model, mb), int((mb["labels"] != -100).sum())

        return Accumulator(
            model, sgd(model.parameters()), loss, check=False, microbatch_size=4, weight="returned"
        )

    for accumulator in (counted, returned):
        check_every_operation(Case(tiny_lm, accumulator), batches, stride=5)


class DropoutModel(nn.Module):
    """Checkpointed model with dropout and a buffer that counts samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 1).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        hidden = checkpoint(self.first, x, use_reentrant=False)
        return self.last(nn.functional.dropout(hidden, 0.5))


def test_dropout_by_sample_and_buffers() -> None:
    def accumulator(model: nn.Module) -> Accumulator:
        return Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            lambda mb: model(mb[0]).square().mean(),
            check=False,
            microbatch_size=4,
            participants=[PerSampleRandom()],
        )

    batches = [(torch.randn(8, 4, dtype=torch.float64),) for _ in range(3)]
    check_every_operation(Case(DropoutModel, accumulator), batches, stride=5)
    case = Case(DropoutModel, accumulator)
    for at in (3, 40, 80):
        model, fail, *_ = case.train(batches, at)
        assert fail.failed and int(model.get_buffer("seen")) == 24, "each sample counted once"


class CountingModel(nn.Module):
    """Model without random numbers whose buffer counts samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x)


def test_a_buffer_counts_each_sample_once_wherever_memory_runs_out() -> None:
    def accumulator(model: nn.Module) -> Accumulator:
        return Accumulator(
            model,
            sgd(model.parameters()),
            lambda mb: model(mb[0]).square().mean(),
            check=False,
            microbatch_size=4,
        )

    batches = [(torch.randn(8, 4, dtype=torch.float64),) for _ in range(3)]
    case, recovered = Case(CountingModel, accumulator), 0
    for at in range(case.train(batches, None)[1].count):
        model, _, updates, error = case.train(batches, at)
        if error is None:
            recovered += updates[1].failures
            assert int(model.get_buffer("seen")) == 24
    assert recovered > 10, "premise: failures after the count in the forward"


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_the_global_generators_are_restored_to_the_start_of_the_micro_batch(at: int) -> None:
    """If smaller micro-batches draw as many numbers, the run continues as without the failure."""
    model = mlp()
    drawn: list[float] = []

    def loss(mb: Any) -> Tensor:
        # One number for each sample, so that the number of draws does not depend on the split.
        noise = torch.stack([torch.rand((), dtype=torch.float64) for _ in range(len(mb[0]))])
        drawn.extend(noise.tolist())
        return (model(mb[0]).square().mean(1) * (0.5 + noise)).mean()

    results = []
    for place in (None, at):
        torch.manual_seed(3)
        drawn.clear()
        model.load_state_dict(mlp().state_dict())
        accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
        fail, batch = FailAt(), rows(8)[0]
        with fail, quiet():
            fail.arm(-1 if place is None else place)
            accumulate(batch)
        results.append(([p.detach().clone() for p in model.parameters()], torch.rand(())))
    (parameters, then), (after_failure, then_after_failure) = results
    assert torch.equal(then, then_after_failure)
    for a, b in zip(parameters, after_failure, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_partial_backward_is_removed_from_the_sum() -> None:
    """The failure comes after the last layer's gradient of the second micro-batch was added."""
    model, reference = mlp(), mlp()
    start = start_of(reference)
    added: list[int] = []
    armed = [True]
    names = [name for name, _ in model.named_parameters()]

    def hook(parameter: Tensor) -> None:
        added.append(1)
        if armed[0] and len(added) == len(names) + 2:  # two parameters into the second backward
            armed[0] = False
            raise RuntimeError(TEXT)

    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: mse(model, mb), check=False, microbatch_size=4
    )
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with pytest.warns(UserWarning, match=r"micro-batch 1 \(3 samples\); the window begins again"):
        update = accumulate(rows(10)[0])
    assert update.failures == 1 and update.made and not armed[0]
    large = Accumulator(reference, sgd(reference.parameters()), lambda mb: mse(reference, mb))
    large(rows(10)[0])
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_window_continues_after_a_failure_in_the_forward() -> None:
    model, seen, armed = mlp(), [], [False, True]

    def loss(mb: Any) -> Tensor:
        seen.append(len(mb[0]))
        if len(seen) == 3 and armed.pop():
            raise RuntimeError(TEXT)
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with pytest.warns(UserWarning, match=r"the window continues in micro-batches of at most 2"):
        update = accumulate(rows(12)[0])
    assert seen == [4, 4, 4, 2, 2]
    assert (update.microbatches, update.failures, update.samples) == (4, 1, 12)
    seen.clear()
    accumulate(rows(12)[0])
    assert set(seen) == {2}, "the next window keeps the smaller size"


def test_sizes_grow_again_after_a_wait_that_doubles() -> None:
    model, seen, most = mlp(), [], [2]

    def loss(mb: Any) -> Tensor:
        seen.append(len(mb[0]))
        if len(mb[0]) > most[0]:
            raise MemoryError("no room")
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    batch = rows(4)[0]
    with quiet():
        failures = [number for number in range(160) if accumulate(batch).failures]
        assert failures == [0, 50, 150], "retried after 50 and after 100 updates"
        most[0] = 4
        seen.clear()
        for _ in range(200):
            accumulate(batch)
    assert seen[-1] == 4, "the larger size fits again"


def test_micro_batches_of_a_loader_are_split_too() -> None:
    model, reference, failed = mlp(), mlp(), []
    start = start_of(reference)

    def loss(mb: Any) -> Tensor:
        if len(mb[0]) > 3:
            failed.append(len(mb[0]))
            raise RuntimeError(TEXT)
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False)
    loader = rows(5, 4)
    with quiet():
        updates = [accumulate(window) for window in windows(loader, accumulation_steps=2)]
    assert [update.failures for update in updates] == [1, 0] and failed == [5]
    large = Accumulator(reference, sgd(reference.parameters()), lambda mb: mse(reference, mb))
    for first in (0, 2):
        large(tuple(torch.cat(leaves) for leaves in zip(*loader[first : first + 2], strict=True)))
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_token_budget_is_reduced() -> None:
    model, reference = tiny_lm(), tiny_lm()
    start = start_of(reference)
    batch = tokens([7, 1, 1, 2, 4, 3, 6, 3])
    rows_seen: list[int] = []

    def loss(mb: Any) -> Tensor:
        rows_seen.append(len(mb["labels"]))
        if len(rows_seen) == 1:
            raise RuntimeError(TEXT)
        return token_mean(model, mb)

    def lengths(b: Any) -> list[int]:
        return [max(1, int(n)) for n in (b["labels"] != -100).sum(1)]

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss,
        check=False,
        weight=count_tokens("labels"),
        microbatch_size=TokenBudget(14, lengths),
    )
    with quiet():
        assert accumulate(batch).failures == 1
    large = Accumulator(
        reference,
        sgd(reference.parameters()),
        lambda mb: token_mean(reference, mb),
        weight=count_tokens("labels"),
    )
    large(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_one_sample_that_does_not_fit_raises_and_changes_nothing() -> None:
    model = mlp()
    before = start_of(model)

    def loss(mb: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with (
        quiet(),
        pytest.raises(OutOfMemoryError, match=r"of 1 sample \(.*2\.00 GiB.*MiB of parameters.*one sample"),
    ):
        accumulate(rows(4)[0])
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_per_microbatch_statistics_are_not_split_silently() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()

    def loss(mb: Any) -> Tensor:
        raise RuntimeError(TEXT)

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss, check=False, microbatch_size=4, participants=[GhostBatchNorm()]
    )
    with pytest.raises(OutOfMemoryError, match="the update would change in smaller micro-batches"):
        accumulate(torch.randn(8, 4, dtype=torch.float64))


def test_other_errors_are_not_swallowed() -> None:
    model = mlp()

    def loss(mb: Any) -> Tensor:
        raise RuntimeError("the size of tensor a (3) must match the size of tensor b (4)")

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with pytest.raises(RuntimeError, match="must match the size"):
        accumulate(rows(4)[0])


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GiB"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (
            RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
            True,
        ),
        (RuntimeError("CUDA driver error: invalid argument"), False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("XPU out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (RuntimeError("out of memory budget for the data set"), False),
        (ValueError("CUDA out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_out_of_memory_is_recognised_by_type_and_text(error: BaseException, yes: bool) -> None:
    assert out_of_memory(error) is yes


_AMBIGUOUS = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
)


@pytest.mark.parametrize("text", _AMBIGUOUS)
@pytest.mark.parametrize(("free", "yes"), [(2**27, True), (2**32, True), (2**35, False)])
def test_ambiguous_gpu_errors_count_as_out_of_memory_if_memory_is_scarce(
    text: str, free: int, yes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake device of 80 GiB less than a sixteenth is scarce; other devices are not queried."""
    _fake_gpu(monkeypatch, {1: free})
    assert out_of_memory(RuntimeError(text)) is yes


@pytest.mark.parametrize("text", _AMBIGUOUS)
def test_ambiguous_gpu_errors_do_not_count_without_a_gpu_in_use(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not out_of_memory(RuntimeError(text))


def _fake_gpu(monkeypatch: pytest.MonkeyPatch, free: dict[int, int]) -> None:
    fake: dict[str, Any] = {
        "is_initialized": lambda: True,
        "current_device": lambda: 1,
        "device_count": lambda: 3,
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "mem_get_info": lambda device: (free[getattr(device, "index", device)], 80 << 30),
        "get_per_process_memory_fraction": lambda device: 1.0,
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)


def test_a_users_loop_gets_the_error_and_then_smaller_micro_batches() -> None:
    model = mlp()
    before = start_of(model)
    accumulator = Accumulator(model, sgd(model.parameters()), check=False, microbatch_size=4)

    def run_out() -> None:
        with accumulator.window(rows(8)[0]) as window:
            for _ in window:
                raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run_out()
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    with accumulator.window(rows(8)[0]) as window:
        sizes = [(len(mb[0]), window.backward(mse(model, mb)))[0] for mb in window]
    assert sizes == [2, 2, 2, 2]


def test_a_failed_micro_batch_is_freed_before_the_next_begins() -> None:
    import weakref

    model, outputs, alive = mlp(), [], []

    def loss(mb: Any) -> Tensor:
        alive.append(sum(reference() is not None for reference in outputs))
        out = model(mb[0])
        outputs.append(weakref.ref(out))
        if len(outputs) in (2, 5):
            raise RuntimeError(TEXT)
        return out.square().mean()

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with quiet():
        accumulate(rows(12)[0])
    assert len(alive) > 5 and not any(alive)


# -- the update ------------------------------------------------------------------------------------------


class FailingAdamW(torch.optim.AdamW):
    """AdamW that runs out of memory after it has made some of its state."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        if self.armed:
            group = self.param_groups[0]
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            raise RuntimeError(TEXT)
        return super().step(closure)


def test_out_of_memory_in_the_optimizer_restores_all_state() -> None:
    model = mlp()
    before = start_of(model)
    optimizer = FailingAdamW(model.parameters(), lr=1e-2)
    calls: list[int] = []

    def loss(mb: Any) -> Tensor:
        calls.append(1)
        return mse(model, mb)

    accumulate = Accumulator(model, optimizer, loss, check=False, microbatch_size=4)
    optimizer.armed = True
    with pytest.raises(
        OutOfMemoryError, match=r"There is not enough memory for an update.*as before the window"
    ):
        accumulate(rows(8)[0])
    assert len(calls) == 2, "no micro-batch is retried after the optimizer's error"
    assert not optimizer.state and accumulate.updates == 0
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    optimizer.armed = False
    assert accumulate(rows(8)[0]).made


def test_memory_for_the_first_update_is_reserved_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the reserve the first of two groups would be updated, and the second would not."""
    model = nn.Sequential(nn.Linear(300, 1000), nn.Linear(1000, 300))
    groups = [{"params": list(layer.parameters())} for layer in model]
    optimizer = torch.optim.AdamW(groups)
    before = start_of(model)
    accumulate = Accumulator(
        model, optimizer, lambda x: model(x).square().mean(), check=False, microbatch_size=4
    )
    asked: list[int] = []
    empty = torch.empty

    def limited(*size: Any, **options: Any) -> Tensor:
        asked.append(size[0])
        if len(asked) == 2:
            raise RuntimeError(TEXT)
        return empty(*size, **options)

    monkeypatch.setattr("superbatch.torch.sizes.reserve.torch.empty", limited)
    with pytest.raises(OutOfMemoryError, match=r"the optimizer's state and temporary tensors need 6\.\d MiB"):
        accumulate(torch.randn(8, 300))
    monkeypatch.undo()
    assert not optimizer.state
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert accumulate(torch.randn(8, 300)).made and len(optimizer.state) == 4


def test_a_torn_update_raises() -> None:
    model = mlp()

    class TornSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError(TEXT)

    accumulate = Accumulator(
        model, TornSGD(model.parameters(), lr=0.1), lambda mb: mse(model, mb), check=False
    )
    with pytest.raises(OutOfMemoryError, match=r"some parameters or states have changed.*Load a checkpoint"):
        accumulate(rows(4)[0])


def test_the_first_window_check_works_with_less_memory() -> None:
    model = mlp()

    def loss(mb: Any) -> Tensor:
        if len(mb[0]) > 3:
            raise RuntimeError(TEXT)
        return mse(model, mb)

    def wrong(mb: Any) -> Tensor:
        return loss(mb) * len(mb[0])

    with quiet():
        assert Accumulator(model, sgd(model.parameters()), loss, microbatch_size=8)(rows(16)[0]).made
        with pytest.raises(ValueError, match="sum"):
            Accumulator(model, sgd(model.parameters()), wrong, microbatch_size=8)(rows(16)[0])


def test_a_window_of_smaller_micro_batches_is_resumed_bit_for_bit() -> None:
    def run(*, stop: bool) -> nn.Module:
        model = mlp()
        optimizer = sgd(model.parameters())
        accumulator = Accumulator(model, optimizer, check=False, microbatch_size=8)
        accumulator.engine.work.sizing.failed(8)  # premise: memory has run out before
        batch = rows(16)[0]
        state: Any = None
        with accumulator.window(batch) as window:
            for number, mb in enumerate(window):
                window.backward(mse(model, mb))
                if stop and number == 1:
                    state = accumulator.state_dict()
                    break
        if state is not None:
            accumulator = Accumulator(model, optimizer, check=False, microbatch_size=8)
            accumulator.load_state_dict(state)
            with accumulator.window(batch) as window:
                assert [(len(mb[0]), window.backward(mse(model, mb)))[0] for mb in window] == [4, 4]
        assert window.update is not None and window.update.made
        return model

    for a, b in zip(run(stop=False).parameters(), run(stop=True).parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("free", "yes"), [(2**20, True), (2**33, False)])
def test_an_ambiguous_onednn_error_counts_as_out_of_memory_if_memory_is_scarce(
    free: int, yes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superbatch.torch.memory.out_of_memory.memory_limit", lambda _: Limit(free, "a test"))
    assert out_of_memory(RuntimeError("could not create a primitive")) is yes


def test_the_check_uses_few_samples_while_the_size_is_unknown() -> None:
    model, seen = mlp(), []

    def loss(mb: Any) -> Tensor:
        seen.append(len(mb[0]))
        return mse(model, mb)

    accumulate = Accumulator(model, sgd(model.parameters()), loss, microbatch_size="largest")
    accumulator_batch = rows(64)[0]
    accumulate(accumulator_batch)
    checked = seen[: -accumulate(accumulator_batch).microbatches]
    assert 8 in checked and 3 in checked, "premise: probes of 8 and of 3 samples"
    with pytest.raises(ValueError, match="sum"):
        Accumulator(
            model, sgd(model.parameters()), lambda mb: mse(model, mb) * len(mb[0]), microbatch_size="largest"
        )(accumulator_batch)


@pytest.mark.parametrize("short", [0.0, 10.0])
def test_long_micro_batches_are_retried_from_their_own_random_state(
    short: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy of the random state per micro-batch the window continues; without one it restarts."""
    monkeypatch.setattr("superbatch.torch.window.participants.snapshot.SHORT", short)
    model, calls = mlp(), []

    def loss(mb: Any) -> Tensor:
        calls.append(len(mb[0]))
        noisy = nn.functional.dropout(mb[0], 0.1)
        if len(calls) == 3:
            raise RuntimeError(TEXT)
        return mse(model, (noisy, mb[1]))

    accumulate = Accumulator(model, sgd(model.parameters()), loss, check=False, microbatch_size=4)
    with quiet():
        update = accumulate(rows(12)[0])
    assert update.made and update.failures == 1
    assert calls == ([4, 4, 4, 2, 2] if short == 0.0 else [4, 4, 4, 2, 2, 2, 2, 2, 2])
