"""Settings of the Trainer of Hugging Face that sums of gradients do not fit, and facts about its loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import Trainer
from transformers.training_args import OptimizerNames

from ..errors import InputError


def refuse_host(trainer: Trainer, known: Collection[type], named: Collection[str]) -> None:
    """Check how a Trainer runs.

    Args:
        trainer: set up.
        known: classes of superbatch among its bases.
        named: names of classes whose `training_step` may be replaced.

    Raises:
        InputError: it shards the model, or a class of it has a `training_step` of its own.
    """
    way, arguments = trainer.accelerator.distributed_type.name, trainer.args
    if way != "NO" and not way.startswith("MULTI_"):
        raise InputError(
            f"The Trainer runs with {way}, and superbatch.integrations.hf needs gradients that are "
            "whole on each rank. Run it with DistributedDataParallel (torchrun without --fsdp or "
            "--deepspeed)."
        )
    if arguments.n_gpu > 1:
        raise InputError(
            f"The Trainer would use torch.nn.DataParallel on {arguments.n_gpu} GPUs. Start it with "
            "torchrun, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    if "lomo" in arguments.optim or "layerwise" in arguments.optim:
        raise InputError(
            f"optim={OptimizerNames(arguments.optim).value!r} steps inside of each backward, so gradients "
            "cannot be added up. Choose an optimizer that steps once for each batch."
        )
    for kind in type(trainer).__mro__:
        if "training_step" not in vars(kind) or kind in known or kind.__name__ in named:
            continue
        raise InputError(
            f"{kind.__name__}.training_step would not be called. Put its code into compute_loss, or "
            "name superbatch.integrations.trl.Exact for a trainer of TRL."
        )


def has_own_loss(trainer: Trainer) -> bool:
    """Tell whether the loss of a Trainer is not that of its model.

    Args:
        trainer: any.
    """
    return type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None


def has_single_samples(trainer: Trainer) -> bool:
    """Tell whether an update is made of micro-batches of one sample.

    Args:
        trainer: any.
    """
    given = trainer.args
    count = given.gradient_accumulation_steps * trainer.accelerator.num_processes
    return given.per_device_train_batch_size == 1 < count


def couples_samples(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Tell whether a model returns the loss of a batch that is no mean over samples.

    Args:
        model: of transformers.
        inputs: of a micro-batch.

    Examples:
        >>> couples_samples(None, {"return_loss": True})
        True
    """
    config = getattr(model, "config", None)
    read_text = getattr(config, "get_text_config", None)
    config = read_text() if read_text else config
    router = inputs.get("output_router_logits", getattr(config, "output_router_logits", False))
    names = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
    has_share = any(getattr(config, name, 0) for name in names)
    return bool(inputs.get("return_loss")) or bool(router and has_share)
