# pyright: strict
"""Micro-batch size in tokens, and the lookup of each sample's tokens in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast

from ..errors import InputError
from ..integers import checked_costs, positive_int
from .containers import array_shape
from .packed import OFFSETS, read_offsets
from .paths import all_paths, get, listed_paths

MASK: Final = "attention_mask"
# In order of preference: entries that cannot count padding come first.
WELL_KNOWN: Final = (
    *("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q", MASK),
    *("lengths", "length", "seq_lens", "seqlens", "seq_lengths", "sequence_lengths", "input_lengths"),
    "num_tokens",
)


class Lengths(NamedTuple):
    """Lengths of the samples of a batch.

    Args:
        tokens: the tokens of each sample.
        reach: the positions up to the last token of each sample: more than its tokens if padding precedes
            them.
    """

    tokens: list[int]
    reach: list[int]


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """A micro-batch size in tokens: the fewest micro-batches under a budget, near-equal in cost.

    A micro-batch costs its tokens, ``sum of n_j``; with `padded`, ``samples x max n_j``. The update is the
    same for every budget, up to rounding.

    Args:
        tokens: largest number of tokens in a micro-batch (with `padded`: of positions, padding included).
        lengths: the tokens n_j of each sample. Either the path of a part of the batch (a 1-d array or list of
            lengths; a (samples, tokens) mask of zeros and ones; offsets of packed sequences, such as
            "cu_seqlens") or a function of the batch that returns one int for each sample. None: the part
            with a well-known name, such as "attention_mask", "lengths" or "cu_seqlens".
        padded: count padding: every sample of a micro-batch costs as much as its longest.
        sort: reorder the samples of one batch (never across batches). With padding (`padded` or `trim`),
            samples of similar length share a micro-batch, the longest first; without, samples are chosen to
            fill micro-batches evenly. With `PerSampleRandom` each sample keeps its own random stream.
        trim: paths of arrays of shape (samples, length, ...), such as ``("input_ids", "labels",
            "attention_mask")``. In each micro-batch these arrays end where its longest sample ends. Only
            padding is cut off (in a mask, the positions after the last 1). Use this only if the model's
            result does not depend on padding at the end.

    Raises:
        InputError: when tokens is not a positive int, lengths is not a path or a function, or another
            argument has the wrong type.

    Examples:
        >>> TokenBudget(1024).sample_tokens({"lengths": [500, 300]})
        [500, 300]
        >>> from superbatch import split
        >>> texts = ["aaaa", "b", "cccc", "d"]
        >>> budget = TokenBudget(8, lambda texts: [len(text) for text in texts], padded=True, sort=True)
        >>> split(texts, budget)  # without sort=True, three micro-batches
        [['aaaa', 'cccc'], ['b', 'd']]
    """

    tokens: int
    lengths: str | Callable[[Any], Sequence[int]] | None = None
    padded: bool = field(default=False, kw_only=True)
    sort: bool = field(default=False, kw_only=True)
    trim: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", positive_int("tokens", self.tokens))  # the dataclass is frozen
        if not (self.lengths is None or isinstance(cast("Any", self.lengths), str) or callable(self.lengths)):
            raise InputError(
                f"lengths={self.lengths!r} is not a path or a function. "
                'Pass a path such as "lengths", or a function of the batch that returns a list of ints.'
            )
        for name, value in [("padded", self.padded), ("sort", self.sort)]:
            if type(cast("Any", value)) is not bool:
                raise InputError(f"{name}={value!r} is not a bool. Pass True or False.")
        paths: Any = self.trim
        if not isinstance(paths, (tuple, list)) or any(
            type(path) is not str for path in cast("list[Any]", paths)
        ):
            raise InputError(
                f"trim={paths!r} is not a tuple of paths. "
                'Pass a tuple of str, such as trim=("input_ids", "labels").'
            )
        object.__setattr__(self, "trim", tuple(self.trim))

    def sample_tokens(self, batch: Any) -> list[int]:
        """Return the number of tokens of each sample of a batch.

        Args:
            batch: a batch.

        Returns:
            One int for each sample.

        Raises:
            InputError: when `lengths` gives anything but ints >= 0, or no lengths are found.

        Examples:
            >>> TokenBudget(8, "cu_seqlens").sample_tokens({"cu_seqlens": [0, 3, 7]})
            [3, 4]
        """
        return self.sample_lengths(batch).tokens

    def sample_lengths(self, batch: Any) -> Lengths:
        """Return for each sample its number of tokens, and of positions up to its last token.

        Args:
            batch: a batch.

        Returns:
            Both lists, with one int for each sample. They differ only for a mask with padding before tokens,
            and only with `padded` or `trim`.

        Raises:
            InputError: as `sample_tokens`.

        Examples:
            >>> TokenBudget(8, "lengths").sample_lengths({"lengths": [3, 4]})
            Lengths(tokens=[3, 4], reach=[3, 4])
        """
        lengths = find_lengths(batch) if self.lengths is None else self.lengths
        if not isinstance(lengths, str):
            tokens = checked_costs(lengths(batch))
            return Lengths(tokens, tokens)
        part = get(batch, lengths)
        shape = array_shape(part)
        # Offsets are recognised by name: as 1-d ints they could also be lengths.
        if lengths.rpartition(".")[2] in OFFSETS:
            offsets = read_offsets(lengths, part)
            tokens = [stop - start for start, stop in pairwise(offsets)]
        elif shape is not None and len(shape) == 2:
            return _of_mask(part, lengths, reach=self.padded or bool(self.trim))
        else:
            tokens = checked_costs(part)
        return Lengths(tokens, tokens)


def find_lengths(batch: Any) -> str:
    """Find the part of a batch that holds the lengths of its samples, by its name.

    Raises:
        InputError: when there is no such part, or two parts with the same name.

    Examples:
        >>> find_lengths({"meta": {"lengths": [3, 4]}, "input_ids": [[1, 2, 3], [4, 5, 6, 7]]})
        'meta.lengths'
    """
    by_name: dict[str, list[str]] = {}
    for path in all_paths(batch):
        name = path.rpartition(".")[2]
        if name in WELL_KNOWN and _may_be_lengths(name, get(batch, path)):
            by_name.setdefault(name, []).append(path)
    chosen: list[str] = next((by_name[name] for name in WELL_KNOWN if name in by_name), list[str]())
    if len(chosen) == 1:
        return chosen[0]
    where = " and ".join(map(repr, chosen))
    wrong = (
        f"there are lengths at {where}"
        if chosen
        else f"no part of the batch is called {', '.join(WELL_KNOWN[:-1])} or {WELL_KNOWN[-1]}"
    )
    raise InputError(
        f"TokenBudget without lengths= cannot find the lengths of the samples: {wrong}. Pass lengths= with "
        "a function of the batch that returns one int for each sample, or with one of the paths of the "
        f"batch: {listed_paths(batch)}."
    )


def _may_be_lengths(name: str, part: Any) -> bool:
    """Return True if a part has the shape that its name suggests."""
    shape = array_shape(part)
    if name == MASK:  # it may also be None, or have four dimensions
        return shape is not None and len(shape) == 2
    return isinstance(part, (list, tuple)) if shape is None else len(shape) == 1


def _of_mask(mask: Any, path: str, *, reach: bool) -> Lengths:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            f"lengths={path!r} names an array of shape {tuple(mask.shape)} that is not a mask of zeros and "
            'ones. Pass the path of the lengths, of the mask (such as "attention_mask") or of the offsets.'
        )
    tokens = [int(count) for count in mask.sum(-1).tolist()]
    if not reach:
        return Lengths(tokens, tokens)
    # Padding may come first: then the last token is at a later position than the number of tokens.
    counted = mask.cumsum(1)
    # The positions before the last token, plus one for itself.
    before = (counted < counted[:, -1:]).sum(-1).tolist()
    return Lengths(tokens, [int(n) + 1 if count else 0 for n, count in zip(before, tokens, strict=True)])
