"""Under `sample_stream` outputs and gradients do not depend on the split; what cannot be so is refused."""

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
def quiet() -> Iterator[None]:
    """One thread, float64, and a seed of the test's own; all put back."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


class After(nn.Module):
    """A linear layer, and then `noise`."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.linear(x))


class First(nn.Module):
    """A module that returns a tuple, for the first of it; ``swap``: it wants (time, batch, channels)."""

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
    """Noise from a distribution without gradient, times the activations."""
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
    "time first, stated": lambda: After(time_first),
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
    "noise on weights, stated": lambda: After(noise_on_weights),
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
    """Output and gradients of a window, by name."""
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
    whole = run(model, [SAMPLES])
    assert len(whole) > 1 and all(g.abs().max() > 1e-6 for g in whole.values()), "a vacuous case"
    assert not torch.allclose(whole["output"], run(model, [SAMPLES], key=8)["output"]), "nothing random in it"
    for sizes in SPLITS:
        assert_same(run(model, sizes), whole)


def test_torchs_own_dropout_does_depend_on_the_split():
    """What the library would do without: the premise of all the others."""
    x, parts = torch.ones(SAMPLES, C), []
    for piece in [x, *x.split([5, 7])]:
        torch.manual_seed(0)
        parts.append(F.dropout(piece))
    assert not torch.equal(torch.cat(parts[1:]), parts[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_are_identical_in_every_type(dtype: torch.dtype):
    x = torch.ones(SAMPLES, 200, dtype=dtype)
    with sample_stream(3, 0, SAMPLES):
        whole = F.dropout(x)
    assert whole.dtype == dtype
    assert torch.equal(
        torch.cat([under(3, i, lambda i=i: F.dropout(x[i : i + 1])) for i in range(12)]), whole
    )
    assert torch.equal(whole != 0, under(3, 0, lambda: F.dropout(x.double()), SAMPLES) != 0)


def test_autocast():
    linear = nn.Linear(C, C, dtype=torch.float32)
    x = batch().float()

    def forward(part: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.dropout(linear(part))

    whole = under(3, 0, lambda: forward(x), SAMPLES)
    parts = [under(3, i, lambda i=i: forward(x[i : i + 4]), 4) for i in (0, 4, 8)]
    assert whole.dtype == torch.bfloat16
    assert torch.equal(torch.cat(parts), whole)


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
def test_exit_leaves_the_generator_and_the_modes_as_they_were(fails: bool):
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


def test_what_the_generator_was_at_entry_does_not_matter():
    """The user may draw between two micro-batches."""
    first = under(1, 0, lambda: torch.rand(4, 9), 4)
    torch.rand(1)
    assert torch.equal(under(1, 0, lambda: torch.rand(4, 9), 4), first)


def test_keys_name_windows():
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
    # Means of rows and of columns scatter as those of independent numbers do: nothing is shared along either.
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
    """In standard deviations of the correlation of independent numbers."""
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


def test_keys_and_samples_do_not_stand_in_for_one_another():
    """Sample 1 of window 0 is not sample 0 of window 1."""
    grid = np.stack([drawn(lambda: torch.rand(ROWS, 50), key=key) for key in range(20)])
    assert len(np.unique(grid)) == grid.size


def test_bits_of_images_pass_serial_tests():
    """Pairs of neighbours of a channels-by-pixels mask fall into the four cells with equal frequency."""
    mask = drawn(lambda: torch.empty(ROWS, 8, 16, 16).bernoulli_(0.5)).astype(int)
    for axis in range(4):
        a, b = (
            np.take(mask, range(1, mask.shape[axis]), axis),
            np.take(mask, range(mask.shape[axis] - 1), axis),
        )
        assert stats.chisquare(np.bincount((2 * a + b).ravel(), minlength=4)).pvalue > SIGNIFICANT


# ---- which dimension runs over the samples ---------------------------------------------------------


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
def test_shapes_that_are_read_by_convention(shape: Callable[[int], tuple[int, ...]], along: int):
    whole = window(lambda n: torch.rand(shape(n)), [12])[0]
    for sizes in SPLITS:
        assert torch.equal(torch.cat(window(lambda n: torch.rand(shape(n)), sizes), along), whole)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (7, 3)])
def test_one_draw_for_the_whole_batch(shape: tuple[int, ...]):
    whole = window(lambda n: torch.rand(shape), [12])[0]
    for part in window(lambda n: torch.rand(shape), [4, 8]):
        assert torch.equal(part, whole)


def test_a_shape_seen_with_two_numbers_of_samples_is_read_from_them():
    """(8, 3) is 8 rows of 4 samples by convention; beside a batch of 12 it is seen to be one draw for all."""
    draws = window(lambda n: torch.rand(8, 3), [12, 4, 4, 1, 1, 2])
    assert all(torch.equal(draws[0], part) for part in draws[1:])


def test_two_readings_are_settled_by_another_number_of_samples():
    calls: dict[int, Call] = {}
    parts = []
    for first, n in [(0, 12), (0, 4), (4, 8)]:  # the whole, as in a check, and then its parts
        with sample_stream(5, first, n, calls=calls):
            parts.append(torch.rand(8, n, 3))
    assert torch.equal(torch.cat(parts[1:], 1), parts[0])


def test_a_reading_that_another_microbatch_contradicts_is_refused():
    with pytest.raises(InputError, match=r"shape \(8, 3\) in a micro-batch of 4 .* of 5 .*samples_along"):
        window(lambda n: torch.rand(8, 3), [4, 5])


def test_one_draw_whose_shape_changes_is_refused():
    lengths = iter([7, 9])
    with pytest.raises(InputError, match=r"shape \(7,\) .* but \(9,\) in one"):
        window(lambda n: torch.rand(next(lengths)), [4, 4])


def test_two_readings_are_refused():
    with pytest.raises(InputError, match=r"More than one dimension.*shape \(8, 4, 3\).*samples_along\(dim\)"):
        window(lambda n: torch.rand(8, 4, 3), [4])


def test_a_statement_that_does_not_fit_is_refused():
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
    for i, part in enumerate(short[:2]):
        assert torch.equal(part, long[4 * i : 4 * i + 4, :, : part.shape[2]])


# ---- refusals --------------------------------------------------------------------------------------


def packed() -> Any:
    with samples_along(None):  # the weights, which this test makes inside
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
def test_what_cannot_be_drawn_per_sample_is_refused(draw: Callable[[], Any], text: str):
    before = torch.get_rng_state()
    with pytest.raises(InputError, match=text):
        under(1, 0, draw, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_without_dropout_keeps_its_kernel():
    q = torch.ones(4, 2, 3, 8)
    kernels: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kernels.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        under(1, 0, lambda: F.scaled_dot_product_attention(q, q, q), 4)
    assert [k for k in kernels if "flash" in k]


def test_a_path_that_depends_on_the_data_is_refused():
    draws = iter([lambda n: torch.rand(n), lambda n: torch.randn(n)])
    with pytest.raises(
        InputError, match=r"aten.randn.default was called where another .* called aten.rand.default"
    ):
        window(lambda n: next(draws)(n), [4, 4])


@pytest.mark.parametrize(("first", "samples"), [(0, 0), (-1, 4)])
def test_places_that_do_not_exist_are_refused(first: int, samples: int):
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
def test_places_that_are_not_stated_once_are_refused(places: Any, text: str):
    with pytest.raises(InputError, match=text), sample_stream(1, **places):
        pass


@pytest.mark.parametrize("order", [[3, 0, 5, 1, 2, 4], range(6), range(5, -1, -1)])
def test_streams_by_index_do_not_depend_on_the_order(order: Sequence[int]):
    def draw(n: int) -> Tensor:
        return torch.cat([F.dropout(torch.ones(n, 7, dtype=torch.float64)), torch.randn(n, 3)], 1)

    with sample_stream(11, 0, 6):
        straight = draw(6)
    assert straight.unique(dim=0).shape == straight.shape  # no two samples draw the same
    for cut in (6, 4, 1):
        parts: list[Tensor] = []
        for start in range(0, 6, cut):
            indices = order[start : start + cut]
            with sample_stream(11, indices=indices):
                parts.append(draw(len(indices)))
        assert torch.equal(torch.cat(parts), straight[list(order)])


def test_another_thread_is_not_under_the_stream():
    """Modes belong to a thread: what a user's thread draws is its own affair (documented)."""
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
