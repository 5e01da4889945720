"""A bfloat16 model in DistributedDataParallel, for `test_wide_parameters`: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import datetime
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.torch import Accumulator, count_tokens
from superbatch.torch.checks.probing.untouched import held_parameter
from tests.torch.helpers import sgd
from tests.torch.statement_cases import Attention, Tokens, each_token, token_batch

SHARES = (0.3, 0.03, 0.003, 0.0)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        return gradient @ weight.to(x.dtype), gradient.flatten(0, -2).T @ x.flatten(0, -2)


class BypassLinear(nn.Linear):
    """Linear layer with an `autograd.Function` that reads the parameter and bypasses conversions."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, input: Tensor) -> Tensor:
        out = _Product.apply(input, self.weight)
        assert isinstance(out, Tensor)
        return out + self.bias


def mixed(model: nn.Module, batch: dict[str, Tensor], share: float) -> Tensor:
    """Mean over tokens, plus a share of a mean over samples, which is the wrong term."""
    each = each_token(model(batch["ids"]), batch)
    return each.sum() / batch["lengths"].sum() + share * (each.sum(1) / batch["lengths"]).mean()


def train(share: float, *, bypass: bool = False) -> dict[str, Any]:
    """Make one update with the loss `mixed`; return its results."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Tokens(BypassLinear if bypass else Attention).bfloat16())

    def loss_fn(batch: dict[str, Any]) -> torch.Tensor:
        return mixed(model, batch, share)

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, microbatch_size=4, weight=count_tokens("labels")
    )
    error = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            accumulate(token_batch())
        except (LossSpecError, CoupledSamplesError) as raised:
            error = str(raised)
    parameters = list(model.parameters())
    assert all(p.dtype is torch.bfloat16 for p in parameters)
    sums = [float(p.detach().double().sum()) for p in parameters]
    return {
        "error": error,
        "updates": accumulate.updates,
        "warned": [str(one.message) for one in warned],
        "held": held_parameter(model) is not None,
        "sums": sums,
    }


def main(rank: int, folder: Path) -> None:
    """Run the updates of all shares on one rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {str(share): train(share) for share in SHARES}
    found["bypass"] = train(0.0, bypass=True)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may end the process with an error


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
