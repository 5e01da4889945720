"""Every rule of virtual tensors is used by an operator case, or listed here with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from superbatch.torch.virtual.ir.calls import Call, OpStrategy
from superbatch.torch.virtual.rules import lookup
from superbatch.torch.virtual.run import memo
from superbatch.torch.virtual.trace import composites, dispatch, recording
from tests.torch.coupled.operators import ALL_OPERATORS
from tests.torch.test_virtual_operators import SAMPLES, on_virtual_tensors

Rule = tuple[str, ...]  # table, operator and, for a row, its codes

_CUDA = "CUDA: see tests/torch/test_virtual_cuda_rules.py"
_BELOW = "CUDA only, and reached only by a direct call: aten.convolution has its own rule"
# Operators that no case reaches on a CPU, with the reason.
ELSEWHERE = {
    "_fused_rms_norm": "decomposed on a CPU, and where this torch defines it by other operators",
    "_fused_rms_norm_backward": _CUDA,
    "_thnn_fused_gru_cell": _CUDA,
    "_thnn_fused_gru_cell_backward": _CUDA,
    "_thnn_fused_lstm_cell": _CUDA,
    "_thnn_fused_lstm_cell_backward_impl": _CUDA,
    "cudnn_batch_norm": _CUDA,
    "cudnn_batch_norm_backward": _CUDA,
    "cudnn_convolution": _BELOW,
    "cudnn_convolution_transpose": _BELOW,
    "linear_backward": "Apple GPUs; a linear layer is decomposed elsewhere",
}
# Families of rules with one reason, by prefix.
_PREFIXES = {"_scaled_dot_product_": _CUDA, "_cudnn_rnn": _CUDA, "miopen_": "GPUs of AMD"}


def name_of(func: Any) -> str:
    """Return ``softmax`` or ``max.dim``, without the namespace; operators that torch lacks are names."""
    return str(func).removeprefix("aten.")


def all_rules() -> set[Rule]:
    """Return every rule that this release of torch can ask for."""
    own = {("own", name_of(func)) for func in lookup.OWN}
    rows = {("row", name_of(func), *row) for func, codes in lookup.ROWS.items() for row in codes}
    elementwise = {("elementwise", name_of(func)) for func in lookup._ELEMENTWISE}
    several = {("composite", name_of(func)) for func in composites.COMPOSITES}
    lists = {("list", name_of(func)) for func in composites.LISTS}
    return own | rows | elementwise | several | lists


def operator_of(rule: Rule) -> str:
    return rule[1]


def reason_for(rule: Rule) -> str | None:
    """Return the listed reason why no operator case uses a rule, or None."""
    name = operator_of(rule)
    if name.removesuffix("_backward").endswith("_for_cpu"):
        return None
    family = next((reason for prefix, reason in _PREFIXES.items() if name.startswith(prefix)), None)
    return ELSEWHERE.get(name, family)


class Recorder:
    """Patch of the rule tables that records which rules gave a result.

    Attributes:
        used: rules that gave a result.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used: set[Rule] = set()
        self._row_of: dict[int, tuple[Rule, OpStrategy]] = {}
        self._by_row, self._fit, self._elementwise = lookup._by_row, lookup._fit, lookup.elementwise
        for kind, table, refusal in (
            ("own", lookup.OWN, None),
            ("composite", composites.COMPOSITES, NotImplemented),
            ("list", composites.LISTS, NotImplemented),
        ):
            for func, rule in list(table.items()):
                patch.setitem(table, func, self._recording((kind, name_of(func)), rule, refusal))
        patch.setattr(lookup, "_by_row", self.by_row)
        patch.setattr(lookup, "_fit", self.fit)
        patch.setattr(lookup, "elementwise", self.elementwise)
        # Splitting full tensors into rows would use further rules.
        patch.setattr(recording, "by_rows", lambda form: None)

    def _recording(self, rule: Rule, function: Callable[..., Any], refusal: Any) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            if found is not refusal:
                self.used.add(rule)
            return found

        return recorded

    def fit(self, call: Call, inputs: str, outputs: str) -> Any:
        found = self._fit(call, inputs, outputs)
        if found is not None:
            rule = ("row", name_of(call.func.overloadpacket), inputs, outputs)
            self._row_of[id(found[1])] = (rule, found[1])
        return found

    def by_row(self, call: Call, rows: list[tuple[str, str]]) -> OpStrategy | None:
        self._row_of.clear()
        chosen = self._by_row(call, rows)
        if chosen is not None:
            self.used.add(self._row_of[id(chosen)][0])
        return chosen

    def elementwise(self, call: Call) -> OpStrategy | None:
        found = self._elementwise(call)
        if found is not None:
            self.used.add(("elementwise", name_of(call.func.overloadpacket)))
        return found


def clear_caches() -> None:
    """Clear the caches of rules."""
    for cached in (memo._cached, dispatch._kind_of, composites.composite_of):
        cached.cache_clear()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    clear_caches()
    yield Recorder(monkeypatch)
    clear_caches()


def test_every_rule_is_used_by_an_operator_case_or_listed(recorder: Recorder) -> None:
    for case in ALL_OPERATORS:
        on_virtual_tensors(case, max(SAMPLES, case.min_n), 3)
    known, listed = all_rules(), {rule for rule in all_rules() if reason_for(rule) is not None}
    assert not (unused := known - recorder.used - listed), f"no operator case uses {sorted(unused)}"
    assert not (stale := listed & recorder.used), f"listed, but used: {sorted(stale)}"
    gone = ELSEWHERE.keys() - {operator_of(rule) for rule in known}
    assert not gone, f"listed, but without a rule: {sorted(gone)}"
