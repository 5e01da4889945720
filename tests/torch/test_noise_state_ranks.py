"""Ranks that disagree on measuring the noise raise an error, and none waits forever."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from superbatch.noise.meter import PROXY, Estimate
from tests.torch import test_noise_adam, test_noise_proxy
from tests.torch.helpers import mse
from tests.torch.noise_ranks import ALONE, parts
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two ranks."""
    return found_by_both("tests.torch.noise_state_ranks", tmp_path_factory.mktemp("ranks"))


def test_a_state_or_an_option_on_one_rank_only_raises_on_all(results: list[dict[str, Any]]) -> None:
    """With every=2 the ranks would measure in turns and deadlock; with every=1 their averages differ."""
    first, second = ({name: each for name, each in one.items() if name != "beside"} for one in results)
    assert first == second
    assert set(first) == {"state, every 2", "state, every 1", "option, every 1"}
    for name, found in first.items():
        for text in found["said"]:
            if name.startswith("state"):  # the number of updates is compared first
                assert "Rank 0 has made 3 updates, but rank 1 has made 0" in text, name
                assert "Load the same checkpoint on every rank" in text, name
            else:
                assert "2 ranks measure the noise in different windows" in text, name
        assert found["unchanged"], "the refused window updates nothing"
        assert found["after"] == ["", "", ""], "after loading on all ranks they train"
        assert found["windows"] == (3 if "every 2" in name else 6)


def test_two_ranks_with_one_micro_batch_measure_as_one_process(results: list[dict[str, Any]]) -> None:
    first, second = (one["beside"]["said"] for one in results)
    assert first == second
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    model.load_state_dict(results[0]["beside"]["model"])
    sizes = [size for rank in ALONE for size in rank]
    microbatches = parts(tuple(sizes))
    d = [(moment / (1 - 0.999)).sqrt() + 1e-8 for moment in results[0]["beside"]["moments"]]
    expected = test_noise_adam.by_hand(model, [lambda p=p: mse(model, p) for p in microbatches], sizes, d)
    ours = {name: Estimate(*each) for name, each in first.items()}
    test_noise_adam.assert_close({name: ours[name] for name in expected}, expected, 1e-11)
    proxy, samples = test_noise_proxy.by_hand(model, microbatches, sizes)
    assert samples == pytest.approx(17)
    test_noise_proxy.assert_near((ours[PROXY], 17.0), (proxy, samples), 1e-11)
