"""Problem to check: a model, its loss and its declaration; and the evaluation of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from superbatch.batch.tree import count_samples
from superbatch.errors import InputError
from superbatch.normalize import Number, Reduction, check_weight
from superbatch.torch.loss.declared import Declared, read_terms
from superbatch.torch.loss.losses import pair_of
from superbatch.torch.window.participants.forward_state_keeper import ForwardStateKeeper
from superbatch.torch.window.slips import without_tensor

from .resample import converted

LossFn = Callable[[Any], Any]
WeightOption = Callable[[Any], Any] | Literal["returned"] | None


@dataclass(frozen=True)
class Problem:
    """Model and loss, with the declaration to check.

    Args:
        model: module with the parameters.
        loss_fn: function from a micro-batch to a scalar tensor; to (loss, weight) with `weight="returned"`.
        reduction: reduction of the loss that `loss_fn` returns.
        weight: weights of micro-batches (None: by samples).
        unsplit: paths of leaves that every micro-batch gets in full.
        per_sample: paths of lists with one entry for each sample.
        dtype: dtype for the floating-point tensors of batches; None keeps their own.
        state: keeper of the state that a forward changes; None before the first forward.
        terms: declaration of each term if `loss_fn` returns several by name (`by_term`); then `reduction` and
            `weight` are unused.
        announce: function to call before each forward, if forwards wait for those of other ranks
            (`announcing`). Then only losses are compared, because no rank has a full gradient of sharded
            parameters.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> problem = Problem(layer, lambda x: layer(x).mean())
        >>> loss, weight = evaluate(problem, torch.ones(3, 2))
        >>> weight
        3
    """

    model: nn.Module
    loss_fn: LossFn
    reduction: Reduction = "mean"
    weight: WeightOption = None
    unsplit: Collection[str] = ()
    per_sample: Collection[str] = ()
    dtype: torch.dtype | None = None
    state: ForwardStateKeeper | None = None
    terms: Mapping[str, Declared] = field(default_factory=dict)
    announce: Callable[[], object] | None = None

    def in_dtype(self, dtype: torch.dtype | None) -> Problem:
        """Return the same problem with batches of another dtype."""
        return replace(self, dtype=dtype)

    @property
    def paths(self) -> dict[str, Collection[str]]:
        """The options `unsplit` and `per_sample`, as arguments of functions that split a batch."""
        return {"unsplit": self.unsplit, "per_sample": self.per_sample}

    @property
    def device(self) -> torch.device | None:
        """Device of the model's first parameter; None for a model without parameters."""
        # A model on several devices moves its inputs from the first one itself.
        return next((parameter.device for parameter in self.model.parameters()), None)


def by_term(problem: Problem) -> dict[str, Problem]:
    """Return one problem for each term of a loss, by name; ``{"": problem}`` without terms.

    Examples:
        >>> terms = {"a": Declared("sum"), "b": Declared("mean")}
        >>> losses = lambda x: {"a": x.sum(), "b": x.mean()}
        >>> parts = by_term(Problem(nn.Linear(1, 1), losses, terms=terms))
        >>> parts["a"].reduction, evaluate(parts["a"], torch.ones(2))
        ('sum', (tensor(2.), 2))
    """
    return {
        name: replace(
            problem,
            loss_fn=partial(_term_of, problem.loss_fn, name, problem.terms),
            reduction=term.reduction,
            # A single loss declares weights by samples as None.
            weight=None if term.weigh == "samples" else term.weigh,
            terms={},
        )
        for name, term in problem.terms.items()
    } or {"": problem}


def _term_of(loss_fn: LossFn, name: str, terms: Mapping[str, Declared], microbatch: Any) -> Any:
    losses, weights = read_terms(loss_fn(microbatch), terms)
    # `weights` has only the terms that return their weight.
    return (losses[name], weights[name]) if name in weights else losses[name]


def forward(problem: Problem, batch: Any) -> Any:
    """Return the unchecked result of `loss_fn` for a batch in the problem's dtype, on the model's device.

    Examples:
        >>> forward(Problem(nn.Linear(1, 1), lambda x: x.sum()), torch.ones(2))
        tensor(2.)
    """
    # Before anything can raise: the other ranks run a forward together with this one.
    if problem.announce is not None:
        problem.announce()
    # To the device to which training moves its micro-batches.
    return problem.loss_fn(converted(batch, problem.dtype, problem.device))


def evaluate(problem: Problem, batch: Any) -> tuple[Tensor, Number]:
    """Call the loss function once; return the loss, a scalar tensor with its graph, and the weight.

    Raises:
        InputError: `loss_fn` does not return a scalar tensor (and a weight where it should).

    Examples:
        >>> evaluate(Problem(nn.Linear(1, 1), lambda x: x.sum()), torch.ones(2))
        (tensor(2.), 2)
    """
    returned, declared = forward(problem, batch), problem.weight == "returned"
    loss, weight = pair_of(returned) if declared else (returned, None)
    # Common mistakes, such as a number from .item(), have a message of their own.
    if not isinstance(loss, Tensor):
        raise without_tensor(loss)
    if loss.numel() != 1:
        raise InputError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)} instead of one number. Return a scalar "
            'tensor with a graph, or (loss, weight) with weight="returned".'
        )
    # A returned weight is known only after the forward.
    weight = check_weight(weight, "a micro-batch") if declared else weigh(problem, batch)
    if not weight and not loss.requires_grad and loss.is_floating_point():
        loss = loss.detach().clone().requires_grad_()  # a sum over nothing may be a constant, without a graph
    return loss, weight


def weigh(problem: Problem, batch: Any) -> Number:
    """Return the declared weight of a micro-batch; its number of samples with ``weight="returned"``.

    Examples:
        >>> weigh(Problem(nn.Linear(1, 1), lambda x: x.sum(), weight=lambda x: 0.5), torch.ones(2))
        0.5
    """
    if callable(problem.weight):
        return check_weight(problem.weight(batch), "a micro-batch")
    # With "returned" the weight is unknown before the part is evaluated.
    return count_samples(batch, **problem.paths)
