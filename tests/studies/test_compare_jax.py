# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`superbatch compare --backend jax`: the same runs as on torch, and the same report."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")

from superbatch.lab.report.comparison import Comparison  # noqa: E402
from superbatch.lab.report.verdict import failures  # noqa: E402
from superbatch.lab.studies import on_jax, without_torch  # noqa: E402
from superbatch.lab.studies.compare import Options  # noqa: E402
from tests.cli import commands  # noqa: E402
from tests.report_json import from_json  # noqa: E402
from tests.studies import backend_checks as checks  # noqa: E402

pytestmark = pytest.mark.jax

EVERYTHING = Options(splits="5x20,80/15/5", updates=24, dtype="float64", include_wrong=True)
UPDATE: Any = on_jax.update
run = commands.run


def test_every_arm_equals_the_run_on_torch() -> None:
    setting, _ = checks.trained("jax", EVERYTHING)
    assert setting.tail == 40, "the premise: there are tails"
    assert {arm.method for arm in setting.arms} == set(on_jax.HOW), "the premise: every method is there"
    checks.agrees_with_torch("jax", EVERYTHING)


def test_splits_agree_and_wrong_accumulation_does_not() -> None:
    checks.splits_agree("jax", EVERYTHING)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])  # AdamW covers Adam
def test_every_optimizer_equals_that_of_torch(optimizer: str) -> None:
    options = Options(splits="5x20", updates=12, dtype="float64", optimizer=optimizer)
    checks.agrees_with_torch("jax", options)
    checks.splits_agree("jax", options)


def test_another_seed_compiles_nothing() -> None:
    checks.report_of("jax", runs=1)
    before = UPDATE._cache_size()
    checks.report_of("jax", runs=3)
    assert UPDATE._cache_size() == before > 0


def test_float64_is_enabled_and_disabled_again() -> None:
    assert not jax.config.jax_enable_x64, "the premise"
    checks.report_of("jax", updates=1, runs=1)
    assert not jax.config.jax_enable_x64


def test_memory_falls_with_the_micro_batch() -> None:
    report = checks.report_of("jax", updates=1, runs=1, splits="5x20,20x5")
    whole, fifth, twentieth = (arm.peak_bytes or 0 for arm in report.arms)
    assert whole > 1.5 * fifth > 1.5 * twentieth > 0
    assert report.notes[-1].startswith("Peak memory is that of the temporary buffers")


# ------------------------------------------------------------------------------------ the check can fail


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear compiled programs before and after the test."""
    UPDATE.clear_cache()
    yield
    UPDATE.clear_cache()


def without_weights(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda fun, **options: right(fun, **(options | {"weight": None}))


def without_divisor(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda fun, **options: right(fun, **options, reduction="sum")


def without_the_last(right: Callable[..., Any]) -> Callable[..., Any]:
    def short(fun: Any, **options: Any) -> Any:
        work = right(fun, **options)
        return lambda weights, batch: work(
            weights, tuple(leaf[: -options["microbatch_size"]] for leaf in batch)
        )

    return short


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("mutant", "split"),
    [(without_weights, "80/15/5"), (without_divisor, "5x20"), (without_the_last, "5x20")],
)
def test_a_broken_accumulation_is_found(
    mutant: Callable[..., Any], split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures(checks.report_of("jax", splits=split)) == [], "the premise: the real one passes"
    UPDATE.clear_cache()
    monkeypatch.setattr(on_jax, "value_and_grad", mutant(on_jax.value_and_grad))
    assert f"{split}: weights differ by" in failures(checks.report_of("jax", splits=split))[0]


def test_other_samples_change_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(splits="5x20", updates=3, dtype="float64")
    right = without_torch.Draws
    monkeypatch.setattr(without_torch, "Draws", lambda seed: right(seed + 1))
    with pytest.raises(AssertionError, match="1x100"):
        checks.agrees_with_torch("jax", options)


# ------------------------------------------------------------------------------------------ the command


def test_the_command_prints_the_table_and_writes_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("--runs", "2", "--updates", "4", "--workers", "1", "--splits", "5x20,20x5")
    asked = ("compare", "--backend", "jax", *quick, "--check", "--dtype", "float64", "--out", str(tmp_path))
    assert run(*asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits on jax: 2 runs of 4 updates with 100 samples, sgd lr 0.06, float64"
    assert [line.split("  ")[0] for line in lines[3:6]] == ["1x100 (real batch)", "5x20", "20x5"]
    report = from_json(Comparison, (tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report.backend == report.command["backend"] == "jax"
    assert report.versions.keys() >= {"superbatch", "jax", "optax", "python"}
    assert "torch" not in report.versions
    assert all(arm.peak_bytes for arm in report.arms)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "superbatch.jax.value_and_grad" in page
    assert "digits on jax" in page


def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Two worker processes load the recipe by its name; importing torch fails in them."""
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')\n", encoding="utf-8")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from superbatch.lab.cli import main\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    script = tmp_path / "without_torch.py"
    script.write_text(code, encoding="utf-8")
    quick = (
        "--runs",
        "2",
        "--updates",
        "3",
        "--workers",
        "2",
        "--splits",
        "5x20",
        "--out",
        str(tmp_path / "out"),
    )
    command = [sys.executable, script, "compare", "--backend", "jax", *quick]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digits on jax: 2 runs of 3 updates")
