"""Exact gradient accumulation for PyTorch."""

from ..report.update import Update as Update
from ..split import TokenBudget as TokenBudget
from ..window import Window as Window
from ..window import windows as windows
from .accumulator import Accumulator as Accumulator
from .adaptive import AdaptiveBatch as AdaptiveBatch
from .adaptive import AdaScaleRate as AdaScaleRate
from .adaptive import controller as controller
from .cached import cached_gradients as cached_gradients
from .growing import GrowBatch as GrowBatch
from .growing import rate_of as rate_of
from .in_flight import WindowInFlight as WindowInFlight
from .lr_survey import lr_survey as lr_survey
from .masters import fp32_masters as fp32_masters
from .probing.sample_layout import samples_along as samples_along
from .scaling import rescale as rescale
from .sizes.limits import memory_limit as memory_limit
from .sizes.predict import predict_peak as predict_peak
from .stopping import update_until as update_until
from .verify import verify as verify
from .virtual import virtual_batch as virtual_batch
from .weights import class_weights as class_weights
from .weights import count_tokens as count_tokens
from .weights import sample_weights as sample_weights
