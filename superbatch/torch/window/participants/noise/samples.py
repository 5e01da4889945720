"""Per-sample gradients of the scale and shift of normalisation layers, as a proxy for the noise.

With one micro-batch on one rank, a window has no two gradients to compare. But for a LayerNorm or RMSNorm the
gradient of each *sample* costs little arithmetic: the scale's gradient is the sum over positions of ``x_hat
dy``, the shift's that of ``dy``. The noise scale of these few parameters is proportional to that of the whole
model, with a factor that depends on the model (Gray et al. 2024, https://arxiv.org/abs/2411.00999).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..gradient_sum import LOW_PRECISION, ManagedParameter

NOT_FIRST = "the samples are not the first dimension of a normalisation layer's input"
OTHERWISE = (
    "the gradient of a normalisation layer is not the sum over its samples: its parameters are also used "
    "elsewhere, or a hook changes it"
)
TOLERANCE = 1e-2
"""Relative difference between the sum over samples and the gradient; bfloat16 rounds by 0.5 %."""


def norm_layers(models: Iterable[nn.Module], owned: Sequence[ManagedParameter]) -> list[nn.Module]:
    """Return the LayerNorms and RMSNorms whose scale or shift the accumulator's optimizers train.

    Examples:
        >>> norm_layers([nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))], [])
        []
    """
    known = {id(entry.parameter) for entry in owned}
    return [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and any(id(p) in known for p in _parameters(module))
    ]


class SampleGradientNorms:
    """Measures ``sum_b |s_b g_b|^2`` over the samples b of each micro-batch; s_b is b's share in the loss.

    Args:
        layers: from `norm_layers`.
        count: number of samples of a micro-batch, by its index; 0 if they cannot be counted.

    Attributes:
        reason: reason why this window cannot be measured; None: it can.
    """

    def __init__(self, layers: Sequence[nn.Module], count: Callable[[int], int]) -> None:
        self._layers, self._count = layers, count
        self.reason: str | None = None
        # Per-sample gradients, and the gradients that the parameters get, of the present backward.
        self._new_samples: dict[Tensor, Tensor] = {}
        self._new_gradients: dict[Tensor, Tensor] = {}
        # The same, of all backwards of the present micro-batch.
        self._samples: dict[Tensor, Tensor] = {}
        self._gradients: dict[Tensor, Tensor] = {}

    def open(self, undo: list[Callable[[], None]]) -> None:
        """Register hooks on the layers.

        Args:
            undo: list to which the functions that remove the hooks are appended.
        """
        # A generator, so that each handle is in the list even if registering a later hook fails.
        hooks = (layer.register_forward_hook(self._hook, with_kwargs=True) for layer in self._layers)
        undo.extend(hook.remove for hook in hooks)

    def parameters(self) -> list[Tensor]:
        """Return the trained scales and shifts, each once."""
        found = {id(p): p for layer in self._layers for p in _parameters(layer) if p.requires_grad}
        return list(found.values())

    def record_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Record the tensor that autograd adds to a parameter's gradient."""
        # A copy, because the tensor may become `.grad`, to which the next micro-batch is added in place.
        _add(self._new_gradients, parameter, gradient.detach().clone())

    def begin_backward(self) -> None:
        """Discard gradients that the user's forward has computed since the last backward."""
        self._new_samples.clear()
        self._new_gradients.clear()

    def end_backward(self, index: int) -> None:
        """Add the gradients of a backward that has ended to those of its micro-batch `index`."""
        samples = self._count(index)
        if not samples:
            self.reason = "samples cannot be counted"
        # The first dimension may be tokens instead of samples.
        elif any(each.shape[0] != samples for each in self._new_samples.values()):
            self.reason = NOT_FIRST
        elif self.reason is None:
            pairs = ((self._samples, self._new_samples), (self._gradients, self._new_gradients))
            for table, new in pairs:
                for parameter, gradient in new.items():
                    _add(table, parameter, gradient)
        self.begin_backward()

    def end_microbatch(self) -> tuple[float | Tensor, ...]:
        """End a micro-batch and return its three norms, the arguments of `checked_norm`.

        Returns:
            The norm of the samples' gradients, the norm of the difference between their sum and the gradient,
            and the norm of the gradient.
        """
        samples, differences, gradients = [], [], []
        for parameter, gradient in self._gradients.items():
            of_samples = self._samples.get(parameter)
            # Another use of the weight, such as tying, adds to `gradient` only, and the difference shows it.
            total = torch.zeros_like(gradient) if of_samples is None else of_samples.sum(0)
            samples += [] if of_samples is None else [of_samples]
            differences.append(total - gradient)
            gradients.append(gradient)
        self._samples.clear()
        self._gradients.clear()
        if self.reason is not None:
            return (math.nan,) * 3
        return tuple(map(_norm, (samples, differences, gradients)))

    def checked_norm(self, samples: float, difference: float, gradient: float) -> float:
        """Return the norm over the samples; if their sum is not the gradient, set `reason` and return NaN.

        Args:
            samples: norm of the samples' gradients.
            difference: norm of the difference between their sum and the gradient.
            gradient: norm of the gradient.
        """
        if difference > TOLERANCE * math.hypot(samples, gradient):
            self.reason = OTHERWISE
            return math.nan
        return samples

    def clear(self) -> None:
        """Free all gradients."""
        self.begin_backward()
        self._samples.clear()
        self._gradients.clear()

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (isinstance(output, Tensor) and output.requires_grad):
            return  # under no_grad, e.g. in the first forward of a reentrant checkpoint
        given = args[0] if args else kwargs["input" if "input" in kwargs else "x"]
        kept = given.detach()  # takes no memory, because the layer keeps its input for its backward
        output.register_hook(lambda gradient: self._add_samples(module, kept, gradient))

    @torch.no_grad()
    def _add_samples(self, module: Any, given: Tensor, gradient: Tensor) -> None:
        shape, weight, bias = module.normalized_shape, module.weight, getattr(module, "bias", None)
        # In float32, because products of low-precision values lose too many digits.
        dtype = torch.float32 if {given.dtype, gradient.dtype} & set(LOW_PRECISION) else gradient.dtype
        wide, gradient = given.to(dtype), gradient.to(dtype)
        if given.dim() <= len(shape):
            self.reason = NOT_FIRST
            return
        # A sample has several positions in [N, positions, ...], whose gradients are summed.
        positions = list(range(1, given.dim() - len(shape)))
        if weight is not None and weight.requires_grad:
            if isinstance(module, nn.RMSNorm):
                eps = torch.finfo(given.dtype).eps if module.eps is None else module.eps
                # The normalised input without the weight, which is the factor in the weight's gradient.
                hat = nn.functional.rms_norm(wide, shape, None, eps)
            else:
                hat = nn.functional.layer_norm(wide, shape, None, None, module.eps)
            _add(self._new_samples, weight, _over(hat * gradient, positions))
        if bias is not None and bias.requires_grad:
            _add(self._new_samples, bias, _over(gradient, positions))


def _over(tensor: Tensor, positions: list[int]) -> Tensor:
    return tensor.sum(positions) if positions else tensor.clone()


def _parameters(module: nn.Module) -> list[Tensor]:
    found = (getattr(module, name, None) for name in ("weight", "bias"))
    return [parameter for parameter in found if isinstance(parameter, Tensor)]


def _add(table: dict[Tensor, Tensor], parameter: Tensor, part: Tensor) -> None:
    before = table.get(parameter)
    if before is None:
        table[parameter] = part
    elif before.shape == part.shape:
        table[parameter] = before + part
    else:  # another number of samples: an empty tensor makes `end_backward` set a reason
        table[parameter] = part.new_empty((0,))


def _norm(tensors: Sequence[Tensor]) -> float | Tensor:
    if not tensors:
        return 0.0
    wide = [t.float() if t.dtype in LOW_PRECISION else t for t in tensors]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in wide]))
    return norm.item() if norm.is_cpu else norm
