"""Transaction over the micro-batches of a window: all participants begin, then all commit or all restore.

Order of calls: ``begin``, then ``savepoint`` before each micro-batch, and ``rollback`` after a failed one.
``commit`` follows the optimizer step; every failure before the step leads to ``restore``, which leaves all
state as it was before `begin`. Participants begin in the listed order and are restored in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from superbatch.errors import WindowError

from ..memory.out_of_memory import out_of_memory, release_caches
from ..modes import Modes
from ..sizes.sizing import Sizing
from .config import Config
from .participant import Participant, has_savepoint
from .participants.batchnorm import Frozen, Pooled
from .participants.forward_state import ForwardState, ForwardStateOfEach
from .participants.gradient_sum import GradientSum
from .participants.loss_scale import LossScale, require_scale
from .participants.noise.windows import NoiseOfWindows
from .participants.sample_streams import SampleStreams
from .progress import Progress
from .validation import BackwardWatch


class Transaction:
    """Participants of one window, in the order in which they begin; they are restored in reverse order.

    Args:
        config: the accumulator's.
        gradients: gradient sum of the window.
        progress: position in the window.
        sizing: chooses the sizes of micro-batches.
        watch: detects parameters that a backward of the first window changes; None in later windows.

    Attributes:
        modes: torch's modes at the entry of the window; assigned by `OpenWindow.__enter__`.
        scale: scale of the losses; None: they are not scaled.
        streams: random streams of samples; None: micro-batches draw from the global generators.
        norms: frozen or pooled BatchNorms; None: there are none.
        pooled: BatchNorms with pooled statistics. Their update depends on the micro-batch size, so a window
            with them is not retried in smaller micro-batches.
        noise: measures the noise of the gradient; None: it is not measured.
    """

    modes: Modes

    def __init__(
        self,
        config: Config,
        gradients: GradientSum,
        progress: Progress,
        sizing: Sizing,
        watch: BackwardWatch | None,
    ) -> None:
        self.config, self.gradients, self.progress, self.sizing = config, gradients, progress, sizing
        self.scale = _scale_of(config) if config.rule.scaling else None
        samples = sum(progress.microbatches.samples or ())
        self.streams = SampleStreams(config.sync, samples) if config.sample_rng else None
        self.norms: Frozen | Pooled | None = config.norms
        self.pooled = self.norms if isinstance(self.norms, Pooled) else None
        self.noise: NoiseOfWindows | None = config.noise
        self.watch = watch
        # With this policy one micro-batch may be dropped, so the state is copied before each of them.
        may_drop = config.nonfinite == "skip_microbatch"
        self._state = ForwardStateOfEach(config.state) if may_drop else ForwardState(config.state)
        # Random state first, so that it is restored last: another restore may draw numbers.
        participants: list[Participant | None] = [
            config.random,
            self._state,
            self.streams,
            self.norms,
            self.scale,
            watch,
            config.earlier,
            gradients,
            self.noise,
            config.user_participants,
            progress,
        ]
        self._participants: list[Participant] = [each for each in participants if each is not None]
        # Bound once, because attribute lookups per micro-batch are measurable for small models.
        self._savepoints = [each.savepoint for each in self._participants if has_savepoint(type(each))]
        self._commits = [each.commit for each in self._participants]
        self._begun = 0  # number of participants that have begun
        self._unsynchronised = ExitStack()

    @property
    def scaled_by(self) -> float | None:
        """Scale of the losses at the beginning of the window; None: they are not scaled."""
        return None if self.scale is None else self.scale.value

    def begin(self) -> None:
        """Begin all participants. If this raises, the caller must call `restore`."""
        if self.noise is not None:
            self.noise.prepare(self.progress.microbatches, shared=self.config.sync.shared)
        for participant in self._participants:
            self._begun += 1  # before the call, so that a participant that fails is restored too
            participant.begin()
        # Last, so that a failure above has no context to leave.
        self._unsynchronised = self.config.sync.no_sync()

    def savepoint(self) -> None:
        """Remember the state before the current micro-batch."""
        for savepoint in self._savepoints:
            savepoint()

    def rollback(self) -> bool:
        """Restore the savepoint; return False if that is impossible: the caller must then call `restart`."""
        return all(participant.rollback() for participant in reversed(self._participants[: self._begun]))

    def drop(self) -> None:
        """Drop the current micro-batch: roll back gradient, BatchNorm statistics and forward state.

        Random state and position advance, as if the micro-batch had been kept.

        Raises:
            WindowError: `rollback` of one of the user's participants returned False.
        """
        for participant in (self.gradients, self.norms, self._state):
            if participant is not None:
                participant.rollback()
        if self.config.user_participants is not None and not self.config.user_participants.rollback():
            raise WindowError(
                'nonfinite="skip_microbatch" cannot drop this micro-batch, because rollback() of an object '
                "in participants= returned False. Make its rollback() restore the savepoint and return "
                "True, or "
                'pass nonfinite="raise".'
            )

    def restart(self) -> None:
        """Restore the state before the window; the window stays open and begins at its first micro-batch."""
        for participant in self._participants:
            participant.restart()
        # FSDP2 keeps unsharded gradients until no_sync() ends.
        if self.config.sync.has_collective_forwards:
            self.renew_sync()

    def renew_sync(self) -> None:
        """Leave `Sync.no_sync` and enter it again, which frees unsharded gradients."""
        self._unsynchronised.close()
        self._unsynchronised = self.config.sync.no_sync()

    def restore(self) -> None:
        """Restore the state before the window, in every participant even if one raises; see `run_all`."""
        run_all(
            self._unsynchronised.close,
            *(participant.restore for participant in reversed(self._participants[: self._begun])),
        )

    def commits(self) -> list[Callable[[], None]]:
        """Return the functions that commit the window; the caller passes them to `run_all`."""
        return [self._unsynchronised.close, *self._commits]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all participants in one mapping."""
        state: dict[str, Any] = {"key": 0, "norms": None, "noise": None, "scale": None}
        for participant in self._participants:
            state |= participant.state_dict()
        if self.streams is not None:
            # Inside a stream the global generator has the state of a sample's stream.
            state["random"]["torch"] = self.streams.generator_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of all participants."""
        # Without a scaler there is no participant that checks the saved scale.
        if self.scale is None:
            require_scale(None, state)
        run_all(*(partial(each.load_state_dict, state) for each in self._participants))

    def stream(self, index: int) -> AbstractContextManager[None]:
        """Return a context in which each sample of a micro-batch draws from its own random stream."""
        if self.streams is None:
            return nullcontext()
        # A stream depends on the sample's position in the effective batch, not on the micro-batch.
        return self.streams.of(self.progress.microbatches.positions(index, self.streams.first_sample))


def _scale_of(config: Config) -> LossScale:
    # `Gradient` (earlier is set) makes no step: its gradients stay scaled, as the user's scaler expects.
    by_host, unscaled = config.backward is not None, config.earlier is None
    device = config.owned[0].parameter.device
    return LossScale(config.rule.scaler, device, scaled_by_host=by_host, unscaled=unscaled)


def run_all(*steps: Callable[[], Any]) -> None:
    """Run functions in order. If one raises, run all of them once more, and skip none if one raises again.

    Args:
        steps: functions that may run twice.

    Raises:
        BaseException: an error of the second run. If the second run succeeds: the error of the first run,
            unless it was out of memory.

    Examples:
        >>> done = []
        >>> run_all(lambda: done.append(1), lambda: done.append(2))
        >>> done
        [1, 2]
    """
    grad = torch.is_grad_enabled()
    try:
        for step in steps:
            step()
    except BaseException as error:
        no_memory = out_of_memory(error)
        torch.set_grad_enabled(grad)  # an interrupt inside no_grad() leaves grad mode off
        with ExitStack() as stack:  # runs all callbacks, last registered first, even if one raises
            for step in reversed(steps):
                # All of them, because an interrupt (Ctrl-C) may have stopped any of them halfway.
                stack.callback(_with_memory, step)
        if not no_memory:
            raise


def _with_memory(step: Callable[[], Any]) -> None:
    try:
        step()
    except BaseException as error:
        if not out_of_memory(error):
            raise
        release_caches()
        step()
