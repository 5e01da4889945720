"""Weights that may make a loss a weighted mean over samples: guesses, for a measurement to confirm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..normalize import Number
from ..tree import get, leaves
from .problem import Problem
from .weights import class_weights, count_tokens, sample_weights

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
        Candidates, those for labels first; the same counts may come under several texts.

    Examples:
        >>> problem = Problem(nn.Linear(1, 1), lambda batch: batch["x"].sum())
        >>> batch = {"x": -torch.ones(2, 1), "labels": torch.tensor([[1, 2], [3, -100]])}
        >>> [candidate.text for candidate in weight_candidates(problem, batch)]
        ['count_tokens("labels")', 'count_tokens("labels", shift=True)']
    """
    found: list[Candidate] = []
    class_tensors = list(_class_weight_tensors(problem))
    for leaf in leaves(batch, whole=problem.whole, per_sample=problem.per_sample):
        value = get(batch, leaf.path) if leaf.length is not None else None
        if isinstance(value, Tensor) and value.numel():
            found += _from_tensor(leaf.path, value, class_tensors)
    return found


def _from_tensor(path: str, value: Tensor, class_tensors: list[Tensor]) -> Iterator[Candidate]:
    where = f'"{path}"'
    if value.is_floating_point():
        if bool((value >= 0).all()):
            yield Candidate(f"sample_weights({where})", sample_weights(path))
        return
    if value.is_complex():
        return
    for weight in class_tensors:
        kept = value[value != -100]
        if kept.numel() and int(kept.min()) >= 0 and int(kept.max()) < weight.numel():
            yield Candidate(f"class_weights(weight, {where})", class_weights(weight, path))
    for ignored in _IGNORED:
        if not bool((value == ignored).any()):
            continue
        suffix = "" if ignored == -100 else f", ignore_index={ignored}"
        yield Candidate(f"count_tokens({where}{suffix})", count_tokens(path, ignore_index=ignored))
        if value.ndim > 1:
            shifted = count_tokens(path, ignore_index=ignored, shift=True)
            yield Candidate(f"count_tokens({where}{suffix}, shift=True)", shifted)


def _class_weight_tensors(problem: Problem) -> Iterator[Tensor]:
    """One-dimensional floating tensors that the loss function or a loss module holds, each once."""
    seen: set[int] = set()
    for held in (*problem.model.modules(), *_held_by(problem.loss_fn)):
        weight = getattr(held, "weight", None) if isinstance(held, nn.modules.loss._Loss) else held
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
