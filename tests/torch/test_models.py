"""Kinds of models: frozen, unused, tied and complex parameters; checkpointing, compilation, penalties."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

from superbatch.errors import OptimizerError
from superbatch.torch import Accumulator, count_tokens
from tests.torch.helpers import (
    assert_same_parameters,
    large_batch,
    mlp,
    mse,
    rows,
    sgd,
    start_of,
    token_mean,
    tokens,
    train_both,
)

DTYPES = [torch.float64, torch.float32]


# -- parameters ---------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_and_get_no_gradient() -> None:
    def make() -> nn.Module:
        model: Any = mlp()
        model[0].weight.requires_grad = False
        return model

    both = train_both(make, mse, rows(10), microbatch_size=3)
    both.check(still=["0.weight"])


@pytest.mark.parametrize("into", ["grad", "momentum"])
def test_frozen_parameters_in_the_optimizer_do_not_change(into: Any) -> None:
    """Weight decay changes only parameters with a gradient."""
    model: Any = mlp()
    model[2].bias.requires_grad = False
    start = start_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    accumulate = Accumulator(
        model,
        optimizer,
        lambda mb: mse(model, mb),
        microbatch_size=3,
        gradient_sum="momentum" if into == "momentum" else "auto",
    )
    accumulate(rows(10, 1)[0])
    moved = {name for name, value in model.named_parameters() if not torch.equal(start[name], value)}
    assert moved == {"0.weight", "0.bias", "2.weight"}


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.spare = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_unused_parameters_stay_under_weight_decay() -> None:
    """The large batch leaves their gradient at None, not zeros, so weight decay does not change them."""
    both = train_both(
        Unused, mse, rows(10), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5), microbatch_size=3
    )
    both.check(still=["spare.weight", "spare.bias"])


class ConditionalBranch(nn.Module):
    """Model with a branch for some samples only: some micro-batches give it no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.branch = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        taken = x[:, 0] > 0.8
        if bool(taken.any()):
            out = torch.where(taken.unsqueeze(1), out + self.branch(out), out)
        return out


@pytest.mark.parametrize("into", ["grad", "momentum"])
def test_a_branch_that_some_microbatches_never_take(into: Any) -> None:
    taken = [[bool((mb[:, 0] > 0.8).any()) for mb in x.split(2)] for x, _ in rows(12)]
    assert all(any(window) and not all(window) for window in taken), "premise"
    train_both(
        ConditionalBranch,
        mse,
        rows(12),
        microbatch_size=2,
        gradient_sum="momentum" if into == "momentum" else "auto",
    ).check()


class Tied(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 5)
        self.mixer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mixer(self.embedding(ids).cumsum(1))))


@pytest.mark.parametrize("into", ["grad", "momentum"])
def test_tied_weights(into: Any) -> None:
    batches = [tokens([7, 1, 3, 6, 2, 4], seed=seed) for seed in range(3)]
    both = train_both(
        Tied,
        token_mean,
        batches,
        microbatch_size=2,
        weight=count_tokens("labels"),
        gradient_sum="momentum" if into == "momentum" else "auto",
    )
    both.check()
    assert len(both.start) == 3


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs() + self.bias


@pytest.mark.parametrize(
    "optimizer", [sgd, lambda p: torch.optim.Adam(p, lr=0.01), lambda p: torch.optim.Adagrad(p, lr=0.1)]
)
def test_complex_parameters(optimizer: Any) -> None:
    both = train_both(Complex, mse, rows(10), optimizer, microbatch_size=3, max_grad_norm=0.2)
    assert min(both.seen.norms) > 0.2
    both.check()


def test_complex_parameters_into_momentum() -> None:
    train_both(Complex, mse, rows(10), microbatch_size=3, gradient_sum="momentum").check()


def test_a_parameter_outside_of_the_model() -> None:
    """A learned temperature is in the optimizer and the loss, but not in the model."""

    def run(split: bool) -> tuple[nn.Module, Tensor, float]:
        model, scale = mlp(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        optimizer = sgd([*model.parameters(), scale])

        def loss(batch: Any) -> Tensor:
            return nn.functional.mse_loss(scale * model(batch[0]), batch[1])

        if split:
            norm = Accumulator(model, optimizer, loss, microbatch_size=3)(rows(10, 1)[0]).grad_norm
            assert norm is not None
            return model, scale, norm
        return model, scale, large_batch(optimizer, loss, rows(10, 1)).norms[0]

    start = start_of(mlp())
    (reference, expected, norm), (model, scale, ours) = run(split=False), run(split=True)
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert float(scale.detach()) == pytest.approx(float(expected.detach()), rel=1e-13)
    assert float(scale.detach()) != 1.5 and ours == pytest.approx(norm, rel=1e-12)


def test_other_trainable_parameters_get_no_gradient() -> None:
    """With an optimizer over the head alone, the body keeps its earlier gradient."""
    reference: Any = mlp()
    model: Any = mlp()
    start = start_of(reference)
    large_batch(sgd(reference[2].parameters()), lambda b: mse(reference, b), rows(10))
    mine = torch.full_like(model[0].weight, 3.0)
    model[0].weight.grad = mine.clone()
    accumulate = Accumulator(model, sgd(model[2].parameters()), lambda mb: mse(model, mb), microbatch_size=3)
    for batch in rows(10):
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start, still=["0.weight", "0.bias"])
    assert torch.equal(model[0].weight.grad, mine) and model[0].bias.grad is None


def test_parametrized_weights() -> None:
    def make() -> nn.Module:
        model = mlp()
        nn.utils.parametrizations.weight_norm(model[0])
        return model

    train_both(make, mse, rows(10, 4), microbatch_size=3).check()


# -- other ways to compute gradients ------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6, dtype=dtype), nn.Linear(6, 3, dtype=dtype)
        self.middle = nn.Linear(6, 6, dtype=dtype)
        self.reentrant = reentrant
        self.forwards = 0

    def block(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return torch.tanh(self.middle(x))

    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_checkpointing(reentrant: bool, dtype: torch.dtype) -> None:
    both = train_both(
        lambda: Checkpointed(reentrant=reentrant, dtype=dtype), mse, rows(10, 3, dtype), microbatch_size=4
    )
    both.check()
    assert both.reference.forwards == 6, "premise: every backward recomputes the block"


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_into_float32_buffers(reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant, dtype=torch.bfloat16)
    start = start_of(model)
    reference = copy.deepcopy(model)
    batch = rows(32, 1, torch.bfloat16)[0]
    large_batch(torch.optim.SGD(reference.parameters(), lr=1.0), lambda b: mse(reference, b), [batch])
    Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda mb: mse(model, mb),
        microbatch_size=1,
        gradient_sum=torch.float32,
    )(batch)
    assert_same_parameters(reference, model, 2e-2, start=start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("into", ["grad", "momentum"])
def test_a_loss_with_a_gradient_penalty(dtype: torch.dtype, into: Any) -> None:
    """The backward of a gradient penalty differentiates through a backward."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return nn.functional.mse_loss(out, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    train_both(
        lambda: mlp(dtype),
        loss,
        rows(10, 3, dtype),
        microbatch_size=3,
        gradient_sum="momentum" if into == "momentum" else "auto",
    ).check()


def test_a_custom_autograd_function() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradients[0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        cubed: Any = Cube.apply(model(batch[0]))
        return nn.functional.mse_loss(cubed, batch[1])

    train_both(mlp, loss, rows(10), lambda p: torch.optim.SGD(p, lr=0.01), microbatch_size=3).check()


# -- layers -----------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolutional_net(dtype: torch.dtype) -> None:
    batches = [(torch.randn(10, 1, 8, 8, dtype=dtype), torch.randint(0, 3, (10,))) for _ in range(3)]
    train_both(
        lambda: ConvNet(dtype),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches,
        lambda p: torch.optim.SGD(p, lr=0.1),
        microbatch_size=4,
    ).check()


class Transformer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.layer(self.embedding(ids), src_mask=mask, is_causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 4])
def test_a_transformer_on_tokens(dtype: torch.dtype, size: int) -> None:
    batches = [tokens([7, 1, 3, 0, 6, 2, 4], seed=seed) for seed in range(3)]
    train_both(
        lambda: Transformer(dtype),
        token_mean,
        batches,
        microbatch_size=size,
        weight=count_tokens("labels"),
        max_grad_norm=0.1,
    ).check()


# -- torch.compile ----------------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Callable[[nn.Module], tuple[Any, list[tuple[int, ...]]]]:
    """Return a function that compiles a model with a backend that records graphs and runs them eagerly."""

    def compiled(model: nn.Module, **options: Any) -> tuple[Any, list[Any]]:
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append([tuple(i.shape) for i in inputs if isinstance(i, Tensor) and not i.requires_grad])
            return graph.forward

        return torch.compile(model, backend=backend, **options), graphs

    return compiled


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_compiled_model_is_compiled_for_two_sizes_at_most(compiler: Any, dynamic: bool | None) -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(11, 4)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches)
    compiled, graphs = compiler(model, dynamic=dynamic)
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(compiled, mb), microbatch_size=3)
    microbatches = {accumulate(batch).microbatches for batch in batches}
    assert microbatches == {4}, "premise: 3 + 3 + 3 + 2"
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert len(graphs) == 2, "the first-window check and later windows compile nothing"


def test_a_compiled_model_given_as_the_model(compiler: Any) -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(12, 3)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches)
    compiled, graphs = compiler(model)
    accumulate = Accumulator(
        compiled,
        sgd(compiled.parameters()),
        lambda mb: mse(compiled, mb),
        microbatch_size=4,
        max_grad_norm=9.0,
    )
    for batch in batches:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert len(graphs) == 1, "one size, one graph"


@pytest.mark.skipif(
    not hasattr(_python_dispatch, "is_in_any_mode_without_ignore_compile_internals"),
    reason="this release of torch compiles nothing after dispatch modes that overlapped in two threads",
)
def test_checks_that_overlap_in_two_threads_leave_the_compiler_on() -> None:
    """The compiler's stance is global: the check that ends last must not leave its own stance behind."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(mlp(), backend=backend)
    first_is_in, second_is_in, first_is_over = (threading.Event() for _ in range(3))

    def train(is_in: threading.Event, wait_for: threading.Event) -> None:
        model = mlp()

        def loss_fn(mb: Any) -> Tensor:
            is_in.set()  # in the first-window check
            assert wait_for.wait(60)
            return mse(model, mb)

        Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=3)(rows(10)[0])

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(train, first_is_in, second_is_in)
        assert first_is_in.wait(60)
        second = pool.submit(train, second_is_in, first_is_over)
        first.result(60)
        first_is_over.set()
        second.result(60)
    compiled(rows(10)[0][0])
    assert graphs, "the compiler is still off"


def test_a_compiled_loss_function(compiler: Any) -> None:
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 3)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    loss_fn = torch.compile(lambda mb: mse(model, mb), backend=backend)
    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=3)
    for batch in batches:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert 1 <= len(graphs) <= 2


@pytest.mark.parametrize("options", [{}, {"gradient_sum": "momentum"}, {"nonfinite": "skip_microbatch"}])
def test_a_compiled_backward(options: dict[str, Any]) -> None:
    """AOTAutograd compiles the backward as a separate graph, as `torch.compile` does by default."""
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(11, 3)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches)
    compiled: Any = torch.compile(model, backend="aot_eager")
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: mse(compiled, mb), microbatch_size=4, **options
    )
    for batch in batches:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_loss_without_parameters_of_the_optimizer_is_refused_before_any_change() -> None:
    model, other = mlp(), mlp()
    start = start_of(model)
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: mse(other, mb), microbatch_size=3, check=False
    )
    with pytest.raises(OptimizerError, match="No parameter of the optimizer received a gradient"):
        accumulate(rows(10, 1)[0])
    assert all(torch.equal(start[name], value) for name, value in model.named_parameters())


# -- optimizers and parameters that change during a run -------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_parameter_unfrozen_during_a_run(clip: float | None) -> None:
    """The gradient of an unfrozen parameter is clipped with the others, then set to None."""
    reference: Any = mlp()
    model: Any = mlp()
    start, batches = start_of(reference), rows(10, 4)
    theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
    for network in (reference, model):
        network[0].requires_grad_(requires_grad=False)
    accumulate = Accumulator(model, ours, lambda mb: mse(model, mb), microbatch_size=4, max_grad_norm=clip)
    for number, batch in enumerate(batches):
        if number == 1:
            for network in (reference, model):
                network[0].requires_grad_(requires_grad=True)
        large_batch(theirs, lambda b: mse(reference, b), [batch], max_grad_norm=clip)
        accumulate(batch)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_parameter_frozen_during_a_run() -> None:
    reference: Any = mlp()
    model: Any = mlp()
    start, batches = start_of(reference), rows(10, 4)
    theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
    accumulate = Accumulator(model, ours, lambda mb: mse(model, mb), microbatch_size=4)
    for number, batch in enumerate(batches):
        if number == 2:
            for network in (reference, model):
                network[0].requires_grad_(requires_grad=False)
        large_batch(theirs, lambda b: mse(reference, b), [batch])
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_parameter_group_added_during_a_run() -> None:
    reference: Any = mlp()
    model: Any = mlp()
    start, batches = start_of(reference), rows(10, 4)
    theirs, ours = sgd(reference[2].parameters()), sgd(model[2].parameters())
    accumulate = Accumulator(model, ours, lambda mb: mse(model, mb), microbatch_size=4)
    large_batch(theirs, lambda b: mse(reference, b), batches[:1])
    accumulate(batches[0])
    theirs.add_param_group({"params": list(reference[0].parameters()), "lr": 0.03})
    ours.add_param_group({"params": list(model[0].parameters()), "lr": 0.03})
    large_batch(theirs, lambda b: mse(reference, b), batches[1:])
    assert accumulate(batches[1]).learning_rates == (0.1, 0.03)
    for batch in batches[2:]:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("into", ["grad", "momentum"])
def test_an_optimizer_loaded_after_the_accumulator_was_made(into: Any) -> None:
    """Loading replaces the groups; later updates use their learning rate, momentum and decay."""
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(10, 4)
    theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
    accumulate = Accumulator(
        model,
        ours,
        lambda mb: mse(model, mb),
        microbatch_size=4,
        gradient_sum="momentum" if into == "momentum" else "auto",
    )
    large_batch(theirs, lambda b: mse(reference, b), batches[:2])
    for batch in batches[:2]:
        accumulate(batch)
    for optimizer in (theirs, ours):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0].update(lr=0.01, momentum=0.5, weight_decay=0.2)
    large_batch(theirs, lambda b: mse(reference, b), batches[2:])
    for batch in batches[2:]:
        accumulate(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)
