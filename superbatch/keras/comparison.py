# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Comparison of a few rows evaluated at once with the same rows evaluated in parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from keras import ops
from keras.src import backend

from . import arithmetic, findings, forward, probe, survey, window
from .options import Options
from .probe import Mapping

# Largest relative difference between two orders of summation that is still rounding.
BOUNDS = {"float64": 1e-5, "float16": 0.01, "bfloat16": 0.06}
USUAL = 1e-3  # float32, also where a GPU multiplies in TF32


class Measured(NamedTuple):
    """Evaluation of a few rows.

    Attributes:
        outputs: each prediction for all rows as one tensor; None for a prediction without one row per sample.
        losses: the loss of all rows for each term, without its factor.
        total: the total loss of all rows: computed by Keras if evaluated at once, else by `window`.
        terms: the terms of each part.
        state: the values that the forwards gave to variables without a gradient, by path.
    """

    outputs: list[Any]
    losses: list[Any]
    total: Any
    terms: list[list[Any]]
    state: dict[str, Any]


class Comparison:
    """Comparison of rows of a batch evaluated at once with the same rows evaluated in parts.

    Args:
        model: the accumulating model.
        options: the arguments of `accumulate`.
        mapping: the model's variables with the values to evaluate at.
        some: ``(x, y, sample_weight)`` of the rows.
        parts: for each part, the positions of its rows in `some`.
    """

    def __init__(
        self, model: Any, options: Options, mapping: Mapping, some: Any, parts: list[list[int]]
    ) -> None:
        self.model, self.options, self.mapping = model, options, mapping
        self.some, self.parts = some, parts
        self.bound = _bound(model)

    def measure(self) -> None:
        """Evaluate the rows at once (`whole`) and in parts (`apart`).

        Raises:
            SuperbatchError: the divisor of a loss is not known.
        """
        self.whole = self._measured(self._at_once(), self.mapping)
        self.apart = self._measured(self.parts, self.mapping)

    def is_finite(self) -> bool:
        """Return True if the losses of the rows at once are finite."""
        return bool(ops.all(ops.isfinite(ops.stack([*self.whole.losses, self.whole.total]))))

    def predicts_nan(self) -> bool:
        """Return True if a prediction for the rows at once is NaN though no input is."""

        def has_nan(leaves: list[Any]) -> bool:
            floats = [leaf for leaf in leaves if leaf is not None and backend.is_float_dtype(_dtype(leaf))]
            return any(bool(ops.any(ops.isnan(leaf))) for leaf in floats)

        return has_nan(self.whole.outputs) and not has_nan(keras.tree.flatten(self.some[0]))

    def agrees(self) -> bool:
        """Return True if the rows have the same predictions and losses at once and in parts."""
        same = _same(self.whole.total, self.apart.total, self.bound)
        # Compare a single output, too: coupling may hardly change the loss. One of several may have no loss.
        alone = len(self.whole.outputs) == 1
        coupled = alone and self._coupled(self.whole.outputs, self.apart.outputs)
        return same and not coupled and not self._differing() and not self._moved()

    def differs_in_declared(self) -> bool:
        """Return True if the predictions agree, but a loss with a weight from `loss_weight=` differs."""
        coupled = self._coupled(self.whole.outputs, self.apart.outputs)
        return not coupled and any(self.whole.terms[0][number].stated for number in self._differing())

    def repeats(self) -> bool:
        """Return True if the losses are the same with other states of the random generators."""
        again = self._measured(self._at_once(), probe.reseeded(self.model, self.mapping))
        pairs = zip([*self.whole.losses, self.whole.total], [*again.losses, again.total], strict=True)
        return all(_same(*pair, self.bound / 10) for pair in pairs)

    def refuse(self) -> None:
        """Raise the error for the first difference: of a layer, a loss, a variable or the total.

        Raises:
            CoupledSamplesError: a layer or a loss couples the rows.
            InputError: each forward changes a variable of a layer.
            LossSpecError: a loss has another divisor than the declared one.
        """
        rows = [len(part) for part in self.parts]
        if self._coupled(self.whole.outputs, self.apart.outputs):
            raise findings.coupled_layer(self.model, self._first_coupled_layer(), rows)
        for number in self._differing():
            values = [float(terms[number].value) for terms in self.apart.terms]
            term = self.whole.terms[0][number]
            raise findings.wrong_term(term, float(self.whole.losses[number]), values, rows)
        if self._moved():
            raise findings.moved_state(self._moved(), rows)
        raise findings.wrong_total(float(self.whole.total), float(self.apart.total), rows)

    def _differing(self) -> list[int]:
        """Return the indices of the terms whose losses differ."""
        pairs = zip(self.whole.losses, self.apart.losses, strict=True)
        return [number for number, pair in enumerate(pairs) if not _same(*pair, self.bound)]

    def _moved(self) -> list[str]:
        """Return the paths of variables whose values differ between one forward and forwards of the parts."""
        whole, apart = self.whole.state, self.apart.state
        return sorted(
            path
            for path in {*whole, *apart}
            if path not in whole or path not in apart or not _same(whole[path], apart[path], self.bound)
        )

    def _coupled(self, whole: list[Any], apart: list[Any]) -> bool:
        """Return True if rows of an array differ between evaluation at once and in parts."""
        # Arrays of other shapes are not compared: text trimmed to its longest row is shorter in a part.
        return any(
            a is not None and b is not None and a.shape == b.shape and not _same(a, b, self.bound)
            for a, b in zip(whole, apart, strict=False)
        )

    def _at_once(self) -> list[list[int]]:
        return [[*range(sum(len(part) for part in self.parts))]]

    def _first_coupled_layer(self) -> Any | None:
        """Return the first layer, in order of execution, whose rows differ; None if there is none."""
        calls = []
        for part in [*self._at_once(), *self.parts]:
            with probe.recorded(self.model) as outputs, _scope(self.mapping):
                forward.predictions(self.model, rows_of(self.some, part)[0])
            calls.append(outputs)
        whole, parts = calls[0], calls[1:]
        if any(len(part) != len(whole) for part in parts):
            return None  # the calls depend on the rows, so they cannot be paired
        for number, (layer, outputs) in enumerate(whole):
            of_parts = [part[number][1] for part in parts]
            # A matrix of all pairs of rows has as many columns as there are rows.
            if any(_shapes(outputs) != _shapes(each) for each in of_parts):
                return layer
            if self._coupled(_joined([outputs], self._at_once()), _joined(of_parts, self.parts)):
                return layer
        return None

    def _measured(self, parts: list[list[int]], mapping: Mapping) -> Measured:
        """Evaluate the rows of each part, and combine the losses as the train step does."""
        model, outputs, terms_of_parts = self.model, [], []
        sums = plan = total = None
        state: dict[int, Any] = {}
        for part in parts:
            batch = self.some if len(parts) == 1 else rows_of(self.some, part)
            with _scope(_with(mapping, model, state)) as scope:
                y_pred = forward.predictions(model, batch[0])
                terms = forward.terms_of(model, batch, y_pred, self.options, None)
                plan = survey.plan_of(model, terms, self.options) if plan is None else plan
                if len(parts) == 1:  # the reference is Keras' own loss of the whole batch
                    total = model._compute_loss(batch[0], batch[1], y_pred, batch[2], training=True)
                elif total is None:
                    total = forward.weight_regularization(model)
            state |= _changed(model, scope, mapping)
            counted = window.contribution(terms, len(part), plan)
            sums = counted if sums is None else sums + counted
            outputs.append(keras.tree.flatten(y_pred))
            terms_of_parts.append(terms)
        losses = window.losses_of(sums, plan)
        if len(parts) > 1:
            total = window.total_loss(losses, plan, total)
        return Measured(
            _joined(outputs, parts),
            losses,
            ops.cast(total, plan.dtype),
            terms_of_parts,
            _by_path(model, state),
        )


def rows_of(batch: Any, numbers: Any) -> Any:
    """Return the rows with these numbers of every array of a batch, as tensors."""
    chosen = list(numbers)

    def take(leaf: Any) -> Any:
        return None if leaf is None else ops.take(ops.convert_to_tensor(leaf), chosen, axis=0)

    return keras.tree.map_structure(take, batch)


def _dtype(leaf: Any) -> str:
    return backend.standardize_dtype(leaf.dtype)


def _scope(mapping: Mapping) -> Any:
    return keras.StatelessScope(state_mapping=mapping, collect_losses=True)


def _changed(model: Any, scope: Any, mapping: Mapping) -> dict[int, Any]:
    """Return the values that a forward assigned to variables without a gradient, by `id` of the variable."""
    given = {id(variable): value for variable, value in mapping}
    assigned = {}
    for variable in model.non_trainable_variables:
        value = scope.get_current_value(variable)
        if value is not None and value is not given.get(id(variable)):
            assigned[id(variable)] = value
    return assigned


def _with(mapping: Mapping, model: Any, state: dict[int, Any]) -> Mapping:
    """Return the mapping, with the values in `state` (by `id` of the variable) in place of its own."""
    unchanged = [(variable, value) for variable, value in mapping if id(variable) not in state]
    changed = [
        (variable, state[id(variable)]) for variable in model.non_trainable_variables if id(variable) in state
    ]
    return [*unchanged, *changed]


def _by_path(model: Any, state: dict[int, Any]) -> dict[str, Any]:
    """Return the states of layers by path, without those of random generators, which every forward moves."""
    return {
        variable.path: state[id(variable)]
        for variable in model.non_trainable_variables
        if id(variable) in state and "seed" not in variable.path
    }


def _joined(outputs: list[list[Any]], parts: list[list[int]]) -> list[Any]:
    """Return each output of the parts as one array, with the rows in the order of the batch.

    Args:
        outputs: for each part, its arrays.
        parts: for each part, the positions of its rows in the batch.

    Returns:
        One entry for each output; None if it is no array of floats with one row per sample.
    """
    order = [0] * sum(len(part) for part in parts)
    for position, row in enumerate(row for part in parts for row in part):
        order[row] = position
    joined = []
    for leaves in zip(*outputs, strict=True):
        by_rows = all(
            hasattr(leaf, "shape")
            and len(leaf.shape)
            and leaf.shape[0] == len(part)
            and leaf.shape[1:] == leaves[0].shape[1:]
            for leaf, part in zip(leaves, parts, strict=True)
        )
        if not by_rows or not backend.is_float_dtype(backend.standardize_dtype(leaves[0].dtype)):
            joined.append(None)
        else:
            joined.append(leaves[0] if len(leaves) == 1 else ops.take(ops.concatenate(leaves), order, axis=0))
    return joined


def _shapes(outputs: list[Any]) -> list[tuple[int, ...]]:
    """Return the shapes of arrays without their first axis; ``()`` for a scalar."""
    return [tuple(leaf.shape[1:]) for leaf in outputs if hasattr(leaf, "shape")]


def _bound(model: Any) -> float:
    """Return the bound for rounding, by the shortest dtype that a layer computes in."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    bounds = [BOUNDS.get(str(dtype), USUAL) for dtype in dtypes]
    # Keras' torch backend computes in float32 whatever the dtype is.
    return max(bounds) if backend.backend() != "torch" else max(USUAL, *bounds)


def _same(a: Any, b: Any, bound: float) -> bool:
    """Return True if two arrays differ by rounding only, relative to their largest element."""
    a, b = (ops.cast(each, arithmetic.wide(each.dtype)) for each in (a, b))
    size = ops.maximum(ops.max(ops.abs(a)), ops.max(ops.abs(b)))
    return bool(ops.max(ops.abs(a - b)) <= bound * size + 1e-12)
