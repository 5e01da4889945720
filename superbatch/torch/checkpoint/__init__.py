"""Durable checkpoints of a training, which resume on any number of ranks."""

from .loading import Checkpoint as Checkpoint
from .loading import load_checkpoint as load_checkpoint
from .saving import save_checkpoint as save_checkpoint
from .stopping import StopSignals as StopSignals
