"""Draw reports: a frozen report in, a matplotlib `Figure` out; no pyplot, no window, no global style.

A report may be partial; ``dark=True`` draws light on dark. A figure is 10 inches wide,
one of a single survey 8; save it with `png` or ``figure.savefig``.
"""

from .advice import advice as advice
from .caffe import caffe_rate as caffe_rate
from .comparing import comparison as comparison
from .fit import fitting as fitting
from .growing import growing as growing
from .noise import noise as noise
from .scaling import scaling_rules as scaling_rules
from .studies import study as study
from .style import png as png
from .survey import one_survey as one_survey
from .survey import surveys as surveys
