"""Work of a window: batches are cut into micro-batches, and the loss runs on each.

`ByMicrobatch` is the ordinary kind; `coupled_work.Coupled` runs the loss on the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.nn.modules.batchnorm import _BatchNorm

from superbatch.results.update import Update
from superbatch.window import Window

from ..sizes.auto import AutoSize
from ..sizes.sizing import Fixed, Sizing, load_sizing, sizing_state
from .config import Config
from .lockstep import work_in_step
from .microbatches import MicrobatchList, Paths, pieces_of
from .open_window import OpenWindow
from .participants import batchnorm as norms
from .retry import work_through
from .turns import take_turns


class Work(Protocol):
    """Cutting of batches into the micro-batches of a window, and the run of the loss on them."""

    @property
    def sizing(self) -> Sizing:
        """Sizes of the micro-batches of a batch."""
        ...

    @property
    def watched(self) -> Sizing | None:
        """Sizing whose batches may be too small to be cut; None: none."""
        ...

    @property
    def can_run(self) -> bool:
        """True if there is a loss to run."""
        ...

    def require_allowed(self) -> None:
        """Check that the models may be run on micro-batches as they are now."""
        ...

    def cut(self, batch: Any) -> tuple[MicrobatchList, Sizing]:
        """Return the micro-batches of a batch or of a `Window`, and what chooses their sizes."""
        ...

    def run(self, window: OpenWindow[Any]) -> None:
        """Run forward and backward of everything in an open window."""
        ...

    def record(self, window: OpenWindow[Any]) -> Update:
        """Return the record of a window that is over."""
        ...

    def twin(self) -> Work:
        """Return work that begins with the same sizes and leaves no trace in this one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with sizes that were found; all of them or, with an error, none."""
        ...


class ByMicrobatch:
    """Micro-batches of a batch, and the loss of each.

    Args:
        config: of the accumulator.
        sizing: of the micro-batches of a batch.
        paths: `unsplit` and `per_sample` declarations.
        batchnorms: those that are refused in training mode.
    """

    def __init__(
        self, config: Config, sizing: Fixed | AutoSize, paths: Paths, batchnorms: dict[str, _BatchNorm]
    ) -> None:
        self.sizing = sizing
        self._config, self._paths, self._batchnorms = config, paths, batchnorms
        # A Window brings its own sizes, so lack of memory is learned apart from those of batches.
        self._of_windows = Fixed(None)
        # Per-sample streams need the place of each sample.
        self._need_samples = config.declared.needs_samples or config.sample_rng

    @property
    def watched(self) -> Sizing | None:
        """Sizing whose batches may be too small to be cut."""
        return self.sizing

    @property
    def can_run(self) -> bool:
        """True if there is a loss to run."""
        return self._config.loss_fn is not None

    def require_allowed(self) -> None:
        """Check that no BatchNorm would normalise each micro-batch by itself.

        Raises:
            CoupledSamplesError: one would.
        """
        if self._batchnorms:
            norms.refuse(self._batchnorms)

    def cut(self, batch: Any) -> tuple[MicrobatchList, Sizing]:
        """Return the micro-batches of a batch or of a `Window`, and what chooses their sizes.

        Raises:
            CoupledSamplesError: a BatchNorm would normalise each micro-batch by itself.
            InputError, SplitError: the batch cannot be cut, or that of another rank not be sent here.
        """
        # At each window: eval() and train() may have changed it.
        if self._batchnorms:
            self.require_allowed()
        sync = self._config.sync
        sizing = self._of_windows if batch is None or isinstance(batch, Window) else self.sizing
        # It still takes part in the sums over the ranks.
        if batch is None and sync.shared:  # of a rank without data
            pieces = MicrobatchList([], [], None, self._paths)
        else:
            pieces = pieces_of(batch, sizing, self._paths, sync, need_samples=self._need_samples)
        # Forwards are collective: each rank runs as many.
        if sync.in_step:
            take_turns(pieces, sync)
        return pieces, sizing

    def run(self, window: OpenWindow[Any]) -> None:
        """Run the loss on every micro-batch, in smaller ones where memory runs out."""
        (work_in_step if self._config.sync.in_step else work_through)(window)

    def record(self, window: OpenWindow[Any]) -> Update:
        """Return the record of a window that is over."""
        return window.update

    def twin(self) -> ByMicrobatch:
        """Return work that begins with the same sizes and leaves no trace in this one."""
        twin = ByMicrobatch(self._config, self.sizing.twin(), self._paths, self._batchnorms)
        # By value: a check's failures must not shrink the real window.
        twin.load_state_dict({"sizing": self.state_dict()})
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found."""
        return sizing_state(self.sizing, self._of_windows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with sizes that were found; all of them or, with an error, none."""
        self._of_windows = load_sizing(state, self.sizing)
