# pyright: strict
"""Packed sequences: laid end to end in one token dimension, with the offset of each sequence.

A mapping, dataclass or namedtuple is a packed group when it holds an offsets entry (`cu_seqlens`,
`cu_seq_lens`, each also with `_q` and `_k`), as FlashAttention and Hugging Face's flattening collators write
them. Its samples are the sequences. A micro-batch of sequences a..b holds the tokens offsets[a]..offsets[b],
and its offsets start at 0. Values inside token arrays are not changed: sequence numbers (`seq_idx`) still
identify sequences, but do not start at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ..errors import SplitError
from .containers import array_shape, is_scalar, kind_of
from .paths import join

# Names in FlashAttention (cu_seqlens, max_seqlen) and in Hugging Face's collators (cu_seq_lens, max_length);
# _q and _k are for queries and keys of different lengths.
OFFSETS = frozenset(
    f"{name}{suffix}" for name in ("cu_seqlens", "cu_seq_lens") for suffix in ("", "_q", "_k")
)
LONGEST = frozenset(f"{name}{suffix}" for name in ("max_seqlen", "max_length") for suffix in ("", "_q", "_k"))

# The samples of a micro-batch: a range, or a list of positions in the batch.
Samples = range | list[int]
# take(samples, longest) returns these samples of a part; `trim` keeps their first `longest` positions.
Take = Callable[[Samples, int | None], Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """Checked offsets of one packed group.

    Args:
        path: path of the group in the batch.
        samples: the number of sequences.
        offsets: values on the host by name of the offsets entry; each starts with 0 and ends with its number
            of tokens.

    Examples:
        >>> read_packed("", {"cu_seqlens": [0, 2, 5]})
        Packed(path='', samples=2, offsets={'cu_seqlens': (0, 2, 5)})
    """

    path: str
    samples: int
    offsets: Mapping[str, tuple[int, ...]]

    def by_total(self) -> dict[int, tuple[int, ...]]:
        """Return the offsets by number of tokens; `read_packed` raises if this is ambiguous."""
        return {offsets[-1]: offsets for offsets in self.offsets.values()}


def read_packed(path: str, entries: Mapping[str, Any]) -> Packed:
    """Read and check the offsets of a packed group.

    Raises:
        SplitError: when offsets are not 1-d integers that start with 0 and never decrease; when two entries
            differ in their number of sequences; when two entries have the same token total but different
            offsets.

    Examples:
        >>> read_packed("", {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 4, 9]}).samples
        2
    """
    offsets = {name: read_offsets(join(path, name), value) for name, value in entries.items()}
    counts = {name: len(values) - 1 for name, values in offsets.items()}
    if len(set(counts.values())) > 1:
        raise SplitError(
            f"The offsets at path {path!r} differ in their number of sequences: {_listed(counts)}. Give "
            "queries and keys offsets of the same length."
        )
    _refuse_ambiguous_totals(path, offsets)
    return Packed(path, next(iter(counts.values())), offsets)


def _refuse_ambiguous_totals(path: str, offsets: dict[str, tuple[int, ...]]) -> None:
    # The offsets of an array are found by its number of tokens, see `token_dimension`.
    first: dict[int, str] = {}
    for name, values in offsets.items():
        other = first.setdefault(values[-1], name)
        if offsets[other] != values:
            raise SplitError(
                f"{other!r} and {name!r} at path {path!r} both have {values[-1]} tokens but different "
                "offsets, so an array of that length may belong to either. Put queries and keys into two "
                "mappings, each with its own offsets."
            )


def read_offsets(path: str, value: Any) -> tuple[int, ...]:
    """Copy one offsets entry to the host and check it.

    Raises:
        SplitError: when they are not 1-d integers that start with 0 and never decrease.

    Examples:
        >>> read_offsets("cu_seqlens", [0, 3, 3, 7])
        (0, 3, 3, 7)
    """
    shape = array_shape(value)
    host: Any = value if shape is None else value.tolist()  # one copy from the device
    one_dimension = type(host) in (list, tuple) and (shape is None or len(shape) == 1)
    wrong = _wrong_offsets(host) if one_dimension else "offsets must be 1-d"
    if wrong is None:
        return tuple(host)
    raise SplitError(
        f"The offsets of packed sequences at path {path!r} are invalid: {wrong}. Pass the cumulative "
        f"lengths [0, n1, n1+n2, ...], or, for an entry that means something else, declare "
        f"unsplit=({path!r},) or per_sample=({path!r},)."
    )


def _wrong_offsets(values: Sequence[Any]) -> str | None:
    if any(type(offset) is not int for offset in values):  # not isinstance: a bool is no offset
        return "offsets must be integers"
    if len(values) < 2:
        return "offsets need at least two values, for one sequence"
    if values[0] != 0:
        return f"offsets must start with 0, not {values[0]}"
    if any(stop < start for start, stop in pairwise(values)):
        return "offsets must never decrease"
    return None


def offsets_take(value: Any) -> Take:
    """Return a function that cuts an offsets entry; the result starts at 0 and keeps type and dtype.

    Examples:
        >>> take = offsets_take([0, 2, 5, 9])
        >>> take(range(1, 3), None), take([2, 0], None)
        ([0, 3, 7], [0, 4, 6])
    """
    if array_shape(value) is None:  # a plain list or tuple, see read_offsets
        kind = kind_of(value)
        return lambda samples, _: kind(accumulate((value[i + 1] - value[i] for i in samples), initial=0))

    def take(samples: Samples, _: int | None) -> Any:
        if isinstance(samples, range):
            return value[samples.start : samples.stop + 1] - value[samples.start]
        offsets = value[[0] * (len(samples) + 1)]  # new zeros of the same type and dtype
        offsets[1:] = (value[1:] - value[:-1])[samples].cumsum(0)
        return offsets

    return take


def tokens_take(value: Any, dimension: int, offsets: Sequence[int]) -> Take:
    """Return a function that cuts an array in which sequences lie end to end.

    Examples:
        >>> bytes(tokens_take(memoryview(b"aabbbc"), 0, [0, 2, 5, 6])(range(1, 3), None))
        b'bbbc'
    """

    def take(samples: Samples, _: int | None) -> Any:
        tokens: slice | list[int]
        if isinstance(samples, range):
            tokens = slice(offsets[samples.start], offsets[samples.stop])
        else:
            tokens = [token for i in samples for token in range(offsets[i], offsets[i + 1])]
        return value[tokens] if dimension == 0 else value[:, tokens]

    return take


def longest_take(value: Any, name: str, packed: Packed) -> Take:
    """Return a function that gives a micro-batch its longest sequence, for entries such as `max_seqlen_q`.

    Examples:
        >>> packed = read_packed("", {"cu_seqlens": [0, 2, 5, 6]})
        >>> longest_take(3, "max_seqlen", packed)(range(1), None)
        2
    """
    # max_seqlen_q is for the offsets with the suffix _q; without a suffix, for the longest of all offsets.
    suffix = name[-2:]
    chosen = [offsets for key, offsets in packed.offsets.items() if key.endswith(suffix)]
    chosen = chosen if suffix in ("_q", "_k") and chosen else list(packed.offsets.values())

    def longest(samples: Samples) -> int:
        return max(offsets[i + 1] - offsets[i] for offsets in chosen for i in samples)

    if type(value) is int:
        return lambda samples, _: longest(samples)
    return lambda samples, _: value * 0 + longest(samples)  # keeps an array's type, dtype and device


def is_longest(name: str, value: Any) -> bool:
    """Return True for an entry that states the longest sequence, by its name, with one integer.

    Examples:
        >>> is_longest("max_seqlen", 7), is_longest("max_seqlen", None), is_longest("size", 7)
        (True, False, False)
    """
    if name not in LONGEST or value is None or isinstance(value, (str, bool)):
        return False
    shape = array_shape(value)
    return is_scalar(value) if shape is None else shape in ((), (1,))


def token_dimension(shape: tuple[int, ...], path: str, packed: Packed) -> tuple[int, tuple[int, ...] | None]:
    """Return the dimension in which an array is cut, and the offsets of the samples.

    Returns:
        (0, None) for an array with one entry for each sequence; (0, offsets) for tokens in the first
        dimension; (1, offsets) for shape[:2] == (1, tokens).

    Raises:
        SplitError: when the shape fits none of these, or more than one.

    Examples:
        >>> packed = read_packed("", {"cu_seqlens": [0, 2, 5]})
        >>> token_dimension((1, 5), "input_ids", packed), token_dimension((2,), "labels", packed)
        ((1, (0, 2, 5)), (0, None))
    """
    totals = packed.by_total()
    first, second = [*shape, -1][:2]
    offsets, inner = totals.get(first), totals.get(second)
    if first == 1 and inner is not None:  # Hugging Face's collators add a batch dimension of 1
        return 1, inner
    if first == packed.samples and (inner is not None or not _same_cut(offsets)):
        raise _fits_two(shape, path, packed)
    if offsets is not None:
        return 0, offsets
    if first == packed.samples:
        return 0, None
    raise SplitError(
        f"The array of shape {tuple(shape)} at path {path!r} does not fit the packed sequences at path "
        f"{packed.path!r}, which have {_totals(packed)} tokens in {packed.samples} sequences. Declare "
        f"unsplit=({path!r},) to keep it whole, or move the tokens to its first dimension."
    )


def not_followed(packed: Packed) -> SplitError:
    """Return the error for offsets without an array of tokens beside them.

    Examples:
        >>> packed = read_packed("", {"cu_seqlens": [0, 5]})
        >>> "have 5 tokens" in str(not_followed(packed))
        True
    """
    return SplitError(
        f"The {packed.samples} packed sequences at path {packed.path!r} have {_totals(packed)} tokens, and "
        "no array beside their offsets has that length. Put the token arrays and their offsets into the same "
        "mapping, or declare the offsets in unsplit=(...)."
    )


def _same_cut(offsets: tuple[int, ...] | None) -> bool:
    """Return True if cutting by tokens and by sequences is the same: every sequence is one token."""
    return offsets is None or offsets == tuple(range(len(offsets)))


def _fits_two(shape: tuple[int, ...], path: str, packed: Packed) -> SplitError:
    return SplitError(
        f"The array of shape {tuple(shape)} at path {path!r} fits both the {packed.samples} packed sequences "
        f"beside it and their {_totals(packed)} tokens. Declare unsplit=({path!r},) to keep it whole, "
        f"per_sample=({path!r},) to split it by sequences, or leave out empty sequences."
    )


def _totals(packed: Packed) -> str:
    return " or ".join(str(total) for total in packed.by_total())


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r}: {count}" for name, count in counts.items())
