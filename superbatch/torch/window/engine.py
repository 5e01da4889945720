"""Engine of an accumulator: opens its windows, one at a time, and runs, saves or discards them.

At most one window is open. The engine holds what outlives a window: configuration, number of updates, sizes
found, schedule of the checks, noise, and a loaded window that is not yet resumed. On several ranks a window
begins with an announcement, so that a rank that fails before its first micro-batch can report it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from superbatch.errors import InputError, WindowError
from superbatch.noise.meter import NoiseMeter
from superbatch.results.memory import MemoryReport
from superbatch.results.noise import Noise
from superbatch.results.update import Update

from ..checks.check_schedule import CheckSchedule
from ..checks.first_check import check_first_window
from ..loss.losses import NUMBERS
from ..masters import masters_at_first, masters_loader, masters_state, masters_written, take_over
from ..modes import kept_modes
from ..sizes.sizing import Sizing
from . import misuse, options, validation
from .config import Config
from .discarding import discard_saved
from .failure_report import report_failure
from .microbatches import MicrobatchList
from .open_window import OpenWindow
from .owned_parameters import ModelParameters, OwnedParameters
from .participants.gradient_sum import ManagedParameter
from .participants.placement import Placement
from .slip_watch import SlipWatch
from .slips import PLAIN, refuse_no_batch
from .update_rule import Once
from .work import Work, weights_of


class Engine:
    """Opens windows, and holds the state that lasts from one window to the next.

    Args:
        config: configuration of the windows.
        parameters: the parameters whose gradients are summed; found again before each window.
        work: cuts batches into micro-batches and runs the loss on them.
        placement: chooses the gradient sum of each window.
        schedule: decides in which windows the loss is checked against its declaration.
        slips: warns of common mistakes with schedulers and sizes.

    Attributes:
        config, work: the arguments.
        updates: number of windows that ended with an update, or with a gradient.
        checked: True once a window has ended with an update or a gradient. Until then every window is checked
            as a first window.
    """

    def __init__(
        self,
        config: Config,
        parameters: OwnedParameters | ModelParameters,
        work: Work,
        placement: Placement,
        *,
        schedule: CheckSchedule,
        slips: SlipWatch,
    ) -> None:
        self.config, self.work = config, work
        self.updates, self.checked = 0, False
        self._number = 1  # `updates` after the open window, if it makes an update
        self._parameters, self._placement = parameters, placement
        self._schedule, self._slips = schedule, slips
        self._window: OpenWindow[Any] | None = None
        self._loaded_window: dict[str, Any] | None = None
        self._masters_written = masters_at_first(config.owned)

    @property
    def memory(self) -> MemoryReport | None:
        """Sizes of micro-batches that were found; None if the size is fixed."""
        return self.work.sizing.report()

    @property
    def noise(self) -> Noise | None:
        """Noise of the gradient over the windows so far; None if it is not measured."""
        return None if self.config.noise is None else self.config.noise.meter.estimate()

    def update(self, batch: Any) -> Update:
        """Open a window over a batch, run the loss on it, and end the window; see `Accumulator.__call__`."""
        window = self._open(batch, at_once=True)
        try:
            with window:
                self.work.run(window)
        except BaseException as error:
            window.abandon(error)  # an interrupt may come before `__exit__` runs
            raise
        return self.work.record(window)

    def open(self, batch: Any) -> OpenWindow[Any]:
        """Return a window over a batch; the first one is preceded by the check of the loss."""
        return self._open(batch, at_once=False)

    def _open(self, batch: Any, *, at_once: bool) -> OpenWindow[Any]:
        """Return a window for `update` (`at_once`), or for the user's ``with`` block (entered later)."""
        config, first = self.config, not self.checked
        schedule = None if self._schedule.idle else self._schedule
        if self._window is not None:
            raise misuse.second_window()
        sync = config.sync
        if sync.shared:
            self._begin_on_ranks()
        try:
            if at_once and not self.work.can_run:
                raise options.without_loss_fn()
            microbatches, sizing = self._cut(batch)
            if self._loaded_window is not None and self._loaded_window["samples"] is not None:
                microbatches.recut_as_saved(self._loaded_window["samples"])
            weights = weights_of(config, microbatches.microbatches, microbatches.samples)
            if schedule is not None:
                with (
                    kept_modes() if first else nullcontext(),
                    config.outside_window() if first else nullcontext(),
                ):
                    schedule.open(microbatches, check_first_window if first else None, self.updates)
            window: OpenWindow[Any] = OpenWindow(
                config,
                self._placement.choose(len(microbatches), only_owned=self._parameters.only_some),
                microbatches,
                weights,
                sizing,
                resume=self._loaded_window,
                watch=validation.BackwardWatch(config.owned) if first else None,
                check_schedule=schedule,
                on_enter=self._set_open if at_once else self._opener_for_later(),
                on_resume=self._forget_loaded,
                closing_steps=self._closing_steps,
            )
            if sync.shared and ((schedule is not None and first) or self._loaded_window is not None):
                sync.vote(raised=False)  # a check may have failed on one rank only
            return window
        except BaseException as error:
            if sync.shared:
                report_failure(sync, error, "before its first micro-batch")
            raise

    def _begin_on_ranks(self) -> None:
        """Begin a window on several ranks. From here on this rank must report a failure to the others."""
        config, terms = self.config, len(self.config.declared.terms) or 1
        announced = config.sync.count_announced([entry.parameter for entry in config.owned])
        config.sync.begin_window(self.updates, max(3 * terms + NUMBERS + announced, config.sync.count))

    def _cut(self, batch: Any) -> tuple[MicrobatchList, Sizing]:
        """Validate the batch and split it."""
        if type(batch) not in PLAIN:
            refuse_no_batch(batch)
        self._make_ready()
        # A search for the size runs forwards, during which the user's participants must be restored.
        with self.config.outside_window() if self.work.sizing.measures else nullcontext():
            return self.work.cut(batch)

    def _make_ready(self) -> None:
        """Adopt changes to models, optimizers and master weights since the last window.

        Raises:
            OptimizerError: the last update was made only in part, or a new parameter is in no optimizer.
        """
        config = self.config
        config.before_step.require_not_torn()
        config.sync.reshard()
        self._parameters.refresh()
        if config.masters:
            take_over(config.owned, self._masters_written)

    def discard(self) -> None:
        """Discard a loaded or interrupted window, and restore the state before it.

        Raises:
            WindowError: a hook, scheduler or participant called this while the window begins or ends.
        """
        if self._window is not None:
            if self._window.is_busy:
                raise misuse.while_busy("discard()")
            self._window.abandon()
        self._loaded_window = discard_saved(self._loaded_window, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state and that of the open window, as tensors and plain containers.

        Raises:
            WindowError: a micro-batch is between its forward and its backward, or the window is ending.
        """
        config = self.config
        return {
            "version": 1,
            "updates": self.updates,
            # A loaded window that is not resumed yet is saved again unchanged.
            "window": self._loaded_window if self._window is None else self._window.state_dict(),
            "check": self._schedule.state_dict(),
            "sizing": self.work.state_dict(),
            "noise": None if config.noise is None else config.noise.meter.state_dict(),
            "masters": masters_state(config.models, config.masters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; the next window resumes the saved window.

        Args:
            state: from `state_dict`.

        Raises:
            InputError: `state` is not from `state_dict`, its noise was averaged with another setting, or its
                master weights do not fit.
            WindowError: a window is open.
        """
        config = self.config
        state = options.check_state(state)
        self._schedule.check_state(state.get("check"))
        if self._window is not None:
            raise misuse.load_inside()
        # Checks first and returns the function that copies, so that an error below leaves the masters
        # unchanged.
        load_masters = masters_loader(config.models, config.masters, state.get("masters"))
        _load_sizing_and_noise(state, self.work, None if config.noise is None else config.noise.meter)
        load_masters()
        self._schedule.load_state_dict(state.get("check"))
        config.before_step.clear_torn()
        self.updates, self._loaded_window = state["updates"], state["window"]

    def copy_for_survey(self) -> Engine:
        """Return an engine that makes the same updates and does not change this one.

        It has no scheduler and measures no noise, so a survey cannot step the user's scheduler. It begins
        with the sizes found so far, checks the loss if this engine has not, and counts its own updates.

        Raises:
            WindowError: a window is open, or a loaded one is not yet resumed.
        """
        if self._window is not None or self._loaded_window is not None:
            raise WindowError(
                "A survey cannot begin in the middle of a window, whose gradients belong to the training. "
                "Finish the window first, or call discard()."
            )
        config = replace(
            self.config,
            rule=replace(self.config.rule, schedulers=()),
            reserve=copy.copy(self.config.reserve),  # with the memory that the first update needed
            until_next=[],
            noise=None,  # a survey tries rates that the training will not use
        )
        survey = Engine(
            config,
            self._parameters,
            self.work.copy(),
            copy.copy(self._placement),
            schedule=copy.copy(self._schedule),  # a shallow copy: its parts are replaced, never changed
            slips=copy.copy(self._slips),
        )
        survey.updates, survey.checked = self.updates, self.checked
        return survey

    def _open_later(
        self, owned: list[ManagedParameter], dtypes: list[torch.dtype], window: OpenWindow[Any]
    ) -> None:
        """Open a window whose block is entered after it was made.

        Args:
            owned: the parameters when the window was made.
            dtypes: their dtypes then.
            window: the window.

        Raises:
            WindowError: another window is open, this one is over, or parameters have changed since.
        """
        if self._window is not None:
            raise misuse.second_window()
        if window.is_over:
            raise self._entered_twice()
        self._make_ready()
        self.work.require_allowed()
        self._placement.require_allowed()
        now = self.config.owned
        # The gradients of the window belong to the parameters that the model had when it was made.
        if list(map(id, owned)) != list(map(id, now)) or dtypes != [each.parameter.dtype for each in now]:
            raise misuse.other_parameters()
        self._schedule.updates = self.updates
        self._set_open(window)

    def _entered_twice(self) -> WindowError:
        """Return the error for entering a window twice, and tell other ranks, which expect a new window."""
        error, sync = misuse.over(), self.config.sync
        if sync.shared:
            self._begin_on_ranks()
            report_failure(sync, error, "before its first micro-batch")
        return error

    def _opener_for_later(self) -> Callable[[OpenWindow[Any]], None]:
        """Return the function that opens a window made now, when its block is entered."""
        owned = list(self.config.owned)
        return partial(self._open_later, owned, [each.parameter.dtype for each in owned])

    def _set_open(self, window: OpenWindow[Any]) -> None:
        if self._window is not None:
            raise misuse.second_window()
        if window.resume is not self._loaded_window:
            raise misuse.made_before_load()
        if self._slips.watches:
            watched = window.transaction.sizing is self.work.watched
            self._slips.open(window.transaction.progress.microbatches.samples if watched else None)
        self._number = self.updates + 1
        self._window, window.is_open = window, True  # one statement, so that no interrupt comes between

    def _forget_loaded(self) -> None:
        self._loaded_window = None

    def _closing_steps(self, window: OpenWindow[Any], made: bool) -> list[Callable[[], None]]:
        """Return the functions that close a window; the caller passes them to `run_all`.

        Args:
            window: the window.
            made: whether it ended with an update, or with a gradient.
        """
        config, sizing = self.config, window.transaction.sizing
        steps: list[Callable[[], None]] = []
        if self._slips.watches:
            steps.append(self._slips.close)
        if config.masters:
            steps.append(self._record_masters)
        if config.noise is not None:
            steps.append(partial(config.noise.end_window, made=made))
        if not self._schedule.idle:
            steps.append(partial(self._schedule.close, made=made))
        if config.earlier is not None:
            steps.append(config.earlier.free)
        if sizing.learns:
            steps.append(Once(partial(sizing.closed, made=made)).run)
        if made:
            steps.append(self._count)
        steps.append(partial(self._close, window))
        return steps

    def _count(self) -> None:
        self.checked, self.updates = True, self._number

    def _close(self, window: OpenWindow[Any]) -> None:
        self._window, window.is_open = None, False

    def _record_masters(self) -> None:
        self._masters_written = masters_written(self.config.owned)


def _load_sizing_and_noise(state: Mapping[str, Any], work: Work, meter: NoiseMeter | None) -> None:
    """Load an accumulator's sizes and noise: both, or after an error neither.

    Args:
        state: the accumulator's.
        work: holds the sizes.
        meter: holds the noise; None if it is not measured.

    Raises:
        InputError: one of them is malformed, or the noise was averaged with another setting; nothing has
            changed.
    """
    if not isinstance(state.get("noise"), Mapping | None):
        raise InputError(
            f"The saved noise is a {type(state['noise']).__name__}, not a dict. Pass what "
            "Accumulator.state_dict() returned."
        )
    before = work.state_dict()
    work.load_state_dict(state)
    try:
        if meter is not None and state.get("noise") is not None:
            meter.load_state_dict(state["noise"])
    except Exception:  # any kind, because it is raised again: only the old sizes must be restored first
        work.load_state_dict({"sizing": before})
        raise
