"""Transaction over the micro-batches of a window: begin, (savepoint [rollback])*, then commit or restore."""

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
    """Participants of one window, in the order in which they begin; they are restored in the other order.

    Args:
        config: of the accumulator.
        gradients: the sum of the window.
        progress: its position.
        sizing: of its micro-batches.
        watch: of the parameters in the first window; None later.

    Attributes:
        modes: torch's modes at the entry of the window; assigned by `OpenWindow.__enter__`.
        scale: of the losses; None: they are not scaled.
        streams: random streams of samples; None: micro-batches draw from the global generators.
        norms: BatchNorms that are frozen or pooled; None: there are none.
        pooled: BatchNorms with pooled statistics. They depend on the size of micro-batches, so a window with
            them is not retried in smaller ones.
        noise: of the gradient, where this window measures it.
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
        # A dropped micro-batch must leave no state behind, so the state is copied before each one.
        each = config.nonfinite == "skip_microbatch"
        self._state = ForwardStateOfEach(config.state) if each else ForwardState(config.state)
        # Random numbers first, so that they are restored last: another restore may draw.
        found: list[Participant | None] = [
            config.random,
            self._state,
            self.streams,
            self.norms,
            self.scale,
            watch,
            config.earlier,
            gradients,
            self.noise,
            config.extra,
            progress,
        ]
        self._participants: list[Participant] = [each for each in found if each is not None]
        # Bound once: attribute lookups per micro-batch are measurable for small models.
        self._savepoints = [each.savepoint for each in self._participants if has_savepoint(type(each))]
        self._commits = [each.commit for each in self._participants]
        self._begun = 0  # how many of them, from the first
        self._unsynchronised = ExitStack()

    @property
    def scaled_by(self) -> float | None:
        """Scale of the losses since the window began; None: they are not scaled."""
        return None if self.scale is None else self.scale.value

    def begin(self) -> None:
        """Begin all participants; if this raises, the caller must call `restore`."""
        if self.noise is not None:
            self.noise.expect(self.progress.microbatches, shared=self.config.sync.shared)
        for participant in self._participants:
            self._begun += 1  # one that fails counts
            participant.begin()
        # Last: until then no forward runs, and a failure has nothing to leave.
        self._unsynchronised = self.config.sync.no_sync()

    def savepoint(self) -> None:
        """Remember everything as before the current micro-batch."""
        for savepoint in self._savepoints:
            savepoint()

    def rollback(self) -> bool:
        """Restore the savepoint; False where that is impossible: then `restart`."""
        return all(participant.rollback() for participant in reversed(self._participants[: self._begun]))

    def drop(self) -> None:
        """Drop the current micro-batch: roll all back but random numbers, scale, noise and position.

        Raises:
            WindowError: a participant of the user's own cannot roll back.
        """
        # Only these: a dropped micro-batch keeps its random draws and its place.
        for participant in (self.gradients, self.norms, self._state):
            if participant is not None:
                participant.rollback()
        if self.config.extra is not None and not self.config.extra.rollback():
            raise WindowError(
                'nonfinite="skip_microbatch" drops a micro-batch that is not finite, but rollback() of one '
                "of the participants= returned False. Restore the savepoint there and return True, or choose "
                "another nonfinite=."
            )

    def restart(self) -> None:
        """Restore everything as before the window, which stays open and begins at its first micro-batch."""
        for participant in self._participants:
            participant.restart()
        # FSDP2 keeps unsharded gradients until no_sync is left.
        if self.config.sync.in_step:
            self.renew_sync()

    def renew_sync(self) -> None:
        """Leave `Sync.no_sync` and enter it again, which frees unsharded gradients."""
        self._unsynchronised.close()
        self._unsynchronised = self.config.sync.no_sync()

    def restore(self) -> None:
        """Restore everything as before the window, also where some of it fails.

        Raises:
            BaseException: the last that a participant raised.
        """
        take_each(
            self._unsynchronised.close,
            *(participant.restore for participant in reversed(self._participants[: self._begun])),
        )

    def commits(self) -> list[Callable[[], None]]:
        """Return the steps that keep what the window did, for `take_each`."""
        return [self._unsynchronised.close, *self._commits]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all participants in one mapping."""
        state: dict[str, Any] = {"key": 0, "norms": None, "noise": None, "scale": None}
        for participant in self._participants:
            state |= participant.state_dict()
        if self.streams is not None:
            # Inside a stream the global generator is that of a sample.
            state["random"]["torch"] = self.streams.generator_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the states of all participants."""
        # Without a scaler here no participant checks the saved scale.
        if self.scale is None:
            require_scale(None, state)
        take_each(*(partial(each.load_state_dict, state) for each in self._participants))

    def stream(self, index: int) -> AbstractContextManager[None]:
        """Return a context in which the samples of a micro-batch have random streams of their own."""
        if self.streams is None:
            return nullcontext()
        # Streams depend on the place in the effective batch, not on the micro-batch.
        return self.streams.of(self.progress.microbatches.places(index, self.streams.first_sample))


def _scale_of(config: Config) -> LossScale:
    # Gradients without a step of ours stay scaled, as the host's own scaler expects them.
    by_host, unscaled = config.backward is not None, config.earlier is None
    device = config.owned[0].parameter.device
    return LossScale(config.rule.scaler, device, scaled_by_host=by_host, unscaled=unscaled)


def take_each(*steps: Callable[[], Any]) -> None:
    """Run all steps; if one raises, run every step again, including those after a step that raises.

    Args:
        steps: each may run twice.

    Raises:
        BaseException: the error of the second run, if there is one; else that of the first, unless it was out
            of memory.

    Examples:
        >>> done = []
        >>> take_each(lambda: done.append(1), lambda: done.append(2))
        >>> done
        [1, 2]
    """
    # A step that was interrupted inside no_grad() would leave the mode off.
    grad = torch.is_grad_enabled()
    try:
        for step in steps:
            step()
    except BaseException as error:
        no_memory = out_of_memory(error)
        torch.set_grad_enabled(grad)  # no_grad() may not have been left
        with ExitStack() as stack:  # which takes the step that was put in last first
            for step in reversed(steps):
                # All steps again: they may be run twice, and which of them failed half way is not known.
                stack.callback(_with_memory, step)
        if not no_memory:
            raise


def _with_memory(step: Callable[[], Any]) -> None:
    try:
        step()
    except BaseException as error:
        if not out_of_memory(error):
            raise
        # Freed blocks return to the allocator, then one more try.
        release_caches()
        step()
