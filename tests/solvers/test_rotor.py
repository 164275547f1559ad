"""The dynamic program on chains: against a closed formula, brute force, the ILP and itself."""

from __future__ import annotations

import random
from dataclasses import replace
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import solvers.chain_program
import solvers.rotor
from solvers import SOLVERS, BudgetError, PlannerError, Problem, Solution, SolverUnavailable, Status, solve
from solvers.chain import chain_of, merged
from solvers.chain_program import Program
from solvers.exact import exact_schedule
from solvers.problem import Op, Tensor
from solvers.simulate import peak_and_cost
from solvers.solution import plain_solution
from tests.solvers.chains import any_chain, chains, even_chain
from tests.solvers.oracles import brute_force, replay
from tests.solvers.problems import SOLVED, Solved, parse
from tests.solvers.strategies import scaled, seeded_problem

GIB = 1 << 30
PROVED: list[bool] = []


def answer(problem: Problem, budget_bytes: int) -> Solution | BudgetError | SolverUnavailable:
    try:
        return solve(problem, budget_bytes, solver="rotor")
    except (BudgetError, SolverUnavailable) as error:
        return error


def rotor(problem: Problem, budget_bytes: int) -> Solution | None:
    """The answer, replayed naively; None where nothing fits, and then the stated minimum works."""
    found = answer(problem, budget_bytes)
    if isinstance(found, BudgetError):
        assert found.minimum_bytes is not None
        assert found.minimum_bytes > budget_bytes
        smallest = rotor(problem, found.minimum_bytes)
        assert smallest is not None
        assert smallest.peak_bytes == found.minimum_bytes
        return None
    assert isinstance(found, Solution)
    again = replay(problem, found.schedule)
    assert (found.peak_bytes, found.added_cost) == (again.peak_bytes, again.added_cost)
    assert found.peak_bytes <= budget_bytes
    assert found.status is (Status.PERSISTENT if found.added_cost else Status.OPTIMAL)
    assert "persistent" in found.family or found.added_cost == 0
    return found


def plain_peak(problem: Problem) -> int:
    return plain_solution(problem, "plain").peak_bytes


def stairs(problem: Problem) -> list[tuple[int, int]]:
    """Every (bytes, cost) of the whole chain, static bytes included."""
    program = Program(chain_of(problem, "rotor", ()), plain_peak(problem) - problem.static_bytes)
    whole = program.fill()
    return [(int(b) + problem.static_bytes, int(c)) for b, c in zip(whole.bytes, whole.costs, strict=True)]


def revolve(steps: int, snapshots: int) -> int:
    """Forward steps that reversing takes: Griewank and Walther, "Algorithm 799: Revolve", 2000, equation 2."""
    repeats = next(r for r in range(steps + 1) if comb(snapshots + r, snapshots) >= steps)
    return repeats * steps - (comb(snapshots + repeats, repeats - 1) if repeats else 0)


def adjoint(steps: int) -> Problem:
    """Unit steps that work in place; the backward of each reads the state before it, the first of which is given."""
    ops = [Op(f"f{k}", (k - 1,) if k else (), (k,), 1, reuse=(k - 1,) if k else ()) for k in range(steps)]
    tensors = [Tensor(f"x{k}", 1) for k in range(steps)]
    gradient: tuple[int, ...] = ()
    for k in reversed(range(steps + 1)):
        tensors.append(Tensor(f"g{k}", 0, "gradient"))
        reads = (*((k - 1,) if k else ()), *gradient)
        gradient = (len(tensors) - 1,)
        ops.append(Op(f"b{k}", reads, gradient, 1, recomputable=False))
    return Problem(tuple(ops), tuple(tensors), steps, gradient)


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 8, 13, 20])
def test_equal_steps_cost_what_revolve_proves(steps: int) -> None:
    """A byte per snapshot, the given state being one more, and one for the state at hand."""
    expected = {c: revolve(steps + 1, c) - steps for c in range(1, steps + 1)}
    assert dict(stairs(adjoint(steps))) == expected


@pytest.mark.parametrize("solved", SOLVED, ids=lambda s: s.name)
def test_solved_by_hand(solved: Solved) -> None:
    """Chains are solved, or at least not beaten the wrong way; everything else is refused by name."""
    refused = answer(solved.problem, 0)
    if isinstance(refused, SolverUnavailable):
        assert any(repr(op.name) in str(refused) for op in solved.problem.ops)
        return
    for budget_bytes, best in solved.optimum.items():
        found = rotor(solved.problem, budget_bytes)
        assert found is None or (best is not None and found.added_cost >= best)
        if solved.name.startswith("chain"):
            assert (found.added_cost if found else None) == best


@pytest.mark.parametrize("seed", range(24))
def test_even_chains_agree_with_brute_force(seed: int) -> None:
    """Where sizes are even nothing outside the persistent family is better, at any budget."""
    problem = even_chain(random.Random(seed).randint, 2 + seed % 5)
    assert stairs(problem)[::-1] == [(peak, cost) for cost, peak in brute_force(problem).points]


@pytest.mark.parametrize("seed", range(10))
def test_even_chains_agree_with_the_ilp(seed: int) -> None:
    """Up to 40 ops, where the ILP proves its answer; it may never prove more than the rotor finds."""
    problem = even_chain(random.Random(seed).randint, 11 + seed, cheapest=1)
    points = stairs(problem)
    for budget_bytes, cost in points[len(points) // 2 :: 3]:
        found = solve(problem, budget_bytes, solver="ilp", time_limit=2.0, gap=0.0)
        assert found.bound is not None
        assert found.bound <= cost <= found.added_cost
        PROVED.append(found.status is Status.OPTIMAL)


def test_the_ilp_proved_most_of_them() -> None:
    assert sum(PROVED) >= 0.8 * len(PROVED) > 0, "run with the test above"


@pytest.mark.parametrize("seed", range(60))
def test_any_chain_against_brute_force(seed: int) -> None:
    """Uneven sizes, masks, in-place ops, residual stages: valid, within the budget, never below the optimum."""
    problem = any_chain(random.Random(seed).randint, 2 + seed % 4)
    best = brute_force(problem)
    for budget_bytes, cost in stairs(problem):
        found = rotor(problem, budget_bytes)
        assert found is not None
        assert found.added_cost == cost
        least = best.best(budget_bytes)
        assert least is not None and least <= cost
    assert rotor(problem, best.minimum_bytes - 1) is None
    assert stairs(problem)[-1] == (plain_peak(problem), 0) or stairs(problem)[-1][1] == 0


def test_most_small_chains_are_solved_to_the_optimum() -> None:
    """How much smaller the persistent family is: few of these chains have a better schedule outside."""
    problems = [any_chain(random.Random(seed).randint, 2 + seed % 4) for seed in range(60)]
    same = [stairs(p)[::-1] == [(peak, cost) for cost, peak in brute_force(p).points] for p in problems]
    assert sum(same) >= 48, f"{sum(same)} of 60"


@pytest.mark.parametrize("seed", range(0, 80, 2))
def test_other_problems_are_solved_or_refused(seed: int) -> None:
    problem = seeded_problem(seed)
    best = brute_force(problem)
    refused = answer(problem, 0)
    if isinstance(refused, SolverUnavailable):
        assert "breaks this one" in str(refused)
        assert set(refused.available) <= set(SOLVERS)
        return
    for _, budget_bytes in best.points:
        found, least = rotor(problem, budget_bytes), best.best(budget_bytes)
        assert found is None or (least is not None and found.added_cost >= least)


@given(chains(max_stages=6))
@settings(max_examples=25)
def test_a_larger_budget_never_costs_more(problem: Problem) -> None:
    """All the budgets at which the answer changes, and one byte less; the staircase says the same as the solver."""
    points = stairs(problem)
    costs = []
    for budget_bytes, cost in points:
        for offered in (budget_bytes - 1, budget_bytes):
            found = rotor(problem, offered)
            costs.append(found.added_cost if found else None)
        assert costs[-1] == cost
    known = [c for c in costs if c is not None]
    assert costs[len(costs) - len(known) :] == known == sorted(known, reverse=True)


@given(chains(max_stages=3), st.data())
@settings(max_examples=30)
def test_a_larger_budget_never_costs_more_in_the_exact_search(problem: Problem, data: st.DataObject) -> None:
    least = min(budget_bytes for budget_bytes, _ in stairs(problem))
    low = data.draw(st.integers(least, plain_peak(problem)))
    high = data.draw(st.integers(low, plain_peak(problem)))
    costs = []
    for budget_bytes in (low, high):
        exact = exact_schedule(problem, budget_bytes)
        assert exact.complete and exact.schedule is not None
        costs.append(peak_and_cost(problem, exact.schedule)[1])
    assert costs[0] >= costs[1]


@pytest.mark.parametrize("seed", range(6))
def test_tens_of_gib_to_the_byte(seed: int) -> None:
    problem = any_chain(random.Random(seed).randint, 6)
    large = scaled(problem, 7 * GIB)
    assert stairs(large) == [(budget_bytes * 7 * GIB, cost) for budget_bytes, cost in stairs(problem)]


def test_a_backward_out_of_order_is_refused_by_name() -> None:
    problem = parse(
        """
        a:1 = f0()
        b:1 = f1(a)
        c:1 = f2(b)
        d:1 = f3(c)
        --
        g3:1 = d3(d)
        g0:1 = early(a, g3)
        g2:1 = late(c, g0)
        """,
        outputs="g2",
    )
    with pytest.raises(SolverUnavailable, match="'late' breaks this one.*'c', which op 2 wrote") as caught:
        solve(problem, 4, solver="rotor")
    assert caught.value.solver == "rotor"
    assert "auto" in caught.value.available


def test_a_long_skip_is_refused_by_name() -> None:
    body = "\n".join(f"x{k}:1 = f{k}(x{k - 1})" for k in range(1, 12))
    problem = parse(f"x0:1 = f0()\n{body}\ny:1 = join(x11, x0)\n--\ng:1 = d(y, x3)", outputs="g")
    with pytest.raises(SolverUnavailable, match="'join' breaks this one: op 12 of the forward reads 'x0'"):
        solve(problem, 3, solver="rotor")


def test_a_stage_may_be_a_block() -> None:
    """Residual blocks and ops of no bytes: four blocks of three ops, cut where only the sum goes on."""
    lines, backward = ["x0:4 = source()"], []
    for k in range(4):
        lines += [f"a{k}:8 = up{k}(x{k}) cost 3", f"n{k}:0 = note{k}(a{k})", f"x{k + 1}:4 = sum{k}(x{k}, a{k}) cost 2"]
        backward.insert(0, f"g{k}:1 = d{k}(x{k}, a{k}{f', g{k + 1}' if k < 3 else ''})")
    problem = parse("\n".join([*lines, "--", *backward]), outputs="g0")
    assert [len(stage.ops) for stage in chain_of(problem, "rotor", ()).stages] == [1, 3, 3, 3, 3]
    assert stairs(problem)[::-1] == [(peak, cost) for cost, peak in brute_force(problem).points]


def test_a_thinned_table_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = any_chain(random.Random(3).randint, 12)
    points = stairs(problem)
    budget_bytes = points[len(points) // 2][0]
    best = rotor(problem, budget_bytes)
    monkeypatch.setattr(solvers.chain_program, "WORK", 0)
    monkeypatch.setattr(solvers.chain_program, "FEWEST_POINTS", 2)
    found = solve(problem, budget_bytes, solver="rotor")
    assert best is not None
    assert found.peak_bytes <= budget_bytes
    assert found.added_cost >= best.added_cost
    assert found.bound is None and found.status is Status.FEASIBLE
    assert "left out" in found.notes[0]


def test_a_longer_chain_is_planned_in_coarser_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = even_chain(random.Random(0).randint, 30, cheapest=1)
    budget_bytes = stairs(problem)[-4][0]
    best = rotor(problem, budget_bytes)
    monkeypatch.setattr(solvers.rotor, "MAX_STAGES", 15)
    coarse = rotor(problem, budget_bytes)
    assert best is not None and coarse is not None
    assert coarse.added_cost >= best.added_cost
    assert "15 stages" in coarse.family
    assert len(merged(chain_of(problem, "rotor", ()), 7).stages) == 7


def test_a_warm_start_is_a_floor_for_quality() -> None:
    """A cheaper schedule from outside the family is kept, and nothing is claimed for it."""
    for seed in range(60):
        problem = any_chain(random.Random(seed).randint, 2 + seed % 4)
        for budget_bytes, cost in stairs(problem):
            schedule = exact_schedule(problem, budget_bytes).schedule
            assert schedule is not None
            if peak_and_cost(problem, schedule)[1] < cost:
                found = solve(problem, budget_bytes, solver="rotor", warm_starts=(schedule,))
                assert (found.schedule, found.bound, found.status) == (schedule, None, Status.FEASIBLE)
                return
    pytest.fail("no chain of these has a better schedule outside the family")


def test_costs_that_would_overflow_are_refused() -> None:
    problem = adjoint(3)
    huge = replace(problem, ops=tuple(replace(op, cost=op.cost << 61) for op in problem.ops), step_cost=1)
    with pytest.raises(PlannerError, match="coarser unit of cost"):
        solve(huge, 2, solver="rotor")


def test_a_real_chain_trains_like_plain() -> None:
    """Linear and GELU layers, captured: as cheap as the ILP's plan, and the bits are the plain ones."""
    import torch
    from torch import nn

    from planner import auto_checkpoint

    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, sample = nn.Sequential(*layers, nn.Linear(32, 1)), torch.randn(1024, 32)
    plain = auto_checkpoint(model, sample, loss_fn=torch.mean, progress=False)
    budget_mb = 0.6 * plain.peak_bytes / 2**20
    plan = auto_checkpoint(model, sample, budget_mb, loss_fn=torch.mean, solver="rotor", progress=False)
    assert plan.overhead > 0 and plan.peak_bytes <= budget_mb * 2**20
    best = solve(plan.problem, plan.peak_bytes, solver="ilp", gap=1e-6, time_limit=3.0)
    assert plan.overhead == pytest.approx(plan.problem.overhead(best.added_cost), rel=1e-5)
    torch.mean(model(sample)).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    plan.module(sample).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
