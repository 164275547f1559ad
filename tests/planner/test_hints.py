"""The user's hints: what they name, what they decide, what they cost, and the messages of those that cannot hold."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.rates import Roofline
from planner import BudgetError, HintError, Plan, PlanFileError, auto_checkpoint, frontier, minimum_budget
from planner.command.cli import main
from planner.files.planfile import _checksum, read, render
from planner.hints import make_hints, resolve
from planner.options import Options
from planner.preference import AS_OFTEN, _free_of_charge, solve_preferring
from planner.prepared import lower_step
from planner.session import Session, open_session
from solvers import plain_order, with_frees
from solvers.errors import shown_minimum
from solvers.schedule import computes
from tests.planner.steps import MIB, Wrap, batch, linear, mlp, plan, squares
from tests.solvers.oracles import brute_force, replay
from tests.solvers.strategies import seeded_problem
from tests.zoo.compare import differences, measured_peak_bytes, run_step

X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Three residual blocks; `blocks.1` computes `addmm_2`, `gelu_1`, ..."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block(32) for _ in range(3)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).relu().mean()


@cache
def session() -> Session:
    return open_session(Net(), X, solver="greedy", time_limit=5, progress=False)


def budget_bytes(share: float | None) -> int | None:
    """`share` of what the plain step allocates, and its static bytes."""
    static, plain = session().problem.static_bytes, session().plain_peak_bytes
    return None if share is None else static + int(share * (plain - static))


def hinted(share: float | None = 0.7, cost: Any = "roofline", **hints: Any) -> Plan:
    """A plan of `Net` under hints, from one capture for all tests."""
    base = session()
    p = base.prepared
    options = replace(p.options, hints=make_hints(**hints), cost=cost)
    found = resolve(options.hints, p.traced, p.aliases, p.device)
    lowered = lower_step(p.traced, p.aliases, p.profiles, p.device, options, [n for n in found if found[n].once])
    prepared = replace(p, lowered=lowered, options=options, hinted=found)
    return replace(base, prepared=prepared).plan(budget_bytes(share))


def decisions(chosen: Plan, *targets: str) -> dict[str, str]:
    """What was decided for forward ops of some ATen kinds, by name."""
    nodes = chosen.graph.nodes(data=True)
    return {n: d["decision"] for n, d in nodes if not d["backward"] and any(t in d["op"] for t in targets)}


def assert_same_step(chosen: Plan) -> None:
    """One step through the plan and one of a twin model differ in no bit, and memory is as predicted."""
    model, twin = chosen.module._plan_model, Net()
    assert not differences(run_step(twin, twin, X), run_step(chosen.module, model, X))
    assert measured_peak_bytes(chosen.module, model, X, chosen.static_bytes) <= chosen.peak_bytes


# What hints decide ----------------------------------------------------------------------------------------------


def test_what_may_never_be_recomputed_is_not() -> None:
    free, held = hinted(), hinted(never_recompute=["aten.native_layer_norm"])
    assert "recompute" in decisions(free, "native_layer_norm").values()
    assert "recompute" not in decisions(held, "native_layer_norm").values()
    assert held.recomputed
    assert held.peak_bytes <= held.budget_bytes  # type: ignore[operator]
    assert_same_step(held)


def test_what_must_be_saved_is_handed_to_the_backward() -> None:
    free, held = hinted(0.55), hinted(0.55, save=["gelu", "native_layer_norm_2"])
    assert {"gelu", "native_layer_norm_2"} <= set(free.recomputed)
    assert {"gelu", "native_layer_norm_2[0]"} <= set(held.saved)
    assert not {"gelu", "native_layer_norm_2"} & set(held.recomputed)
    assert_same_step(held)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("gelu_1", {"gelu_1"}),
        ("aten.gelu", {"gelu", "gelu_1", "gelu_2"}),
        ("aten.gelu.default", {"gelu", "gelu_1", "gelu_2"}),
        ("aten.gel*", {"gelu", "gelu_1", "gelu_2"}),
        ("blocks.1/aten.gelu", {"gelu_1"}),
        ("blocks.*/gelu*", {"gelu", "gelu_1", "gelu_2"}),
        ("blocks.?.norm", {"native_layer_norm", "native_layer_norm_1", "native_layer_norm_2"}),
        ("blocks.[01].up", {"addmm", "addmm_2"}),
        ("blocks.2.up", {"addmm_4"}),
    ],
)
def test_a_pattern_names_ops(pattern: str, names: set[str]) -> None:
    chosen = hinted(None, recompute=[pattern])
    assert {n.name for n in chosen.prepared.hinted} == names
    assert set(chosen.recomputed) == names


def test_a_module_stands_for_all_below_it() -> None:
    chosen = hinted(0.85, save=["blocks.1"])
    inside = {n for n, d in chosen.graph.nodes(data=True) if f"{d['module']}.".startswith("blocks.1.")}
    assert {"native_layer_norm_1", "addmm_2", "gelu_1", "add_1"} < inside and chosen.recomputed
    assert not inside & set(chosen.recomputed)


def test_a_view_stands_for_what_it_views() -> None:
    model = Wrap(lambda self, x: self.flat(self.layer(x).tanh()).exp(), layer=linear(), flat=nn.Flatten(0))
    for pattern in ("view", "flat", "aten.view"):
        chosen = plan(model, batch(), save=[pattern])
        assert [n.name for n in chosen.prepared.hinted] == ["tanh"]


def test_one_string_is_one_pattern() -> None:
    assert hinted(None, recompute="aten.gelu").recomputed == hinted(None, recompute=["aten.gelu"]).recomputed


def test_what_should_be_recomputed_is_without_a_budget() -> None:
    chosen = hinted(None, recompute=["aten.gelu", "aten.native_layer_norm"])
    assert set(decisions(chosen, "gelu", "native_layer_norm").values()) == {"recompute"}
    assert len(chosen.recomputed) == 6
    assert not {"gelu", "gelu_1", "native_layer_norm[0]"} & set(chosen.saved)
    assert chosen.status == "optimal" and chosen.bound == chosen.overhead > 0
    assert chosen.bound_family == AS_OFTEN
    assert chosen.peak_bytes < chosen.baseline_peak_bytes
    assert_same_step(chosen)


def test_what_should_be_recomputed_comes_first_under_a_budget() -> None:
    dear = Roofline(1e12, {"bytes": 1e11, "gelu.bytes": 1e10})  # a gelu, so that nobody would choose it
    free, chosen = hinted(0.8, dear), hinted(0.8, dear, recompute=["aten.gelu"])
    preferred = {"gelu", "gelu_1", "gelu_2"}
    assert not preferred & set(free.recomputed) and preferred <= set(chosen.recomputed)
    assert len(set(chosen.recomputed) - preferred) < len(free.recomputed)
    assert chosen.peak_bytes <= chosen.budget_bytes  # type: ignore[operator]
    assert_same_step(chosen)


def test_what_the_budget_has_no_room_to_recompute_is_kept_and_said() -> None:
    chosen = hinted(0.6, recompute=["aten.native_dropout"])  # what a dropout reads is larger than the mask it saves
    assert chosen.peak_bytes <= chosen.budget_bytes  # type: ignore[operator]
    assert "the budget leaves no room to recompute 2 of the 3 ops of the recompute hints" in chosen.notes
    told = chosen.explain("native_dropout_1")
    assert "The hint recompute='aten.native_dropout' prefers to drop it, but the budget leaves no room" in told


def test_hints_of_all_kinds_together() -> None:
    chosen = hinted(
        0.8, save=["blocks.0.norm"], never_recompute=["aten.addmm", "aten.add"], recompute=["blocks.*/aten.gelu"]
    )
    assert set(decisions(chosen, "addmm", "aten.add.").values()) <= {"save", "forward"}
    assert set(decisions(chosen, "gelu").values()) == {"recompute"}
    words = "note: hints: save='blocks.0.norm', never_recompute='aten.addmm', never_recompute='aten.add', recompute="
    assert words in repr(chosen) and "note: hints: save='blocks.0.norm'" in str(chosen)
    assert_same_step(chosen)


def test_random_hints_hold_and_change_no_bit() -> None:
    names = list(decisions(hinted(None), "aten"))
    for seed in range(4):
        drawn = random.Random(seed).sample(names, 10)
        chosen = hinted(0.9, save=drawn[:3], never_recompute=drawn[3:6], recompute=drawn[6:])
        assert not set(drawn[:6]) & set(chosen.recomputed) and set(drawn[6:]) & set(chosen.recomputed)
        assert_same_step(chosen)


def test_hints_are_in_force_for_other_shapes() -> None:
    chosen = hinted(None, recompute=["aten.gelu"], save=["blocks.0.up"])
    with pytest.warns(UserWarning, match="planning anew"):
        chosen.module(X[:100]).backward()
    names = [str(n.target) for n in chosen.module.backward_graph.graph.nodes]
    assert names.count("aten.gelu.default") == 3


def test_a_hint_that_another_shape_leaves_without_meaning_is_said() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).tanh()
            return y.exp() if x.shape[0] > 2 else y

    chosen = plan(Early(), torch.ones(4, 8), never_recompute=["aten.exp"])
    with (
        pytest.warns(UserWarning, match="planning anew"),
        pytest.warns(UserWarning, match=r"'aten.exp' matches no op .* The step planned for this call does without it"),
    ):
        squares(chosen.module(torch.ones(2, 8))).backward()


# What is told ---------------------------------------------------------------------------------------------------


def test_explain_names_the_hint() -> None:
    chosen = hinted(0.9, save=["blocks.0"], recompute=["blocks.1/aten.gelu"])
    assert "it may not run again (the hint save='blocks.0')" in chosen.explain("blocks.0.up")
    assert "The hint recompute='blocks.1/aten.gelu' prefers that." in chosen.explain("gelu_1")
    assert "hint" not in chosen.explain("blocks.2")


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"save": ["blocks.*.atn"]}, ["save='blocks.*.atn' matches no op of the step", "module path or glob"]),
        ({"save": ["blocks.0.dwn"]}, ["The nearest names are blocks.0.down"]),
        ({"never_recompute": ["aten.addm"]}, ["never_recompute='aten.addm'", "nearest names are aten.addmm"]),
        ({"recompute": ["blocks.0/aten.gleu"]}, ["nearest names are aten.gelu"]),
        ({"recompute": ["gelu_backward"]}, ["only ops of the backward, which run once anyhow. Name ops of the forw"]),
        ({"save": ["t"]}, ["matches only views of parameters and inputs, which are resident anyhow. Remove it."]),
        ({"save": 3}, ["save=3 is not a hint: it takes a sequence of non-empty strings"]),
        ({"recompute": ["aten.gelu", ""]}, ["recompute=['aten.gelu', ''] is not a hint"]),
        ({"save": {"aten.gelu"}}, ["is not a hint: it takes a sequence"]),
        (
            {"save": ["blocks.1"], "recompute": ["aten.gelu"]},
            ["save='blocks.1' and recompute='aten.gelu' contradict", "both match blocks.1/gelu_1", "Narrow one"],
        ),
    ],
)
def test_hints_that_cannot_be_meant(hints: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(HintError) as caught:
        hinted(None, **hints)
    for each in words:
        assert each in str(caught.value)
    assert caught.value.hint in hints


def test_what_may_not_run_again_cannot_be_preferred() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).topk(2).values

    with pytest.raises(HintError, match=r"recompute='aten.topk' asks for what may not run again: topk \(ties could"):
        plan(Routed(), torch.randn(4, 8), recompute=["aten.topk"])


def test_a_budget_that_hints_narrow_says_so() -> None:
    held = ["aten.addmm", "aten.gelu"]
    with pytest.raises(BudgetError) as caught:
        hinted(0.5, never_recompute=held)
    error = caught.value
    assert "The hints never_recompute=('aten.addmm', 'aten.gelu') keep 10 ops from being recomputed" in str(error)
    free = session().minimum().minimum_bytes
    assert f"without them the smallest budget known to work is {shown_minimum(free)}" in str(error)
    assert "Raise the budget, or loosen them" in str(error)
    assert error.minimum_bytes is not None and error.floor_bytes is not None
    assert plan(Net(), X, error.minimum_mb, solver="greedy", never_recompute=held).overhead > 0
    named = minimum_budget(Net(), X, time_limit=5, progress=False, never_recompute=held)
    assert named == (error.minimum_mb, error.floor_mb)


def test_a_preference_never_narrows_what_fits() -> None:
    smallest = session().minimum().minimum_bytes
    share = (smallest - session().problem.static_bytes + 0.5) / (
        session().plain_peak_bytes - session().problem.static_bytes
    )
    for pattern in ("aten.addmm", "blocks.0", "*"):
        chosen = hinted(share, recompute=[pattern])
        assert chosen.budget_bytes == smallest and chosen.peak_bytes <= smallest


def test_a_preference_that_takes_all_the_time_leaves_some_for_the_plain_question() -> None:
    smallest = session().minimum().minimum_bytes
    with pytest.raises(BudgetError):
        plan(Net(), X, smallest / MIB * 0.9, recompute=["*"], time_limit=1e-4)


# What is proved -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_holds_for_the_family_it_names(seed: int) -> None:
    """What others than the preferred ops must cost is found by brute force over all schedules."""
    problem = seeded_problem(seed, max_forward=5)
    free = [i for i, op in enumerate(problem.ops) if op.recomputable]
    preferred = tuple(sorted(random.Random(seed).sample(free, len(free) // 2)))
    judged = brute_force(_free_of_charge(problem, preferred))
    plain = replay(problem, with_frees(problem, plain_order(problem))).peak_bytes
    options = Options(time_limit=5.0, gap=0.0, progress=False)
    for budget in sorted({judged.minimum_bytes, (judged.minimum_bytes + plain) // 2, plain}):
        found = solve_preferring(problem, preferred, budget, options, None)
        result = replay(problem, found.schedule)
        runs = computes(found.schedule)
        given = sum(problem.ops[i].cost * (runs.count(i) - 1) for i in preferred)
        least = judged.best(budget)
        assert result.peak_bytes <= budget and least is not None and found.bound is not None
        assert found.bound <= least + given <= result.added_cost


# Files and commands ---------------------------------------------------------------------------------------------


def test_hints_are_in_the_plan_file(tmp_path: Path) -> None:
    chosen = hinted(0.8, save=["blocks.0/gelu"], recompute=["blocks.1/aten.gelu"])
    path = chosen.save(tmp_path / "plan.json")
    assert read(path)["options"]["hints"] == {
        "save": ["blocks.0/gelu"], "never_recompute": [], "recompute": ["blocks.1/aten.gelu"]
    }  # fmt: skip
    loaded = Plan.load(path, Net(), X, progress=False)
    assert loaded.schedule == chosen.schedule
    assert "the hint save='blocks.0/gelu'" in loaded.explain("gelu")
    assert loaded.save(tmp_path / "again.json").read_bytes() == path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded.module(X[:100]).backward()
    again = [n.meta.get("recompute_of") for n in loaded.module.backward_graph.graph.nodes]
    assert "gelu_1" in again and "gelu" not in again


@pytest.mark.parametrize("hints", [{}, {"save": "x", "never_recompute": [], "recompute": []}, {"save": [1]}, []])
def test_damaged_hints_are_named(hints: Any, tmp_path: Path) -> None:
    path = hinted(None, save=["gelu"]).save(tmp_path / "plan.json")
    data = dict(read(path).data)
    data["options"] = {**data["options"], "hints": hints}
    data["checksum"] = _checksum(data)
    path.write_text(render(data))
    with pytest.raises(PlanFileError) as caught:
        read(path)
    assert caught.value.field.startswith("options.hints")


def test_the_command_line_takes_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "hinted_model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def small():\n"
        "    torch.manual_seed(0)\n"
        "    layers = [l for _ in range(3) for l in (nn.Linear(32, 32), nn.GELU())]\n"
        "    return nn.Sequential(*layers), torch.randn(64, 32)\n"
    )
    monkeypatch.chdir(tmp_path)
    hints = ["--recompute", "aten.gelu", "--save", "0"]
    command = ["checkpoint-planner", "plan", "hinted_model.py:small", "--budget", "100%", "--out", "p.json", *hints]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err
    assert read("p.json")["options"]["hints"] == {"save": ["0"], "never_recompute": [], "recompute": ["aten.gelu"]}
    command = ["checkpoint-planner", "min-budget", "hinted_model.py:small", "--never-recompute", "aten.gel"]
    monkeypatch.setattr("sys.argv", command)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "matches no op of the step. The nearest names are aten.gelu" in capsys.readouterr().err


def test_a_frontier_takes_hints() -> None:
    free, held = (
        frontier(Net(), X, 3, solver="greedy", time_limit=2, progress=False, never_recompute=h)
        for h in ([], ["aten.addmm", "aten.gelu"])
    )
    assert held.minimum_bytes > free.minimum_bytes and held.plain_peak_bytes == free.plain_peak_bytes


def test_no_hints_change_nothing(tmp_path: Path) -> None:
    x = torch.randn(8, 32)
    first, second = plan(mlp(), x), auto_checkpoint(mlp(), x, progress=False, save=(), never_recompute=[], recompute=())
    assert first.save(tmp_path / "a").read_bytes() == second.save(tmp_path / "b").read_bytes()
