"""Catalogue of the studies: name, question and options. Listing them imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superbatch.errors import InputError

from ..recipes import COUPLED
from ..recipes.nearest import did_you_mean

DOCUMENTATION = "https://superbatch.github.io/superbatch/studies/"


@dataclass(frozen=True)
class Entry:
    """Entry of one study."""

    question: str  # the question that it answers, in one line
    section: str  # anchor in `DOCUMENTATION`
    takes: tuple[str, ...]  # options that it uses, besides those that all studies use
    runs: int = 10  # default number of seeds
    quick_runs: int = 3  # the same with ``--quick``
    recipes: tuple[str, ...] = ("digits",)  # recipes that are run if none is named, each with its own report
    first_seed: int = 0  # smaller seeds were used to choose the settings


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
    """Return the entry of a study; raise `InputError` if there is none of that name."""
    if name not in STUDIES:
        raise InputError(
            f"There is no study {name!r}{did_you_mean(name, STUDIES)} Use one of {', '.join(STUDIES)}."
        )
    return STUDIES[name]
