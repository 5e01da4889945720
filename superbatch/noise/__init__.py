"""Noise of the gradient: how large a batch is worth its samples."""

from .meter import NoiseMeter as NoiseMeter
from .over_run import relative_time as relative_time
