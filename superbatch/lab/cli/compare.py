"""`superbatch compare [RECIPE]`: train with the real batch and with splits of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..report.verdict import failures
from ..studies.options import CompareOptions
from .aliases import recipe_of, translated
from .options import AsJson, option, out_option, recipe_argument
from .publish import run

Check = Annotated[bool, option("exit code 1 unless every exact split agrees with the real batch", "--check")]
AverageGradients = Annotated[
    int | None, option("micro-batches per update; --batch-size is then the micro-batch size")
]
BatchNorm = Annotated[bool, option("add BatchNorm to the recipe digits or digits-conv", "--batchnorm")]


def compare(
    *,
    recipe: Annotated[str | None, recipe_argument(default="digits")] = None,
    options: CompareOptions,
    out: Annotated[Path | None, out_option("superbatch-compare")] = None,
    as_json: AsJson = False,
    check: Check = False,
    average_gradients: AverageGradients = None,
    iterations: Annotated[int | None, option("micro-batches of a run, instead of --updates")] = None,
    recipe_name: Annotated[str | None, option("alias of the argument RECIPE", "--recipe")] = None,
    batchnorm: BatchNorm = False,
) -> int:
    """Train a recipe with the real batch and with each split of it, from the same weights and samples.

    Shows accuracy, time, memory, the difference of the weights and a test of equivalence; writes a JSON
    report, a plot and a page. Exit code: 0 done, 1 --check failed, 2 wrong input, 130 interrupted (a partial
    report is written).
    """
    name = recipe_of(recipe, recipe_name, batchnorm=batchnorm)
    options = translated(options, average_gradients=average_gradients, iterations=iterations)
    from ..studies.backends import check_installed  # it imports numpy: not for --help

    check_installed(options.backend)  # before imports that take seconds
    title = f"compare {Path(name).name}"
    if options.backend != "torch":
        title += f" on {options.backend}"
    criterion = failures if check else None  # without --check a difference is a result, not an error
    return run("compare", name, options, title=title, out=out, as_json=as_json, failures=criterion)
