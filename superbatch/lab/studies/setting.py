"""Setting that all runs of a comparison share, for every backend: arms, updates, order of the samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from superbatch.batch.split import near_equal
from superbatch.errors import InputError

from ..recipes import Recipe

CURVE_POINTS = 50
TAILS_IN_A_RUN = 10  # short last batches of a run, at least, so that even a short run shows their effect
Method = (
    Literal["real batch", "accumulator", "plain accumulation", "mean of means", "fixed tail divisor"]
    | Literal["again", "missing 1/K", "another batch"]  # of surveys only
)
NAMED_BY_SPLIT = ("real batch", "accumulator", "another batch")  # methods that an arm's name leaves out
Tick = Callable[[int], None]  # called with the micro-batches, or other units of work, since the last call
WRONG: Mapping[Method, str] = {
    "mean of means": "wrong: each micro-batch's mean counts 1/K, whatever its weight",
    "fixed tail divisor": "wrong: divides a shorter window, too, by the K of a full window",
}
COUNTS = 5, 10, 20  # numbers of micro-batches of the default splits
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
        """Return the sizes for a batch that may be shorter: near-equal, or in the split's proportions."""
        if samples == sum(self.sizes):
            return self.sizes
        if self.equal:
            return tuple(near_equal(samples, self.sizes[0]))
        ends = [end * samples // sum(self.sizes) for end in accumulate(self.sizes, initial=0)]
        return tuple(end - start for start, end in pairwise(ends) if end > start)


@dataclass(frozen=True)
class ArmSpec:
    """Specification of an arm: a split, and the method of making updates with it."""

    split: Split
    method: Method
    claim: Any  # the report's `Claim` (in surveys `SurveyClaim`) that the arm makes of its updates

    @property
    def name(self) -> str:
        """Name of the arm: the split, and the method unless it is in `NAMED_BY_SPLIT`."""
        return self.split.name if self.method in NAMED_BY_SPLIT else f"{self.split.name} {self.method}"


@dataclass(frozen=True)
class Setting:
    """Setting that all runs of a comparison share. It can be pickled."""

    updates: int  # of each run
    batch_size: int  # samples of one update
    optimizer: str  # one of the recipe's
    learning_rate: float  # constant over the run
    arms: tuple[ArmSpec, ...] = ()  # the real batch first
    tail: int | None = None  # samples of each epoch's short last batch; None: epochs are concatenated
    dtype: str = "float32"  # or "float64"; on torch any name of a dtype
    backend: str = "torch"  # framework that trains


def batches(draw: Callable[[], np.ndarray], samples: int, setting: Setting) -> Iterator[np.ndarray]:
    """Cut random permutations of the samples, which `draw` returns, into the batches of a run.

    Without `setting.tail` the permutations are concatenated and cut into batches. With it, each permutation
    ends with a short batch, and its other samples are not used; a run of 20 updates or more has at least
    `TAILS_IN_A_RUN` short batches.
    """
    size, tail, left = setting.batch_size, setting.tail, setting.updates
    pending = np.empty(0, np.int64)
    often = max(1, setting.updates // TAILS_IN_A_RUN - 1)
    while left > 0:
        pending = np.concatenate([pending, draw()])
        full = len(pending) // size if tail is None else min((samples - tail) // size, often)
        cuts = [pending[start : start + size] for start in range(0, full * size, size)]
        if tail is not None:
            cuts.append(pending[full * size : full * size + tail])
        pending = pending[full * size :] if tail is None else pending[:0]
        yield from cuts[:left]
        left -= len(cuts)


def curve_updates(updates: int) -> tuple[int, ...]:
    """Return the last update of each part of a run that is cut into at most `CURVE_POINTS` equal parts."""
    points = min(CURVE_POINTS, updates)
    return tuple((point + 1) * updates // points for point in range(points))


def parse_split(text: str) -> Split:
    """Return the split that a text describes."""
    text = text.strip()
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        count, size = map(int, match.groups())
        sizes = (size,) * count
    elif re.fullmatch(r"\d+(/\d+)+", text):
        sizes = tuple(map(int, text.split("/")))
    else:
        raise InputError(f"The split {text!r} cannot be read. {FORMS}.")
    if not sizes or not all(sizes):
        raise InputError(f"The split {text!r} has an empty micro-batch. {FORMS}.")
    return Split(text, sizes)


def parse_splits(texts: str | Sequence[str]) -> list[Split]:
    """Return the splits of a text, separated by commas, or of several texts; all of the same batch size."""
    parts = texts.split(",") if isinstance(texts, str) else list(texts)
    splits = list(dict.fromkeys(parse_split(part) for part in parts))  # without duplicates
    if not splits:
        raise InputError(f"No split was given, so there is nothing to compare. {FORMS}.")
    first = splits[0]
    for split in splits:
        if sum(split.sizes) != sum(first.sizes):
            raise InputError(
                f"The splits {first.name} and {split.name} are of batches of {sum(first.sizes)} and "
                f"{sum(split.sizes)} samples. Give splits of one batch size: all arms make the same update."
            )
    return splits


def default_splits(batch_size: int, wanted_counts: tuple[int, ...] = COUNTS) -> list[Split]:
    """Return the batch in one piece, and a split into equal micro-batches for each wanted count.

    A count that does not divide the batch is replaced by the nearest that does. For a batch of 100 the splits
    are 1x100 and those of the first article in docs/sources: 5x20, 10x10 and 20x5.
    """
    counts = {
        min(
            (k for k in range(2, batch_size + 1) if batch_size % k == 0),
            key=lambda k: abs(k - wanted),
            default=1,
        )
        for wanted in wanted_counts
    }
    names = [f"{count}x{batch_size // count}" for count in sorted(counts | {1})]
    if counts == {batch_size} and batch_size > 3:  # a prime has no other divisor: add a split in two
        names.insert(1, f"{batch_size - batch_size // 2}/{batch_size // 2}")
    return parse_splits(names)


def splits_of(
    recipe: Recipe,
    texts: str | Sequence[str] | None,
    batch_size: int | None,
    *,
    counts: tuple[int, ...] = COUNTS,
) -> list[Split]:
    """Return the splits of the texts, or the default ones.

    Their batch must have the stated size, if there is one, and no more samples than the recipe.
    """
    size = batch_size or recipe.batch_size
    splits = default_splits(size, counts) if texts is None else parse_splits(texts)
    size = sum(splits[0].sizes)
    if batch_size not in (None, size):
        raise InputError(
            f"batch_size={batch_size} with the split {splits[0].name}, which is of a batch of {size} "
            "samples. Leave one of the two out."
        )
    if size > recipe.samples:
        raise InputError(
            f"A batch of {size} samples: the recipe {recipe.name!r} has {recipe.samples} training samples. "
            "Use a smaller batch."
        )
    return splits
