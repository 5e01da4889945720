"""Exact gradient accumulation for Keras 3 on TensorFlow, JAX and PyTorch: one batch of `fit` is one update.

Importing it imports Keras with the backend that Keras is configured for.
"""

from .accumulation import accumulate as accumulate
from .flush import FlushTail as FlushTail
