"""Training as in Caffe, with its six solvers, its learning-rate policies and its order of operations."""

from .losses import loss_weight as loss_weight
from .losses import softmax_loss as softmax_loss
from .optimizer import CaffeOptimizer as CaffeOptimizer
from .rate import CaffeRate as CaffeRate
from .solver import CaffeSolver as CaffeSolver
from .solver import solver as solver
