"""The tables of docs/exactness.md and README.md come from the JSON record of one run."""

from __future__ import annotations

import copy

import pytest

from benchmarks import scorecard

RECORD = scorecard.read_record()
TABLES = [
    *((scorecard.PAGE, name, table) for name, table in scorecard.page_tables(RECORD).items()),
    *((scorecard.README, name, table) for name, table in scorecard.readme_tables(RECORD).items()),
]


@pytest.mark.parametrize(("path", "name", "table"), TABLES, ids=[name for _, name, _ in TABLES])
def test_a_published_table_equals_the_record(path, name, table):
    text = path.read_text(encoding="utf-8")
    again = "run `python benchmarks/exactness.py --publish` where the other libraries are installed"
    assert scorecard.replaced(text, name, table) == text, again


def test_a_changed_number_changes_the_table():
    changed = copy.deepcopy(RECORD)
    rows = [row for row in changed["rows"] if row["case"] == "tail window"]
    assert len(rows) == 2
    for row in rows:
        row["cells"]["hf"]["error"] = 0.25
    assert scorecard.readme_tables(changed) != scorecard.readme_tables(RECORD)
    assert scorecard.page_tables(changed)["float64"] != scorecard.page_tables(RECORD)["float64"]


def test_the_record_has_every_column_and_case_in_both_precisions():
    columns = set(RECORD["columns"])
    assert {"tutorial", "accelerate", "lightning", "hf", "ours"} <= columns
    assert len(RECORD["rows"]) == 2 * len(RECORD["cases"]) - 1, "the bfloat16 case occurs once"
    assert all(set(row["cells"]) == columns for row in RECORD["rows"])
    assert {"torch", "accelerate", "lightning", "transformers"} == set(RECORD["versions"])


def test_superbatch_is_within_its_bound_in_the_record():
    wrong = [row["case"] for row in RECORD["rows"] if not row["cells"]["ours"]["error"] <= row["bound"]]
    assert not wrong


@pytest.mark.parametrize("text", ["no comment", "<!-- table: run -->\n<!-- end -->\n" * 2])
def test_a_page_without_its_comment_is_an_error(text):
    with pytest.raises(ValueError, match="where one was expected"):
        scorecard.replaced(text, "run", "table")
