"""Exact gradient accumulation for JAX: inside one jitted update, for contrastive losses, or streaming.

Importing it imports JAX and Optax and no other framework.
"""

from .embeddings import remat_map as remat_map
from .gradient import value_and_grad as value_and_grad
from .optax_names import MultiSteps as MultiSteps
from .per_sample import PerSample as PerSample
from .per_sample import per_sample_value_and_grad as per_sample_value_and_grad
from .stats import Stats as Stats
from .stats import add_noise as add_noise
from .streaming import MultiStepsState as MultiStepsState
from .streaming import flush as flush
from .streaming import has_updated as has_updated
from .streaming import multi_steps as multi_steps
