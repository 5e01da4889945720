"""The contract on PyTorch: `superbatch.torch.Accumulator`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from superbatch import Window
from superbatch.torch import Accumulator
from tests.contract import reference

WAYS = ["windows", "batches"]


class Model(nn.Module):
    """The reference's model."""

    def __init__(self, start: reference.Arrays, dtype: torch.dtype) -> None:
        super().__init__()
        for name, value in start.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=dtype)))

    def forward(self, microbatch: dict[str, Tensor], reduction: str, background: float) -> Tensor:
        p, x = dict(self.named_parameters()), microbatch["x"]
        if "v" not in p:
            return (x @ p["w"]).mean()
        error = (x @ p["w"]).tanh() @ p["v"] - microbatch["y"]
        total = (error**2 * (microbatch["mask"] + background)).sum()
        return total if reduction == "sum" else total / microbatch["mask"].sum()


def can(case: dict[str, Any], way: str) -> bool:
    """Return True if this way can run the case: "batches" splits into micro-batches of one row."""
    sizes = [size for window in case["windows"] for size in window]
    return way == "windows" or (max(sizes) == 1)


def run(case: dict[str, Any], way: str) -> dict[str, Any]:
    """Train; return losses, updates, parameters and their average, as lists."""
    dtype = getattr(torch, case["dtype"])
    arrays = {name: torch.tensor(value, dtype=dtype) for name, value in reference.data(case).items()}
    model = Model(reference.parameters(case), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=case["momentum"])
    rates = [*case["rates"], 0.0]
    accumulate = Accumulator(
        model,
        optimizer,
        lambda microbatch: model(microbatch, case["reduction"], case["background"]),
        microbatch_size=1 if way == "batches" else None,
        reduction=case["reduction"],
        weight=(lambda microbatch: microbatch["mask"].sum()) if case["lengths"] else None,
        max_grad_norm=case["clip"]["norm"] if case["clip"] else None,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rates[update]),
        nonfinite=case["nonfinite"] or "raise",
        # The choice of "auto" for so many micro-batches, without its message.
        gradient_sum=torch.float32 if case["dtype"] == "bfloat16" else "auto",
        check=max(map(max, case["windows"])) > 1,  # a micro-batch of one row cannot be split
    )
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    losses: list[float] = []
    start = 0
    for sizes in case["windows"]:
        parts = []
        for size in sizes:
            parts.append({name: array[start : start + size] for name, array in arrays.items()})
            start += size
        whole = {name: torch.cat([part[name] for part in parts]) for name in arrays}
        update = accumulate(Window(parts) if way == "windows" else whole)
        losses.append(update.loss)
        if update.made:
            for name, value in model.named_parameters():
                average[name] = case["ema"] * average[name] + (1 - case["ema"]) * value.detach()
    return {
        "losses": losses,
        "updates": accumulate.updates,
        "parameters": {name: value.detach().double().tolist() for name, value in model.named_parameters()},
        "average": {name: value.double().tolist() for name, value in average.items()},
    }
