"""Noise scale of a gradient: the batch size above which larger batches save few updates."""

from .meter import NoiseMeter as NoiseMeter
from .over_run import relative_time as relative_time
