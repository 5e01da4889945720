"""Unsupported settings of the Hugging Face Trainer, and properties of its loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import Trainer
from transformers.training_args import OptimizerNames

from ..errors import InputError


def refuse_host(trainer: Trainer, ours: Collection[type], named: Collection[str]) -> None:
    """Raise for a Trainer whose gradients cannot be accumulated.

    Args:
        trainer: a Trainer that is ready to train.
        ours: classes of superbatch among its bases.
        named: names of classes whose `training_step` may be replaced.

    Raises:
        InputError: the Trainer shards the model, steps in the backward, or has a base class with its own
            `training_step`.
    """
    # "MULTI_GPU", "MULTI_CPU" and the like are DistributedDataParallel; other kinds shard the model.
    way, arguments = trainer.accelerator.distributed_type.name, trainer.args
    if way != "NO" and not way.startswith("MULTI_"):
        raise InputError(
            f"The Trainer runs with {way}, which shards gradients; superbatch.integrations.hf does not "
            "support it. Run it with DistributedDataParallel (torchrun without --fsdp or --deepspeed)."
        )
    if arguments.n_gpu > 1:
        raise InputError(
            f"The Trainer would use torch.nn.DataParallel on {arguments.n_gpu} GPUs, which superbatch does "
            "not support. Start it with torchrun, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    # These free each gradient as soon as the backward has computed it.
    if "lomo" in arguments.optim or "layerwise" in arguments.optim:
        raise InputError(
            f"optim={OptimizerNames(arguments.optim).value!r} steps during each backward, so gradients "
            'cannot be accumulated. Pass an optimizer that steps once per batch, such as optim="adamw_torch".'
        )
    for kind in type(trainer).__mro__:
        if "training_step" not in vars(kind) or kind in ours or kind.__name__ in named:
            continue
        raise InputError(
            f"superbatch replaces training_step, so {kind.__name__}.training_step would not be called. Move "
            "its code into compute_loss; for a trainer of TRL, derive from superbatch.integrations.trl.Exact."
        )


def has_own_loss(trainer: Trainer) -> bool:
    """Return True if a Trainer has its own loss instead of that of its model.

    Args:
        trainer: the Trainer.
    """
    return type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None


def has_single_samples(trainer: Trainer) -> bool:
    """Return True if the micro-batches of an update have one sample each.

    Args:
        trainer: the Trainer.
    """
    given = trainer.args
    count = given.gradient_accumulation_steps * trainer.accelerator.num_processes
    return given.per_device_train_batch_size == 1 < count


def couples_samples(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return True if the loss of a model couples the samples of a batch.

    Args:
        model: a model of transformers.
        inputs: inputs of a micro-batch.

    Examples:
        >>> couples_samples(None, {"return_loss": True})
        True
    """
    config = getattr(model, "config", None)
    # A multimodal model has the options of its language model in a config of its own.
    read_text = getattr(config, "get_text_config", None)
    config = read_text() if read_text else config
    router = inputs.get("output_router_logits", getattr(config, "output_router_logits", False))
    names = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
    # The load-balancing loss of a mixture of experts multiplies means over all tokens of the batch.
    has_share = any(getattr(config, name, 0) for name in names)
    return bool(inputs.get("return_loss")) or bool(router and has_share)
