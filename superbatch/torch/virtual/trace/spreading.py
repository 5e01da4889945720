"""Expansion of full values to one row or more per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ir.calls import shapes
from ..ir.recorder import Recorder
from ..ir.shard import Shard
from ..rules import shape_arguments
from ..run.memo import KeyedCall
from . import paranoia


def spread(recording: Recorder, keyed: KeyedCall, shards: Mapping[torch.Size, Shard]) -> Any:
    """Expand a full value to a sharded one; None if the result is full, or if the cached template applies.

    `keyed` is a call of `expand`; `shards` are the shardings of the block's values, by shape.
    """
    # Not cached by key, because the sharding depends on the values that were recorded before (`shards`).
    value, like = keyed.tensors[0], shards.get(torch.Size(keyed.args[1]))
    # For a pending value without `like` the template applies. A materialized one would be expanded at once.
    if value.meta is None or value.shard is not None or (value.full is None and like is None):
        return None
    # `expanded` ignores `like` if the value cannot be repeated in that dimension.
    strategy = shape_arguments.expanded(call := keyed.call(), like)
    if strategy is None:
        return None
    results = recording.add(call.func, strategy, shapes(call))
    if recording.paranoid:
        paranoia.check(recording, call, results)
    return results
