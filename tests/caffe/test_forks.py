"""Solver files of Caffe's forks, in another encoding, with very many values, or with very long lines."""

from __future__ import annotations

import dataclasses
import gc
import time
from pathlib import Path

import pytest

from superbatch.caffe import NetState, PrototxtError, explain_solver, parse_solver, read_solver, solver_text
from superbatch.caffe.config import float32

FIXED = 'lr_policy: "fixed" '

SSD = """net: "a.prototxt"
base_lr: 0.01
lr_policy: "fixed"
eval_type: "detection"
ap_version: "11point"
test_state { phase: TEST lovel: 3 }
rampup { lr: 0.1 steps: [1, 2] }
"""


def test_fields_of_forks_are_ignored_on_request(tmp_path: Path) -> None:
    with pytest.raises(PrototxtError, match=r"line 4, column 1: 'eval_type'.*--ignore-unknown"):
        parse_solver(SSD)
    file = tmp_path / "solver.prototxt"
    file.write_text(SSD, encoding="utf-8")
    config = read_solver(file, ignore_unknown=True)
    assert config.ignored == ("eval_type", "ap_version", "test_state.lovel", "rampup")
    assert config.test_state == (NetState(phase="TEST"),) and config.base_lr == float32(0.01)
    assert parse_solver(solver_text(config)) == dataclasses.replace(config, ignored=())
    found = explain_solver(config).traps
    assert [trap.field for trap in found if "Caffe has no such field" in trap.text] == list(config.ignored)
    with pytest.raises(PrototxtError, match="max_iter must be an integer"):  # known fields are still checked
        parse_solver(SSD + "max_iter: 1.5", ignore_unknown=True)


@pytest.mark.parametrize("name", ["learning_rate_decay", "batch_size", "rampup_interval", "eval_type"])
def test_a_field_of_another_program_is_not_called_a_typo(name: str) -> None:
    with pytest.raises(PrototxtError, match=f"'{name}': a solver has no such field. Remove it"):
        parse_solver(f"{name}: 1 {FIXED}")


def test_a_file_in_latin_1(tmp_path: Path) -> None:
    file = tmp_path / "solver.prototxt"
    file.write_bytes(f'# für alle\nsnapshot_prefix: "modèle" {FIXED}'.encode("latin-1"))
    assert read_solver(file).snapshot_prefix == "modèle"


def test_many_step_values_are_read_in_linear_time() -> None:
    count = 40_000
    text = f'base_lr: 1 lr_policy: "multistep" gamma: 1 max_iter: {count}\n'
    text += "".join(f"stepvalue: {index}\n" for index in range(count))

    def seconds(text: str) -> float:
        taken: list[float] = []
        for _ in range(3):
            start = time.process_time()
            parse_solver(text)
            taken.append(time.process_time() - start)
        return min(taken)

    few = "".join(text.splitlines(keepends=True)[: count // 8 + 1])
    assert len(parse_solver(text).stepvalue) == count, "premise"
    gc.disable()  # its time grows with the number of tokens
    try:
        assert seconds(text) < 16 * seconds(few), "8 times the lines: quadratic"
    finally:
        gc.enable()
    config = parse_solver(text + "stepvalue: 5 stepvalue: 50000")
    report = explain_solver(config)
    assert max(len(trap.text) for trap in report.traps) < 400
    assert max(len(setting.meaning) for setting in report.settings) < 400


LONG = 10_000_000


@pytest.mark.parametrize(
    "text",
    [
        "x" * LONG + ": 1",
        "max_iter: " + "9" * LONG,
        "max_iter " + "9" * LONG,
        'net: "' + "x" * LONG,
        'max_iter: "' + "x" * LONG + '"',
        "type: '" + "x" * LONG + "'",
        "max_iter: " + "9" * LONG + "x",
        "x" * LONG + " 1",
        "x" * LONG + ": }",
        "stepvalue: [1 " + "x" * LONG,
    ],
    ids=range(10),
)
def test_error_texts_are_bounded(text: str) -> None:
    with pytest.raises(PrototxtError) as caught:
        parse_solver(f"{FIXED}\n{text}")
    assert len(str(caught.value)) < 400
