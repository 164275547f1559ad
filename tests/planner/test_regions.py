"""Regions: submodules planned under one budget, the code between them in eager and measured."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.lower import UPDATE
from passes.memory import measure_peak
from planner import CaptureError, Plan, PlannerError, RegionError, auto_checkpoint
from planner.regions import prepare, settle
from planner.regions.glue import Event, GlueOp, _ops
from planner.regions.hollow import Edge
from planner.regions.sample import Sample
from planner.session import open_session
from tests.planner.steps import Block, SmallGPT, assert_same_gradients, assert_same_state
from tests.zoo.compare import differences, run_step

SHARES = (1.0, 0.6, 0.1)


def planned_at(model: nn.Module, sample: Any, share: float, **options: Any) -> Plan:
    """A plan at that share of the way from the minimum to the plain peak."""
    options = {"solver": "greedy", "time_limit": 3, "progress": False, "check": False, **options}
    session = open_session(model, sample, **options)
    low, high = session.minimum().minimum_bytes, session.plain_peak_bytes
    return session.plan(low + int((high - low) * share))


def assert_equal_and_exact(
    plan: Plan, plain: nn.Module, run: Callable[[nn.Module], Any], *, above: int | None = None
) -> None:
    """One step of both from equal state: the same bits, and the predicted peak to the byte."""
    model = plan.module._plan_state.model
    kept: list[Any] = []

    def seeded(module: nn.Module) -> Any:
        torch.manual_seed(7)
        return run(module)

    wanted = seeded(plain)
    measured = measure_peak(lambda: kept.append(seeded(plan.module)))
    for got, expected in zip(kept, [wanted], strict=True):
        assert torch.equal(got, expected)
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)
    static = plan.static_bytes if above is None else above
    assert static + measured == plan.peak_bytes
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    assert all("forward" not in module.__dict__ for module in model.modules())


def loss_inside(x: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    def run(module: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = module(x)
        loss.backward()
        return loss

    return run


def small_gpt(layers: int = 3, vocabulary: int = 64) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return SmallGPT(layers=layers, vocabulary=vocabulary), torch.randint(0, 64, (2, 16))


def test_what_is_between_regions_is_counted_in_the_run_that_captures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_gpt()
    found, counted = [], 0
    for again in (False, True):
        with monkeypatch.context() as patch:
            run = Sample.run

            def noted(self: Sample, candidates: Any, parts: Any, counting: Any = None, run: Any = run) -> Any:
                nonlocal counted
                counted += counting is not None
                return run(self, candidates, parts, counting)

            patch.setattr(Sample, "run", noted)
            if again:
                patch.setattr(prepare, "settled_run", lambda *given: (settle.settled_run(*given)[0], None))
            session = open_session(model, x, regions="blocks.*", progress=False)
            assert session.prepared.regions is not None
            found.append(session.prepared.regions.glue_cost)
    assert counted == 1 + 2
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("share", SHARES)
def test_blocks_under_one_budget(share: float) -> None:
    model, x = small_gpt()
    plan = planned_at(model, x, share, regions="blocks.*")
    assert [run.path for run in plan.runs] == ["blocks.0", "blocks.1", "blocks.2"]
    assert bool(plan.recomputed) is (share < 1)
    plain = copy.deepcopy(model)
    for _ in range(2):  # the second step finds gradients gone, and everything else as it was
        model.zero_grad()
        plain.zero_grad()
        assert_equal_and_exact(plan, plain, loss_inside(x))


@pytest.mark.parametrize("share", SHARES)
def test_blocks_under_autocast(share: float) -> None:
    model, x = small_gpt()

    def run(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = module(x)
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        plan = planned_at(model, x, share, regions="blocks.*")
    assert_equal_and_exact(plan, copy.deepcopy(model), run)


def test_equal_regions_are_captured_once() -> None:
    model, x = small_gpt()
    regions = open_session(model, x, regions="blocks.*", progress=False).prepared.regions
    assert regions is not None
    assert len(regions.prepared) == 3
    assert len({id(own) for own in regions.prepared}) == 1


def test_the_loss_outside() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(32, 2, 0.1) for _ in range(3))), torch.randn(2, 16, 32)
    plan = planned_at(model, x, 0.4, regions=["?"])

    def run(module: nn.Module) -> torch.Tensor:
        output: torch.Tensor = module(x)
        output.backward(torch.ones_like(output))
        return output

    assert_equal_and_exact(plan, copy.deepcopy(model), run)


def test_a_loss_function() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(32, 2, 0.1) for _ in range(3))), torch.randn(2, 16, 32)
    plan = planned_at(model, {"input": x}, 0.4, regions=["?"], loss_fn=lambda y: y.square().mean())
    torch.manual_seed(7)
    wanted = copy.deepcopy(model)
    loss = wanted(x).square().mean()
    loss.backward()
    torch.manual_seed(7)
    got = plan.module(x)
    got.backward()
    assert torch.equal(got, loss)
    assert_same_gradients(model, wanted)


class Stack(nn.Module):
    """Blocks with something between them that stops a trace of the whole."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.inner = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block(32, 2, 0.1) for _ in range(4))
        self.head, self.between = nn.Linear(32, 50), between
        self.seen: list[float] = []
        if between == "a hook":
            self.layers[1].register_forward_hook(lambda m, a, out: self.seen.append(float(out.detach().mean())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        lengths = h.detach().abs().sum((1, 2)).tolist() if self.between == "a list" else [1]
        for layer in self.layers:
            if self.between == "layer drop" and torch.rand([]) < 0.3:
                continue
            h = layer(h)
        if self.between == "isfinite" and not math.isfinite(h.detach().sum()):
            h = torch.nan_to_num(h)
        if self.between == "twice":
            h = self.layers[0](h) * float(h.detach().sum().isfinite())
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten()) * (1 if lengths[0] >= 0 else 2)


@pytest.mark.parametrize("between", ["a list", "isfinite", "a hook", "twice"])
def test_auto_goes_around_what_cannot_be_traced(between: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(between), torch.randint(0, 50, (2, 16))
    plan = planned_at(model, x, 0.3)
    assert [run.path for run in plan.runs] == [f"layers.{i}" for i in range(4)] + ["layers.0"] * (between == "twice")
    assert [run.number for run in plan.runs][-1] == (between == "twice")
    assert any("cannot be planned as a whole" in note for note in plan.notes)
    model.seen.clear()
    assert_equal_and_exact(plan, copy.deepcopy(model), loss_inside(x))
    assert len(model.seen) == 2 * (between == "a hook")  # once in each of the two steps: a copy has the same hook


def test_layer_drop_takes_its_course() -> None:
    torch.manual_seed(0)
    model, x = Stack("layer drop"), torch.randint(0, 50, (2, 16))
    plan, plain = planned_at(model, x, 0.3), copy.deepcopy(model)
    for seed in range(4):
        for module in (model, plain):
            module.zero_grad()
        torch.manual_seed(seed)
        wanted = loss_inside(x)(plain)
        torch.manual_seed(seed)
        assert torch.equal(loss_inside(x)(plan.module), wanted)
        assert_same_gradients(model, plain)


def test_auto_takes_the_whole_where_it_can() -> None:
    model, x = small_gpt()
    plan = auto_checkpoint(model, x, progress=False, check=False)
    assert plan.runs == ()
    assert plan.regions == ()


def test_what_stays_eager_is_told() -> None:
    torch.manual_seed(0)
    plan = planned_at(Stack("a list"), torch.randint(0, 50, (2, 16)), 0.3)
    rows = {row.path: row for row in plan.regions}
    assert "tolist" in rows[""].eager
    assert sum(row.memory_share for row in plan.regions) == pytest.approx(1)
    assert sum(row.recompute for row in plan.regions) == pytest.approx(plan.overhead)


def frozen_below(model: nn.Module, trained: int) -> None:
    """Train the last blocks and what comes after them alone."""
    model.requires_grad_(False)
    for part in (*list(model.blocks)[len(model.blocks) - trained :], model.norm, model.head):
        part.requires_grad_(True)


def trained_step(plan: Plan, plain: nn.Module, x: torch.Tensor, trained: int) -> list[str]:
    """One step of both with that many blocks trained, which has equal gradients; what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module, owner in ((plan.module, plan.module._plan_state.model), (plain, plain)):
            frozen_below(owner, trained)
            owner.zero_grad()
            torch.manual_seed(trained)
            module(x).backward()
    assert_same_gradients(plan.module._plan_state.model, plain)
    return [str(w.message) for w in caught]


def untied_gpt() -> tuple[nn.Module, torch.Tensor]:
    model, x = small_gpt(4)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, x


def test_blocks_before_which_all_is_frozen_stay_eager() -> None:
    model, x = untied_gpt()
    frozen_below(model, 2)
    plan, plain = planned_at(model, x, 0.4, regions="blocks.*"), copy.deepcopy(model)
    assert [run.path for run in plan.runs] == ["blocks.2", "blocks.3"]
    assert [r.eager for r in plan.regions if r.path == "blocks.0"] == ["nothing that it reads requires a gradient"]
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        assert_equal_and_exact(plan, plain, loss_inside(x))


def test_a_call_with_nothing_to_plan_runs_in_eager_until_something_is_trained() -> None:
    model, x = untied_gpt()
    plan, plain = planned_at(model, x, 0.5, regions="blocks.*"), copy.deepcopy(model)
    told = [" ".join(trained_step(plan, plain, x[:1], trained)) for trained in (0, 0, 2, 2)]
    assert "nothing that it reads requires a gradient" in told[0] and "planning anew" in told[2]
    assert told[1] == told[3] == ""


def test_what_is_frozen_or_no_longer_is_planned_for() -> None:
    model, x = untied_gpt()
    plan, plain = planned_at(model, x, 0.5, regions="blocks.*"), copy.deepcopy(model)
    told = [[t.split(":")[0] for t in trained_step(plan, plain, x, trained)] for trained in (4, 2, 3, 2, 3)]
    assert told == [["planning anew"]] * 3 + [[], []]  # the embedding is frozen from the first step on


def test_accumulated_gradients() -> None:
    model, x = small_gpt()
    plan = planned_at(model, x, 0.5, regions="blocks.*", gradients="accumulated")
    plain = copy.deepcopy(model)
    for module in (model, plain):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    assert_equal_and_exact(plan, plain, loss_inside(x))


def test_an_optimizer_that_holds_something_for_a_moment() -> None:
    model, x = SmallGPT(layers=3, vocabulary=64), torch.randint(0, 64, (16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    plan = planned_at(model, x, 0.5, regions="blocks.*", optimizer=optimizer)
    assert plan.problem.ops[-1].name == UPDATE and plan.overhead > 0
    assert_equal_and_exact(plan, copy.deepcopy(model), loss_inside(x))


def test_what_regions_return_is_not_recomputed_though_a_hint_names_it() -> None:
    model, x = small_gpt()
    free, hinted = (planned_at(model, x, 0.9, regions="blocks.*", recompute=r) for r in ((), ("blocks.*",)))
    assert hinted.overhead > free.overhead
    assert differences(run_step(model, model, (x,)), run_step(hinted.module, model, (x,))) == []


def test_a_large_cross_entropy_is_a_region() -> None:
    before = F.cross_entropy
    model, x = small_gpt(vocabulary=10_000)
    plan = planned_at(model, x, 0.5, regions="blocks.*")
    assert [run.path for run in plan.runs] == ["blocks.0", "blocks.1", "blocks.2", "cross_entropy()"]
    assert_equal_and_exact(plan, copy.deepcopy(model), loss_inside(x))
    assert F.cross_entropy is before


def test_another_batch_and_eval() -> None:
    model, x = small_gpt()
    plan, plain = planned_at(model, x, 0.5, regions="blocks.*"), copy.deepcopy(model)
    other = x[:1]
    torch.manual_seed(7)
    with pytest.warns(UserWarning, match="planning anew"):
        loss_inside(other)(plan.module)
    torch.manual_seed(7)
    loss_inside(other)(plain)
    assert_same_gradients(model, plain)
    plan.module.eval()
    plain.eval()
    assert torch.equal(plan.module(x), plain(x))


def test_applied_to_the_model_itself() -> None:
    model, x = small_gpt()
    plan, plain = planned_at(model, x, 0.3, regions="blocks.*"), copy.deepcopy(model)
    keys = list(model.state_dict())
    plan.apply(model)
    torch.manual_seed(7)
    wanted = loss_inside(x)(plain)
    torch.manual_seed(7)
    assert torch.equal(loss_inside(x)(model), wanted)
    assert_same_gradients(model, plain)
    assert list(model.state_dict()) == keys
    assert plan.remove() is model
    with pytest.raises(PlannerError, match=r"a plan by regions is applied to the model that was planned.*Plan\.load"):
        plan.apply(plain)


def test_the_check_runs_over_regions() -> None:
    model, x = small_gpt(layers=2)
    plan = planned_at(model, x, 0.3, regions="blocks.*", check=True)
    assert plan.checked.steps == 2


class Cells(nn.Module):
    """A cell called as often as a tensor says, of a type whose values a trace does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for step in range(int(count)):
            h = self.cell(x[step], h)
        return self.head(h).mean()


def test_a_cell_in_a_loop_is_a_region() -> None:
    model = Cells()
    arguments = (torch.randn(6, 32, 16), torch.tensor(5.0))
    plain = copy.deepcopy(model)

    def run(module: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = module(*arguments)
        loss.backward()
        return loss

    plan = planned_at(model, arguments, 0.3)
    assert [r.path for r in plan.regions if r.runs] == ["cell"] and plan.recomputed
    assert_equal_and_exact(plan, plain, run)


class Carries(nn.Module):
    """A language model trained by truncated backpropagation: what it carries from step to step is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(32, 64)
        self.recurrent, self.norm = nn.LSTM(16, 32, 2, batch_first=True, dropout=0.2), nn.LayerNorm(32)
        self.state: Any = None
        self.steps = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1  # a number that decides what is computed: refused as a whole
        found, state = self.recurrent(self.embedding(tokens), self.state)
        self.state = tuple(t.detach() for t in state)
        logits = self.head(self.norm(found)) * min(1.0, self.steps / 1)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("share", [0, 0.4])
def test_a_layer_is_a_region_where_nothing_larger_is(share: float) -> None:
    torch.manual_seed(0)
    model, tokens = Carries(), torch.randint(0, 64, (4, 32))
    plain = copy.deepcopy(model)
    plan = planned_at(model, tokens, share)
    assert [r.path for r in plan.regions if r.runs] == ["recurrent"] and plan.recomputed
    assert_equal_and_exact(plan, plain, loss_inside(tokens))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for seed, rows in enumerate((4, 4, 2, 4)):  # the carried state makes another call of it
        tokens = torch.randint(0, 64, (rows, 32))
        for module, each, optimizer in zip((plan.module, plain), (model, plain), optimizers, strict=True):
            each.state = each.state if rows == 4 and seed < 2 else None
            optimizer.zero_grad()
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss_inside(tokens)(module)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()


def test_a_plan_of_layers_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Carries(), torch.randint(0, 64, (4, 32))
    plain = copy.deepcopy(model)
    planned_at(copy.deepcopy(model), tokens, 0).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json", model, tokens)
    assert [r.path for r in plan.regions if r.runs] == ["recurrent"] and plan.recomputed
    assert_equal_and_exact(plan, plain, loss_inside(tokens))


class OneOpAtATime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y[y > 0].sum()


def test_a_refusal_says_that_regions_were_tried() -> None:
    with pytest.raises(CaptureError, match="depends on data.*no submodules with several ops.*Move what can be traced"):
        auto_checkpoint(OneOpAtATime(), torch.randn(4, 8), progress=False)


class ReturnsViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.second(self.first(x).relu())
        return x[:, :4], y[:, 4:], y


class AsksAboutViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(8, 8), ReturnsViews()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right, y = self.block(self.layer(x))
        return (left * right + y.sum()).sum() if math.isfinite(y.detach().sum()) else left.sum()


def test_a_refusal_says_why_submodules_are_not_regions() -> None:
    why = r"No region .* block: view of an input .* at output \[0\].*clone\(\) of it\.$"
    with pytest.raises(CaptureError, match=why):
        auto_checkpoint(AsksAboutViews(), torch.randn(4, 8), progress=False)


def test_patterns_that_name_nothing() -> None:
    model, x = small_gpt()
    with pytest.raises(RegionError, match=r"'block\.\*' matches no submodule"):
        auto_checkpoint(model, x, regions="block.*", progress=False)


def test_a_pattern_that_names_a_list_names_its_members() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum()

    plan = auto_checkpoint(Lists(), torch.randn(4, 8), regions="blocks", progress=False)
    assert [region.path for region in plan.regions][:-1] == ["blocks.0", "blocks.1", "blocks.2"]


# Glue -----------------------------------------------------------------------------------------------------------------


def naive(events: Sequence[Event]) -> tuple[int, int]:
    """Highest point and end of a stretch, storages that cross edges being held until glue drops them."""
    level = peak = 0
    for event in events:
        level += event.size
        peak = max(peak, level)
    return peak, level


def told(ops: Sequence[GlueOp], sizes: dict[Edge, int]) -> tuple[int, int]:
    """The same of the ops that stand for it, by the rules of a Problem: outputs and workspace beside all inputs."""
    level = peak = 0
    for op in ops:
        assert op.workspace >= 0
        made = sum(sizes[e] for e in op.made) + op.kept_bytes
        peak = max(peak, level + made + op.workspace)
        level += made - op.released_bytes - sum(sizes[e] for e in op.dropped)
    return peak, level


class Encoder(nn.Module):
    """Not to be traced, in a model that is not either."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Block(16, 2, 0.0)]), nn.ModuleList([Block(16, 2, 0.0)])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (layer,) in self.layers:
            x = layer(x) if math.isfinite(x.detach().sum()) else x
        return x


def test_nothing_is_kept_of_what_is_in_a_refused_region_while_regions_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the plain step does not fit, a run that keeps all of a refused region would not either."""
    runs: list[list[str]] = []
    run = Sample._run

    def noted(*args: Any) -> Any:
        hollow = run(*args)
        runs.append([r.path for r in hollow.runs])
        return hollow

    monkeypatch.setattr(Sample, "_run", noted)
    model = nn.Sequential(Encoder(), nn.Linear(16, 1))
    auto_checkpoint(model, torch.randn(4, 8, 16), budget_mb="80%", progress=False, check=False, time_limit=1)
    assert runs[0] == runs[-1] == ["0.layers.0.0", "0.layers.1.0"]


def test_glue_ops_are_exact() -> None:
    rng = random.Random(0)
    for _ in range(300):
        edges = [Edge(64 * rng.randint(1, 9)) for _ in range(3)]
        sizes = {e: e.size for e in edges}
        held, born, events = list(edges[:2]), edges[2:], []
        for _ in range(rng.randint(1, 14)):
            kind = rng.random()
            if kind < 0.1 and held:
                edge = held.pop()
                events.append(Event(-edge.size, edge=edge))
            elif kind < 0.2 and born:
                edge = born.pop()
                events.append(Event(edge.size, edge=edge))
            else:
                events.append(Event(64 * rng.randint(-6, 6)))
        assert told(_ops(events, 64), sizes) == naive(events)


class Wide(nn.Module):
    """Its backward is where the peak is, and reads a copy of its second input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, 1, 64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scaled = (y * 2).sin()
        return (self.weight * (x * scaled).unsqueeze(0)).exp().sum(0).mean(1)


class FromAbove(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.region = nn.Linear(64, 64), Wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.region(self.inner(x) + 1, self.inner(x) * 3)
        return h.square().mean()


def test_an_input_that_the_backward_does_not_read_goes_as_it_begins() -> None:
    torch.manual_seed(0)
    model, x = FromAbove(), torch.randn(32, 64, 64)
    plan = planned_at(model, x, 1.0, regions="region")
    assert_equal_and_exact(plan, copy.deepcopy(model), loss_inside(x))


class Masking(nn.Module):
    """Between its blocks there are masks of all sizes that the marks of a hollow run would take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(32, 2, 0.1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            masks = [torch.ones(size, dtype=torch.bool) for size in range(7 + 64 * i, 1000, 64)]
            x = layer(x) * float(all(mask.all() for mask in masks))
        return x.square().mean()


def test_masks_are_not_taken_for_marks() -> None:
    torch.manual_seed(0)
    model, x = Masking(), torch.randn(2, 16, 32)
    plan = planned_at(model, x, 0.3, regions="layers.*")
    assert [run.path for run in plan.runs] == ["layers.0", "layers.1", "layers.2"]
    assert_equal_and_exact(plan, copy.deepcopy(model), loss_inside(x))


def without_data(layers: int = 3) -> nn.Module:
    with torch.device("meta"):
        return SmallGPT(layers=layers, vocabulary=64)


def test_regions_without_data(tmp_path: Any) -> None:
    """On the meta device the step is that of the true model except for what kernels need for a moment."""
    model, x = small_gpt()
    options: dict[str, Any] = {"regions": "blocks.*", "progress": False, "solver": "greedy", "check": False}
    real, imagined = (open_session(m, x, **options) for m in (model, without_data()))
    assert imagined.plain_peak_bytes == real.plain_peak_bytes
    assert imagined.problem.tensors == real.problem.tensors
    without_workspace = [[replace(op, workspace=0) for op in s.problem.ops] for s in (real, imagined)]
    assert without_workspace[0] == without_workspace[1]
    low = imagined.minimum().minimum_bytes
    plan = imagined.plan(low + (imagined.plain_peak_bytes - low) // 2)
    assert plan.recomputed
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", model, x)
    assert [run.path for run in loaded.runs] == ["blocks.0", "blocks.1", "blocks.2"]
    assert loaded.check(model, x).steps
    with pytest.raises(PlannerError, match="on the meta device, so there is no data"):
        plan.module(x)


def test_regions_without_data_for_another_device() -> None:
    _, x = small_gpt()
    options: dict[str, Any] = {"progress": False, "solver": "greedy", "check": False, "device": "h100"}
    whole, parts = (open_session(without_data(), x, regions=r, **options) for r in ("whole", "blocks.*"))
    assert parts.problem.static_bytes == whole.problem.static_bytes
    assert parts.plain_peak_bytes == whole.plain_peak_bytes


def test_many_equal_regions_without_data_are_captured_once() -> None:
    _, x = small_gpt()
    regions = open_session(without_data(40), x, regions="blocks.*", progress=False).prepared.regions
    assert regions is not None
    assert len(regions.prepared) == 40
    assert len({id(own) for own in regions.prepared}) == 1


def test_code_between_regions_that_needs_data() -> None:
    with torch.device("meta"):
        model = Stack("isfinite")
    with pytest.raises(RegionError, match=r"does not run without data at .*test_regions.py"):
        open_session(model, torch.randint(0, 50, (2, 16)), regions="layers.*", progress=False)


class Outside(nn.Module):
    """Two outputs, in another layout than their gradients come in; blocks, if any, cannot be traced as a whole."""

    def __init__(self, drop: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        self.blocks, self.drop = nn.ModuleList(Block(32, 2, 0.1) for _ in range(blocks)), drop
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(32, 24), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        for block in self.blocks:
            x = x if torch.rand([]) < self.drop else block(x)
        return [head(x).transpose(1, 2) for head in self.heads]


def outside_loss(outputs: list[torch.Tensor], which: Sequence[int] = (0, 1)) -> torch.Tensor:
    return torch.stack([outputs[i].pow(2).mean() for i in which]).sum()


def assert_learned(
    plan: Plan, model: nn.Module, plain: nn.Module, step: Callable[[int, nn.Module], Any], quiet_from: int
) -> None:
    """The plain model's gradients in every step, and from one on nothing to say of it."""
    for i in range(quiet_from + 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for module, owner in ((plan.module, model), (plain, plain)):
                owner.zero_grad()
                torch.manual_seed(i)
                step(i, module)
        assert_same_gradients(model, plain)
        assert i < quiet_from or not caught, [str(w.message) for w in caught]


@pytest.mark.every(3)
@pytest.mark.parametrize(("courses", "quiet_from"), [([(0, 1)], 3), ([(1,)], 3), ([(0,), (1,)], 7)])
def test_other_starts_of_a_backward_are_learned(courses: list[tuple[int, ...]], quiet_from: int) -> None:
    torch.manual_seed(0)
    model, x = Outside(), torch.randn(2, 16, 32)
    plan, plain = planned_at(model, x, 0.5), copy.deepcopy(model)
    assert plan.runs

    def step(i: int, module: nn.Module) -> None:
        outside_loss(module(x), courses[i % len(courses)]).backward()

    assert_learned(plan, model, plain, step, quiet_from)


def test_planning_anew_takes_the_course_of_the_sample() -> None:
    torch.manual_seed(0)
    model, x = Outside(drop=0.5), torch.randn(2, 16, 32)
    plan = planned_at(model, x, 0.0)
    first = [run.path for run in plan.runs]
    for seed in range(4):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outside_loss(plan.module(x)).backward()
    latest = plan.module._plan_state.latest
    assert latest is not plan.prepared and [run.path for run in latest.runs] == first


def test_a_backward_under_autocast_is_learned() -> None:
    torch.manual_seed(0)
    model, x = Outside(), torch.randn(2, 16, 32)
    plan, plain = planned_at(model, x, 0.5, loss_fn=outside_loss), copy.deepcopy(model)

    def step(_: int, module: nn.Module) -> None:
        out = module(x)
        loss = outside_loss(out) if module is plain else out
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()

    assert_learned(plan, model, plain, step, 3)


@pytest.mark.parametrize(
    ("regions", "autocast"),
    [pytest.param("auto", False, marks=pytest.mark.slow), pytest.param("auto", True, marks=pytest.mark.slow),
     ("whole", False), ("whole", True)],
)
def test_what_one_plan_of_a_step_learned_others_learn_too(regions: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = Outside(blocks=4 if regions == "auto" else 0), torch.randn(2, 16, 32)
    session, plain = open_session(model, x, regions=regions, progress=False), copy.deepcopy(model)

    def step(_: int, module: nn.Module) -> None:
        loss = outside_loss(module(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss.backward()

    for plan in [session.plan(None), session.plan(None)]:
        assert_learned(plan, model, plain, step, 4)


class Averaging(nn.Module):
    """A part that reads a buffer and then overwrites it with what it has seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("mean", torch.linspace(-1, 1, 64 * width).view(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x + self.second(torch.tanh(self.first(x) ** 2)) * self.mean.clone()
        self.mean.lerp_(x.detach(), 0.1)
        return result


def test_buffers_that_regions_overwrite() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Averaging(16) for _ in range(3))), torch.randn(64, 16)
    plan, plain = planned_at(model, x, 0.1, regions=["?"]), copy.deepcopy(model)

    def run(module: nn.Module) -> torch.Tensor:
        output: torch.Tensor = module(x)
        output.backward(torch.ones_like(output))
        return output

    assert len(plan.runs) == 3
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        assert_equal_and_exact(plan, plain, run)
    for i in range(4):  # gradients in other strides than planned for: a replay starts from the old values
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in (plan.module, plain):
                module(x).backward(torch.randn(16, 64, generator=torch.Generator().manual_seed(i)).t())
        assert_same_gradients(model, plain)
        assert_same_state(model, plain)


class Speaks(nn.Module):
    """Blocks, and logits that are much of what a step holds, capped or not; returns them next to the loss."""

    def __init__(self, cap: float | None = None) -> None:
        super().__init__()
        self.cap = cap
        self.embedding, self.head = nn.Embedding(9000, 32), nn.Linear(32, 9000)
        self.blocks = nn.ModuleList(Block(32, 2, 0.1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h) if self.cap is None else torch.tanh(self.head(h) / self.cap) * self.cap
        return {"loss": F.cross_entropy(logits.view(-1, 9000), x.flatten()), "logits": logits}


@pytest.mark.every(3)
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("regions", ["blocks.*", "whole"])
def test_logits_that_nobody_holds_become_their_gradient(regions: str, cap: float | None) -> None:
    torch.manual_seed(0)
    model, x = Speaks(cap), torch.randint(0, 9000, (2, 24))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"keep_outputs": False, "progress": False, "check": False}
    plan = open_session(model, x, regions=regions, **options).plan(None)
    [written] = [op for op in plan.problem.ops if op.name.startswith("cross_entropy_logits_backward")]
    assert written.reuse

    def loss(module: nn.Module) -> torch.Tensor:
        found: torch.Tensor = module(x)["loss"]
        found.backward()
        return found

    assert_equal_and_exact(plan, plain, loss)
    for owner in (model, plain):
        owner.zero_grad()
    torch.manual_seed(3)
    held = plan.module(x)
    before = held["logits"].clone()
    held["loss"].backward()  # whoever holds them keeps them
    assert torch.equal(held["logits"], before)
    torch.manual_seed(3)
    plain(x)["loss"].backward()
    assert_same_gradients(model, plain)
