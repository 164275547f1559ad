"""One plan for all ranks: the first rank's, after all have compared the steps that they captured.

Every rank captures, profiles, rewrites, proves and checks by itself; what to save and what to recompute is decided
once. Steps may differ in what a rank or its values say (which rows an expert gets, which place of a gathered list is
the rank's own), where they talk to others in the same order: there each rank decides for itself. Ranks talk after
each of these, so that one that fails is heard of by all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from passes.exclusive import signals_deferred
from passes.ops import is_collective
from passes.printable import brief
from passes.trace.refuse import has_sharded
from planner.budget import Budget
from planner.decided import Decided
from planner.errors import RankError
from planner.files.fingerprint import fingerprint, op_lines, tensor_lines
from planner.files.planfile import decode_schedule, encode_schedule, problem_digest
from planner.pipeline import decide, emit
from planner.plan import Plan
from planner.prepared import Prepared
from planner.session import Session
from solvers.solution import Solution, solution

from .talk import Message, Ranks

REMEDY = (
    "Ranks that train one model share a plan: give all of them a sample of the same shapes (drop_last=True; padding "
    "to one length), and the same model and options. Where their code is to differ around collectives, plan the "
    'submodules that are alike: regions=["blocks.*"].'
)


@signals_deferred()
def plan_together(group: Any, open_session: Callable[[], Session], budget_mb: Any) -> Plan:
    """The plan of this rank's step, with the decisions of the first rank of `group`.

    The budget is the smallest of what the ranks ask for. Signals are heard while this rank works, so that the others
    hear of it; while it talks they wait.

    Raises:
        BudgetError: `budget_mb` is not a budget; another rank's is a `RankError` here.
        RankError: another rank cannot plan, ended, or has another step; all ranks raise.
    """
    ranks = Ranks(group)

    def opened() -> tuple[Session, Message]:
        budget = Budget(budget_mb)
        session = open_session()
        return session, {**_outline(session), "budget": budget.to_bytes(session.plain_peak_bytes)}

    session, said = ranks.together(opened)
    equal = _are_equal(said)
    limit = min((words["budget"] for words in said if words["budget"] is not None), default=None)

    def decided() -> tuple[Decided | None, Message]:
        if ranks.rank and equal:
            return None, {}
        found = decide(session.prepared, limit, session.progress)
        return found, {"plan": _to_data(found)}

    mine, said = ranks.together(decided)

    def finished() -> tuple[Plan, Message]:
        own = mine or _adopt(session, said[0]["plan"], limit)
        return Plan.of(session.model, session.arguments, own), {}

    return ranks.together(finished)[0]


def _outline(session: Session) -> Message:
    """What has to be equal on all ranks, in words.

    A rank's number may be a constant of a step that talks to the others (which rows of a table it has), so of such a
    step only the ops and the shapes are compared.
    """
    prepared = session.prepared
    traced, lines, options = prepared.traced, op_lines(prepared), prepared.options
    shared = any(map(is_collective, traced.graph_module.graph.nodes))
    asked = {kind: getattr(options, kind) for kind in ("gradients", "keep_outputs", "regions")}
    return {
        "fingerprint": "" if shared else fingerprint(traced), "tensors": list(tensor_lines(traced)),
        "ops": [f"{o.name} = {o.aten} -> {o.result}{'' if shared else f' [{o.id}]'}" for o in lines],
        "sent": None if has_sharded(session.model) or _is_listened_to(session.model) else _sent(prepared),
        "options": [f"{kind}={value!r}" for kind, value in {**asked, **options.hints.to_dict()}.items()],
    }  # fmt: skip


def _sent(prepared: Prepared) -> list[str] | None:
    """The collectives of the forward, in their order; None where others go on among the gradients, or are not known.

    Wrappers send gradients while the backward runs: between which of its collectives depends on what is recomputed.
    """
    nodes, begin = prepared.lowered.nodes, prepared.problem.num_forward
    talks = [node is not None and is_collective(node) for node in nodes]
    if any(talks[begin:]) or (prepared.regions is not None and prepared.regions.talks):
        return None
    return [f"{line.aten} -> {line.result}" for line, sent in zip(op_lines(prepared), talks, strict=True) if sent]


def _is_listened_to(model: nn.Module) -> bool:
    """Whether parameters have hooks, which may send gradients as they leave: their order is the plan's."""
    return any(p._backward_hooks or (p.is_leaf and p._post_accumulate_grad_hooks) for p in model.parameters())


def _are_equal(said: list[Message]) -> bool:
    """Whether all ranks have one step; if not, each decides for itself.

    Raises:
        RankError: on every rank the same about the first rank whose step is not that of rank 0, and has to be.
    """
    first = said[0]
    alike = all(words[key] == first[key] for key in ("tensors", "options", "sent") for words in said)
    if alike and first["sent"] is not None:
        return all(words["ops"] == first["ops"] for words in said)
    for rank, words in enumerate(said):
        if all(words[key] == first[key] for key in first if key != "budget"):
            continue
        lines = (zip(words[key], first[key], strict=False) for key in ("options", "tensors", "ops"))
        others = (pair for pairs in lines for pair in pairs if pair[0] != pair[1])
        other = next(others, ("other constants, or more ops", "those asked for"))
        differs = f"rank {rank} has {brief(other[0], 200)}, rank 0 has {brief(other[1], 200)}"
        raise RankError(f"the ranks' steps differ: {differs}. {REMEDY}", rank=rank)
    return True


def _to_data(decided: Decided) -> Message:
    found, problem = decided.solution, decided.problem
    return {
        "schedule": encode_schedule(problem, decided.schedule, op_lines(decided.prepared)),
        "problem": problem_digest(problem), "solver": found.solver, "bound": found.bound, "family": found.family,
        "notes": list(found.notes),
    }  # fmt: skip


def _adopt(session: Session, data: Message, limit: int | None) -> Decided:
    """The first rank's decisions, in this rank's own step."""
    found = _solution(session.prepared, data)
    if limit is not None and found.peak_bytes > limit:
        raise RankError(
            f"the plan of rank 0 peaks at {found.peak_bytes} bytes on this rank, over the budget of {limit}, as ops "
            "need other workspaces here: run all ranks on equal devices, or leave room with reserve_mb.", rank=0,
        )  # fmt: skip
    return emit(session.prepared, found, limit, session.progress)


def _solution(prepared: Prepared, data: Message) -> Solution:
    problem = prepared.problem
    schedule = decode_schedule(problem, [line.name for line in op_lines(prepared)], data["schedule"])
    same = problem_digest(problem) == data["problem"]
    return solution(
        problem, schedule, data["solver"], bound=data["bound"] if same else None, family=data["family"],
        notes=tuple(data["notes"]),
    )  # fmt: skip
