"""The oracles against problems solved by hand: two derivations that share nothing."""

from __future__ import annotations

import pytest

from tests.solvers.oracles import brute_force
from tests.solvers.problems import SOLVED, Solved


@pytest.mark.parametrize("solved", SOLVED, ids=lambda s: s.name)
def test_brute_force_agrees_with_the_hand(solved: Solved) -> None:
    frontier = brute_force(solved.problem)
    assert {budget: frontier.best(budget) for budget in solved.optimum} == solved.optimum


@pytest.mark.parametrize("solved", SOLVED, ids=lambda s: s.name)
def test_no_recompute_in_the_forward_is_a_restriction_only_where_said(solved: Solved) -> None:
    backward_only = brute_force(solved.problem, from_op=solved.problem.num_forward)
    same = all(backward_only.best(budget) == cost for budget, cost in solved.optimum.items())
    assert same is not solved.in_forward
