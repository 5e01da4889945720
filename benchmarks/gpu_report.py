"""Tables and plots of `benchmarks/gpu.py`."""

from pathlib import Path
from typing import Any

from gpu_measure import Row
from tables import print_table


def show(title: str, rows: list[Row]) -> None:
    """Print one table."""
    cells = [
        (
            row.name,
            f"{row.seconds * 1e3:.1f}",
            f"{row.ratio:.3f}",
            f"{row.low:.3f} {row.high:.3f}",
            "-" if row.peak is None else f"{row.peak / 2**20:.0f}",
            str(row.rounds),
        )
        if row.error is None
        else (row.name, row.error, "", "", "", "")
        for row in rows
    ]
    print_table(title, ("contestant", "ms", "ratio", "quartiles", "peak MiB", "rounds"), cells)


def plot(results: dict[str, Any], folder: Path) -> None:
    """Draw time and peak memory of each table as bars, if matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there are no plots.")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for section in ("windows", "whole", "launch"):
        tables = results.get(section)
        if not tables:
            continue
        figure, axes = plt.subplots(len(tables), 2, figsize=(9, 1 + 1.4 * len(tables)), squeeze=False)
        for (title, rows), (left, right) in zip(tables.items(), axes, strict=True):
            names = [row["name"] for row in rows][::-1]
            left.barh(names, [row["seconds"] * 1e3 for row in rows][::-1], color="tab:blue")
            right.barh(names, [(row["peak"] or 0) / 2**20 for row in rows][::-1], color="tab:orange")
            left.set_title(title, fontsize=8, loc="left")
            left.set_xlabel("ms", fontsize=7)
            right.set_xlabel("peak MiB", fontsize=7)
            right.set_yticks([])
            left.tick_params(labelsize=7)
            right.tick_params(labelsize=7)
        figure.tight_layout()
        figure.savefig(folder / f"gpu-{section}.png", dpi=130)
        plt.close(figure)
