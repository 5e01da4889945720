# pyright: strict
"""Walk over a batch that finds its leaves and prepares the slices of micro-batches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import InputError
from .containers import (
    Rebuild,
    array_shape,
    children,
    is_flat,
    is_list_subclass,
    is_record,
    is_scalar,
    is_torch_packed_sequence,
    kind_of,
    rebuilder,
)
from .packed import (
    OFFSETS,
    Packed,
    Samples,
    Take,
    is_longest,
    longest_take,
    not_followed,
    offsets_take,
    read_packed,
    token_dimension,
    tokens_take,
)
from .paths import Leaf, join
from .refusals import (
    MOST_LEVELS,
    NOT_SLICED,
    agreed_length,
    listed_length,
    refuse_hollow_lists,
    too_deep,
    unknown,
    unmet,
    unsliceable,
)
from .trimming import check_trimmed, check_widths, trim_take


@dataclass(frozen=True, slots=True)
class Plan:
    """A walked and checked batch, ready to be cut into micro-batches.

    Args:
        leaves: all leaves, in order.
        samples: the number of samples, at least 1.
        pick: pick(samples, longest) returns these samples as a micro-batch (see `packed.Take`).

    Examples:
        >>> planned = plan({"text": ["a", "b", "c"], "scale": 0.5})
        >>> planned.samples, planned.take(1, 3)
        (3, {'text': ['b', 'c'], 'scale': 0.5})
    """

    leaves: tuple[Leaf, ...]
    samples: int
    pick: Take

    def take(
        self, start: int, stop: int, *, order: Sequence[int] | None = None, longest: int | None = None
    ) -> Any:
        """Cut out a micro-batch. The range of the arguments is not checked.

        Args:
            start: the first sample.
            stop: one past the last sample.
            order: positions of samples in the batch. With it, samples start..stop of this order are copied;
                without it, those of the batch are sliced, as views where the framework has views.
            longest: the length to which trimmed leaves are cut.

        Returns:
            The micro-batch.

        Raises:
            SplitError: when an array cannot be cut like this.

        Examples:
            >>> plan(["a", "b", "c"]).take(0, 2, order=[2, 0, 1])
            ['c', 'a']
        """
        return self.pick(range(start, stop) if order is None else list(order[start:stop]), longest)


def plan(
    batch: Any,
    *,
    unsplit: Collection[str] = (),
    per_sample: Collection[str] = (),
    trim: Collection[str] = (),
) -> Plan:
    """Walk a batch once, check it, and prepare its split into micro-batches.

    Arrays (anything with `shape` and indexing) are cut along their first dimension. Each entry of a list or
    tuple of plain scalars is a sample. Other mappings, lists, tuples, namedtuples and dataclasses are walked.
    Lone scalars and 0-d arrays are kept whole. Packed sequences (see `superbatch.batch.packed`) are cut
    between sequences.

    Args:
        batch: any nesting of these.
        unsplit: paths of parts that every micro-batch gets whole, with everything under them.
        per_sample: paths of lists of any objects (or arrays) with one entry for each sample.
        trim: paths of arrays of shape (samples, length, ...) whose padding `Plan.take` may cut off.

    Returns:
        The plan.

    Raises:
        InputError: when a declared path is not in the batch, or names a part that cannot be trimmed.
        SplitError: when lengths differ, when there is nothing to split or no sample, when a part is of an
            unknown type, or when it is ambiguous which entry belongs to which sample.

    Examples:
        >>> planned = plan((memoryview(b"abcd"), {"names": ["a", "b", "c", "d"], "lr": 0.1}))
        >>> planned.leaves
        (Leaf(path='0', length=4), Leaf(path='1.names', length=4), Leaf(path='1.lr', length=None))
    """
    walk, take = walked(batch, unsplit, per_sample, trim)
    check_widths(walk.widths)
    samples = agreed_length(walk.leaves)
    refuse_hollow_lists(walk.hollow, samples)
    assert take is not None  # some leaf has a length, so something is cut
    return Plan(tuple(walk.leaves), samples, take)


def walked(
    batch: Any, unsplit: Collection[str], per_sample: Collection[str], trim: Collection[str] = ()
) -> tuple[Walk, Take | None]:
    """Walk a batch without checking that lengths agree.

    Returns:
        The walk with its findings, and take(samples, longest) of the batch, None when nothing is cut.

    Raises:
        InputError: when a declared path is not in the batch.
        SplitError: when a part is of an unknown type.

    Examples:
        >>> walk, take = walked({"text": ["a", "b"]}, (), ())
        >>> walk.leaves, take(range(1), None)
        ([Leaf(path='text', length=2)], {'text': ['a']})
    """
    walk = Walk(_declared("unsplit", unsplit), _declared("per_sample", per_sample), _declared("trim", trim))
    for argument, others in [("per_sample", walk.per_sample), ("trim", walk.trim)]:
        for path in sorted(walk.unsplit & others):  # sorted, so that the error names the same path each time
            raise InputError(f"Path {path!r} is in both unsplit= and {argument}=. Declare it in one of them.")
    take = walk.visit(batch, "", None)
    for path in sorted((walk.unsplit | walk.per_sample | walk.trim) - walk.met):
        raise unmet(batch, path)
    return walk, take


@dataclass(slots=True)
class Walk:
    """State of one walk over a batch: its options and its findings.

    Args:
        unsplit: declared paths that are kept whole.
        per_sample: declared paths of lists with one entry for each sample.
        trim: declared paths of arrays whose padding may be cut off.
        leaves: found leaves, in order.
        met: declared paths that were found.
        hollow: lists of containers in which nothing is cut, with their lengths.
        followed: paths of packed groups that have an array of tokens.
        widths: the length of each array to trim, padding included.
        depth: number of containers around the node that is visited.

    Examples:
        >>> walk = Walk(frozenset({"lookup"}), frozenset())
        >>> walk.visit({"lookup": [1, 2]}, "", None), walk.leaves, walk.met
        (None, [Leaf(path='lookup', length=None)], {'lookup'})
    """

    unsplit: frozenset[str]
    per_sample: frozenset[str]
    trim: frozenset[str] = frozenset()
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    met: set[str] = field(default_factory=set[str])
    hollow: list[Leaf] = field(default_factory=list[Leaf])
    followed: set[str] = field(default_factory=set[str])
    widths: dict[str, int] = field(default_factory=dict[str, int])
    depth: int = 0

    def visit(self, node: Any, path: str, packed: Packed | None) -> Take | None:
        """Record the leaves under a node; return its take(samples, longest), None if it is kept whole."""
        if path in self.unsplit:
            self.met.add(path)
            return self._keep(path)
        if path in self.trim:
            self.met.add(path)
            self.widths[path] = check_trimmed(node, path, packed=packed is not None)
        if path in self.per_sample:
            self.met.add(path)
            return self._cut(node, path, listed_length(node, path))
        if is_scalar(node):
            return self._keep(path)
        shape = array_shape(node)
        if shape is None and is_flat(node):  # a list of scalars is split like an array of its length
            shape = (len(node),)
        if shape is not None:
            return self._array(node, shape, path, packed)
        return self._container(node, path, packed)

    def _keep(self, path: str) -> None:
        self.leaves.append(Leaf(path, None))

    def _cut(self, node: Any, path: str, length: int) -> Take:
        self.leaves.append(Leaf(path, length))
        if array_shape(node) is None and isinstance(node, (list, tuple)):
            return _list_take(node, path)
        if path in self.trim:
            return trim_take(node, path, lambda array, samples: _rows(array, samples, path))
        return lambda samples, longest: _rows(node, samples, path)

    def _array(self, node: Any, shape: tuple[int, ...], path: str, packed: Packed | None) -> Take | None:
        if not shape:
            return self._keep(path)
        dimension, offsets = (0, None) if packed is None else token_dimension(shape, path, packed)
        if packed is None or offsets is None:
            return self._cut(node, path, shape[0])
        self.leaves.append(Leaf(path, packed.samples))
        self.followed.add(packed.path)
        return tokens_take(node, dimension, offsets)

    def _container(self, node: Any, path: str, packed: Packed | None) -> Take | None:
        # torch's PackedSequence is a namedtuple, but its parts cannot be cut by samples.
        entries = None if is_torch_packed_sequence(node) else children(node)
        if entries is None:
            raise unknown(node, path)
        group = self._packed_group(entries, path)
        first_leaf = len(self.leaves)
        self.depth += 1
        if self.depth > MOST_LEVELS:
            raise too_deep(path)
        takes = [self._entry(name, value, join(path, name), group or packed) for name, value in entries]
        self.depth -= 1
        if group is not None and path not in self.followed:
            raise not_followed(group)
        if not any(takes):
            # A list without anything to split may be a list of samples, see `refuse_hollow_lists`.
            if isinstance(node, (list, tuple)) and not is_record(node):
                self.hollow.append(Leaf(path, len(entries)))
            return None
        entry_takes = [take or _constant(value) for take, (_, value) in zip(takes, entries, strict=True)]
        lengths = {leaf.length for leaf in self.leaves[first_leaf:]}
        return _container_take(rebuilder(node, path), entry_takes, _encodings(node, lengths))

    def _packed_group(self, entries: list[tuple[str, Any]], path: str) -> Packed | None:
        # A declared entry is not taken for offsets, whatever its name is.
        declared = self.unsplit | self.per_sample
        offsets = {
            name: value
            for name, value in entries
            if name in OFFSETS and value is not None and join(path, name) not in declared
        }
        return read_packed(path, offsets) if offsets else None

    def _entry(self, name: str, value: Any, path: str, packed: Packed | None) -> Take | None:
        if packed is None or path in self.unsplit or path in self.per_sample:
            return self.visit(value, path, packed)
        if name in packed.offsets and path == join(packed.path, name):
            self.leaves.append(Leaf(path, packed.samples))
            return offsets_take(value)
        if is_longest(name, value):
            self.leaves.append(Leaf(path, None))
            return longest_take(value, name, packed)
        return self.visit(value, path, packed)


def _rows(array: Any, samples: Samples, path: str) -> Any:
    try:
        return array[samples.start : samples.stop] if isinstance(samples, range) else array[samples]
    except NOT_SLICED as error:
        if type(error) not in NOT_SLICED:
            raise  # a subclass, such as torch's OutOfMemoryError, says nothing about the batch
        raise unsliceable(array, path, error, ordered=not isinstance(samples, range)) from error


def _list_take(node: Any, path: str) -> Take:
    # A slice of a subclass of list is a plain list: the subclass is rebuilt from its entries.
    rebuild = rebuilder(node, path) if is_list_subclass(node) else kind_of(node)

    def take(samples: Samples, longest: int | None) -> Any:
        if not isinstance(samples, range):
            return rebuild([node[i] for i in samples])
        part = node[samples.start : samples.stop]
        return rebuild(list(part)) if is_list_subclass(node) else part

    return take


def _constant(value: Any) -> Take:
    return lambda samples, longest: value


def _container_take(rebuild: Rebuild, entry_takes: list[Take], encodings: list[Any] | None) -> Take:
    if encodings is None:
        return lambda samples, longest: rebuild([take(samples, longest) for take in entry_takes])

    def take_encoded(samples: Samples, longest: int | None) -> Any:
        new = rebuild([take(samples, longest) for take in entry_takes])
        # Otherwise word_ids(i) of a BatchEncoding would read the list of the whole batch.
        new._encodings = [encodings[i] for i in samples]
        return new

    return take_encoded


def _encodings(node: Any, lengths: set[int | None]) -> list[Any] | None:
    """Return the list behind BatchEncoding.word_ids(i) of Hugging Face, with one entry for each sample."""
    encodings = vars(node).get("_encodings") if isinstance(node, UserDict) else None
    if isinstance(encodings, list) and len(cast("list[Any]", encodings)) in lengths:
        return cast("list[Any]", encodings)
    return None


def _declared(argument: str, paths: Any) -> frozenset[str]:
    # Not any iterable: a str would be a collection of its characters.
    if isinstance(paths, (list, tuple, set, frozenset)):
        names = cast("Collection[Any]", paths)
        if all(type(name) is str for name in names):
            return frozenset(names)
    raise InputError(
        f"{argument}={paths!r} is not a list or tuple of paths. Pass a tuple of str, such as "
        f'{argument}=("labels",).'
    )
