"""Splits as a user writes them: ``5x20`` is 5 micro-batches of 20 samples, ``80/15/5`` names each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from superbatch.batch.split import near_equal
from superbatch.errors import InputError

from ..recipes import Recipe

COUNTS = 5, 10, 20  # micro-batches of the default splits
FORMS = "Write KxM for K micro-batches of M samples (5x20), or each size (80/15/5)"


@dataclass(frozen=True)
class Split:
    """Numbers of samples of the micro-batches of a full batch."""

    name: str  # as the user wrote it
    sizes: tuple[int, ...]  # samples of each micro-batch, in order

    @property
    def equal(self) -> bool:
        """True if all micro-batches of a full batch have the same size."""
        return len(set(self.sizes)) == 1

    def sizes_of(self, samples: int) -> tuple[int, ...]:
        """The sizes for a batch that may be shorter: near-equal, or in the split's proportions."""
        if samples == sum(self.sizes):
            return self.sizes
        if self.equal:
            return tuple(near_equal(samples, self.sizes[0]))
        ends = [end * samples // sum(self.sizes) for end in accumulate(self.sizes, initial=0)]
        return tuple(end - start for start, end in pairwise(ends) if end > start)


def parse_split(text: str) -> Split:
    """Read one split."""
    text = text.strip()
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        count, size = map(int, match.groups())
        sizes = (size,) * count
    elif re.fullmatch(r"\d+(/\d+)+", text):
        sizes = tuple(map(int, text.split("/")))
    else:
        raise InputError(f"The split {text!r} cannot be read. {FORMS}.")
    if not sizes or not all(sizes):
        raise InputError(f"The split {text!r}: a micro-batch needs at least one sample. {FORMS}.")
    return Split(text, sizes)


def parse_splits(texts: str | Sequence[str]) -> list[Split]:
    """Read splits that must be of the same batch."""
    pieces = texts.split(",") if isinstance(texts, str) else list(texts)
    splits = list(dict.fromkeys(parse_split(piece) for piece in pieces))
    if not splits:
        raise InputError(f"No split was given: there is nothing to compare. {FORMS}.")
    first = splits[0]
    for split in splits:
        if sum(split.sizes) != sum(first.sizes):
            raise InputError(
                f"The splits {first.name} and {split.name}: they make batches of {sum(first.sizes)} and "
                f"{sum(split.sizes)} samples. Give splits of one batch: all arms must make the same update."
            )
    return splits


def default_splits(batch_size: int, wanted_counts: tuple[int, ...] = COUNTS) -> list[Split]:
    """The first source's splits 5x20, 10x10, 20x5 of a batch of 100, or the nearest for another batch."""
    counts = {
        min(
            (k for k in range(2, batch_size + 1) if batch_size % k == 0),
            key=lambda k: abs(k - wanted),
            default=1,
        )
        for wanted in wanted_counts
    }
    names = [f"{count}x{batch_size // count}" for count in sorted(counts | {1})]
    if counts == {batch_size} and batch_size > 3:  # a prime number: add a split into two parts
        names.insert(1, f"{batch_size - batch_size // 2}/{batch_size // 2}")
    return parse_splits(names)


def splits_of(
    recipe: Recipe,
    texts: str | Sequence[str] | None,
    batch_size: int | None,
    *,
    counts: tuple[int, ...] = COUNTS,
) -> list[Split]:
    """Return the splits that were asked for, or the default ones; refuse another size of the batch."""
    size = batch_size or recipe.batch_size
    splits = default_splits(size, counts) if texts is None else parse_splits(texts)
    size = sum(splits[0].sizes)
    if batch_size not in (None, size):
        raise InputError(
            f"batch_size={batch_size} with the split {splits[0].name}: that split makes batches of {size} "
            "samples. Leave one of the two out."
        )
    if size > recipe.samples:
        raise InputError(
            f"A batch of {size} samples: the recipe {recipe.name!r} has {recipe.samples} training samples. "
            "Use a smaller batch."
        )
    return splits
