"""Discarding of a saved window that was loaded and will not be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from superbatch.errors import WindowError

from .config import Config
from .participants.gradient_sum import ManagedParameter


def discard_saved(state: Mapping[str, Any] | None, config: Config) -> None:
    """Restore the momentum buffers and other state that a saved window had changed before it was saved.

    The optimizer and the model were saved inside the window, so the loaded ones contain its partial sums.

    Args:
        state: state of the window; None: there is none.
        config: the accumulator's.

    Raises:
        WindowError: the window summed into momentum buffers of other parameters; nothing has changed.
    """
    if state is None:
        return
    gradients = state["gradients"]
    # A sum in .grad is not part of a checkpoint of the model, so there is nothing to restore.
    if isinstance(gradients, Mapping) and gradients.keys() == {"momentum", "before"}:
        _restore_momentum(gradients["before"], config.owned)
    # `load_state_dict` fills the copies of `begin`, and `restore` writes them.
    config.state.begin()
    config.state.load_state_dict(state["state_before"])
    config.state.restore()


def _restore_momentum(before: Mapping[str, Any], owned: list[ManagedParameter]) -> None:
    entries = {entry.name: entry for entry in owned}
    # All names are checked first, so that an error leaves every buffer as it is.
    unknown = [name for name in before if name not in entries]
    if unknown:
        raise WindowError(
            f"The saved window summed into the momentum buffer of {unknown[0]!r}, which is not a parameter "
            "here. Load an optimizer state that was saved between windows instead."
        )
    with torch.no_grad():
        for name, buffer in before.items():
            target, own = entries[name].target, entries[name].optimizer.state
            if buffer is None:
                own.pop(target, None)
            # A copy, because the saved state may be loaded once more.
            else:
                own.setdefault(target, {})["momentum_buffer"] = buffer.to(target.device, copy=True)
