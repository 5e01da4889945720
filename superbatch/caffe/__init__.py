"""Read, check and explain Caffe's solver files, with the standard library alone.

`superbatch.torch.caffe` trains with them.
"""

from ..errors import PrototxtError as PrototxtError
from .config import NetState as NetState
from .config import SolverConfig as SolverConfig
from .explaining import explain_solver as explain_solver
from .rates import multistep_drops as multistep_drops
from .rates import rate_schedule as rate_schedule
from .reading import parse_solver as parse_solver
from .reading import read_solver as read_solver
from .smoothing import SmoothedLoss as SmoothedLoss
from .writing import solver_text as solver_text
