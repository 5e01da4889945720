"""Gradients in float64 of models in bfloat16, without a copy of the model; also on two gloo ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.torch import Accumulator, count_tokens
from superbatch.torch.checks import evaluation, wide_parameters
from superbatch.torch.checks.precision import ComputeIn
from superbatch.torch.checks.sketch import sketch
from superbatch.torch.checks.wide_parameters import WideParameters
from superbatch.torch.memory.meter import peak_bytes
from tests.torch.statement_cases import (
    Attention,
    Tokens,
    check,
    token_batch,
)
from tests.torch.two_ranks import found_by_both
from tests.torch.wide_ranks import BypassLinear, mixed

CHECK_ERRORS = (LossSpecError, CoupledSamplesError)
WIDTH = 16
BF16 = torch.bfloat16


# -- the gradient is that of a copy in float64 -------------------------------------------------------------


class Uses(nn.Module):
    """Model that uses a parameter several times, through views and properties."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T + self.weight[0]) @ self.weight.mT.t() * self.weight.view(-1)[3]


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return out


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input[:, None])[0][:, 0]


class Penalised(nn.Module):
    """Model whose output includes its input gradient: a second-order graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.layers(x)
        return out + torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
    "uses": Uses,
    "checkpoint": lambda: Recomputed(reentrant=False),
    "reentrant checkpoint": lambda: Recomputed(reentrant=True),
    "recurrent": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True),
    "gradient penalty": Penalised,
    "convolution": convolution,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_a_float64_copy(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(BF16)
    x = torch.randn(6, WIDTH).double()
    wide = WideParameters(list(model.parameters()))
    backward = name.startswith("reentrant")
    own = copy.deepcopy(model).double()
    with ComputeIn(torch.float64), wide.entered():
        loss = model(x.clone()).square().mean()
        found = wide.gradient(loss, torch.ones_like(loss), backward=backward)
    own(x.clone()).square().mean().backward()
    wanted = sketch([parameter.grad for parameter in own.parameters()])
    assert not wide.bypassed and float(wanted.norm()) > 0.01
    assert float((found - wanted).norm() / wanted.norm()) < 1e-14
    assert all(p.dtype is BF16 and p.grad is None for p in model.parameters())


def test_autograd_grad_of_parameters_needs_a_copy() -> None:
    model = nn.Linear(WIDTH, 1).to(BF16)
    wide = WideParameters(list(model.parameters()))
    with ComputeIn(torch.float64), wide.entered(), pytest.raises(RuntimeError, match="needs a copy"):
        torch.autograd.grad(model(torch.randn(2, WIDTH).double()).sum(), list(model.parameters()))
    assert wide.bypassed


@pytest.mark.parametrize("kind", ["grad", "function"])
def test_bypassed_conversions_fall_back_to_a_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[bool] = []
    untouched = evaluation.untouched

    def counted(*args: Any, **options: Any) -> Any:
        copies.append(True)
        return untouched(*args, **options)

    monkeypatch.setattr(evaluation, "untouched", counted)
    torch.manual_seed(0)
    model = Tokens(BypassLinear).to(BF16)

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        loss = mixed(model, batch, 0.003)
        if kind == "grad":
            (inner,) = torch.autograd.grad(loss, [model.out.bias], create_graph=True)
            loss = loss + 0.0 * inner.sum()
        return loss

    with pytest.raises(CHECK_ERRORS, match="is off by"):
        check(model, loss_fn, token_batch(), weight=count_tokens("labels"))
    assert copies


# -- a wrong term in a model in bfloat16, without memory for a copy ----------------------------------------


def outcome(model: nn.Module, share: float) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            check(model, lambda b: mixed(model, b, share), token_batch(), weight=count_tokens("labels"))
        except CHECK_ERRORS as error:
            return str(error), []
    return "", [str(one.message) for one in warned]


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_fits_in_float64", lambda model: False)


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("share", [0.3, 0.03, 0.003, 0.0])
def test_without_a_copy_a_wrong_term_is_found(share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    error, warned = outcome(Tokens(Attention).to(dtype), share)
    assert ("is off by" in error) is bool(share), error
    assert not warned


@pytest.mark.usefixtures("no_copy")
def test_mutant_whose_gradients_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: conversions run below autograd, so gradients are rounded to bfloat16."""
    monkeypatch.setattr(wide_parameters.WideParameters, "_widen", lambda self, value: value)
    torch.manual_seed(0)
    error, warned = outcome(Tokens(Attention).to(BF16), 0.003)
    assert not error, "rounding hides the error"
    assert len(warned) == 1, "but a warning is issued"


@pytest.mark.usefixtures("no_copy")
@pytest.mark.parametrize("share", [0.03, 0.003, 0.0])
def test_hidden_rounding_of_bypassed_conversions_warns(share: float) -> None:
    torch.manual_seed(0)
    error, warned = outcome(Tokens(BypassLinear).to(BF16), share)
    assert error or len(warned) == 1
    if not error:
        assert "rounding may hide" in warned[0] and "verify(" in warned[0]
    assert not share or error or "body.weight" in warned[0]


def test_a_loss_for_bfloat16_only_warns_of_hidden_rounding() -> None:
    torch.manual_seed(0)
    model = Tokens(Attention).to(BF16)

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        assert model(batch["ids"]).dtype is BF16, "a kernel for one dtype"
        return mixed(model, batch, 0.003)

    with pytest.warns(UserWarning, match=r"rounding may hide \d+ % .* does not run in float64") as warned:
        check(model, loss_fn, token_batch(), weight=count_tokens("labels"))
    assert len(warned) == 1


# -- memory ------------------------------------------------------------------------------------------------


def peaks() -> tuple[float, float]:
    """Return the peaks with and without the check, relative to the bytes of the parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 10)).to(BF16)
    batch = (torch.randn(16, 512).to(BF16), torch.randint(0, 10, (16,)))
    size = sum(p.nbytes for p in model.parameters())

    def peak(**options: Any) -> float:
        accumulate = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.0),
            lambda b: functional.cross_entropy(model(b[0]), b[1]), microbatch_size=8, **options,
        )  # fmt: skip
        return peak_bytes(lambda: accumulate(batch)) / size

    checked, window = peak(), peak(check=False)
    assert window > 1, "premise: gradients are counted"
    return checked, window


def test_the_check_needs_at_most_twice_the_memory_of_the_window() -> None:
    checked, window = peaks()
    assert checked <= 2 * window, (checked, window)


def test_mutant_that_copies_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_is_plain", lambda parameter: False)
    monkeypatch.setattr(evaluation.Evaluation, "rounded", True)
    checked, window = peaks()
    assert checked > 4 * window, (checked, window)


# -- in DistributedDataParallel ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    return found_by_both("tests.torch.wide_ranks", tmp_path_factory.mktemp("ranks"), warnings="default")


@pytest.mark.parametrize("share", ["0.3", "0.03", "0.003"])
def test_on_two_ranks_a_wrong_term_is_found(found: list[dict[str, Any]], share: str) -> None:
    for of_rank in found:
        assert of_rank[share]["held"], "premise: DDP holds the parameters, no copy is made"
        assert of_rank[share]["error"] and of_rank[share]["updates"] == 0


def test_on_two_ranks_a_right_declaration_passes_without_warning(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["0.0"]["updates"] == 1 and not of_rank["0.0"]["error"]
        assert not [text for text in of_rank["0.0"]["warned"] if "superbatch" in text]
    assert found[0]["0.0"]["sums"] == found[1]["0.0"]["sums"], "DDP still reduces gradients"


def test_on_two_ranks_hidden_rounding_warns_once(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        warned = [text for text in of_rank["bypass"]["warned"] if "rounding may hide" in text]
        assert len(warned) == 1 and not of_rank["bypass"]["error"]
