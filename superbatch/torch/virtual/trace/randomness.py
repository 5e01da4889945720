"""Random operators: a recomputed micro-batch draws the same numbers again, so that no mask is stored."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from superbatch.torch.devices import seeded

from ..ir.calls import Call, OpStrategy, empty_like, mapped, shapes, substituted
from ..ir.recorder import Recorder
from ..ir.shard import Part
from ..ir.values import Value
from ..rules.attention_rules import BACKWARD, DROPPED, Seeded, with_dropout
from ..rules.lookup import elementwise
from .aliases import functional_of

aten: Any = torch.ops.aten


class Randomness:
    """Random numbers of a block.

    Args:
        how: ``"microbatch"``: each operator and micro-batch has its own seed, and nothing is stored;
            ``"batch"``: the numbers that the real large batch would draw are stored for all samples.
    """

    def __init__(self, how: Literal["microbatch", "batch"]) -> None:
        self._how = how
        # Seeds of attention, by its logsumexp: the one result that the backward reads again.
        self._seeds: WeakKeyDictionary[Value, int] = WeakKeyDictionary()

    @property
    def as_the_batch(self) -> bool:
        """Return whether to draw the numbers of the real large batch."""
        return self._how == "batch"

    def strategy(self, call: Call) -> OpStrategy | None:
        """Return a strategy that draws random numbers; None without one."""
        if call.func.overloadpacket in _DRAWS_WHOLE:
            return None
        if call.func in BACKWARD:
            kept = call.argument("logsumexp")
            known = self._seeds.get(kept) if isinstance(kept, Value) else None
            # The seed of the forward: the backward repeats it, and needs the same mask.
            return None if known is None else with_dropout(call, known)
        if call.func in DROPPED:
            return with_dropout(call, int(torch.randint(2**62, ())))
        strategy = elementwise(call)
        if strategy is None or not _draws_each(call):
            return None
        # From torch's CPU generator: a seed set by the program makes the block reproducible.
        seed = int(torch.randint(2**62, ()))
        run, drawn_on = strategy.run, call.argument("device")

        def drawn(part: Part, tensors: list[Tensor]) -> Any:
            with seeded(drawn_on or tensors[0].device, (seed + part.start) % 2**63):
                return run(part, tensors)

        return strategy.drawing(drawn)

    def note(self, strategy: OpStrategy | None, results: Any) -> None:
        """Store the seed of an attention, for its backward."""
        if strategy is not None and isinstance(strategy.run, Seeded) and len(results) > 1:
            logsumexp = results[1]
            if isinstance(logsumexp, Value):
                self._seeds[logsumexp] = strategy.run.seed


def _draws_each(call: Call) -> bool:
    """Return whether each result has the broadcast shape of the inputs: one draw per element."""
    try:
        shape = torch.broadcast_shapes(*(value.meta.shape for value in call.tensors))
        metas = shapes(call)
    except (NotImplementedError, RuntimeError, TypeError, AssertionError):
        return False
    metas = [metas] if isinstance(metas, Tensor) else metas
    return all(isinstance(meta, Tensor) and meta.shape == shape for meta in metas)


_DRAWS_WHOLE = {aten.randperm, aten.multinomial}  # not element by element: no rule
# Operators that read the shape of their input and not its numbers: the input need not be computed.
_SHAPE_ALONE = {
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


def drawn_as_the_batch(recording: Recorder, call: Call) -> Any:
    """Draw the numbers of the real large batch, and return them as values."""
    shard = next((value.shard for value in call.tensors if value.shard is not None), None)
    # With the strides of the batch: a generator fills memory in order, so other strides are another mask.
    tensors = [empty_like(value.meta, value.device) for value in call.tensors]
    if (functional_of(call.func) or call.func) not in _SHAPE_ALONE:
        numbers = recording.materialized([recording.gathered(value) for value in call.tensors])
        tensors = [empty.copy_(tensor) for empty, tensor in zip(tensors, numbers, strict=True)]
    new_args, new_kwargs = substituted(call.args, call.kwargs, call.paths, tensors)

    def kept(tensor: Tensor) -> Value:
        value = recording.given(tensor)
        if shard and tensor.dim() > shard.dim and tensor.shape[shard.dim] == shard.rows(recording.samples):
            # Full in memory, but sharded for its readers: e.g. a dropout mask is read by rows.
            value.shard = shard
        return value

    return mapped(call.func(*new_args, **new_kwargs), kept)
