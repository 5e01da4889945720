"""Full tensors of a virtual batch: reported with their bytes, or an error with `on_gather="error"`.

A value without one row per sample takes the memory of the batch, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch import CoupledSamplesError
from superbatch.torch import virtual_batch
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.virtual.ir.shard import Shard
from superbatch.torch.virtual.run import by_rows, full_values, growth

N, D, M = 24, 6, 4
BYTES = N * D * 8
PERM = torch.randperm(N, generator=torch.Generator().manual_seed(3))
KEEP = torch.arange(N) % 3 != 0


def start() -> tuple[nn.ModuleDict, Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(D, D), "lstm": nn.LSTM(D, D, batch_first=True)}).double()
    return model, torch.randn(N, D, dtype=torch.float64)


def squares(h: Tensor) -> Tensor:
    return h.square().sum()


def experts(h: Tensor) -> Tensor:
    """Send each sample to one of two experts, and back to its row."""
    out = torch.zeros_like(h)
    for number, mask in enumerate((KEEP, ~KEEP)):
        out = out.index_put((mask.nonzero().squeeze(1),), h[mask] * (number + 2))
    return out


# Loss of h = linear(x), and the operator that the report names in the forward and in the backward.
CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, str]] = {
    "halves": (lambda m, h: (h[: N // 2] * h[N // 2 :]).sum(), "slice.Tensor", "slice_backward"),
    "a permutation": (lambda m, h: (h[PERM] * h).sum(), "index.Tensor", "index_put"),
    "a mask": (lambda m, h: squares(h[KEEP]), "index.Tensor", "index_put"),
    "stack(list())": (lambda m, h: squares(torch.stack(list(h))), "stack", "stack"),
    "LSTM": (lambda m, h: squares(m["lstm"](h.unsqueeze(1))[0]), "rnn_layer|add_", ""),
    "into zeros": (lambda m, h: squares(torch.zeros(N, D).double().add_(h)), "add_", ""),
    "index into zeros": (lambda m, h: squares(_written(h)), "index_put_", ""),
    "flip": (lambda m, h: (h.flip(0) * h).sum(), "rev|flip", "rev|flip"),
    "roll": (lambda m, h: (h.roll(1, 0) * h).sum(), "index|roll", "index|roll"),
    "sort": (lambda m, h: squares(h.sort(0).values), "sort", "scatter"),
    "index_select": (lambda m, h: (h.index_select(0, PERM) * h).sum(), "index", "index"),
    "cumsum": (lambda m, h: squares(h.cumsum(0)), "cumsum", "cumsum"),
    "gather": (
        lambda m, h: squares(h.gather(0, PERM.unsqueeze(1).expand(N, D))),
        "gather",
        "scatter_add",
    ),
    "index_put": (
        lambda m, h: squares(torch.zeros(N, D).double().index_put((PERM,), h)),
        "index_put",
        "index",
    ),
    "every other": (lambda m, h: (h[::2] * h[1::2]).sum(), "slice.Tensor", "slice_backward"),
    "experts": (lambda m, h: squares(experts(h)), "index.Tensor", "index"),
    "unique": (lambda m, h: squares(h) * len(h[:, 0].detach().round().unique()), "unique", ""),
    "nonzero": (lambda m, h: squares(h) * len((h.detach() > 0).nonzero()), "nonzero", ""),
    "pairs in one row": (
        lambda m, h: squares(h.reshape(N // 2, 2 * D).tanh()),
        "view|reshape",
        "tanh_backward",
    ),
    "one row": (lambda m, h: squares(h[0]) + squares(h[3]), "", "select_backward"),
}
NEEDED = {
    "a similarity": lambda m, h: F.cross_entropy(F.normalize(h) @ F.normalize(h).T, torch.arange(N)),
    "distances": lambda m, h: torch.cdist(h, h.tanh()).square().sum(),
}
NOT_GATHERED = {
    "uncoupled samples": lambda m, h: squares(h.relu()),
    "a statistic": lambda m, h: squares((h - h.mean(0)) / h.std(0)),
    "a product of features": lambda m, h: squares(h.T @ h),
    "a loss and a maximum": lambda m, h: squares(h) * h.max() + h.amin(),
    "two batches concatenated": lambda m, h: squares(torch.cat([h, h])),
    "views side by side": lambda m, h: squares(torch.cat(torch.cat([h, h]).chunk(2), 1)) / N,
    "the last of each sequence": lambda m, h: squares(h.view(-1, 2, D // 2)[:, -1]),
}


def _written(h: Tensor) -> Tensor:
    buffer = torch.zeros(N, D).double()
    buffer[PERM] = h
    return buffer


def run(case: Callable[[Any, Tensor], Tensor], size: int = M, **options: Any) -> tuple[Any, list[Tensor]]:
    model, x = start()
    with virtual_batch(model, size, **options) as batch:
        loss = case(model, model["linear"](batch(x)))
        loss.backward()
        assert float(loss.detach()) != 0, "premise: computed"
    return batch.report(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def real(case: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
    model, x = start()
    case(model, model["linear"](x)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def named(report: Any, operator: str, *, backward: bool) -> int:
    found = [value for value in report.whole if value.backward == backward]
    return sum(v.nbytes for v in found if any(name in v.operation for name in operator.split("|")))


@pytest.mark.parametrize("name", CASES)
def test_gathered_values_are_reported_with_their_bytes(name: str) -> None:
    case, forward, backward = CASES[name]
    report, found = run(case)
    if forward:
        assert named(report, forward, backward=False) >= N // 3 * 8, report
        assert f"{report.whole[0].operation} (" in str(report)
    if backward:
        assert named(report, backward, backward=True) >= N // 3 * D * 8, report
        assert "backward pass: " in str(report)
    assert report.whole_on_device > 0
    text = str(report)
    assert "tensors of the whole batch" in text
    unknown = {point.operation for point in report.unknown}
    assert "no coupled samples" not in text or {v.operation for v in report.whole} <= unknown
    for one, other in zip(found, real(case), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_gathered_values_raise_with_on_gather_error(name: str) -> None:
    with pytest.raises(CoupledSamplesError, match=r"(?s)(aten|prims)\..*whole batch.*on_gather=\"ok\""):
        run(CASES[name][0], on_gather="error")
    run(CASES[name][0], size=N, on_gather="ok")


def test_the_error_names_operator_module_and_bytes() -> None:
    class Pairs(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h[: N // 2] * h[N // 2 :]

    model = nn.Sequential(nn.Linear(D, D), Pairs()).double()
    x = torch.randn(N, D).double()
    text = (
        rf"^aten\.slice\.Tensor in 1 gathers {BYTES // 2} bytes of the whole batch into one tensor\. "
        r'Use operations that keep one row per sample .* or pass on_gather="ok" to allow it\.$'
    )
    with (
        pytest.raises(CoupledSamplesError, match=text),
        virtual_batch(model, M, on_gather="error") as batch,
    ):
        model(batch(x))
    with pytest.warns(UserWarning, match=text), virtual_batch(model, M, on_gather="warn") as batch:
        model(batch(x)).sum().backward()
    assert [(v.module, v.operation, v.backward, v.times, v.nbytes) for v in batch.report().whole][:1] == [
        ("1", "aten.slice.Tensor", False, 2, BYTES)
    ]
    with virtual_batch(model, N, on_gather="error") as batch:  # one micro-batch of all samples
        model(batch(x)).sum().backward()
    assert batch.report().whole == ()


@pytest.mark.parametrize("name", NEEDED)
def test_values_compared_with_all_samples_are_reported_and_allowed(name: str) -> None:
    report, found = run(NEEDED[name], on_gather="error")
    assert named(report, "mm|cdist", backward=False) >= BYTES
    assert named(report, "mm|cdist", backward=True) >= BYTES, "its summed gradient"
    for one, other in zip(found, real(NEEDED[name]), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "samples"),
    [(name, samples) for name in NOT_GATHERED for samples in (N, 2 * D)]
    + [("uncoupled samples", D), ("a loss and a maximum", D), ("views side by side", D)],
)
def test_statistics_losses_and_weight_gradients_are_not_reported(name: str, samples: int) -> None:
    """This holds even if a layer is as wide as the batch has samples."""
    model, x = start()
    x = x[:samples]
    with virtual_batch(model, 2, on_gather="error") as batch:
        NOT_GATHERED[name](model, model["linear"](batch(x))).backward()
    report = batch.report()
    assert report.whole == ()
    assert report.whole_on_device == 0
    assert "whole" not in str(report)
    assert report.sweeps > 0, "premise"


def test_the_reported_bytes_are_those_of_the_peak() -> None:
    """Compare with the peak memory beyond that of an uncoupled loss."""
    torch.manual_seed(0)
    samples, width = 96, 160
    model, x = nn.Linear(4, width), torch.randn(samples, 4)
    reports = []

    def train(loss: Callable[[Tensor], Tensor]) -> None:
        model.zero_grad()
        with virtual_batch(model, M) as batch:
            loss(model(batch(x))).backward()
        reports.append(batch.report())

    half = samples // 2
    peak = peak_bytes(lambda: train(lambda h: (h[:half] * h[half:]).sum()))
    apart = peak_bytes(lambda: train(lambda h: (h * h).sum()))
    halves, plain = reports
    assert plain.whole_on_device == 0
    assert peak - apart > samples * width * 4, "premise: more than the batch"
    assert 0.8 * (peak - apart) <= halves.whole_on_device <= 1.2 * (peak - apart), (peak - apart, halves)


def test_full_tensors_count_against_the_device_budget() -> None:
    """The input of BatchNorm fits on the device, unless the halves of the batch are alive too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.BatchNorm1d(D)).double()
    x = torch.randn(N, D).double()

    def kept(*, halves: bool) -> Any:
        with virtual_batch(model, M, device_budget=2 * BYTES) as batch:
            held = []
            if halves:
                h = batch(x) * 2.0
                held = [h[: N // 2].clone(), h[N // 2 :].clone()]
                float((held[0] * held[1]).sum())
            model(batch(x)).square().sum().backward()
        assert len(held) == 2 * halves, "premise: alive until the end of the block"
        return batch.report()

    without, with_halves = kept(halves=False), kept(halves=True)
    assert without.kept_on_device > 0
    assert without.kept_on_host == 0, "premise: everything fits"
    assert with_halves.whole_on_device >= BYTES
    assert with_halves.kept_on_host > 0, "full tensors take part of the budget"
    assert with_halves.kept_on_device < without.kept_on_device


@pytest.mark.parametrize("broken", ["growth is not passed on", "nothing is counted"])
def test_mutants_that_omit_full_tensors_fail(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "nothing is counted":
        monkeypatch.setattr(full_values.FullValues, "count", lambda *args, **options: None)
    else:
        monkeypatch.setattr(growth, "_grown", lambda *args: None)
        monkeypatch.setattr(growth, "_cached", growth._cached.__wrapped__)
    with pytest.raises(AssertionError):
        test_gathered_values_are_reported_with_their_bytes("halves")
    with pytest.raises(AssertionError):
        test_values_compared_with_all_samples_are_reported_and_allowed("a similarity")


def train_with_as_many_features_as_samples(**options: Any) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N)).double(), torch.randn(N, N).double()
    reports = []
    if options:
        with virtual_batch(model, M, **options) as batch:
            h = model(batch(x))
            (((h - h.mean(0)) / h.std(0)).square().sum() + h.sin().sum()).backward()
        reports.append(batch.report())
    else:
        h = model(x)
        (((h - h.mean(0)) / h.std(0)).square().sum() + h.sin().sum()).backward()
    return reports, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_weight_gradients_with_as_many_rows_as_samples_are_not_split() -> None:
    reports, found = train_with_as_many_features_as_samples(on_gather="error")
    _, expected = train_with_as_many_features_as_samples()
    for one, other in zip(found, expected, strict=True):
        assert other.norm() > 0, "premise"
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert reports[0].whole == ()


def test_mutant_that_splits_a_square_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_size(value: Any, samples: int) -> Shard | None:
        made = None if value.node is None else value.node.by_rows
        if made is not None:
            return made.action.shards[value.index]
        return Shard(0) if value.meta.shape[:1] == (samples,) else None

    monkeypatch.setattr(by_rows, "_row_shard", by_size)
    with pytest.raises(CoupledSamplesError):
        train_with_as_many_features_as_samples(on_gather="error")
