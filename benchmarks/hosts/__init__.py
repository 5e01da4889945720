"""Training loops of other libraries, each with its own accumulation and with superbatch's.

Each module has ``window(training, exact) -> TrainerWindow``: an endless training of one of `TRAININGS`, with
the host's own accumulation or with the integration.
"""

PACKAGES = {"hf": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
"""The package that each module needs."""
TRAININGS = ("causal", "classes", "coupled")
"""Next tokens; classes; next tokens, computed as if the samples of the whole batch were coupled."""
STEPS, SIZE, LENGTH = 4, 8, 64
"""Micro-batches of an update, their samples, and the tokens of a sample."""
