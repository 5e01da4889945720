"""Memory of a virtual batch: stored tensors, offloading, prefetching and peak memory."""

from __future__ import annotations

import copy
import gc
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from superbatch.results.memory import Limit
from superbatch.torch import virtual_batch
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.virtual.ir.reductions import Moments
from superbatch.torch.virtual.ir.shard import BatchSlice
from superbatch.torch.virtual.run.prefetch import Prefetcher
from superbatch.torch.virtual.run.store import DEVICE
from tests import forked

MIB = 2**20


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width_in, width in ((3, 8), (8, 8), (8, 8)):
        layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def images(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, 16, 16), torch.randint(0, 5, (samples,))


class LargestTensor(TorchDispatchMode):
    """Mode that records the largest tensor made by an operation, in elements, without views.

    Enter it before the block: modes entered inside are off while the block computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if type(item) is Tensor and item.device.type != "meta" and not func.is_view:
                self.most = max(self.most, item.numel())
        return result


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run(samples: int, size: Any, **options: Any) -> tuple[list[Tensor], Any]:
    model = net()
    x, y = images(samples)
    with virtual_batch(model, size, **options) as batch:
        F.cross_entropy(model(batch(x)), y).backward()
    return gradients(model), batch.report()


def images_made_at_once(features: Callable[[Tensor], Tensor]) -> float:
    """Return the largest tensor in units of one image's features, for 32 images in micro-batches of 4."""
    largest, model = LargestTensor(), net()
    x, y = images(32)
    with largest, virtual_batch(model, 4) as batch:
        h = features(model[:9](batch(x)))  # type: ignore[index]
        F.cross_entropy(model[9:](h), batch(y)[: len(h)]).backward()  # type: ignore[index]
    assert batch.report().microbatches == 8 and batch.report().run > 0, "premise"
    return largest.most / (8 * 16 * 16)


def test_operations_run_on_one_micro_batch_at_a_time() -> None:
    """No real tensor has more rows than a micro-batch."""
    assert images_made_at_once(lambda h: h) == 4


def test_operations_on_the_whole_batch_are_detected() -> None:
    assert images_made_at_once(lambda h: h[:16] * h[16:]) == 32, "its gradient has all rows"
    assert images_made_at_once(lambda h: h[torch.randperm(32)]) == 32


def test_little_is_stored_besides_inputs_of_batchnorm() -> None:
    _, report = run(32, 4)
    activation = 32 * 8 * 16 * 16 * 4
    # Three inputs of BatchNorm, and temporarily the gradient of one output.
    assert 3 * activation <= report.kept_on_device <= 4.5 * activation
    assert [point.kept for point in report.points if point.operation == "batch_norm"] == [activation] * 3


def test_tensors_beyond_the_budget_are_offloaded() -> None:
    expected, on_device = run(32, 4)
    ours, split = run(32, 4, device_budget=MIB // 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert 0 < split.kept_on_device <= MIB // 2
    assert split.kept_on_device + split.kept_on_host >= on_device.kept_on_device
    _, host = run(32, 4, device_budget=0)
    assert host.kept_on_device == 0 and host.kept_on_host == on_device.kept_on_device


def test_the_store_is_empty_after_the_block() -> None:
    model = net()
    x, y = images(32)
    with virtual_batch(model, 4) as batch:
        loss = F.cross_entropy(model(batch(x)), y)
        loss.backward()
    recording = batch._session.recording
    assert recording is not None and recording.store.peak_bytes[DEVICE] > 0, "premise"
    del x, y
    gc.collect()
    assert recording.store.current_bytes()[DEVICE] == 0
    assert float(loss.detach()) > 0


def test_uncoupled_samples_take_one_sweep_and_no_storage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    with virtual_batch(model, 6) as batch:
        F.cross_entropy(model(batch(x)), y).backward()
    report = batch.report()
    assert (report.sweeps, report.repeated, report.kept_on_device, report.points) == (1, 0, 0, ())
    assert "no coupled samples" in str(report)


@pytest.mark.parametrize(("free", "smallest", "largest"), [(1, 32, 32), (3, 2, 31), (1000, 1, 1)])
def test_auto_takes_as_many_samples_as_fit_in_memory(
    free: int, smallest: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Limit(free * MIB, "a test")
    monkeypatch.setattr("superbatch.torch.virtual.run.auto_size.memory_limit", lambda device: limit)
    expected, _ = run(32, 8)
    ours, report = run(32, "auto")
    assert smallest <= report.microbatches <= largest
    for a, b in zip(ours, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_full_tensors_are_freed_after_their_last_reader() -> None:
    """A loss by rows and columns of an N x N matrix holds as few such matrices as plain PyTorch."""
    model, y = nn.Linear(2, 4), torch.arange(512)
    x = torch.randn(512, 2)

    def loss(z: Tensor) -> Tensor:
        similarities = z @ z.detach().T
        return F.cross_entropy(similarities, y) + F.cross_entropy(similarities.T, y)

    def train() -> None:
        with virtual_batch(model, 64) as batch:
            loss(model(batch(x))).backward()

    assert peak_bytes(train) <= 1.1 * peak_bytes(lambda: loss(model(x)).backward())


def test_full_gradients_are_freed_one_by_one() -> None:
    """The gradient of all embeddings passes twelve operations before it is read by rows."""
    samples, width = 256, 128
    towers, x = nn.ModuleList([nn.Linear(2, width), nn.Linear(2, width)]), torch.randn(samples, 2)

    def train() -> None:
        with virtual_batch(towers, 8) as batch:
            right = towers[1](batch(x))
            for _ in range(6):
                right = -(right * 0.9)
            F.cross_entropy(towers[0](batch(x)) @ right.T, torch.arange(samples)).backward()

    train()
    towers.zero_grad()
    assert peak_bytes(train) <= 4 * samples * width * 4


class FullTensorCounter(TorchDispatchMode):
    """Mode that counts tensors with all rows per operator, without views."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.made = rows, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        real = type(result) is Tensor and result.device.type != "meta"
        if real and self.rows in result.shape and not func.is_view:
            self.made[str(func.overloadpacket).removeprefix("aten.")] += 1
        return result


def run_towers(samples: int, **options: Any) -> tuple[list[Tensor], Counter[str], Any]:
    """Run two towers with a loss over all pairs in micro-batches of 8."""
    torch.manual_seed(0)
    towers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(7, 3)]).double()
    x, y = torch.randn(samples, 5).double(), torch.randn(samples, 7).double()
    with FullTensorCounter(samples) as whole, virtual_batch(towers, 8, **options) as batch:
        similarities = towers[0](batch(x)) @ F.normalize(towers[1](batch(y)), dim=1).T
        F.cross_entropy(similarities, torch.arange(samples)).backward()
    return gradients(towers), whole.made, batch.report()


def test_embeddings_and_their_transpose_are_gathered_once() -> None:
    _, made, _ = run_towers(40)
    assert made["cat"] == 1


def test_without_device_budget_full_gradients_are_processed_by_rows() -> None:
    """The summed gradient of all embeddings is offloaded, and then processed by rows."""
    expected, made, on_device = run_towers(40)
    ours, by_rows, on_host = run_towers(40, device_budget=0)
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() <= 1e-14 * b.norm()
    assert made["neg"] == 1, "premise: with memory, the full gradient is negated at once"
    assert "neg" not in by_rows
    assert on_host.kept_on_host >= on_device.kept_on_device + 40 * 3 * 8, "the sum is offloaded"
    assert on_host.kept_on_device == 0


def test_values_offloaded_by_rows_can_be_read_again() -> None:
    torch.manual_seed(0)
    towers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(7, 3)]).double()
    x, y = torch.randn(40, 5).double(), torch.randn(40, 7).double()

    def numbers(x: Tensor, y: Tensor) -> list[float]:
        left, right = towers[0](x), towers[1](y)
        similarities = left @ F.normalize(right, dim=1).T
        loss = F.cross_entropy(similarities, torch.arange(40))
        (gradient,) = torch.autograd.grad(loss, right)
        return [gradient.square().sum().item(), gradient.abs().sum().item(), float(gradient[39, 1])]

    with virtual_batch(towers, 8, device_budget=0) as batch:
        found = numbers(batch(x), batch(y))
    assert found == pytest.approx(numbers(x, y), rel=1e-12)


def test_statistics_of_a_thousand_micro_batches_take_little_memory() -> None:
    x = torch.randn(1000, 64, dtype=torch.float64) * 1e-4 + 1e3
    moments: list[Moments] = []

    def add() -> None:
        moments.append(Moments(lambda mean, squares, count: [mean, squares / count]))
        for index, row in enumerate(x):
            moments[0].add(BatchSlice(index, index, index + 1), [(row.clone(), torch.zeros_like(row), 1)])

    assert peak_bytes(add) <= 100 * x[0].nbytes
    mean, variance = moments[0].result()
    assert (mean - x.mean(0)).norm() <= 1e-15 * x.mean(0).norm()
    assert (variance - x.var(0, correction=0)).norm() <= 1e-9 * variance.norm()


# ---- carried micro-batches: the last one of a sweep is the first of the next, without recomputation


class Encoder(nn.Module):
    """Sequence encoder whose activations are much larger than parameters and similarities."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(16, 32)]
        for _ in range(6):
            layers += [nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)]
        self.layers = nn.Sequential(*layers)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def sequences(samples: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(samples, 24, 16).double()


def contrastive_loss(z: Tensor) -> Tensor:
    """Contrastive loss of embeddings with themselves, plus their distance to the median."""
    z = F.normalize(z - z.mean(0), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z))) + (z - z.median(0).values).square().mean()


def run_encoder(samples: int, size: Any, **options: Any) -> tuple[list[Tensor], Any]:
    model = Encoder()
    with virtual_batch(model, size, **options) as batch:
        contrastive_loss(model(batch(sequences(samples)))).backward()
    return gradients(model), batch.report()


def test_one_of_few_micro_batches_is_not_recomputed() -> None:
    model = Encoder()
    contrastive_loss(model(sequences(48))).backward()
    expected, again = gradients(model), {}
    for microbatches in (1, 3, 16, 24):
        found, report = run_encoder(48, 48 // microbatches)
        assert report.microbatches == microbatches and report.sweeps > 2, "premise"
        most = max(real.norm() for real in expected)  # the last bias has no gradient: the mean is subtracted
        for ours, real in zip(found, expected, strict=True):
            assert (ours - real).norm() <= 1e-12 * most
        again[microbatches] = report.repeated
    each = again[24] // 24
    assert each > 20, "premise: the forward is recomputed"
    assert again == {1: 0, 3: 2 * each, 16: 15 * each, 24: 24 * each}


def test_nothing_is_carried_if_little_is_recomputed() -> None:
    few, many = run(32, 8)[1], run(32, 2)[1]
    assert 0 < many.repeated < 0.3 * many.run, "premise: BatchNorm in each block"
    assert few.repeated * 4 == many.repeated
    assert run(32, 32)[1].repeated == 0, "a single micro-batch recomputes nothing"


def plain(samples: int, size: int) -> None:
    """Plain accumulation: a wrong gradient, whose peak memory is the reference."""
    model = Encoder()
    for microbatch in sequences(samples).split(size):
        contrastive_loss(model(microbatch)).backward()


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 16])
def test_carried_rows_take_no_more_memory_than_plain_accumulation(microbatches: int) -> None:
    size = 32 // microbatches
    assert run_encoder(32, size)[1].repeated < run_encoder(32, 1)[1].repeated * (microbatches / 32), "premise"
    embeddings = 32 * 32 * 8  # bytes; similarities take as many, and some of both are alive
    peaks = peak_bytes(lambda: run_encoder(32, size)), peak_bytes(lambda: plain(32, size))
    assert peaks[0] <= 1.1 * peaks[1] + 4 * embeddings


def test_a_variable_that_outlives_the_loss_takes_little_memory() -> None:
    peaks = []
    for keep in (False, True):
        model, variables = Encoder(), []

        def train(keep: bool = keep, model: nn.Module = model, variables: list[Tensor] = variables) -> None:
            with virtual_batch(model, 2) as batch:
                z = model(batch(sequences(36)))
                variables.extend([z] * keep)
                contrastive_loss(z).backward()
                del z

        peaks.append(peak_bytes(train))
        assert len(variables) == keep, "premise"
    assert peaks[1] <= 1.05 * peaks[0]


def test_auto_counts_carried_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two views, carried rows of one are alive while the other is computed."""
    counts: list[int] = []
    y = torch.arange(36)

    def train(size: Any) -> int:
        model = Encoder()
        with virtual_batch(model, size) as batch:
            first, second = (
                F.normalize(model(batch(x)), dim=1) for x in (sequences(36), sequences(36) + 0.1)
            )
            F.cross_entropy(first @ second.T, y).backward()
        return batch.report().microbatches

    def under(limit: int) -> None:
        found = Limit(limit, "a test")
        monkeypatch.setattr("superbatch.torch.virtual.run.auto_size.memory_limit", lambda device: found)
        counts.append(train("auto"))

    whole = peak_bytes(lambda: train(36))
    given = peak_bytes(
        lambda: (Encoder(), sequences(36), sequences(36))
    )  # allocated before the limit is read
    for share in (2, 1, 0.7, 0.5, 0.3, 0.2, 0.1):
        peak = peak_bytes(lambda: under(int(share * whole)))  # noqa: B023  (called here)
        assert peak - given <= 0.85 * share * whole, counts  # a margin for uncounted memory
    assert counts == sorted(counts)
    assert counts[0] == 1 and counts[-1] > 8 and any(1 < count <= 8 for count in counts)


# ---- prefetching of rows from the host (on a simulated device)


class RecordingPrefetcher(Prefetcher):
    """Prefetcher on the CPU that records whether fetched rows had been prefetched."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pending: list[Any] = []
        self.found: list[bool] = []

    def fetch(self, key: Any, rows: Tensor) -> Tensor:
        self.found.append(self.pending == [key])
        self.pending.clear()
        return super().fetch(key, rows)

    def begin(self, key: Any, rows: Tensor) -> None:
        assert not self.pending, "one at a time"
        self.pending.append(key)
        self._coming = key, rows.clone()


@pytest.mark.parametrize(("train", "size"), [(run, 8), (run, 2), (run_encoder, 8), (run_encoder, 2)])
def test_the_next_rows_of_a_sweep_are_prefetched(
    train: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, report = train(32, size)
    ahead = RecordingPrefetcher()
    monkeypatch.setattr("superbatch.torch.virtual.run.store.Prefetcher", lambda device, to_host: ahead)
    monkeypatch.setattr("superbatch.torch.virtual.run.store.OWN_MEMORY", {"cpu"})
    found, _ = train(32, size)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(ahead.found) > report.microbatches, "premise"
    assert ahead.found.count(False) <= report.sweeps, "only the first rows of a sweep"
    assert not ahead.pending, "all prefetched rows were read"


def test_rows_are_copied_once() -> None:
    ahead, rows = Prefetcher(torch.device("meta")), torch.zeros(3)
    ahead.begin("a", rows)
    assert ahead._coming is not None
    coming = ahead._coming[1]
    assert coming.is_meta and ahead.fetch("a", rows) is coming
    ahead.begin("a", rows)
    assert ahead.fetch("b", rows[:2]).shape == (2,) and ahead._coming is None
    ahead.begin("c", torch.zeros(3, device="meta"))
    assert ahead._coming is None, "the rows are on the device already"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is read with /proc")
def test_auto_reads_the_memory_limit_of_the_process(tmp_path: Path) -> None:
    """Under RLIMIT_AS a batch is split that fits whole without the limit, and has the same gradient."""
    child = textwrap.dedent(
        """
        import resource, sys, torch
        from tests.torch.test_virtual_memory import MIB, run
        torch.set_num_threads(1)
        samples = int(sys.argv[1])
        run(8, "auto")  # loads modules, before the limit
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 160 * MIB, resource.RLIM_INFINITY))
        found, report = run(samples, "auto")
        try:
            run(samples, samples)
            fits = True
        except RuntimeError as error:
            fits = "can't allocate memory" not in str(error)
        torch.save([report.microbatches, fits, found], sys.argv[2])
        """
    )
    expected, report = run(2048, "auto")
    assert report.microbatches == 1, "premise: without the limit the batch fits"
    done = forked.run(["-c", child, 2048, tmp_path / "found"])
    assert done.returncode == 0, done.stderr
    microbatches, fits, found = torch.load(tmp_path / "found")
    assert not fits, "premise: with the limit the unsplit batch does not fit"
    assert 2 <= microbatches <= 16
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


# -- tensors written after their use ------------------------------------------------------------------------


def relative(ours: Tensor, reference: Tensor) -> float:
    return float(torch.linalg.vector_norm(ours - reference) / torch.linalg.vector_norm(reference))


def assert_exact(model: nn.Module, other: nn.Module) -> None:
    for ours, reference in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None and reference.grad is not None
        assert torch.linalg.vector_norm(reference.grad) > 0, "premise"
        error = torch.linalg.vector_norm(ours.grad - reference.grad) / torch.linalg.vector_norm(
            reference.grad
        )
        assert error < 1e-12 and torch.equal(ours, reference)


@pytest.mark.parametrize("through", ["data", "no_grad", "buffer"])
def test_a_tensor_may_be_written_after_its_use(through: str) -> None:
    """The tensors are too large to be copied on use."""

    def loss_of(layer: nn.Linear, table: Tensor, x: Any) -> Tensor:
        fixed = x @ layer.weight.detach().t() + x @ table
        with torch.no_grad():
            if through == "data":
                layer.weight.data.clamp_(-0.05, 0.05)
            elif through == "no_grad":
                layer.weight.mul_(0.5)
            else:
                table.zero_()
        return (layer(x) * fixed).square().mean()

    x = torch.randn(13, 80, dtype=torch.float64)
    layers, tables = [], []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(nn.Linear(80, 80).double())
        tables.append(torch.randn(80, 80, dtype=torch.float64))
    loss_of(layers[0], tables[0], x).backward()
    with virtual_batch(layers[1], 4) as batch:
        loss_of(layers[1], tables[1], batch(x)).backward()
    assert_exact(layers[1], layers[0])
    assert torch.equal(*tables)


def test_the_batch_may_be_written_after_its_use() -> None:
    layer = nn.Linear(80, 3).double()
    x = torch.randn(60, 80, dtype=torch.float64)
    layer(x).square().mean().backward()
    reference = layer.weight.grad
    assert reference is not None
    layer.zero_grad()
    with virtual_batch(layer, 7) as batch:
        loss = layer(batch(x)).square().mean()
        x.zero_()
        loss.backward()
    assert layer.weight.grad is not None
    assert torch.linalg.vector_norm(layer.weight.grad - reference) < 1e-12 * torch.linalg.vector_norm(
        reference
    )


def test_a_generator_of_the_user_advances_once() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 6).double()
    x = torch.randn(13, 4, dtype=torch.float64)

    def loss_of(x: Any, generator: torch.Generator) -> Tensor:
        hidden = layer(x)
        kept = torch.bernoulli(torch.full_like(hidden, 0.5), generator=generator)
        return (hidden * kept).square().mean()

    real = torch.Generator().manual_seed(3)
    loss_of(x, real).backward()
    reference = layer.weight.grad
    assert reference is not None
    layer.zero_grad()
    ours = torch.Generator().manual_seed(3)
    with virtual_batch(layer, 4) as batch:
        loss_of(batch(x), ours).backward()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, reference, rtol=1e-12)
    assert torch.equal(real.get_state(), ours.get_state())


# -- a full training step in the block ----------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False])
def test_zero_grad_clipping_and_step_may_be_in_the_block(foreach: bool) -> None:
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(13, 4, dtype=torch.float64)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, foreach=foreach) for m in models]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for _ in range(3):
        step(models[0], optimizers[0], x)
        with virtual_batch(models[1], 4) as batch:
            step(models[1], optimizers[1], batch(x))
    for ours, reference in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-11, atol=1e-13)
        assert type(ours.grad) is Tensor


# -- 16 bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_model_rounds_at_most_twice_as_much_as_the_large_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, 4)]
    model = nn.Sequential(*layers).to(dtype)
    x, y = torch.randn(20, 3, 8, 8).to(dtype), torch.randint(0, 4, (20,))

    def outcome(kind: torch.dtype, size: int | None) -> list[Tensor]:
        other = copy.deepcopy(model).to(kind)
        if size is None:
            F.cross_entropy(other(x.to(kind)), y).backward()
        else:
            with virtual_batch(other, size) as batch:
                F.cross_entropy(other(batch(x.to(kind))), y).backward()
        return gradients(other)

    truth, real, ours = outcome(torch.float64, None), outcome(dtype, None), outcome(dtype, 6)
    for exact_one, large, small in zip(truth, real, ours, strict=True):
        assert small.dtype == dtype
        bound = max(relative(large.double(), exact_one), torch.finfo(dtype).eps)
        assert relative(small.double(), exact_one) <= 2 * bound


@pytest.mark.parametrize("size", [1, 16])
def test_the_matrix_of_all_pairs_is_never_materialized(size: int) -> None:
    """With cross entropy both ways, a micro-batch has rows or columns of the matrix."""
    samples = 64
    pairs = nn.Linear(8, 8)

    class Square(TorchDispatchMode):
        """Mode that records the largest tensor returned by an operation."""

        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for item in result if isinstance(result, (tuple, list)) else [result]:
                if type(item) is Tensor and item.device.type != "meta":
                    self.most = max(self.most, item.numel())
            return result

    x = torch.randn(samples, 8)
    with virtual_batch(pairs, size) as batch:
        z = pairs(batch(x))
        logits = z @ (2 * z).T
        target = torch.arange(samples)
        (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)).backward()
        with (square := Square()):
            assert pairs.weight.grad is not None
            pairs.weight.grad.numpy()
    assert 0 < square.most <= samples * max(size, 8), "a row of pairs per sample, or all embeddings"


class FirstPosition(nn.Module):
    """Encoder layer with the first position as embedding, as BERT's [CLS]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]


class MeanPosition(FirstPosition):
    """Encoder layer with the mean over positions as embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def projected() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 16))


@pytest.mark.parametrize(
    ("tower", "shape"),
    [(FirstPosition, (24, 16)), (MeanPosition, (24, 16)), (pooled, (3, 16, 16)), (projected, (16,))],
)
def test_the_gradient_of_gathered_embeddings_is_processed_by_rows(tower: Any, shape: tuple[int, ...]) -> None:
    # Read as a full tensor, it would become full in the tower's last layer: all positions of all samples.
    torch.manual_seed(0)
    samples, size = 128, 8
    towers = nn.ModuleList([tower(), tower()]).double()
    one, other = torch.randn(2, samples, *shape, dtype=torch.float64)

    def loss(first: Any, second: Any) -> Tensor:
        return F.cross_entropy(towers[0](first) @ towers[1](second).T, torch.arange(len(first)))

    def batch() -> None:
        loss(one, other).backward()

    def plain() -> None:
        for first, second in zip(one.split(size), other.split(size), strict=True):
            loss(first, second).backward()

    def ours() -> None:
        with virtual_batch(towers, size) as batch:
            loss(batch(one), batch(other)).backward()

    def measured(update: Any) -> tuple[int, list[Tensor]]:
        towers.zero_grad()
        peak = peak_bytes(update)
        return peak, gradients(towers)

    pairs = 8 * samples**2  # bytes of the matrix of pairs, which is stored
    measured(plain)
    (whole, real), (least, _), (peak, found) = measured(batch), measured(plain), measured(ours)
    assert whole > 3 * least, "premise: the batch takes much more than a micro-batch"
    assert peak <= 1.1 * least + pairs
    for mine, grad in zip(found, real, strict=True):
        torch.testing.assert_close(mine, grad, rtol=1e-12, atol=1e-14)


def test_embeddings_are_freed_before_the_last_sweep() -> None:
    # The last sweep has the peak, because it adds up gradients of the largest weights.
    torch.manual_seed(0)
    samples, width = 512, 64
    towers = nn.ModuleList(
        nn.Sequential(nn.Linear(4, 2048), nn.ReLU(), nn.Linear(2048, width)) for _ in range(2)
    )
    one, other = torch.randn(2, samples, 4)

    def loss(first: Any, second: Any) -> Tensor:
        return F.cross_entropy(towers[0](first) @ towers[1](second).T, torch.arange(len(first)))

    def plain() -> None:
        for first, second in zip(one.split(4), other.split(4), strict=True):
            loss(first, second).backward()

    def ours() -> None:
        with virtual_batch(towers, 4) as batch:
            loss(batch(one), batch(other)).backward()

    peaks = []
    for update in (plain, plain, ours):
        towers.zero_grad()
        peaks.append(peak_bytes(update))
    embeddings = 4 * samples * width
    assert peaks[-1] < peaks[-2] + 1.5 * embeddings  # one gradient, but not the embeddings of both towers


@pytest.mark.parametrize("samples", [1, 2, 6])
def test_a_weight_with_as_many_rows_as_there_are_samples(samples: int) -> None:
    # Its gradient is a full tensor that grows in the backward, and could be mistaken for rows of samples.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, samples)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(samples, samples)),
    ).double()
    x = torch.randn(samples, 4, dtype=torch.float64)
    twin = copy.deepcopy(model)
    z = twin(x)
    (z @ z.T).logsumexp(1).sum().backward()
    with virtual_batch(model, 2, paranoid=True) as batch:
        z = model(batch(x))
        (z @ z.T).logsumexp(1).sum().backward()
    for mine, real in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, real.grad, rtol=1e-12, atol=1e-14)
