"""Cases of the contract and their large-batch reference: NumPy in float64, gradients by hand.

`python -m tests.contract.reference` writes cases.json. A case is a training of some windows. A window is a
list of micro-batch sizes. The data follow from formulas, so that a backend in any language can run the case.
The expected losses and parameters come from training on whole windows, without micro-batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("cases.json")
FEATURES, UNITS, TOKENS = 3, 4, 4
Arrays = dict[str, Any]


def rows_of(case: dict[str, Any]) -> int:
    return sum(sum(window) for window in case["windows"])


def data(case: dict[str, Any]) -> Arrays:
    """Return x, y and mask of all rows of a case."""
    rows = rows_of(case)
    if case["model"] == "linear":
        x = np.full((rows, 1), 0.0029907226562)  # 0.003 in bfloat16; y and mask are unused
        x[0] = 1.0
        return {"x": x, "y": np.zeros(rows), "mask": np.ones(rows)}
    shape = (rows, TOKENS) if case["lengths"] else (rows,)
    index = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    x = np.sin(1.0 + 3 * index[..., None] + np.arange(FEATURES) ** 2)
    x[case["nan_rows"]] = np.nan
    lengths = np.array(case["lengths"] or [1] * rows)
    mask = (np.arange(TOKENS) < lengths[:, None]).astype(float) if case["lengths"] else np.ones(rows)
    return {"x": x, "y": np.cos(2 * index) + index / 50, "mask": mask}


def parameters(case: dict[str, Any]) -> Arrays:
    """Return the initial parameters."""
    if case["model"] == "linear":
        return {"w": np.zeros(1)}
    count = np.arange(FEATURES * UNITS, dtype=np.float64)
    return {"w": np.sin(count).reshape(FEATURES, UNITS), "v": np.cos(1 + np.arange(UNITS, dtype=np.float64))}


def window_of(arrays: Arrays, case: dict[str, Any], number: int) -> Arrays:
    """Return the rows of one window, without those of the micro-batches to be left out."""
    start = sum(sum(window) for window in case["windows"][:number])
    kept: list[int] = []
    for size in case["windows"][number]:
        rows = list(range(start, start + size))
        if not (case["nonfinite"] == "skip_microbatch" and set(rows) & set(case["nan_rows"])):
            kept += rows
        start += size
    return {name: array[kept] for name, array in arrays.items()}


def loss_and_gradient(p: Arrays, rows: Arrays, background: float) -> tuple[float, Arrays]:
    """Return the mean over masked-in tokens, ``mean (tanh(x w) v - y)^2``, and its gradient by hand.

    `background` times the square of every token, masked or not, is added to the sum. So a micro-batch of
    weight 0 has a loss too.
    """
    total = rows["mask"].sum()
    if "v" not in p:
        return float((rows["x"] @ p["w"]).mean()), {"w": rows["x"].mean(0)}
    hidden = np.tanh(rows["x"] @ p["w"])
    error = hidden @ p["v"] - rows["y"]
    counts = rows["mask"] + background
    outer = 2 * error * counts / total
    inner = outer[..., None] * p["v"] * (1 - hidden**2)
    flat = rows["x"].reshape(-1, FEATURES), inner.reshape(-1, UNITS)
    gradient = {"w": flat[0].T @ flat[1], "v": hidden.reshape(-1, UNITS).T @ outer.reshape(-1)}
    return float((error**2 * counts).sum() / total), gradient


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train by SGD with momentum on whole windows; a window of weight 0 makes no update."""
    p, arrays = parameters(case), data(case)
    velocity = {name: np.zeros_like(value) for name, value in p.items()}
    average = {name: value.copy() for name, value in p.items()}
    losses: list[float | None] = []
    updates = 0
    for number in range(len(case["windows"])):
        rows = window_of(arrays, case, number)
        if not rows["mask"].sum():
            losses.append(None)
            continue
        loss, gradient = loss_and_gradient(p, rows, case["background"])
        losses.append(loss)
        if case["clip"]:
            norm = np.sqrt(sum((leaf**2).sum() for leaf in gradient.values()))
            factor = min(1.0, case["clip"]["norm"] / (norm + case["clip"]["epsilon"]))
            assert factor < 1, "the premise: every update is clipped"
            gradient = {name: factor * leaf for name, leaf in gradient.items()}
        for name in p:
            velocity[name] = case["momentum"] * velocity[name] + gradient[name]
            p[name] = p[name] - case["rates"][updates] * velocity[name]
            average[name] = case["ema"] * average[name] + (1 - case["ema"]) * p[name]
        updates += 1
    listed = [{name: value.tolist() for name, value in tree.items()} for tree in (p, average)]
    return {"losses": losses, "updates": updates, "parameters": listed[0], "average": listed[1]}


def case(name: str, windows: list[list[int]], **changes: Any) -> dict[str, Any]:
    """Return the plain case with `changes`."""
    plain: dict[str, Any] = {
        "model": "tanh",
        "windows": windows,
        "lengths": None,
        "nan_rows": [],
        "reduction": "mean",
        "background": 0.0,
        "nonfinite": None,
        "clip": None,
        "rates": [0.1] * len(windows),
        "momentum": 0.9,
        "ema": 0.9,
        "dtype": "float64",
        "bound": 1e-12,
    }
    made = {"name": name} | plain | changes
    return made | {"expected": train(made)}


def cases() -> list[dict[str, Any]]:
    """Return all cases with their expected results."""
    lengths = [4, 1, 2, 0, 0, 3, 1, 4, 2, 1, 0, 3]
    empty = [4, 1, 2, 3, 0, 0, 0, 0, 2, 1, 4, 3]
    return [
        case("unequal micro-batches", [[3, 1, 4, 2], [1, 5, 2]]),
        *(case(f"a tail of {tail}", [[4, 4, tail], [4, tail]]) for tail in (1, 2, 3, 4)),
        case("token weights, an empty micro-batch", [[2, 1, 2, 1], [3, 3]], lengths=lengths),
        case("token weights, an empty micro-batch of equal ones", [[1] * 6, [1] * 6], lengths=lengths),
        case("a window that counts nothing", [[2, 2], [2, 2], [2, 2]], lengths=empty, rates=[0.1, 0.05, 0.0]),
        case(
            "a NaN micro-batch is left out",
            [[4, 4, 3], [4, 2]],
            nan_rows=[5, 11],
            nonfinite="skip_microbatch",
        ),
        case("sums", [[3, 1, 4, 2], [4, 3]], reduction="sum"),
        case("sums over tokens", [[2, 2, 2], [2, 2, 2]], reduction="sum", lengths=lengths),
        case(
            "sums over tokens, one over none",
            [[2, 2, 2], [1, 2, 2]],
            reduction="sum",
            lengths=[4, 1, 0, 0, 2, 3, 2, 0, 0, 4, 1],
            background=0.5,
        ),
        case(
            "sums over tokens, one over none, of one size",
            [[2, 2, 2], [2, 2, 2]],
            reduction="sum",
            lengths=[4, 1, 0, 0, 2, 3, 2, 1, 0, 0, 4, 1],
            background=0.5,
        ),
        case("clipping", [[4, 4, 2], [4, 1]], clip={"norm": 0.25, "epsilon": 1e-6}),
        case("a schedule", [[2, 2, 1]] * 4, rates=[0.2, 0.1, 0.0, 0.05]),
        case("a moving average", [[2, 2, 1]] * 4, ema=0.5),
        case(
            "bfloat16, K=512",
            [[1] * 512],
            model="linear",
            dtype="bfloat16",
            rates=[1.0],
            momentum=0.0,
            ema=0.0,
            bound=2**-8,
        ),
    ]


def text() -> str:
    """Return the text of cases.json."""
    return json.dumps(cases(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
