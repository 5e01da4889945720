"""Several losses of one micro-batch, each with its own reduction and weight.

With the weight ``w_ti`` of micro-batch i in term t and ``W_t = sum_i w_ti`` over micro-batches and ranks::

    L = sum_t sum_i (w_ti / W_t) l_ti          ("sum":  l_ti / W_t;   "total":  l_ti)

Every ``W_t`` is known before the first backward, so a micro-batch has one backward, of
``sum_t (w_ti / W_t) l_ti``. For weights declared as ``"returned"``, each micro-batch has one more forward,
without a graph, before the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from superbatch import normalize
from superbatch.batch.tree import map_arrays
from superbatch.errors import InputError, LossSpecError

from ..window.config import Config
from ..window.participants.gradient_sum import LOW_PRECISION
from ..window.participants.snapshot import RandomKeeper
from ..window.sync.sync import Sync
from ..window.transfer import to_device
from .declared import Declared, check_names, read_terms
from .losses import Losses, Sum, WindowLoss, check_loss
from .weighing import Weights, weigh_ahead, weights_of

Number = normalize.Number
Forward = Callable[[list[Any]], list[Mapping[str, Number]]]


class TermWeights:
    """Weights of all terms of a loss; `Weights` is the class for a single loss.

    Args:
        terms: declarations of the terms, by name.
        microbatches: the micro-batches of the window, on the host.
        samples: number of samples of each micro-batch; None if unknown.
        sync: the ranks that share the batch.
        forward: runs `loss_fn` on micro-batches without a graph, for the weights that it returns.
    """

    def __init__(
        self,
        terms: Mapping[str, Declared],
        microbatches: list[Any],
        samples: list[int] | None,
        sync: Sync,
        forward: Forward,
    ) -> None:
        self._declared = terms
        self._forward = forward
        # `counted` returns samples, because each term has its own weights.
        self._samples: list[int] = samples or [1] * len(microbatches)
        self.returned: dict[int, Number] = {}  # stays empty, because all weights are known before the window
        # One all-reduce for all terms.
        weights, totals = weigh_ahead(lambda: self._weigh(microbatches, samples), len(terms), sync)
        self._terms = {
            name: Weights(
                # Not used, because `ahead` has the weights.
                "samples",
                term.reduction,
                microbatches,
                samples,
                sync,
                min_weight=term.min_weight,
                ahead=(each, total),
                term=name,
            )
            for (name, term), each, total in zip(terms.items(), weights, totals, strict=True)
        }

    def new_losses(self) -> TermLosses:
        """Return an empty object for the losses of the window."""
        return TermLosses(self._terms)

    @property
    def ahead(self) -> dict[str, list[Number]]:
        """Weights of each term, by micro-batch."""
        return {name: term.counted([]) for name, term in self._terms.items()}

    def is_known_zero(self, index: int) -> bool:
        """Return whether the weights of a micro-batch are known to be 0 in all terms."""
        return all(term.is_known_zero(index) for term in self._terms.values())

    def may_have_zero_weight(self, index: int) -> bool:
        """Return whether a micro-batch may have a term of weight 0."""
        return any(term.may_have_zero_weight(index) for term in self._terms.values())

    def scaled(self, index: int, loss: Any, weight: Any) -> list[tuple[Tensor, float]]:
        """Return the sum of all terms to run backward on, with its factor.

        Terms in bfloat16 or float16 are returned one by one, because their sum would round the factors.

        Raises:
            InputError: the names differ from the declared ones, or no loss has a graph.
            LossSpecError: a weight differs from that of the forward before the window.
        """
        check_names("losses", loss, self._terms)
        self._check_returned(index, weight)
        parts: list[tuple[Tensor, float]] = []
        for name, term in self._terms.items():
            one = loss[name]
            if not isinstance(one, Tensor) or one.numel() != 1 or not one.is_floating_point():
                raise InputError(
                    f"The loss of the term {name!r} is {_form(one)}. Return a tensor with one real number."
                )
            # A term without a graph, e.g. of frozen parameters, counts only in the loss.
            if one.requires_grad and not term.is_known_zero(index):
                parts.append((one, term.factor(index, None)))
        if not parts:
            # No term has a graph: `check_loss` raises. If all have weight 0, there is nothing to do.
            if not any(isinstance(one, Tensor) and one.requires_grad for one in loss.values()):
                check_loss(next(iter(loss.values())))
            return []
        if len(parts) == 1 or any(one.dtype in LOW_PRECISION for one, _ in parts):
            return parts
        first = parts[0][0]
        # Losses may have the shape (1,) and be on different devices.
        total = first.reshape(()) * parts[0][1]
        for one, factor in parts[1:]:
            total = total + one.reshape(()).to(first.device) * factor
        return [(total, 1.0)]

    def weigh_again(self, microbatches: list[Any], samples: list[int] | None) -> None:
        """Compute the weights again after micro-batches were cut differently.

        Raises:
            LossSpecError: the total weight of a term has changed.
        """
        weights = self._weigh(microbatches, samples)
        self._samples = samples or [1] * len(microbatches)
        for term, each in zip(self._terms.values(), weights, strict=True):
            term.replace(each)

    def contributes(self, index: int) -> bool:
        """Return whether a micro-batch contributes to some term."""
        return not self.is_known_zero(index)

    def took_part(self, dropped: list[int]) -> list[int]:
        """Return the micro-batches that contribute to a term."""
        return sorted({index for term in self._terms.values() for index in term.took_part(dropped)})

    def counted(self, dropped: list[int]) -> list[Number]:
        """Return the number of samples of each micro-batch, 0 for those left out, in place of weights."""
        return [0 if index in dropped else count for index, count in enumerate(self._samples)]

    def not_finite(self, losses: Mapping[str, list[float]], dropped: list[int]) -> list[int]:
        """Return the micro-batches with a loss that is in a sum and not finite."""
        return sorted(
            {index for name, term in self._terms.items() for index in term.not_finite(losses[name], dropped)}
        )

    def sums(self, losses: Mapping[str, list[float]], dropped: list[int]) -> list[Sum]:
        """Return the sums of losses and weights on this rank, by term."""
        return [term.sums(losses[name], dropped)[0] for name, term in self._terms.items()]

    def result(self, sums: list[Sum]) -> WindowLoss:
        """Return the loss of the batch, and each term's, from the sums over all ranks.

        Raises:
            LossSpecError: a loss of a term is not 0, but the weight of the term is.
        """
        found = {
            name: term.result([one]) for (name, term), one in zip(self._terms.items(), sums, strict=True)
        }
        # A term of weight 0 has no loss. If all have weight 0, there is no update.
        counting = [one.loss for one in found.values() if one.weight]
        return WindowLoss(
            sum(counting) if counting else math.nan,
            1 if counting else 0,
            1.0,
            {name: one.loss for name, one in found.items()},
            {name: one.weight for name, one in found.items()},
        )

    def loss_of(self, losses: Mapping[str, list[float]], index: int) -> tuple[float, str]:
        """Return the loss of a term that is not finite, and its name; if all are finite, their sum and ""."""
        for name, term in self._terms.items():
            # A NaN in a term of weight 0 is in no sum.
            if not math.isfinite(losses[name][index]) and not term.is_known_zero(index):
                return losses[name][index], name
        counting = [name for name, term in self._terms.items() if not term.is_known_zero(index)]
        return sum(losses[name][index] for name in counting), ""

    def one_per_microbatch(self, losses: Mapping[str, list[float]]) -> list[float]:
        """Return the smallest magnitude of each micro-batch's losses, which is 0 if one of them is 0."""
        # `check_schedule` uses it to detect the first loss that is not 0.
        return [min(map(abs, row)) for row in zip(*losses.values(), strict=True)]

    def by_name(self, index: int, loss: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the losses of a micro-batch that have a gradient, by the name of the term."""
        counting = {name for name, term in self._terms.items() if not term.is_known_zero(index)}
        return {name: one for name, one in loss.items() if name in counting and one.requires_grad}

    def _weigh(self, microbatches: list[Any], samples: list[int] | None) -> list[list[Number]]:
        returned: list[Mapping[str, Number]] = []
        # One more forward for each micro-batch, if loss_fn returns a weight.
        if any(term.returned for term in self._declared.values()):
            returned = self._forward(microbatches)
        return [
            [
                normalize.check_weight(one[name], f"micro-batch {i} ({name!r})")
                for i, one in enumerate(returned)
            ]
            if term.weigh == "returned"
            else weights_of(term.weigh, microbatches, samples)
            for name, term in self._declared.items()
        ]

    def _check_returned(self, index: int, weight: Any) -> None:
        expected = [name for name, term in self._declared.items() if term.returned]
        if weight is None:
            weight = {}
        check_names("weights", weight, expected)
        for name in expected:
            before = self._terms[name].counted([])[index]
            now = normalize.check_weight(weight[name], f"micro-batch {index} ({name!r})")
            # Not exactly, because kernels may round differently without a graph.
            if not math.isclose(before, now, rel_tol=1e-5):
                raise LossSpecError(
                    f"The weight of the term {name!r} in micro-batch {index} was {before:g} in a forward "
                    f"without a graph, but is {now:g} now. Return a weight that depends only on the "
                    "micro-batch."
                )


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


class TermLosses:
    """Losses of all terms, by micro-batch; `Losses` is the class for a single loss."""

    def __init__(self, names: Collection[str]) -> None:
        self._of = {name: Losses() for name in names}
        self._first = next(iter(self._of.values()))

    def __contains__(self, index: int) -> bool:
        return index in self._first

    def __len__(self) -> int:
        return len(self._first)

    def read(self, index: int, loss: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        """Return the sums for `add`."""
        return {name: each.read(index, loss[name]) for name, each in self._of.items()}

    def add(self, index: int, total: Mapping[str, float | Tensor]) -> None:
        """Record the result of `read`."""
        for name, each in self._of.items():
            each.add(index, total[name])

    def finite(self, index: int, *, on_host: bool = False) -> bool:
        """Return whether the losses are all finite; with `on_host`, one on a device counts as finite."""
        return all(each.finite(index, on_host=on_host) for each in self._of.values())

    def on_device(self, index: int) -> list[Tensor]:
        """Return those losses of a micro-batch that are on a device."""
        return [loss for each in self._of.values() for loss in each.on_device(index)]

    def on_host(self, count: int) -> dict[str, list[float]]:
        """Return the losses of micro-batches 0..count-1, by term."""
        return {name: each.on_host(count) for name, each in self._of.items()}

    def empty(self) -> TermLosses:
        """Return a new object without losses."""
        return TermLosses(self._of)

    def state(self) -> dict[int, dict[str, float]]:
        """Return the losses so far, by micro-batch and term."""
        found = {name: each.state() for name, each in self._of.items()}
        return {index: {name: each[index] for name, each in found.items()} for index in self._first.state()}

    def load_state(self, state: Mapping[int, Mapping[str, float]]) -> None:
        """Load the losses of `state`."""
        for name, each in self._of.items():
            each.load_state({index: losses[name] for index, losses in state.items()})


def returned_weights(config: Config, microbatches: list[Any]) -> list[Mapping[str, Number]]:
    """Run `loss_fn` on each micro-batch without a graph, return its weights, and restore all state."""
    assert config.loss_fn is not None
    # Another keeper, because the window uses the accumulator's own.
    state, random = config.state.new_keeper(), RandomKeeper(config.random.devices)
    state.begin(check=True)
    random.begin()
    found: list[Mapping[str, Number]] = []
    try:
        # no_sync(), because no backward follows that would reduce gradients.
        with torch.no_grad(), config.sync.no_sync(), state.watching(), config.outside_window():
            for microbatch in microbatches:
                # A copy, because a loss may change its micro-batch in place.
                copied = map_arrays(_copy, microbatch)
                found.append(
                    read_terms(config.loss_fn(to_device(copied, config.device)), config.declared.terms)[1]
                )
                state.restore()
    finally:
        state.end_check()
        random.restore()
    return found


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, Tensor) else copy(array)
