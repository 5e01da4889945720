"""Exact gradient accumulation for TensorFlow 2: GradientTape loops, eager, in `tf.function`, over replicas.

Importing it imports TensorFlow and no other framework.
"""

from .accumulator import Accumulator as Accumulator
from .noise import add_noise as add_noise
from .outcome import Applied as Applied
