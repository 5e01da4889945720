"""Expansion of a full value to the rows of the samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ir.calls import shapes
from ..ir.recorder import Recorder
from ..ir.shard import Shard
from ..rules import shape_arguments
from ..run.memo import Form
from . import paranoia


def spread(recording: Recorder, form: Form, shards: Mapping[torch.Size, Shard]) -> Any:
    """Expand a full value to the rows of the samples.

    Args:
        recording: recording of the block.
        form: call of `expand`.
        shards: shardings of values of the block, by shape.

    Returns:
        The sharded result; None if the result has no rows, or if the cached template of the form applies.
    """
    # Not cached by form: the sharding depends on the values that the block recorded before (`shards`).
    value, like = form.tensors[0], shards.get(torch.Size(form.args[1]))
    if value.meta is None or value.shard is not None or (value.full is None and like is None):
        return None
    # `like` is a hint only: `expanded` ignores it if the value cannot be repeated in that dimension.
    strategy = shape_arguments.expanded(call := form.call(), like)
    if strategy is None:
        return None
    results = recording.add(call.func, strategy, shapes(call))
    if recording.paranoid:
        paranoia.check(recording, call, results)
    return results
