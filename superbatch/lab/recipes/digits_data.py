"""The digits task without a framework: samples, initial weights and accuracy as numpy arrays.

`digits` trains it with torch, `superbatch.lab.studies.on_jax` and its neighbours on other backends:
the same samples, the same weights at the start, the same measure at the end.
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
    """Labelled images, arrays or tensors. Images float32 of shape (n, pixels), labels int64 of shape (n,)."""

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any


def load_images() -> Classification:
    """Read scikit-learn's digits and split off 500 stratified test samples."""
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise InputError(
            "A recipe on digits: scikit-learn, which carries the data, is not installed. Install "
            "superbatch[cli]."
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
    """Fields of a recipe that classifies images, whatever trains it; `sgd` is the rate of plain SGD."""
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
    """The perceptron's weights as torch draws them from a seed, by torch's names."""
    draws = Draws(seed)
    (first, first_bias), (second, second_bias) = draws.linear(64, 32), draws.linear(32, 10)
    return {"0.weight": first, "0.bias": first_bias, "2.weight": second, "2.bias": second_bias}


def accuracy(weights: Mapping[str, np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    """Share of correct predictions of the perceptron in percent."""
    hidden = np.maximum(images @ weights["0.weight"].T + weights["0.bias"], 0)
    scores = hidden @ weights["2.weight"].T + weights["2.bias"]
    return 100.0 * int((scores.argmax(1) == labels).sum()) / len(labels)


def digits_elsewhere() -> Recipe:
    """The digits task for a backend that is not torch: models are the named arrays of `initial_weights`."""
    data = load_images()
    # What torch takes as its model, batch and tensors are names and numpy arrays here.
    functions: dict[str, Any] = {
        "model": initial_weights,
        "batch": lambda indices: (data.images[indices], data.labels[indices]),
        "evaluate": lambda weights: accuracy(weights, data.test_images, data.test_labels),
        "loss_fn": lambda weights: None,  # each backend writes the loss into its own update
    }
    of_data = facts(len(data.labels), len(data.test_labels))
    return Recipe(name=NAME, description=DESCRIPTION, **functions, **of_data)
