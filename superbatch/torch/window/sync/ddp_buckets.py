"""Reduction of a window's gradients by the reducers of DDP wrappers, in the memory of their buckets.

With ``gradient_as_bucket_view=True`` a reducer leaves the reduced gradients in its buckets, and the sums that
it was given are freed as it copies them. A reduction beside it would take the gradients once more. It runs in
a backward that has no gradient of its own, so that a rank without weight, and without a loss, takes part.

The reducer has no public way to do so. The private parts that this needs are all here.
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
        self._known: frozenset[int] = frozenset()
        self._broken = False

    @staticmethod
    def usable(wrappers: Sequence[DistributedDataParallel]) -> bool:
        """Return whether the reducers of wrappers leave plain gradients in their buckets."""
        every: list[Any] = list(wrappers)
        return all(
            wrapper.gradient_as_bucket_view
            and not wrapper.static_graph
            # Its reducer would warn that it finds no unused parameter: the backward comes to all of them.
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
        return self._known == frozenset(map(id, self._parameters()))

    def fit(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> bool:
        """Return whether the reducers can reduce gradients: all of the wrappers' own, in ``.grad``.

        Args:
            gradients: one for each parameter.
            parameters: those of a window.
        """
        if self._broken or not {id(each) for each in parameters}.issuperset(map(id, self._parameters())):
            return False
        if any(getattr(parameter, "_backward_hooks", None) for parameter in parameters):
            return False  # they would be called, with None in place of a gradient
        return all(
            gradient is parameter.grad and (gradient is None or _is_plain(gradient, parameter))
            for gradient, parameter in zip(gradients, parameters, strict=True)
        )

    def prepare(self) -> bool:
        """Try a reduction of nothing, which leaves the gradients as they are.

        Returns:
            False if a reducer waits for a parameter that was frozen since it was made: none is used then.
        """
        own = self._parameters()
        kept = [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        try:
            self._run()
        except RuntimeError:
            self._broken = True
        finally:
            for parameter, gradient in zip(own, kept, strict=True):
                parameter.grad = gradient
        self._known = frozenset(map(id, own))
        return not self._broken

    def reduce(self, gradients: list[Tensor | None], parameters: Sequence[Tensor]) -> list[int]:
        """Sum gradients over the ranks, and leave them in ``.grad``.

        Args:
            gradients: one for each parameter; emptied, so that the memory of each can be freed.
            parameters: those of a window.

        Returns:
            The indices of parameters that no reducer knows, whose gradients are as they were.
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
        fastpaths.multiply(moved, self._wrappers[0].process_group.size())  # they are means
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
                # Otherwise the next forward would lay out the buckets anew, and communicate for it: a rank
                # without weight has no forward, and the others would wait for it.
                reducer._reset_state()

    def _parameters(self) -> list[Tensor]:
        return [parameter for wrapper in self._wrappers for parameter in _trained(wrapper)]


class _Nothing(torch.autograd.Function):
    """A number whose backward comes to all parameters, and gives none of them a gradient."""

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
    """Return whether a gradient can be copied into a bucket without a loss, in a backward.

    The reducer divides it by the number of ranks, which rounds, in a low precision too much.
    """
    return (
        gradient.layout is torch.strided
        and gradient.dtype in (torch.float32, torch.float64)
        and gradient.dtype == parameter.dtype
        and gradient.stride() == parameter.stride()
    )


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
