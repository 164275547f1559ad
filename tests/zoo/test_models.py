"""The real models of the zoo, each under one tight budget; `make table` runs all of them under three."""

from __future__ import annotations

import pytest

from tests.zoo.models import ZOO
from tests.zoo.table import check

QUICK = ("mixtral", "lstm")


@pytest.mark.parametrize("name", QUICK)
def test_quick_models(name: str) -> None:
    row = check(name, 60, time_limit=5, timed=False)
    assert row.passed, row
    assert abs(row.error) <= 0.01, row


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["chen", "greedy", "auto"])
@pytest.mark.parametrize("name", ZOO)
def test_every_model_and_solver(name: str, solver: str) -> None:
    for share in (80, 60, 40):
        row = check(name, share, solver=solver, time_limit=10, timed=False)
        assert row.passed, row
        assert abs(row.error) <= 0.01, row
