"""`cached_gradients`: errors, restored state, and unusual encoders and losses."""

from __future__ import annotations

import copy
import math
import random
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superbatch.batch.split import TokenBudget
from superbatch.errors import CoupledSamplesError, InputError, OptimizerError, SplitError
from superbatch.torch.gradcache.cached import cached_gradients
from tests.torch.embedding_tasks import (
    F64,
    Pair,
    assert_same_gradients,
    check,
    gradients,
    info_nce,
    normal,
    pairs,
    tower,
)
from tests.torch.states import assert_unchanged, draw_everywhere, fingerprint
from tests.torch.test_bad_input import TEXT


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ring(z: Tensor) -> Tensor:
    return info_nce(z, z.roll(1, 0))


def refused(
    kind: type[Exception], match: str, encode: Any, loss_fn: Any, batch: Any, size: Any = 3, **options: Any
) -> None:
    """Expect an error of the usual form, and no change of the models."""
    models = options.get("models", [encode] if isinstance(encode, nn.Module) else [])
    models = [models] if isinstance(models, nn.Module) else models
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = fingerprint(*models)
    with pytest.raises(kind, match=match) as caught:
        cached_gradients(encode, loss_fn, batch, size, **options)
    assert re.fullmatch(TEXT, str(caught.value))
    assert_unchanged(before, fingerprint(*models))


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, track_running_stats=False).eval()],
)
def test_batch_norm_is_refused_by_name_with_the_three_choices(norm: nn.Module):
    model = nn.Sequential(tower(), nn.Sequential(norm)).to(F64)
    text = r"'1\.0'.*virtual_batch\(.*eval\(\).*GroupNorm"
    refused(CoupledSamplesError, text, model, ring, normal(7, 6))
    other = nn.Linear(4, 4)
    refused(
        CoupledSamplesError, r"'models\[1\]\.1\.0'", lambda b: b, ring, normal(7, 4), models=[other, model]
    )


def test_frozen_batch_norm_and_group_norm_are_exact():
    # One group of 4: with two numbers per group, only signs and gradients of rounding errors would remain.
    norm = nn.BatchNorm1d(4).to(F64)
    norm(normal(9, 4))
    model = nn.Sequential(tower(), norm.eval(), nn.GroupNorm(1, 4).to(F64), nn.Linear(4, 3).to(F64))
    check([model], lambda m, b: m[0](b), lambda _, z: ring(z), normal(7, 6), 3)


class Running(nn.Module):
    """Subtracts a running mean of the samples, or only updates it."""

    mean: Tensor

    def __init__(self, *, used: bool = True, counts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4).to(F64)
        self.used, self.counts = used, counts
        self.register_buffer("mean", torch.zeros(4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.counts:
            self.mean += len(x)
        else:
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return h - self.mean if self.used else h


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("used", [True, False])
def test_a_buffer_that_depends_on_samples_is_refused_by_name(used: bool, size: int):
    model = nn.Sequential(Running(used=used), nn.Tanh())
    text = r"of the module '0' changes the buffer 'mean' depending on.*virtual_batch.*eval\(\).*GroupNorm"
    refused(CoupledSamplesError, text, model, ring, normal(7, 6), size)


@pytest.mark.parametrize("samples", [6, 7])
def test_a_buffer_that_counts_samples_is_refused(samples: int):
    """The error is raised for equal and for unequal micro-batches."""
    refused(
        CoupledSamplesError,
        "changes the buffer 'mean' depending on the samples",
        Running(counts=True),
        ring,
        normal(samples, 6),
    )


def test_running_statistics_without_a_version_counter_are_refused():
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()).to(F64)
    refused(
        CoupledSamplesError,
        "of the module '0' changes the buffer 'running_mean'",
        model,
        lambda z: z.square().sum(),
        normal(7, 2, 3),
    )


def test_a_function_needs_its_models():
    refused(
        InputError,
        r"The models of encode=.* are unknown.*Pass models=\[\.\.\.\]",
        lambda b: b,
        ring,
        normal(7, 6),
    )
    model, hidden = tower(), tower(4)
    refused(
        InputError,
        r"a parameter of shape \(4, 8\).*\(Sequential\).*Pass models",
        lambda b: hidden(model(b)),
        ring,
        normal(7, 6),
        models=model,
    )
    assert all(parameter.grad is None for parameter in hidden.parameters())


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (lambda z: z.mean(), r"shape \(\).*the samples are not its first dimension.*loss_fn"),
        (lambda z: z.T, r"shape \(4, 3\).*the samples are not its first dimension"),
        (lambda z: torch.cat([z, z]), r"shape \(6, 4\).*for a micro-batch of 3 samples"),
        (lambda z: {"z": z, "aux": z.sum()}, r"at path 'aux' has the shape \(\)"),
        (lambda z: (z, z.detach().numpy()), r"at path '1' is of type ndarray"),
        (lambda z: [z, object()], r"at path '1' is of type object"),
        (lambda z: None, "returned no tensor"),
        (lambda z: z.to_sparse(), "layout torch.sparse_coo"),
        (lambda z: nn.utils.rnn.pack_sequence([z]), "of type PackedSequence"),
        (lambda z: z[:, : 1 + (len(z) == 3)], r"\(samples, 1\) for micro-batch 1, but .*\(samples, 2\)"),
        (lambda z: (z, len(z)), r"1=2.*1=3"),
        (lambda z: z if len(z) == 3 else z.float(), r"torch.float32.*torch.float64"),
        (lambda z: [z] * (len(z) - 1), "for micro-batch 1, but .* for the first"),
    ],
)
def test_outputs_that_cannot_be_joined(output: Callable[[Tensor], Any], match: str):
    model = tower()
    refused(InputError, match, lambda b: output(model(b)), lambda z: z.sum(), normal(7, 6), models=model)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda z: z.sum(0), r"loss of shape \(4,\)"),
        (lambda z: z.sum().item(), "loss of type float"),
        (lambda z: None, "loss of type NoneType"),
        (lambda z: z.sum() > 0, r"torch\.bool"),
        (lambda z: torch.complex(z, z).sum(), r"torch\.complex128"),
        (lambda z: z.detach().sum(), "without a graph"),
        (lambda z: torch.tensor(1.0), "without a graph"),
    ],
)
def test_losses_that_have_no_gradient(loss: Any, match: str):
    refused(InputError, match, tower(), loss, normal(7, 6))


def test_a_frozen_encoder_is_refused():
    refused(InputError, "without a graph", tower().requires_grad_(requires_grad=False), ring, normal(7, 6))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "auto"])
def test_wrong_sizes(size: Any):
    refused(InputError, "microbatch_size=", tower(), ring, normal(7, 6), size)


def test_wrong_batches_and_arguments():
    model = tower()
    refused(SplitError, "sample", model, ring, normal(0, 6))
    refused(SplitError, "samples", lambda b: model(b[0]), ring, (normal(7, 6), normal(6, 6)), models=model)
    refused(
        InputError, "A Tensor was passed in place of a function", normal(7), ring, normal(7, 6), models=model
    )
    refused(InputError, "A Tensor was passed in place of a function", model, normal(7), normal(7, 6))
    with pytest.raises(InputError, match="model is of type str"):
        cached_gradients(model, ring, normal(7, 6), 3, models="model")  # type: ignore[arg-type]  (the mistake)
    for scale in ("2", True, None, 1j, math.nan, math.inf):
        refused(InputError, "scale=.*Pass a finite number", model, ring, normal(7, 6), scale=scale)
    refused(
        InputError,
        "The batch has no part at the declared path 'b'",
        model,
        ring,
        {"a": normal(7, 6)},
        unsplit=("b",),
    )
    refused(
        InputError,
        r"The batch of encode contains a tensor of shape .* with a graph",
        model,
        ring,
        normal(7, 6).requires_grad_() * 2,
    )
    both = {"a": model, "b": model}
    refused(
        InputError,
        r"encoders are \['a', 'b'\], but the batch is \['a', 'c'\]",
        both,
        ring,
        {"a": 1, "c": 2},
        models=model,
    )
    text = r"encoders are \['a', 'b'\], but the batch is Tensor"
    refused(InputError, text, both, ring, normal(7, 6), models=model)
    batch = {"a": normal(7, 6), "b": normal(7, 6)}
    refused(InputError, r"the microbatch_size is \['a'\]", both, ring, batch, {"a": 3}, models=model)
    refused(InputError, r"path 'x'.*query\.ids", both, ring, batch, unsplit=["x"], models=model)
    refused(InputError, "path 'a'", both, ring, batch, unsplit=["a"], models=model)
    refused(InputError, "the batch is", {}, ring, {}, models=model)


def test_an_optimizer_inside_the_backward_is_refused():
    model = tower()
    model[0].weight._in_backward_optimizers = [torch.optim.SGD([model[0].weight])]  # type: ignore[attr-defined]  (as torch.distributed marks it)
    with pytest.raises(OptimizerError, match=r"'0\.weight'.*inside the backward"):
        cached_gradients(model, ring, normal(7, 6), 3)


# -- a second pass that differs ------------------------------------------------------------------------------


def test_an_encoder_with_its_own_generator_is_refused():
    model, own = tower(), torch.Generator().manual_seed(1)
    refused(
        InputError,
        r"The second pass of encode returned other embeddings of micro-batch 2.*torch\.Generator",
        lambda b: model(b) * torch.rand(len(b), 1, generator=own),
        ring,
        normal(7, 6),
        models=model,
    )


def test_an_encoder_that_depends_on_its_calls_is_refused():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(6, 4).to(F64), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x) / self.calls

    with pytest.raises(InputError, match="other embeddings"):
        cached_gradients(Counting(), ring, normal(7, 6), 3)


def test_other_integers_and_shapes_in_the_second_pass_are_refused():
    model, calls = tower(), []
    for change in (lambda k: torch.full((k,), len(calls)), lambda k: torch.zeros(k, len(calls) // 4 + 1)):
        calls.clear()

        def encode(b: Tensor, change: Any = change) -> Any:
            calls.append(1)
            return model(b), change(len(b))

        with pytest.raises(InputError, match="other embeddings"):
            cached_gradients(encode, lambda z: ring(z[0]), normal(7, 6), 3, models=model)


def test_a_graph_that_only_later_micro_batches_have():
    model = tower()

    def encode(b: Any) -> Any:
        return model(b) if b[0, 0] > 0 else model(b).detach()

    x = normal(4, 6)
    x[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    with pytest.raises(InputError, match=r"micro-batch 0|without a graph"):
        cached_gradients(encode, ring, x, 2, models=model)

    def both(b: Any) -> Any:
        return (encode(b), model(b))

    refused(
        InputError, "a graph in micro-batch 1 for an output", both, lambda z: info_nce(*z), x, 2, models=model
    )


def test_kernels_that_round_differently_without_a_graph_are_accepted():
    """Multi-head attention in evaluation mode has a fast path for a forward without a graph."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten())
    reference = copy.deepcopy(model)
    x = normal(6, 3, 8).float()
    ring(reference(x)).backward()
    cached_gradients(model, ring, x, 2)
    assert_same_gradients(gradients(reference), gradients(model), 1e-4)


# -- restored state ------------------------------------------------------------------------------------------


class Counted(Pair):
    """A pair of towers that counts its calls in a buffer and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=F64))

    def encode(self, batch: Any) -> dict[str, Tensor]:
        self.calls += 1
        draw_everywhere()
        return {name: z * random.random() for name, z in super().encode(batch).items()}


@pytest.mark.parametrize("where", ["first pass", "loss", "scale", "second pass", "backward"])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_restores_everything(where: str, error: type[BaseException]):
    model = Counted()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5) if number % 2 else None
    calls: list[int] = []

    def fail(when: bool) -> None:
        if when:
            raise error("user code")

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *g: Tensor) -> Tensor:
            fail(where == "backward" and len(calls) == 5)
            return g[0]

    def encode(b: Any) -> Any:
        calls.append(1)
        fail((where, len(calls)) in {("first pass", 2), ("second pass", 5)})
        z = model.encode(b)
        return {**z, "text": Breaks.apply(z["text"])}

    def loss(z: Any) -> Tensor:
        draw_everywhere()
        fail(where == "loss")
        return model.loss(z)

    def scale(loss: Tensor) -> Tensor:
        fail(where == "scale")
        return loss

    before = fingerprint(model)
    identities = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(error, match="user code"):
        cached_gradients(encode, loss, pairs(7), 3, scale=scale, models=model)
    assert_unchanged(before, fingerprint(model))
    assert all(a is b.grad for a, b in zip(identities, model.parameters(), strict=True))
    calls.extend([1] * 100)  # the failed call does not affect the next one
    reference = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone()
    where = ""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cached_gradients(encode, model.loss, pairs(7), 3, models=model)
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    found = [reference.encode({k: v[a:b] for k, v in pairs(7).items()}) for a, b in ((0, 3), (3, 5), (5, 7))]
    reference.loss({k: torch.cat([z[k] for z in found]) for k in ("image", "text")}).backward()
    assert_same_gradients(gradients(reference), gradients(model))
    assert model.calls == 1


# -- unusual encoders and losses -----------------------------------------------------------------------------


def test_outputs_that_are_the_same_tensor_or_views_of_each_other():
    def encode(m: Any, b: Tensor) -> Any:
        z = m[0](b)
        return z, z, z[:, :2], z.T.contiguous().T, z.unsqueeze(1).expand(-1, 3, -1)

    def loss(_: Any, z: Any) -> Tensor:
        same, again, part, other, wide = z
        return info_nce(same, again.roll(1, 0)) + ring(part) + other.exp().sum() + wide.square().sum()

    check([tower()], encode, loss, normal(7, 6), 3)


@pytest.mark.parametrize("size", [3, 7])
def test_an_encoder_that_returns_its_input(size: int):
    x = normal(7, 6)
    before = x.clone()

    def loss(_: Any, z: Any) -> Tensor:
        z[1].mul_(2)  # must not change the caller's batch
        return info_nce(z[0], z[1][:, :4])

    model = tower()
    cached_gradients(lambda b: (model(b), b), lambda z: loss(None, z), x, size, models=model)
    ours = gradients(model)
    assert torch.equal(x, before) and not x.requires_grad
    model.zero_grad()
    loss(None, (model(x), x.clone())).backward()
    assert_same_gradients(gradients(model), ours)


def test_a_loss_that_changes_embeddings_in_place():
    def loss(_: Any, z: Any) -> Tensor:
        z["a"] *= 2
        z["b"][0] = 0
        z["b"] += 1
        return info_nce(z["a"], z["b"])

    for size in (3, 7):
        check([tower()], lambda m, b: {"a": m[0](b), "b": m[0](b * 2)}, loss, normal(7, 6), size)


def test_an_encoder_that_pops_entries_of_its_micro_batch():
    """The second pass and the caller's batch still have entries that the first pass removed."""

    def encode(m: Any, b: Any) -> Any:
        label = b["rest"].pop("label")
        return m[0](b.pop("x")), label, b["rest"]["names"].pop()["n"] * torch.ones(len(label))

    batch = {"x": normal(7, 6), "rest": {"label": torch.arange(7), "names": [{"n": n} for n in range(7)]}}
    model = tower()
    for _ in range(2):
        cached_gradients(
            lambda b: encode([model], b),
            lambda z: nn.functional.cross_entropy(z[0], z[1] % 4),
            batch,
            3,
            models=model,
            per_sample=["rest.names"],
        )
    assert sorted(batch) == ["rest", "x"] and len(batch["rest"]["names"]) == 7
    assert all(gradient is not None and gradient.any() for gradient in gradients(model).values())


def test_an_encoder_that_writes_to_its_micro_batch_is_refused():
    model = tower()
    refused(
        InputError,
        "in place on the micro-batch",
        lambda b: model(b.mul_(2)),
        ring,
        normal(7, 6),
        models=model,
    )


def test_a_buffer_that_the_loss_writes_and_the_encoder_reads():
    """The second pass must read the buffer as it was before the loss."""

    class Centred(nn.Module):
        centre: Tensor
        tower: nn.Module

        def __init__(self) -> None:
            super().__init__()
            self.tower = tower()
            self.register_buffer("centre", normal(4, seed=9))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.tower(x) - self.centre)

    def loss(m: Any, z: Tensor) -> Tensor:
        m[0].centre.lerp_(z.detach().mean(0), 0.5)
        return ring(z)

    check([Centred()], lambda m, b: m[0](b), loss, normal(7, 6), 3)


def test_batches_that_are_not_contiguous():
    batch = (normal(6, 7).T, normal(7, 12)[:, ::2], normal(1, 6).expand(7, 6))
    check([tower()], lambda m, b: [m[0](x + b[2]) for x in b[:2]], lambda _, z: info_nce(*z), batch, 3)


def test_an_encoder_that_reuses_the_memory_of_its_output():
    """Compiled models with CUDA graphs overwrite the last output with the next one."""
    model, memory = tower(), torch.empty(3, 4, dtype=F64)

    class Into(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return memory[: len(z)].copy_(z).detach()

        @staticmethod
        def backward(ctx: Any, *g: Tensor) -> Tensor:
            return g[0]

    reference = copy.deepcopy(model)
    ring(reference(normal(7, 6))).backward()
    cached_gradients(lambda b: Into.apply(model(b)), ring, normal(7, 6), 3, models=model)
    assert_same_gradients(gradients(reference), gradients(model))


def test_parameters_as_outputs():
    """Learnt prompts: one row of a parameter for each sample."""

    class Prompts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(normal(7, 4))

    check([Prompts()], lambda m, b: m[0].table[b], lambda _, z: ring(z), torch.arange(7), 3)
    whole = Prompts()
    check([whole], lambda m, b: m[0].table, lambda _, z: ring(z), torch.arange(7), 7)


def test_a_gradient_penalty_on_embeddings():
    """A second derivative inside the loss."""

    def loss(_: Any, z: Tensor) -> Tensor:
        score = ring(z)
        (slope,) = torch.autograd.grad(score, z, create_graph=True)
        return score + slope.square().sum()

    check([tower()], lambda m, b: m[0](b), loss, normal(7, 6), 3)


def test_a_loss_that_keeps_its_graph():
    """A loss may call backward with `retain_graph` for its own parameters; these gradients stay."""
    head = nn.Linear(4, 4).to(F64)
    model = tower()

    def loss(m: Any, z: Tensor) -> Tensor:
        value = ring(m[1](z))
        value.backward(retain_graph=True, inputs=[m[1].weight])
        return value

    check([model, head], lambda m, b: m[0](b), loss, normal(7, 6), 3)
    with pytest.raises(RuntimeError, match="does not require grad"):
        cached_gradients(
            model, ring, normal(7, 6), 3
        ).backward()  # the loss is detached: its gradient was already added


def test_a_loss_that_frees_its_graph_raises_and_restores_everything():
    model = tower()

    def loss(z: Tensor) -> Tensor:
        value = ring(z)
        value.backward()
        return value

    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="second time"):
        cached_gradients(model, loss, normal(7, 6), 3)
    assert_unchanged(before, fingerprint(model))


def test_complex_embeddings_and_namedtuples():
    Two = namedtuple("Two", "phase size")

    def encode(m: Any, b: Tensor) -> Any:
        z = m[0](b)
        return Two(torch.complex(z, z.roll(1, 1)), z.square().sum(1))

    def loss(_: Any, z: Any) -> Tensor:
        return (z.phase @ z.phase.mH).abs().exp().mean().log() + z.size.logsumexp(0)

    check([tower()], encode, loss, normal(7, 6), 3)


def test_a_window_of_one_sample():
    check([tower()], lambda m, b: m[0](b), lambda _, z: z.square().sum(), normal(1, 6), 4)


def test_inference_mode_gives_the_loss():
    model = tower()
    with torch.inference_mode():
        loss = cached_gradients(model, ring, normal(7, 6), 3)
        torch.testing.assert_close(loss, ring(model(normal(7, 6))), rtol=1e-12, atol=0)
    assert model[0].weight.grad is None


def test_a_compiled_encoder():
    model = tower()
    reference = copy.deepcopy(model)
    ring(reference(normal(7, 6))).backward()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    cached_gradients(compiled, ring, normal(7, 6), 3)
    assert_same_gradients(gradients(reference), gradients(model))


def test_a_budget_as_size_of_one_of_several_encoders():
    model = tower()
    batch = {"a": normal(5, 6), "b": (normal(6, 6), torch.tensor([3, 1, 2, 2, 1, 3]))}
    cached_gradients(
        {"a": model, "b": lambda b: model(b[0])},
        lambda z: info_nce(z["a"], z["b"]),
        batch,
        {"a": 2, "b": TokenBudget(4, "1", sort=True)},
        models=model,
    )
    ours = gradients(model)
    model.zero_grad()
    info_nce(model(batch["a"]), model(batch["b"][0])).backward()  # type: ignore[index]
    assert_same_gradients(gradients(model), ours)
