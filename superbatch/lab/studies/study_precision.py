"""Study of sums of K gradients in bfloat16: the precision that they lose, and methods that keep it.

The arms sum random gradients of 20,000 coordinates, whose signal equals the noise or whose signs are all
equal, and the gradients of the recipe's model in bfloat16, in windows of K micro-batches. Errors are
relative, ``|sum - exact| / |exact|``, where `exact` is the float64 sum of the same low-precision gradients.

u = 2^-p is the unit roundoff: p = 8 for bfloat16, 11 for float16, 24 for float32. A sum of equal signs stops
growing when a gradient is less than half a unit in the last place of the sum: after 2^p to 2^(p+1) gradients.
Reference: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapter 4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.window import Window

from ..recipes import Recipe
from ..report.study import Quantity, StudyArm, StudyRun
from .arms import accumulator, cut, mean_and_weight, without_coupling
from .on_torch import cast_batch
from .setting import Tick
from .study import Design, Options, StudyConclusions
from .study_common import Runs, stream

COUNTS, QUICK_COUNTS = (16, 64, 256, 1024), (16, 64, 256)  # gradients in a sum: K
COORDINATES = 20_000
MICROBATCH = 2  # samples: BatchNorm cannot train on fewer
LIMIT = (
    "It does not show the effect of such an error on a training: a noisy gradient tolerates much, a sum that "
    "stops growing does not."
)


def naive(gradients: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum in the gradients' own dtype, as ``.grad`` does, or in `dtype`, as `Accumulator` does in float32."""
    total = torch.zeros_like(gradients[0], dtype=dtype)
    for gradient in gradients:
        total += gradient
    return total


def kahan(gradients: Tensor) -> Tensor:
    """Sum with compensation: a second buffer of the same dtype keeps the rounding error. Error 2u."""
    total, lost = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for gradient in gradients:
        corrected = gradient - lost
        grown = total + corrected
        lost = (grown - total) - corrected
        total = grown
    return total


def pairwise(gradients: Tensor) -> Tensor:
    """Add sums of equal numbers of gradients, as a binary counter carries: log2 K buffers, error u log2 K."""
    carried: list[tuple[int, Tensor]] = []
    for gradient in gradients:
        level, total = 0, gradient
        while carried and carried[-1][0] == level:
            total = carried.pop()[1] + total
            level += 1
        carried.append((level, total))
    total = carried.pop()[1]
    while carried:
        total = carried.pop()[1] + total
    return total


def stochastic(gradients: Tensor) -> Tensor:
    """Sum bfloat16 gradients with stochastic rounding, which has no bias.

    A value between two bfloat16 numbers is rounded up with a probability proportional to its distance from
    the lower one. Random numbers are from torch's generator.
    """
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        bits = (total.float() + gradient.float()).view(torch.int32)
        # bfloat16 is the upper half of float32: a random lower half carries with the right probability.
        bits = (bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)
        total = bits.view(torch.float32).bfloat16()
    return total


@dataclass(frozen=True)
class Summation:
    """A method of summing gradients."""

    name: str
    how: str
    add: Callable[[Tensor], Tensor] | None = None  # sums gradients (K, coordinates); None: the model's
    dtype: torch.dtype = torch.bfloat16  # of the random gradients
    same_sign: bool = False  # random gradients of one sign; False: signal equals noise


NAIVE, SAME_SIGN, FLOAT32 = "naive sum, bfloat16", "naive sum, bfloat16, one sign", "float32 sum of bfloat16"
OWN_NATIVE, OWN_FLOAT32 = "model: sum in .grad, bfloat16", "model: sum in float32"
INHERENT = "model: the gradients themselves"
DRAWN = (
    Summation(NAIVE, "random, signal = noise; 2 bytes per parameter", naive),
    Summation(SAME_SIGN, "random, all of one sign; 2 bytes", naive, same_sign=True),
    Summation("stochastic rounding, bfloat16", "random; 2 bytes", stochastic),
    Summation("pairwise, bfloat16", "random; 2 log2 K bytes", pairwise),
    Summation("Kahan, bfloat16", "random; 4 bytes", kahan),
    Summation(FLOAT32, "random; 4 bytes", partial(naive, dtype=torch.float32)),
    Summation("naive sum, float16", "random; 2 bytes", naive, torch.float16),
    Summation("naive sum, float32", "random; 4 bytes", naive, torch.float32),
)
OWN = (
    Summation(OWN_NATIVE, "the recipe's model in bfloat16, Accumulator(gradient_sum=None)"),
    Summation(OWN_FLOAT32, 'the same, torch.float32: the choice of "auto" for windows of more than 16'),
    Summation(INHERENT, "exact sum of the bfloat16 gradients, against float64 gradients at the same weights"),
)


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan one arm for each method of summation."""
    counts = QUICK_COUNTS if options.quick else COUNTS
    summations = (*DRAWN, *OWN)
    return Design(
        arms=tuple(StudyArm(name=each.name, how=each.how, facts={}, runs=()) for each in summations),
        train=partial(train, counts=counts),
        ticks=len(summations),
        quantities=tuple(
            Quantity(name=_column(count), meaning=f"relative error of a sum of {count} gradients", form=".1e")
            for count in counts
        ),
        progress_quantity=_column(counts[-1]),
        fixed={"dtype": "bfloat16"},
        notes=(LIMIT,),
        conclude=partial(conclude, count=counts[-1]),
        curve_at=tuple(map(float, counts)),
    )


def train(recipe: Recipe, seed: int, *, counts: tuple[int, ...], tick: Tick) -> Runs:
    """Sum by every method, with random gradients and initial weights from one seed."""

    def run(errors: list[float]) -> StudyRun:
        tick(1)
        values = {_column(count): error for count, error in zip(counts, errors, strict=True)}
        return StudyRun(seed=seed, values=values, curve=tuple(errors))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = {same: _draw(max(counts), same_sign=same) for same in (False, True)}
        for index, summation in enumerate(DRAWN):
            gradients, add = drawn[summation.same_sign].to(summation.dtype), summation.add
            assert add is not None
            yield index, run([_error(add(gradients[:k]), gradients[:k].double().sum(0)) for k in counts])
    windows = [errors_of_model(recipe, count, seed) for count in counts]
    for index, summation in enumerate(OWN, start=len(DRAWN)):
        yield index, run([errors[summation.name] for errors in windows])


def errors_of_model(recipe: Recipe, count: int, seed: int) -> dict[str, float]:
    """Return the errors of one window of the recipe's model in bfloat16, by name of the summation."""
    recipe = without_coupling(recipe) if recipe.coupled == "exact" else recipe
    model = recipe.model(seed).bfloat16()
    batch = recipe.batch(stream(recipe.samples, count * MICROBATCH, seed))
    parts = cut(batch, (MICROBATCH,) * count)
    exact = _exact(recipe, copy.deepcopy(model), parts, "bfloat16")
    fine = _exact(recipe, copy.deepcopy(model).double(), parts, "float64")
    window = [cast_batch(part, "bfloat16") for part in parts]
    return {
        OWN_NATIVE: _error(_accumulated(recipe, copy.deepcopy(model), window, None), exact),
        OWN_FLOAT32: _error(_accumulated(recipe, copy.deepcopy(model), window, torch.float32), exact),
        INHERENT: _error(exact, fine),
    }


def _accumulated(recipe: Recipe, model: nn.Module, window: list[object], dtype: torch.dtype | None) -> Tensor:
    """Return the gradient that the accumulator gives to an optimizer of float32 master weights, flattened."""
    masters = fp32_masters(model)
    optimizer = torch.optim.SGD(masters.values(), lr=0.0)
    gradients: list[Tensor] = []
    # The accumulator clears gradients after the step, so a hook copies them before it.
    optimizer.register_step_pre_hook(lambda *_: gradients.append(_gradient(masters.values())))
    wrapped = MasterWeights(optimizer, masters)
    accumulator(recipe, model, wrapped, gradient_sum=dtype, check=False)(Window(window))
    return gradients[0]


def _exact(recipe: Recipe, model: nn.Module, parts: list[object], dtype: str) -> Tensor:
    """Return the weighted mean of the micro-batches' gradients, computed in `dtype` and summed in float64."""
    loss_fn = recipe.loss_fn(model)
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for part in parts:
        loss, weight = mean_and_weight(recipe, loss_fn, cast_batch(part, dtype))
        model.zero_grad()
        loss.backward()
        total, weights = total + weight * _gradient(model.parameters()).double(), weights + weight
    return total / weights


def _gradient(parameters: Iterable[Tensor]) -> Tensor:
    """Return a copy of all gradients in one vector."""
    return torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])


def _draw(count: int, *, same_sign: bool) -> Tensor:
    """Draw gradients: all positive, or a signal and noise of the same variance."""
    noise = torch.randn(count, COORDINATES)
    if same_sign:
        return noise.mul_(0.25).add_(1).clamp_(min=0.05)
    return noise.add_(torch.randn(COORDINATES))


def _error(found: Tensor, exact: Tensor) -> float:
    """Return the relative error of a sum in the 2-norm."""
    return float((found.double() - exact).norm() / exact.norm())


def _column(count: int) -> str:
    return f"K = {count}"


def conclude(arms: tuple[StudyArm, ...], *, count: int) -> StudyConclusions:
    """Conclude from the errors at the largest K: whether float32 is at least 100 times more precise."""
    column, of = _column(count), {arm.name: arm for arm in arms}
    same, naive, native = (of[name].mean(column) for name in (SAME_SIGN, NAIVE, OWN_NATIVE))
    wide = [error for name in (FLOAT32, OWN_FLOAT32) if (error := of[name].mean(column)) is not None]
    if same is None or naive is None or native is None or len(wide) < 2:
        return StudyConclusions(tests=())
    gains = max(wide) < 0.01 * min(same, naive, native)
    verdict = "Sum in float32" if gains else "A float32 sum gains little here"
    conclusion = (
        f"{verdict}: the relative error of a bfloat16 sum of {count} gradients is {same:.2g} if their signs "
        f"agree, {naive:.2g} if signal equals noise and {native:.2g} in this model; that of a float32 sum of "
        f"the same gradients is {max(wide):.1g}."
    )
    return StudyConclusions(tests=(), conclusion=conclusion)
