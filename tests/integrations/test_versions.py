"""Warning about a library version that the integrations were not tested with."""

from __future__ import annotations

import warnings

import pytest

from superbatch.integrations import versions


@pytest.mark.parametrize("installed", ["4.57.1", "5.22.9", "5.24.0", "6.0.0.dev0"])
def test_an_untested_version_gives_a_warning(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"transformers": installed}.__getitem__)
    monkeypatch.setitem(versions.TESTED, "transformers", ("5.23", "5.23"))

    with pytest.warns(UserWarning, match=rf"tested with transformers 5\.23, but {installed} is installed"):
        versions.check_version("transformers")


@pytest.mark.parametrize("installed", ["5.23", "5.23.7", "5.23.0rc1"])
def test_a_tested_version_gives_no_warning(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"transformers": installed}.__getitem__)
    monkeypatch.setitem(versions.TESTED, "transformers", ("5.23", "5.23"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_version("transformers")


def test_a_range_of_versions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"trl": "0.9"}.__getitem__)
    monkeypatch.setitem(versions.TESTED, "trl", ("1.16", "1.18"))

    with pytest.warns(UserWarning, match=r"tested with trl 1\.16 to 1\.18, but 0\.9 is installed"):
        versions.check_version("trl")
