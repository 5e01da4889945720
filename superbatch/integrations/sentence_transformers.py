"""Gradient of the whole batch for losses of sentence-transformers, in the memory of a micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..batch.split import positive_int, split
from ..errors import InputError
from ..torch.gradcache.one_pass import refuse_batch_statistics
from .versions import check_version

ENCODERS = (SentenceTransformer, SparseEncoder, MultiVectorEncoder)


def cached(loss: nn.Module, *, microbatch_size: int) -> CachedLoss:
    """Wrap a loss so that its model encodes in micro-batches and the gradient is that of the whole batch.

    The loss is computed once, from the embeddings of all samples. Its backward encodes each micro-batch
    again, with the same random numbers, so only one micro-batch has its activations in memory.

    Args:
        loss: a loss of sentence-transformers, or your own one that calls its model in the same way.
        microbatch_size: the largest number of samples (rows of a column) in one forward of the model.

    Returns:
        A loss for `SentenceTransformerTrainer`, or for ``loss(features, labels).backward()``.

    Raises:
        InputError: the loss has no encoder, or uses hooks that are not active in the second forward.

    Examples:
        >>> from sentence_transformers.sentence_transformer.losses import CoSENTLoss
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["a", "b"])], device="cpu")
        >>> cached(CoSENTLoss(model), microbatch_size=16).microbatch_size
        16
    """
    check_version("sentence-transformers")
    return CachedLoss(loss, microbatch_size)


class CachedLoss(nn.Module):
    """A loss whose models encode in micro-batches; see `cached`.

    Args:
        loss: the wrapped loss.
        microbatch_size: the largest number of samples in one forward of a model.
    """

    def __init__(self, loss: nn.Module, microbatch_size: int) -> None:
        super().__init__()
        if getattr(loss, "uses_gradient_cache", False) or isinstance(loss, CachedLoss):
            raise InputError(
                f"{type(loss).__name__} caches gradients already. Pass a loss without a cache to cached(), "
                "such as MultipleNegativesRankingLoss, or use this loss without cached()."
            )
        for module in loss.modules():
            if isinstance(module, AdaptiveLayerLoss):
                raise InputError(
                    f"The hooks of {type(module).__name__} are active only during its forward, but cached() "
                    "encodes again in the backward. Use this loss without cached()."
                )
        if not any(isinstance(module, ENCODERS) for module in loss.modules()):
            raise InputError(
                f"cached() found no SentenceTransformer, SparseEncoder or MultiVectorEncoder in "
                f"{type(loss).__name__}. Pass a loss that holds its model as a module."
            )
        self.loss = loss
        self.microbatch_size = positive_int("microbatch_size", microbatch_size)
        if isinstance(getattr(loss, "model", None), nn.Module):
            self.model = loss.model  # the Trainer wraps this attribute in DistributedDataParallel

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Any:
        """Return the loss of the whole batch, with a graph through the embeddings to the parameters."""
        with ExitStack() as stack:
            for module in self.loss.modules():
                if isinstance(module, nn.DataParallel):
                    raise InputError(
                        "cached() does not support torch.nn.DataParallel. Start one process per GPU with "
                        "torchrun."
                    )
                if isinstance(module, ENCODERS):
                    stack.enter_context(_in_microbatches(module, self.microbatch_size))
            return self.loss(sentence_features, labels)


@contextmanager
def _in_microbatches(model: nn.Module, size: int) -> Iterator[None]:
    """Make a model encode in micro-batches in this context, also inside DistributedDataParallel."""
    before = vars(model).get("forward")  # Accelerate puts a wrapper on the object
    if not _is_own_forward(model):
        raise InputError(
            "An outer loss has replaced forward() of the model. Apply cached() to the outermost loss: "
            "cached(MatryoshkaLoss(model, loss), microbatch_size=...)."
        )
    refuse_batch_statistics([model])  # BatchNorm in training depends on the split
    model.forward = partial(_encode, model.forward, size)
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


def _is_own_forward(model: nn.Module) -> bool:
    """Return True if `forward` of a model is that of its class, or Accelerate's wrapper of it."""
    forward: Any = model.forward
    is_bound = isinstance(forward, MethodType) and forward.__self__ is model
    return is_bound and inspect.unwrap(forward.__func__) is type(model).forward


def _encode(forward: Any, size: int, features: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the tensors that losses read from a model's output, for all samples."""
    flat = {"cu_seq_lens_q", "offsets"} & features.keys()
    if flat:
        raise InputError(
            f"cached() needs padded inputs, but these have {flat.pop()!r}, so they are flattened. Make the "
            "model with Transformer(..., unpad_inputs=False), or remove cached() around a StaticEmbedding."
        )

    def embed(microbatch: dict[str, Any]) -> dict[str, Any]:
        # Modules may write into their features, and the second forward needs the original values.
        output = forward({name: _copy(value) for name, value in microbatch.items()}, **options)
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if "sentence_embedding" not in tensors:
            return tensors  # a multi-vector model has token embeddings only
        return {
            name: value for name, value in tensors.items() if value.ndim == 2 and value.is_floating_point()
        }

    # Without gradients, as in an evaluation, nothing needs to be recomputed.
    run = partial(checkpoint, embed, use_reentrant=False) if torch.is_grad_enabled() else embed
    whole = {"prompt_length"} & features.keys()  # one value for all samples, even as a tensor
    outputs = [run(microbatch) for microbatch in split(features, size, unsplit=whole)]
    return {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
