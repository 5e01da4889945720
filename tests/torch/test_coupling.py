"""Coupled samples are found, and the first module that couples them is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import InputError, SplitError
from superbatch.results.verification import Finding
from superbatch.torch.checks.coupling import changes_state, coupled_modules, find_coupling, probe_coupling
from superbatch.torch.checks.probing.problem import Problem
from superbatch.torch.checks.probing.separability import Probe
from superbatch.torch.checks.probing.untouched import untouched
from tests.torch.verify_cases import (
    BatchRenorm,
    Branch,
    Capacity,
    Counting,
    HandNorm,
    Transformer,
    barlow,
    class_weighted,
    conv,
    frozen_batchnorm,
    info_nce,
    mlp,
    num_items,
    per_sample_pairs,
    token_batch,
    token_mean,
    triplet,
)


def flat() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 6), torch.arange(16) % 4


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 2, 7, 7), torch.arange(16) % 4


def classify(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def spots(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.module) for finding in findings]


class Residual(nn.Module):
    """A small ResNet of two blocks."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(4), nn.ReLU()) for _ in range(2)]
        )
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """Time is the first dimension, and there are as many time steps as probed samples (7)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(6, 8), norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unsqueeze(0).expand(7, -1, -1)
        return self.head(self.norm(self.lstm(steps)[0][-1]))


class TokenBatchNorm(nn.Module):
    """BatchNorm over (samples * tokens, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.inner(ids)
        return self.norm(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], list[tuple[str, str]]]] = {
    "mlp": (mlp, flat, []),
    "conv": (conv, images, []),
    "conv, group norm": (lambda: conv(nn.GroupNorm(2, 4)), images, []),
    "conv, batchnorm": (lambda: conv(nn.BatchNorm2d(4)), images, [("batchnorm", "1")]),
    "conv, frozen batchnorm": (frozen_batchnorm, images, []),
    "sync batchnorm": (lambda: mlp(nn.SyncBatchNorm(8)).eval(), flat, []),
    "resnet, batchnorm": (
        lambda: Residual(nn.BatchNorm2d),
        images,
        [("batchnorm", "blocks.0.1"), ("batchnorm", "blocks.1.1")],
    ),
    "resnet, group norm": (lambda: Residual(lambda channels: nn.GroupNorm(2, channels)), images, []),
    "resnet, instance norm": (lambda: Residual(nn.InstanceNorm2d), images, []),
    "lstm": (lambda: Recurrent(nn.LayerNorm(8)), flat, []),
    "lstm, batchnorm": (lambda: Recurrent(nn.BatchNorm1d(8)), flat, [("batchnorm", "norm")]),
    "batch renorm": (lambda: mlp(BatchRenorm(8)), flat, [("coupled", "1")]),
    "statistics between children": (HandNorm, flat, [("coupled", "")]),
    "experts with capacity": (lambda: Capacity(2), flat, [("coupled", "")]),
    "experts without": (lambda: Capacity(None), flat, []),
    "control flow": (lambda: mlp(Branch()), flat, [("coupled", "1")]),
    "a counter": (lambda: mlp(Counting()), flat, [("state", "1")]),
    "running statistics alone": (
        lambda: Residual(lambda channels: nn.InstanceNorm2d(channels, track_running_stats=True)),
        images,
        [("state", "blocks.0.1"), ("state", "blocks.1.1")],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, batch, expected = MODELS[name]
    model = make()
    findings, notes = probe_coupling(Problem(model, classify(model)), batch())
    assert spots(findings) == expected
    assert notes == ()
    assert all(finding.evidence > 1e-6 for finding in findings)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[tuple[str, str]]]] = {
    "squared error": (lambda a, b: (a - b).square().mean(), []),
    "sum": (lambda a, b: (a - b).abs().sum(), []),
    "cosine": (per_sample_pairs, []),
    "InfoNCE": (info_nce, [("coupled_loss", "loss_fn")]),
    "triplet": (triplet, [("coupled_loss", "loss_fn")]),
    "Barlow twins": (barlow, [("coupled_loss", "loss_fn")]),
    "variance": (
        lambda a, b: F.relu(2 - a.std(0)).mean() + (a - b).square().mean(),
        [("coupled_loss", "loss_fn")],
    ),
    "quantile clipping": (
        lambda a, b: (losses := (a - b).square().sum(1)).clamp(max=losses.detach().quantile(0.5)).mean(),
        [("coupled_loss", "loss_fn")],
    ),
    "log of a mean": (lambda a, b: (a - b).square().mean().log(), [("coupled_loss", "loss_fn")]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, expected = LOSSES[name]
    model = mlp(nn.LayerNorm(8))
    batch = (torch.randn(16, 6), torch.randn(16, 6))
    found = find_coupling(model, lambda b: loss(model(b[0]), model(b[1])), batch)
    assert spots(found) == expected
    assert all(finding.evidence > 1e-6 for finding in found)


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        (token_mean, {}, [("weight", "loss_fn")]),
        (token_mean, {"weight": lambda b: int((b["labels"] != -100).sum())}, []),
        (lambda p, y: F.cross_entropy(p.mT, y, reduction="sum"), {"reduction": "sum"}, []),
        (num_items, {"reduction": "sum"}, []),
    ],
)
def test_token_losses(loss: Any, options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    model = Transformer()
    found = find_coupling(model, lambda b: loss(model(b["ids"]), b["labels"]), token_batch(), **options)
    assert spots(found) == expected
    if expected:
        assert found[0].remedy == 'pass weight=count_tokens("labels")'


def test_class_weights_are_distinguished_from_coupling() -> None:
    problem = class_weighted()
    (finding,) = find_coupling(problem.model, problem.loss_fn, problem.batch)
    assert finding.remedy == 'pass weight=class_weights(weight, "1")'


def test_samples_flattened_into_tokens() -> None:
    model = TokenBatchNorm()
    found = find_coupling(
        model,
        lambda b: token_mean(model(b["ids"]), b["labels"]),
        token_batch(),
        weight=lambda b: int((b["labels"] != -100).sum()),
    )
    assert spots(found) == [("batchnorm", "norm")]


def test_batchnorm_does_not_hide_a_coupled_loss() -> None:
    model = mlp(nn.BatchNorm1d(8))
    batch = (torch.randn(16, 6), torch.randn(16, 6))
    found = find_coupling(model, lambda b: info_nce(model(b[0]), model(b[1])), batch)
    assert spots(found) == [("batchnorm", "1"), ("coupled_loss", "loss_fn")]


def test_each_probe_finds_what_the_others_miss() -> None:
    def tests_of(model: nn.Module) -> str:
        (finding,) = find_coupling(model, classify(model), flat())
        return finding.found_by

    # BatchRenorm has the value of the running statistics, so a replaced sample has no effect. A NaN has.
    assert "gradient probe" in tests_of(mlp(BatchRenorm(8)))
    assert "perturbed samples" not in tests_of(mlp(BatchRenorm(8)))
    # The position decides which samples are dropped, and it has no gradient.
    assert tests_of(Capacity(2)).startswith("perturbed samples")
    assert "gradient probe" not in tests_of(Capacity(2))
    # No gradient flows through a comparison.
    assert tests_of(mlp(Branch())) == "perturbed samples, NaN probe"
    model = mlp()
    (finding,) = find_coupling(model, lambda b: info_nce(model(b[0]), model(b[0])), flat())
    assert finding.found_by == "mixed difference"


def test_integer_inputs_have_no_nan_to_spread() -> None:
    model = TokenBatchNorm()
    found = find_coupling(model, lambda b: model(b["ids"]).square().mean(), {"ids": token_batch()["ids"]})
    assert [finding.found_by for finding in found] == ["perturbed samples, gradient probe"]


def test_dropout_is_not_coupling() -> None:
    model = mlp(nn.Dropout(0.5))
    findings, notes = probe_coupling(Problem(model, classify(model)), flat())
    assert (findings, notes) == ((), ())


def test_mixing_before_the_model() -> None:
    model = mlp()
    found = find_coupling(model, lambda b: F.cross_entropy(model(b[0] - b[0].mean(0)), b[1]), flat())
    assert spots(found) == [("coupled", "loss_fn")]


def test_few_samples_limit_the_search_and_the_notes_say_why() -> None:
    def notes_of(samples: int) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        model = mlp(nn.BatchNorm1d(8))
        x, y = flat()
        findings, notes = probe_coupling(Problem(model, classify(model)), (x[:samples], y[:samples]))
        return spots(findings), notes

    found = [("batchnorm", "1")]
    assert notes_of(5) == (found, ())
    assert notes_of(3) == (found, ())
    assert notes_of(2) == (found, ("only 2 samples: values were not compared between modules",))
    assert notes_of(1) == (found, ("coupling was searched for by module type only: only 1 sample",))


def test_equal_samples_are_reported_as_uninformative() -> None:
    model = nn.Embedding(3, 2)
    findings, notes = probe_coupling(
        Problem(model, lambda b: model(b).std(0).sum()), torch.ones(8, dtype=torch.long)
    )
    assert findings == ()
    assert notes == (
        "samples are equal and have no floats: replacing samples shows nothing",
        "samples are equal: the mixed difference shows nothing",
    )


def test_a_model_that_needs_an_even_batch() -> None:
    model = mlp(nn.BatchNorm1d(8))
    findings, notes = probe_coupling(
        Problem(model, lambda b: model(b[0]).view(len(b[0]) // 2, 2, 4).square().mean()), flat()
    )
    assert spots(findings) == [("batchnorm", "1")]
    assert math.isnan(findings[0].evidence)
    assert notes[0].startswith(
        "coupling was searched for by module type only: on 7 samples RuntimeError: shape"
    )


def test_a_model_that_refuses_nan_gets_the_other_probes() -> None:
    model = mlp(nn.BatchNorm1d(8))

    def loss_fn(b: Any) -> Tensor:
        if b[0].isnan().any():
            raise ValueError("no NaN here")
        return F.cross_entropy(model(b[0]), b[1])

    findings, notes = probe_coupling(Problem(model, loss_fn), flat())
    assert [finding.found_by for finding in findings] == ["perturbed samples, gradient probe"]
    assert notes == ("NaN probe: ValueError: no NaN here",)


def test_a_model_without_float64() -> None:
    model, table = mlp(nn.BatchNorm1d(8)), torch.randn(6, 6)
    found = find_coupling(model, lambda b: F.cross_entropy(model(b[0] @ table), b[1]), flat())
    assert spots(found) == [("batchnorm", "1")]
    assert found[0].found_by == "perturbed samples, NaN probe, gradient probe"


def test_an_exception_removes_hooks_and_restores_everything() -> None:
    model = mlp(nn.BatchNorm1d(8))
    batch, calls = flat(), []
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()

    def loss_fn(b: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return F.cross_entropy(model(b[0]), b[1])

    with pytest.raises(KeyboardInterrupt):
        find_coupling(model, loss_fn, batch)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_coupled_modules_by_type() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2).eval(), nn.BatchNorm3d(2), nn.SyncBatchNorm(2))
    assert coupled_modules(model) == ["0", "2", "3"]
    assert coupled_modules(nn.BatchNorm2d(2).eval()) == []
    assert coupled_modules(nn.BatchNorm1d(2)) == [""]
    assert coupled_modules(nn.BatchNorm1d(2, track_running_stats=False).eval()) == [""]
    assert coupled_modules(nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2))) == []


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm1d(2).eval(), False),
        (nn.InstanceNorm1d(2, track_running_stats=True), True),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), True),
        (
            nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)).get_submodule(
                "parametrizations.weight.0"
            ),
            True,
        ),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
        (nn.Linear(2, 2), False),
    ],
)
def test_types_that_change_their_state(module: nn.Module, expected: bool) -> None:
    assert changes_state(module) == expected


def test_wrong_input() -> None:
    model = mlp()
    with pytest.raises(SplitError):
        find_coupling(model, classify(model), (torch.ones(3, 6), torch.ones(4)))
    with pytest.raises(InputError, match="loss_fn returned a tensor of shape"):
        find_coupling(model, lambda b: model(b[0]), flat())
    packed = {"x": torch.randn(10, 6), "cu_seqlens": torch.tensor([0, 4, 7, 10])}
    with pytest.raises(SplitError, match=r"is packed .* so its samples cannot be exchanged"):
        find_coupling(model, lambda b: model(b["x"]).mean(), packed)


def test_probe_takes_samples_that_are_spread_over_the_batch() -> None:
    seen: list[Tensor] = []
    model = nn.Linear(1, 1)

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(x)
        return model(x).mean()

    find_coupling(model, loss_fn, torch.arange(70.0).view(70, 1))
    assert seen[0].flatten().tolist() == [0, 10, 20, 30, 40, 50, 60]
    assert {len(x) for x in seen} == {7, 6}  # six in the mixed difference: one sample and five others


def test_a_pass_of_the_probe_starts_from_the_same_state() -> None:
    model = mlp(Counting(), nn.Dropout(0.5))
    with untouched(model) as reset:
        probe = Probe(Problem(model, classify(model)), flat(), 7, 0.0, reset, [])
        losses = []
        for _ in range(2):
            probe.begin()
            losses.append(float(probe.forward(probe.base())[0].detach()))
    assert losses[0] == losses[1]
