"""Exact gradient accumulation for PyTorch."""

from ..batch.split import TokenBudget as TokenBudget
from ..results.update import Update as Update
from ..window import Window as Window
from ..window import windows as windows
from .accumulator import Accumulator as Accumulator
from .gradient import Gradient as Gradient
from .gradient import WholeGradient as WholeGradient
from .gradient import gradient as gradient
from .verify import verify as verify
from .virtual import virtual_batch as virtual_batch
from .weights import at_least as at_least
from .weights import class_weights as class_weights
from .weights import count_tokens as count_tokens
from .weights import sample_weights as sample_weights
from .whole_batch import WholeBatch as WholeBatch
from .window.open_window import OpenWindow as OpenWindow
