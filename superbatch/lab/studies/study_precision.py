"""Study of sums of K gradients in bfloat16: the precision they lose, and what keeps it.

Drawn: 20 000 coordinates, a signal as large as the noise, or all of one sign, summed in several ways.
Trained: the recipe's model in bfloat16 with real windows of K micro-batches. Errors are relative,
``|sum - exact| / |exact|``, against the float64 sum of the very same low-precision gradients.
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
from . import sums
from .arms import cut, mean_and_weight, without_coupling
from .on_torch import cast_batch
from .participants import accumulator
from .setting import Tick
from .study import Design, Findings, Options
from .study_common import TOO_FEW, Runs, stream

COUNTS, QUICK_COUNTS = (16, 64, 256, 1024), (16, 64, 256)
COORDINATES = 20_000
MICROBATCH = 2  # samples: the fewest with which BatchNorm can do
LIMIT = (
    "It does not show what such an error does to a training: a noisy gradient forgives much, a sum that "
    "stops growing does not."
)


@dataclass(frozen=True)
class Way:
    """A way to sum; None: real windows of the recipe's model."""

    name: str
    how: str
    add: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype = torch.bfloat16
    same_sign: bool = False


NAIVE, SAME_SIGN, FLOAT32 = "naive sum, bfloat16", "naive sum, bfloat16, one sign", "float32 sum of bfloat16"
OWN_NATIVE, OWN_FLOAT32, INHERENT = (
    "model: sum in .grad, bfloat16",
    "model: sum in float32",
    "model: the gradients themselves",
)
DRAWN = (
    Way(NAIVE, "drawn, signal = noise; 2 bytes per parameter", sums.naive),
    Way(SAME_SIGN, "drawn, all of one sign; 2 bytes", sums.naive, same_sign=True),
    Way("stochastic rounding, bfloat16", "drawn; 2 bytes", sums.stochastic),
    Way("pairwise, bfloat16", "drawn; 2 log2 K bytes", sums.pairwise),
    Way("Kahan, bfloat16", "drawn; 4 bytes", sums.kahan),
    Way(FLOAT32, "drawn; 4 bytes", sums.in_float32),
    Way("naive sum, float16", "drawn; 2 bytes", sums.naive, torch.float16),
    Way("naive sum, float32", "drawn; 4 bytes", sums.naive, torch.float32),
)
OWN = (
    Way(OWN_NATIVE, "the recipe's model in bfloat16, Accumulator(gradient_sum=None)"),
    Way(OWN_FLOAT32, 'the same, torch.float32: what "auto" takes for windows of more than 16'),
    Way(INHERENT, "exact sum of the bfloat16 gradients, against float64 backwards of the same weights"),
)


@dataclass(frozen=True)
class Setting:
    """The ways, and how many gradients are summed; it can be sent to another process."""

    arms: tuple[Way, ...]
    counts: tuple[int, ...]


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the ways to sum."""
    counts = QUICK_COUNTS if options.quick else COUNTS
    ways = (*DRAWN, *OWN)
    return Design(
        arms=tuple(StudyArm(name=way.name, how=way.how, facts={}, runs=()) for way in ways),
        setting=Setting(ways, counts),
        train=train,
        ticks=len(ways),
        quantities=tuple(
            Quantity(name=_column(count), meaning=f"relative error of a sum of {count} gradients", form=".1e")
            for count in counts
        ),
        headline=_column(counts[-1]),
        fixed={"dtype": "bfloat16"},
        find=partial(find, count=counts[-1]),
        curve_at=tuple(map(float, counts)),
    )


def train(recipe: Recipe, setting: Setting, seed: int, *, tick: Tick) -> Runs:
    """Sum in every way, from one seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = {same: _draw(max(setting.counts), same_sign=same) for same in (False, True)}
        for index, way in enumerate(DRAWN):
            gradients, add = drawn[way.same_sign].to(way.dtype), way.add
            assert add is not None
            errors = [_apart(add(gradients[:k]), gradients[:k].double().sum(0)) for k in setting.counts]
            tick(1)
            yield index, _run(seed, setting, errors)
    windows = [errors_of_model(recipe, count, seed) for count in setting.counts]
    for index, way in enumerate(OWN, start=len(DRAWN)):
        tick(1)
        yield index, _run(seed, setting, [errors[way.name] for errors in windows])


def errors_of_model(recipe: Recipe, count: int, seed: int) -> dict[str, float]:
    """Relative errors of real windows of a model in bfloat16."""
    recipe = without_coupling(recipe) if recipe.coupled == "exact" else recipe
    model = recipe.model(seed).bfloat16()
    batch = recipe.batch(stream(recipe.samples, count * MICROBATCH, seed))
    parts = cut(batch, (MICROBATCH,) * count)
    exact = _exact(recipe, copy.deepcopy(model), parts, "bfloat16")
    fine = _exact(recipe, copy.deepcopy(model).double(), parts, "float64")
    window = [cast_batch(part, "bfloat16") for part in parts]
    return {
        OWN_NATIVE: _apart(_accumulated(recipe, copy.deepcopy(model), window, None), exact),
        OWN_FLOAT32: _apart(_accumulated(recipe, copy.deepcopy(model), window, torch.float32), exact),
        INHERENT: _apart(exact, fine),
    }


def _accumulated(recipe: Recipe, model: nn.Module, window: list[object], dtype: torch.dtype | None) -> Tensor:
    """The gradient that an optimizer over float32 masters is handed, in one vector."""
    masters = fp32_masters(model)
    optimizer = torch.optim.SGD(masters.values(), lr=0.0)
    seen: list[Tensor] = []

    def look(*_: object) -> None:
        seen.append(_gradient(masters.values()))

    optimizer.register_step_pre_hook(look)
    accumulate = accumulator(
        recipe, model, MasterWeights(optimizer, masters), gradient_sum=dtype, check=False
    )
    accumulate(Window(window))
    return seen[0]


def _exact(recipe: Recipe, model: nn.Module, parts: list[object], dtype: str) -> Tensor:
    """The weighted mean of the micro-batches' gradients, each of the model's dtype, summed in float64."""
    loss_fn = recipe.loss_fn(model)
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for part in parts:
        loss, weight = mean_and_weight(recipe, loss_fn, cast_batch(part, dtype))
        model.zero_grad()
        loss.backward()
        total, weights = total + weight * _gradient(model.parameters()).double(), weights + weight
    return total / weights


def _gradient(parameters: Iterable[Tensor]) -> Tensor:
    """A copy of all gradients in one vector."""
    return torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])


def _draw(count: int, *, same_sign: bool) -> Tensor:
    noise = torch.randn(count, COORDINATES)
    if same_sign:
        return noise.mul_(0.25).add_(1).clamp_(min=0.05)
    return noise.add_(torch.randn(COORDINATES))


def _apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _run(seed: int, setting: Setting, errors: list[float]) -> StudyRun:
    values = {_column(count): error for count, error in zip(setting.counts, errors, strict=True)}
    return StudyRun(seed=seed, values=values, curve=tuple(errors))


def _column(count: int) -> str:
    return f"K = {count}"


def find(arms: tuple[StudyArm, ...], *, count: int) -> Findings:
    """Conclude from the errors at the largest K: they are many times apart, or they are not."""
    column, of = _column(count), {arm.name: arm for arm in arms}
    same, naive, native = (of[name].mean(column) for name in (SAME_SIGN, NAIVE, OWN_NATIVE))
    wide = [error for name in (FLOAT32, OWN_FLOAT32) if (error := of[name].mean(column)) is not None]
    if same is None or naive is None or native is None or len(wide) < 2:
        return Findings(tests=(), conclusion=TOO_FEW, notes=(LIMIT,))
    said = (
        f"a bfloat16 sum of {count} gradients is off by {same:.2g} where they agree in sign, by {naive:.2g} "
        f"where signal equals noise and by {native:.2g} in this model"
    )
    gains = max(wide) < 0.01 * min(same, naive, native)
    verdict = "Sum in float32" if gains else "A float32 sum gains little here"
    conclusion = f"{verdict}: {said}, the float32 sum of the same gradients by {max(wide):.1g}."
    return Findings(tests=(), conclusion=conclusion, notes=(LIMIT,))
