"""Batch sizes and learning rates for torch optimizers: range test, scaling, growth, adaptive batches."""

from .adaptive import AdaptiveBatch as AdaptiveBatch
from .adaptive import AdaScaleRate as AdaScaleRate
from .adaptive import controller as controller
from .growing import GrowBatch as GrowBatch
from .growing import rate_of as rate_of
from .lr_survey import lr_survey as lr_survey
from .scaling import rescale as rescale
from .stopping import update_until as update_until
