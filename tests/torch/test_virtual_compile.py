"""Compiled segments: their gradient is that of the real batch, and no segment is compiled twice.

Inductor takes seconds per segment. Most tests run the graph uncompiled; those with the fixture `inductor`
compile it.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import InputError
from superbatch.torch import virtual_batch
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.virtual.run import compiled, memo, segments, store

Loss = Callable[[nn.Module, Any], Tensor]
SAMPLES, SIZE = 10, 4  # micro-batches of 4, 3 and 3


class Towers(nn.Module):
    """Two towers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5))
        self.second = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.first(x), dim=1), F.normalize(self.second(x.flip(1)), dim=1)


def conv_net() -> nn.Module:
    """Return convolutions with BatchNorm, which couples samples in each layer."""
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    layers += [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def classification_loss(model: nn.Module, x: Any) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % 3)


def info_nce(model: nn.Module, x: Any) -> Tensor:
    first, second = model(x)
    logits = model.scale.exp() * first @ second.T  # type: ignore[operator]  (a Parameter)
    labels = torch.arange(len(logits))
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, tuple[int, ...]]] = {
    "conv net": (conv_net, classification_loss, (2, 7, 7)),
    "towers": (Towers, info_nce, (6,)),
    "dropout": (dropout_net, classification_loss, (6,)),
}


def run_uncompiled(graph: Any, inputs: Any, **options: Any) -> Any:
    """Stand in for Inductor: run the graph, and free its inputs as Inductor's code does."""

    def run(tensors: list[Tensor]) -> Any:
        given = list(tensors)
        tensors.clear()
        return graph(*given)

    return run


@pytest.fixture
def inductor() -> None:
    """Let Inductor compile in this test."""


@pytest.fixture(autouse=True)
def empty_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised by torch itself
        import torch._inductor.compile_fx as compiler
    if "inductor" not in request.fixturenames:
        monkeypatch.setattr(compiler, "compile_fx_inner", run_uncompiled)
    for cache in (compiled._cached, compiled._warn):
        cache.cache_clear()
    yield
    for cache in (compiled._cached, compiled._warn):
        cache.cache_clear()


def model_and_batch(
    case: str, dtype: torch.dtype = torch.float64, samples: int = SAMPLES
) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, _, shape = CASES[case]
    return build().to(dtype), torch.randn(samples, *shape).to(dtype)


def outcome(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients and buffers by name."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b.double() for name, b in model.named_buffers()}
    assert found and all(grad.abs().sum() > 0 for grad in found.values()), "premise: there are gradients"
    return {**found, **buffers}


def update(case: str, model: nn.Module, x: Tensor, size: int = SIZE, **options: Any) -> dict[str, Tensor]:
    """Run a copy of the model on a virtual batch; return its gradients and buffers."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    options = {"rng": "batch", "compile": True, **options}
    with virtual_batch(model, size, **options) as batch:
        CASES[case][1](model, batch(x)).backward()
    assert batch.report().microbatches == -(-len(x) // size), "premise: the batch was split"
    return outcome(model)


def real(case: str, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    CASES[case][1](model, x).backward()
    return outcome(model)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    # The gradient of a bias before BatchNorm is only rounding: compare it with the largest norm.
    scale = max(float(one.norm()) for one in expected.values())
    errors = {
        name: float((found[name] - one).norm()) / max(float(one.norm()), 1e-3 * scale)
        for name, one in expected.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"not the gradient of the real batch: {wrong}"


def compilations() -> int:
    return compiled._cached.cache_info().misses


def check(case: str, samples: int = SAMPLES) -> None:
    model, x = model_and_batch(case, samples=samples)
    assert_same(update(case, model, x), real(case, model, x))
    there = compilations()
    assert there > 0, "premise: something was compiled"
    assert_same(update(case, model, 2 * x), real(case, model, 2 * x))
    assert compilations() == there, "the second update compiles nothing"


@pytest.mark.parametrize("case", CASES)
def test_segments_equal_the_real_batch_and_are_cached(case: str) -> None:
    check(case)


@pytest.mark.usefixtures("inductor")
def test_compiled_segments_equal_the_real_batch() -> None:
    check("dropout", 8)  # two micro-batches of one size take half the time


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("case", CASES)
def test_compiled_segments_of_every_case_equal_the_real_batch(case: str) -> None:
    check(case)


def test_without_compile_no_compiler_is_imported() -> None:
    modules = {compiled.__name__, segments.__name__, "torch._inductor.compile_fx"}
    assert modules <= sys.modules.keys(), "premise: modules with these names exist"
    code = f"""
import sys, torch
from superbatch.torch import virtual_batch
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
with virtual_batch(model, 2) as batch:
    model(batch(torch.randn(5, 3))).square().mean().backward()
print(batch.report().microbatches, *{modules} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3"]


def test_masks_are_those_of_the_uncompiled_block() -> None:
    """Random operators are not compiled, and keep their seeds."""
    model, x = model_and_batch("dropout")
    ours = update("dropout", model, x, rng="microbatch")
    assert_same(ours, update("dropout", model, x, rng="microbatch", compile=False))
    with pytest.raises(AssertionError, match="not the gradient"):  # premise: the real batch draws other masks
        assert_same(ours, real("dropout", model, x))


def test_values_read_in_the_block_and_gradients_of_inputs() -> None:
    """Sweeps run inside the block and inside autograd functions."""
    model, x = model_and_batch("conv net")
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    classification_loss(model, leaves[0]).backward()
    expected = outcome(model)
    model, _ = model_and_batch("conv net")
    with virtual_batch(model, SIZE, compile=True) as batch:
        loss = classification_loss(model, batch(leaves[1]))
        assert loss.item() > 0
        loss.backward()
    assert_same(outcome(model), expected)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert_same({"x": leaves[1].grad}, {"x": leaves[0].grad})


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_rounding_in_float32_is_at_most_twice_that_of_the_real_batch() -> None:
    model, x = model_and_batch("towers", torch.float32)
    truth = real("towers", copy.deepcopy(model).double(), x.double())
    whole = torch.cat([one.flatten() for one in truth.values()])

    def distance(found: dict[str, Tensor]) -> float:
        return float((torch.cat([one.flatten() for one in found.values()]).double() - whole).norm())

    own = distance(real("towers", model, x))
    assert own > 0, "premise: float32 rounds"
    assert distance(update("towers", model, x)) <= 2 * own


def test_segments_load_no_more_rows_from_the_host_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment begins at a load from the host, so it holds no more rows at once."""
    model, x = model_and_batch("conv net")
    monkeypatch.setattr(store, "OWN_MEMORY", {"cpu"})
    reads: list[int] = []
    segmented = segments.segmented

    def watched(program: Any, registers: Any, *, rows_on_host: bool) -> Any:
        assert rows_on_host
        found = segmented(program, registers, rows_on_host=rows_on_host)
        old, new = most_loads(program), most_loads(found)
        assert new <= old
        reads.append(old)
        return found

    def most_loads(program: Any) -> int:
        loads = [[] if one.effects is None else one.effects.loads for one in program]
        return max(sum(load.source.rows is not None for load in one) for one in loads)

    monkeypatch.setattr(segments, "segmented", watched)
    assert_same(update("conv net", model, x, device_budget=0), real("conv net", model, x))
    assert max(reads) > 0, "premise: rows are read"


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_the_cache_key_includes_the_newer_setting_of_precision(backend: str) -> None:
    """With the new setting, `torch.get_float32_matmul_precision()` raises."""
    matmul = getattr(torch.backends, backend).matmul
    usual = getattr(matmul, "fp32_precision", None)
    if usual is None:
        pytest.skip("this torch has only the older setting")
    before = compiled._settings()
    matmul.fp32_precision = "tf32"
    try:
        if backend == "cuda":
            with pytest.raises(RuntimeError, match="mix of the legacy and new"):
                torch.get_float32_matmul_precision()
        assert compiled._settings() != before
        model, x = model_and_batch("towers")
        assert_same(update("towers", model, x), real("towers", model, x))
        assert compilations() > 0, "premise: it was compiled"
    finally:
        matmul.fp32_precision = usual
    assert compiled._settings() == before


def test_cuda_graphs_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs stay off even if configured: a replay would overwrite stored rows."""
    asked: list[Any] = []

    def record_option(graph: Any, inputs: Any, **options: Any) -> Any:
        asked.append(options.get("cudagraphs"))
        return run_uncompiled(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", record_option)
    import torch._inductor.config as inductor

    model, x = model_and_batch("towers")
    with inductor.patch({"triton.cudagraphs": True}):  # monkeypatch would delete the entry at its end
        update("towers", model, x)
    assert asked
    assert all(one is not None and not one.value for one in asked)


def test_compile_with_paranoid_raises() -> None:
    model, _ = model_and_batch("towers")
    raises = pytest.raises(InputError, match=r"paranoid=True checks single operations.* compile=True\.")
    with raises, virtual_batch(model, 2, paranoid=True, compile=True):
        pass


def test_without_a_compiler_it_runs_uncompiled_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nin many lines")

    model, x = model_and_batch("towers", samples=9)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", broken)
    with pytest.warns(
        UserWarning,
        match=r"cannot compile some operations, which run uncompiled \(RuntimeError: InvalidCxxComp",
    ) as found:
        ours = update("towers", model, x, size=3)
    assert len(found) == 1
    assert_same(ours, real("towers", model, x))
    before = compilations()
    assert_same(update("towers", model, x, size=3), ours)
    assert compilations() == before, "a failed compilation is not retried"


def allocate_by_dispatcher(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_peak_memory_is_that_without_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch makes Inductor allocate through the dispatcher, where allocations are counted."""
    monkeypatch.setattr("torch._C._dynamo.guards._empty_strided_cpu", allocate_by_dispatcher)
    model, x = model_and_batch("conv net")
    x = F.interpolate(x, size=(23, 23))
    update("conv net", model, x)
    peaks = [peak_bytes(lambda way=way: update("conv net", model, x, compile=way)) for way in (True, False)]
    assert peaks[0] <= 1.1 * peaks[1]
    assert peaks[1] > 2**15, "premise: there is something to measure"


# -- mutants ------------------------------------------------------------------------------------------------


def check_constant(factor: float) -> None:
    """Compare the compiled gradient of a loss that contains a constant."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
    with virtual_batch(nn.Identity(), 3, compile=True, device="cpu") as batch:
        ((batch(x) * weight * factor).sin().flatten() * factor).exp().sum().backward()
    expected = torch.ones(3, dtype=torch.float64, requires_grad=True)
    ((x * expected * factor).sin().flatten() * factor).exp().sum().backward()
    assert weight.grad is not None and expected.grad is not None
    torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_the_cache_key_includes_constants() -> None:
    check_constant(0.5)
    check_constant(1.5)


def wiring(segment: compiled.Segment) -> Any:
    members, wanted = segment.structure
    return tuple(member[1:] for member in members), wanted


MUTANTS: dict[str, Callable[[compiled.Segment, Any], Any]] = {
    "the functions": lambda segment, form: (wiring(segment), form),
    "the form": lambda segment, form: segment.structure,
}


@pytest.mark.parametrize("left_out", MUTANTS)
def test_mutant_of_the_cache_key(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    init = compiled._Key.__init__

    def other(self: compiled._Key, segment: compiled.Segment, form: Any) -> None:
        init(self, segment, form)
        self.key = MUTANTS[left_out](segment, form)
        self.hash = hash(self.key)

    monkeypatch.setattr(compiled._Key, "__init__", other)
    with pytest.raises((AssertionError, RuntimeError)):
        test_the_cache_key_includes_constants()


def test_a_function_that_reads_its_slice_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rule does not exclude it from compilation, the segment warns."""

    def crossed(z: Any) -> Tensor:
        """Cross entropy over samples: the gradient of a column depends on its index."""
        return F.cross_entropy((z @ z.T).T.exp(), torch.arange(len(z)).flip(0))

    def gradient() -> None:
        weight = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
        with virtual_batch(nn.Identity(), 3, compile=True, device="cpu") as batch:
            crossed(batch(torch.eye(5, 3, dtype=torch.float64)) @ weight.sin()).backward()

    gradient()
    action = memo.action
    monkeypatch.setattr(memo, "action", lambda *args, **more: action(*args, **{**more, "compilable": True}))
    memo._cached.cache_clear()
    with pytest.warns(UserWarning, match="no attribute 'start'"):
        gradient()
    memo._cached.cache_clear()


def multilabel_margin(z: Any) -> Tensor:
    targets = torch.tensor([[0, 2, -1], [1, -1, 0], [2, 0, 1], [-1, 0, 0], [1, 0, -1]])
    return F.multilabel_margin_loss(z.sin().exp(), targets)


def hard_sigmoid(z: Any) -> Tensor:
    return F.hardsigmoid(z.sin()).exp().sum()


@pytest.mark.parametrize("loss", [multilabel_margin, hard_sigmoid])
@pytest.mark.parametrize("mutant", [False, True])
def test_operators_with_a_wrong_decomposition_are_not_compiled(
    loss: Callable[[Any], Tensor], mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        z = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
        weights = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        real = loss(z * weights[0])
        real.backward()
        with virtual_batch(nn.Identity(), 3, compile=True, device="cpu") as batch:
            ours = loss(batch(z) * weights[1])
            ours.backward()
        assert weights[0].grad is not None and weights[1].grad is not None
        torch.testing.assert_close(weights[1].grad, weights[0].grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.item(), real.item(), rtol=1e-12, atol=1e-12)

    memo._cached.cache_clear()
    if not mutant:
        check()
        return
    monkeypatch.setattr(memo, "_NOT_COMPILED", set())
    with pytest.raises(AssertionError):
        check()
    memo._cached.cache_clear()
