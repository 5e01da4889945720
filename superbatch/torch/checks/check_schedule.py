"""Schedule of the check of the declared loss: the first window, and later ones with unchecked features.

Only unequal samples reveal a wrong declaration. So at the end of each window, without a forward, the schedule
searches for features that no check has compared: losses other than 0, unequal weights and counts
(`sample_counts`), lengths (`lengths`) and ranks (`rank_counts`). A flag in the window's all-reduce announces
the check to all ranks, which make it together before the update.

A divisor may also depend on predictions. So from window 10 on the loss is checked each time the number of
windows has doubled. Later checks have a budget: one call of `loss_fn` per 100 micro-batches.
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
from ..window.microbatches import CheckedWindow, MicrobatchList
from ..window.options import check_bool
from .candidates import clues_of
from .check_record import CheckRecord, check_saved_checks
from .check_samples import ENOUGH, first_microbatches, with_repeated_label
from .checked import ALIKE, Checked
from .cuts import first_part
from .first_check import check_later_window, check_pairs
from .lengths import Pair, lengths_in, ragged
from .probing.problem import Problem
from .rank_counts import differing_counts, digest, first_sample, first_sample_counts
from .sample_counts import Count, Hints, contrast_of_cut, contrast_of_extremes, counts_in, extremes, uneven
from .unchecked_feature import WINDOWS, UncheckedFeature, inspects_all_counts, unequal_weights

CALLS = 8
"""Calls of `loss_fn` in a check of a few samples."""
ROUTINE = 10
"""First window that may be checked without an unchecked feature."""

_MOST_CLASSES = 1024  # a longer tensor does not hold class weights
_FAINT = ENOUGH / 2  # a smaller contrast is checked only if the budget allows it
_WEIGHT, _LOSS, _NO_LOSS = "weights of samples", "losses other than 0", "losses of 0 beside others"
_LENGTHS = "lengths of micro-batches"
_UNCHECKED = (
    "superbatch did not check the loss of this loop against reduction= and weight=, because the loop calls "
    "forward and backward itself. Pass the loss of a micro-batch as loss_fn= too, to have it checked on the "
    "first window; or check it with superbatch.torch.verify; or pass check=False to silence this warning."
)


class CheckSchedule:
    """Schedule of the checks of one accumulator's loss.

    Args:
        config: settings of the accumulator.
        batchnorms: BatchNorms in training mode; the check runs them as frozen.
        check: the accumulator's option `check`.

    Attributes:
        idle: True if no window is checked, and no warning is due.
        updates: number of updates before the window; set by `open`, and when a window is resumed.

    Raises:
        InputError: `check` is no bool.
    """

    def __init__(self, config: Config, batchnorms: Iterable[Any], *, check: bool) -> None:
        self._config, self._frozen = config, list(batchnorms)
        # Without running statistics a BatchNorm couples samples in every mode, so the loss cannot be checked.
        bare = any(module.running_mean is None for module in self._frozen)
        self._can_check = check_bool(check, "check") and config.loss_fn is not None and not bare
        self._to_warn = check and config.loss_fn is None and not config.whole
        self.idle = not (self._can_check or self._to_warn)
        self.updates, self._hints = 0, Hints()
        self._checked = False  # the first window was checked
        self._all_counts: list[Count] = []
        self._counts: list[Count] = []  # counts that were equal for all samples in every check so far
        self._urgent: list[Count] = []  # of these, the ones that are checked regardless of the budget
        self._feature: UncheckedFeature | None = None  # reason for this window's check
        self._lengths: list[str] = []  # leaves whose sample length may differ between micro-batches
        self._shared: set[str] = set()  # names of counts and lengths that all ranks have
        self._current = self._committed = CheckRecord()  # including the present window; as of the last update
        self._microbatches = self._pending = 0  # micro-batches in updates made, and in the present window

    def open(self, window: MicrobatchList, first: Callable[..., Checked | None] | None, updates: int) -> None:
        """Check the first window before it is opened; without a `loss_fn`, warn once.

        `first`, a function that checks the loss, is None after the first window.

        Raises:
            LossSpecError, CoupledSamplesError: the loss contradicts its declaration.
        """
        self.updates, self._current = updates, self._committed
        # One micro-batch on one process is plain training: no weights are involved.
        if self._to_warn and (len(window) > 1 or self._config.sync.shared):
            self._to_warn, self.idle = False, True
            warn(_UNCHECKED)
        if first is None or not self._can_check:
            return
        checked = first(self._config, window, frozen=self._frozen)
        self._checked, self._hints = checked is not None, _hints(self._config)
        if checked is not None:
            self._add_to_record(window, checked, first_microbatches(window))

    def needs_check(self, window: CheckedWindow) -> tuple[bool, int]:
        """Return whether a window has an unchecked feature and the budget allows a check.

        Returns:
            True if a check is needed, and a hash of the counts of this rank's samples.
        """
        if not self._checked or not window.microbatches.microbatches:  # a rank without data
            return False, 0
        return self._needs_check(window), digest(self._uncompared(window)) if self._shared else 0

    def _needs_check(self, window: CheckedWindow) -> bool:
        count = len(window.microbatches)
        # Added to the budget in `close`, after the update: a discarded window earns none.
        self._pending, self._feature = count, None
        if count < 2 and not self._config.sync.shared:  # nothing is averaged
            return False
        every = inspects_all_counts(self.updates)
        found = self._find(window, every=every)
        if found is None:
            return self._is_due(count)
        now, allowed = self._current, max(count, self._microbatches // WINDOWS)
        # A sure feature is checked once regardless of the budget; others wait until the budget has grown.
        if now.spent + CALLS <= allowed or (found.sure and found.name not in now.said):
            said = [found.name, _NO_LOSS] if 0.0 in window.losses else [found.name]
            self._current, self._feature = replace(now, said=(*now.said, *said)), found
            return True
        # Only some windows inspect all counts, so the samples may have differed in earlier windows.
        if now.unverified is None:
            first = max(self.updates // 2, self.updates - WINDOWS) + 1 if every else self.updates
            self._current = replace(now, unverified=first)
        return False

    def check_now(self, window: CheckedWindow, *, unchanged: bool) -> None:
        """Check the loss on samples of a window; all ranks call it if one of them needs a check.

        `unchanged`: the forward has not written into the micro-batches.

        Raises:
            LossSpecError, CoupledSamplesError: the loss contradicts its declaration.
        """
        parts, pairs = window.microbatches.source_batches(), [self._from_ranks(window, unchanged)]
        chosen = self._choose(window) if unchanged and parts else []  # a rank without data has none
        if unchanged and parts and (longest := ragged(parts, self._lengths)):
            pairs.append((parts[longest[0]], parts[longest[1]]))
        try:
            # Samples of two lengths cannot be joined; `check_pairs` compares them.
            chosen = [*chosen, *_united(pairs[0])]
            checked = check_later_window(self._config, window.microbatches, chosen, frozen=self._frozen)
            check_pairs(
                self._config, window.microbatches, [pair for pair in pairs if pair], frozen=self._frozen
            )
        except (LossSpecError, CoupledSamplesError) as error:
            routine = self._current.unverified is None and self._feature is None
            first = max(1, self._current.routine) if routine else self._first_unverified()
            shown_by = f"Update {self.updates}, which shows the error, was not made."
            missed = f"The updates from {first} on (counted from 0) were not verified."
            raise type(error)(f"{error} {shown_by} {missed}") from None
        spent = self._current.spent + CALLS * max(1, len(chosen))
        self._current = replace(self._current, spent=spent, routine=self.updates + 1)
        self._add_to_record(window.microbatches, checked, chosen)

    def close(self, *, made: bool) -> None:
        """End a window: commit its record if the update was made, otherwise discard it."""
        if made:
            self._committed = self._current
            self._microbatches, self._pending = self._microbatches + self._pending, 0
        # CheckRecord is frozen, so another object means that this window has changed the record.
        elif self._current is not self._committed:
            self._current = self._committed
            self._set_counts(self._all_counts)

    def state_dict(self) -> dict[str, Any]:
        """Return the record as of the last update, in plain containers."""
        before = self._committed
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
        saved = {name: state[name] for name in vars(CheckRecord()) if name in state}
        self._current = self._committed = CheckRecord(**saved)
        self._microbatches = state["microbatches"]
        self._set_counts(self._all_counts)

    def _is_due(self, count: int) -> bool:
        """Return whether a routine check is due and the budget allows another check after it."""
        now = self._current
        if not now.compared or self.updates + 1 < max(ROUTINE, 2 * now.routine):
            return False
        return now.spent + 2 * CALLS <= (self._microbatches + count) // WINDOWS

    def _first_unverified(self) -> int:
        return self.updates if self._current.unverified is None else self._current.unverified

    def _add_to_record(self, window: MicrobatchList, checked: Checked, chosen: Sequence[Any]) -> None:
        lengths = {
            path for microbatch in window.microbatches[:1] for path in lengths_in(microbatch, window.paths)
        }
        compared, found = checked.reason in ("", ALIKE), list(self._all_counts)
        seen: dict[str, float] = {}
        for microbatch in chosen:
            counts = counts_in(microbatch, **window.paths, hints=self._hints)
            found += [count for count in counts if count not in found]
            if compared:
                for count, values, _ in uneven(found, [microbatch]):
                    seen[str(count)] = max(seen.get(str(count), 0.0), contrast_of_cut(values))
                seen[_WEIGHT] = max(seen.get(_WEIGHT, 0.0), self._contrast_of_weights(microbatch, window))
        names = {*map(str, found), *map(_length_of, lengths)}
        # A collective: every rank must call it, even if its check had nothing to compare.
        every = self._config.sync.gather((compared, checked.informative, names, seen))
        self._shared = set.intersection(*(each[2] for each in every)) if len(every) > 1 else set()
        declared = self._config.declared
        averaged = self._config.reduction == "mean" and (declared.needs_samples or not declared.returned)
        self._lengths = sorted(lengths) if averaged else []
        # A comparison on one rank holds for all ranks, because they declare the same loss.
        seen = dict(self._current.seen)
        for *_, of_rank in every:
            for name, value in of_rank.items():
                seen[name] = max(seen.get(name, 0.0), value)
        informative = any(each[1] for each in every)
        self._current = replace(
            self._current,
            compared=self._current.compared or any(each[0] for each in every),
            seen=seen,
            unverified=None if informative else self._first_unverified(),
        )
        self._all_counts = found
        self._set_counts(found)

    def _set_counts(self, counts: Sequence[Count]) -> None:
        """Set the counts that no check has compared yet."""
        if self._config.reduction != "mean":  # sums add up without weights
            return
        now = self._current
        self._counts = [count for count in counts if now.seen.get(str(count), 0.0) < ENOUGH]
        self._urgent = [count for count in self._counts if str(count) not in now.said]

    def _find(self, window: CheckedWindow, *, every: bool) -> UncheckedFeature | None:
        """Return an unchecked feature, or None; with `every`, all counts are inspected."""
        if not self._current.compared:
            return (
                UncheckedFeature(_LOSS) if any(window.losses[index] for index in window.took_part()) else None
            )
        # Losses of 0 beside others reveal a mean over the nonzero losses only.
        if 0.0 in window.losses and _NO_LOSS not in self._current.said:
            losses = [window.losses[index] for index in window.took_part()]
            if any(losses) and not all(losses):
                return UncheckedFeature(_NO_LOSS)
        found = self._unequal(window, every=every) if self._config.reduction == "mean" else None
        if found is not None or window.microbatches.cut_from_one or _LENGTHS in self._current.said:
            return found
        return (
            UncheckedFeature(_LENGTHS)
            if ragged(window.microbatches.source_batches(), self._lengths)
            else None
        )

    def _uncompared(self, window: CheckedWindow) -> dict[str, float]:
        """Return the counts of this rank's first sample that were not yet compared between ranks."""
        if self._config.reduction != "mean" or not self._shared or not window.microbatches.microbatches:
            return {}
        part = window.microbatches.source_batches()[0]
        counts = first_sample_counts(self._counts, part)
        lengths = lengths_in(part, window.microbatches.paths) if self._lengths else {}
        counts |= {_length_of(path): float(length) for path, length in lengths.items()}
        shared, said = self._shared, self._current.said
        return {
            name: value for name, value in counts.items() if name in shared and _of_ranks(name) not in said
        }

    def _from_ranks(self, window: CheckedWindow, unchanged: bool) -> Pair | None:
        """Return a sample of the rank with the lowest count and one of the rank with the highest; or None."""
        ranks = self._config.sync
        # `_shared` is equal on all ranks, so either all of them call the collective below or none.
        if not self._shared:
            return None
        names, chosen = differing_counts(ranks.gather(self._uncompared(window)), self._current.seen)
        self._current = replace(self._current, said=(*self._current.said, *map(_of_ranks, names)))
        if chosen is None:
            return None
        # Only two ranks send a sample: a gather delivers everything to every rank.
        sends = unchanged and ranks.index in chosen
        samples = ranks.gather(
            first_sample(window.microbatches.source_batches()[0], window.microbatches.paths)
            if sends
            else None
        )
        least, most = (samples[rank] for rank in chosen)
        return None if least is None or most is None else (least, most)

    def _unequal(self, window: CheckedWindow, *, every: bool) -> UncheckedFeature | None:
        """Return the most unequal count of a window, if its contrast exceeds twice that of earlier checks."""
        counts = self._counts if every else self._urgent
        found: list[UncheckedFeature] = []
        values_of: dict[str, Any] = {}
        for count, values, likely in uneven(counts, window.microbatches.source_batches(), unlikely=every):
            found.append(UncheckedFeature(str(count), contrast_of_extremes(values), sure=likely))
            values_of[str(count)] = values
        if callable(self._config.weigh) and self._current.seen.get(_WEIGHT, 0.0) < ENOUGH:
            found += unequal_weights(window, _WEIGHT)
        if not found:  # nearly every window
            return None
        new = [each for each in found if each.contrast > 2 * self._current.seen.get(each.name, 0.0)]
        best = max(new, key=lambda each: (each.sure, each.contrast), default=None)
        if best is None:
            return None
        samples = extremes(values_of[best.name], 2) if best.name in values_of else best.samples
        return UncheckedFeature(best.name, best.contrast, samples, best.sure and best.contrast >= _FAINT)

    def _contrast_of_weights(self, microbatch: Any, window: MicrobatchList) -> float:
        """Return the relative difference of the mean weights of the first third and of the other samples."""
        weigh = self._config.weigh
        if not callable(weigh):  # with "returned", the check compares the returned weights
            return 1.0
        planned = plan_of(microbatch, **window.paths)
        if (cut := first_part(planned.samples)) >= planned.samples:  # one sample, or none
            return 0.0
        first = weigh(planned.take(0, cut)) / cut
        rest = weigh(planned.take(cut, planned.samples)) / (planned.samples - cut)
        return float(abs(first - rest) / max(first, rest)) if max(first, rest) > 0 else 0.0

    def _choose(self, window: CheckedWindow) -> list[Any]:
        """Return micro-batches to check: samples with the unchecked feature, or some chosen by loss."""
        found, batches = self._feature or self._find(window, every=False), window.microbatches
        samples = with_repeated_label(found.samples, batches) if found is not None and found.samples else []
        picked = batches.pick(samples) if samples else None
        if picked is not None:
            return [picked]
        order = sorted(window.took_part(), key=lambda index: abs(window.losses[index]))
        if not order:
            return []
        if found is None and batches.samples is not None:
            picked = batches.pick(batches.spread_samples(order))
            if picked is not None:
                return [picked]
        # Join samples with loss 0 and others: only such a micro-batch reveals a mean over nonzero losses.
        mixed = (
            batches.pick(batches.first_samples_of_two(order[0], order[-1], 2))
            if order[1:] and batches.samples
            else None
        )
        alone = batches.count(order[-1]) == 1  # a single sample cannot be cut
        return [
            microbatch
            for microbatch in (mixed, None if alone else batches.microbatches[order[-1]])
            if microbatch is not None
        ]


def _united(pair: Pair | None) -> list[Any]:
    """Return a pair of samples as one micro-batch, in a list; empty if they cannot be joined."""
    try:
        return [] if pair is None else [joined(pair)]
    except (SplitError, InputError):  # `check_pairs` compares samples of unequal lengths
        return []


def _of_ranks(name: str) -> str:
    return f"{name} of ranks"


def _length_of(path: str) -> str:
    return f"{path!r} (its length)"


def _hints(config: Config) -> Hints:
    """Return the labels that the loss modules ignore, and the class weights."""
    assert config.loss_fn is not None
    clues = clues_of(Problem(nn.ModuleList(config.models), config.loss_fn))
    unequal = [weights for weights in clues.class_tensors if 1 < weights.unique().numel() <= _MOST_CLASSES]
    return Hints(clues.ignored, tuple(tuple(weights.tolist()) for weights in unequal[:4]))
