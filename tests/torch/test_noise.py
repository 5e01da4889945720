"""Gradient noise of a training, against micro-batch gradients computed by hand in float64."""

# ruff: noqa: PT012  (the block of a window raises, with a loop in it)
from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superbatch.errors import InputError, NonFiniteError
from superbatch.noise.meter import Estimate, NoiseMeter, effective_samples, estimate
from superbatch.torch import Accumulator, Window, count_tokens
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import ClipValue, PerSampleRandom
from superbatch.torch.window.participants.noise.hooks import MicrobatchGradientNorms
from tests.torch import noise_ranks
from tests.torch.helpers import TinyLM, mlp, mse, per_sample, rows, sgd, squared_sum
from tests.torch.noise_ranks import Recorder
from tests.torch.two_ranks import found_by_both

TOLERANCE = 1e-12
TEXT = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
Microbatches = Sequence[Any]


def by_hand(
    parameters: Iterable[Tensor],
    losses: Iterable[Callable[[], Tensor]],
    weights: Sequence[float],
    samples: Sequence[float] | None = None,
) -> tuple[Estimate, float]:
    """Noise by the formula, from one `torch.autograd.grad` of the mean loss per micro-batch."""
    parameters = list(parameters)
    gradients = []
    for loss in losses:
        found = torch.autograd.grad(loss(), parameters, allow_unused=True)
        dense = [
            torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for p, g in zip(parameters, found, strict=True)
        ]
        flat = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in dense]
        gradients.append(torch.cat([g.reshape(-1).double() for g in flat]))
    shares = [weight / sum(weights) for weight in weights]
    batch = sum(w * g for w, g in zip(shares, gradients, strict=True))
    assert isinstance(batch, Tensor) and float(batch @ batch) > 0, "premise: there is a gradient"
    a2 = sum(w * w * float(g @ g) for w, g in zip(shares, gradients, strict=True))
    found = estimate(a2, float(batch @ batch), sum(w * w for w in shares))
    assert abs(found.variance) > 1e-3 * abs(found.signal), "premise: micro-batches differ"
    return found, effective_samples(shares, samples or weights)


def losses_by_hand(losses: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Mean loss of a window, and its variance from the squares of the micro-batch losses."""
    shares = [weight / sum(weights) for weight in weights]
    mean = sum(s * loss for s, loss in zip(shares, losses, strict=True))
    a2 = sum((s * loss) ** 2 for s, loss in zip(shares, losses, strict=True))
    return mean, estimate(a2, mean * mean, sum(s * s for s in shares)).variance


def assert_near(
    meter: Recorder, expected: tuple[Estimate, float], tolerance: float = TOLERANCE, group: str = "group 0"
) -> None:
    assert hasattr(meter, "said"), meter.estimate().reason
    estimates, samples = meter.said
    assert samples == pytest.approx(expected[1], rel=tolerance)
    # Either may be a small difference of large numbers.
    size = abs(expected[0].signal) + abs(expected[0].variance)
    for ours, theirs in zip(estimates[group], expected[0], strict=True):
        assert abs(ours - theirs) <= tolerance * size, (estimates, expected)


def split(batch: tuple[Tensor, ...], *sizes: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(leaf.split(list(sizes)) for leaf in batch), strict=True))


SIZES = (5, 1, 3)
BATCH = rows(9, 1)[0]
PARTS = split(BATCH, *SIZES)


def measured(
    model: nn.Module,
    microbatches: Microbatches,
    loss: Callable[[Any], Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Recorder:
    """Train one window of micro-batches and return its meter."""
    meter = Recorder(every=1)
    accumulate = Accumulator(model, optimizer or sgd(model.parameters()), loss, observers=[meter], **options)
    assert accumulate(Window(list(microbatches))).made
    assert_nothing_left(model)
    return meter


def assert_nothing_left(model: nn.Module) -> None:
    assert all(p._backward_hooks is None and p.grad is None for p in model.parameters())


def test_unequal_micro_batches() -> None:
    model = mlp()
    expected = by_hand(model.parameters(), [lambda p=p: mse(model, p) for p in PARTS], SIZES)
    each = [mse(model, p).item() for p in PARTS]
    meter = measured(model, PARTS, lambda p: mse(model, p))
    assert_near(meter, expected)
    assert meter.losses == pytest.approx(losses_by_hand(each, SIZES), rel=TOLERANCE)


def test_a_batch_split_by_the_accumulator_and_by_the_users_loop() -> None:
    model, microbatches = mlp(), split(BATCH, 3, 3, 3)
    expected = by_hand(model.parameters(), [lambda p=p: mse(model, p) for p in microbatches], (3, 3, 3))
    meter, start = Recorder(every=1), copy.deepcopy(model.state_dict())
    Accumulator(
        model, sgd(model.parameters()), lambda p: mse(model, p), microbatch_size=4, observers=[meter]
    )(BATCH)
    assert_near(meter, expected)
    model.load_state_dict(start)
    meter = Recorder(every=1)
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=4, observers=[meter])
    with accumulate.window(BATCH) as window:
        for mb in window:
            assert all(p._backward_hooks for p in model.parameters()), "premise: hooks are active"
            window.backward(mse(model, mb))
    assert_near(meter, expected)
    assert_nothing_left(model)


def test_a_sum_over_samples() -> None:
    model = mlp()
    expected = by_hand(model.parameters(), [lambda p=p: per_sample(model, p) for p in PARTS], SIZES)
    each = [per_sample(model, p).item() for p in PARTS]
    meter = measured(model, PARTS, lambda p: squared_sum(model, p), reduction="sum")
    assert_near(meter, expected)
    assert meter.losses == pytest.approx(losses_by_hand(each, SIZES), rel=TOLERANCE), "means, not sums"


TOKENS = [
    {"ids": torch.arange(8).view(2, 4) % 5, "labels": torch.tensor([[1, 2, -100, -100], [3, 4, 5, 6]])},
    {"ids": torch.arange(4).view(1, 4) % 7, "labels": torch.tensor([[1, -100, -100, -100]])},
    {"ids": torch.arange(4).view(1, 4) % 7, "labels": torch.tensor([[-100] * 4])},
    {"ids": torch.arange(12).view(3, 4) % 9, "labels": torch.arange(12).view(3, 4) % 11},
]


def token_loss(model: nn.Module, mb: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(mb["ids"]).flatten(0, 1), mb["labels"].flatten())


@pytest.mark.parametrize("returned", [False, True])
def test_token_weights_with_a_micro_batch_of_weight_zero(returned: bool) -> None:
    torch.manual_seed(3)
    model = TinyLM().double()
    counted = [TOKENS[0], TOKENS[1], TOKENS[3]]
    weights = [6, 1, 12]
    expected = by_hand(
        model.parameters(), [lambda p=p: token_loss(model, p) for p in counted], weights, [2, 1, 3]
    )

    def with_weight(mb: dict[str, Tensor]) -> tuple[Tensor, int]:
        count = int((mb["labels"] != -100).sum())
        return (token_loss(model, mb) if count else model(mb["ids"]).sum() * 0), count

    meter = (
        measured(model, TOKENS, with_weight, weight="returned")
        if returned
        else measured(model, TOKENS, lambda p: token_loss(model, p), weight=count_tokens("labels"))
    )
    assert_near(meter, expected)


def test_noise_is_measured_before_clipping() -> None:
    model = mlp()
    expected = by_hand(model.parameters(), [lambda p=p: mse(model, p) for p in PARTS], SIZES)
    options: dict[str, Any] = {"max_grad_norm": 1e-3, "clip": ClipValue(1e-4)}
    assert_near(measured(model, PARTS, lambda p: mse(model, p), **options), expected)


def test_noise_is_unscaled_and_an_overflow_is_not_counted() -> None:
    model = mlp()
    expected = by_hand(model.parameters(), [lambda p=p: mse(model, p) for p in PARTS], SIZES)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    meter = Recorder(every=1)
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda p: mse(model, p), scaler=scaler, observers=[meter], check=False
    )
    assert accumulate(Window(PARTS)).made
    assert_near(meter, expected)
    handle = next(model.parameters()).register_hook(lambda g: g * float("inf"))
    assert not accumulate(Window(PARTS)).made
    assert meter.windows == 1
    handle.remove()


def test_skipped_micro_batches_and_windows_are_not_measured() -> None:
    model = mlp()
    bad = (PARTS[1][0] * float("nan"), PARTS[1][1])
    good = [PARTS[0], PARTS[2]]
    expected = by_hand(model.parameters(), [lambda p=p: mse(model, p) for p in good], (5, 3))
    start = copy.deepcopy(model.state_dict())
    options: dict[str, Any] = {"nonfinite": "skip_microbatch", "check": False}
    assert_near(measured(model, [PARTS[0], bad, PARTS[2]], lambda p: mse(model, p), **options), expected)
    model.load_state_dict(start)
    for nonfinite in ("skip_update", "raise"):
        meter = Recorder(every=1)
        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            lambda p: mse(model, p),
            nonfinite=nonfinite,
            observers=[meter],
            check=False,
        )
        if nonfinite == "raise":
            with pytest.raises(NonFiniteError):
                accumulate(Window([PARTS[0], bad]))
        else:
            assert not accumulate(Window([PARTS[0], bad])).made
        assert meter.windows == 0
        assert_nothing_left(model)


@pytest.mark.parametrize("masters", [False, True])
def test_sums_in_float32_buffers(masters: bool) -> None:
    model = mlp(torch.bfloat16)
    microbatches = [tuple(leaf.bfloat16() for leaf in mb) for mb in PARTS]
    expected = by_hand(model.parameters(), [lambda p=p: mse(model, p) for p in microbatches], SIZES)
    copies = fp32_masters(model) if masters else None
    optimizer = sgd(model.parameters() if copies is None else copies.values())
    meter = Recorder(every=1)
    Accumulator(
        model,
        optimizer if copies is None else MasterWeights(optimizer, copies),
        lambda p: mse(model, p),
        observers=[meter],
        gradient_sum=torch.float32,
        check=False,
    )(Window(microbatches))
    assert_near(meter, expected, 1e-5)  # norms of bfloat16 gradients are computed in float32


class Tied(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(4, 4)
        self.how = how
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.how == "plain":
            return self.head(torch.tanh(self.body(self.body(x))))
        reentrant = self.how == "reentrant"
        for layer in (self.body, self.body, self.head):  # body is in two segments, the tied weight in one
            x = checkpoint(layer, torch.tanh(x), use_reentrant=reentrant)
        return x


@pytest.mark.parametrize("how", ["plain", "not reentrant", "reentrant"])
def test_tied_weights_and_checkpoints(how: str) -> None:
    model = Tied(how)
    twin = Tied("not reentrant" if how == "reentrant" else how)  # reentrant: no `autograd.grad`
    microbatches = [torch.arange(i, i + 6).view(2, 3) % 7 for i in range(3)]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = Recorder(every=1)
    accumulate = Accumulator(model, optimizer, lambda ids: loss(model, ids), observers=[meter])
    accumulate(Window(microbatches))
    if how == "reentrant":  # the first window only detects partial gradients
        assert meter.windows == 0
        assert "came in several parts" in (meter.estimate().reason or "")
        accumulate(Window(microbatches))
    assert meter.windows == 1
    expected = by_hand(twin.parameters(), [lambda p=p: loss(twin, p) for p in microbatches], (2, 2, 2))
    assert_near(meter, expected)
    assert_nothing_left(model)


def test_two_losses_of_one_micro_batch_are_added() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = Recorder(every=1)
    accumulate = Accumulator(model, optimizer, observers=[meter])
    for _ in range(2):  # the first window only detects two losses
        with accumulate.window(Window(PARTS)) as window:
            for mb in window:
                window.backward(mse(model, mb))
                window.backward(model(mb[0]).square().mean())
    assert meter.windows == 1
    expected = by_hand(
        model.parameters(), [lambda p=p: mse(model, p) + model(p[0]).square().mean() for p in PARTS], SIZES
    )
    assert_near(meter, expected)


def test_sparse_complex_frozen_and_unused_parameters() -> None:
    class MixedParameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.table = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
            self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex128))
            self.frozen = nn.Parameter(torch.randn(4).double(), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(3).double())

        def forward(self, ids: Tensor) -> Tensor:
            return ((self.table(ids) * self.wave).sum(-1).abs() + self.frozen.sum()).square()

    model = MixedParameters()
    microbatches = [
        torch.tensor([[1, 1, 2]]),
        torch.tensor([[2, 3, 3], [4, 1, 1]]),
        torch.tensor([[5, 5, 5]]),
    ]
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = by_hand(trained, [lambda p=p: model(p).mean() for p in microbatches], (1, 2, 1))
    optimizer = torch.optim.SGD(trained, lr=0.1)
    assert_near(measured(model, microbatches, lambda p: model(p).mean(), optimizer=optimizer), expected)


def test_groups_have_names_and_sum_to_the_total() -> None:
    model = mlp()
    losses = [lambda p=p: mse(model, p) for p in PARTS]
    first, last = list(model[0].parameters()), list(model[2].parameters())
    expected = by_hand(first, losses, SIZES), by_hand(last, losses, SIZES)
    total = by_hand(model.parameters(), losses, SIZES)[0]
    optimizer = torch.optim.SGD([{"params": first, "name": "body"}, {"params": last}], lr=0.0)
    meter = measured(model, PARTS, lambda p: mse(model, p), optimizer=optimizer)
    assert_near(meter, expected[0], group="body")
    assert_near(meter, expected[1], group="group 1")
    assert meter.estimate().signal == pytest.approx(total.signal, rel=1e-9)
    assert [group.name for group in meter.estimate().groups] == ["body", "group 1"]


def test_per_sample_randomness_with_user_hooks_and_a_gradient_penalty() -> None:
    """The test's own hooks give the reference: with dropout a gradient cannot be recomputed."""
    model = mlp(dropout=0.4).train()
    seen: list[list[Tensor]] = []
    hooks = [p.register_hook(lambda g: seen[-1].append(g.clone())) for p in model.parameters()]

    def loss(mb: tuple[Tensor, Tensor]) -> Tensor:
        seen.append([])
        value = mse(model, mb)
        penalty = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        assert len(seen[-1]) == 4, "premise: a gradient in the forward calls the hooks"
        seen[-1].clear()
        return value + 0.1 * sum(g.square().sum() for g in penalty)

    meter = Recorder(every=1)
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss,
        microbatch_size=4,
        observers=[meter],
        participants=[PerSampleRandom()],
        check=False,
    )
    update = accumulate(BATCH)
    a2 = sum(float(g.square().sum()) for mb in seen for g in mb)
    assert update.grad_norm is not None
    assert len(seen) == 3, "premise: three micro-batches"
    found = estimate(a2, update.grad_norm**2, 1 / 3)
    assert_near(meter, (found, 9.0))
    assert all(len(p._backward_hooks or ()) == 1 for p in model.parameters()), "the user's hooks stay"
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("where", ["forward", "backward", "after"])
def test_out_of_memory_counts_no_micro_batch_twice(where: str) -> None:
    model, failed = mlp(), []

    class FailingBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  (as torch documents it)
            if where == "backward" and not failed and len(gradient) == 4:
                failed.append(1)
                raise RuntimeError(TEXT)
            return gradient

    def loss(mb: tuple[Tensor, ...]) -> Tensor:
        x, y = mb
        if where == "forward" and not failed and len(x) == 4:
            failed.append(1)
            raise RuntimeError(TEXT)
        hidden = FailingBackward.apply(torch.tanh(model[0](x)))
        return nn.functional.mse_loss(model[2](hidden), y)

    # The second micro-batch fails and is halved. After a failure in the backward the window restarts.
    microbatches = split(rows(11, 1)[0], 3, 4, 4)
    sizes = (2, 1, 2, 2, 2, 2) if where == "backward" else (3, 2, 2, 2, 2)
    again = split(rows(11, 1)[0], *sizes)
    if where == "after":
        sizes, again = (3, 4, 4), microbatches
    expected = by_hand(model.parameters(), [lambda p=p: mse(model, p) for p in again], sizes)
    meter = Recorder(every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulate = Accumulator(model, optimizer, loss, observers=[meter], check=False)
    if where != "after":
        with pytest.warns(UserWarning, match="memory ran out"):
            accumulate(Window(microbatches))
        assert failed, "premise: memory ran out"
    else:  # a window that the user's exception ends is not counted
        with pytest.raises(KeyError), accumulate.window(Window(microbatches)) as window:
            for mb in window:
                window.backward(loss(mb))
                raise KeyError
        assert meter.passed == 0
        accumulate(Window(microbatches))
    assert_near(meter, expected)
    assert_nothing_left(model)


def test_automatic_micro_batch_sizes() -> None:
    model = mlp()
    meter = Recorder(every=1)
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda p: mse(model, p), microbatch_size="auto", observers=[meter]
    )
    for batch in rows(512, 6):
        update = accumulate(batch)
        if update.microbatches > 1:
            assert meter.said[1] == pytest.approx(512)
    assert meter.passed == 6
    assert_nothing_left(model)


def test_an_open_window_is_resumed_bit_for_bit() -> None:
    def new() -> tuple[nn.Module, torch.optim.Optimizer, Recorder, Accumulator]:
        model = mlp(torch.float32)
        optimizer, meter = sgd(model.parameters()), Recorder(beta=0.9, every=1)
        loss = lambda p: mse(model, p)  # noqa: E731
        return model, optimizer, meter, Accumulator(model, optimizer, loss, observers=[meter])

    batches = [Window(split(batch, *SIZES)) for batch in rows(9, 12, torch.float32)]
    _, _, uninterrupted, accumulate = new()
    for batch in batches:
        accumulate(batch)
    model, optimizer, meter, accumulate = new()
    for batch in batches[:9]:
        accumulate(batch)
    file = io.BytesIO()
    with accumulate.window(batches[9]) as window:
        for index, mb in enumerate(window):
            window.backward(mse(model, mb))
            if index == 1:
                state = {"model": model, "optimizer": optimizer, "accumulate": accumulate}
                torch.save({name: each.state_dict() for name, each in state.items()}, file)
    file.seek(0)
    saved = torch.load(file)
    model, optimizer, meter, accumulate = new()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    accumulate.load_state_dict(saved["accumulate"])
    for batch in batches[9:]:
        accumulate(batch)
    assert meter.estimate() == uninterrupted.estimate() == accumulate.noise
    assert uninterrupted.windows == 12
    # A window saved without a measurement is left out: its second half alone is not measured.
    model, optimizer, meter, accumulate = new()
    saved["accumulate"]["window"]["noise"] = None
    del saved["accumulate"]["window"]["digest"]  # it would reveal the change
    accumulate.load_state_dict(saved["accumulate"])
    accumulate(batches[9])
    assert meter.windows == 9


def test_measuring_changes_no_update() -> None:
    trained = []
    for observers in ([], [NoiseMeter()]):
        model = mlp(torch.float32)
        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            lambda p, model=model: mse(model, p),
            microbatch_size=4,
            observers=observers,
        )
        for batch in rows(9, 12, torch.float32):
            accumulate(batch)
        assert (accumulate.noise is None) == (not observers)
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_no_hooks_by_default() -> None:
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=4)
    with accumulate.window(BATCH) as window:
        for mb in window:
            assert all(p._backward_hooks is None for p in model.parameters())
            window.backward(mse(model, mb))
    assert accumulate.noise is None


def test_one_window_in_every_n_is_measured() -> None:
    model, hooked = mlp(), []

    def loss(mb: Any) -> Tensor:
        hooked.append(bool(model[0].weight._backward_hooks))
        return mse(model, mb)

    meter = NoiseMeter(every=3)
    accumulate = Accumulator(model, sgd(model.parameters()), loss, observers=[meter], check=False)
    for _ in range(7):
        accumulate(Window(PARTS))
    assert hooked[::3] == [True, False, False, True, False, False, True]
    assert meter.windows == 3
    tiny = Accumulator(model, sgd(model.parameters()), loss, observers=[NoiseMeter()]).engine.config.noise
    wide = nn.Linear(600, 600)
    large = Accumulator(
        wide, sgd(wide.parameters()), lambda p: wide(p).sum(), observers=[NoiseMeter()]
    ).engine.config.noise
    assert tiny is not None and large is not None
    assert (tiny.meter.every, large.meter.every) == (20, 1)


def test_one_micro_batch_gives_a_reason_and_no_estimate() -> None:
    model = mlp()
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda p: mse(model, p), observers=[NoiseMeter(every=1)]
    )
    accumulate(BATCH)
    noise = accumulate.noise
    assert noise is not None and noise.batch_size is None
    assert "1 left out: one micro-batch has nearly all the weight" in (noise.reason or "")


def test_a_new_parameter_group_begins_a_new_average() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    meter = NoiseMeter(every=1)
    accumulate = Accumulator(model, optimizer, lambda p: mse(model, p), observers=[meter])
    accumulate(Window(PARTS))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    accumulate(Window(PARTS))
    assert meter.windows == 1
    assert [group.name for group in meter.estimate().groups] == ["group 0", "group 1"]


def test_other_parameters_in_a_group_begin_a_new_average() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    weight = next(model.parameters())
    weight.requires_grad = False
    meter = NoiseMeter(every=1)
    accumulate = Accumulator(model, optimizer, lambda p: mse(model, p), observers=[meter])
    for _ in range(2):
        accumulate(Window(PARTS))
    assert meter.windows == 2
    weight.requires_grad = True
    accumulate(Window(PARTS))
    assert meter.windows == 1, "a partly frozen model has another noise scale"
    accumulate(Window(PARTS))
    assert meter.windows == 2


def test_options_that_prevent_a_measurement_are_refused() -> None:
    model = mlp()
    with pytest.raises(InputError, match='is never formed with gradient_sum="momentum"'):
        Accumulator(model, sgd(model.parameters()), gradient_sum="momentum", observers=[NoiseMeter()])
    for observers in (["yes"], [NoiseMeter(), NoiseMeter()]):
        with pytest.raises(InputError, match="is not one meter"):
            Accumulator(model, sgd(model.parameters()), observers=observers)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"observers='yes' is not a list\. Pass observers=\['yes'\]"):
        Accumulator(model, sgd(model.parameters()), observers="yes")  # type: ignore[arg-type]


def test_two_ranks_measure_the_same_as_one_process(tmp_path: Path) -> None:
    said = found_by_both("tests.torch.noise_ranks", tmp_path)
    assert said[0] == said[1]
    model = mlp()
    for name, sizes in (("three", noise_ranks.SIZES), ("one", noise_ranks.ALONE)):
        flat = [size for rank in sizes for size in rank]
        microbatches = noise_ranks.parts(tuple(flat))
        (signal, variance), samples = by_hand(
            model.parameters(), [lambda p=p: mse(model, p) for p in microbatches], flat
        )
        found, ours, losses = said[0][name]
        assert losses == pytest.approx(
            losses_by_hand([mse(mlp(), p).item() for p in microbatches], flat), rel=TOLERANCE
        )
        assert ours == pytest.approx(samples, rel=TOLERANCE)
        assert found == pytest.approx((signal, variance), rel=1e-11)
        error = max(abs(found[0] - signal), abs(found[1] - variance)) / (abs(signal) + abs(variance))
        assert error <= TOLERANCE


def test_mutants_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong way to record gradients fails a test above."""

    def records_the_running_sum(self: MicrobatchGradientNorms) -> None:
        for parameter, slot in zip(self._parameters, self._slots, strict=True):
            handle = parameter.register_post_accumulate_grad_hook(
                lambda p, slot=slot: slot.append(float(p.grad.norm()))
            )
            self._undo.append(handle.remove)

    def treats_partial_gradients_as_complete(self: MicrobatchGradientNorms) -> None:
        end_of_microbatch(self)
        self.reason = None

    end_of_microbatch = MicrobatchGradientNorms._end_of_microbatch
    do_nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    for name, mutant, test in (
        ("open", records_the_running_sum, test_unequal_micro_batches),
        ("restart", _restart_only_once, lambda: test_out_of_memory_counts_no_micro_batch_twice("backward")),
        (
            "_end_of_microbatch",
            treats_partial_gradients_as_complete,
            lambda: test_tied_weights_and_checkpoints("reentrant"),
        ),
        ("close", do_nothing, test_unequal_micro_batches),
    ):
        test()
        with monkeypatch.context() as patch:
            patch.setattr(MicrobatchGradientNorms, name, mutant)
            with pytest.raises(AssertionError):
                test()


def _restart_only_once(self: MicrobatchGradientNorms) -> None:
    if not hasattr(self, "_norms"):
        self._last, self._ended, self._norms, self._squares = None, None, [], {}
        self._per_sample = []
