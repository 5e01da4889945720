"""Reduction of a window's gradients by the reducers of DDP wrappers, in the memory of their buckets.

With ``gradient_as_bucket_view=True`` a reducer copies gradients into its buckets, frees them, and leaves the
reduced gradients there. A reduction of our own would need the memory of the gradients once more. The reducer
runs in a backward without gradients, so that a rank of weight 0, which has no loss, can take part.

The reducer has no public function for this. All private ones that are needed are in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ... import fastpaths


class Buckets:
    """Buckets of the reducers of DDP wrappers.

    Args:
        wrappers: the models' DDP wrappers, all of which have ``gradient_as_bucket_view=True``.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        self._wrappers: list[Any] = list(wrappers)
        self._prepared_for: frozenset[int] = frozenset()
        self._is_unusable = False

    @staticmethod
    def usable(wrappers: Sequence[DistributedDataParallel]) -> bool:
        """Return whether the reducers of wrappers leave plain gradients in their buckets."""
        every: list[Any] = list(wrappers)
        return all(
            wrapper.gradient_as_bucket_view
            and not wrapper.static_graph
            # With this option the reducer would warn, because our backward reaches all parameters.
            and not wrapper.find_unused_parameters
            and wrapper.mixed_precision is None
            and not getattr(wrapper, "_use_python_reducer", False)
            and not getattr(wrapper, "_delay_all_reduce_params", ())
            and not any(map(_is_sparse, wrapper.modules()))
            for wrapper in every
        )

    @property
    def ready(self) -> bool:
        """True if `prepare` was called for the parameters that require a gradient now."""
        return self._prepared_for == frozenset(map(id, self._parameters()))

    def fit(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> bool:
        """Return whether the reducers can reduce the gradients, which must be in ``.grad``.

        Args:
            gradients: one for each parameter.
            parameters: the window's parameters; they must include all of the wrappers'.
        """
        if self._is_unusable or not {id(each) for each in parameters}.issuperset(map(id, self._parameters())):
            return False
        if any(getattr(parameter, "_backward_hooks", None) for parameter in parameters):
            return False  # the hooks would be called with None in place of a gradient
        return all(
            gradient is parameter.grad and (gradient is None or _is_plain(gradient, parameter))
            for gradient, parameter in zip(gradients, parameters, strict=True)
        )

    def prepare(self) -> bool:
        """Try a reduction without gradients.

        Returns:
            False if a reducer waits for a parameter that was frozen after the wrapper was made. The reducers
            are not used then.
        """
        own = self._parameters()
        # The reduction writes its result into `.grad`.
        kept = [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        try:
            self._run()
        except RuntimeError:
            self._is_unusable = True
        finally:
            for parameter, gradient in zip(own, kept, strict=True):
                parameter.grad = gradient
        # Parameters that are unfrozen later need another try.
        self._prepared_for = frozenset(map(id, own))
        return not self._is_unusable

    def reduce(self, gradients: list[Tensor | None], parameters: Sequence[Tensor]) -> list[int]:
        """Sum gradients over the ranks, and leave them in ``.grad``.

        Args:
            gradients: one for each parameter; the list is cleared, so that each gradient can be freed.
            parameters: the window's parameters.

        Returns:
            The indices of parameters without a reducer, whose gradients are unchanged.
        """
        own = set(map(id, self._parameters()))
        before = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        gradients.clear()
        self._run()
        moved: list[Tensor] = []
        missed: list[int] = []
        for index, (parameter, address) in enumerate(zip(parameters, before, strict=True)):
            gradient = parameter.grad
            if id(parameter) not in own or gradient is None or gradient.data_ptr() == address:
                missed.append(index)
            else:
                moved.append(gradient)
        fastpaths.multiply(moved, self._wrappers[0].process_group.size())  # the reducer computes means
        return missed

    def _run(self) -> None:
        """Run the reducers of all wrappers in a backward without gradients."""
        for wrapper in self._wrappers:
            reducer = wrapper.reducer
            reducer._reset_state()
            with torch.enable_grad():
                root = _Nothing.apply(*_trained(wrapper))
                reducer.prepare_for_backward([])
            try:
                root.backward()
                reducer._check_reducer_finalized()
            finally:
                # Otherwise the next forward would rebuild the buckets, which communicates. The ranks would
                # wait for a rank of weight 0, which has no forward.
                reducer._reset_state()

    def _parameters(self) -> list[Tensor]:
        return [parameter for wrapper in self._wrappers for parameter in _trained(wrapper)]


class _Nothing(torch.autograd.Function):
    """A number whose backward reaches all parameters without a gradient for any of them."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def _trained(wrapper: Any) -> list[Tensor]:
    ignored = wrapper.parameters_to_ignore
    return [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]


def _is_plain(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether a gradient can be copied into a bucket of the reducer without loss.

    Low precision is excluded, because the reducer divides by the number of ranks, which rounds.
    """
    return (
        gradient.layout is torch.strided
        and gradient.dtype in (torch.float32, torch.float64)
        and gradient.dtype == parameter.dtype
        and gradient.stride() == parameter.stride()
    )


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
