"""Needs of a release besides a wheel: valid links, workflows, issue forms, policies."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hatch_build import absolute
from superbatch.lab.report.page import DOCUMENTATION

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib: Any = pytest.importorskip("tomli", reason="Python 3.10 reads no TOML without tomli")

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed (extra: docs)")

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / ".github").is_dir():
    pytest.skip("the workflows are not part of the sdist", allow_module_level=True)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"]["Repository"]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load(text_of(f".github/workflows/{name}.yml"))


def relative(text: str) -> list[str]:
    """Return the targets of relative links and pictures."""
    return [target for target in LINK.findall(text) if not re.match(r"(https?://|#)", target)]


# --------------------------------------------------------------------------------------- the description


def test_links_and_pictures_of_the_description_are_absolute() -> None:
    readme = text_of("README.md")
    targets = relative(readme)
    assert len(targets) > 10, "the premise: links in the repository are relative"
    assert any(target.endswith(".png") for target in targets)
    for target in targets:
        assert (ROOT / target.split("#")[0]).exists(), target
    text = absolute(readme, repository=ADDRESS, version="1.2.3")
    assert relative(text) == []
    found = LINK.findall(text)
    assert f"{ADDRESS}/blob/v1.2.3/LICENSE" in found
    assert all("/raw/v1.2.3/" in link for link in found if link.endswith(".png"))
    assert len(found) == len(LINK.findall(readme)), "no link is lost"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#part)", "[a](R/blob/v1/docs/a.md#part)"),
        ("![a](./a.png)", "![a](R/raw/v1/a.png)"),
        ("[a](https://b.c/d) [e](#f) [g](mailto:h@i)", "[a](https://b.c/d) [e](#f) [g](mailto:h@i)"),
    ],
)
def test_links(text: str, expected: str) -> None:
    assert absolute(text, repository="R/", version="1") == expected


def test_copies_of_the_repository_address_agree() -> None:
    for name in ("CITATION.cff", "SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"):
        assert ADDRESS in text_of(name), name
    assert PROJECT["urls"]["Changelog"].startswith(ADDRESS)
    assert PROJECT["urls"]["Documentation"] == DOCUMENTATION
    assert PROJECT["authors"] == [{"name": "The superbatch developers"}]


# -------------------------------------------------------------------------------------------- workflows


def versions_of_python() -> list[str]:
    prefix = "Programming Language :: Python :: 3."
    return [f"3.{each.removeprefix(prefix)}" for each in PROJECT["classifiers"] if each.startswith(prefix)]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_what_ci_runs() -> None:
    wanted = set(re.findall(r"^\./run (\S+)", text_of(".ci/run"), re.MULTILINE))
    assert wanted >= {"lint", "test", "test-backends"}, "the premise: both have commands"
    jobs = workflow("ci")["jobs"]
    checks = set(jobs["checks"]["strategy"]["matrix"]["command"])
    assert commands(jobs["checks"]) == ["./run ${{ matrix.command }}"]
    assert "./run test" in commands(jobs["test"])
    assert checks | {"test"} == wanted
    assert commands(jobs["docs"]) == ["./run docs"]


def test_the_matrix_agrees_with_the_metadata() -> None:
    matrix = workflow("ci")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == versions_of_python()
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    (oldest,) = PROJECT["optional-dependencies"]["torch"]
    assert {"python": matrix["python"][0], "torch": f"=={oldest.partition('>=')[2]}.0"} in matrix["include"]
    trials = [each["python"] for each in matrix["include"] if each.get("trial")]
    assert not set(trials) & set(matrix["python"]), "versions on trial are not in the metadata"


def test_publishing_needs_no_secret_and_only_the_rights_it_uses() -> None:
    release = workflow("release")
    assert "secrets." not in text_of(".github/workflows/release.yml")
    assert release["permissions"] == workflow("ci")["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions", {}) for name, job in release["jobs"].items()}
    assert rights["publish"] == {"id-token": "write"}
    assert not rights["build"]
    assert not rights["test"]
    assert set(release["jobs"]["publish"]["needs"]) == {"build", "test"}
    assert release[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"


def test_the_patterns_of_the_release_checks_match() -> None:
    """Otherwise the checks of the tag would refuse every release."""
    assert re.search(r'^__version__ = "\d+\.\d+\.\d+"$', text_of("superbatch/_version.py"), re.MULTILINE)
    assert f'\nRepository = "{ADDRESS}"\n' in text_of("pyproject.toml")


@pytest.mark.parametrize("name", ["bug", "exactness"])
def test_issue_forms(name: str) -> None:
    form = yaml.safe_load(text_of(f".github/ISSUE_TEMPLATE/{name}.yml"))
    assert {"name", "description", "body"} <= form.keys()
    names = [each["id"] for each in form["body"]]
    assert len(set(names)) == len(names) > 1


# --------------------------------------------------------------------------------------------- policies


def test_the_policy_names_the_versions_that_are_tested() -> None:
    table = text_of("docs/stability.md")
    first, *_, last = versions_of_python()
    assert f"| Python | {first} | {first} to {last}; 3.14 may fail |" in table
    assert "| PyTorch | 2.6 |" in table
