"""Gradients of single samples, of the scale and shift of normalisation layers: a proxy for the noise.

With one micro-batch on one rank no two gradients of a window can be compared. For a LayerNorm or RMSNorm the
gradient of each *sample* is at hand, with next to no arithmetic: ``sum over positions of x_hat dy`` for the
scale, and of ``dy`` for the shift. The noise scale of these few parameters goes with that of the whole model,
up to a factor which depends on the model (Gray et al. 2024, https://arxiv.org/abs/2411.00999).
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
    "the gradient of a normalisation layer is not the sum of what its samples add: it is used otherwise, "
    "too, or a hook changes it"
)
TOLERANCE = 1e-2
"""Of the sum of the samples' gradients against the gradient itself: bfloat16 rounds by half a per cent."""


def norm_layers(models: Iterable[nn.Module], owned: Sequence[ManagedParameter]) -> list[nn.Module]:
    """Return the layers whose scale or shift is trained by the accumulator's optimizers.

    Args:
        models: to look through.
        owned: the parameters.

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


class SeenSamples:
    """``sum_b |s_b g_b|^2`` over the samples of each micro-batch, s_b their shares in the loss.

    Args:
        layers: from `norm_layers`.
        count: samples of a micro-batch, by its index; 0 where they cannot be counted.

    Attributes:
        reason: why it cannot be told in this window; None: it can.
    """

    def __init__(self, layers: Sequence[nn.Module], count: Callable[[int], int]) -> None:
        self._layers, self._count = layers, count
        self.reason: str | None = None
        self._new: dict[Tensor, Tensor] = {}  # of the backward that is running
        self._of_microbatch: dict[Tensor, Tensor] = {}
        self._whole: dict[Tensor, Tensor] = {}  # gradients as the parameters get them
        self._new_whole: dict[Tensor, Tensor] = {}

    def open(self, undo: list[Callable[[], None]]) -> None:
        """Put hooks on the layers.

        Args:
            undo: what takes each off again is added to it.
        """
        hooks = (layer.register_forward_hook(self._hook, with_kwargs=True) for layer in self._layers)
        undo.extend(hook.remove for hook in hooks)  # each is in the list as soon as it is on

    def parameters(self) -> list[Tensor]:
        """The trained scales and shifts, each once."""
        found = {id(p): p for layer in self._layers for p in _parameters(layer) if p.requires_grad}
        return list(found.values())

    def whole(self, parameter: Tensor, gradient: Tensor) -> None:
        """Record the tensor that autograd adds to a parameter's gradient."""
        # A copy: the tensor itself may become `.grad`, to which the next micro-batch is added in place.
        _add(self._new_whole, parameter, gradient.detach().clone())

    def begin(self) -> None:
        """A backward begins: what was seen since the last one was asked for by the user's own forward."""
        self._new.clear()
        self._new_whole.clear()

    def take(self, index: int) -> None:
        """A backward has ended.

        Args:
            index: of its micro-batch.
        """
        samples = self._count(index)
        if not samples:
            self.reason = "samples cannot be counted"
        elif any(seen.shape[0] != samples for seen in self._new.values()):
            self.reason = NOT_FIRST
        elif self.reason is None:
            for into, new in ((self._of_microbatch, self._new), (self._whole, self._new_whole)):
                for parameter, seen in new.items():
                    _add(into, parameter, seen)
        self.begin()

    def end(self) -> tuple[float | Tensor, ...]:
        """A micro-batch has ended: return the norm over its samples, and two that tell whether all was seen.

        Returns:
            The norm of the samples' gradients; of their sum less the gradient; of the gradient.
        """
        samples, apart, wholes = [], [], []
        for parameter, whole in self._whole.items():
            seen = self._of_microbatch.get(parameter)
            total = torch.zeros_like(whole) if seen is None else seen.sum(0)
            samples += [] if seen is None else [seen]
            apart.append(total - whole)
            wholes.append(whole)
        self._of_microbatch.clear()
        self._whole.clear()
        if self.reason is not None:
            return (math.nan,) * 3
        return tuple(map(_norm, (samples, apart, wholes)))

    def judge(self, samples: float, apart: float, whole: float) -> float:
        """Return the norm over the samples, or NaN with a `reason` where something else was seen as well."""
        if apart > TOLERANCE * math.hypot(samples, whole):
            self.reason = OTHERWISE
            return math.nan
        return samples

    def forget(self) -> None:
        """Free what was seen."""
        self.begin()
        self._of_microbatch.clear()
        self._whole.clear()

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (isinstance(output, Tensor) and output.requires_grad):
            return  # in no_grad, as in the first forward of a reentrant checkpoint
        given = args[0] if args else kwargs["input" if "input" in kwargs else "x"]
        kept = given.detach()  # the layer itself keeps it for its backward
        output.register_hook(lambda gradient: self._seen(module, kept, gradient))

    @torch.no_grad()
    def _seen(self, module: Any, given: Tensor, gradient: Tensor) -> None:
        shape, weight, bias = module.normalized_shape, module.weight, getattr(module, "bias", None)
        dtype = torch.float32 if {given.dtype, gradient.dtype} & set(LOW_PRECISION) else gradient.dtype
        wide, gradient = given.to(dtype), gradient.to(dtype)
        if given.dim() <= len(shape):
            self.reason = NOT_FIRST
            return
        positions = list(range(1, given.dim() - len(shape)))
        if weight is not None and weight.requires_grad:
            if isinstance(module, nn.RMSNorm):
                eps = torch.finfo(given.dtype).eps if module.eps is None else module.eps
                hat = nn.functional.rms_norm(wide, shape, None, eps)
            else:
                hat = nn.functional.layer_norm(wide, shape, None, None, module.eps)
            _add(self._new, weight, _over(hat * gradient, positions))
        if bias is not None and bias.requires_grad:
            _add(self._new, bias, _over(gradient, positions))


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
    else:  # of other samples: a shape that `take` refuses
        table[parameter] = part.new_empty((0,))


def _norm(tensors: Sequence[Tensor]) -> float | Tensor:
    if not tensors:
        return 0.0
    wide = [t.float() if t.dtype in LOW_PRECISION else t for t in tensors]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in wide]))
    return norm.item() if norm.is_cpu else norm
