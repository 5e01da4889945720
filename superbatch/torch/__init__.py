"""Exact gradient accumulation for PyTorch."""

from ..batch.split import TokenBudget as TokenBudget
from ..results.update import Update as Update
from ..window import Window as Window
from ..window import windows as windows
from .accumulator import Accumulator as Accumulator
from .gradcache.cached import cached_gradients as cached_gradients
from .masters import fp32_masters as fp32_masters
from .memory.limits import memory_limit as memory_limit
from .rng.sample_layout import samples_along as samples_along
from .sizes.predict import predict_peak as predict_peak
from .verify import verify as verify
from .virtual import virtual_batch as virtual_batch
from .weights import class_weights as class_weights
from .weights import count_tokens as count_tokens
from .weights import sample_weights as sample_weights
from .window.open_window import OpenWindow as OpenWindow
