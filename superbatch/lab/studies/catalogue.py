"""The studies that there are: name, question, and options. It imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superbatch.errors import InputError

from ..recipes import COUPLED
from ..recipes.nearest import did_you_mean

DOCUMENTATION = "https://superbatch.github.io/superbatch/studies/"


@dataclass(frozen=True)
class Entry:
    """One study."""

    question: str  # that it answers, in one line
    section: str  # of `DOCUMENTATION`
    # the options that mean something to it, beside the recipe, runs, workers and threads
    takes: tuple[str, ...]
    runs: int = 10  # seeds by default
    quick_runs: int = 3  # seeds with ``--quick``
    recipes: tuple[str, ...] = ("digits",)  # that are run if none is named, each with a report of its own
    first_seed: int = 0  # the seeds follow it; settings were tried with smaller ones


# Name -> study.
STUDIES: Mapping[str, Entry] = {
    "momentum": Entry(
        "Does a high momentum with batch 1 replace a large batch?",
        "high-momentum-in-place-of-a-large-batch",
        ("samples", "batch_size", "learning_rate", "margin"),
    ),
    "grow-batch": Entry(
        "Decay the learning rate, or grow the batch: the same loss with fewer updates?",
        "growing-batch-in-place-of-a-decaying-rate",
        ("samples", "batch_size", "learning_rate", "margin"),
    ),
    "survey": Entry(
        "Do virtual batches survey learning rates like real ones?",
        "survey-of-learning-rates-with-virtual-batches",
        ("batch_size", "optimizer"),
        runs=20,
        quick_runs=4,
    ),
    "critical-batch": Entry(
        "How large may the batch be before samples are wasted, and does the noise scale tell?",
        "largest-useful-batch",
        ("samples", "batch_size", "learning_rate", "optimizer", "tolerance"),
    ),
    "precision": Entry(
        "How much does a sum of K gradients in bfloat16 lose?",
        "sums-of-gradients-in-bfloat16",
        (),
        runs=5,
        quick_runs=3,
    ),
    "splits": Entry(
        "Does a batch in K micro-batches train like the batch in one piece?",
        "training-in-micro-batches-against-the-real-batch",
        ("samples", "batch_size", "learning_rate", "optimizer", "margin"),
    ),
    "coupled": Entry(
        "Where the update depends on the whole batch, what does plain accumulation lose?",
        "loss-from-plain-accumulation",
        ("samples", "margin", "device"),
        runs=8,
        quick_runs=3,
        recipes=tuple(COUPLED),
        first_seed=100,
    ),
}


def entry_of(name: str) -> Entry:
    """The study of that name."""
    if name not in STUDIES:
        raise InputError(
            f"There is no study {name!r}{did_you_mean(name, STUDIES)} Use one of {', '.join(STUDIES)}."
        )
    return STUDIES[name]
