# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Train under MirroredStrategy on two logical CPUs; JSON: `python -m tests.tensorflow.replicas [mutant]`.

The first replica has about three quarters of each micro-batch. The large batch contains all rows.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from superbatch import SuperbatchError
from superbatch.tensorflow import Accumulator, adding
from tests.tensorflow.helpers import count, gradients, model, part, texts, token_mean

LENGTHS = [4, 1, 2, 3, 2, 3, 1, 4, 0, 0, 3, 2, 4, 1, 1, 2, 4, 3, 2]
WINDOWS = [[4, 4], [4], [5, 2]]  # the third micro-batch has no token on its second replica


def signature(rows: int | None = None) -> Any:
    shapes = {"x": tf.int64, "y": tf.float64, "mask": tf.float64}
    return {name: tf.TensorSpec([rows, 4], dtype) for name, dtype in shapes.items()}


def ops_of(function: Any) -> Iterator[Any]:
    """Yield the operations of a concrete function and of every function that it calls."""
    seen: set[str] = set()

    def walk(graph: Any) -> Iterator[Any]:
        for operation in graph.get_operations():
            yield operation
            for name in ("f", "then_branch", "else_branch", "body", "cond"):
                called = operation.node_def.attr[name].func.name if name in operation.node_def.attr else ""
                if called and called not in seen:
                    seen.add(called)
                    inner = graph._get_function(called)  # no public API gives the graph of a branch
                    if inner is not None and getattr(inner, "graph", None) is not None:
                        yield from walk(inner.graph)

    yield from walk(function.graph)


def communication(function: Any) -> dict[str, int]:
    """Count collective operations, and tensors that are sent between devices."""
    operations = list(ops_of(function))
    collectives = Counter(one.type for one in operations if "Collective" in one.type or "Nccl" in one.type)
    crossing = sum(
        bool(source.device and one.device and source.device != one.device and source.dtype != tf.resource)
        for one in operations
        for source in one.inputs
        if one.type not in ("Identity", "NoOp")
    )
    devices = {one.device for one in operations if one.device}
    return {"collectives": sum(collectives.values()), "crossing": crossing, "devices": len(devices)}


@functools.cache
def strategy() -> Any:
    """Return the strategy; one per process, because collectives of two strategies would be confused."""
    plain = tf.distribute.ReductionToOneDevice() if sys.argv[1:] == ["mutant", "copies"] else None
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=plain)


class Replicas:
    """Model on two replicas, with the loop over micro-batches."""

    def __init__(self, clip: float | None, make_optimizer: Any, *, graph: bool) -> None:
        self.strategy = strategy()
        start = model()
        with self.strategy.scope():
            self.variables = [tf.Variable(one.read_value(), name=f"v{i}") for i, one in enumerate(start)]
            self.optimizer = make_optimizer()
            if hasattr(self.optimizer, "inner_optimizer"):
                self.optimizer.build(self.variables)  # otherwise its scale would be a constant of the graph
        self.accumulator = Accumulator(self.variables, max_grad_norm=clip)
        self.microbatch: Any = self._microbatch
        self.apply: Any = self._apply
        if graph:
            self.microbatch, self.apply = tf.function(self._microbatch), tf.function(self._apply)

    def _microbatch(self, shares: Any) -> None:
        def one(share: Any) -> None:
            with tf.GradientTape() as tape:
                loss = token_mean(self.variables, share)
                scaled = self.optimizer.scale_loss(loss)
            found = tape.gradient(scaled, self.variables)
            self.accumulator.add(found, count(share), loss=loss)

        self.strategy.run(one, args=(shares,))

    def _apply(self) -> Any:
        return self.accumulator.apply(self.optimizer)

    def shares(self, batch: Any, start: int, size: int) -> Any:
        cut = start + max(size - 2, size * 3 // 4)
        parts = [part(batch, start, cut), part(batch, cut, start + size)]
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )


def train(clip: float | None, make_optimizer: Any, *, graph: bool) -> dict[str, Any]:
    """Train on replicas and on large batches; return the largest errors and the communication."""
    one, batch, start = Replicas(clip, make_optimizer, graph=graph), texts(LENGTHS), 0
    plain, optimizer = model(), make_optimizer()
    first = [variable.numpy() for variable in plain]
    shares: Any = None
    found: dict[str, Any] = {"weights": [], "microbatches": [], "losses": 0.0, "norms": 0.0}
    for window in WINDOWS:
        begin = start
        for size in window:
            shares = one.shares(batch, start, size)
            one.microbatch(shares)
            start += size
        applied = one.apply()
        loss, whole = gradients(plain, part(batch, begin, start))
        whole[0] = tf.convert_to_tensor(whole[0])
        norm = tf.linalg.global_norm(whole)
        if clip:
            assert norm > clip, "the premise: every update is clipped"
            whole, _ = tf.clip_by_global_norm(whole, clip)
        optimizer.apply(whole, plain)
        found["weights"].append(float(applied.weight))
        found["microbatches"].append(int(applied.microbatches))
        found["losses"] = max(found["losses"], abs(float(applied.loss - loss)))
        found["norms"] = max(found["norms"], abs(float(applied.grad_norm - norm)))
    copies = [one.strategy.experimental_local_results(variable) for variable in one.variables]
    found["error"] = max(
        float(np.abs(copy.numpy() - theirs.numpy()).max() / np.abs(theirs.numpy()).max())
        for pair, theirs in zip(copies, plain, strict=True)
        for copy in pair
    )
    found["moved"] = min(float(np.abs(v.numpy() - v0).max()) for v, v0 in zip(plain, first, strict=True))
    if graph:
        found["microbatch"] = communication(one.microbatch.get_concrete_function(shares))
        found["update"] = communication(one.apply.get_concrete_function())
    return found


def in_one_function() -> dict[str, Any]:
    """Run a window of two micro-batches and its update in one graph; return error and communication."""
    one, batch = Replicas(None, lambda: keras.optimizers.SGD(0.1), graph=False), texts(LENGTHS)
    shares = [one.shares(batch, 0, 4), one.shares(batch, 4, 4)]

    def eager(shares: Any) -> Any:
        for share in shares:
            one.microbatch(share)
        return one.apply()

    window: Any = tf.function(eager)
    assert float(window(shares).weight) == sum(LENGTHS[:8])
    plain = model()
    _, whole = gradients(plain, part(batch, 0, 8))
    keras.optimizers.SGD(0.1).apply(whole, plain)
    pairs = zip(one.variables, plain, strict=True)
    error = max(float(np.abs(ours.numpy() - theirs.numpy()).max()) for ours, theirs in pairs)
    return communication(window.get_concrete_function(shares)) | {"error": error}


def mixed_dtypes() -> dict[str, Any]:
    """Use float32 and bfloat16 variables and float64 counters, which TensorFlow cannot reduce together."""
    with strategy().scope():
        variables = [tf.Variable(tf.constant([4.0, 8.0], dtype)) for dtype in (tf.float32, tf.bfloat16)]
        optimizer = keras.optimizers.SGD(1.0)
    accumulator = Accumulator(variables)

    def one() -> None:
        weight = tf.distribute.get_replica_context().replica_id_in_sync_group + 1
        found = [tf.cast(weight, v.dtype) * tf.ones(2, v.dtype) for v in variables]
        accumulator.add(found, weight)

    def eager() -> Any:
        strategy().run(one)
        return accumulator.apply(optimizer)

    window: Any = tf.function(eager)
    assert float(window().weight) == 3
    errors = [np.abs(v.numpy().astype(float) - [4 - 5 / 3, 8 - 5 / 3]).max() for v in variables]
    right = [bool(error < bound) for error, bound in zip(errors, (1e-5, 0.05), strict=True)]
    return communication(window.get_concrete_function()) | {"right": right}


def resumed() -> float:
    """Resume in new objects from a checkpoint inside a window; return the largest difference."""
    batch = texts(LENGTHS)
    one, other = (Replicas(None, lambda: keras.optimizers.Adam(0.1), graph=False) for _ in range(2))
    one.microbatch(one.shares(batch, 0, 4))
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(accumulator=one.accumulator).save(f"{folder}/window")
        tf.train.Checkpoint(accumulator=other.accumulator).restore(saved).assert_consumed()
    for each in (one, other):
        each.microbatch(each.shares(batch, 4, 4))
        assert float(each.apply().weight) == sum(LENGTHS[:8])
    return max(
        float(np.abs(a.numpy() - b.numpy()).max())
        for a, b in zip(one.variables, other.variables, strict=True)
    )


def refusals() -> dict[str, str]:
    """Return the text of each refusal."""
    one, plain = Replicas(None, lambda: keras.optimizers.SGD(0.1), graph=False), model()
    share = part(texts(LENGTHS), 0, 4)
    calls = {
        "add outside": lambda: one.accumulator.add([None] * 4, 1),
        "apply inside": lambda: one.strategy.run(lambda: one.accumulator.apply(one.optimizer)),
        "an optimizer from outside": lambda: one.accumulator.apply(keras.optimizers.SGD(0.1, 0.9)),
        "plain variables": lambda: one.strategy.run(
            lambda: Accumulator(plain).add(gradients(plain, share)[1], 1)
        ),
    }
    return {name: refusal(call) for name, call in calls.items()}


def refusal(call: Any) -> str:
    try:
        call()
    except SuperbatchError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def reduce_at_once(state: Any, microbatch: Any, options: Any) -> None:
    """A mutant that reduces over replicas in every micro-batch."""
    context = tf.distribute.get_replica_context()
    found = [tf.convert_to_tensor(one) for one in microbatch.gradients]
    found = context.all_reduce(tf.distribute.ReduceOp.MEAN, found)
    original(state, adding.Microbatch(list(found), *list(vars(microbatch).values())[1:]), options)


original = adding.add


def scaling() -> Any:
    """Return an optimizer with loss scaling on replicas, without it for the large batch."""
    inner = keras.optimizers.SGD(0.1, 0.9)
    return keras.optimizers.LossScaleOptimizer(inner, 1024.0) if tf.distribute.has_strategy() else inner


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    found: dict[str, Any] = {"devices": len(tf.config.list_logical_devices("CPU"))}
    adam = lambda: keras.optimizers.Adam(0.1, epsilon=1e-3)  # noqa: E731
    if sys.argv[1:2] == ["mutant"]:
        adding.add = reduce_at_once
        found["mutant"] = train(None, adam, graph=True)
    else:
        found["graph"] = train(None, adam, graph=True)
        found["graph, clipped"] = train(0.01, adam, graph=True)
        found["eager"] = train(0.01, adam, graph=False)
        everything = {"use_ema": True, "ema_overwrite_frequency": 2, "weight_decay": 0.1, "clipnorm": 1.0}
        found["everything"] = train(None, lambda: keras.optimizers.SGD(0.1, 0.9, **everything), graph=True)
        found["loss scale"] = train(0.01, scaling, graph=True)
        found["in one function"] = in_one_function()
        found["mixed dtypes"] = mixed_dtypes()
        found["resumed"] = resumed()
        found["refusals"] = refusals()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
