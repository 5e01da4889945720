"""Candidates for ``weight=`` of a loss that is a weighted mean; the caller tests which one holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.batch.tree import get, leaves
from superbatch.normalize import Number

from ..devices import in_float64
from ..weights import class_weights, count_tokens, sample_weights
from .generators import held_by, reachable
from .probing.problem import Problem

_IGNORED = (-100, 0, -1, 255)  # used by PyTorch, masks and padding, scikit-learn, segmentation maps


class Candidate(NamedTuple):
    """Weight function, and the code that a user types for it."""

    text: str
    weigh: Callable[[Any], Number]


class Clues(NamedTuple):
    """Labels to ignore and class weights, found in the objects that a loss function reaches."""

    ignored: tuple[int, ...]
    class_tensors: list[Tensor]


def weight_candidates(problem: Problem, batch: Any) -> list[Candidate]:
    """Return weight functions that fit the content of a batch, the likeliest first.

    Integer tensors may be labels or lengths; boolean and non-negative floating-point ones may be masks or
    weights of samples; lists may hold the objects of each sample.

    Args:
        problem: its model and loss function are searched for loss modules and class weights.
        batch: batch whose leaves are inspected.

    Returns:
        First sums of class weights or floating-point weights, and counts of labels that skip PyTorch's
        `ignore_index` or that of a loss module. Then masks, and counts that skip a likely padding value. Then
        counts of positive labels or of list entries, and sums of lengths.

    Examples:
        >>> problem = Problem(nn.Linear(1, 1), lambda batch: batch["x"].sum())
        >>> batch = {"x": -torch.ones(2, 1), "labels": torch.tensor([[1, 2], [3, -100]])}
        >>> [candidate.text for candidate in weight_candidates(problem, batch)][:2]
        ['count_tokens("labels")', 'count_tokens("labels", shift=True)']
    """
    found: list[tuple[int, Candidate]] = []
    parts = leaves(batch, **problem.paths)
    # A leaf without samples (unsplit=) may hold the class weights that the loss uses.
    held = [get(batch, leaf.path) for leaf in parts if leaf.length is None]
    clues = clues_of(problem, held)
    for leaf in parts:
        value = get(batch, leaf.path) if leaf.length is not None else None
        # Sparse and nested tensors are left out: labels are compared entry by entry.
        if isinstance(value, Tensor) and value.numel() and value.layout is torch.strided:
            found += _from_tensor(batch, leaf.path, value, clues)
        elif isinstance(value, list | tuple):
            found += _from_list(batch, leaf.path, value)
    # Stable: equally likely candidates keep the order of the leaves.
    return [candidate for _, candidate in sorted(found, key=lambda ranked: ranked[0])]


def _from_tensor(batch: Any, path: str, value: Tensor, clues: Clues) -> Iterator[tuple[int, Candidate]]:
    """Yield the candidates from one tensor of the batch, each with its rank; lower ranks are likelier."""
    if value.is_complex():
        return
    if value.is_floating_point():
        if bool((value >= 0).all()):
            yield 0, Candidate(f'sample_weights("{path}")', sample_weights(path))
            # A causal language model predicts all tokens but the first.
            if value.ndim > 1 and bool(((value == 0) | (value == 1)).all()):
                yield from _computed(batch, path, "{}[..., 1:]", lambda part: part[..., 1:], 2)
        return
    possible = [
        ignored for ignored in dict.fromkeys((*clues.ignored, *_IGNORED)) if _fits(ignored, value.dtype)
    ]
    # -100 even if no label has it: the divisor may consist of class weights alone.
    for ignored in dict.fromkeys((-100, *possible)):
        yield from _by_class(path, value, ignored, clues)
    mask = value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())
    for ignored in possible:
        if bool((value == ignored).any()):
            # The ignore_index of a loss module ranks before a mask, a guessed one after it.
            declared = ignored == -100 or ignored in clues.ignored
            yield from _by_count(path, value, ignored, 0 if declared else 1 if mask else 2)
    if value.dtype != torch.bool and bool((value > 0).any()):
        yield from _computed(batch, path, "{} > 0", lambda part: part > 0, 3)
        if value.ndim == 1 and bool((value >= 0).all()):
            yield 4, Candidate(f'sample_weights("{path}")', sample_weights(path))


def _fits(ignored: int, dtype: torch.dtype) -> bool:
    """Return whether a dtype can hold a label: in uint8, -1 compares equal to 255."""
    return (
        ignored == 0 if dtype == torch.bool else torch.iinfo(dtype).min <= ignored <= torch.iinfo(dtype).max
    )


def _by_count(path: str, value: Tensor, ignored: int, rank: int) -> Iterator[tuple[int, Candidate]]:
    given = f'"{path}"' if ignored == -100 else f'"{path}", ignore_index={ignored}'
    yield rank, Candidate(f"count_tokens({given})", count_tokens(path, ignore_index=ignored))
    if value.ndim > 1:
        shifted = count_tokens(path, ignore_index=ignored, shift=True)
        yield rank, Candidate(f"count_tokens({given}, shift=True)", shifted)


def _by_class(path: str, value: Tensor, ignored: int, clues: Clues) -> Iterator[tuple[int, Candidate]]:
    if ignored != -100 and not bool((value == ignored).any()):
        return
    given = f'"{path}"' if ignored == -100 else f'"{path}", ignore_index={ignored}'
    # A comparison would wrap around: in uint8, 156 equals -100.
    counted = value[value != ignored] if _fits(ignored, value.dtype) else value.flatten()
    for weight in clues.class_tensors:
        # Only if every label has an entry: otherwise the tensor holds weights of something else.
        if counted.numel() and int(counted.min()) >= 0 and int(counted.max()) < weight.numel():
            weigh = class_weights(weight, path, ignore_index=ignored)
            yield 0, Candidate(f"class_weights(weight, {given})", weigh)


def _from_list(batch: Any, path: str, value: Sequence[Any]) -> Iterator[tuple[int, Candidate]]:
    """Yield candidates that count objects per sample: boxes in dictionaries, or entries of sequences."""
    where = _expression(batch, path)
    if where is None or not value:
        return
    first = value[0]
    if isinstance(first, Mapping):
        names = [name for name, part in first.items() if isinstance(name, str) and _has_rows(part)]
        for name in names:
            # Double quotes throughout: the text is code to type.
            text = f"lambda microbatch: sum(len(one[{name!r}]) for one in {where})".replace("'", '"')
            # name=name, since a closure would see the last name of the loop.
            yield 3, Candidate(text, lambda mb, name=name: sum(len(one[name]) for one in get(mb, path)))
    elif _has_rows(first):
        text = f"lambda microbatch: sum(len(one) for one in {where})"
        yield 3, Candidate(text, lambda mb: sum(len(one) for one in get(mb, path)))


def _has_rows(part: Any) -> bool:
    return isinstance(part, list | tuple | str) or (isinstance(part, Tensor) and part.ndim > 0)


def _computed(
    batch: Any, path: str, form: str, compute: Callable[[Tensor], Tensor], rank: int
) -> Iterator[tuple[int, Candidate]]:
    """Yield a candidate that sums values computed from one tensor of the batch."""
    where = _expression(batch, path)
    if where is not None:
        text = f"sample_weights(lambda microbatch: {form.format(where)})"
        yield rank, Candidate(text, sample_weights(lambda microbatch: compute(get(microbatch, path))))


def _expression(batch: Any, path: str) -> str | None:
    """Return Python code that reads a leaf of a batch; None if its path cannot be written as code."""
    text, value = "microbatch", batch
    for step in path.split(".") if path else ():
        # As a user would type it: a key, an index or an attribute for each step of the path.
        if isinstance(value, Mapping):
            if step not in value:
                return None
            text, value = f'{text}["{step}"]', value[step]
        elif isinstance(value, list | tuple) and step.isdigit() and int(step) < len(value):
            text, value = f"{text}[{step}]", value[int(step)]
        elif step.isidentifier() and hasattr(value, step):
            text, value = f"{text}.{step}", getattr(value, step)
        else:
            return None
    return text


def clues_of(problem: Problem, held: Sequence[Any] = ()) -> Clues:
    """Find labels to ignore and class weights in the modules and tensors that a loss function reaches.

    `held` are further tensors that may be class weights.

    Examples:
        >>> loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]), ignore_index=7)
        >>> clues_of(Problem(nn.Linear(1, 2), loss))
        Clues(ignored=(7,), class_tensors=[tensor([1., 2.], dtype=torch.float64)])
    """
    ignored: dict[int, None] = {}
    tensors: dict[int, Tensor] = {}
    for found in reachable((problem.loss_fn, problem.model)):
        index = getattr(found, "ignore_index", None)
        if isinstance(index, int) and not isinstance(index, bool):
            ignored[index] = None
        for value in _tensors_of(found):
            # By id: a weight that a module and a closure share is one candidate.
            tensors.setdefault(id(value), value)
    for value in held:
        if isinstance(value, Tensor):
            tensors.setdefault(id(value), value)
    classes = [t for t in tensors.values() if t.ndim == 1 and t.is_floating_point() and not t.requires_grad]
    # An attention mask with -inf is no tensor of class weights.
    valid = [t for t in classes if bool(((t >= 0) & t.isfinite()).all())]
    return Clues(tuple(ignored), [in_float64(tensor.detach()) for tensor in valid])


def _tensors_of(found: Any) -> Iterator[Tensor]:
    """Yield the tensors that a loss module, function, container or plain object holds, and buffers."""
    held: list[Any] = []
    # Private, for correctness: torch's loss modules have no public base class.
    if isinstance(found, nn.modules.loss._Loss):
        held = [getattr(found, "weight", None)]
    elif isinstance(found, nn.Module):
        # running_mean has one entry for each channel, as class weights have one for each class.
        held = [value for name, value in found.named_buffers(recurse=False) if "running" not in name]
        held += found.__dict__.values()
    elif isinstance(found, dict):
        held = list(found.values())
    elif not isinstance(found, list | tuple | set):
        held = [*held_by(found), *getattr(found, "__dict__", {}).values()]
    yield from (value for value in held if isinstance(value, Tensor))
