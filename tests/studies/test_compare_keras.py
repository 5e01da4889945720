# Keras is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`superbatch compare --backend keras`: the same runs as on torch, on the framework of Keras."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras", reason="keras, or its framework, is not installed", exc_type=ImportError)

from superbatch.errors import InputError  # noqa: E402
from superbatch.lab.report.comparison import Comparison  # noqa: E402
from superbatch.lab.report.verdict import failures  # noqa: E402
from superbatch.lab.studies import backends, on_keras, without_torch  # noqa: E402
from superbatch.lab.studies.compare import Options  # noqa: E402
from tests.report_json import from_json  # noqa: E402
from tests.studies import backend_checks as checks  # noqa: E402

pytestmark = pytest.mark.keras

ROOT = Path(__file__).resolve().parents[2]
UNEQUAL = Options(splits="5x20,20x5,30/30/30/10", updates=12, dtype="float64")
in_float64 = pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Keras has no float64 on torch, where it is set to"
)


@in_float64
def test_every_arm_equals_the_run_on_torch() -> None:
    setting, _ = checks.trained("keras", UNEQUAL)
    assert {arm.method for arm in setting.arms} == set(on_keras.HOW), "the premise: every method is there"
    checks.agrees_with_torch("keras", UNEQUAL)


@in_float64
def test_splits_agree() -> None:
    checks.splits_agree("keras", UNEQUAL)


@in_float64
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_splits_agree_with_every_optimizer(optimizer: str) -> None:
    checks.splits_agree("keras", Options(splits="5x20", updates=12, dtype="float64", optimizer=optimizer))


@in_float64
def test_a_run_does_not_affect_the_next() -> None:
    """Models are reused; momentum would reveal state left by an earlier run."""
    first, second = (checks.report_of("keras", optimizer="momentum").arms[1].runs for _ in range(2))
    assert [run.losses for run in first] == [run.losses for run in second]
    assert keras.config.floatx() == "float32", "the result is the same as before"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"include_wrong": True},
            r"with include_wrong: .* Leave include_wrong out, or use the backend torch",
        ),
        (
            {"splits": "80/15/5"},
            "backend='keras' cannot make the split 80/15/5: Keras' micro-batches have one size",
        ),
        ({"splits": "30/70"}, "cannot make the split 30/70"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checks.report_of("keras", **{"dtype": "float32", **options})


def test_float64_on_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    message = "keras' on torch with dtype='float64': there Keras multiplies matrices in float32"
    with pytest.raises(InputError, match=message):
        checks.report_of("keras")


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'jax'", name="jax.numpy")

    monkeypatch.setattr(backends.importlib, "import_module", missing)
    message = r"Keras is set to jax, which is not installed\. Install jax, or set"
    with pytest.raises(InputError, match=message):
        backends.load_backend("keras")


# ------------------------------------------------------------------------------------ the check can fail


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear compiled models before and after the test."""
    on_keras.program.cache_clear()
    yield
    on_keras.program.cache_clear()


class FirstOnly:
    """A model that updates with only the first micro-batch."""

    def __init__(self, model: Any, *, microbatch_size: int) -> None:
        self.model, self.size = model, microbatch_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def train_on_batch(self, x: Any, y: Any) -> Any:
        return self.model.train_on_batch(x[: self.size], y[: self.size])


@in_float64
@pytest.mark.usefixtures("fresh")
def test_a_broken_accumulation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(checks.report_of("keras")) == [], "the premise: the real one passes"
    on_keras.program.cache_clear()
    monkeypatch.setattr(on_keras, "accumulate", FirstOnly)
    assert "5x20: weights differ by" in failures(checks.report_of("keras"))[0]


def test_other_samples_change_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = without_torch.Draws
    monkeypatch.setattr(without_torch, "Draws", lambda seed: right(seed + 1))
    with pytest.raises(AssertionError, match="1x100"):
        checks.agrees_with_torch("keras", Options(splits="5x20", updates=3), bound=1e-4)


# ------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("framework", "dtype"), [("tensorflow", "float64"), ("jax", "float64"), ("torch", "float32")]
)
def test_the_command_on_each_framework(framework: str, dtype: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    quick = ("--runs", "2", "--updates", "4", "--workers", "1", "--splits", "5x20", "--out", str(tmp_path))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "superbatch",
            "compare",
            "--backend",
            "keras",
            *quick,
            "--check",
            "--dtype",
            dtype,
        ],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": framework, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        lines[0]
        == f"digits on keras ({framework}): 2 runs of 4 updates with 100 samples, sgd lr 0.06, {dtype}"
    )
    report = from_json(Comparison, (tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report.backend == f"keras ({framework})"
    assert report.versions.keys() >= {"superbatch", "keras", framework, "python"}
    assert [arm.peak_bytes for arm in report.arms] == [None, None]
    assert any(note.startswith("Peak memory is left out: ") for note in report.notes)
    assert "superbatch.keras.accumulate" in (tmp_path / "report.html").read_text(encoding="utf-8")
