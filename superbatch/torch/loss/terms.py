"""Several losses of one micro-batch, each with a reduction and a weight of its own.

With the weight ``w_ti`` of micro-batch i in term t and ``W_t = sum_i w_ti`` over micro-batches and ranks::

    L = sum_t sum_i (w_ti / W_t) l_ti          ("sum":  l_ti / W_t;   "total":  l_ti)

Every ``W_t`` is known before the first backward, so a micro-batch has one backward, of
``sum_t (w_ti / W_t) l_ti``. Weights that come with the losses cost a forward without graph for each
micro-batch, before the window.
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
    """Weights of the terms of a loss, as `Weights` of one loss.

    Args:
        terms: their declarations, by name.
        microbatches: of the window, on the host.
        samples: of each micro-batch, where they are known.
        sync: the ranks that share the batch.
        forward: runs `loss_fn` on micro-batches without graph, for the weights that it returns.
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
        # For the record: samples can be counted where terms have weights of their own.
        self._samples: list[int] = samples or [1] * len(microbatches)
        self.returned: dict[int, Number] = {}  # none: all are known ahead
        # One all-reduce for all terms.
        weights, totals = weigh_ahead(lambda: self._weigh(microbatches, samples), len(terms), sync)
        self._terms = {
            name: Weights(
                # No weight is computed: they are given by `ahead`.
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
        """Return an object that takes the losses of a window, of which there are none yet."""
        return TermLosses(self._terms)

    @property
    def ahead(self) -> dict[str, list[Number]]:
        """Weights of each term, by micro-batch."""
        return {name: term.counted([]) for name, term in self._terms.items()}

    def has_none(self, index: int) -> bool:
        """Return whether a micro-batch contributes to no term."""
        return all(term.has_none(index) for term in self._terms.values())

    def may_be_idle(self, index: int) -> bool:
        """Return whether a micro-batch may have a term without weight."""
        return any(term.may_be_idle(index) for term in self._terms.values())

    def scaled(self, index: int, loss: Any, weight: Any) -> list[tuple[Tensor, float]]:
        """Return the tensor to run backward on, with its factor: one sum of all terms.

        A gradient in bfloat16 or float16 would round the factors: such terms have a backward each.

        Raises:
            InputError: the names are not those declared, or there is nothing to differentiate.
            LossSpecError: a weight is another than that of the forward before.
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
            # A term without a graph, e.g. of frozen parameters, counts in the loss alone.
            if one.requires_grad and not term.has_none(index):
                parts.append((one, term.factor(index, None)))
        if not parts:
            # Terms without weight are no error; a loss without any graph is.
            if not any(isinstance(one, Tensor) and one.requires_grad for one in loss.values()):
                check_loss(next(iter(loss.values())))
            return []
        # In bfloat16 the factors of a common sum would be rounded.
        if len(parts) == 1 or any(one.dtype in LOW_PRECISION for one, _ in parts):
            return parts
        first = parts[0][0]
        # Losses may have the shape (1,), and be on several devices.
        total = first.reshape(()) * parts[0][1]
        for one, factor in parts[1:]:
            total = total + one.reshape(()).to(first.device) * factor
        return [(total, 1.0)]

    def weigh_again(self, microbatches: list[Any], samples: list[int] | None) -> None:
        """Weigh the micro-batches again after some were cut differently.

        Raises:
            LossSpecError: the weights of a term have another total than before.
        """
        weights = self._weigh(microbatches, samples)
        self._samples = samples or [1] * len(microbatches)
        for term, each in zip(self._terms.values(), weights, strict=True):
            term.replace(each)

    def adds(self, index: int) -> bool:
        """Return whether a micro-batch contributes to some term."""
        return not self.has_none(index)

    def took_part(self, dropped: list[int]) -> list[int]:
        """Return the micro-batches that contribute to a term."""
        return sorted({index for term in self._terms.values() for index in term.took_part(dropped)})

    def counted(self, dropped: list[int]) -> list[Number]:
        """Return the samples of each micro-batch, 0 for those left out: each term has its own weights."""
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
            LossSpecError: a term has a sum to be divided, and nothing that it is divided by.
        """
        found = {
            name: term.result([one]) for (name, term), one in zip(self._terms.items(), sums, strict=True)
        }
        # Without a weight a term has no loss; without any there is no update.
        counting = [one.loss for one in found.values() if one.weight]
        return WindowLoss(
            sum(counting) if counting else math.nan,
            1 if counting else 0,
            1.0,
            {name: one.loss for name, one in found.items()},
            {name: one.weight for name, one in found.items()},
        )

    def loss_of(self, losses: Mapping[str, list[float]], index: int) -> tuple[float, str]:
        """Return the loss of a micro-batch, and the term that is not finite, if one is not."""
        for name, term in self._terms.items():
            # A NaN in a term without weight enters no sum.
            if not math.isfinite(losses[name][index]) and not term.has_none(index):
                return losses[name][index], name
        counting = [name for name, term in self._terms.items() if not term.has_none(index)]
        return sum(losses[name][index] for name in counting), ""

    def each(self, losses: Mapping[str, list[float]]) -> list[float]:
        """Return the smallest magnitude of each micro-batch's losses: it is 0 where one of them is."""
        # The check of the loss looks for losses of 0 (`check_schedule`).
        return [min(map(abs, row)) for row in zip(*losses.values(), strict=True)]

    def by_name(self, index: int, loss: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the losses of a micro-batch that have a gradient, by the name of the term."""
        counting = {name for name, term in self._terms.items() if not term.has_none(index)}
        return {name: one for name, one in loss.items() if name in counting and one.requires_grad}

    def _weigh(self, microbatches: list[Any], samples: list[int] | None) -> list[list[Number]]:
        returned: list[Mapping[str, Number]] = []
        # A forward without graph for each micro-batch, only where a weight comes with the loss.
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
            # Without a graph, kernels may round in another way.
            if not math.isclose(before, now, rel_tol=1e-5):
                raise LossSpecError(
                    f"The weight of the term {name!r} in micro-batch {index} was {before:g} in a forward "
                    f"without graph, and is {now:g} now. Return a weight of the micro-batch alone."
                )


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


class TermLosses:
    """Losses of the terms, by micro-batch, as `Losses` of one loss.

    Args:
        names: of the terms.
    """

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
        """Return whether all losses of a micro-batch are finite; `on_host`: True for those on a device."""
        return all(each.finite(index, on_host=on_host) for each in self._of.values())

    def on_device(self, index: int) -> list[Tensor]:
        """Return those losses of a micro-batch that are on a device."""
        return [loss for each in self._of.values() for loss in each.on_device(index)]

    def on_host(self, count: int) -> dict[str, list[float]]:
        """Return the losses of micro-batches 0..count-1, by term."""
        return {name: each.on_host(count) for name, each in self._of.items()}

    def empty(self) -> TermLosses:
        """Return one without losses."""
        return TermLosses(self._of)

    def state(self) -> dict[int, dict[str, float]]:
        """Return the losses so far, by micro-batch and term."""
        found = {name: each.state() for name, each in self._of.items()}
        return {index: {name: each[index] for name, each in found.items()} for index in self._first.state()}

    def load_state(self, state: Mapping[int, Mapping[str, float]]) -> None:
        """Resume from what `state` returned."""
        for name, each in self._of.items():
            each.load_state({index: losses[name] for index, losses in state.items()})


def returned_weights(config: Config, microbatches: list[Any]) -> list[Mapping[str, Number]]:
    """Run `loss_fn` on each micro-batch without graph, for the weights that it returns; restore all state.

    Args:
        config: of an accumulator with a loss_fn.
        microbatches: on the host.
    """
    assert config.loss_fn is not None
    # A twin, as the window uses the accumulator's own keeper.
    state, random = config.state.twin(), RandomKeeper(config.random.devices)
    state.begin(check=True)
    random.begin()
    found: list[Mapping[str, Number]] = []
    try:
        # Without a reduction over ranks: no backward follows.
        with torch.no_grad(), config.sync.no_sync(), state.watching(), config.aside():
            for microbatch in microbatches:
                # A copy, since a loss may change its micro-batch in place.
                copied = map_arrays(_copy, microbatch)
                found.append(
                    read_terms(config.loss_fn(to_device(copied, config.device)), config.declared.terms)[1]
                )
                # Each micro-batch from the same state, as in the window itself.
                state.restore()
    finally:
        state.end_check()
        random.restore()
    return found


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, Tensor) else copy(array)
