# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""`superbatch compare --backend tensorflow`: the same runs as on torch, and the same report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")

from superbatch.errors import InputError  # noqa: E402
from superbatch.lab.report.comparison import Comparison  # noqa: E402
from superbatch.lab.report.verdict import failures  # noqa: E402
from superbatch.lab.studies import on_tensorflow, without_torch  # noqa: E402
from superbatch.lab.studies.compare import Options  # noqa: E402
from tests.cli import commands  # noqa: E402
from tests.report_json import from_json  # noqa: E402
from tests.studies import backend_checks as checks  # noqa: E402

pytestmark = pytest.mark.tensorflow

EVERYTHING = Options(splits=checks.SPLITS, updates=24, dtype="float64", include_wrong=True)
run = commands.run


def test_every_arm_equals_the_run_on_torch() -> None:
    setting, _ = checks.trained("tensorflow", EVERYTHING)
    assert setting.tail == 40, "the premise: there are tails"
    assert {arm.method for arm in setting.arms} == set(on_tensorflow.HOW), (
        "the premise: every method is there"
    )
    checks.agrees_with_torch("tensorflow", EVERYTHING)


def test_splits_agree_and_wrong_accumulation_does_not() -> None:
    checks.splits_agree("tensorflow", EVERYTHING)


def test_momentum_equals_that_of_torch_in_float32() -> None:
    """Keras rounds 0.9 to float32 for any dtype of the weights."""
    options = Options(splits="5x20", updates=12, dtype="float64", optimizer="momentum")
    checks.agrees_with_torch("tensorflow", options, bound=1e-6)
    checks.splits_agree("tensorflow", options)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_splits_agree_with_keras_own_adam(optimizer: str) -> None:
    """Adam of Keras has a different epsilon in a different place, so it differs from torch."""
    checks.splits_agree(
        "tensorflow", Options(splits="5x20", updates=12, dtype="float64", optimizer=optimizer)
    )


def test_another_seed_or_split_traces_nothing() -> None:
    checks.report_of("tensorflow", runs=1)
    update = on_tensorflow.program("accumulator", "sgd", 0.06, "float64").update
    before = update.experimental_get_tracing_count()
    checks.report_of("tensorflow", runs=2, splits="10x10,80/15/5")
    assert update.experimental_get_tracing_count() == before == 1


def test_a_run_does_not_affect_the_next() -> None:
    """Programs are reused; momentum would reveal state left by an earlier run."""
    first, second = (checks.report_of("tensorflow", optimizer="momentum").arms[1].runs for _ in range(2))
    assert [run.losses for run in first] == [run.losses for run in second]


def test_memory_is_left_out_with_a_reason() -> None:
    report = checks.report_of("tensorflow", updates=1, runs=1)
    assert [arm.peak_bytes for arm in report.arms] == [None, None]
    assert any(note.startswith("Peak memory is left out: ") for note in report.notes)


def test_keras_on_another_framework_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.keras.backend, "backend", lambda: "jax")
    with pytest.raises(InputError, match=r"with KERAS_BACKEND=jax: .* Unset KERAS_BACKEND"):
        checks.report_of("tensorflow")


# ------------------------------------------------------------------------------------ the check can fail


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear traced programs before and after the test."""
    on_tensorflow.program.cache_clear()
    yield
    on_tensorflow.program.cache_clear()


class Unweighted(on_tensorflow.Accumulator):
    def add(self, gradients: Any, weight: Any = 1, **others: Any) -> None:
        super().add(gradients, 1, **others)


class Clipping(on_tensorflow.Accumulator):
    def __init__(self, variables: Any) -> None:
        super().__init__(variables, max_grad_norm=0.1)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("mutant", "split"), [(Unweighted, "80/15/5"), (Clipping, "5x20")])
def test_a_broken_accumulator_is_found(
    mutant: Callable[..., Any], split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures(checks.report_of("tensorflow", splits=split)) == [], "the premise: the real one passes"
    on_tensorflow.program.cache_clear()
    monkeypatch.setattr(on_tensorflow, "Accumulator", mutant)
    assert f"{split}: weights differ by" in failures(checks.report_of("tensorflow", splits=split))[0]


def test_other_samples_change_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = without_torch.Draws
    monkeypatch.setattr(without_torch, "Draws", lambda seed: right(seed + 1))
    with pytest.raises(AssertionError, match="1x100"):
        checks.agrees_with_torch("tensorflow", Options(splits="5x20", updates=3, dtype="float64"))


# ------------------------------------------------------------------------------------------ the command


def test_the_command_prints_the_table_and_writes_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("--runs", "2", "--updates", "4", "--workers", "1", "--splits", "5x20", "--include-wrong")
    where = ("--backend", "tensorflow", "--out", str(tmp_path))
    assert run("compare", *where, *quick, "--check", "--dtype", "float64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits on tensorflow: 2 runs of 4 updates with 100 samples, sgd lr 0.06, float64"
    assert [line.split("  ")[0] for line in lines[3:8]] == [
        "1x100 (real batch)",
        "5x20",
        "80/15/5",
        "80/15/5 mean of means",
        "5x20 fixed tail divisor",
    ]
    report = from_json(Comparison, (tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report.backend == "tensorflow"
    assert report.versions.keys() >= {"superbatch", "tensorflow", "keras", "python"}
    assert "superbatch.tensorflow.Accumulator" in (tmp_path / "report.html").read_text(encoding="utf-8")
