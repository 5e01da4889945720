"""The benchmarks as programs without other libraries: output and exit code."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.scorecard import read_record
from tests import forked

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search}
    return forked.run([BENCHMARKS / program, *arguments], environment=environment, seconds=300)


@pytest.fixture(scope="module")
def scorecard(tmp_path_factory):
    path = tmp_path_factory.mktemp("scorecard") / "scores.json"
    result = run("exactness.py", "--peers", "none", "--json", str(path))
    assert path.exists(), result.stderr
    return result, json.loads(path.read_text())


def test_ours_is_within_its_bound_in_every_case(scorecard):
    result, rows = scorecard
    assert len(rows) >= 17 + 16, "both precisions, the bfloat16 case once"
    wrong = {(row["case"], row["table"]): row["cells"]["ours"] for row in rows if not is_within(row)}
    assert not wrong
    assert result.returncode == 0, result.stderr


def is_within(row):
    error = row["cells"]["ours"]["error"]
    return error is not None and error <= row["bound"]


def test_bounds_are_the_documented_ones(scorecard):
    _, rows = scorecard
    for row in rows:
        if row["case"].startswith("bf16"):
            assert row["bound"] <= 2**-8
        elif row["table"] == "float64":
            assert row["bound"] == 1e-12
        else:
            assert row["bound"] <= max(1e-6, 2 * (row["large_batch"] or 0)) < 1e-5


def test_the_tutorial_loop_fails_its_cases(scorecard):
    # A scorecard that detects nothing would show both columns as exact.
    _, rows = scorecard
    wrong = {row["case"] for row in rows if not (row["cells"]["tutorial"]["error"] or 0) <= 1e-2}
    assert {"unequal micro-batches 4+4+2", "tail window", "token mask", "break in a window"} <= wrong
    assert "equal micro-batches" not in wrong


def test_output_names_cases_versions_and_reasons(scorecard):
    result, rows = scorecard
    for row in rows:
        assert row["case"] in result.stdout
    assert "Versions: torch" in result.stdout
    assert "FAILS" not in result.stdout


def test_the_published_table_contains_this_run(scorecard):
    _, rows = scorecard
    published = {(row["case"], row["table"]): row["cells"] for row in read_record()["rows"]}
    assert set(published) == {(row["case"], row["table"]) for row in rows}
    for row in rows:
        kept = published[row["case"], row["table"]]["tutorial"]["error"]
        assert row["cells"]["tutorial"]["error"] == pytest.approx(kept, rel=0.02, abs=1e-5, nan_ok=True)


def test_a_table_without_a_column_is_not_published():
    result = run("exactness.py", "--peers", "none", "--publish")
    assert result.returncode == 2
    assert "--publish needs --peers all" in result.stderr


def test_a_wrong_accumulation_fails_the_scorecard(tmp_path):
    # The same program with superbatch's column replaced by the tutorial loop must fail.
    program = tmp_path / "wrong.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import peers.ours, peers.tutorial, exactness\n"
        "for name in ('train', 'resume', 'leave'):\n"
        "    setattr(peers.ours, name, getattr(peers.tutorial, name))\n"
        "sys.argv[1:] = ['--peers', 'none', '--dtypes', 'float64']\n"
        "sys.exit(exactness.main())\n"
    )
    result = run(str(program))
    assert result.returncode == 1, result.stderr
    assert "FAILS" in result.stdout


@pytest.mark.parametrize("program", ["exactness.py", "overhead.py"])
def test_an_unknown_peer_is_refused_with_the_known_names(program):
    result = run(program, "--peers", "accelerato")
    assert result.returncode == 2
    assert "--peers 'accelerato' is unknown. Pass all, none, or some of tutorial, accelerate" in result.stderr


@pytest.mark.parametrize("program", ["noise.py", "overhead.py", "survey.py"])
def test_an_unknown_work_is_refused_with_the_known_names(program):
    result = run(program, "--work", "mlp,convent")
    assert result.returncode == 2
    known = "mlp, convnet, narrow-transformer, small-transformer, transformer"
    assert f"--work 'convent' is unknown. Pass one of {known}." in result.stderr


@pytest.mark.parametrize("count", ["0", "x", ""])
def test_a_work_without_a_number_of_microbatches_is_refused(count):
    result = run("overhead.py", "--work", f"mlp:{count}")
    assert result.returncode == 2
    assert f"--work 'mlp:{count}' has no number after the colon. Pass one, such as mlp:16." in result.stderr


def test_a_missing_library_omits_its_column_and_says_what_to_install(tmp_path):
    # A library that cannot be imported, even if the extra is installed.
    program = tmp_path / "bare.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import peers\n"
        "from dataclasses import replace\n"
        "peers.PEERS = tuple(replace(p, package=p.package and 'no-such-' + p.package) for p in peers.PEERS)\n"
        "import exactness\n"
        "sys.argv[1:] = ['--peers', 'lightning', '--dtypes', 'float64']\n"
        "sys.exit(exactness.main())\n"
    )
    result = run(str(program))
    assert result.returncode == 0, result.stderr
    assert "not installed" in result.stdout
    assert "pip install 'superbatch[peers]'" in result.stdout


def test_overhead_measures_every_contestant(tmp_path):
    path = tmp_path / "overhead.json"
    result = run("overhead.py", "--peers", "none", "--work", "mlp", "--rounds", "5", "--json", str(path))
    assert result.returncode == 0, result.stderr
    numbers = json.loads(path.read_text())
    names = {row["name"] for row in numbers["times"]}
    assert {"by hand", "by hand, again", "superbatch", "superbatch, whole batch"} <= names
    assert all(row["milliseconds"] > 0 for row in numbers["times"])


def test_overhead_takes_the_median_over_processes(tmp_path):
    path = tmp_path / "overhead.json"
    tiny = ("--peers", "none", "--work", "mlp", "--rounds", "5", "--lean", "--times-only")
    result = run("overhead.py", *tiny, "--processes", "2", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())["times"]}
    assert rows["by hand"]["cpu"]["ratio"] == 1
    ours = rows["superbatch"]["cpu"]
    assert 0 < ours["low"] <= ours["ratio"] <= ours["high"]
    assert "against superbatch's" in result.stdout
    assert "of 2" in result.stdout


def test_a_window_needs_no_more_memory_than_the_best_hand_written_loop(tmp_path):
    program = tmp_path / "memory.py"  # only the memory of the transformer: its times would take longer
    program.write_text(
        f"import json, sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from overhead import choose, entries, measure_memory\n"
        "from workloads import workloads\n"
        "loops = [row for row in entries(choose('none')) if row.name in "
        "('by hand', 'by hand, usual', 'by hand, cuts the batch', 'superbatch', 'superbatch, whole batch')]\n"
        "rows = measure_memory(workloads()['small-transformer'], loops, rss=False)\n"
        "print(json.dumps({row.name: row.bytes for row in rows}))\n"
    )
    result = run(str(program))
    assert result.returncode == 0, result.stderr
    peaks = json.loads(result.stdout.splitlines()[-1])
    assert peaks["by hand"] < peaks["by hand, usual"], "the premise: tensors can outlive their micro-batch"
    # Each micro-batch adds a few bytes: its detached loss and the scaling gradient.
    assert peaks["superbatch"] <= peaks["by hand"] + 1024
    assert peaks["superbatch, whole batch"] <= peaks["by hand, cuts the batch"] + 1024


def test_noise_is_measured_against_plain_accumulation(tmp_path):
    path = tmp_path / "noise.json"
    result = run("noise.py", "--work", "mlp", "--rounds", "3", "--every", "1,2", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text())
    names = ["plain", "plain, again", "each window", "plain", "plain, again", "one window in 2"]
    assert [row["name"] for row in rows] == names
    options = (
        "--work",
        "small-transformer",
        "--rounds",
        "2",
        "--every",
        "1",
        "--also",
        "proxy,preconditioned",
    )
    result = run("noise.py", *options, "--json", str(path))
    assert result.returncode == 0, result.stderr
    also = [row["name"] for row in json.loads(path.read_text())][3:]
    assert also == ["each window, proxy", "each window, preconditioned"]
    assert all(row["cpu"]["ratio"] > 0 for row in rows)
