# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Plans for the batches of a model, each made from one forward that changes no state."""

from __future__ import annotations

from typing import Any

import keras
from keras.src import backend

from . import forward, window
from .options import Options
from .terms import Term
from .window import Plan

PLANS = "_superbatch_plans"


def plan(model: Any, batch: Any, options: Options, *, symbolic: bool) -> Plan:
    """Return the plan for batches with these shapes and dtypes; made by one forward, then cached.

    Args:
        model: the model.
        batch: ``(x, y, sample_weight)``.
        options: the arguments of `accumulate`.
        symbolic: whether to trace the forward with shapes alone, instead of computing it.
    """
    cache = vars(model).setdefault(PLANS, {})
    key = str(keras.tree.map_structure(_form, batch))
    compiled = (model._compile_loss, model.optimizer)  # a new compile() makes the plan invalid
    if key not in cache or cache[key][0] != compiled:
        cache[key] = compiled, (_symbolically if symbolic else _really)(model, batch, options)
    return cache[key][1]


def _form(leaf: Any) -> Any:
    return None if leaf is None else (tuple(leaf.shape[1:]), str(leaf.dtype))


def _symbolically(model: Any, batch: Any, options: Options) -> Plan:
    plans: list[Plan] = []

    def symbolic(*batch: Any) -> Any:
        with scope(model):
            plans.append(inspect(model, batch, options))
        return batch[0]  # compute_output_spec needs tensors; the plan is in the list

    specs = keras.tree.map_structure(
        lambda leaf: (
            None if leaf is None else keras.KerasTensor(leaf.shape, backend.standardize_dtype(leaf.dtype))
        ),
        batch,
    )
    backend.compute_output_spec(symbolic, *specs)
    return plans[0]


def _really(model: Any, batch: Any, options: Options) -> Plan:
    with scope(model):
        return inspect(model, batch, options)


def scope(model: Any) -> Any:
    """Return a scope in which a forward changes no variable; trainable weights keep their values."""
    mapping = [(weight, weight.value) for weight in model.trainable_variables]
    return keras.StatelessScope(state_mapping=mapping, collect_losses=True)


def inspect(model: Any, batch: Any, options: Options) -> Plan:
    """Return the plan from a forward of a batch; to be called inside a StatelessScope."""
    terms = forward.terms_of(model, batch, forward.predictions(model, batch[0]), options, None)
    return plan_of(model, terms, options)


def plan_of(model: Any, terms: list[Term], options: Options) -> Plan:
    """Return the plan for the terms of a model's loss."""
    # Both scale the loss against underflow: a LossScaleOptimizer, and the option of any optimizer.
    scaled = hasattr(model.optimizer, "inner_optimizer") or bool(model.optimizer.loss_scale_factor)
    return window.plan_of(terms, options, scaled=scaled)
