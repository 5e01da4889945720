"""Schedule of the check of the declared loss: the first window, and later ones that show something new.

A wrong declaration shows on unequal samples only. So the boundary of each window looks, without a forward,
for losses other than 0, unequal weights and counts (`sample_counts`), lengths (`lengths`) and ranks
(`rank_counts`) that no check has compared. One number in a sum that every window makes tells all ranks, and
they check together before the update. A divisor may also depend on predictions, which no data shows: from
window 10 on, each doubling of the number of windows brings a check without news, if the budget allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from superbatch.batch.tree import plan as plan_of
from superbatch.errors import CoupledSamplesError, InputError, LossSpecError, SplitError

from ..warn import warn
from ..window.config import Config
from ..window.joining import joined
from ..window.microbatches import MicrobatchList, Shown
from ..window.options import check_bool
from .candidates import clues_of
from .check_memory import Memory, check_saved_checks
from .check_news import News
from .check_pieces import ENOUGH, first_pieces
from .checked import ALIKE, Checked
from .first_check import check_later_window, check_pairs
from .lengths import Pair, lengths_in, ragged
from .probing.problem import Problem
from .rank_counts import apart, digest, first_sample, levels_of
from .sample_counts import Count, Hints, contrast, counts_in, extremes, spread, uneven

CALLS = 8
"""Calls of `loss_fn` that a check of a few samples makes."""
WINDOWS = 100
"""In this many windows, further checks may cost one window, and all counts are inspected once."""
ROUTINE = 10
"""The first window that may be checked without news."""

_MOST_CLASSES = 1024  # a longer tensor does not hold class weights
_FAINT = ENOUGH / 2
_WEIGHT, _LOSS, _NO_LOSS = "weights of samples", "losses other than 0", "losses of 0 beside others"
_LENGTHS = "lengths of micro-batches"
_UNCHECKED = (
    "superbatch did not check the loss of this loop, which owns its forward and backward: whether it is what "
    "reduction= and weight= state is up to you. Pass the loss of a micro-batch as loss_fn= beside the loop "
    "to have it checked on the first window, check it with superbatch.torch.verify, or pass check=False to "
    "silence this."
)


class CheckSchedule:
    """Windows at which the declared loss is checked again.

    Args:
        config: of the accumulator.
        batchnorms: those of the models in training mode, to be taken as frozen.
        check: the option of the accumulator.

    Attributes:
        idle: no window is checked, and there is nothing to say of it.
        updates: number of those made before the window; set again where a window is entered later.

    Raises:
        InputError: `check` is no bool.
    """

    def __init__(self, config: Config, batchnorms: Iterable[Any], *, check: bool) -> None:
        self._config, self._frozen = config, list(batchnorms)
        # A BatchNorm without running statistics couples samples in every mode, which the user has accepted.
        bare = any(module.running_mean is None for module in self._frozen)
        self._can_check = check_bool(check, "check") and config.loss_fn is not None and not bare
        self._unsaid = check and config.loss_fn is None and not config.whole
        self.idle = not (self._can_check or self._unsaid)
        self.updates, self._on, self._hints = 0, False, Hints()
        self._known: list[Count] = []
        self._counts: list[Count] = []  # those that no check has seen unequal
        self._urgent: list[Count] = []  # and that a window is checked for at any cost
        self._found: News | None = None  # reason of this window's check
        self._lengths: list[str] = []  # leaves whose samples may have other lengths in other micro-batches
        self._shared: set[str] = set()  # counts and lengths that all ranks know
        self._now = self._before = Memory()
        self._microbatches = self._pending = 0

    def open(self, pieces: MicrobatchList, first: Callable[..., Checked | None] | None, updates: int) -> None:
        """Check the first window before it is opened, or warn once that there is no `loss_fn` to check.

        Args:
            pieces: of the window about to be opened.
            first: checks the loss on its micro-batches; None: it is not the first one.
            updates: made so far.

        Raises:
            LossSpecError, CoupledSamplesError: the loss contradicts its declaration.
        """
        self.updates, self._now = updates, self._before
        # One micro-batch on one process is plain training: nothing is averaged that could be wrong.
        if self._unsaid and (len(pieces) > 1 or self._config.sync.shared):
            self._unsaid, self.idle = False, True
            warn(_UNCHECKED)
        if first is None or not self._can_check:
            return
        checked = first(self._config, pieces, frozen=self._frozen)
        self._on, self._hints = checked is not None, _hints(self._config)
        if checked is not None:
            self._record(pieces, checked, first_pieces(pieces))

    def news(self, shown: Shown) -> tuple[bool, int]:
        """Tell whether a window shows something that no check has seen, and a check can be afforded.

        Returns:
            Whether it does, and a number that identifies the counts of this rank's samples.
        """
        if not self._on or not shown.pieces.microbatches:  # of a rank without data
            return False, 0
        return self._has_news(shown), digest(self._levels(shown)) if self._shared else 0

    def _has_news(self, shown: Shown) -> bool:
        count = len(shown.pieces)
        # Counted in `left`, once the update was made: a discarded window earns no budget.
        self._pending, self._found = count, None
        if count < 2 and not self._config.sync.shared:  # nothing is averaged
            return False
        every = in_full(self.updates)
        found = self._find(shown, every=every)
        if found is None:
            return self._is_due(count)
        now, allowed = self._now, max(count, self._microbatches // WINDOWS)
        # Sure news is checked once whatever it costs; the rest waits until the budget has grown.
        if now.spent + CALLS <= allowed or (found.sure and found.name not in now.said):
            said = [found.name, _NO_LOSS] if 0.0 in shown.losses else [found.name]
            self._now, self._found = replace(now, said=(*now.said, *said)), found
            return True
        if now.unverified is None:  # counts read in few windows may have differed before
            first = max(self.updates // 2, self.updates - WINDOWS) + 1 if every else self.updates
            self._now = replace(now, unverified=first)
        return False

    def look(self, shown: Shown, *, unchanged: bool) -> None:
        """Check the loss on samples of a window that some rank has news of: all ranks do it together.

        Args:
            shown: by the window.
            unchanged: whether the micro-batches are as they were before the loss was computed from them.

        Raises:
            LossSpecError, CoupledSamplesError: the loss contradicts its declaration.
        """
        parts, pairs = shown.pieces.parts(), [self._from_ranks(shown, unchanged)]
        chosen = self._choose(shown) if unchanged and parts else []  # none on a rank without data
        if unchanged and parts and (places := ragged(parts, self._lengths)):
            pairs.append((parts[places[0]], parts[places[1]]))
        try:
            # Two lengths cannot be joined: then `check_pairs` alone compares them.
            chosen = [*chosen, *_united(pairs[0])]
            checked = check_later_window(self._config, shown.pieces, chosen, frozen=self._frozen)
            check_pairs(self._config, shown.pieces, [pair for pair in pairs if pair], frozen=self._frozen)
        except (LossSpecError, CoupledSamplesError) as error:
            has_news = self._now.unverified is not None or self._found is not None
            first = self._first_unverified() if has_news else max(1, self._now.routine)
            raise type(error)(
                f"{error} The first update that was not verified is update {first} "
                f"(counted from 0); update {self.updates}, which shows the error, was not made."
            ) from None
        spent = self._now.spent + CALLS * max(1, len(chosen))
        self._now = replace(self._now, spent=spent, routine=self.updates + 1)
        self._record(shown.pieces, checked, chosen)

    def left(self, *, made: bool) -> None:
        """End a window: its record is kept if its update was made."""
        if made:
            self._before = self._now
            self._microbatches, self._pending = self._microbatches + self._pending, 0
        # Memory is frozen, so another object means that this window has changed the record.
        elif self._now is not self._before:
            self._now = self._before
            self._open(self._known)

    def state_dict(self) -> dict[str, Any]:
        """Return the record until the last update, in plain containers."""
        before = self._before
        return {
            **vars(before),
            "microbatches": self._microbatches,
            "seen": dict(before.seen),
            "said": list(before.said),
        }

    check_state = staticmethod(check_saved_checks)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume from what `state_dict` returned; None, from an older version, changes nothing."""
        if state is None:
            return
        # A field that an older version did not save keeps its default.
        known = {name: state[name] for name in vars(Memory()) if name in state}
        self._now = self._before = Memory(**known)
        self._microbatches = state["microbatches"]
        self._open(self._known)

    def _is_due(self, count: int) -> bool:
        """Tell whether a check without news is due; the budget keeps another one for news."""
        now = self._now
        if not now.compared or self.updates + 1 < max(ROUTINE, 2 * now.routine):
            return False
        return now.spent + 2 * CALLS <= (self._microbatches + count) // WINDOWS

    def _first_unverified(self) -> int:
        return self.updates if self._now.unverified is None else self._now.unverified

    def _record(self, pieces: MicrobatchList, checked: Checked, chosen: Sequence[Any]) -> None:
        lengths = {path for piece in pieces.microbatches[:1] for path in lengths_in(piece, pieces.paths)}
        compared, found = checked.reason in ("", ALIKE), list(self._known)
        seen: dict[str, float] = {}
        for piece in chosen:
            counts = counts_in(piece, **pieces.paths, hints=self._hints)
            found += [count for count in counts if count not in found]
            if compared:
                for count, values, _ in uneven(found, [piece]):
                    seen[str(count)] = max(seen.get(str(count), 0.0), contrast(values))
                seen[_WEIGHT] = max(seen.get(_WEIGHT, 0.0), self._contrast_of_weights(piece, pieces))
        names = {*map(str, found), *map(_length_of, lengths)}
        # A collective: every rank calls it, also one whose check found nothing to compare.
        every = self._config.sync.gather((compared, checked.informative, names, seen))
        self._shared = set.intersection(*(each[2] for each in every)) if len(every) > 1 else set()
        declared = self._config.declared
        averaged = self._config.reduction == "mean" and (declared.needs_samples or not declared.returned)
        self._lengths = sorted(lengths) if averaged else []
        # A comparison on one rank holds for all: they declare the same loss.
        seen = dict(self._now.seen)
        for *_, of_rank in every:
            for name, value in of_rank.items():
                seen[name] = max(seen.get(name, 0.0), value)
        informative = any(each[1] for each in every)
        self._now = replace(
            self._now,
            compared=self._now.compared or any(each[0] for each in every),
            seen=seen,
            unverified=None if informative else self._first_unverified(),
        )
        self._known = found
        self._open(found)

    def _open(self, counts: Sequence[Count]) -> None:
        """Note the counts that no check has compared."""
        if self._config.reduction != "mean":  # sums add up, whatever they are divided by
            return
        now = self._now
        self._counts = [count for count in counts if now.seen.get(str(count), 0.0) < ENOUGH]
        self._urgent = [count for count in self._counts if str(count) not in now.said]

    def _find(self, shown: Shown, *, every: bool) -> News | None:
        """Return the news that no check has seen yet; `every`: also news that is not worth any cost."""
        if not self._now.compared:
            return News(_LOSS) if any(shown.losses[index] for index in shown.took_part()) else None
        if 0.0 in shown.losses and _NO_LOSS not in self._now.said:  # a mean over those with a loss shows here
            losses = [shown.losses[index] for index in shown.took_part()]
            if any(losses) and not all(losses):
                return News(_NO_LOSS)
        found = self._unequal(shown, every=every) if self._config.reduction == "mean" else None
        if found is not None or shown.pieces.cut_from_one or _LENGTHS in self._now.said:
            return found
        return News(_LENGTHS) if ragged(shown.pieces.parts(), self._lengths) else None

    def _levels(self, shown: Shown) -> dict[str, float]:
        """Return the counts of this rank's first sample, where no check has seen unequal ones."""
        if self._config.reduction != "mean" or not self._shared or not shown.pieces.microbatches:
            return {}
        part = shown.pieces.parts()[0]
        levels = levels_of(self._counts, part)
        lengths = lengths_in(part, shown.pieces.paths) if self._lengths else {}
        levels |= {_length_of(path): float(length) for path, length in lengths.items()}
        known, said = self._shared, self._now.said
        return {
            name: value for name, value in levels.items() if name in known and _of_ranks(name) not in said
        }

    def _from_ranks(self, shown: Shown, unchanged: bool) -> Pair | None:
        """Samples of the two ranks whose samples count least and most; None if all ranks are alike."""
        ranks = self._config.sync
        # Equal on all ranks, so that all of them gather below, or none does.
        if not self._shared:
            return None
        names, chosen = apart(ranks.gather(self._levels(shown)), self._now.seen)
        self._now = replace(self._now, said=(*self._now.said, *map(_of_ranks, names)))
        if chosen is None:
            return None
        # One sample of two ranks is sent, as every rank receives everything that is gathered.
        sends = unchanged and ranks.index in chosen
        samples = ranks.gather(first_sample(shown.pieces.parts()[0], shown.pieces.paths) if sends else None)
        least, most = (samples[rank] for rank in chosen)
        return None if least is None or most is None else (least, most)

    def _unequal(self, shown: Shown, *, every: bool) -> News | None:
        """Return the most unequal count of a window, if it is twice as unequal as the checked ones."""
        counts = self._counts if every else self._urgent
        found: list[News] = []
        values_of: dict[str, Any] = {}
        for count, values, likely in uneven(counts, shown.pieces.parts(), unlikely=every):
            found.append(News(str(count), spread(values), sure=likely))
            values_of[str(count)] = values
        if callable(self._config.weigh) and self._now.seen.get(_WEIGHT, 0.0) < ENOUGH:
            found += _unequal_weights(shown)
        if not found:  # the usual case of every window
            return None
        new = [news for news in found if news.contrast > 2 * self._now.seen.get(news.name, 0.0)]
        best = max(new, key=lambda news: (news.sure, news.contrast), default=None)
        if best is None:
            return None
        samples = extremes(values_of[best.name], 2) if best.name in values_of else best.samples
        return News(best.name, best.contrast, samples, best.sure and best.contrast >= _FAINT)

    def _contrast_of_weights(self, piece: Any, pieces: MicrobatchList) -> float:
        """Return the contrast of the weights on both sides of the check's cut."""
        weigh = self._config.weigh
        if not callable(weigh):  # with "returned", whatever the loss returned was checked
            return 1.0
        planned = plan_of(piece, **pieces.paths)
        cut = -(-planned.samples // 3)
        if not 0 < cut < planned.samples:
            return 0.0
        first = weigh(planned.take(0, cut)) / cut
        rest = weigh(planned.take(cut, planned.samples)) / (planned.samples - cut)
        return float(abs(first - rest) / max(first, rest)) if max(first, rest) > 0 else 0.0

    def _choose(self, shown: Shown) -> list[Any]:
        """Return micro-batches that show the news: of samples that count least and most, or by losses."""
        found, pieces = self._found or self._find(shown, every=False), shown.pieces
        picked = pieces.pick(found.samples) if found is not None and found.samples else None
        if picked is not None:
            return [picked]
        order = sorted(shown.took_part(), key=lambda index: abs(shown.losses[index]))
        if not order:
            return []
        if found is None and pieces.samples is not None:
            picked = pieces.pick(pieces.firsts(order))
            if picked is not None:
                return [picked]
        # Samples without and with a loss: where all have one, a mean over those that have one is a mean.
        mixed = pieces.pick(pieces.of_two(order[0], order[-1], 2)) if order[1:] and pieces.samples else None
        alone = pieces.count(order[-1]) == 1  # which has no parts to be compared with
        return [
            piece for piece in (mixed, None if alone else pieces.microbatches[order[-1]]) if piece is not None
        ]


def _united(pair: Pair | None) -> list[Any]:
    try:
        return [] if pair is None else [joined(pair)]
    except (SplitError, InputError):  # of unequal lengths: `check_pairs` inspects them
        return []


def _of_ranks(name: str) -> str:
    return f"{name} of ranks"


def _length_of(path: str) -> str:
    return f"{path!r} (its length)"


def _hints(config: Config) -> Hints:
    """Return the labels that loss modules in reach leave out, and the class weights in reach."""
    assert config.loss_fn is not None
    clues = clues_of(Problem(nn.ModuleList(config.models), config.loss_fn))
    unequal = [weights for weights in clues.class_tensors if 1 < weights.unique().numel() <= _MOST_CLASSES]
    return Hints(clues.ignored, tuple(tuple(weights.tolist()) for weights in unequal[:4]))


def in_full(updates: int) -> bool:
    """Return whether a window inspects all counts: at doubling distances first, then one of many.

    All ranks inspect the same windows in full.

    Args:
        updates: made before the window.

    Examples:
        >>> [updates for updates in range(1, 401) if in_full(updates)]
        [1, 2, 4, 8, 16, 32, 64, 100, 200, 300, 400]
    """
    return updates % WINDOWS == 0 or (updates < WINDOWS and updates.bit_count() == 1)


def _unequal_weights(shown: Shown) -> list[News]:
    """Return whether samples of two micro-batches weigh differently."""
    samples, weights = shown.pieces.samples, shown.weights
    some = [index for index, weight in enumerate(weights) if weight]
    if samples is None or not some:
        return []
    each = [weight / count for weight, count in zip(weights, samples, strict=True)]
    least, most = min(some, key=each.__getitem__), max(some, key=each.__getitem__)
    if not each[least] < each[most] * (1 - 1e-9):
        return []
    return [News(_WEIGHT, 1 - each[least] / each[most], shown.pieces.of_two(least, most, 1))]
