"""A batch of any size in the memory of a micro-batch: exact for any model and loss."""

from .block import VirtualBatch as VirtualBatch
from .block import virtual_batch as virtual_batch
