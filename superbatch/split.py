# pyright: strict
"""How many samples each micro-batch gets: near-equal in number, or near-equal in tokens under a budget.

Sizes are a plain list of ints whose sum is the batch. An update does not depend on them; only memory and time
do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from superbatch.containers import array_shape
from superbatch.errors import InputError, SplitError, explain
from superbatch.packed import OFFSETS, read_offsets
from superbatch.paths import get
from superbatch.plan import Plan, plan


def near_equal(samples: int, microbatch_size: int) -> list[int]:
    """Divide samples into the fewest micro-batches of at most a given size, all nearly equal.

    K = ceil(samples / microbatch_size) sizes that differ by at most 1, larger first: no micro-batch is small,
    so none wastes the device.

    Args:
        samples: samples of the batch, at least 1.
        microbatch_size: most samples of a micro-batch, at least 1.

    Returns:
        The sizes, K of them; their sum is `samples`.

    Raises:
        InputError: when an argument is no positive int.

    Examples:
        >>> near_equal(10, 4), near_equal(3, 8)
        ([4, 3, 3], [3])
    """
    samples = positive_int("samples", samples)
    count = -(-samples // positive_int("microbatch_size", microbatch_size))
    size, larger = divmod(samples, count)
    return [size + 1] * larger + [size] * (count - larger)


def near_equal_cost(costs: Sequence[int], budget: int) -> list[int]:
    """Divide samples, in order, into the fewest micro-batches under a budget, the largest as small as can be.

    Among all contiguous partitions with cost(part) <= budget for every part: the fewest parts; among those,
    the smallest possible max cost(part).

    Args:
        costs: cost of each sample (for example its tokens), ints >= 0, at least one sample.
        budget: most cost of a micro-batch, at least 1.

    Returns:
        The number of samples of each micro-batch; their sum is len(costs).

    Raises:
        InputError: when costs or budget are no such ints.
        SplitError: when one sample alone is above the budget.

    Examples:
        >>> near_equal_cost([5, 1, 1, 1, 4, 2], 8)  # costs 7 and 7, not 8 and 6
        [3, 3]
    """
    budget = positive_int("budget", budget)
    checked = _checked_costs(costs)
    most = max(checked)
    if most > budget:
        index = checked.index(most)
        raise SplitError(
            explain(
                f"sample {index} with cost {most}, and a budget of {budget} for a micro-batch",
                "this sample alone is above the budget",
                "raise the budget, or shorten or leave out the sample",
            )
        )
    fewest = len(_filled(checked, budget))
    low, high = max(most, -(-sum(checked) // fewest)), budget
    while (
        low < high
    ):  # a smaller cap never needs fewer parts, so the smallest cap that keeps their number is found
        cap = (low + high) // 2
        low, high = (low, cap) if len(_filled(checked, cap)) <= fewest else (cap + 1, high)
    return _filled(checked, low)


def _filled(costs: list[int], cap: int) -> list[int]:
    """Fill each part up to the cap before the next begins: the fewest parts under that cap."""
    sizes: list[int] = []
    size = spent = 0
    for cost in costs:
        if size and spent + cost > cap:
            sizes.append(size)
            size = spent = 0
        size, spent = size + 1, spent + cost
    return [*sizes, size]


def _checked_costs(costs: Any) -> list[int]:
    values: Any = costs if array_shape(costs) is None else costs.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise InputError(
            explain(
                f"costs={costs!r}", "this is no sequence of at least one int", "pass one int for each sample"
            )
        )
    checked = [_as_int(cost) for cost in cast("Sequence[Any]", values)]
    for index, cost in enumerate(checked):
        if cost is None or cost < 0:
            raise InputError(
                explain(
                    f"costs[{index}]={values[index]!r}",
                    "a cost is an int, 0 or larger",
                    "pass one int for each sample",
                )
            )
    return cast("list[int]", checked)


def _as_int(value: Any) -> int | None:
    """Ints of Python and NumPy; a bool or a float is a mistake here, not a number of samples."""
    if type(value) is int:
        return value
    if (
        isinstance(value, (bool, float))
        or type(value).__name__ == "bool_"
        or array_shape(value) not in (None, ())
    ):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def positive_int(name: str, value: Any) -> int:
    """Check that an argument is an int of at least 1.

    Args:
        name: the argument's name, for the error text.
        value: what was passed.

    Returns:
        The value as an int.

    Raises:
        InputError: when it is something else; bools and floats are refused.

    Examples:
        >>> positive_int("microbatch_size", 8)
        8
    """
    number = _as_int(value)
    if number is None:
        kind = type(value).__name__
        raise InputError(explain(f"{name}={value!r}", f"a {kind} is not an int", "pass a positive int"))
    if number < 1:
        raise InputError(explain(f"{name}={value!r}", "at least 1 is needed", "pass a positive int"))
    return number


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """A micro-batch size in tokens: as many consecutive samples as fit, in near-equal micro-batches.

    Args:
        tokens: most tokens of a micro-batch.
        lengths: the tokens of each sample. Either the path of a part of the batch (a 1-d array or list of
            lengths; a (samples, tokens) mask of zeros and ones; offsets of packed sequences, such as
            "cu_seqlens") or a function of the batch that returns one int for each sample.

    Raises:
        InputError: when tokens is no positive int, or lengths neither a path nor a function.

    Examples:
        >>> TokenBudget(1024, "lengths").sample_tokens({"lengths": [500, 300]})
        [500, 300]
    """

    tokens: int
    lengths: str | Callable[[Any], Sequence[int]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", positive_int("tokens", self.tokens))
        if not isinstance(cast("Any", self.lengths), str) and not callable(self.lengths):
            raise InputError(
                explain(
                    f"lengths={self.lengths!r}",
                    "this is neither a path nor a function",
                    'pass a path such as "lengths", or a function of the batch that returns a list of ints',
                )
            )

    def sample_tokens(self, batch: Any) -> list[int]:
        """The tokens of each sample of a batch.

        Args:
            batch: a batch.

        Returns:
            One int for each sample.

        Raises:
            InputError: when `lengths` gives something else than ints >= 0.

        Examples:
            >>> TokenBudget(8, "cu_seqlens").sample_tokens({"cu_seqlens": [0, 3, 7]})
            [3, 4]
        """
        if not isinstance(self.lengths, str):
            return _checked_costs(self.lengths(batch))
        part = get(batch, self.lengths)
        if self.lengths.rpartition(".")[2] in OFFSETS:
            offsets = read_offsets(self.lengths, part)
            return [stop - start for start, stop in pairwise(offsets)]
        shape = array_shape(part)
        return (
            _mask_tokens(part, self.lengths)
            if shape is not None and len(shape) == 2
            else _checked_costs(part)
        )


def _mask_tokens(mask: Any, path: str) -> list[int]:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            explain(
                f"lengths={path!r}, which names an array of shape {tuple(mask.shape)}",
                "a 2-d array of lengths must be a mask of zeros and ones",
                'name the lengths, the mask (such as "attention_mask") or the offsets of the samples',
            )
        )
    return [int(tokens) for tokens in mask.sum(-1).tolist()]


def split(
    batch: Any,
    microbatch_size: int | TokenBudget,
    *,
    whole: Collection[str] = (),
    per_sample: Collection[str] = (),
) -> list[Any]:
    """Cut a batch into near-equal micro-batches, in order.

    Args:
        batch: any nested batch (see `superbatch.tree.plan`).
        microbatch_size: most samples of a micro-batch, or a TokenBudget.
        whole: paths of parts that every micro-batch gets whole.
        per_sample: paths of lists of any objects with one entry for each sample.

    Returns:
        The micro-batches; arrays in them are views of the batch where the framework slices to views.

    Raises:
        InputError: when microbatch_size is neither a positive int nor a TokenBudget, a TokenBudget's lengths
            are not one int for each sample, or a declared path is not in the batch.
        SplitError: when the batch cannot be split (see `superbatch.tree.plan`), or one sample is above the
            budget.

    Examples:
        >>> split({"text": ["a", "b", "c", "d", "e"], "scale": 0.5}, 3)
        [{'text': ['a', 'b', 'c'], 'scale': 0.5}, {'text': ['d', 'e'], 'scale': 0.5}]
        >>> split(["aaaa", "bb", "c", "ddd"], TokenBudget(6, lambda texts: [len(text) for text in texts]))
        [['aaaa', 'bb'], ['c', 'ddd']]
    """
    planned = plan(batch, whole=whole, per_sample=per_sample)
    return cut(planned, sizes(batch, planned.samples, microbatch_size))


def sizes(batch: Any, samples: int, microbatch_size: int | TokenBudget) -> list[int]:
    """The number of samples of each micro-batch of a batch.

    Args:
        batch: the batch, of which a TokenBudget reads the lengths.
        samples: the number of its samples.
        microbatch_size: most samples of a micro-batch, or a TokenBudget.

    Returns:
        The sizes; their sum is `samples`.

    Raises:
        InputError, SplitError: as `split`.

    Examples:
        >>> sizes(["a", "b", "c"], 3, 2)
        [2, 1]
    """
    if not isinstance(microbatch_size, TokenBudget):
        return near_equal(samples, microbatch_size)
    costs = microbatch_size.sample_tokens(batch)
    if len(costs) != samples:
        raise InputError(
            explain(
                f"{len(costs)} lengths from {microbatch_size!r} for a batch of {samples} samples",
                "a token budget needs one length for each sample",
                "check what lengths= names or returns",
            )
        )
    return near_equal_cost(costs, microbatch_size.tokens)


def cut(planned: Plan, counts: Sequence[int]) -> list[Any]:
    """Cut a planned batch into consecutive micro-batches.

    Args:
        planned: the batch (see `superbatch.tree.plan`).
        counts: the samples of each micro-batch; their sum is planned.samples.

    Returns:
        The micro-batches.

    Examples:
        >>> cut(plan(["a", "b", "c"]), [1, 2])
        [['a'], ['b', 'c']]
    """
    assert sum(counts) == planned.samples
    microbatches: list[Any] = []
    start = 0
    for count in counts:
        microbatches.append(planned.take(start, start + count))
        start += count
    return microbatches
