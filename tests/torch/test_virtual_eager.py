"""A compiled model runs eagerly and exactly in a virtual batch, which issues one warning."""

# ruff: noqa: PT012  (the block that raises has several statements)

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn import functional as F

from superbatch.torch import WholeBatch, virtual_batch
from superbatch.torch.checks import introspection

N = 14
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2))
WARNING = r"A compiled model runs eagerly inside virtual_batch.*compile=True"

Kind = Callable[["Any", "list[Any]"], Any]


@pytest.fixture(autouse=True)
def reset_warning() -> Iterator[None]:
    """Reset the warning that is issued once per process."""
    introspection._warn_of_eager_run.cache_clear()
    yield
    introspection._warn_of_eager_run.cache_clear()


class Head(nn.Module):
    """Custom head: torch does not compile its own modules in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, h: Tensor) -> Tensor:
        return self.last(F.silu(self.norm(h)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.head: Any = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


def make() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def recording_backend(graphs: list[Any]) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    return backend


def compiled_model(model: Net, graphs: list[Any]) -> Any:
    return torch.compile(model, backend=recording_backend(graphs))


def compiled_in_place(model: Net, graphs: list[Any]) -> Any:
    model.compile(backend=recording_backend(graphs))
    return model


def compiled_head(model: Net, graphs: list[Any]) -> Any:
    model.head = torch.compile(model.head, backend=recording_backend(graphs))
    return model


def compiled_head_in_place(model: Net, graphs: list[Any]) -> Any:
    model.head.compile(backend=recording_backend(graphs))
    return model


def update(compiled: Any, given: nn.Module) -> None:
    with virtual_batch(given, 4) as batch:
        F.cross_entropy(compiled(batch(X)), Y).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [compiled_model, compiled_in_place, compiled_head, compiled_head_in_place])
@pytest.mark.parametrize("given", ["the model", "the compiled model"])
def test_two_blocks_issue_one_warning_and_no_other(kind: Kind, given: str) -> None:
    graphs: list[Any] = []
    ours, plain = make(), make()
    compiled = kind(ours, graphs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        update(compiled, compiled if given == "the compiled model" else ours)
        update(compiled, compiled if given == "the compiled model" else ours)
    assert len(caught) == 1
    assert caught[0].category is UserWarning
    assert "A compiled model runs eagerly inside virtual_batch" in str(caught[0].message)
    assert "compile=True" in str(caught[0].message)
    if not kind.__name__.startswith("compiled_head"):
        assert caught[0].filename == __file__, "the warning points at the call"
    assert not graphs, "it ran eagerly"
    for _ in range(2):
        F.cross_entropy(plain(X), Y).backward()
    for a, b in zip(gradients(ours), gradients(plain), strict=True):
        assert float((a - b).norm()) <= 1e-12 * max(float(b.norm()), 1e-3)
    torch.compiler.reset()
    with torch.no_grad():
        compiled(X)
    assert graphs, "premise: outside of the block it is compiled"


def test_whole_batch_issues_the_warning_once() -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accumulate = WholeBatch(
        model,
        optimizer,
        lambda batch: F.cross_entropy(compiled(batch[0]), batch[1]),
        microbatch_size=4,
    )
    with pytest.warns(UserWarning, match=WARNING) as caught:
        losses = [accumulate((X, Y)).loss for _ in range(2)]
    assert losses[1] < losses[0], "premise: two updates"
    assert len(caught) == 1


def test_a_model_that_is_not_compiled_issues_no_warning() -> None:
    torch.compile(make(), backend="eager")  # another model; loads the compiler
    update(model := make(), model)


def test_a_compiled_model_in_another_thread_issues_no_warning() -> None:
    other = torch.compile(make(), backend="eager")
    model = make()
    with virtual_batch(model, 4) as batch:
        thread = threading.Thread(target=other, args=(X,))
        thread.start()
        thread.join()
        F.cross_entropy(model(batch(X)), Y).backward()


def test_the_warning_of_torch_about_hooks_is_enabled_again_after_the_block() -> None:
    if "when there are global hooks" not in inspect.getsource(eval_frame):
        pytest.skip("this release of torch has no such warning")
    model = make()
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match=WARNING):
        update(compiled, model)
    update(compiled, model)  # a warning would be an error in these tests
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UserWarning, match=r"Using `torch.compile\(module\)` when there are global hooks"):
            compiled(X)  # warnings are errors in these tests
    finally:
        hook.remove()


def test_warning_filters_set_in_a_block_stay() -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():  # of the test
        before = list(warnings.filters)
        with pytest.raises(UserWarning, match=WARNING), virtual_batch(model, 4) as batch:
            warnings.filterwarnings("ignore", "of the program")
            F.cross_entropy(compiled(batch(X)), Y).backward()
        assert len(warnings.filters) == len(before) + 1
        assert warnings.filters[1:] == before
        warnings.warn("of the program", stacklevel=1)


def test_the_warning_as_an_error_leaves_no_gradients() -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(UserWarning, match=WARNING):
        update(compiled, model)
    assert not gradients(model)
