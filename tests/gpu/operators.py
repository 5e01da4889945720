"""Each rule of the operator table on the device, against plain tensors on the CPU in float64."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.torch import virtual_batch
from tests.gpu.check import Figures, Run
from tests.torch.coupled import data
from tests.torch.coupled.operator_case import OperatorCase
from tests.torch.coupled.operators import ALL_OPERATORS

SAMPLES, MICROBATCH = 7, 3


def _scalar(outputs: list[Tensor]) -> Tensor | None:
    terms: list[Tensor] = []
    for index, out in enumerate(outputs):
        if out.requires_grad:
            weights = data.normal(*out.shape, seed=100 + index).to(out.device)
            terms.append(((out.abs() if out.is_complex() else out) * weights).sum())
    return torch.stack(terms).sum() if terms else None


def _outputs(case: OperatorCase, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    found = case.function(*inputs)
    return [found] if isinstance(found, Tensor) else list(found)


def _moved(case: OperatorCase, device: torch.device) -> list[Tensor]:
    return [
        x.detach().to(device).requires_grad_(x.requires_grad) for x in case.inputs(max(SAMPLES, case.min_n))
    ]


def _on_whole(case: OperatorCase, device: torch.device) -> tuple[list[Tensor], list[Tensor | None]]:
    inputs = _moved(case, device)
    outputs = _outputs(case, inputs)
    scalar = _scalar(outputs)
    if scalar is not None:
        scalar.backward()
    return [out.detach().cpu() for out in outputs], [None if x.grad is None else x.grad.cpu() for x in inputs]


def _on_virtual(case: OperatorCase, device: torch.device) -> tuple[list[Tensor], list[Tensor | None]]:
    inputs = _moved(case, device)
    holder = nn.Module()
    for index, x in enumerate(inputs):
        if index not in case.virtual and x.requires_grad:
            holder.register_parameter(f"input_{index}", nn.Parameter(x.detach()))
    given = [getattr(holder, f"input_{index}", x) for index, x in enumerate(inputs)]
    with virtual_batch(holder, MICROBATCH, device=device) as batch:
        used = [batch(x) if index in case.virtual else x for index, x in enumerate(given)]
        outputs = _outputs(case, used)
        scalar = _scalar(outputs)
        if scalar is not None:
            scalar.backward()
        values = [_read(out) for out in outputs]
    return values, [None if x.grad is None else x.grad.cpu() for x in given]


def _read(out: Tensor) -> Tensor:
    # Through numbers, because a virtual tensor stays virtual on the CPU.
    return torch.tensor(out.detach().tolist(), dtype=out.dtype).reshape(out.shape)


def _difference(ours: Any, theirs: Any) -> float:
    worst = 0.0
    for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert (a is None) == (b is None), "only one of the two has a gradient"
        if a is None or not a.numel():
            continue
        if not (b.is_floating_point() or b.is_complex()):
            assert torch.equal(a, b), "other integers"
            continue
        same = torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)  # infinities and NaN may be equal
        scale = max(float(b.abs().nan_to_num(0, 0, 0).max()), 1e-3)
        worst = max(worst, float((a - b).abs().where(~same, 0.0).nan_to_num(1, 1, 1).max()) / scale)
    return worst


def table(run: Run, left_out: Collection[str] = ()) -> Figures:
    """Values and gradients of each operator are right; operators without a kernel are counted and named."""
    cases = [case for case in ALL_OPERATORS if not case.random and case.name not in left_out]
    assert len(cases) > 300, "premise: the table has its operators"
    cases = cases[::40] if run.small else cases
    missing: list[str] = []
    wrong: list[str] = []
    worst = 0.0
    for case in cases:
        try:
            whole = _on_whole(case, run.device)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            missing.append(f"{case.name}: {str(error).splitlines()[0][:80]}")
            continue
        try:
            found = _difference(_on_virtual(case, run.device), whole)
        except Exception as error:  # noqa: BLE001  (one line for each; the others still run)
            wrong.append(f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        worst = max(worst, found)
        if found > 1e-9:
            wrong.append(f"{case.name}: differs by {found:.1e}")
    assert len(missing) < 0.1 * len(cases), f"plain torch itself fails for too many: {missing[:5]}"
    assert not wrong, f"{len(wrong)} of {len(cases)} operators: " + "; ".join(wrong[:20])
    return {"operators": len(cases), "no kernel": missing, "worst": worst}
