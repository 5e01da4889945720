"""Reports of small studies for several test files."""

from __future__ import annotations

import pytest

from superbatch.lab.report.study import Study
from superbatch.lab.studies.study import Options, study
from tests.studies import own_recipe


@pytest.fixture(scope="session")
def momentum() -> Study:
    return study("momentum", own_recipe.plane(), Options(runs=2, samples=800, learning_rate=0.004))


@pytest.fixture(scope="session")
def grown() -> Study:
    return study("grow-batch", own_recipe.plane(), Options(runs=2, samples=1200, learning_rate=0.1))


@pytest.fixture(scope="session")
def precision() -> Study:
    return study("precision", own_recipe.plane(), Options(runs=1, quick=True))
