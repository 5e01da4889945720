"""Conversion of a state to JSON and tensors, and back; plain containers keep their types."""

from __future__ import annotations

import math
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import CheckpointError

# Exact types, because a subclass may have more state.
_SCALARS = (type(None), bool, int, str)


class Encoder:
    """Converts a state to JSON values, and collects its tensors.

    Two tensors with the same memory (tied weights) become one entry, and one tensor again after decoding.

    Args:
        like: function from a DTensor to the name of a parameter with the same sharding, or to None.

    Attributes:
        tensors: name -> tensor.
        sharded: name -> DTensor, which its ranks write together.

    Examples:
        >>> encoder = Encoder()
        >>> encoder.encode({1: (2.0, torch.ones(2))}, "state")
        {'dict': [[1, {'tuple': [2.0, {'tensor': 'state.1.1'}]}]]}
        >>> list(encoder.tensors)
        ['state.1.1']
    """

    def __init__(self, like: Callable[[Tensor], str | None] = lambda tensor: None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.sharded: dict[str, Tensor] = {}
        self._like = like
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Return a value as JSON.

        Args:
            value: numbers, strings, tensors, arrays and dtypes in dicts, lists, tuples and sets.
            where: path of the value, for names and errors.

        Raises:
            CheckpointError: the value contains another object; the error names its path.
        """
        # The exact type, because an IntEnum would be decoded as an int.
        if type(value) in _SCALARS:
            return value
        if isinstance(value, float):
            # JSON has no infinity and no NaN.
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if type(value) is list:
            return [self.encode(each, f"{where}.{i}") for i, each in enumerate(value)]
        return self._tagged(value, where)

    def _tagged(self, value: Any, where: str) -> dict[str, Any]:
        # Before tuple, of which torch.Size is a subclass.
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if type(value) is tuple:
            # Not a namedtuple, whose class could not be restored.
            return {"tuple": [self.encode(each, f"{where}.{i}") for i, each in enumerate(value)]}
        if isinstance(value, Mapping):
            # As pairs, because keys of JSON are strings and optimizers have int keys.
            items = [[self.encode(k, where), self.encode(v, f"{where}.{k}")] for k, v in value.items()]
            return {"dict": items}
        if type(value) is set:
            return {"set": [self.encode(each, where) for each in value]}
        if type(value) is bytes:
            return {"bytes": b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        numpy: Any = sys.modules.get("numpy")
        # E.g. a learning rate in an optimizer's groups that NumPy has computed.
        if numpy is not None and isinstance(value, numpy.generic):
            return self.encode(value.item(), where)
        # Arrays of objects would need pickle.
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object:
            return {"array": self.encode(torch.from_numpy(numpy.ascontiguousarray(value)), where)}
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved "
            "without pickle. Use only numbers, strings, tensors, lists, tuples and dicts in the state."
        )

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        # By attribute, because importing DTensor is slow and most programs have none.
        if hasattr(tensor, "device_mesh"):
            return self._shards(tensor, where)
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            raise CheckpointError(
                f"{where} is a {tensor.layout} tensor on the device {tensor.device}, which cannot be saved. "
                "Convert it to a dense tensor on the CPU or a GPU first."
            )
        # As pairs of real numbers, because safetensors has no complex dtypes.
        if tensor.is_complex():
            return {"complex": self._tensor(torch.view_as_real(tensor.detach().resolve_conj()), where)}
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        # Tied weights have equal address, shape and strides. All empty tensors have the address 0.
        key = (tensor.data_ptr(), *form) if tensor.numel() else (where, *form)
        name = self._names.setdefault(key, where)
        # The first name is used for both, so that decoding returns the same tensor.
        self.tensors.setdefault(name, tensor.detach())
        return {"tensor": name}

    def _shards(self, tensor: Any, where: str) -> dict[str, Any]:
        like = self._like(tensor)
        if like is None:  # loading takes the sharding from a parameter, and no parameter has this one
            return self._tensor(tensor.full_tensor(), where)
        self.sharded[where] = tensor.detach()
        # With shape and dtype, because the program that loads it may not have this parameter.
        form = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        return {"sharded": where, "like": like, **form}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `Encoder.encode` has converted.

    Raises:
        CheckpointError: `Encoder.encode` did not make the JSON value.

    Examples:
        >>> decode({"dict": [[1, {"tuple": [2.0, {"float": "inf"}]}]]}, {})
        {1: (2.0, inf)}
    """
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    # The first key of a dict is its tag, such as "tuple".
    kind = next(iter(value), "")
    read = _READ.get(kind)
    try:
        if read is None:
            raise KeyError(kind)
        return read(value[kind], tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"The checkpoint contains a value of kind {kind!r} that cannot be read ({error!r}). Install the "
            "superbatch that wrote it, or pass the folder of an older checkpoint to load_checkpoint()."
        ) from None


def sharded_in(value: Any) -> dict[str, dict[str, Any]]:
    """Return the entries of DTensors in a JSON value, by their names.

    Examples:
        >>> sharded_in([{"sharded": "w", "like": "0.w", "shape": [2], "dtype": "float32"}, 1])
        {'w': {'sharded': 'w', 'like': '0.w', 'shape': [2], 'dtype': 'float32'}}
    """
    if isinstance(value, list):
        return {name: entry for each in value for name, entry in sharded_in(each).items()}
    if not isinstance(value, dict):
        return {}
    if "sharded" in value:
        return {value["sharded"]: value}
    return {name: entry for each in value.values() for name, entry in sharded_in(each).items()}


_READ: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "tensor": lambda name, tensors: tensors[name],
    "sharded": lambda name, tensors: tensors[name],
    "complex": lambda real, tensors: torch.view_as_complex(decode(real, tensors)),
    "array": lambda array, tensors: decode(array, tensors).numpy(),
    "dict": lambda items, tensors: {decode(k, tensors): decode(v, tensors) for k, v in items},
    "tuple": lambda items, tensors: tuple(decode(items, tensors)),
    "set": lambda items, tensors: set(decode(items, tensors)),
    "size": lambda items, tensors: torch.Size(items),
    "float": lambda text, tensors: float(text),
    "bytes": lambda text, tensors: b64decode(text),
    "dtype": lambda name, tensors: getattr(torch, name),
    "device": lambda name, tensors: torch.device(name),
}
