"""Exact gradient accumulation for PyTorch."""

from ..report.update import Update as Update
from ..split import TokenBudget as TokenBudget
from ..window import Window as Window
from ..window import windows as windows
from .accumulator import Accumulator as Accumulator
from .cached import cached_gradients as cached_gradients
from .in_flight import WindowInFlight as WindowInFlight
from .limits import memory_limit as memory_limit
from .lr_survey import lr_survey as lr_survey
from .masters import fp32_masters as fp32_masters
from .predict import predict_peak as predict_peak
from .sample_layout import samples_along as samples_along
from .verify import verify as verify
from .virtual import virtual_batch as virtual_batch
from .weights import class_weights as class_weights
from .weights import count_tokens as count_tokens
from .weights import sample_weights as sample_weights
