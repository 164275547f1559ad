"""Whatever is done with ranks besides plain steps trains as it does unplanned, bit for bit."""

from __future__ import annotations

import pytest

from .harness import run_ranks
from .odd import ODD


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_training_is_that_without_a_plan(name: str) -> None:
    for same, overhead in run_ranks(ODD[name]):
        assert same and overhead > 0
