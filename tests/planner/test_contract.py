"""The contract of a Plan: what each attribute means, checked against an independent measurement of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from planner import Plan, auto_checkpoint, minimum_budget
from planner.timeline import CATEGORIES
from solvers import Schedule, Step, computes, simulate
from tests.planner.steps import MIB, SmallGPT, batch, conv_net, mlp, plan, tight
from tests.zoo.compare import forward_backward, measured_peak_bytes

ROOT = Path(__file__).resolve().parents[2]


def small_gpt() -> tuple[nn.Module, Any]:
    return SmallGPT(dropout=0.1), torch.randint(0, 64, (4, 16))


def convolutions() -> tuple[nn.Module, Any]:
    return conv_net(), torch.randn(8, 3, 16, 16)


def perceptron() -> tuple[nn.Module, Any]:
    return mlp(width=64), batch(128, 64)


MODELS: tuple[Callable[[], tuple[nn.Module, Any]], ...] = (small_gpt, convolutions, perceptron)


@pytest.fixture(scope="module", params=MODELS, ids=lambda make: make.__name__)
def planned(request: pytest.FixtureRequest) -> tuple[Plan, nn.Module, Any]:
    torch.manual_seed(0)
    model, sample = request.param()
    chosen = tight(model, sample, 0.5)
    assert chosen.recomputed
    return chosen, model, sample


def test_types(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, _, _ = planned
    assert isinstance(chosen.module, fx.GraphModule)
    for name in ("budget_bytes", "peak_bytes", "baseline_peak_bytes", "static_bytes", "step_flops", "recompute_flops"):
        assert type(getattr(chosen, name)) is int, name
    assert type(chosen.overhead) is float
    assert chosen.bound is None or 0 <= chosen.bound <= chosen.overhead
    assert chosen.status in ("optimal", "feasible")
    assert chosen.solver == "greedy"
    assert {"capture", "profile", "solve", "rewrite", "verify"} <= set(chosen.seconds)
    assert all(seconds >= 0 for seconds in chosen.seconds.values())
    assert isinstance(chosen.schedule, tuple)
    assert isinstance(chosen.graph, nx.DiGraph)


def test_relations_of_the_bytes(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, _, _ = planned
    assert chosen.budget_bytes is not None
    assert chosen.static_bytes < chosen.peak_bytes <= chosen.budget_bytes < chosen.baseline_peak_bytes


def test_static_bytes_are_parameters_buffers_and_inputs(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, model, sample = planned
    tensors = [*model.parameters(), *model.buffers(), sample]
    assert chosen.static_bytes == sum(-(-t.numel() * t.element_size() // 64) * 64 for t in tensors)


def test_the_schedule_simulates_to_what_is_printed(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, _, _ = planned
    simulation = simulate(chosen.problem, chosen.schedule)
    assert simulation.peak_bytes == chosen.peak_bytes
    assert chosen.overhead == pytest.approx(simulation.added_cost / chosen.problem.step_cost)
    assert chosen.overhead == chosen.problem.overhead(simulation.added_cost)


def test_the_timeline_adds_up(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, _, _ = planned
    simulation = simulate(chosen.problem, chosen.schedule)
    computes = [b for step, b in zip(chosen.schedule, simulation.moment_bytes, strict=True) if step.kind == "compute"]
    line = chosen.timeline
    assert tuple(line.bytes) == CATEGORIES
    assert all(len(row) == len(line.labels) == len(computes) for row in line.bytes.values())
    assert all(b >= 0 for row in line.bytes.values() for b in row)
    assert line.total == tuple(computes)
    assert max(line.total) == line.peak[2] == chosen.peak_bytes
    assert line.labels[line.peak[0]] == line.peak[1]
    assert line.labels[line.backward_from] == "tangents"
    assert set(line.bytes["recomputed"][: line.backward_from]) <= {0}
    assert max(line.bytes["recomputed"]) > 0
    assert max(line.bytes["saved"]) > 0
    assert set(line.bytes["parameters"]) == {chosen.static_bytes}
    assert max(chosen.baseline_timeline.total) == chosen.baseline_peak_bytes
    assert max(chosen.baseline_timeline.bytes["recomputed"]) == 0


def test_step_flops_are_the_plain_step_s(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, model, sample = planned
    with FlopCounterMode(display=False) as counter:
        forward_backward(model, sample)
    assert chosen.step_flops == counter.get_total_flops()


def test_recompute_flops_are_what_the_planned_step_adds(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, model, sample = planned
    with FlopCounterMode(display=False) as plain:
        forward_backward(model, sample)
    with FlopCounterMode(display=False) as counter:
        forward_backward(chosen.module, sample)
    assert counter.get_total_flops() - plain.get_total_flops() == chosen.recompute_flops


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_what_is_recomputed_runs_twice_and_nothing_else() -> None:
    """Counted on the ops that appear in a GELU network's forward alone."""
    model, sample = mlp(width=64), batch(128, 64)
    chosen = tight(model, sample, 0.3)
    counts = []
    for module in (model, chosen.module):
        with Counter() as counter:
            forward_backward(module, sample)
        counts.append(counter.count)
    again = repeats(chosen)
    assert set(again) == set(chosen.recomputed)
    for op in ("addmm", "gelu"):
        added = sum(count for name, count in again.items() if name.startswith(op))
        assert counts[1][op] - counts[0][op] == added, op


def repeats(chosen: Plan) -> dict[str, int]:
    """How many times each op runs again."""
    names = [chosen.problem.ops[i].name for i in computes(chosen.schedule)]
    return {name: names.count(name) - 1 for name in dict.fromkeys(names) if names.count(name) > 1}


def test_the_measured_peak_is_within_the_budget() -> None:
    torch.manual_seed(0)
    model, sample = small_gpt()
    chosen = tight(model, sample, 0.5)
    measured = measured_peak_bytes(chosen.module, model, sample, chosen.static_bytes)
    assert chosen.budget_bytes is not None
    assert measured <= chosen.budget_bytes
    assert abs(measured / chosen.peak_bytes - 1) <= 0.01
    plain = measured_peak_bytes(model, model, sample, chosen.static_bytes)
    assert measured < plain


def test_saved_and_recomputed_are_names_of_the_graph(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, _, _ = planned
    names = {op.name for op in chosen.problem.ops}
    assert set(chosen.recomputed) <= names
    assert len(set(chosen.recomputed)) == len(chosen.recomputed)
    assert chosen.saved and len(set(chosen.saved)) == len(chosen.saved)
    assert set(chosen.saved) <= {t.name for t in chosen.problem.tensors}
    # What is saved and recomputed too was read by the backward, dropped, and read again later.
    boundary = chosen.schedule.index(Step("compute", chosen.problem.num_forward))
    for name in {n for n in chosen.saved if "_rng" not in n} & set(chosen.recomputed):
        op = next(i for i, op in enumerate(chosen.problem.ops) if op.name == name)
        runs = [j for j, step in enumerate(chosen.schedule) if step == Step("compute", op)]
        written = chosen.problem.ops[op].outputs
        reads = [
            j for j, step in enumerate(chosen.schedule)
            if step.kind == "compute" and set(written) & set(chosen.problem.ops[step.index].inputs) and j > boundary
        ]  # fmt: skip
        assert boundary > max(runs) or min(reads) < max(runs)


def test_the_graph_tells_each_op_s_story(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, model, _ = planned
    graph = chosen.graph
    assert nx.is_directed_acyclic_graph(graph)
    assert graph.number_of_nodes() == len(chosen.problem.ops)
    paths = {n for n, _ in model.named_modules()}
    for name, data in graph.nodes(data=True):
        assert {"bytes", "flops", "cost", "decision", "module"} <= set(data), name
        assert data["decision"] in ("save", "recompute", "forward", "backward")
        assert data["module"] in paths, (name, data["module"])
    assert {n for n, d in graph.nodes(data=True) if d["decision"] == "recompute"} == set(chosen.recomputed)
    assert sum(d["flops"] for _, d in graph.nodes(data=True)) == chosen.step_flops
    assert sum(graph.nodes[n]["cost"] for n in graph) == chosen.problem.step_cost


def test_repr_has_the_verdict(planned: tuple[Plan, nn.Module, Any]) -> None:
    chosen, _, _ = planned
    text = repr(chosen)
    assert "MiB" in text and "recompute" in text
    assert f"{chosen.overhead:.2%}" in text


def test_no_budget_is_the_plain_step_on_the_cpu() -> None:
    model, sample = perceptron()
    chosen = auto_checkpoint(model, sample, progress=False)
    assert chosen.budget_bytes is None
    assert chosen.recomputed == () and chosen.overhead == 0 == chosen.recompute_flops
    assert chosen.peak_bytes == chosen.baseline_peak_bytes
    assert repr(chosen)


def test_a_reserve_is_part_of_the_peak() -> None:
    model, sample = perceptron()
    free = plan(model, sample)
    reserved = plan(model, sample, reserve_mb=1.5)
    assert reserved.peak_bytes - free.peak_bytes == reserved.static_bytes - free.static_bytes == int(1.5 * MIB)


@pytest.mark.parametrize(("optimizer", "copies"), [(torch.optim.Adam, 2), (torch.optim.SGD, 0)])
@pytest.mark.parametrize("instance", [False, True])
def test_optimizer_state_is_part_of_the_peak(optimizer: Any, copies: int, instance: bool) -> None:
    model, sample = perceptron()
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() + (64 if copies else 0) / 2 for p in trained)  # and a step counter for each
    free = plan(model, sample)
    given = optimizer(model.parameters(), lr=0.1) if instance else optimizer
    assert plan(model, sample, optimizer=given).static_bytes - free.static_bytes == copies * size


@pytest.mark.parametrize("cost", ["flops", "roofline", "measured", "device", lambda op: 1.0])
def test_costs(cost: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    chosen = tight(*perceptron(), 0.5, cost=cost)
    assert chosen.overhead > 0 or cost == "flops"
    if callable(cost):
        kernels = sum(n is not None for n in chosen.prepared.lowered.nodes)
        assert chosen.problem.step_cost == kernels
        assert chosen.overhead == sum(repeats(chosen).values()) / kernels


def test_a_larger_budget_never_costs_more() -> None:
    model, sample = perceptron()
    free = plan(model, sample)
    minimum_mb, _ = minimum_budget(model, sample, progress=False)
    low, high = int(minimum_mb * MIB), free.baseline_peak_bytes
    budgets = [low + (high - low) * i // 6 for i in range(7)]
    plans = [plan(model, sample, b / MIB) for b in budgets]
    assert all(p.peak_bytes <= b for p, b in zip(plans, budgets, strict=True))
    costs = [p.overhead for p in plans]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0


SCRIPT = """
import json, torch
from tests.planner.steps import mlp, batch, SmallGPT, tight
torch.manual_seed(0)
found = []
for make, x, solver in ((lambda: mlp(width=64), batch(128, 64), "auto"),
                        (lambda: SmallGPT(layers=1), torch.randint(0, 64, (4, 16)), "greedy")):
    plan = tight(make(), x, 0.6, solver=solver)
    found.append([plan.peak_bytes, [list(s) for s in plan.schedule], plan.saved, plan.recomputed, plan.overhead])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_same_plan_in_every_process() -> None:
    outputs = []
    for seed in ("0", "1234"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]
    assert all(entry[3] for entry in outputs[0])


def test_the_schedule_type_is_the_solvers() -> None:
    chosen = tight(*perceptron())
    schedule: Schedule = chosen.schedule
    assert {s.kind for s in schedule} == {"compute", "free"}
    assert all(s.index >= 0 for s in schedule)
