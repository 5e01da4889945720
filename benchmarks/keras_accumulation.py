# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Error and cost of updates in micro-batches in Keras.

    python benchmarks/keras_accumulation.py [--backends tensorflow,jax,torch] [--rounds 3]
        [--shape data|activations|parameters] [--json FILE]

On each backend of Keras: `fit` with the whole batch, Keras' `gradient_accumulation_steps`, and
`superbatch.keras.accumulate`. First the largest difference of the weights from those of the whole batch after
two updates, relative to the largest change: equal micro-batches, a short one, a mask, a schedule, a moving
average. Then peak memory (RSS) and CPU time of an epoch of one batch of 2048 rows in micro-batches of 128,
each in its own process, in random order; times are medians of rounds. The exit code is 1 if superbatch is
outside its bounds.

--shape selects the main part of the memory, as methods differ in it: the data of the batch (64 MiB of x and
y, 16 layers of 64 units at 64 positions), activations (the same with 1 feature in x and y) or parameters (8
layers of 1024 units at 4 positions, 1 feature: 24 MiB, plus twice as much in Adam).
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tables import print_table

WAYS = ("whole batch", "gradient_accumulation_steps", "superbatch")
ROWS, MICROBATCH = 2048, 128
# Sizes of a model: positions in a row, features at each, units of a layer, number of layers.
SHAPES = {"data": (64, 64, 64, 16), "activations": (64, 1, 64, 16), "parameters": (4, 1, 1024, 8)}
BOUND = 2e-5  # float32 sums in another order
EPOCHS = 3  # the first compiles


def main() -> int:
    """Run everything and print two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default="tensorflow,jax,torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="data")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        print("\n" + json.dumps(errors() if kind == "errors" else cost(*rest)))
        return 0
    backends = arguments.backends.split(",")
    found: dict[str, Any] = {backend: {"errors": child(backend, "errors")} for backend in backends}
    jobs = [(backend, way) for backend in backends for way in WAYS] * arguments.rounds
    random.Random(0).shuffle(jobs)
    for backend, way in jobs:
        found[backend].setdefault(way, []).append(child(backend, "cost", way, arguments.shape))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report(found)
    worst = max(error["superbatch"] for backend in backends for error in found[backend]["errors"].values())
    return int(not worst <= BOUND)


def child(backend: str, *arguments: str) -> Any:
    """Measure in a child process."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict[str, Any]) -> None:
    """Print the results."""
    rows = [
        [backend, case, *(f"{error[way]:.1e}" for way in WAYS[1:])]
        for backend, results in found.items()
        for case, error in results["errors"].items()
    ]
    print_table("Distance from the weights of the whole batch", ["backend", "case", WAYS[1], WAYS[2]], rows)
    rows = []
    for backend, results in found.items():
        whole = statistics.median(run["seconds"] for run in results[WAYS[0]])
        for way in WAYS:
            seconds = statistics.median(run["seconds"] for run in results[way])
            peak = statistics.median(run["mib"] for run in results[way])
            rows.append([backend, way, f"{peak:.0f}", f"{seconds:.2f}", f"{seconds / whole:.2f}"])
    header = ["backend", "way", "peak RSS, MiB", "CPU s / epoch", "ratio to whole batch"]
    print_table(f"One update of {ROWS} rows", header, rows)


# Functions that run in a child process.


def fitted(build: Any, way: str, x: Any, y: Any, batch: int, size: int, **fit: Any) -> Any:
    """Return a model after `fit` by one of the three methods."""
    from superbatch.keras import accumulate

    own = way == WAYS[1]
    model = build(-(-batch // size) if own else None)
    trained = accumulate(model, microbatch_size=size) if way == WAYS[2] else model
    trained.fit(x, y, batch_size=size if own else batch, shuffle=False, verbose=0, **fit)
    return model


def errors() -> dict[str, dict[str, float]]:
    """Return the distance of the weights from those of the whole batch, relative to the largest change."""
    import keras
    import numpy as np

    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(32, 3)).astype("float32"), draw.normal(size=(32, 2)).astype("float32")
    tokens = draw.integers(1, 7, size=(32, 6)) * (np.arange(6) < draw.integers(1, 7, size=32)[:, None])
    labels = draw.integers(0, 3, size=(32, 6))
    sgd = keras.optimizers.SGD

    def dense(**options: Any) -> Any:
        def build(steps: int | None) -> Any:
            keras.utils.set_random_seed(0)
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
            )
            model.compile(
                sgd(**({"learning_rate": 0.1, "momentum": 0.9} | options), gradient_accumulation_steps=steps),
                "mse",
            )
            return model

        return build

    def masked(steps: int | None) -> Any:
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(7, 4, mask_zero=True)
        model = keras.Sequential([keras.Input((6,)), embedding, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(sgd(1.0, momentum=0.9, gradient_accumulation_steps=steps), loss)
        return model

    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.0])
    ema = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2}
    cases = {
        "equal micro-batches": (dense(), x, y),
        "rows 8, 8, 8, 2": (dense(), x[:26], y[:26]),
        "masked tokens": (masked, tokens, labels),
        "a schedule": (dense(learning_rate=schedule), x, y),
        "a moving average": (dense(**ema), x, y),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (build, inputs, targets) in cases.items():
        start = [np.array(w) for w in build(None).get_weights()]
        whole, *others = (fitted(build, way, inputs, targets, 32, 8, epochs=2).get_weights() for way in WAYS)
        trained = range(len(start))
        moved = max(np.abs(whole[i] - start[i]).max() for i in trained)
        found[name] = {
            way: float(max(np.abs(other[i] - whole[i]).max() for i in trained) / moved)
            for way, other in zip(WAYS[1:], others, strict=True)
        }
    return found


def cost(way: str, shape: str) -> dict[str, float]:
    """Return the peak memory of the process and the CPU time of an epoch with one update."""
    import keras
    import numpy as np

    positions, features, units, layers = SHAPES[shape]

    def build(steps: int | None) -> Any:
        keras.utils.set_random_seed(0)
        widths = [units] * (layers - 1) + [features]
        hidden = [keras.layers.Dense(width, activation="relu") for width in widths]
        model = keras.Sequential([keras.Input((positions, features)), *hidden])
        model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=steps), "mse")
        return model

    class Clock(keras.callbacks.Callback):
        seconds: list[float] = []  # noqa: RUF012  (there is one clock in a process)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.start = time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds.append(time.process_time() - self.start)

    x = np.random.default_rng(0).normal(size=(ROWS, positions, features)).astype("float32")
    fitted(build, way, x, x, ROWS, MICROBATCH, epochs=EPOCHS, callbacks=[Clock()])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": min(Clock.seconds[1:]), "mib": peak}


if __name__ == "__main__":
    sys.exit(main())
