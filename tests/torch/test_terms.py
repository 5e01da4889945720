"""Several loss terms, each divided by its own weight, in one backward per micro-batch."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from superbatch import NoiseMeter
from superbatch.errors import InputError, LossSpecError, NonFiniteError
from superbatch.torch import Accumulator, Window, at_least, count_tokens, reference, verify
from superbatch.torch.loss.weighing import Weights
from tests.torch.helpers import assert_same_parameters, large_batch, sgd, start_of, tiny_lm, tokens

Batch = dict[str, Tensor]
LENGTHS = [7, 1, 3, 5, 2, 6, 1, 4]


def n_tokens(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


def token_sum(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    return token_sum(model, batch) / n_tokens(batch)


def router_mean(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over samples of the squared last logits."""
    return 0.001 * model(batch["ids"])[:, -1].square().sum(1).mean()


def z_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of a z-loss over all positions, padding included."""
    return 1e-2 * model(batch["ids"]).logsumexp(-1).square().sum()


class Case:
    """Loss terms, their declarations, and their hand-written values on the whole batch."""

    def __init__(
        self,
        losses: Callable[[nn.Module, Batch], Mapping[str, Tensor]],
        whole: Callable[[nn.Module, Batch], Mapping[str, Tensor]],
        **options: Any,
    ) -> None:
        self.losses, self.whole, self.options = losses, whole, options


def _positions(batch: Batch) -> int:
    return batch["ids"].numel()


CASES = {
    "token mean + sample mean": Case(
        lambda m, b: {"tokens": token_mean(m, b), "router": router_mean(m, b)},
        lambda m, b: {"tokens": token_mean(m, b), "router": router_mean(m, b)},
        weight={"tokens": count_tokens("labels"), "router": None},
    ),
    "sums of tokens and positions (z-loss)": Case(
        lambda m, b: {"tokens": token_sum(m, b), "z": z_sum(m, b)},
        lambda m, b: {"tokens": token_sum(m, b) / n_tokens(b), "z": z_sum(m, b) / _positions(b)},
        reduction="sum",
        weight={"tokens": n_tokens, "z": _positions},
    ),
    "a mean, a sum and a total": Case(
        lambda m, b: {"mean": token_mean(m, b), "sum": z_sum(m, b), "total": 0.1 * token_sum(m, b)},
        lambda m, b: {
            "mean": token_mean(m, b),
            "sum": z_sum(m, b) / len(b["ids"]),
            "total": 0.1 * token_sum(m, b),
        },
        reduction={"mean": "mean", "sum": "sum", "total": "total"},
        weight={"mean": n_tokens, "sum": None, "total": None},
    ),
    "reductions only": Case(
        lambda m, b: {"router": router_mean(m, b), "z": z_sum(m, b)},
        lambda m, b: {"router": router_mean(m, b), "z": z_sum(m, b) / len(b["ids"])},
        reduction={"router": "mean", "z": "sum"},
    ),
}


def slices(batch: Batch, *sizes: int) -> list[Batch]:
    assert sum(sizes) == len(batch["ids"])
    columns = {name: value.split(list(sizes)) for name, value in batch.items()}
    return [{name: columns[name][i] for name in columns} for i in range(len(sizes))]


def train(
    case: Case, windows: list[Any], batches: list[Batch], model: nn.Module | None = None, **options: Any
) -> Any:
    reference_model = tiny_lm()
    model = copy.deepcopy(reference_model)
    start = start_of(reference_model)
    seen = large_batch(
        sgd(reference_model.parameters()),
        lambda b: sum(case.whole(reference_model, b).values(), torch.zeros(())),
        batches,
    )
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: case.losses(model, mb), **case.options, **options
    )
    updates = [accumulate(window) for window in windows]
    assert_same_parameters(reference_model, model, 1e-12, start=start)
    for update, loss, norm in zip(updates, seen.losses, seen.norms, strict=True):
        assert update.loss == pytest.approx(loss, rel=1e-11)
        assert update.grad_norm is None or update.grad_norm == pytest.approx(norm, rel=1e-11)
    return updates


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_term_is_divided_by_its_own_weight(name: str, size: int) -> None:
    batches = [tokens(LENGTHS, seed=seed) for seed in (4, 5)]
    assert len({n_tokens(mb) for mb in slices(batches[0], 3, 3, 2)}) == 3, "premise: unequal weights"
    updates = train(CASES[name], batches, batches, microbatch_size=size)
    model = tiny_lm()
    expected = {term: float(loss.detach()) for term, loss in CASES[name].whole(model, batches[0]).items()}
    assert updates[0].losses == pytest.approx(expected, rel=1e-11)
    assert updates[0].weight == 1
    assert set(updates[0].weights) == set(expected)


def test_windows_of_a_loader_with_a_tail() -> None:
    case = CASES["token mean + sample mean"]
    batches = [tokens(LENGTHS), tokens(LENGTHS[:3], seed=9)]
    windows = [Window(slices(batches[0], 1, 5, 2)), Window(slices(batches[1], 2, 1))]
    updates = train(case, windows, batches)
    assert updates[1].weights == {"tokens": 11, "router": 3}


@pytest.mark.parametrize("options", [{"gradient_sum": "momentum"}, {"nonfinite": "skip_update"}], ids=str)
def test_momentum_accumulation_and_skipped_updates(options: Any) -> None:
    batches = [tokens(LENGTHS)]
    train(CASES["token mean + sample mean"], batches, batches, microbatch_size=3, **options)


def test_a_window_loop() -> None:
    case = CASES["token mean + sample mean"]
    batch = tokens(LENGTHS)
    model, whole = tiny_lm(), tiny_lm()
    start = start_of(whole)
    large_batch(
        sgd(whole.parameters()), lambda b: sum(case.whole(whole, b).values(), torch.zeros(())), [batch]
    )
    accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=3, **case.options)
    with accumulator.window(batch) as window:
        for microbatch in window:
            window.backward(case.losses(model, microbatch))
    assert_same_parameters(whole, model, 1e-12, start=start)
    assert window.update is not None
    assert set(window.update.losses) == {"tokens", "router"}


def test_one_backward_per_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    from superbatch.torch.window.participants.parameter_gradients import ParameterGradientSum

    calls: list[float] = []
    plain = ParameterGradientSum.backward

    def counted(self: ParameterGradientSum, loss: Tensor, factor: float, **options: Any) -> None:
        calls.append(factor)
        plain(self, loss, factor, **options)

    monkeypatch.setattr(ParameterGradientSum, "backward", counted)
    batches = [tokens(LENGTHS)]
    train(CASES["a mean, a sum and a total"], batches, batches, microbatch_size=2, check=False)
    assert calls == [1.0] * 4


def test_mutant_with_one_weight_for_all_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: each micro-batch has the same factor, which gives a mean of means."""
    plain = Weights.factor

    def factor(self: Weights, index: int, weight: Any) -> float:
        del weight
        assert self.ahead is not None
        return plain(self, index, None) if len(set(self.ahead)) < 2 else 1 / len(self.ahead)

    monkeypatch.setattr(Weights, "factor", factor)
    batches = [tokens(LENGTHS)]
    with pytest.raises(AssertionError, match="not the update of the large batch"):
        train(CASES["token mean + sample mean"], batches, batches, microbatch_size=2, check=False)


# -- DETR: boxes and classes ---------------------------------------------------------------------------------


def detr(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Class loss over all queries, and a sum over boxes, which is 0 without boxes."""
    logits = model(batch["ids"])
    has_box = batch["labels"] != -100
    boxes = (logits[has_box] - 1).abs().sum() if has_box.any() else torch.zeros((), dtype=logits.dtype)
    return {"class": logits.square().mean(), "boxes": 5 * boxes}


def detr_whole(bound: float = 0.0) -> Callable[[nn.Module, Batch], dict[str, Tensor]]:
    def whole(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        found = detr(model, batch)
        return {"class": found["class"], "boxes": found["boxes"] / max(n_tokens(batch), bound)}

    return whole


DETR: dict[str, Any] = {
    "reduction": {"class": "mean", "boxes": "sum"},
    "weight": {"class": None, "boxes": at_least(1, n_tokens)},
}


def test_detr_with_a_microbatch_without_boxes() -> None:
    batch = tokens([5, 1, 0, 0, 3, 2])
    assert [n_tokens(mb) for mb in slices(batch, 2, 2, 2)] == [6, 0, 5]
    (update,) = train(Case(detr, detr_whole(), **DETR), [batch], [batch], microbatch_size=2)
    assert update.weights == {"class": 6, "boxes": 11}
    empty = tokens([0, 0, 0])
    (update,) = train(Case(detr, detr_whole(1.0), **DETR), [empty], [empty], microbatch_size=1, check=False)
    assert update.weights == {"class": 3, "boxes": 1}


def test_the_error_of_a_sum_without_weight_names_its_term() -> None:
    model = tiny_lm()
    start = start_of(model)
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: {"class": model(mb["ids"]).square().mean(), "boxes": model(mb["ids"]).sum()},
        reduction={"class": "mean", "boxes": "sum"},
        weight={"class": None, "boxes": n_tokens},
        microbatch_size=2,
        check=False,
    )
    with pytest.raises(LossSpecError, match=r"term 'boxes'.*weight=\{'boxes': at_least\(1, \.\.\.\)\}"):
        accumulate(tokens([0, 0, 0]))
    assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


def test_a_mean_over_no_elements_is_skipped_and_reported_as_nan() -> None:
    def losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = model(batch["ids"])
        kept = logits.flatten(0, 1)[batch["labels"].flatten() != -100]
        return {"all": logits.square().mean(), "boxes": kept.exp().mean()}

    options: dict[str, Any] = {"weight": {"all": None, "boxes": n_tokens}}
    batch = tokens([5, 0, 0, 2])
    assert losses(tiny_lm(), slices(batch, 1, 2, 1)[1])["boxes"].isnan()
    train(Case(losses, losses, **options), [Window(slices(batch, 1, 2, 1))], [batch])
    model = tiny_lm()
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: losses(model, mb),
        microbatch_size=1,
        check=False,
        **options,
    )
    update = accumulate(tokens([0, 0]))
    assert update.made
    assert math.isnan(update.losses["boxes"])
    assert update.loss == update.losses["all"]


# -- CTC + attention -----------------------------------------------------------------------------------------


def ctc_and_attention(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """CTC loss (a mean over utterances) and attention loss (a mean over tokens)."""
    lengths = (batch["labels"] != -100).sum(1)
    scores = model(batch["ids"]).log_softmax(-1).transpose(0, 1)
    labels = batch["labels"].clamp_min(1)
    frames = torch.full_like(lengths, scores.shape[0])
    ctc = nn.functional.ctc_loss(scores, labels, frames, lengths, reduction="none", zero_infinity=True)
    return {"ctc": 0.3 * ctc.mean(), "attention": 0.7 * token_mean(model, batch)}


def test_ctc_and_attention() -> None:
    batch = tokens([3, 1, 2, 1, 3, 2])
    case = Case(ctc_and_attention, ctc_and_attention, weight={"ctc": None, "attention": n_tokens})
    train(case, [batch], [batch], microbatch_size=2)


# -- weights returned with the losses ------------------------------------------------------------------------


def losses_and_weights(model: nn.Module, batch: Batch) -> Any:
    return {"tokens": token_mean(model, batch), "router": router_mean(model, batch)}, {
        "tokens": n_tokens(batch)
    }


def test_weights_returned_with_the_losses() -> None:
    case = CASES["token mean + sample mean"]
    calls = [0]

    def losses(model: nn.Module, batch: Batch) -> Any:
        calls[0] += 1
        assert torch.is_grad_enabled() == (calls[0] > 3)
        return losses_and_weights(model, batch)

    batch = tokens(LENGTHS)
    options: dict[str, Any] = {"weight": {"tokens": "returned", "router": None}}
    train(Case(losses, case.whole, **options), [batch], [batch], microbatch_size=3, check=False)
    assert calls == [6], "one forward without graph and one with, for each of 3 micro-batches"


def test_the_forward_for_the_weights_restores_inputs_and_generators() -> None:
    """The extra forward does not change the inputs or the random numbers."""
    found = []
    for weight in ("returned", n_tokens):
        torch.manual_seed(7)
        model = tiny_lm()

        def losses(mb: Batch, model: nn.Module = model, weight: Any = weight) -> Any:
            kept = {name: value.clone() for name, value in mb.items()}
            mb["ids"].zero_()
            noisy = {
                "tokens": token_mean(model, kept) * (1 + torch.rand(())),
                "router": router_mean(model, kept),
            }
            return (noisy, {"tokens": n_tokens(kept)}) if weight == "returned" else noisy

        torch.manual_seed(3)
        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            losses,
            microbatch_size=3,
            weight={"tokens": weight, "router": None},
            check=False,
        )
        found.append((accumulate(tokens(LENGTHS)).loss, torch.rand(())))
    assert found[0] == found[1]


def test_a_returned_weight_that_changes_raises() -> None:
    model, weights = tiny_lm(), iter(range(1, 99))
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: ({"a": token_mean(model, mb)}, {"a": next(weights)}),
        microbatch_size=3,
        weight={"a": "returned"},
        check=False,
    )
    with pytest.raises(LossSpecError, match="weight of the term 'a' in micro-batch 0 was 1"):
        accumulate(tokens(LENGTHS))


# -- invalid options ----------------------------------------------------------------------------------------


def _two_terms(weight: Any = None, **options: Any) -> dict[str, Any]:
    return {"weight": {"a": None, "b": n_tokens} if weight is None else weight, **options}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (_two_terms(reduction={"a": "mean", "c": "sum"}), r"\['a', 'b'\].*\['a', 'c'\]"),
        (_two_terms(nonfinite="skip_microbatch"), "skip_microbatch"),
        (_two_terms(observers=[NoiseMeter()]), "measures one loss with one weight"),
        (_two_terms(weight={}), "Name each term"),
        (_two_terms(weight={1: None}), "Name each term"),
        (_two_terms(weight={"a": 3}), "term 'a'"),
        (_two_terms(weight={"a": "samples"}), "term 'a'"),
        (_two_terms(reduction={"a": "mean", "b": "total"}), "is not divided by a weight"),
        (_two_terms({"a": at_least(-1)}), r"at_least\(-1\) is not positive and finite"),
        (_two_terms({"a": at_least(1, cast("Any", "samples"))}), "term 'a'"),
        (_two_terms({"a": at_least(1)}, reduction="total"), "is not divided by a weight"),
        ({"weight": n_tokens, "reduction": {"a": "sum"}}, "mapping with the same names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),  # addresses differ between runs
)
def test_invalid_options_raise(options: dict[str, Any], text: str) -> None:
    model = tiny_lm()
    with pytest.raises(InputError, match=text):
        Accumulator(model, sgd(model.parameters()), lambda mb: {}, **options)


def test_returned_weights_need_a_loss_fn() -> None:
    model = tiny_lm()
    with pytest.raises(InputError, match="needs loss_fn, which is run once more"):
        Accumulator(model, sgd(model.parameters()), weight={"a": "returned"})


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("losses", "text"),
    [
        (lambda a, first: {"a": a}, r"losses named \['a'\].*\['a', 'b'\]"),
        (lambda a, first: {"a": a, "b": a, "c": a}, r"\['a', 'b', 'c'\]"),
        (lambda a, first: {"a": a, "b": a} if first else {"a": a, "c": a}, r"\['a', 'c'\]"),
        (lambda a, first: a, "returned a Tensor"),
        (lambda a, first: {"a": a, "b": 1.0}, "term 'b' is a float"),
        (lambda a, first: {"a": a, "b": torch.stack([a, a])}, "term 'b' is a tensor of shape"),
    ],
)
def test_losses_that_differ_from_the_declared_terms_raise(losses: Any, text: str, check: bool) -> None:
    model = tiny_lm()
    start = start_of(model)
    batch = tokens(LENGTHS)
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: losses(token_mean(model, mb), bool((mb["labels"][0] == batch["labels"][0]).all())),
        microbatch_size=4,
        check=check,
        weight={"a": n_tokens, "b": n_tokens},
    )
    with pytest.raises((InputError, KeyError), match=None if check else text):
        accumulate(batch)
    assert all(torch.equal(p, start[n]) and p.grad is None for n, p in model.named_parameters())


def test_a_mapping_without_declared_terms_raises() -> None:
    model = tiny_lm()
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: {"a": token_mean(model, mb)}, check=False
    )
    with pytest.raises(InputError, match=r"keys \['a'\].*weight=\{'a': ...\}"):
        accumulate(tokens(LENGTHS))


def test_the_check_covers_each_term() -> None:
    model = tiny_lm()
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: {"tokens": token_mean(model, mb), "router": router_mean(model, mb)},
        weight={"tokens": n_tokens, "router": n_tokens},  # the router's loss is a mean over samples
        microbatch_size=4,
    )
    with pytest.raises((LossSpecError, RuntimeError), match="term 'router'"):
        accumulate(tokens(LENGTHS))


def test_the_error_of_a_non_finite_loss_names_its_term() -> None:
    model = tiny_lm()

    def losses(mb: Batch, *, gradient: bool) -> dict[str, Tensor]:
        bad = (mb["labels"] == 5).any()
        router = router_mean(model, mb)
        if bad:
            router = torch.sqrt(router - router.detach()) if gradient else router * math.nan
        return {"tokens": token_mean(model, mb), "router": router}

    batch = tokens(LENGTHS)
    bad = [i for i, mb in enumerate(slices(batch, 2, 2, 2, 2)) if (mb["labels"] == 5).any()]
    assert bad
    for gradient in (False, True):
        start = start_of(model)
        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            lambda mb, gradient=gradient: losses(mb, gradient=gradient),
            weight={"tokens": n_tokens, "router": None},
            microbatch_size=2,
            check=False,
        )
        with pytest.raises(NonFiniteError, match=f"micro-batch {bad[0]} .*term 'router'"):
            accumulate(batch)
        assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


# -- the reference gradient and verify -----------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_reference_gradient_is_that_of_the_large_batch(name: str) -> None:
    case, batch, model = CASES[name], tokens(LENGTHS), tiny_lm()
    microbatches = slices(batch, 1, 4, 3)
    reductions, weights = case.options.get("reduction", "mean"), case.options.get("weight", {})
    terms: list[Any] = []
    for term in case.whole(model, batch):
        weigh = weights.get(term)
        terms.append(
            (
                reductions[term] if isinstance(reductions, dict) else reductions,
                lambda mb, term=term: case.losses(model, mb)[term],
                [len(mb["ids"]) if weigh is None else weigh(mb) for mb in microbatches],
            )
        )
    found, loss = reference.gradient(model.parameters(), microbatches, terms)
    whole = sum(case.whole(model, batch).values(), torch.zeros(()))
    assert loss == pytest.approx(whole.item(), rel=1e-12)
    for one, other in zip(found, torch.autograd.grad(whole, list(model.parameters())), strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 1e-12 * other.norm()


@pytest.mark.parametrize("name", CASES)
def test_verify_compares_all_terms_of_a_right_declaration(name: str) -> None:
    case, model, batch = CASES[name], tiny_lm(), tokens(LENGTHS)
    report = verify(model, lambda mb: case.losses(model, mb), batch, microbatch_size=3, **case.options)
    assert report.exact and not report.causes, report
    named = [one.term for one in report.comparisons]
    assert len(named) > 1 and named == list(case.losses(model, batch))


@pytest.mark.parametrize("share", [1.0, 1e-13])
def test_verify_names_a_wrongly_declared_term(share: float) -> None:
    """A term is checked alone, even if it is too small to change the summed gradient."""
    model, batch = tiny_lm(), tokens(LENGTHS)

    def losses(mb: Batch) -> Mapping[str, Tensor]:
        return {"router": router_mean(model, mb) * 1e3, "tokens": share * token_mean(model, mb)}

    report = verify(model, losses, batch, microbatch_size=3, weight={"router": None, "tokens": None})
    assert not report.exact
    assert [(cause.kind, cause.term) for cause in report.causes] == [("weight", "tokens")]
    assert "weight in loss_fn, term 'tokens'" in str(report) and "tokens: float64 vs batch" in str(report)
    assert {one.term: one.exact for one in report.comparisons} == {"router": True, "tokens": False}
    together = verify(model, lambda mb: sum(losses(mb).values()), batch, microbatch_size=3, dtype="float64")
    assert together.comparisons[0].exact == (share < 1), "premise: the sum hides the small term"


def test_verify_checks_the_names_of_terms() -> None:
    model, batch = tiny_lm(), tokens(LENGTHS)
    losses = CASES["token mean + sample mean"].losses
    with pytest.raises(
        InputError, match=r"named \['tokens', 'router'\], but the declared losses are \['tokens'\]"
    ):
        verify(model, lambda mb: losses(model, mb), batch, microbatch_size=3, weight={"tokens": n_tokens})
    assert verify(
        model, lambda mb: losses(model, mb)["tokens"], batch, microbatch_size=3, weight=n_tokens
    ).exact


def test_verify_checks_reduction_total() -> None:
    model, batch = tiny_lm(), tokens(LENGTHS)
    assert verify(model, lambda mb: token_sum(model, mb), batch, microbatch_size=3, reduction="total").exact
    found = verify(model, lambda mb: token_mean(model, mb), batch, microbatch_size=3, reduction="total")
    assert not found.exact
    assert found.causes


def test_the_forward_for_the_weights_restores_buffers_and_attributes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_lm()
            self.register_buffer("calls", torch.zeros(()))
            self.bank = torch.zeros(2)

        def forward(self, ids: Tensor) -> Tensor:
            assert isinstance(self.calls, Tensor)
            self.calls += 1
            self.bank = self.bank + 1
            return self.inner(ids)

    model = Counting()
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: ({"a": token_mean(model, mb)}, {"a": n_tokens(mb)}),
        microbatch_size=3,
        weight={"a": "returned"},
        check=False,
    )
    assert accumulate(tokens(LENGTHS)).made
    assert float(model.calls) == 3
    assert model.bank.tolist() == [3, 3]


@pytest.mark.parametrize("after", [1, 2])
def test_an_open_window_resumes_bitwise_equal(after: int) -> None:
    case, batch, state = CASES["a mean, a sum and a total"], tokens(LENGTHS), None
    results = []
    for broken in (False, True):
        model = tiny_lm()
        accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=3, **case.options)
        left = pytest.raises(ZeroDivisionError) if broken else contextlib.nullcontext()
        with left, accumulator.window(batch) as window:
            for number, microbatch in enumerate(window, 1):
                window.backward(case.losses(model, microbatch))
                if broken and number == after:
                    state = copy.deepcopy(accumulator.state_dict())
                    raise ZeroDivisionError
        if broken:
            assert state is not None
            accumulator = Accumulator(model, sgd(model.parameters()), microbatch_size=3, **case.options)
            accumulator.load_state_dict(state)
            with accumulator.window(batch) as window:
                for microbatch in window:
                    window.backward(case.losses(model, microbatch))
        assert window.update is not None
        results.append(([p.detach().clone() for p in model.parameters()], window.update))
    (one, first), (other, second) = results
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert (first.losses, first.weights) == (second.losses, second.weights)
    assert first.loss == second.loss


def test_terms_with_a_gradient_scaler() -> None:
    batches = [tokens(LENGTHS)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    train(CASES["token mean + sample mean"], batches, batches, microbatch_size=3, scaler=scaler)


def test_terms_in_bfloat16_keep_their_factors() -> None:
    """Each bfloat16 loss has its own backward, so its factor is not rounded."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(1, 4, (7, 4), generator=generator).float() * 2.0**-3
    counts = torch.tensor([2.0, 1.0, 1.0, 2.0, 4.0, 1.0, 1.0])

    def losses(model: nn.Linear, mb: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        each = (mb[0] * model.weight).sum(1)
        return {"samples": each.mean().bfloat16(), "sum": (each * mb[1]).sum().bfloat16()}

    model = nn.Linear(4, 1, bias=False)
    found: list[Tensor] = []
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: found.append(model.weight.grad.clone()))  # pyright: ignore[reportOptionalMemberAccess]
    accumulate = Accumulator(
        model,
        optimizer,
        lambda mb: losses(model, mb),
        reduction={"samples": "mean", "sum": "sum"},
        weight={"samples": None, "sum": lambda mb: float(mb[1].sum())},
        check=False,
    )
    microbatches = [(x[i:j], counts[i:j]) for i, j in ((0, 1), (1, 3), (3, 7))]
    accumulate(Window(microbatches))
    wanted = x.double().mean(0) + (x.double() * counts.double().unsqueeze(1)).sum(0) / 12
    assert float((found[0][0].double() - wanted).norm() / wanted.norm()) < 5e-7
