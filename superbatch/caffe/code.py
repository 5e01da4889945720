"""Write a solver as a program in plain PyTorch, without superbatch."""

from __future__ import annotations

# pyright: strict
from .config import SolverConfig
from .rates import multistep_drops
from .writing import shortest

_TRAIN = '''

def train(parameters, loss_fn, microbatches, updates=UPDATES, lr_mult=None, decay_mult=None):
    """Train on `microbatches`, an endless iterator; `loss_fn(microbatch)` is the mean over one."""
    parameters = list(parameters)
    lr_mult = lr_mult or [1.0] * len(parameters)  # of each parameter, from the net's `param`
    decay_mult = decay_mult or [1.0] * len(parameters)
    history = [torch.zeros_like(parameter) for parameter in parameters]
@second@
    for update in range(updates):
        for _ in range(ITER_SIZE):
            loss_fn(next(microbatches)).backward()  # gradients add up to the sum
        with torch.no_grad():
@clip@
            for i, w in enumerate(parameters):
                g = w.grad / ITER_SIZE
                r = rate(update) * lr_mult[i]
@decay@
@rule@
                w.grad = None
'''

_RULES = {
    "SGD": """history[i].mul_(MOMENTUM).add_(g, alpha=r)  # the rate inside the buffer
w.sub_(history[i])""",
    "Nesterov": """back = MOMENTUM * history[i]
history[i].mul_(MOMENTUM).add_(g, alpha=r)
w.sub_((1 + MOMENTUM) * history[i] - back)""",
    "AdaGrad": """history[i].addcmul_(g, g)
w.sub_(r * g / (history[i].sqrt() + DELTA))""",
    "RMSProp": """history[i].mul_(RMS_DECAY).addcmul_(g, g, value=1 - RMS_DECAY)
w.sub_(r * g / (history[i].sqrt() + DELTA))""",
    "AdaDelta": """history[i].mul_(MOMENTUM).addcmul_(g, g, value=1 - MOMENTUM)
u = g * ((second[i] + DELTA) / (history[i] + DELTA)).sqrt()
second[i].mul_(MOMENTUM).addcmul_(u, u, value=1 - MOMENTUM)
w.sub_(r * u)""",
    "Adam": """history[i].mul_(MOMENTUM).add_(g, alpha=1 - MOMENTUM)
second[i].mul_(MOMENTUM2).addcmul_(g, g, value=1 - MOMENTUM2)
t = update + 1
correction = math.sqrt(1 - MOMENTUM2**t) / (1 - MOMENTUM**t)
w.sub_(r * correction * history[i] / (second[i].sqrt() + DELTA))""",
}

_CLIP = """norm = torch.stack([w.grad.norm() for w in parameters]).norm()  # of the sum, as in Caffe
if norm > CLIP_GRADIENTS:
    for w in parameters:
        w.grad.mul_(CLIP_GRADIENTS / norm)"""

_RATES = {
    "fixed": "BASE_LR",
    "step": "BASE_LR * GAMMA ** (update // STEPSIZE)",
    "exp": "BASE_LR * GAMMA**update",
    "inv": "BASE_LR * (1 + float32(GAMMA * update)) ** -POWER",
    "multistep": "BASE_LR * GAMMA ** sum(drop <= update for drop in DROPS)",
    "poly": "BASE_LR * (1 - update / UPDATES) ** POWER",
    "sigmoid": "BASE_LR / (1 + math.exp(-GAMMA * (update - STEPSIZE)))",
}


def code(config: SolverConfig) -> str:
    """Write a PyTorch program that trains as the solver does.

    Args:
        config: the solver.

    Returns:
        Python: constants, ``rate(update)`` and ``train(parameters, loss_fn, microbatches, ...)``.

    Examples:
        >>> text = code(SolverConfig(base_lr=0.1, lr_policy="fixed", max_iter=100, iter_size=4))
        >>> "ITER_SIZE = 4" in text and "BASE_LR = float32(0.1)" in text
        True
    """
    rule, rate = _RULES[config.type], _RATES[config.lr_policy]
    decay = ""
    if config.weight_decay:
        toward = "w" if config.regularization_type == "L2" else "w.sign()"
        decay = f"g = g + WEIGHT_DECAY * decay_mult[i] * {toward}"
    second = "second = [torch.zeros_like(parameter) for parameter in parameters]" if "second" in rule else ""
    body = _TRAIN
    # Whole lines are replaced, so that an empty part leaves no blank line.
    for mark, text, depth in (
        ("@second@", second, 4),
        ("@clip@", _CLIP if config.clip_gradients >= 0 else "", 12),
        ("@decay@", decay, 16),
        ("@rule@", rule, 16),
    ):
        lines = "".join(f"{' ' * depth}{line}\n" for line in text.splitlines())
        body = body.replace(f"{mark}\n", lines)
    # The program imports math only where it uses it: linters refuse an unused import.
    head = ["import math\n"] if "math." in rule + rate else []
    return "\n".join(
        [
            *head,
            "import torch\n\n",
            "def float32(value):",
            "    return torch.tensor(value, dtype=torch.float32).item()  # as Caffe stores its numbers",
            "\n",
            *_constants(config, rule + rate + decay),
            "\n",
            "def rate(update):",
            f"    return {rate}",
            body,
        ]
    )


def _constants(config: SolverConfig, used: str) -> list[str]:
    lines = [f"ITER_SIZE = {config.iter_size}  # micro-batches of an update", f"UPDATES = {config.max_iter}"]
    if "STEPSIZE" in used:
        lines.append(f"STEPSIZE = {config.stepsize}")
    if "DROPS" in used:
        lines.append(f"DROPS = {list(multistep_drops(config.stepvalue))}")
    if config.clip_gradients >= 0:
        used += " CLIP_GRADIENTS"  # `used` lacks the code that clips
    floats = ("base_lr", "gamma", "power", "momentum", "momentum2", "rms_decay", "delta", "weight_decay")
    for name in (*floats, "clip_gradients"):
        constant = name.upper()
        if constant in used:
            value = shortest(getattr(config, name))  # as short as in the solver file
            lines.append(
                f'{constant} = float32(float("inf"))' if value == "inf" else f"{constant} = float32({value})"
            )
    return lines
