"""Weights that may make a loss a weighted mean over samples: guesses, for a measurement to confirm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...normalize import Number
from ...tree import get, leaves
from ..probing.problem import Problem
from ..weights import class_weights, count_tokens, sample_weights

_IGNORED = (-100, 0, -1)


class Candidate(NamedTuple):
    """A weight function, and the text with which a user would write it."""

    text: str
    weigh: Callable[[Any], Number]


def weight_candidates(problem: Problem, batch: Any) -> list[Candidate]:
    """Weight functions that fit what is in a batch.

    Args:
        problem: its loss function is searched for class weights.
        batch: integer parts may be labels, boolean and non-negative floating ones masks or weights of
            samples.

    Returns:
        Candidates; several may give the same counts, the likeliest first: labels with PyTorch's own
        `ignore_index` and weights, then masks, then integers of which some value may be padding.

    Examples:
        >>> problem = Problem(nn.Linear(1, 1), lambda batch: batch["x"].sum())
        >>> batch = {"x": -torch.ones(2, 1), "labels": torch.tensor([[1, 2], [3, -100]])}
        >>> [candidate.text for candidate in weight_candidates(problem, batch)]
        ['count_tokens("labels")', 'count_tokens("labels", shift=True)']
    """
    found: list[tuple[int, Candidate]] = []
    parts = leaves(batch, whole=problem.whole, per_sample=problem.per_sample)
    held = [get(batch, leaf.path) for leaf in parts if leaf.length is None]
    class_tensors = list(_class_weight_tensors(problem, held))
    for leaf in parts:
        value = get(batch, leaf.path) if leaf.length is not None else None
        if isinstance(value, Tensor) and value.numel():
            found += _from_tensor(leaf.path, value, class_tensors)
    return [candidate for _, candidate in sorted(found, key=lambda ranked: ranked[0])]


def _from_tensor(path: str, value: Tensor, class_tensors: list[Tensor]) -> Iterator[tuple[int, Candidate]]:
    """Candidates from one part of the batch, each with its rank: the lower, the likelier."""
    where = f'"{path}"'
    if value.is_complex():
        return
    if value.is_floating_point():
        if bool((value >= 0).all()):
            yield 0, Candidate(f"sample_weights({where})", sample_weights(path))
        return
    for weight in class_tensors:
        kept = value[value != -100]
        if kept.numel() and int(kept.min()) >= 0 and int(kept.max()) < weight.numel():
            yield 0, Candidate(f"class_weights(weight, {where})", class_weights(weight, path))
    mask = value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())
    for ignored in _IGNORED:
        if bool((value == ignored).any()):
            rank = 0 if ignored == -100 else 1 if mask else 2
            given = where if ignored == -100 else f"{where}, ignore_index={ignored}"
            yield rank, Candidate(f"count_tokens({given})", count_tokens(path, ignore_index=ignored))
            if value.ndim > 1:
                shifted = count_tokens(path, ignore_index=ignored, shift=True)
                yield rank, Candidate(f"count_tokens({given}, shift=True)", shifted)


def _class_weight_tensors(problem: Problem, held: list[Any]) -> Iterator[Tensor]:
    """One-dimensional floating tensors that the loss function, a loss module or the batch holds."""
    seen: set[int] = set()
    for holder in (*problem.model.modules(), *_held_by(problem.loss_fn), *held):
        weight = getattr(holder, "weight", None) if isinstance(holder, nn.modules.loss._Loss) else holder
        if not isinstance(weight, Tensor) or weight.ndim != 1 or not weight.is_floating_point():
            continue
        if id(weight) not in seen and not weight.requires_grad:
            seen.add(id(weight))
            yield weight.detach().to(torch.float64)


def _held_by(function: Any) -> Iterator[Any]:
    """What a function reaches: its closure, defaults, bound arguments and the globals it names."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values(), *_held_by(function.func))
        return
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in code.co_names if code else ():
        if name in names:
            yield names[name]
