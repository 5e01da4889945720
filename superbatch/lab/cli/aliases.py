"""The flags of the sources, in our words: ``--average-gradients 20 --batch-size 5 --iterations 20000``.

There, an iteration is a micro-batch, and the batch size is the micro-batch's: 20 x 5 samples make one update,
and 20000 iterations make 1000 of them.
"""

from __future__ import annotations

from dataclasses import replace

from superbatch.errors import InputError

from ..studies.options import CompareOptions


def in_our_words(
    options: CompareOptions, *, average_gradients: int | None, iterations: int | None
) -> CompareOptions:
    """Translate the sources' flags; beside `average_gradients`, `batch_size` counts a micro-batch.

    Examples:
        >>> options = in_our_words(CompareOptions(batch_size=5), average_gradients=20, iterations=20000)
        >>> options.splits, options.updates, options.batch_size
        ('20x5', 1000, None)
    """
    splits, updates, batch_size = options.splits, options.updates, options.batch_size
    for name, value in (("average-gradients", average_gradients), ("iterations", iterations)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: it counts micro-batches. Give a number of at least 1.")
    if iterations is not None and updates is not None:
        raise InputError(
            f"--iterations {iterations} and --updates {updates}: both say how long a run is: iterations "
            "count micro-batches, updates count updates. Leave one of the two out."
        )
    if average_gradients is None:
        # Without accumulation an iteration is an update.
        return replace(options, updates=iterations if updates is None else updates)
    if splits is not None:
        raise InputError(
            f"--average-gradients {average_gradients} and --splits {splits}: both say how a batch is split. "
            "Leave one of the two out."
        )
    if batch_size is None:
        raise InputError(
            f"--average-gradients {average_gradients}: the size of its micro-batches is missing. "
            "Add --batch-size M, or use --splits KxM."
        )
    if iterations is not None and iterations % average_gradients:
        raise InputError(
            f"--iterations {iterations} with --average-gradients {average_gradients}: "
            f"{iterations % average_gradients} micro-batches are left over, which make no whole update. "
            f"Give a multiple of {average_gradients}."
        )
    updates = updates if iterations is None else iterations // average_gradients
    return replace(options, splits=f"{average_gradients}x{batch_size}", updates=updates, batch_size=None)


WITH_BATCHNORM = {"digits": "digits-bn", "digits-conv": "digits-conv-bn"}


def recipe_of(named: str | None, option: str | None, *, batchnorm: bool) -> str:
    """The recipe that was asked for.

    Examples:
        >>> recipe_of(None, None, batchnorm=False), recipe_of("digits-conv", None, batchnorm=True)
        ('digits', 'digits-conv-bn')
    """
    if named is not None and option is not None and named != option:
        raise InputError(
            f"The recipe {named} and --recipe {option}: both say what is trained. Leave one out."
        )
    name = named or option or "digits"
    if not batchnorm or name in WITH_BATCHNORM.values():
        return name
    if name not in WITH_BATCHNORM:
        raise InputError(
            f"--batchnorm with the recipe {name}: there is no variant of it with BatchNorm. "
            f"Use it with {' or '.join(WITH_BATCHNORM)}, or leave it out."
        )
    return WITH_BATCHNORM[name]
