"""Random operators, which draw the same numbers again when a micro-batch is recomputed."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from superbatch.torch.devices import seeded

from ..ir.calls import Call, OpStrategy, empty_like, mapped, shapes, substituted
from ..ir.recorder import Recorder
from ..ir.shard import BatchSlice
from ..ir.values import Value
from ..rules.attention_rules import BACKWARD, DROPPED, Seeded, with_dropout
from ..rules.lookup import elementwise
from .aliases import functional_of

aten: Any = torch.ops.aten


class Randomness:
    """Random numbers of a block.

    Args:
        how: ``"microbatch"``: each operator and micro-batch has its own seed, and no numbers are stored;
            ``"batch"``: the numbers that the real large batch would draw are stored for all samples.
    """

    def __init__(self, how: Literal["microbatch", "batch"]) -> None:
        self._how = how
        # Seed of each attention call, by its logsumexp: a result of the forward that the backward reads.
        self._seeds: WeakKeyDictionary[Value, int] = WeakKeyDictionary()

    @property
    def as_full_batch(self) -> bool:
        """Return whether to draw the numbers of the real large batch."""
        return self._how == "batch"

    def strategy(self, call: Call) -> OpStrategy | None:
        """Return the strategy of a random operator; None if it has none."""
        if call.func.overloadpacket in _WITHOUT_RULE:
            return None
        if call.func in BACKWARD:
            logsumexp = call.argument("logsumexp")
            seed = self._seeds.get(logsumexp) if isinstance(logsumexp, Value) else None
            # The backward reruns the forward, so it needs the same mask.
            return None if seed is None else with_dropout(call, seed)
        if call.func in DROPPED:
            return with_dropout(call, int(torch.randint(2**62, ())))
        strategy = elementwise(call)
        if strategy is None or not _draws_per_element(call):
            return None
        # From torch's CPU generator, so that torch.manual_seed() makes the block reproducible.
        seed = int(torch.randint(2**62, ()))
        run, drawn_on = strategy.run, call.argument("device")

        def drawn(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            # The start makes the seed of each micro-batch different, and the same when it is recomputed.
            with seeded(drawn_on or tensors[0].device, (seed + microbatch.start) % 2**63):
                return run(microbatch, tensors)

        return strategy.drawing(drawn)

    def remember_seed(self, strategy: OpStrategy | None, results: Any) -> None:
        """Store the seed of attention for its backward."""
        if strategy is not None and isinstance(strategy.run, Seeded) and len(results) > 1:
            logsumexp = results[1]
            if isinstance(logsumexp, Value):
                self._seeds[logsumexp] = strategy.run.seed


def _draws_per_element(call: Call) -> bool:
    """Return whether each result has the broadcast shape of the inputs, for one draw per element."""
    try:
        shape = torch.broadcast_shapes(*(value.meta.shape for value in call.tensors))
        metas = shapes(call)
    except (NotImplementedError, RuntimeError, TypeError, AssertionError):
        return False
    metas = [metas] if isinstance(metas, Tensor) else metas
    return all(isinstance(meta, Tensor) and meta.shape == shape for meta in metas)


_WITHOUT_RULE = {aten.randperm, aten.multinomial}  # do not draw element by element
# Operators that do not read the numbers of their input, so that it need not be materialized.
_READ_SHAPE_ONLY = {
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
    aten.random.default,
    aten.random.to,
    aten.geometric.default,
}


def draw_full_batch(recording: Recorder, call: Call) -> Any:
    """Draw the numbers of the real large batch, and return them as values."""
    shard = next((value.shard for value in call.tensors if value.shard is not None), None)
    # With the strides of the batch: a generator fills memory in order, so other strides give another mask.
    tensors = [empty_like(value.meta, value.device) for value in call.tensors]
    if (functional_of(call.func) or call.func) not in _READ_SHAPE_ONLY:
        numbers = recording.materialized([recording.gathered(value) for value in call.tensors])
        tensors = [empty.copy_(tensor) for empty, tensor in zip(tensors, numbers, strict=True)]
    new_args, new_kwargs = substituted(call.args, call.kwargs, call.paths, tensors)

    def entered(tensor: Tensor) -> Value:
        value = recording.from_real(tensor)
        if shard and tensor.dim() > shard.dim and tensor.shape[shard.dim] == shard.rows(recording.samples):
            # In memory for all samples, but read by rows, as a dropout mask is.
            value.shard = shard
        return value

    return mapped(call.func(*new_args, **new_kwargs), entered)
