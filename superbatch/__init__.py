"""Exact gradient accumulation: the update of a batch that does not fit in memory.

This package is the core and needs only the standard library: windows, splitting, schedules, normalisation.
The frameworks have packages of their own: `superbatch.torch`, `.jax`, `.keras` and `.tensorflow`.
"""

from ._version import __version__ as __version__
from .batch.split import TokenBudget as TokenBudget
from .batch.split import near_equal as near_equal
from .batch.split import split as split
from .errors import CoupledSamplesError as CoupledSamplesError
from .errors import InputError as InputError
from .errors import LossSpecError as LossSpecError
from .errors import NonFiniteError as NonFiniteError
from .errors import OptimizerError as OptimizerError
from .errors import SplitError as SplitError
from .errors import SuperbatchError as SuperbatchError
from .errors import WindowError as WindowError
from .noise.meter import NoiseMeter as NoiseMeter
from .results.noise import Noise as Noise
from .results.update import Update as Update
from .schedule import constant as constant
from .schedule import piecewise as piecewise
from .schedule import ramp as ramp
from .tuning.growing import grow_batch as grow_batch
from .tuning.growing import grown_batches as grown_batches
from .window import Window as Window
from .window import windows as windows
