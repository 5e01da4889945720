"""Flags of the TensorFlow 1 example: ``--average-gradients 20 --batch-size 5 --iterations 20000``.

Its iteration is a micro-batch, and its batch size is that of a micro-batch: 20 x 5 samples make one update,
and 20000 iterations make 1000 updates.
"""

from __future__ import annotations

from dataclasses import replace

from superbatch.errors import InputError

from ..studies.options import CompareOptions

WITH_BATCHNORM = {"digits": "digits-bn", "digits-conv": "digits-conv-bn"}


def translated(
    options: CompareOptions, *, average_gradients: int | None, iterations: int | None
) -> CompareOptions:
    """Return the options of the comparison that these flags ask for.

    With `average_gradients`, the `batch_size` of the options is that of a micro-batch. Raises InputError for
    flags that contradict each other.

    Examples:
        >>> options = translated(CompareOptions(batch_size=5), average_gradients=20, iterations=20000)
        >>> options.splits, options.updates, options.batch_size
        ('20x5', 1000, None)
    """
    splits, updates, batch_size = options.splits, options.updates, options.batch_size
    for name, value in (("average-gradients", average_gradients), ("iterations", iterations)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} is not a number of micro-batches. Give 1 or more.")
    if iterations is not None and updates is not None:
        raise _both(f"--iterations {iterations}", f"--updates {updates}", "the length of a run")
    if average_gradients is None:
        # Without accumulation each iteration is one update.
        return replace(options, updates=iterations if updates is None else updates)
    if splits is not None:
        raise _both(
            f"--average-gradients {average_gradients}", f"--splits {splits}", "the split of the batch"
        )
    if batch_size is None:
        raise InputError(
            f"--average-gradients {average_gradients}: the size of its micro-batches is missing. "
            "Add --batch-size M, or use --splits KxM."
        )
    if iterations is not None:
        updates, rest = divmod(iterations, average_gradients)
        if rest:
            raise InputError(
                f"--iterations {iterations} is not a multiple of --average-gradients {average_gradients}: "
                f"the last update would be incomplete. Give a multiple of {average_gradients}."
            )
    return replace(options, splits=f"{average_gradients}x{batch_size}", updates=updates, batch_size=None)


def recipe_of(argument: str | None, option: str | None, *, batchnorm: bool) -> str:
    """Return the name of the recipe that the argument RECIPE, --recipe and --batchnorm ask for.

    Raises InputError if the argument and the option differ, or if the recipe has no variant with BatchNorm.

    Examples:
        >>> recipe_of(None, None, batchnorm=False), recipe_of("digits-conv", None, batchnorm=True)
        ('digits', 'digits-conv-bn')
    """
    if argument is not None and option is not None and argument != option:
        raise _both(f"The argument {argument}", f"--recipe {option}", "the recipe")
    name = argument or option or "digits"
    if not batchnorm or name in WITH_BATCHNORM.values():
        return name
    if name not in WITH_BATCHNORM:
        raise InputError(
            f"--batchnorm: the recipe {name} has no variant with BatchNorm. "
            f"Use it with {' or '.join(WITH_BATCHNORM)}, or leave it out."
        )
    return WITH_BATCHNORM[name]


def _both(first: str, second: str, subject: str) -> InputError:
    return InputError(f"{first} and {second} both set {subject}. Leave one out.")
