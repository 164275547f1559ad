"""Some of `python -m tests.planner.histories`, which draws as many as wanted: every step has the plain model's bits."""

from __future__ import annotations

import pytest

from tests.planner.histories import COMPILED, WAYS, run


@pytest.mark.every(4)
@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
@pytest.mark.filterwarnings("ignore")
def test_random_models_train_for_random_steps(way: int) -> None:
    assert sum(run(seed).steps for seed in range(way, 5 * len(WAYS), len(WAYS))) > 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_models_are_compiled_and_train_for_random_steps() -> None:
    assert sum(run(seed, way=COMPILED).steps for seed in range(10)) > 16
