"""Each fast path equals its plain version, and only fast paths use private API of PyTorch for speed."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import superbatch.torch
from superbatch.torch import Accumulator, fastpaths

np = pytest.importorskip("numpy", reason="NumPy is not installed")
FOLDER = Path(superbatch.torch.__file__).parent


def test_every_path_has_a_plain_version_beside_it() -> None:
    public = {
        name
        for name, value in vars(fastpaths).items()
        if inspect.isfunction(value) and value.__module__ == fastpaths.__name__ and not name.startswith("_")
    }
    paths = {name for name in public if not name.startswith("plain_")}
    assert paths == set(fastpaths.PLAIN)
    for name, plain in fastpaths.PLAIN.items():
        assert plain is getattr(fastpaths, f"plain_{name}")
        signatures = inspect.signature(plain), inspect.signature(getattr(fastpaths, name))
        assert signatures[0] == signatures[1], name


# -- files that use private API for correctness, with the reason ---------------------------------------------

PRIVATE = re.compile(r"torch\._C\b|torch\._foreach_|_execution_engine|from_address|string_at|attrgetter\(\"_")
FOR_CORRECTNESS = {
    "checks/precision.py",  # recognizes autograd's own conversions
    "checks/wide_parameters.py",  # hooks of functorch for saved tensors
    "sizes/fake.py",  # recognizes tensors inside vmap
    "modes.py",  # modes left active by an interrupt have no public names
    "memory/out_of_memory.py",  # frees pinned memory before a retry
    "window/participants/gradient_sum.py",  # finds other users of a gradient's memory
    "window/progress.py",  # versions of inputs
    "window/before_step.py",  # versions of parameters
}


def _files_with_private_api(folder: Path) -> set[str]:
    files = [file for file in folder.rglob("*.py") if file.name != "fastpaths.py"]
    return {
        file.relative_to(folder).as_posix()
        for file in files
        if not file.is_relative_to(folder / "virtual")
        and PRIVATE.search(re.sub(r"(>>>|\.\.\.) .*", "", file.read_text(encoding="utf-8")))
    }


def test_only_fast_paths_use_private_api_for_speed(tmp_path: Path) -> None:
    assert _files_with_private_api(FOLDER) <= FOR_CORRECTNESS
    (tmp_path / "planted.py").write_text("import torch\ntorch._foreach_mul_([], 2)\n")
    assert _files_with_private_api(tmp_path) == {"planted.py"}, "the search finds a planted use"


# -- autograd ------------------------------------------------------------------------------------------------


class Wrapped(Tensor):
    """A subclass, for which the fast path calls the public backward."""


def _losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    return {
        "a sum": lambda x, y: (x * y).sum(),
        "a leaf that is not reached": lambda x, y: x.square().sum(),
        "a leaf itself": lambda x, y: x,
        "a subclass": lambda x, y: (x * y).sum().as_subclass(Wrapped),
    }


@pytest.mark.parametrize("name", _losses())
@pytest.mark.parametrize("only", [None, "x"])
@pytest.mark.parametrize("own_gradient", [True, False])
def test_the_engine_gives_the_gradients_of_the_public_backward(
    name: str, only: str | None, own_gradient: bool
) -> None:
    found = []
    for backward in (fastpaths.backward, fastpaths.plain_backward):
        x = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        y = torch.tensor(-2.5, dtype=torch.float64, requires_grad=True)
        loss = _losses()[name](x, y)
        gradient = torch.tensor(3.0, dtype=torch.float64) if own_gradient else None
        for _ in range(2):
            backward(loss, gradient, [x] if only else None, retain_graph=True)
        backward(loss, gradient, [x] if only else None, retain_graph=False)
        found.append([None if leaf.grad is None else float(leaf.grad) for leaf in (x, y)])
    assert found[0] == found[1]
    assert found[0][0], "premise: there is a gradient"


def test_both_backwards_free_the_graph() -> None:
    for backward in (fastpaths.backward, fastpaths.plain_backward):
        x = torch.ones(2, requires_grad=True)
        loss = x.square().sum()
        backward(loss, torch.tensor(1.0), None, retain_graph=False)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(loss, torch.tensor(1.0), None, retain_graph=False)


def test_inside_a_transform_the_public_backward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not know the wrapped tensors of torch.func; the public backward raises for them."""
    called: list[bool] = []
    monkeypatch.setattr(fastpaths, "plain_backward", lambda *args, **options: called.append(True))

    def inner(x: Tensor) -> Tensor:
        loss = x.square().sum()
        fastpaths.backward(loss, torch.tensor(1.0), None, retain_graph=False)
        return loss

    torch.func.grad(inner)(torch.ones(2))
    assert called == [True]


# -- NumPy's generator ---------------------------------------------------------------------------------------


@pytest.fixture
def numpy_state() -> Iterator[None]:
    state = np.random.get_state()
    yield
    np.random.set_state(state)


DRAWS: tuple[Callable[[int], Any], ...] = (
    lambda n: np.random.rand(n),
    lambda n: np.random.normal(size=n),
    lambda n: np.random.seed(n),
    lambda n: np.random.permutation(n),
)


@pytest.mark.usefixtures("numpy_state")
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700)), max_size=6))
def test_both_read_the_same_numpy_state_after_any_draws(draws: list[tuple[int, int]]) -> None:
    np.random.seed(0)
    for which, count in draws:
        DRAWS[which](count)
        assert fastpaths.numpy_memory(np.random) == fastpaths.plain_numpy_memory(np.random)
    before = fastpaths.numpy_memory(np.random)
    assert before is not None, "premise: the layout is known"
    np.random.rand()
    assert fastpaths.numpy_memory(np.random) != before


def test_another_numpy_generator_is_not_read() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        assert fastpaths.numpy_memory(np.random) is None
        assert fastpaths.plain_numpy_memory(np.random) is None
    finally:
        np.random.set_bit_generator(before)


# -- Python's generator --------------------------------------------------------------------------------------


@pytest.fixture
def python_state() -> Iterator[None]:
    state = random.getstate()
    yield
    random.setstate(state)


PYTHON_DRAWS: tuple[Callable[[int], Any], ...] = (
    lambda n: [random.random() for _ in range(n)],
    lambda n: [random.gauss(0, 1) for _ in range(n)],  # caches the second number of a pair
    random.seed,
    lambda n: random.shuffle(list(range(n))),
)


@pytest.mark.usefixtures("python_state")
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700)), max_size=6))
def test_both_read_the_same_python_state_after_any_draws(draws: list[tuple[int, int]]) -> None:
    random.seed(0)
    for which, count in draws:
        PYTHON_DRAWS[which](count)
        assert fastpaths.python_memory() == fastpaths.plain_python_memory()
    for draw in (random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1)):
        before = fastpaths.python_memory()
        assert before is not None, "premise: the layout is known"
        draw()
        assert fastpaths.python_memory() != before


def test_another_python_generator_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(random.Random):
        pass

    monkeypatch.setattr(random, "_inst", Own(0))
    fastpaths._python_generator.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        assert fastpaths.python_memory() is None
    finally:
        fastpaths._python_generator.cache_clear()  # pyright: ignore[reportPrivateUsage]


# -- many tensors --------------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def _tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_is_not_rounded_to_the_dtype_of_the_tensor(dtype: torch.dtype) -> None:
    values = torch.linspace(1, 2, 200, dtype=torch.float64).to(dtype)
    expected = (values.double() * 0.3).to(dtype)
    for name in ("multiply", "plain_multiply"):
        one = values.clone()
        getattr(fastpaths, name)([one], 0.3)
        assert torch.equal(one, expected)
    rounded = values * torch.tensor(0.3, dtype=dtype)
    assert not torch.equal(rounded, expected), "premise: a rounded factor changes the result"


def _require_close(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-15, atol=0)


@given(SHAPES, DTYPES, st.floats(-3, 3).filter(lambda factor: abs(factor) > 1e-3))
def test_one_call_for_many_tensors_equals_one_call_per_tensor(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, factor: float
) -> None:
    for name in ("divide", "multiply"):
        one, other = _tensors(shapes, dtype), _tensors(shapes, dtype)
        getattr(fastpaths, name)(one, factor)
        fastpaths.PLAIN[name](other, factor)
        _require_close(one, other)
    sources = _tensors(shapes, dtype)
    one, other = ([torch.full_like(tensor, 7.0) for tensor in sources] for _ in range(2))
    fastpaths.copy(one, sources)
    fastpaths.plain_copy(other, sources)
    assert all(map(torch.equal, one, other)) and all(map(torch.equal, one, sources))
    fastpaths.add(one, sources, factor)
    fastpaths.plain_add(other, sources, factor)
    _require_close(one, other)


@given(SHAPES, DTYPES, st.sampled_from([2.0, float("inf")]))
def test_norms_agree(shapes: list[tuple[int, ...]], dtype: torch.dtype, order: float) -> None:
    tensors = [tensor for tensor in _tensors(shapes, dtype) if tensor.numel()]
    wider = torch.float32 if dtype == torch.bfloat16 and order == 2.0 else None
    one = fastpaths.norms(tensors, order, wider) if tensors else []
    other = fastpaths.plain_norms(tensors, order, wider)
    assert [norm.dtype for norm in one] == [norm.dtype for norm in other]
    torch.testing.assert_close(one, other)


# -- training ------------------------------------------------------------------------------------------------


def _train() -> dict[str, Tensor]:
    torch.manual_seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss_fn(x: Tensor) -> tuple[Tensor, int]:
        return (model(x) - float(np.random.normal())).square().mean(), len(x)

    accumulate = Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        loss_fn,
        microbatch_size=2,
        weight="returned",
        max_grad_norm=0.1,
        check=False,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        accumulate(torch.randn(5, 3, dtype=torch.float64))
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not any(torch.equal(after[name], before[name]) for name in after), "premise: it trains"
    return after


@pytest.mark.usefixtures("numpy_state")
@pytest.mark.parametrize("name", fastpaths.PLAIN)
def test_a_training_without_one_fast_path_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _train()
    calls: list[str] = []
    plain = fastpaths.PLAIN[name]

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return plain(*args, **options)

    monkeypatch.setattr(fastpaths, name, counted)
    found = _train()
    assert calls or name in ("copy", "add"), "premise: the path is used"
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-12, atol=1e-12)
