"""Whatever is done with ranks besides plain steps trains as it does unplanned, bit for bit."""

from __future__ import annotations

import pytest

from tests.planner.histories import RANKS, run_on_ranks

from .harness import run_ranks
from .odd import ODD


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_training_is_that_without_a_plan(name: str) -> None:
    for same, overhead in run_ranks(ODD[name]):
        assert same and overhead > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", RANKS)
def test_random_models_train_for_random_steps(way: str) -> None:
    assert sum(run_on_ranks(seed, way, 2).steps for seed in range(190_000, 190_027)) > 20
