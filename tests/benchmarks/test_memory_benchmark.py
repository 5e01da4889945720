"""The memory benchmark as a program: without other libraries, on one small training under a real limit."""

import json
import sys

import pytest

from tests.benchmarks.test_benchmarks import BENCHMARKS, run

pytestmark = pytest.mark.benchmarks
LIMIT = 64 * 2**20  # limit of the training "small"


def program(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{text}")
    result = run(str(path))
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_search_finds_every_limit_and_reports_an_unsharp_one(tmp_path):
    out = program(
        tmp_path,
        "from true_limit import search\n"
        "for limit in range(61):\n"
        "    for about in (1, 7, 30, 60):\n"
        "        found = search(lambda size: size <= limit, about=about, most=60)\n"
        "        assert (found.samples, found.sharp) == (limit, True), (limit, about, found)\n"
        "ragged = search(lambda size: size <= 40 or size == 42, about=30, most=60)\n"
        "print(ragged.samples, ragged.highest, ragged.sharp)\n",
    )
    assert out.split() == ["40", "42", "False"]


def test_the_search_tries_few_sizes(tmp_path):
    out = program(
        tmp_path,
        "from true_limit import search\n"
        "print(max(len(search(lambda s: s <= n, about=700, most=4096).tried) for n in range(1, 4097)))\n",
    )
    assert int(out) <= 45  # each size is a process; near the guess about fifteen suffice


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits memory on Linux only")
# Only finders of other libraries use "plain".
@pytest.mark.parametrize("loop", ["accumulate", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_real_limit_separates_sizes(loop):
    answers = []
    for size in ("32", "1024"):
        result = run("under_limit.py", "small", str(LIMIT), loop, size)
        assert result.returncode == 0, result.stderr
        answers.append(json.loads(result.stdout.splitlines()[-1]))
    assert answers[0] == {"fits": True}
    assert not answers[1]["fits"]
    assert "memory" in answers[1]["error"].lower() or "primitive" in answers[1]["error"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the output of a quick run of all parts: only superbatch, on the training of known limit."""
    path = tmp_path_factory.mktemp("memory") / "measured.json"
    options = ["--finders", "none", "--quick", "--true", "small=263", "--json", str(path)]
    if sys.platform != "linux":
        options += ["--parts", "peaks,failures"]
    result = run("memory.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(path.read_text())


def test_peaks_equal_those_of_the_best_hand_written_loop(measured):
    peaks = {row["name"]: row for row in measured["peaks"]}
    best, usual = peaks["by hand, best"], peaks["by hand, usual"]
    assert usual["units"] - best["units"] == pytest.approx(1, abs=1e-3), "the premise: an output stays alive"
    assert 3 < best["units"] < 3.13
    for name in ("superbatch", "superbatch, whole batch"):
        assert peaks[name]["bytes"] <= best["bytes"] + 1024


def test_failures_change_nothing_and_the_comparison_can_fail(measured):
    rows = measured["failures"]
    ours = [row for row in rows if row["how"] == "superbatch"]
    assert {row["model"] for row in ours} == {"mlp", "convnet", "transformer"}
    for row in ours:
        assert sum(row["counts"].values()) == row["windows"] == 20, "every window runs out of memory"
        assert min(row["counts"].values()) > 0, "there were failures in every place"
        assert row["half_way"] > 0, "some gradients were already added"
        assert row["error"] <= 1e-12
        assert row["buffers"]
    naive = [row for row in rows if row["how"] != "superbatch"]
    assert naive
    assert all(row["error"] > 1e-3 and not row["buffers"] for row in naive)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits memory on Linux only")
@pytest.mark.parametrize("finder", ["ours-largest", "ours-auto"])
def test_superbatch_finds_a_size_that_trains_under_a_real_limit(measured, finder):
    (row,) = [row for row in measured["limits"]["rows"] if row["finder"] == finder]
    assert not row["error"]
    assert row["trains"]
    assert 0 < row["chosen"] <= 266  # the largest size that ever fitted
    assert row["wasted"] <= 1.1 * row["batch"]
    assert row["failed"] == 0


def test_an_unknown_finder_and_an_unknown_part_are_refused_with_the_known_ones(tmp_path):
    out = program(
        tmp_path,
        "import contextlib, memory\n"
        "for arguments in (['--finders', 'lightening'], ['--parts', 'limit']):\n"
        "    sys.argv[1:] = arguments\n"
        "    with contextlib.redirect_stderr(sys.stdout):\n"
        "        try:\n"
        "            memory.main()\n"
        "        except SystemExit as error:\n"
        "            print('exit code', error.code)\n",
    )
    finders, parts, _ = out.split("exit code 2\n")
    assert (
        "--finders lightening is unknown. Pass all, none (superbatch only), or some of accelerate" in finders
    )
    assert "is unknown. Pass some of limits, peaks, failures" in parts
