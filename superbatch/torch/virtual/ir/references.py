"""References for paranoid mode: operations on full tensors, computed without the rules.

Some kernels cannot be called again on full tensors: the state that they save for the backward is missing, or
in a private form. These functions compute their results by another method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from superbatch.torch.devices import in_float64

Arguments = dict[str, Any]  # by name, with full tensors
aten: Any = torch.ops.aten


def arguments_by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> Arguments:
    """Return all arguments of a call by name, with the schema's defaults."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    # `defaults` has the order of the schema, so zip pairs positional arguments with their names.
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


# -- CUDA's attention ---------------------------------------------------------------------------------------


def _attention_weights(arguments: Arguments) -> tuple[Tensor, float]:
    """Return the attention weights [..., queries, keys], and the scale of the scores."""
    query, key = arguments["query"], arguments["key"]
    scale = arguments.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # In float64: a reference in the kernel's precision would have a rounding error of its own.
    scores = in_float64(query) @ in_float64(key).mT * scale
    if arguments.get("attn_bias") is not None:
        scores = scores + arguments["attn_bias"]
    if arguments["is_causal"]:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0), scale  # a query whose keys are all masked has output 0


def _attention(arguments: Arguments) -> list[Any]:
    if arguments["dropout_p"]:
        return []  # nothing can be compared, because the kernel does not return its dropout mask
    probs, _ = _attention_weights(arguments)
    return [(probs @ in_float64(arguments["value"])).to(arguments["query"].dtype)]


def _attention_backward(arguments: Arguments) -> list[Any]:
    if arguments["dropout_p"]:
        return []
    grad = in_float64(next(iter(arguments.values())))  # "grad_out", or "grad_out_"
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    probs, scale = _attention_weights(arguments)
    # The gradient of softmax: dS = P * (dP - sum(dP * P)).
    of_probs = grad @ in_float64(value).mT
    of_scores = probs * (of_probs - (of_probs * probs).sum(-1, keepdim=True))
    gradients: list[Any] = [
        (of_scores @ in_float64(key) * scale).to(query.dtype),
        (of_scores.mT @ in_float64(query) * scale).to(key.dtype),
        (probs.mT @ grad).to(value.dtype),
    ]
    bias = arguments.get("attn_bias")
    return gradients if bias is None else [*gradients, of_scores.sum_to_size(bias.shape).to(bias.dtype)]


# -- cuDNN --------------------------------------------------------------------------------------------------

_RNN, _RNN_BACKWARD = aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default


def _recurrent(arguments: Arguments) -> list[Any]:
    return list(_RNN(**_with_own_buffer(arguments))[:3])


def _recurrent_backward(arguments: Arguments) -> list[Any]:
    arguments = _with_own_buffer(arguments)
    names = [argument.name for argument in _RNN._schema.arguments]
    output, _, _, reserve, buffer = _RNN(**{name: arguments[name] for name in names})
    arguments.update(output=output, reserve=reserve, weight_buf=buffer)
    return list(_RNN_BACKWARD(**arguments))


def _with_own_buffer(arguments: Arguments) -> Arguments:
    """Return the arguments with None in place of an empty placeholder for the packed weights."""
    buffer = arguments["weight_buf"]
    # cuDNN requires contiguous states; slices of a batch are strided.
    states = {
        name: item.contiguous()
        for name, item in arguments.items()
        if isinstance(item, Tensor) and name != "weight_buf"
    }
    return {**arguments, **states, "weight_buf": buffer if buffer is not None and buffer.numel() else None}


def _batch_norm(arguments: Arguments) -> list[Any]:
    # cudnn_batch_norm has the same first eight arguments, and a reserve as its fourth result.
    return list(aten.native_batch_norm.default(*list(arguments.values())[:8]))


def _batch_norm_backward(arguments: Arguments) -> list[Any]:
    x, grad, weight, mean, var, save_mean, save_invstd, eps = list(arguments.values())[:8]
    training, wanted = True, [True, True, True]  # cuDNN's backward is for training, and returns all three
    rest = mean, var, save_mean, save_invstd, training, eps, wanted
    return list(aten.native_batch_norm_backward.default(grad, x, weight, *rest))


# -- random numbers -----------------------------------------------------------------------------------------


def dropped(arguments: Arguments, mask: Tensor) -> list[Any]:
    """Return the result of dropout for the mask that it drew."""
    p, x = arguments["p"], arguments["input"]
    # p = 1 drops everything; 1 / (1 - p) would divide by zero.
    return [x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p))]


_ATTENTION = ("flash", "efficient", "cudnn")

REFERENCES: dict[Any, Callable[[Arguments], list[Any]]] = {
    **{getattr(aten, f"_scaled_dot_product_{name}_attention"): _attention for name in _ATTENTION},
    **{
        getattr(aten, f"_scaled_dot_product_{name}_attention_backward"): _attention_backward
        for name in _ATTENTION
    },
    aten._cudnn_rnn: _recurrent,
    aten._cudnn_rnn_backward: _recurrent_backward,
    aten.cudnn_batch_norm: _batch_norm,
    aten.cudnn_batch_norm_backward: _batch_norm_backward,
}
