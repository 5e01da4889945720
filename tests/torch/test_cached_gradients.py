"""`cached_gradients` gives the gradient of the real large batch."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superbatch.batch.split import TokenBudget
from superbatch.torch import windows
from superbatch.torch.gradcache.cached import cached_gradients
from superbatch.torch.memory.meter import peak_bytes
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
from tests.torch.states import draw_everywhere

SIZES = [1, 2, 3, 4, 6, 11, 50]  # for 11 samples: smaller sizes, the batch itself and a larger size


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- encoders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_two_towers_with_a_learnt_temperature(size: int):
    check([Pair()], lambda m, b: m[0].encode(b), lambda m, z: m[0].loss(z), pairs(11), size)


@pytest.mark.parametrize("size", SIZES)
def test_one_encoder(size: int):
    """Supervised contrastive loss: encode returns the labels with the embeddings."""

    def loss(_: Any, z: tuple[Tensor, Tensor]) -> Tensor:
        logits = 4 * nn.functional.normalize(z[0]) @ nn.functional.normalize(z[0]).T
        same = z[1].unsqueeze(0) == z[1].unsqueeze(1)
        return -(logits.log_softmax(1) * same).sum() / same.sum()

    batch = (normal(11, 6), torch.arange(11) % 3)
    check([tower()], lambda m, b: (m[0](b[0]), b[1]), loss, batch, size)


@pytest.mark.parametrize("size", SIZES)
def test_one_encoder_for_two_views(size: int):
    check(
        [tower()],
        lambda m, b: [m[0](b[0]), m[0](b[1])],
        lambda _, z: info_nce(*z),
        (normal(11, 6), normal(11, 6, seed=2)),
        size,
    )


@pytest.mark.parametrize("size", [1, 3, 20, {"query": 2, "document": 5}])
def test_queries_and_documents_in_different_numbers(size: Any):
    query, document = tower(6), tower(5, seed=4)
    batch = {"query": normal(5, 6), "document": normal(17, 5, seed=2)}
    references = copy.deepcopy([query, document])
    expected = info_nce(references[0](batch["query"]), references[1](batch["document"]))
    expected.backward()
    loss = cached_gradients(
        {"query": query, "document": document}, lambda z: info_nce(z["query"], z["document"]), batch, size
    )
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert_same_gradients(gradients(*references), gradients(query, document))


def test_one_module_is_both_encoders_in_a_module_dict():
    shared = tower()
    batch = {"query": normal(4, 6), "document": normal(9, 6, seed=2)}
    reference = copy.deepcopy(shared)
    info_nce(reference(batch["query"]), reference(batch["document"])).backward()
    encoders = nn.ModuleDict({"query": shared, "document": shared})
    cached_gradients(encoders, lambda z: info_nce(z["query"], z["document"]), batch, 3)  # type: ignore[arg-type]  (a mapping, but not a subclass)
    assert_same_gradients(gradients(reference), gradients(shared))


def test_the_model_is_found_through_its_bound_methods():
    class Clip(Pair):
        def encode_image(self, x: Tensor) -> Tensor:
            return self.image(x)

        def encode_text(self, x: Tensor) -> Tensor:
            return self.text(x)

    model = Clip()
    reference, batch = copy.deepcopy(model), pairs(7)
    reference.loss(reference.encode(batch)).backward()
    cached_gradients({"image": model.encode_image, "text": model.encode_text}, model.loss, batch, 3)
    assert_same_gradients(gradients(reference), gradients(model))


# -- structures ----------------------------------------------------------------------------------------------


class Text(nn.Module):
    """Embeds texts of any length, given by ids and a mask."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embedding = nn.Embedding(13, 5, sparse=sparse)
        self.mix = nn.Linear(5, 5)
        self.to(F64)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.embedding(ids))) * mask.unsqueeze(-1)
        return h.sum(1) / mask.sum(1, keepdim=True)


def texts(samples: int, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, length + 1, (samples,), generator=generator)
    ids = torch.randint(1, 13, (samples, length), generator=generator)
    mask = (torch.arange(length) < lengths.unsqueeze(1)).to(F64)
    return {"ids": ids * mask.long(), "mask": mask}


@dataclass
class Output:
    pooled: Tensor
    tokens: Tensor
    extra: Any = None


def test_a_nested_batch_of_hugging_face_form_and_a_dataclass_of_outputs():
    def encode(m: Any, b: Any) -> Any:
        h = m[0](**b["text"])
        return Output(
            h, h.unsqueeze(1) * b["text"]["mask"].unsqueeze(-1), extra=OrderedDict(name="z", none=None)
        )

    def loss(m: Any, z: Output) -> Tensor:
        assert type(z) is Output and z.extra == {"name": "z", "none": None}
        return info_nce(z.pooled, z.tokens.square().sum(1)) + z.tokens.mean(0).exp().sum()

    check([Text()], encode, loss, {"text": UserDict(texts(11)), "weights": None}, 4)


def test_sorted_and_trimmed_by_a_token_budget():
    """The budget reorders samples, but the loss gets their embeddings in the order of the batch."""
    batch = {**texts(11), "partner": normal(11, 5)}
    budget = TokenBudget(21, "mask", padded=True, sort=True, trim=("ids", "mask"))
    shapes: list[Any] = []

    def encode(m: Any, b: Any) -> Any:
        shapes.append(tuple(b["ids"].shape))
        return m[0](b["ids"], b["mask"]), b["partner"]

    batch["mask"] = batch["mask"].long()
    check([Text()], encode, lambda _, z: info_nce(*z), batch, budget)
    assert len({length for _, length in shapes[1:]}) > 1, "premise: micro-batches are trimmed"


def test_a_window_of_micro_batches_from_a_loader():
    """The micro-batches keep their unequal sizes, and the loss gets the embeddings of all samples."""
    loader = [
        {name: x[i : i + size] for name, x in pairs(11).items()} for i, size in ((0, 2), (2, 5), (7, 4))
    ]
    (window,) = windows(loader, 3)
    model = Pair()
    reference = copy.deepcopy(model)
    reference.loss(reference.encode(pairs(11))).backward()
    cached_gradients(model.encode, model.loss, window)
    assert_same_gradients(gradients(reference), gradients(model))


def test_unsplit_entries_and_per_sample_lists():
    batch = {"x": normal(7, 6), "table": normal(3, 6, seed=2), "names": [{"n": n} for n in range(7)]}

    def encode(m: Any, b: Any) -> Any:
        assert b["table"].shape == (3, 6)
        shift = torch.tensor([entry["n"] for entry in b["names"]], dtype=F64)
        return m[0](b["x"] + b["table"].sum(0)), m[0](b["x"] * shift.unsqueeze(1))

    check([tower()], encode, lambda _, z: info_nce(*z), batch, 3, unsplit=["table"], per_sample=["names"])


def test_declared_paths_of_several_encoders_begin_with_the_encoder_name():
    model = tower()
    batch = {"a": {"x": normal(4, 6), "table": normal(4, 6)}, "b": {"x": normal(6, 6)}}

    def encode(b: Any) -> Any:
        return model(b["x"] + b.get("table", torch.zeros(1, 6)).sum(0))

    cached_gradients(
        {"a": encode, "b": encode},
        lambda z: info_nce(z["a"], z["b"]),
        batch,
        3,
        models=model,
        unsplit=("a.table",),
    )
    ours = gradients(model)
    model.zero_grad()
    info_nce(encode(batch["a"]), encode(batch["b"])).backward()
    assert_same_gradients(gradients(model), ours)


def test_outputs_without_a_gradient_reach_the_loss():
    def encode(m: Any, b: Any) -> Any:
        return {"z": m[0](b[0]), "label": b[1], "kept": b[1] > 1, "half": b[1].to(torch.float16)}

    def loss(_: Any, z: Any) -> Tensor:
        assert z["label"].dtype == torch.int64 and z["kept"].dtype == torch.bool
        assert not any(z[name].requires_grad for name in ("label", "kept", "half"))
        return nn.functional.cross_entropy(z["z"][z["kept"]], z["label"][z["kept"]] - 2)

    check([tower()], encode, loss, (normal(11, 6), torch.arange(11) % 5), 3)


def test_outputs_without_a_graph_and_outputs_that_the_loss_ignores():
    """Cases: a frozen tower with a constant output, and a tower whose output the loss ignores."""
    model = Pair()
    model.text.requires_grad_(requires_grad=False)
    check(
        [model],
        lambda m, b: {**m[0].encode(b), "constant": b["text"] * 2},
        lambda m, z: m[0].loss(z) * z["constant"].square().mean(),
        pairs(7),
        3,
        zero=[f"0.text.{name}" for name, _ in model.text.named_parameters()],
    )
    ignored, used = tower(5, seed=4), tower()
    check(
        [used, ignored],
        lambda m, b: (m[0](b["image"]), m[1](b["text"])),
        lambda _, z: info_nce(z[0], z[0].roll(1, 0)),
        pairs(7),
        3,
        zero=[f"1.{name}" for name, _ in ignored.named_parameters()],
    )


def test_an_encoder_that_the_loss_ignores_is_not_run_again():
    calls: list[str] = []
    model = Pair()

    def encoder(name: str) -> Any:
        return lambda x: (calls.append(name), getattr(model, name)(x))[1]

    cached_gradients(
        {name: encoder(name) for name in ("image", "text")},
        lambda z: z["image"].square().sum(),
        pairs(6),
        2,
        models=model,
    )
    assert calls.count("image") == 6 and calls.count("text") == 3


@given(
    samples=st.integers(1, 9),
    size=st.integers(1, 10),
    width=st.integers(1, 4),
    extra=st.lists(st.integers(1, 3), max_size=2),
    depth=st.integers(0, 2),
)
def test_any_shape(samples: int, size: int, width: int, extra: list[int], depth: int):
    def nest(value: Any) -> Any:
        for level in range(depth):
            value = [value] if level % 2 else {"inner": value}
        return value

    def bare(value: Any) -> Any:
        while not isinstance(value, tuple):
            value = value[0] if isinstance(value, list) else value["inner"]
        return value

    def encode(m: Any, b: Any) -> Any:
        h = m[0](bare(b)[0])
        return nest((h, (h.reshape(len(h), *[1] * len(extra), -1) * bare(b)[1]).sum(-1)))

    def loss(_: Any, z: Any) -> Tensor:
        h, more = bare(z)
        return (h @ h.T).exp().mean().log() + more.logsumexp(0).square().sum()

    torch.manual_seed(3)
    batch = nest((normal(samples, 3), normal(samples, *extra, 1, seed=2)))
    check([nn.Sequential(nn.Linear(3, width), nn.Tanh()).to(F64)], encode, loss, batch, size, tolerance=1e-11)


# -- parameters ----------------------------------------------------------------------------------------------


def test_gradients_are_added_in_place_to_existing_ones():
    model = Pair()
    reference = copy.deepcopy(model)
    before = {}
    for name, parameter in model.named_parameters():
        before[name] = parameter.grad = torch.full_like(parameter, 0.5)
        reference.get_parameter(name).grad = torch.full_like(parameter, 0.5)
    reference.loss(reference.encode(pairs(7))).backward()
    cached_gradients(model.encode, model.loss, pairs(7), 3)
    assert_same_gradients(gradients(reference), gradients(model))
    assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())


def test_a_head_on_all_embeddings_and_a_parameter_of_no_module():
    """Both get their gradient once. Encoder parameters that the loss uses get the sum of both gradients."""
    head = nn.Linear(4, 4).to(F64)
    temperature = torch.tensor(0.7, dtype=F64, requires_grad=True)
    model = tower()

    def loss(m: Any, z: Tensor) -> Tensor:
        decay = sum(p.square().sum() for p in m[0].parameters())
        return info_nce(z, m[1](z.roll(1, 0)), temperature.exp()) + 0.1 * decay

    check([model, head], lambda m, b: m[0](b), loss, normal(7, 6), 2)
    both = temperature.grad  # gradient of the reference plus that of cached_gradients
    assert both is not None and both
    temperature.grad = None
    cached_gradients(model, lambda z: loss([model, head], z), normal(7, 6), 2, models=head)
    torch.testing.assert_close(temperature.grad, both / 2, rtol=1e-12, atol=0)


def test_a_loss_that_is_a_module():
    class Arcface(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.centres = nn.Parameter(torch.randn(3, 4, dtype=F64))

        def forward(self, z: Any) -> Tensor:
            return nn.functional.cross_entropy(z[0] @ self.centres.T, z[1])

    check(
        [tower(), Arcface()],
        lambda m, b: (m[0](b), torch.arange(len(b)) % 3),
        lambda m, z: m[1](z),
        normal(9, 6),
        3,
    )


def test_tied_weights_and_sparse_gradients():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.other = Text(sparse=True), Text(sparse=True)
            self.other.mix.weight = self.text.mix.weight

    check(
        [Tied()],
        lambda m, b: (m[0].text(**b), m[0].other(**b)),
        lambda _, z: info_nce(*z),
        texts(9),
        2,
    )


def test_parameters_whose_gradients_autograd_shares():
    """Autograd may give one tensor to two parameters, and the next micro-batch would be added to it twice."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(normal(16, seed=seed)) for seed in (1, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.a.view(4, 4) + self.b.view(4, 4)) + x @ self.c.view(4, 4)

    x = normal(4, 4)
    shared = Sum()
    shared(x).exp().sum().backward()
    assert shared.a.grad is not None and shared.b.grad is not None
    same = shared.a.grad.untyped_storage().data_ptr() == shared.b.grad.untyped_storage().data_ptr()
    assert same, "premise: this version of torch shares the gradient"
    check([Sum()], lambda m, b: m[0](b), lambda _, z: info_nce(z, z.roll(1, 0)), normal(8, 4), 3)
    # The cached gradient of an embedding shares memory with the gradient of an encoder parameter.
    check(
        [Sum()],
        lambda m, b: m[0](b).view(len(b), 2, 2),
        lambda m, z: (z.view(16) + m[0].a).exp().sum(),
        x,
        2,
    )


def test_gradients_of_the_inputs():
    x = normal(7, 6).requires_grad_()
    model = tower()
    info_nce(model(x), model(x.roll(1, 1))).backward()
    expected, x.grad = x.grad, None
    assert expected is not None and expected.any()
    cached_gradients(lambda b: (model(b), model(b.roll(1, 1))), lambda z: info_nce(*z), x, 3, models=model)
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-16)


# -- random state and buffers --------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout, and noise from Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower(dropout=0.4)

    def forward(self, x: Tensor) -> Tensor:
        noise = [random.random() for _ in range(len(x))]
        shift = torch.from_numpy(np.random.randn(len(x), 1))
        return self.tower(x + shift * torch.tensor(noise, dtype=F64).unsqueeze(1))


@pytest.mark.parametrize("size", [1, 3, 4, 11])
def test_randomness_is_replayed_bit_for_bit(size: int):
    model, seen = Noisy(), []

    def encode(b: Tensor) -> tuple[Tensor, Tensor]:
        z = model(b), model(b)
        seen.append([part.detach().clone() for part in z])
        return z

    def loss(z: tuple[Tensor, Tensor]) -> Tensor:
        draw_everywhere()  # as dropout in a head does
        return info_nce(z[0] * torch.rand(len(z[0]), 1), z[1])

    x = normal(11, 6)
    draw_everywhere()
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cached_gradients(encode, loss, x, size, models=model)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    count = -(-11 // size)
    if count > 1:
        first, second = seen[:count], seen[count:]
        assert all(
            torch.equal(a, b)
            for one, two in zip(first, second, strict=True)
            for a, b in zip(one, two, strict=True)
        )
        assert not torch.equal(first[0][0], first[0][1]), "premise: there is dropout"
    ours = gradients(model)

    # The reference: the same random numbers, and one graph of all samples.
    model.zero_grad()
    torch.set_rng_state(state)
    random.setstate(python)
    np.random.set_state(numpy)
    outputs = [encode(b) for b in x.tensor_split(count)]
    loss((torch.cat([a for a, _ in outputs]), torch.cat([b for _, b in outputs]))).backward()
    assert_same_gradients(gradients(model), ours)
    assert torch.equal(after[0], torch.get_rng_state()) and after[1] == random.getstate()
    assert after[2] == np.random.get_state()[1].tolist()  # type: ignore[index]


class Stateful(nn.Module):
    """Encoder that uses its buffers: a counter of calls, a moving average of its weights, and a cache."""

    calls: Tensor
    average: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
        self.register_buffer("calls", torch.zeros((), dtype=F64))
        self.register_buffer("average", torch.ones(4, 6))
        self.register_buffer("cache", torch.zeros(0))
        self.to(F64)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        weight: Any = self.inner.weight
        self.average.lerp_(weight.detach(), 0.3)
        if len(self.cache) == 0:
            self.cache = torch.arange(6, dtype=F64)
        return self.inner(x + self.cache) + x @ self.average.T * self.calls


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_buffers_change_as_in_one_forward_of_all_samples(size: int):
    check(
        [Stateful()],
        lambda m, b: (m[0](b), m[0](b * 2)),  # the second call reads the buffers that the first one wrote
        lambda m, z: info_nce(*z),
        normal(8, 6),
        size,
    )


def test_buffers_of_several_encoders_and_of_the_loss():
    class Centred(nn.Module):
        """A loss with a moving average of the embeddings as centre, as in DINO."""

        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(4, dtype=F64))

        def forward(self, z: Any) -> Tensor:
            self.centre.lerp_(z["a"].detach().mean(0), 0.5)
            return info_nce(z["a"] - self.centre, z["b"])

    model, loss = Stateful(), Centred()
    reference, reference_loss = copy.deepcopy([model, loss])
    batch = {"a": normal(4, 6), "b": normal(6, 6, seed=3)}
    reference_loss({name: reference(batch[name]) for name in batch}).backward()
    cached_gradients({"a": model, "b": model}, loss, batch, 2)
    assert_same_gradients(gradients(reference), gradients(model))
    assert model.calls == reference.calls == 2
    for name, buffer in [*reference.named_buffers(), *reference_loss.named_buffers()]:
        ours = dict([*model.named_buffers(), *loss.named_buffers()])[name]
        torch.testing.assert_close(ours, buffer, rtol=1e-12, atol=0, msg=name)


def test_gradient_checkpointing():
    model = Pair(dropout=0.3)
    for reentrant in (False, True):
        seen: list[dict[str, Tensor | None]] = []
        for checkpointed in (False, True):

            def encode(b: Any, checkpointed: bool = checkpointed, reentrant: bool = reentrant) -> Any:
                if not checkpointed:
                    return model.encode(b)
                b = {name: x.clone().requires_grad_() for name, x in b.items()}
                run = lambda module, x: checkpoint(module, x, use_reentrant=reentrant)  # noqa: E731
                return {"image": run(model.image, b["image"]), "text": run(model.text, b["text"])}

            torch.manual_seed(4)
            model.zero_grad()
            cached_gradients(encode, model.loss, pairs(7), 3, models=model)
            seen.append(gradients(model))
        assert_same_gradients(seen[0], seen[1])


# -- precision and scaling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool):
    """Autocast around the whole call, or inside encode and loss_fn, gives the same bfloat16 embeddings.

    The second pass must not reuse weights that the first pass cast without a graph.
    """
    model = Pair().float()
    batch = {name: x.float() for name, x in pairs(12).items()}
    reference = copy.deepcopy(model)
    outputs = []
    for i in (0, 4, 8):  # one region each: a shared one would sum the gradients of the weights in bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(reference.encode({k: v[i : i + 4] for k, v in batch.items()}))
    with torch.autocast("cpu", torch.bfloat16):
        z = {name: torch.cat([output[name] for output in outputs]) for name in batch}
        expected = reference.loss(z)
    expected.backward()

    def cast(fn: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return fn(*arguments)

        return run

    dtypes: set[torch.dtype] = set()

    def loss_fn(z: Any) -> Tensor:
        dtypes.update(part.dtype for part in z.values())
        return model.loss(z)

    if inside:
        loss = cached_gradients(cast(model.encode), cast(loss_fn), batch, 4, models=model)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cached_gradients(model.encode, loss_fn, batch, 4)
    assert dtypes == {torch.bfloat16}
    assert loss == expected
    assert_same_gradients(gradients(reference), gradients(model), 1e-5)


def test_grad_scaler():
    model = Pair()
    reference = copy.deepcopy(model)
    reference.loss(reference.encode(pairs(7))).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    loss = cached_gradients(model.encode, model.loss, pairs(7), 3, scale=scaler.scale)
    scaled = gradients(model)
    scaler.unscale_(optimizer)
    assert_same_gradients(gradients(reference), gradients(model))
    assert_same_gradients({k: v * 2.0**7 for k, v in gradients(reference).items() if v is not None}, scaled)
    torch.testing.assert_close(loss, reference.loss(reference.encode(pairs(7))).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("calls", [2, 4])
def test_gradients_of_scaled_calls_add_up(calls: int):
    model = Pair()
    batches = [pairs(5 + number, seed=number) for number in range(calls)]
    sum(model.loss(model.encode(batch)) / calls for batch in batches).backward()  # type: ignore[union-attr]
    expected = gradients(model)
    model.zero_grad()
    for batch in batches:
        cached_gradients(model.encode, model.loss, batch, 2, scale=1 / calls)
    assert_same_gradients(expected, gradients(model))


# -- cost ----------------------------------------------------------------------------------------------------


def test_one_micro_batch_takes_one_forward():
    calls: list[int] = []
    model = Pair()
    for size, count in ((7, 1), (4, 4), (3, 6)):
        calls.clear()
        cached_gradients(
            lambda b: (calls.append(1), model.encode(b))[1], model.loss, pairs(7), size, models=model
        )
        assert len(calls) == count


def wide(width: int) -> tuple[nn.Module, Any]:
    """Return an encoder, with activations much larger than weights, inputs and embeddings, and its class."""
    scale = nn.Parameter(torch.full((width,), 0.01, dtype=F64))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            h = x
            for _ in range(4):
                h = (h * self.scale).exp()
            return h[:, :2]  # a view that keeps all of h alive

    return Wide(), Wide


def test_activations_of_a_micro_batch_are_freed_before_the_next():
    width, size = 2000, 2
    model, _ = wide(width)

    def peak(samples: int) -> int:
        x = torch.ones(samples, width, dtype=F64)
        model.zero_grad()
        return peak_bytes(lambda: cached_gradients(model, lambda z: info_nce(z, z.roll(1, 0)), x, size))

    one_sample = 8 * width
    two, many = peak(2 * size), peak(16 * size)
    assert two > 6 * size * one_sample, "premise: activations of a micro-batch dominate"
    embeddings_and_loss = 16 * size * (8 * 2 * 8 + 16 * size * 8 * 8)
    assert many - two <= embeddings_and_loss < one_sample * 8
    model.zero_grad()
    x = torch.ones(16 * size, width, dtype=F64)
    large = peak_bytes(lambda: info_nce(model(x), model(x).roll(1, 0)).backward())
    assert large > 6 * many


def test_embeddings_are_freed_after_a_call():
    import gc
    import weakref

    model, alive = tower(), []

    def encode(b: Tensor) -> Tensor:
        z = model(b)
        alive.append(weakref.ref(z))
        return z

    def loss(z: Tensor) -> Tensor:
        alive.append(weakref.ref(z))
        return info_nce(z, z.roll(1, 0))

    gc.disable()  # no reference cycle may keep a graph alive until the next collection
    try:
        cached_gradients(encode, loss, normal(7, 6), 3, models=model)
        assert len(alive) == 7 and not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


# -- wrong implementations -----------------------------------------------------------------------------------


def test_the_temperature_of_a_loss_per_micro_batch_is_k_times_too_large():
    """open_clip's accum_freq recomputes the loss over all embeddings for each of K micro-batches.

    The gradients of the towers are right, but that of the temperature is counted K times."""
    model, batch, count = Pair(), pairs(12), 4
    microbatches = [{k: v[i : i + 3] for k, v in batch.items()} for i in range(0, 12, 3)]
    with torch.no_grad():
        cached = [model.encode(microbatch) for microbatch in microbatches]
    for index, microbatch in enumerate(microbatches):
        outputs = [*cached[:index], model.encode(microbatch), *cached[index + 1 :]]
        model.loss({name: torch.cat([output[name] for output in outputs]) for name in batch}).backward()
    wrong = gradients(model)
    model.zero_grad()
    cached_gradients(model.encode, model.loss, batch, 3)
    right = gradients(model)
    with pytest.raises(AssertionError, match=r"logit_scale: relative error 3\.00e\+00"):
        assert_same_gradients(right, wrong)
    assert wrong.pop("0.logit_scale") / right.pop("0.logit_scale") == pytest.approx(count, rel=1e-12)  # type: ignore[operator]
    assert_same_gradients(right, wrong)


def test_plain_accumulation_gives_another_gradient():
    """The mean of InfoNCE over micro-batches has fewer negatives than InfoNCE over the batch."""
    model, batch = Pair(), pairs(12)
    for i in range(0, 12, 3):
        (model.loss(model.encode({k: v[i : i + 3] for k, v in batch.items()})) / 4).backward()
    wrong = gradients(model)
    model.zero_grad()
    cached_gradients(model.encode, model.loss, batch, 3)
    with pytest.raises(AssertionError, match="not the gradient of the large batch"):
        assert_same_gradients(gradients(model), wrong)


@pytest.mark.parametrize(
    ("name", "replacement", "case"),
    [
        ("gradcache.encoders.Replay.back_to", lambda self, number: None, "randomness"),
        ("gradcache.one_pass.OnePass.rewind", lambda self: None, "buffers"),
        ("gradcache.new_gradients.unshare", lambda tensors: None, "shared"),
        ("gradcache.cached.torch.clear_autocast_cache", lambda: None, "autocast"),
    ],
)
def test_a_missing_mechanism_fails(name: str, replacement: Any, case: str, monkeypatch: pytest.MonkeyPatch):
    cases: dict[str, Any] = {
        "randomness": lambda: test_randomness_is_replayed_bit_for_bit(3),
        "buffers": lambda: test_buffers_change_as_in_one_forward_of_all_samples(2),
        "shared": test_parameters_whose_gradients_autograd_shares,
        "autocast": lambda: test_autocast(inside=False),
    }
    monkeypatch.setattr(f"superbatch.torch.{name}", replacement)
    with pytest.raises(Exception):  # noqa: B017  (an error of the library, or a wrong gradient)
        cases[case]()
