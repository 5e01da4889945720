"""Plots of the reports: each function takes a report, complete or partial, and returns a matplotlib `Figure`.

``dark=True`` draws light on dark. The functions use no pyplot, open no window and change no global style.
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
