"""The digits task without a framework: samples, initial weights and accuracy with NumPy.

`digits` trains it with torch; `superbatch.lab.studies.on_jax` and its neighbours train it on other backends,
with the same samples, initial weights and metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from superbatch.errors import InputError

from .drawing import Draws
from .recipe import Recipe

NAME = "digits"
DESCRIPTION = "a 64-32-10 perceptron with ReLU on scikit-learn's digits"
LEARNING_RATE = 0.06


class Classification(NamedTuple):
    """Labelled images, as arrays or tensors: images float32 (n, pixels), labels int64 (n,)."""

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any


def load_images() -> Classification:
    """Return scikit-learn's digits as arrays, with 500 stratified test samples."""
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise InputError(
            "The recipes on digits read their data from scikit-learn, which is not installed. Run pip "
            'install "superbatch[cli]".'
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    train, test, train_labels, test_labels = model_selection.train_test_split(
        images / 16, labels, test_size=500, random_state=0, stratify=labels
    )
    return Classification(
        np.asarray(train, np.float32),
        np.asarray(train_labels, np.int64),
        np.asarray(test, np.float32),
        np.asarray(test_labels, np.int64),
    )


def facts(samples: int, tests: int, sgd: float = LEARNING_RATE) -> dict[str, Any]:
    """Return the fields of a recipe that classifies images on any backend; `sgd` is the rate of plain SGD."""
    return {
        "samples": samples,
        "metric": "test accuracy",
        "unit": "%",
        "margin": 0.5,
        "metric_step": 100 / tests,
        "batch_size": min(100, samples),
        "learning_rates": {"sgd": sgd, "momentum": sgd / 10, "adam": 2e-3, "adamw": 2e-3},
    }


def initial_weights(seed: int) -> dict[str, np.ndarray]:
    """Return the perceptron's weights by torch's names, as torch draws them from a seed."""
    draws = Draws(seed)
    (first, first_bias), (second, second_bias) = draws.linear(64, 32), draws.linear(32, 10)
    return {"0.weight": first, "0.bias": first_bias, "2.weight": second, "2.bias": second_bias}


def accuracy(weights: Mapping[str, np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    """Return the percentage of correct predictions of the perceptron."""
    hidden = np.maximum(images @ weights["0.weight"].T + weights["0.bias"], 0)
    scores = hidden @ weights["2.weight"].T + weights["2.bias"]
    return 100.0 * int((scores.argmax(1) == labels).sum()) / len(labels)


def digits_elsewhere() -> Recipe:
    """Return the digits recipe for a backend other than torch, with `initial_weights` as the model."""
    data = load_images()
    # Models are dicts of NumPy arrays here, and batches NumPy arrays, so Recipe's annotations do not fit.
    functions: dict[str, Any] = {
        "model": initial_weights,
        "batch": lambda indices: (data.images[indices], data.labels[indices]),
        "evaluate": lambda weights: accuracy(weights, data.test_images, data.test_labels),
        "loss_fn": lambda weights: None,  # each backend writes the loss into its own update
    }
    fields = facts(len(data.labels), len(data.test_labels))
    return Recipe(name=NAME, description=DESCRIPTION, **functions, **fields)
