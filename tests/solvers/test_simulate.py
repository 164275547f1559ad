"""The referee: `simulate` and `with_frees` against a naive replayer, and every rule broken once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers.errors import PlannerError, ScheduleError
from solvers.problem import Op, Problem, Tensor
from solvers.replay import copies
from solvers.schedule import Schedule, Step, computes, plain_order, with_frees
from solvers.simulate import peak_and_cost, simulate
from tests.solvers.oracles import Broken, replay
from tests.solvers.problems import SOLVED, Solved, parse
from tests.solvers.strategies import last_place, make_order, problems, schedules


@given(st.data())
def test_agrees_with_the_naive_replayer(data: st.DataObject) -> None:
    problem = data.draw(problems())
    schedule = data.draw(schedules(problem))
    expected, got = replay(problem, schedule), simulate(problem, schedule)
    assert (got.peak_bytes, got.added_cost) == (expected.peak_bytes, expected.added_cost)
    assert got.resident_bytes == expected.resident_bytes
    assert got.moment_bytes == expected.moment_bytes
    assert peak_and_cost(problem, schedule) == (expected.peak_bytes, expected.added_cost)
    reached = [i for i, moment in enumerate(got.moment_bytes) if moment == got.peak_bytes]
    assert got.peak_step == (reached[0] if reached else 0)


@given(st.data())
def test_the_copies_add_up_to_what_is_resident(data: st.DataObject) -> None:
    problem = data.draw(problems())
    schedule = data.draw(schedules(problem))
    found = copies(problem, schedule)
    for position, (kind, i) in enumerate(schedule):
        held = sum(problem.tensors[c.tensor].bytes for c in found if c.made <= position < c.until)
        running = problem.ops[i].workspace if kind == "compute" else 0
        assert problem.static_bytes + held + running == replay(problem, schedule).moment_bytes[position]


@given(st.data())
def test_accepts_exactly_what_the_replayer_accepts(data: st.DataObject) -> None:
    """Damage a valid schedule: both referees must agree on whether it still runs."""
    problem = data.draw(problems())
    steps = list(data.draw(schedules(problem)))
    position = data.draw(st.integers(0, len(steps) - 1))
    match data.draw(st.sampled_from(("drop", "twice", "swap", "move", "free"))):
        case "drop":
            del steps[position]
        case "twice":
            steps.insert(position, steps[position])
        case "swap":
            steps[position - 1], steps[position] = steps[position], steps[position - 1]
        case "move":
            steps.insert(data.draw(st.integers(0, len(steps) - 1)), steps.pop(position))
        case "free":
            if problem.tensors:
                steps.insert(position, Step("free", data.draw(st.integers(0, len(problem.tensors) - 1))))
    schedule = tuple(steps)
    try:
        expected = replay(problem, schedule)
    except Broken:
        with pytest.raises(ScheduleError):
            simulate(problem, schedule)
    else:
        assert simulate(problem, schedule).peak_bytes == expected.peak_bytes


def compute(*ops: int) -> tuple[Step, ...]:
    return tuple(Step("compute", i) for i in ops)


def free(*tensors: int) -> tuple[Step, ...]:
    return tuple(Step("free", t) for t in tensors)


# op:     save 0, mask 1, dense 2, loss 3, start 4, back 5; tensor: state 0, m 1, x 2, y 3, l 4, t 5, g 6
RULES = parse(
    """
    state:1 = save() optional
    m:2 = mask() replay state
    x:4 y:4 = dense(m)
    l:1 = loss(x, y) once
    --
    t:1 = start()
    g:4 = back(t, x)
    """,
    outputs="l g",
)
BROKEN: dict[str, tuple[Schedule, int | None, tuple[str, ...]]] = {
    "reads before it is written": (compute(1, 3), 1, ("loss", "x")),
    "reads after it is freed": (compute(1, 2) + free(3) + compute(3), 3, ("loss", "y")),
    "recompute reads after it is freed": (compute(0, 1, 2) + free(1) + compute(2), 4, ("dense", "m")),
    "replays a state never saved": (compute(1, 2, 1), 2, ("mask", "state")),
    "replays a state that is gone": (compute(0, 1) + free(0) + compute(2, 1), 4, ("mask", "state")),
    "frees what is not live": (compute(1) + free(2), 1, ("x",)),
    "frees twice": (compute(1, 2) + free(2, 2), 3, ("x",)),
    "recomputes what must run once": (compute(1, 2, 3, 3), 3, ("loss",)),
    "recomputes a backward op": (compute(1, 2, 3, 4, 4), 4, ("start",)),
    "saves a state twice": (compute(0, 0), 1, ("save",)),
    "runs out of order": (compute(1, 2, 4), 2, ("start", "loss")),
    "leaves out the last op": (compute(1, 2, 3, 4), None, ("back",)),
    "is empty": ((), None, ("mask",)),
    "frees an output of the forward": (compute(1, 2, 3) + free(4) + compute(4, 5), 3, ("l",)),
    "frees a gradient": (compute(1, 2, 3, 4, 5) + free(6), 5, ("g",)),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule: str) -> None:
    schedule, step, names = BROKEN[rule]
    with pytest.raises(ScheduleError) as caught:
        simulate(RULES, schedule)
    assert caught.value.step == step
    assert [name for name in names if repr(name) not in str(caught.value)] == []


@pytest.mark.parametrize(
    "step",
    [("compute", 6), ("compute", -1), ("free", 7), ("free", -1), ("offload", 1)],
    ids=lambda step: f"{step[0]} {step[1]}",
)
def test_a_step_that_means_nothing_is_refused(step: tuple[str, int]) -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(RULES, (*compute(1, 2), Step(*step), *compute(3, 4, 5)))  # type: ignore[arg-type]
    assert caught.value.step == 2


def test_a_state_saved_after_the_draw_is_refused() -> None:
    """It would replay the wrong numbers: the state must be taken before the op that draws first runs."""
    with pytest.raises(ScheduleError, match="'save'"):
        simulate(RULES, compute(1, 0, 1, 2, 3, 4, 5))


def test_an_output_may_not_be_freed_to_be_computed_again() -> None:
    """The floors count it from its first run on, and its holder reads it: 9 bytes are too few for this problem."""
    solved = next(s for s in SOLVED if s.name == "forward output")
    schedule = (*compute(0, 1), *free(0, 1), *compute(0), *compute(1, 2), *free(2), *compute(3), *free(0))
    assert solved.optimum[9] is None
    with pytest.raises(ScheduleError, match="'y', an output"):
        simulate(solved.problem, schedule)
    with pytest.raises(Broken):
        replay(solved.problem, schedule)


def test_a_second_copy_counts_while_it_is_made() -> None:
    # x, y and m are live (10) and dense runs again: 8 more while it does, none after.
    simulation = simulate(RULES, compute(1, 2, 2, 3, 4, 5))
    assert simulation.moment_bytes == (2, 10, 18, 11, 12, 16)
    assert simulation.resident_bytes == (2, 10, 10, 11, 12, 16)
    assert (simulation.peak_bytes, simulation.peak_step, simulation.added_cost) == (18, 2, 1)


@pytest.mark.parametrize("solved", SOLVED, ids=lambda s: s.name)
def test_the_plain_step_adds_nothing(solved: Solved) -> None:
    problem = solved.problem
    peak, added = peak_and_cost(problem, with_frees(problem, plain_order(problem)))
    plain = min(budget for budget, cost in solved.optimum.items() if cost == 0)
    assert added == 0
    assert peak >= plain
    if solved.name != "chain with a zero-cost op":
        assert peak == plain


@given(st.data())
def test_with_frees_keeps_the_order(data: st.DataObject) -> None:
    problem = data.draw(problems())
    order = make_order(lambda low, high: data.draw(st.integers(low, high)), problem)
    schedule = with_frees(problem, order)
    ran = computes(schedule)
    assert tuple(i for i in ran if not problem.ops[i].optional) == order
    replayed = {t for i in set(order) if order.count(i) > 1 for t in problem.ops[i].replay_inputs}
    needed = {problem.producer[t] for t in replayed}
    assert {i for i in ran if problem.ops[i].optional} == {i for i in needed if problem.ops[i].optional}
    assert with_frees(problem, ran) == schedule


@given(st.data())
def test_no_free_can_come_later_for_less(data: st.DataObject) -> None:
    problem, schedule = data.draw(problem_and_order())
    peak = simulate(problem, schedule).peak_bytes
    for position, step in enumerate(schedule):
        if step.kind == "free":
            rest = list(schedule[:position] + schedule[position + 1 :])
            later = data.draw(st.integers(position, last_place(rest, position, step.index, problem)))
            for changed in (rest, [*rest[:later], step, *rest[later:]]):
                assert replay(problem, tuple(changed)).peak_bytes >= peak


@given(st.data())
def test_no_free_can_come_earlier(data: st.DataObject) -> None:
    problem, schedule = data.draw(problem_and_order())
    for position, step in enumerate(schedule):
        if step.kind == "free":
            before = max(i for i in range(position) if schedule[i].kind == "compute")
            moved = (*schedule[:before], step, *schedule[before:position], *schedule[position + 1 :])
            with pytest.raises(ScheduleError):
                simulate(problem, moved)


@given(st.data())
def test_only_what_a_later_read_needs_is_held(data: st.DataObject) -> None:
    """Between two computes a tensor is live if its next event is a read, or if it is an output already written."""
    problem, schedule = data.draw(problem_and_order())
    live: set[int] = set()
    done: set[int] = set()
    for position, (kind, index) in enumerate(schedule):
        if kind == "free":
            live.remove(index)
            continue
        assert live == {t for t in live if t in problem.outputs or _is_read_next(problem, schedule, position, t, done)}
        live |= set(problem.ops[index].outputs)
        done.add(index)
    assert not [step for step in schedule if step.kind == "free" and step.index in problem.outputs]


def _is_read_next(problem: Problem, schedule: Schedule, start: int, tensor: int, done: set[int]) -> bool:
    done = set(done)
    for i in computes(schedule[start:]):
        op = problem.ops[i]
        if tensor in op.inputs or (i in done and tensor in op.replay_inputs):
            return True
        if tensor in op.outputs:
            return False
        done.add(i)
    return False


def test_a_step_of_nothing_holds_its_static_bytes() -> None:
    assert peak_and_cost(Problem((), (), 0, static_bytes=5), ()) == (5, 0)


@given(st.data())
def test_nothing_but_the_outputs_is_left(data: st.DataObject) -> None:
    problem, schedule = data.draw(problem_and_order())
    left = sum(problem.tensors[t].bytes for t in set(problem.outputs))
    assert simulate(problem, schedule).resident_bytes[-1] == problem.static_bytes + left


@st.composite
def problem_and_order(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    problem = draw(problems())
    order = make_order(lambda low, high: draw(st.integers(low, high)), problem)
    return problem, with_frees(problem, order)


@pytest.mark.parametrize(
    ("order", "names"), [((2,), ("dense", "m")), ((1, 3), ("loss", "x")), ((1, 2, 3, 4), ("g",))]
)
def test_with_frees_refuses_an_order_that_cannot_run(order: tuple[int, ...], names: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError) as caught:
        with_frees(RULES, order)
    assert [name for name in names if repr(name) not in str(caught.value)] == []


@given(problems())
def test_a_problem_survives_json(problem: Problem) -> None:
    again = Problem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert again == problem
    assert again.step_cost == problem.step_cost == sum(op.cost for op in problem.ops)


X, Y = Tensor("x", 4), Tensor("y", 4)
MALFORMED = {
    "before any op writes it": ((Op("f", (1,), (0,), 1), Op("b", (), (1,), 1, recomputable=False)), (X, Y), 1),
    "unknown or written twice": ((Op("f", (), (0, 0), 1),), (X,), 1),
    "unknown": ((Op("f", (), (1,), 1),), (X,), 1),
    "negative cost": ((Op("f", (), (0,), -1),), (X,), 1),
    "workspace": ((Op("f", (), (0,), 1, workspace=-1),), (X,), 1),
    "backward op 0": ((Op("b", (), (0,), 1),), (X,), 0),
    "optional op": ((Op("f", (), (0,), 1), Op("s", (0,), (1,), 0, optional=True)), (X, Y), 2),
    "written by no op": ((Op("f", (), (0,), 1),), (X, Y), 1),
    "bytes are negative": ((Op("f", (), (0,), 1),), (Tensor("x", -1),), 1),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_a_malformed_problem_is_refused(message: str) -> None:
    ops, tensors, num_forward = MALFORMED[message]
    with pytest.raises(PlannerError, match=message):
        Problem(ops, tensors, num_forward)


def test_an_unknown_output_is_refused() -> None:
    with pytest.raises(PlannerError, match="output"):
        Problem((Op("f", (), (0,), 1),), (X,), 1, outputs=(1,))
