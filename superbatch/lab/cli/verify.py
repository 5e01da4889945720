"""`superbatch verify RECIPE`: compare the accumulated gradient with that of the whole batch."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text

from superbatch.errors import InputError

from ..report.json import json_value
from ..report.page import render
from ..report.pages import differences_table, verification_page
from ..studies.options import VerifyOptions
from ..studies.shared_options import given_options
from .exits import CHECK_FAILED
from .options import Recipe, option
from .printing import check_folder, print_sentences, print_table, write_file

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from superbatch.results.verification import Verification


def verify(
    *,
    recipe: Recipe,
    options: VerifyOptions,
    out: Annotated[
        Path | None, option("folder for report.json and report.html (default: none are written)")
    ] = None,
    as_json: Annotated[bool, option("print the report as JSON", "--json")] = False,
) -> int:
    """Compare the accumulated gradient with that of the whole batch, and name the causes of a difference.

    Exit code: 0 exact, 1 not exact, 2 wrong input.
    """
    if out is not None:
        check_folder(out)
    report = verify_recipe(recipe, options)
    text = json.dumps(json_value(report.to_dict(), _text_of), indent=2, allow_nan=False)
    if as_json:
        print(text)
    else:
        show(report, Console())
    if out is not None:
        page = verification_page(report, recipe=recipe, command=given_options(options))
        write_file(out / "report.json", text + "\n")
        write_file(out / "report.html", render(page))
        print(f"wrote {out / 'report.html'} and report.json", file=sys.stderr)
    return 0 if report.exact else CHECK_FAILED


def verify_recipe(name: str, options: VerifyOptions) -> Verification:
    """Verify the model, the loss, `reduction` and `weight` of a recipe on one batch of its samples.

    Examples:
        >>> report = verify_recipe("digits", VerifyOptions(batch_size=12))
        >>> report.exact, report.comparisons[0].split
        (True, (4, 4, 4))
    """
    import torch

    from superbatch.torch.options import FrozenBatchNorm, PerSampleRandom
    from superbatch.torch.verify import verify as verify_problem

    from ..recipes import load_recipe

    recipe = load_recipe(name, data=options.data)
    batch_size = recipe.batch_size if options.batch_size is None else options.batch_size
    if not 2 <= batch_size <= recipe.samples:
        raise InputError(
            f"--batch-size {batch_size}: a batch of the recipe {name!r} that can be split has 2 to "
            f"{recipe.samples} samples. Give a number in this range."
        )
    model = recipe.model(options.seed)
    order = torch.randperm(recipe.samples, generator=torch.Generator().manual_seed(options.seed))
    return verify_problem(
        model,
        recipe.loss_fn(model),
        recipe.batch(order[:batch_size]),
        microbatch_size=-(-batch_size // 3) if options.microbatch_size is None else options.microbatch_size,
        reduction=recipe.reduction,
        weight=recipe.weight,
        participants=[
            *([FrozenBatchNorm()] if recipe.batchnorm == "frozen" else []),
            *([PerSampleRandom()] if options.sample_rng else []),
        ],
        against=options.against,  # pyright: ignore[reportArgumentType] - it checks the text itself
        dtype=options.dtype,  # pyright: ignore[reportArgumentType] - it checks the text itself
    )


def show(report: Verification, console: Console) -> None:
    """Print a verification: with colours on a terminal, else as plain text.

    Examples:
        >>> from superbatch.results.verification import Verification
        >>> show(Verification(True, 4, (), (), (), ()), Console(force_terminal=False))
        exact: accumulated gradients equal the batch's (4 samples)
    """
    if not console.is_terminal:
        print(report, file=console.file)
        return
    headline, *explanations = report.lines()
    console.print(Text(headline, style="bold green" if report.exact else "bold red"))
    print_sentences(explanations, console)
    print_table(differences_table(report), console)


def _text_of(value: float) -> str | None:
    return None if math.isnan(value) else str(value)
