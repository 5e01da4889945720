# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Run `fit` under MirroredStrategy with two logical CPU devices and print JSON."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
import tensorflow as tf

CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras  # noqa: E402
import numpy as np  # noqa: E402

keras.config.set_floatx("float64")
from superbatch.errors import InputError  # noqa: E402
from superbatch.keras import accumulate  # noqa: E402
from tests.keras import helpers  # noqa: E402
from tests.keras.cases_exact import Halving, count_known  # noqa: E402
from tests.keras.helpers import LABELS, TOKENS, X, Y, array, cross_entropy  # noqa: E402

SGD = keras.optimizers.SGD
# One per process, because collectives of two strategies get the same keys.
STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def difference(
    build: Any, x: Any, y: Any, batch_size: int, loss_weight: Any = None, **options: Any
) -> dict[str, float]:
    """Return the largest difference from whole batches on one device, the smallest movement, and more."""
    whole = build()
    start = [array(v) for v in whole.trainable_variables]
    expected = whole.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options).history
    with STRATEGY.scope():
        model = build()
        ours = accumulate(model, microbatch_size=3, loss_weight=loss_weight)
        got = ours.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options).history
    found = [array(v) for v in model.trainable_variables]
    wanted = [array(v) for v in whole.trainable_variables]
    return {
        "replicas": STRATEGY.num_replicas_in_sync,
        "error": max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)),
        "moved": min(float(np.abs(a - b).max()) for a, b in zip(start, wanted, strict=True)),
        "loss": max(abs(a - b) for a, b in zip(got["loss"], expected["loss"], strict=True)),
        "updates": int(array(model.optimizer.iterations)),
    }


def refused(build: Any, x: Any, y: Any) -> str:
    with STRATEGY.scope():
        try:
            accumulate(build(), microbatch_size=3, batchnorm="per_microbatch").fit(x, y, verbose=0)
        except InputError as error:
            return str(error)
    return ""


def error_of_keras_option() -> str:
    """Return the error of Keras' own option `gradient_accumulation_steps`."""
    with STRATEGY.scope():
        model = helpers.dense(SGD(0.1, gradient_accumulation_steps=2))
        try:
            model.fit(X, Y, batch_size=4, verbose=0)
        except RuntimeError as error:
            return type(error).__name__
    return ""


def regularized() -> Any:
    loss = helpers.SquaredError()
    options = {"kernel_regularizer": "l2", "activity_regularizer": "l2", "kernel_constraint": "max_norm"}
    return helpers.dense(SGD(0.1, momentum=0.9), loss=loss, **options)


def batchnorm() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def dropout() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def main() -> None:
    words = lambda: helpers.text(cross_entropy(), keras.optimizers.Adam(0.1))  # noqa: E731
    clipped = lambda: helpers.dense(SGD(0.5, global_clipnorm=0.05))  # noqa: E731
    with STRATEGY.scope():
        history = accumulate(dropout(), microbatch_size=2).fit(X, Y, batch_size=21, verbose=0).history
    print(
        json.dumps(
            {
                "rows that the replicas share unequally": difference(helpers.dense, X, Y, 21),
                "a tail of one row": difference(helpers.dense, X, Y, 10),
                "clipping": difference(clipped, X[:20], Y[:20], 10),
                "regularizers": difference(regularized, X[:20], Y[:20], 20),
                "masks": difference(words, TOKENS, LABELS, 14),
                "one number beside an activity regularizer": difference(
                    lambda: helpers.dense(SGD(0.1), loss=Halving(), activity_regularizer="l2"),
                    X[:20],
                    np.where(
                        np.arange(20)[:, None] // 2 == 3, -1.0, Y[:20]
                    ),  # the third micro-batch of the first replica
                    20,
                    count_known,
                ),
                "batchnorm": refused(batchnorm, X, Y),
                "dropout": float(history["loss"][0]),
                "Keras' own option": error_of_keras_option(),
            }
        )
    )


if __name__ == "__main__":
    main()
