"""Under `sample_stream` outputs and gradients do not depend on the split; other draws are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from superbatch.errors import InputError
from superbatch.torch.rng.sample_layout import Call, samples_along
from superbatch.torch.rng.sample_rng import sample_stream

SAMPLES = 12
SPLITS = [[5, 7], [1] * 12, [4, 4, 4]]
T, C = 5, 6


@pytest.fixture(autouse=True)
def fixed_settings() -> Iterator[None]:
    """Set one thread, float64 and a seed, and restore them after the test."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


class After(nn.Module):
    """A linear layer, then `noise`."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.linear(x))


class First(nn.Module):
    """First output of `module`; with ``swap`` its input has the shape (time, batch, channels)."""

    def __init__(self, module: nn.Module, swap: bool = False) -> None:
        super().__init__()
        self.module, self.swap = module, swap

    def forward(self, x: Tensor) -> Tensor:
        y, *_ = self.module(x.transpose(0, 1) if self.swap else x)
        return y.transpose(0, 1) if self.swap else y


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.module = nn.MultiheadAttention(C, 2, dropout=0.3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, x, x, need_weights=self.need_weights)[0]


def sdpa(x: Tensor) -> Tensor:
    q = x.view(len(x), T, 2, C // 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)


def time_first(x: Tensor) -> Tensor:
    with samples_along(1):
        return F.dropout(x.transpose(0, 1)).transpose(0, 1)


def flattened(x: Tensor) -> Tensor:
    return F.dropout(x.flatten(0, 1)).view(x.shape)


def noise_on_weights(x: Tensor) -> Tensor:
    with samples_along(None):
        return x * torch.randn(4, 1, C)[:1]


def depth(x: Tensor) -> Tensor:
    return x * (torch.rand(len(x), 1, 1) < 0.5)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1, 1).bernoulli_(0.6).div_(0.6)


def augment(x: Tensor) -> Tensor:
    """Per-sample random flips and shifts, as a loss function may do on CPU."""
    flip = torch.randint(0, 2, (len(x),), dtype=torch.bool)
    shift = torch.randint(0, T, (len(x), 1, 1)).expand(x.shape)
    x = torch.where(flip[:, None, None], x.flip(1), x)
    return x.gather(1, (torch.arange(T).view(1, T, 1) + shift) % T)


def sampled(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Multiply the activations by noise from a distribution without gradient."""
    return lambda x: x * draw(x.detach()).reshape(len(x), -1, 1)[:, :1].to(x.dtype)


def complex_dropout(x: Tensor) -> Tensor:
    return torch.view_as_real(F.dropout(torch.complex(x, x))).sum(-1)


CASES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: After(F.dropout),
    "dropout in place": lambda: After(lambda x: F.dropout(x + 0, inplace=True)),
    "native dropout": lambda: After(lambda x: torch.native_dropout(x, 0.4, train=True)[0]),
    "complex dropout": lambda: After(complex_dropout),
    "dropout1d": lambda: After(F.dropout1d),
    "dropout2d": lambda: After(lambda x: F.dropout2d(x.unsqueeze(-1)).squeeze(-1)),
    "dropout3d": lambda: After(lambda x: F.dropout3d(x[..., None, None])[..., 0, 0]),
    "alpha dropout": lambda: After(nn.AlphaDropout(0.3)),
    "feature alpha dropout": lambda: After(nn.FeatureAlphaDropout(0.3)),
    "flattened rows": lambda: After(flattened),
    "time first, declared": lambda: After(time_first),
    "attention, weights": lambda: Attention(need_weights=True),
    "attention, no weights": lambda: Attention(need_weights=False),
    "sdpa": lambda: After(sdpa),
    "lstm": lambda: First(nn.LSTM(C, 4, 2, dropout=0.5, batch_first=True)),
    "lstm, time first": lambda: First(nn.LSTM(C, 4, 3, dropout=0.5, bidirectional=True), swap=True),
    "gru": lambda: First(nn.GRU(C, 4, 2, dropout=0.5, batch_first=True)),
    "rnn": lambda: First(nn.RNN(C, 4, 2, dropout=0.5, batch_first=True)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(C, 2, 8, dropout=0.2, batch_first=True),
    "stochastic depth": lambda: After(depth),
    "drop path": lambda: After(drop_path),
    "one coin per batch": lambda: After(lambda x: x * (0.5 + torch.rand(()))),
    "noise on weights, declared": lambda: After(noise_on_weights),
    "gumbel softmax": lambda: After(lambda x: F.gumbel_softmax(x, hard=True)),
    "reparametrisation": lambda: After(lambda x: x + x.exp() * torch.randn_like(x)),
    "distribution": lambda: After(lambda x: torch.distributions.Laplace(x, x.exp()).rsample()),
    "normal of tensors": lambda: After(lambda x: x * torch.normal(x.detach(), 0.5)),
    "rrelu": lambda: After(nn.RReLU()),
    "rrelu in place": lambda: After(lambda x: F.rrelu(x + 0, training=True, inplace=True)),
    "fractional pooling": lambda: After(
        lambda x: F.fractional_max_pool2d(x[:, None], 2, output_size=(3, 3))  # draws (batch, channels, 2)
    ),
    "categorical": lambda: After(sampled(lambda x: torch.distributions.Categorical(logits=x).sample() + 1)),
    "multinomial": lambda: After(sampled(lambda x: torch.multinomial(x[:, 0].softmax(-1), 3) + 1)),
    "bernoulli": lambda: After(sampled(lambda x: torch.bernoulli(x.sigmoid()) + 1)),
    "augmentation": lambda: After(augment),
    "checkpoint": lambda: After(lambda x: checkpoint(dropout_twice, x, use_reentrant=False)),
    "checkpoint, reentrant": lambda: After(lambda x: checkpoint(dropout_twice, x, use_reentrant=True)),
    "vmap": lambda: After(torch.vmap(lambda x: F.dropout(x), randomness="different")),
    "compiled": lambda: After(torch.compile(dropout_twice, backend="aot_eager")),
}


def dropout_twice(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x, 0.3).exp(), 0.4)


def batch() -> Tensor:
    return torch.randn(SAMPLES, T, C, generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, sizes: Sequence[int], key: int = 7) -> dict[str, Tensor]:
    """Return output and gradients of a window, by name."""
    model.zero_grad()
    x, outputs, first, calls = batch(), [], 0, dict[int, Call]()
    for size in sizes:
        with sample_stream(key, first, size, calls=calls):
            y = model(x[first : first + size])
            target = torch.linspace(0, 1, y[0].numel()).view(y[0].shape)
            ((y - target) ** 2).sum().backward()
        outputs.append(y.detach())
        first += size
    assert first == SAMPLES
    return {"output": torch.cat(outputs)} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    wrong = {n: float((a[n] - b[n]).abs().max()) for n in b if not torch.allclose(a[n], b[n], 1e-12, 1e-12)}
    assert a.keys() == b.keys() and not wrong, wrong


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_do_not_depend_on_the_split(name: str):
    model = CASES[name]()
    unsplit = run(model, [SAMPLES])
    assert len(unsplit) > 1 and all(g.abs().max() > 1e-6 for g in unsplit.values()), (
        "premise: there are gradients"
    )
    assert not torch.allclose(unsplit["output"], run(model, [SAMPLES], key=8)["output"]), (
        "premise: it is random"
    )
    for sizes in SPLITS:
        assert_same(run(model, sizes), unsplit)


def test_dropout_of_torch_depends_on_the_split():
    """Premise of the other tests."""
    x, outputs = torch.ones(SAMPLES, C), []
    for mb in [x, *x.split([5, 7])]:
        torch.manual_seed(0)
        outputs.append(F.dropout(mb))
    assert not torch.equal(torch.cat(outputs[1:]), outputs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_are_identical_in_every_dtype(dtype: torch.dtype):
    x = torch.ones(SAMPLES, 200, dtype=dtype)
    with sample_stream(3, 0, SAMPLES):
        unsplit = F.dropout(x)
    assert unsplit.dtype == dtype
    assert torch.equal(
        torch.cat([under(3, i, lambda i=i: F.dropout(x[i : i + 1])) for i in range(12)]), unsplit
    )
    assert torch.equal(unsplit != 0, under(3, 0, lambda: F.dropout(x.double()), SAMPLES) != 0)


def test_autocast():
    linear = nn.Linear(C, C, dtype=torch.float32)
    x = batch().float()

    def forward(mb: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.dropout(linear(mb))

    unsplit = under(3, 0, lambda: forward(x), SAMPLES)
    outputs = [under(3, i, lambda i=i: forward(x[i : i + 4]), 4) for i in (0, 4, 8)]
    assert unsplit.dtype == torch.bfloat16
    assert torch.equal(torch.cat(outputs), unsplit)


def under(key: int, first: int, draw: Callable[[], Any], samples: int = 1) -> Any:
    with sample_stream(key, first, samples):
        return draw()


# ---- checkpointing and state ---------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant: bool):
    model = After(dropout_twice)
    plain = run(model, [5, 7])
    model.noise = lambda x: checkpoint(dropout_twice, x, use_reentrant=use_reentrant)
    again = run(model, [5, 7])
    assert_same(again, plain)


@pytest.mark.parametrize("fails", [False, True])
def test_exit_restores_the_generator_and_the_modes(fails: bool):
    before = torch.get_rng_state()
    try:
        with sample_stream(1, 0, 4):
            F.dropout(torch.ones(4, 9))
            assert not torch.equal(torch.get_rng_state(), before)
            if fails:
                raise KeyError("user code")
    except KeyError:
        assert fails
    assert torch.equal(torch.get_rng_state(), before)
    assert _get_current_dispatch_mode() is None
    assert _get_current_function_mode() is None
    assert torch.backends.cudnn.enabled


def test_the_generator_state_at_entry_has_no_effect():
    """The user may draw between two micro-batches."""
    first = under(1, 0, lambda: torch.rand(4, 9), 4)
    torch.rand(1)
    assert torch.equal(under(1, 0, lambda: torch.rand(4, 9), 4), first)


def test_different_keys_give_different_draws():
    draws = [under(key, 0, lambda: torch.rand(4, 9), 4) for key in (0, 1, -1, 2**62, 2**64 - 1)]
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[2], draws[4])  # the same 64 bits
    assert len({d[0, 0].item() for d in draws}) == 4


def test_evaluation_mode_and_probability_0_draw_nothing():
    x = torch.ones(4, 9)
    after = []
    for p, training in [(0.5, False), (0.0, True)]:
        with sample_stream(1, 0, 4):
            assert torch.equal(F.dropout(x, p, training), x)
            assert torch.equal(F.rrelu(x, training=False), x)
            after.append(torch.get_rng_state())
    assert torch.equal(after[0], after[1])


def test_inference_mode():
    x = torch.ones(4, 90)
    with torch.inference_mode():
        inference = under(1, 0, lambda: F.dropout(x), 4)
    assert torch.equal(inference, under(1, 0, lambda: F.dropout(x), 4))


# ---- statistics ----------------------------------------------------------------------------------

ROWS, COLUMNS = 100, 2000
SIGNIFICANT = 1e-4  # the seeds are fixed: a test that passes once passes always


def drawn(draw: Callable[[], Tensor], key: int = 11) -> np.ndarray:
    return under(key, 0, draw, ROWS).double().numpy()


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (lambda: torch.rand(ROWS, COLUMNS), stats.uniform()),
        (lambda: torch.rand(ROWS, COLUMNS, dtype=torch.float32), stats.uniform()),
        (lambda: torch.empty(ROWS, COLUMNS).uniform_(-3, 5), stats.uniform(-3, 8)),
        (lambda: torch.randn(ROWS, COLUMNS), stats.norm()),
        (lambda: torch.randn(ROWS, COLUMNS, dtype=torch.float32), stats.norm()),
        (lambda: torch.normal(2.0, 3.0, (ROWS, COLUMNS)), stats.norm(2, 3)),
        (lambda: torch.empty(ROWS, COLUMNS).log_normal_(0.5, 0.3), stats.lognorm(0.3, scale=np.exp(0.5))),
        (lambda: torch.empty(ROWS, COLUMNS).exponential_(2.0), stats.expon(scale=0.5)),
        (lambda: torch.empty(ROWS, COLUMNS).cauchy_(1.0, 2.0), stats.cauchy(1, 2)),
    ],
)
def test_continuous_distributions(draw: Callable[[], Tensor], law: Any):
    values = drawn(draw)
    assert np.isfinite(values).all()
    assert stats.kstest(values.ravel(), law.cdf).pvalue > SIGNIFICANT
    # Means of rows and of columns have the spread of means of independent numbers.
    for axis in (0, 1):
        of_uniforms = law.cdf(values).mean(axis)
        count = values.shape[axis]
        assert stats.kstest(of_uniforms, stats.norm(0.5, (12 * count) ** -0.5).cdf).pvalue > SIGNIFICANT


@pytest.mark.parametrize(
    ("draw", "shares"),
    [
        (lambda: torch.randint(-2, 5, (ROWS, COLUMNS)), dict.fromkeys(range(-2, 5), 1 / 7)),
        (lambda: torch.randint_like(torch.ones(ROWS, COLUMNS), 3), {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}),
        (lambda: torch.empty(ROWS, COLUMNS, dtype=torch.int64).random_(4), dict.fromkeys(range(4), 0.25)),
        (lambda: torch.empty(ROWS, COLUMNS, dtype=torch.uint8).random_() % 8, dict.fromkeys(range(8), 0.125)),
        (lambda: torch.empty(ROWS, COLUMNS).bernoulli_(0.3), {0: 0.7, 1: 0.3}),
        (lambda: torch.bernoulli(torch.full((ROWS, COLUMNS), 0.9)), {0: 0.1, 1: 0.9}),
        (
            lambda: torch.empty(ROWS, COLUMNS).geometric_(0.5).clamp_(max=4),
            {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.125},
        ),
        (
            lambda: torch.multinomial(torch.tensor([[1.0, 2, 3]] * ROWS), COLUMNS, replacement=True),
            {0: 1 / 6, 1: 1 / 3, 2: 0.5},
        ),
        (lambda: F.dropout(torch.ones(ROWS, COLUMNS), 0.2).mul_(0.8), {0: 0.2, 1: 0.8}),
    ],
)
def test_discrete_distributions(draw: Callable[[], Tensor], shares: dict[int, float]):
    values = drawn(draw).round().ravel()
    counts = [int((values == value).sum()) for value in shares]
    assert sum(counts) == values.size
    assert stats.chisquare(counts, [s * values.size for s in shares.values()]).pvalue > SIGNIFICANT


def test_multinomial_without_replacement():
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    pairs = drawn(lambda: torch.multinomial(p.expand(20 * ROWS, 4), 2))
    assert (pairs[:, 0] != pairs[:, 1]).all()
    expected = np.array(
        [[a * b / (1 - a) if i != j else 0 for j, b in enumerate(p)] for i, a in enumerate(p)]
    )
    counts = np.array([[((pairs == (i, j)).all(1)).sum() for j in range(4)] for i in range(4)])
    off = ~np.eye(4, dtype=bool)
    assert stats.chisquare(counts[off], expected[off] / expected.sum() * len(pairs)).pvalue > SIGNIFICANT


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation, in standard deviations of that of independent numbers."""
    return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * a.size**0.5


def test_draws_are_independent_across_samples_elements_calls_and_windows():
    first, second = np.split(
        drawn(lambda: torch.cat([torch.rand(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS)])), 2
    )
    other = drawn(lambda: torch.rand(ROWS, COLUMNS), key=12)
    assert correlation(first, second) < 4, "calls"
    assert correlation(first, other) < 4, "windows"
    assert correlation(first[1:], first[:-1]) < 4, "samples"
    assert correlation(first[:, 1:], first[:, :-1]) < 4, "elements"
    assert len(np.unique(first)) > 0.9999 * first.size


def test_keys_and_samples_give_distinct_streams():
    """Sample 1 of window 0 is not sample 0 of window 1."""
    grid = np.stack([drawn(lambda: torch.rand(ROWS, 50), key=key) for key in range(20)])
    assert len(np.unique(grid)) == grid.size


def test_bits_of_images_pass_serial_tests():
    """Pairs of neighbours in a mask of channels and pixels have the four values with equal frequency."""
    mask = drawn(lambda: torch.empty(ROWS, 8, 16, 16).bernoulli_(0.5)).astype(int)
    for axis in range(4):
        a, b = (
            np.take(mask, range(1, mask.shape[axis]), axis),
            np.take(mask, range(mask.shape[axis] - 1), axis),
        )
        assert stats.chisquare(np.bincount((2 * a + b).ravel(), minlength=4)).pvalue > SIGNIFICANT


# ---- the dimension of the samples -------------------------------------------------------------------


def window(draw: Callable[[int], Tensor], sizes: Sequence[int], share: bool = True) -> list[Tensor]:
    results, first, calls = [], 0, dict[int, Call]()
    for size in sizes:
        with sample_stream(5, first, size, calls=calls if share else None):
            results.append(draw(size))
        first += size
    return results


@pytest.mark.parametrize(
    ("shape", "along"),
    [
        (lambda n: (n,), 0),
        (lambda n: (n, 1, 1), 0),
        (lambda n: (n * 6, 3), 0),
        (lambda n: (n * 2, 3, 3), 0),
        (lambda n: (7, n, 3), 1),
        (lambda n: (n, 1), 0),
    ],
)
def test_the_sample_dimension_by_convention(shape: Callable[[int], tuple[int, ...]], along: int):
    unsplit = window(lambda n: torch.rand(shape(n)), [12])[0]
    for sizes in SPLITS:
        assert torch.equal(torch.cat(window(lambda n: torch.rand(shape(n)), sizes), along), unsplit)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (7, 3)])
def test_one_draw_for_the_whole_batch(shape: tuple[int, ...]):
    unsplit = window(lambda n: torch.rand(shape), [12])[0]
    for one in window(lambda n: torch.rand(shape), [4, 8]):
        assert torch.equal(one, unsplit)


def test_two_numbers_of_samples_determine_the_sample_dimension():
    """By convention (8, 3) is 2 rows for each of 4 samples; a batch of 12 shows it is one draw for all."""
    draws = window(lambda n: torch.rand(8, 3), [12, 4, 4, 1, 1, 2])
    assert all(torch.equal(draws[0], one) for one in draws[1:])


def test_another_number_of_samples_resolves_an_ambiguous_shape():
    calls: dict[int, Call] = {}
    outputs = []
    for first, n in [(0, 12), (0, 4), (4, 8)]:  # the batch, as in a check, then its micro-batches
        with sample_stream(5, first, n, calls=calls):
            outputs.append(torch.rand(8, n, 3))
    assert torch.equal(torch.cat(outputs[1:], 1), outputs[0])


def test_a_sample_dimension_that_another_microbatch_contradicts_is_refused():
    with pytest.raises(InputError, match=r"shape \(8, 3\) in a micro-batch of 4 .* of 5 .*samples_along"):
        window(lambda n: torch.rand(8, 3), [4, 5])


def test_one_draw_whose_shape_changes_is_refused():
    lengths = iter([7, 9])
    with pytest.raises(InputError, match=r"shape \(7,\) .* but \(9,\) in one"):
        window(lambda n: torch.rand(next(lengths)), [4, 4])


def test_an_ambiguous_shape_is_refused():
    with pytest.raises(InputError, match=r"More than one dimension.*shape \(8, 4, 3\).*samples_along\(dim\)"):
        window(lambda n: torch.rand(8, 4, 3), [4])


def test_samples_along_a_wrong_dimension_is_refused():
    def draw(n: int) -> Tensor:
        with samples_along(1):
            return torch.rand(4, 7)

    with pytest.raises(
        InputError, match=r"samples_along\(1\) does not fit aten.rand.default of shape \(4, 7\)"
    ):
        window(draw, [4])


def test_samples_of_different_padding_draw_the_same():
    """A micro-batch that is trimmed to its own longest sample has the masks of the padded batch."""
    long = window(lambda n: torch.rand(n, 2, 9, 3), [12])[0]
    lengths = iter([4, 9, 1])
    short = window(lambda n: torch.rand(n, 2, next(lengths), 3), [4, 4, 4])
    for i, one in enumerate(short[:2]):
        assert torch.equal(one, long[4 * i : 4 * i + 4, :, : one.shape[2]])


# ---- refusals --------------------------------------------------------------------------------------


def packed() -> Any:
    with samples_along(None):  # for the weights, which are made inside the stream
        lstm = nn.LSTM(C, 4, 2, dropout=0.5)
    return lstm(nn.utils.rnn.pack_padded_sequence(torch.ones(4, 3, C), [3, 3, 2, 1], batch_first=True))


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (
            lambda: torch.randperm(4),
            r"aten.randperm.*permutation belongs to the whole batch.*Make the permutation where",
        ),
        (lambda: torch.multinomial(torch.ones(4), 2), r"aten.multinomial.*couples them"),
        (
            lambda: torch.poisson(torch.ones(4, 3)),
            r"aten.poisson.*sample by sample.*remove PerSampleRandom",
        ),
        (lambda: torch.distributions.Gamma(torch.ones(4), 1.0).sample(), r"aten._standard_gamma"),
        (lambda: torch.distributions.Beta(torch.ones(4), 1.0).sample(), r"aten._sample_dirichlet"),
        (lambda: torch.rand(4, generator=torch.Generator()), r"with generator=.*Remove generator="),
        (lambda: torch.rand(4, out=torch.empty(4)), r"aten.rand.out"),
        (lambda: torch.randn(4, dtype=torch.complex64), r"complex64.*real numbers"),
        (lambda: torch.rand(4, dtype=torch.int64), r"int64.*real numbers"),
        (packed, r"PackedSequence.*rows mix samples and times.*padded sequences"),
        (
            lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *[torch.ones(4, 2, 3, 8)] * 3, dropout_p=0.5
            ),
            r"fused kernel draws its dropout itself.*math backend",
        ),
    ],
)
def test_draws_that_cannot_be_made_per_sample_are_refused(draw: Callable[[], Any], text: str):
    before = torch.get_rng_state()
    with pytest.raises(InputError, match=text):
        under(1, 0, draw, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_without_dropout_keeps_its_kernel():
    q = torch.ones(4, 2, 3, 8)
    kernels: list[str] = []

    class KernelRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kernels.append(str(func))
            return func(*args, **(kwargs or {}))

    with KernelRecorder():
        under(1, 0, lambda: F.scaled_dot_product_attention(q, q, q), 4)
    assert [k for k in kernels if "flash" in k]


def test_calls_that_differ_between_microbatches_are_refused():
    draws = iter([lambda n: torch.rand(n), lambda n: torch.randn(n)])
    with pytest.raises(
        InputError, match=r"aten.randn.default was called where another .* called aten.rand.default"
    ):
        window(lambda n: next(draws)(n), [4, 4])


@pytest.mark.parametrize(("first", "samples"), [(0, 0), (-1, 4)])
def test_invalid_positions_are_refused(first: int, samples: int):
    with (
        pytest.raises(InputError, match=rf"first_sample={first}, samples={samples}"),
        sample_stream(1, first, samples),
    ):
        pass


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({}, r"first_sample=None, samples=None is not a position"),
        ({"first_sample": 0}, r"first_sample=0, samples=None is not a position"),
        ({"indices": []}, r"samples=None, indices=\[\] is not a position"),
        ({"indices": [0, -1]}, r"indices=\[0, -1\] is not a position"),
        (
            {"first_sample": 0, "samples": 2, "indices": [0, 1]},
            r"indices=\[0, 1\] is not a position",
        ),
    ],
)
def test_missing_or_conflicting_positions_are_refused(places: Any, text: str):
    with pytest.raises(InputError, match=text), sample_stream(1, **places):
        pass


@pytest.mark.parametrize("order", [[3, 0, 5, 1, 2, 4], range(6), range(5, -1, -1)])
def test_streams_by_index_do_not_depend_on_the_order(order: Sequence[int]):
    def draw(n: int) -> Tensor:
        return torch.cat([F.dropout(torch.ones(n, 7, dtype=torch.float64)), torch.randn(n, 3)], 1)

    with sample_stream(11, 0, 6):
        in_order = draw(6)
    assert in_order.unique(dim=0).shape == in_order.shape  # no two samples draw the same
    for size in (6, 4, 1):
        outputs: list[Tensor] = []
        for start in range(0, 6, size):
            indices = order[start : start + size]
            with sample_stream(11, indices=indices):
                outputs.append(draw(len(indices)))
        assert torch.equal(torch.cat(outputs), in_order[list(order)])


def test_another_thread_does_not_use_the_stream():
    """Modes are thread-local, so a user's thread draws from torch's generator (documented)."""
    import threading

    drawn_there: list[Tensor] = []
    with sample_stream(1, 0, 4):
        state = torch.get_rng_state()
        thread = threading.Thread(target=lambda: drawn_there.append(torch.rand(4)))
        thread.start()
        thread.join()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(4), drawn_there[0])
