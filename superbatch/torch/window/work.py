"""Work of a window: cut the batch into micro-batches, weigh them, and run the loss on each.

`ByMicrobatch` is the ordinary kind; `coupled_work.Coupled` runs the loss on the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.nn.modules.batchnorm import _BatchNorm

from superbatch.results.update import Update
from superbatch.window import Window

from ..loss.records import WindowWeights
from ..loss.terms import TermWeights, returned_weights
from ..loss.weighing import Weights
from ..sizes.auto import AutoSize
from ..sizes.sizing import Fixed, Sizing, load_sizing, sizing_state
from .config import Config
from .lockstep import work_in_lockstep
from .microbatches import MicrobatchList, Paths, split_batch
from .open_window import OpenWindow
from .participants import batchnorm as norms
from .retry import work_through
from .turns import equalize_turns


class Work(Protocol):
    """Cuts a batch into the micro-batches of a window, and runs the loss on them."""

    @property
    def sizing(self) -> Sizing:
        """Chooses the sizes of micro-batches."""
        ...

    @property
    def watched(self) -> Sizing | None:
        """Sizing for whose batches `SlipWatch` warns if they are never split; None: no warning."""
        ...

    @property
    def can_run(self) -> bool:
        """True if there is a loss to run."""
        ...

    def require_allowed(self) -> None:
        """Check that the models, in their present modes, may run on micro-batches."""
        ...

    def cut(self, batch: Any) -> tuple[MicrobatchList, Sizing]:
        """Return the micro-batches of a batch or of a `Window`, and their sizing."""
        ...

    def run(self, window: OpenWindow[Any]) -> None:
        """Run forward and backward of all micro-batches of an open window."""
        ...

    def record(self, window: OpenWindow[Any]) -> Update:
        """Return the record of a window that is over."""
        ...

    def copy(self) -> Work:
        """Return a copy that begins with the same sizes and does not change this one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the sizes that were found; if this raises, none of them has changed."""
        ...


class ByMicrobatch:
    """Runs the loss on each micro-batch by itself.

    Args:
        config: the accumulator's.
        sizing: chooses the sizes of micro-batches.
        paths: `unsplit` and `per_sample` declarations.
        batchnorms: BatchNorms that raise in training mode.
    """

    def __init__(
        self, config: Config, sizing: Fixed | AutoSize, paths: Paths, batchnorms: dict[str, _BatchNorm]
    ) -> None:
        self.sizing = sizing
        self._config, self._paths, self._batchnorms = config, paths, batchnorms
        # A Window has the sizes of its loader, so their largest size that fits is learned separately.
        self._of_windows = Fixed(None)
        # Per-sample streams need the position of each sample.
        self._need_samples = config.declared.needs_samples or config.sample_rng

    @property
    def watched(self) -> Sizing | None:
        """Sizing whose batches are watched for being too small to be cut."""
        return self.sizing

    @property
    def can_run(self) -> bool:
        """True if there is a loss to run."""
        return self._config.loss_fn is not None

    def require_allowed(self) -> None:
        """Raise `CoupledSamplesError` if a BatchNorm would normalise each micro-batch by itself."""
        if self._batchnorms:
            norms.refuse(self._batchnorms)

    def cut(self, batch: Any) -> tuple[MicrobatchList, Sizing]:
        """Return the micro-batches of a batch or of a `Window`, and their sizing.

        Raises:
            CoupledSamplesError: a BatchNorm would normalise each micro-batch by itself.
            InputError, SplitError: the batch cannot be cut, or another rank's batch cannot be sent here.
        """
        # At each window, because eval() and train() may have been called.
        if self._batchnorms:
            self.require_allowed()
        sync = self._config.sync
        sizing = self._of_windows if batch is None or isinstance(batch, Window) else self.sizing
        if batch is None and sync.shared:  # a rank without data takes part in the sums over ranks
            microbatches = MicrobatchList([], [], None, self._paths)
        else:
            microbatches = split_batch(batch, sizing, self._paths, sync, need_samples=self._need_samples)
        # Forwards are collective, so each rank must run the same number.
        if sync.has_collective_forwards:
            equalize_turns(microbatches, sync)
        return microbatches, sizing

    def run(self, window: OpenWindow[Any]) -> None:
        """Run the loss on every micro-batch, in smaller micro-batches if memory runs out."""
        (work_in_lockstep if self._config.sync.has_collective_forwards else work_through)(window)

    def record(self, window: OpenWindow[Any]) -> Update:
        """Return the record of a window that is over."""
        return window.update

    def copy(self) -> ByMicrobatch:
        """Return a copy that begins with the same sizes and does not change this one."""
        copied = ByMicrobatch(self._config, self.sizing.fresh_copy(), self._paths, self._batchnorms)
        # Copied, so that a survey that runs out of memory does not shrink the training's micro-batches.
        copied.load_state_dict({"sizing": self.state_dict()})
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found."""
        return sizing_state(self.sizing, self._of_windows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the sizes that were found; if this raises, none of them has changed."""
        self._of_windows = load_sizing(state, self.sizing)


def weights_of(config: Config, microbatches: list[Any], samples: list[int] | None) -> WindowWeights:
    """Return the weights of a window's micro-batches; `samples` is None if they cannot be counted."""
    declared = config.declared
    if declared.terms:
        return TermWeights(
            declared.terms, microbatches, samples, config.sync, lambda parts: returned_weights(config, parts)
        )
    # Weights known before the forward are summed over the ranks, which shows a failed rank. Returned weights
    # are not, so the ranks vote instead.
    if config.sync.shared and declared.returned:
        config.sync.vote(raised=False)
    return Weights(
        declared.weigh, declared.reduction, microbatches, samples, config.sync, min_weight=declared.min_weight
    )
