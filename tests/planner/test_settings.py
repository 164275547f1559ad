"""What forward sets as attributes of the model: a planned step sets it as the plain one does."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import types
import warnings
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from passes.errors import Unsupported
from passes.trace.structure import flatten
from planner import Plan, PlannerError, RegionError, auto_checkpoint
from tests.zoo.compare import measured_peak_bytes

from .steps import assert_same_gradients, twins


class Counted(nn.Module):
    """Sets plain values that code around it reads, and reads one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows, self.shape, self.seen = nn.Linear(8, 8), 0, None, "nothing"
        self.calls, self.left = 0, 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.left -= len(x)
        self.rows, self.shape, self.seen = len(x), x.shape, ("a batch", x.dtype, True)
        return torch.tanh(self.layer(x)) / self.rows


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counted() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * block.rows
        self.last = self.blocks[0].rows * 2
        return x


def attributes(model: nn.Module) -> list[Any]:
    return [{n: v for n, v in vars(m).items() if not n.startswith("_")} for m in model.modules()]


def forget(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Counted):
            module.rows, module.shape, module.seen = -1, None, ""


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore:planning anew", "ignore:.*calls were planned anew", "ignore:backward started")
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("regions", ["whole", "blocks.*"])
def test_plain_values_are_set_in_each_step(regions: str, stale: bool) -> None:
    model, plain = twins(Net())
    for each in (model, plain) if stale else ():
        each(torch.randn(4, 8))
    plan = auto_checkpoint(model, torch.randn(4, 8), budget_mb=None, regions=regions)
    assert regions == "whole" or [r.path for r in plan.regions][:3] == ["blocks.0", "blocks.1", "blocks.2"]
    assert not any("will not set" in note for note in plan.notes)
    for rows in (4, 4, 3, 5, 6, 7, 4, 1):  # from the fourth on from symbols
        x = torch.randn(rows, 8)
        for each in (model, plain):
            forget(each)
            each.zero_grad()
        outputs = [run(x) for run in (plan.module, plain)]
        assert torch.equal(*outputs) and attributes(model) == attributes(plain)
        for output in outputs:
            output.sum().backward()
        assert_same_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:backward started", "ignore:planning anew", "ignore:this step holds")
def test_a_replay_leaves_what_was_set_since() -> None:
    model = Net()
    plan = auto_checkpoint(model, torch.randn(4, 8), budget_mb=None)
    first = plan.module(torch.randn(4, 8))
    plan.module(torch.randn(2, 8))
    first.t().contiguous().t().backward(torch.randn(8, 4).t())
    assert model.blocks[1].rows == 2 and model.last == 4
    assert all(block.calls == 2 and block.left == 994 for block in model.blocks)


def test_what_forward_counts_elsewhere_needs_no_plan_of_its_own() -> None:
    """A block that runs twice; what an evaluation adds; what a checkpoint would add again is said."""

    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    model, x = Twice(), torch.randn(4, 8)
    plan = auto_checkpoint(model, x, budget_mb=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            model.zero_grad()
            plan.module(x).pow(2).sum().backward()
            assert all(block.calls == 4 * step + 2 for block in model.blocks)
            model.eval()(x)
            model.train()
    assert len(plan.module._plan_state.cache) == 1

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    with pytest.warns(UserWarning, match=r"forward sets self\.blocks\.0\.calls, .* will not set that"):
        auto_checkpoint(Checkpointed(), x, budget_mb=None)


def test_a_value_of_its_own_in_each_run_is_said() -> None:
    class Tagged(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.tag = hash(object.__new__(Counted)) + hash(x)
            return super().forward(x)

    with pytest.warns(UserWarning, match=r"forward sets self\.tag; .* will not set that"):
        plan = auto_checkpoint(Tagged(), torch.randn(4, 8), budget_mb=None)
    plan.module(torch.randn(4, 8))
    assert not hasattr(plan.module, "tag") and plan.module.rows == 4


def test_an_export_says_what_it_does_not_set(tmp_path: Path) -> None:
    plan = auto_checkpoint(Counted(), torch.randn(4, 8), budget_mb=None)
    with pytest.warns(UserWarning, match=r"forward sets self\.rows, .*which an export"):
        plan.export(tmp_path / "exported")


class Weighted:
    """A loss function that remembers how many rows it saw."""

    rows = 0

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        self.rows = len(output)
        return output.pow(2).mean()


@pytest.mark.parametrize("rows", [0, 4])
def test_what_is_set_on_other_objects_is_said(rows: int) -> None:
    loss_fn = Weighted()
    loss_fn.rows = rows  # as after a step that was not planned
    with pytest.warns(UserWarning, match=r"forward sets loss_fn\.rows; .* will not set that") as said:
        auto_checkpoint(nn.Linear(8, 8), torch.randn(4, 8), budget_mb=None, loss_fn=loss_fn)
    assert len(said) == 1 and loss_fn.rows == rows


class Collector:
    """As transformers keeps one of outputs while forward runs."""

    def __init__(self) -> None:
        self.now: dict[str, Any] | None = None


COLLECTOR = Collector()


@pytest.mark.parametrize("filled", [True, False])
def test_what_forward_clears_again_is_not_said(filled: bool) -> None:
    class Collects(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if filled:
                COLLECTOR.now = {}
            output = super().forward(input)
            COLLECTOR.now = None
            return output

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        auto_checkpoint(Collects(8, 8), torch.randn(4, 8), budget_mb=None)
    assert len(said) == (not filled) and all(".now; the planned step" in str(each.message) for each in said)


def test_the_class_of_a_tensor_is_not_set() -> None:
    class Names(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.name = type(x).__name__
            return super().forward(x)

    with pytest.warns(UserWarning, match=r"forward sets self\.name; .* will not set that"):
        auto_checkpoint(Names(), torch.randn(4, 8), budget_mb=None)


@pytest.mark.parametrize("asked", ["is_leaf", "grad_fn", "_version"])
def test_questions_about_an_inputs_history_are_refused(asked: str) -> None:
    class Asks(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if getattr(x, asked) else 3)

    with pytest.raises(Unsupported, match=r"what autograd knows of a tensor .* at .*test_settings\.py"):
        auto_checkpoint(Asks(), torch.randn(4, 8, requires_grad=True), budget_mb=None, regions="whole")


LEFT = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "grad mode": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "deterministic algorithms": (lambda: torch.use_deterministic_algorithms(True),
                                 lambda: torch.use_deterministic_algorithms(False)),
    "anomaly enabled": (lambda: torch.autograd.set_detect_anomaly(True),
                        lambda: torch.autograd.set_detect_anomaly(False)),
}  # fmt: skip


@pytest.mark.parametrize("regions", ["whole", "1"])
@pytest.mark.parametrize("name", LEFT)
def test_a_setting_of_torchs_that_forward_leaves_changed_is_refused_by_name(name: str, regions: str) -> None:
    change, back = LEFT[name]

    class Leaves(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            change()
            return x

    model = nn.Sequential(nn.Linear(8, 8), Leaves(), nn.Linear(8, 8))
    error = Unsupported if regions == "whole" else RegionError
    try:
        with pytest.raises(error, match=rf"changed in forward at {name} \(|another setting of torch's \({name}\)"):
            auto_checkpoint(model, torch.randn(4, 8), budget_mb=None, regions=regions, check=False)
    finally:
        back()


def test_the_forward_alone_under_another_default_dtype() -> None:
    """As Lightning's `precision="bf16-true"`: the gradients are plain training's, which has it there alone, too."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).to(torch.bfloat16)
    plain, x = copy.deepcopy(model), torch.randn(16, 8, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        chosen = auto_checkpoint(model, x, recompute=["*"], progress=False)
        assert chosen.recomputed
        losses = [run(x).square().mean() for run in (chosen.module, plain)]
    finally:
        torch.set_default_dtype(torch.float32)
    for loss in losses:
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert torch.get_default_dtype() is torch.float32


# Tensors --------------------------------------------------------------------------------------------------------------


TABLE = torch.arange(8.0)


class Block(nn.Module):
    """Leaves a loss of its own, and more, in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.aux = nn.Linear(32, 128), nn.Linear(128, 32), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        self.aux, self.features = hidden.pow(2).mean(), []
        self.features.append(hidden)
        y = x + self.down(hidden.relu())
        self.last = {"rows": len(x), "state": (hidden.detach().std(0), y), "left": hidden[:1]}
        return y


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.result = x
        return x


def assert_same_attributes(ours: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(ours.modules(), plain.modules(), strict=True):
        pairs = [(v, vars(other)[n]) for n, v in vars(one).items() if not n.startswith("_")]
        leaves, templates = zip(*(flatten(list(each)) for each in zip(*pairs, strict=True)), strict=True)
        assert templates[0] == templates[1]
        assert all(torch.equal(a, b) and a.requires_grad == b.requires_grad for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize("regions", ["whole", "auto"])
def test_tensors_are_set_in_each_step(regions: str) -> None:
    model, plain = twins(Blocks())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = auto_checkpoint(model, torch.randn(4, 32), budget_mb=None, regions=regions)
        assert not plan.regions
        for _ in range(2):
            x = torch.randn(4, 32)
            outputs = [run(x) for run in (plan.module, plain)]
            assert torch.equal(*outputs) and model.result is outputs[0]
            for output in outputs:
                output.pow(2).mean().backward()
            assert_same_attributes(model, plain)
            assert_same_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:backward started", "ignore:planning anew", "ignore:.*calls were planned anew")
def test_losses_that_forward_leaves_are_added() -> None:
    model, plain = twins(Blocks())
    plan = auto_checkpoint(model, torch.randn(4, 32), budget_mb=None)
    for rows in (4, 4, 3, 5, 6, 7, 4):
        x = torch.randn(rows, 32)
        for run, own in ((plan.module, model), (plain, plain)):
            own.zero_grad()
            loss = run(x).pow(2).mean() + sum(block.aux for block in own.blocks)  # type: ignore[union-attr]
            loss.backward()
        assert_same_attributes(model, plain)
        assert_same_gradients(model, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # planned for by now
        (plan.module(x).pow(2).mean() + model.blocks[0].aux + model.blocks[1].aux + model.blocks[2].aux).backward()


def two_steps(plan: Plan, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One with its backward, and the next one's loss."""
    plan.module(x).pow(2).mean().backward()
    model.zero_grad()
    return plan.module(x).pow(2).mean()


def test_tensors_left_by_the_step_before_count() -> None:
    model, x = Blocks(), torch.randn(512, 32)
    plan = auto_checkpoint(model, x, budget_mb=None)
    left = 3 * 512 * (128 + 32) * 4
    assert measured_peak_bytes(partial(two_steps, plan, model), model, x, plan.static_bytes) <= plan.peak_bytes
    assert sum(t.bytes for t in plan.problem.tensors if t.name.endswith("_before")) >= left


def test_a_model_that_leaves_losses_is_freed() -> None:
    """Autograd's nodes, into which the garbage collector does not look, do not lead from them to the model."""
    model, x = Blocks(), torch.randn(4, 32)
    gone = weakref.ref(model)
    plan = auto_checkpoint(model, x, budget_mb=None)
    plan.module(x).pow(2).mean().backward()
    plan.module(x)
    kept = model.blocks[0].aux
    del model, plan
    gc.collect()
    assert gone() is None
    with pytest.raises(PlannerError, match="that was freed since its forward: keep the model"):
        kept.backward()


class Statistics(nn.Module):
    """Leaves what no gradient comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        self.mean, self.signs = hidden.detach().mean(0), [hidden > 0, len(x)]
        return x + self.down(hidden.relu())


def test_regions_leave_statistics_and_no_losses() -> None:
    model, plain = twins(nn.Sequential(*(Statistics() for _ in range(3)), Block(), nn.Linear(32, 1)))
    x = torch.randn(512, 32)
    plan = auto_checkpoint(model, x, budget_mb="90%", regions=["0", "1", "2", "3"], progress=False)
    assert sorted({run.path for run in plan.runs}) == ["0", "1", "2"]  # a loss may add what the last one leaves
    assert sum(t.bytes for t in plan.problem.tensors if t.name.endswith("_before")) >= 3 * 512 * 128
    assert measured_peak_bytes(partial(two_steps, plan, model), model, x, plan.static_bytes) <= plan.peak_bytes
    for _ in range(2):
        x = torch.randn(512, 32)
        for run, own in ((plan.module, model), (plain, plain)):
            own.zero_grad()
            (run(x).pow(2).mean() + own[3].aux).backward()
        assert_same_attributes(model, plain)
        assert_same_gradients(model, plain)


def test_pruned_weights_are_those_of_the_plain_model() -> None:
    """`prune` reads the weight that its hook left in the last forward."""
    models = twins(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)))
    for model in models:
        prune.l1_unstructured(model[0], "weight", 0.3)
    x = torch.randn(64, 32)
    plan = auto_checkpoint(models[0], x, budget_mb=None)
    for model, run in zip(models, (plan.module, models[1]), strict=True):
        for _ in range(3):
            run(x).pow(2).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= p.grad
        prune.l1_unstructured(model[0], "weight", 0.5)
    assert torch.equal(models[0][0].weight_mask, models[1][0].weight_mask)


@pytest.mark.parametrize("regions", ["whole", "auto"])
def test_inputs_are_kept_and_parts_of_them_are_not(regions: str) -> None:
    class Keeps(nn.Linear):
        given: Any = None

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.given, self.first = input, input[:1]
            return super().forward(input)

    model = Keeps(8, 8)
    with pytest.warns(UserWarning, match=r"forward sets self\.first; .* will not set that"):
        plan = auto_checkpoint(model, torch.randn(4, 8), budget_mb=None, regions=regions)
    x = torch.randn(4, 8)
    plan.apply(model)(x)
    assert model.given is x


def test_what_is_not_made_of_plain_tensors_is_said() -> None:
    class Keeps(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = super().forward(input)
            self.within = types.SimpleNamespace(mean=output.detach().mean())
            self.of_constants = {"mean": output.detach().mean(), "table": TABLE[:3]}
            self.endless = [output.detach()]
            self.endless.append(self.endless)
            return output

    match = r"forward sets .*; the planned step .* will not set that"
    with pytest.warns(UserWarning, match=match) as said:
        auto_checkpoint(Keeps(8, 8), torch.randn(4, 8), budget_mb=None, regions="whole")
    (text,) = (str(each.message) for each in said)
    assert all(f"self.{name}" in text for name in ("within", "of_constants", "endless"))


# Inside of dicts, lists and objects -----------------------------------------------------------------------------------


class Keeper:
    top: Any = None


class Collects(nn.Module):
    """Puts what it computes where others read it, in each of the ways that people do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.losses: list[Any] = []
        self.last: list[Any] = []
        self.stats: dict[str, Any] = {"rows": 8}  # as it will be: no change is seen
        self.nested = {"inner": {}, "others": [0, {}]}
        self.keeper = Keeper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        self.losses.append(h.pow(2).mean())
        self.losses.extend([len(x), h.detach()])
        self.last.clear()
        self.last.append(h.detach().mean())
        self.stats["mean"] = h.detach().mean(0)
        self.stats["rows"] = len(x)
        self.stats.update(both=(h.detach().amax(), 1))
        self.nested["inner"]["h"] = h.detach()  # type: ignore[call-overload, index]
        self.nested["others"][1]["x"] = x  # type: ignore[index]
        self.keeper.top = h.detach().amin()
        return self.second(h)

    def held(self) -> list[Any]:
        return [self.losses, self.last, self.stats, self.nested, vars(self.keeper)]


class CollectsInParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Collects() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def held(self) -> list[Any]:
        return [part.held() for part in self.parts]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.requires_grad == b.requires_grad
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_alike, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)


def _empty(part: Any, step: int) -> None:
    """What loops do with it between steps."""
    part.losses.clear()
    if step == 3:
        part.stats = {}
    elif step == 4:
        part.stats.clear()
        part.keeper.top = None


@pytest.mark.parametrize("kind", [Collects, CollectsInParts])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("rows", [(8,), (8, 4, 6, 5, 8, 7)])
@pytest.mark.filterwarnings("ignore")
def test_what_forward_puts_into_what_modules_hold(kind: Any, check: bool, rows: tuple[int, ...]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    auto_checkpoint(model, torch.randn(8, 16), budget_mb=8, check=check, progress=False).apply(model)
    for step in range(8):
        x = torch.randn(rows[step % len(rows)], 16)
        for each in (model, plain):
            each.zero_grad()
            loss = each(x).pow(2).mean()
            parts = [m for m in each.modules() if isinstance(m, Collects)]
            (loss + sum(part.losses[0] for part in parts) if step % 2 else loss).backward()
        assert _alike(model.held(), plain.held())
        assert _alike([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        for each in (model, plain):
            for part in [m for m in each.modules() if isinstance(m, Collects)]:
                _empty(part, step)


@pytest.mark.filterwarnings("ignore")
class Adds(nn.Linear):
    """Adds to a list and a dict that it is given."""

    def __init__(self, log: list[Any], losses: dict[str, Any], name: str) -> None:
        super().__init__(16, 16)
        self.log, self.losses, self.own_name = log, losses, name

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input).tanh()
        self.log.append(output.square().mean())
        self.losses[self.own_name] = output.abs().mean()
        return output


class AddsTogether(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.every: list[Any] = []
        losses: dict[str, Any] = {}
        self.parts = nn.ModuleList(Adds(self.every, losses, name) for name in "abc")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.every.clear()
        for part in self.parts:
            x = part(x)
        return x

    def held(self) -> Any:
        return self.every, [(part.log, part.losses) for part in self.parts]


@pytest.mark.filterwarnings("ignore:backward started from")
@pytest.mark.parametrize("check", [True, False])
def test_a_list_or_dict_that_modules_share_is_filled_once(check: bool) -> None:
    model = AddsTogether()
    plain = copy.deepcopy(model)
    auto_checkpoint(model, torch.randn(8, 16), budget_mb=8, check=check, progress=False).apply(model)
    for step in range(8):
        x = torch.randn(8, 16)
        expected = r"with self\.every is self\.parts\.0\.log" if step == 5 else None
        with pytest.warns(UserWarning, match=expected) if expected else contextlib.nullcontext():
            for each in (model, plain):
                each.zero_grad()
                (each(x).square().mean() + sum(each.parts[0].losses.values()) + sum(each.every)).backward()
        assert _alike(model.held(), plain.held())
        assert _alike([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        if step == 4:  # each of them has its own from now on
            for each in (model, plain):
                each.parts[1].log, each.parts[2].losses = [], {}
                each.parts[0].losses.clear()


def test_what_modules_share_and_one_reads_is_said() -> None:
    class Reads(Adds):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + len(self.log)

    model = AddsTogether()
    model.parts.append(Reads(model.every, {}, "d"))
    with pytest.warns(UserWarning, match=r"forward sets self\.every.* will not set that"):
        auto_checkpoint(model, torch.randn(8, 16), budget_mb=None)


def test_an_object_that_holds_it_is_looked_at() -> None:
    class Scaled(Collects):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.keeper.scale)

    model = Scaled()
    model.keeper.scale = 2.0  # type: ignore[attr-defined]
    module = auto_checkpoint(model, torch.randn(8, 16), budget_mb=8, progress=False, check=False).module
    for scale in (2.0, 3.0, 3.0):
        model.keeper = Keeper()
        model.keeper.scale = scale  # type: ignore[attr-defined]
        x = torch.randn(8, 16)
        assert torch.equal(module(x), model(x)) and model.keeper.top is not None


@pytest.mark.filterwarnings("ignore")
def test_counts_are_no_reason_to_plan_anew_for_a_size_that_is_known() -> None:
    class Calls(nn.Linear):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(input).tanh()

    model = Calls(8, 8)
    module = auto_checkpoint(model, torch.randn(8, 8), budget_mb=8, progress=False, check=False).module
    for rows in (8, 4, 6, 5, 7, 9, 10) * 2:
        module(torch.randn(rows, 8)).pow(2).sum().backward()
    cache = module._plan_state.cache
    assert module.calls == 14
    assert len(cache) == 7 and any(entry.planned.prepared.traced.from_symbols for entry in cache)


def test_an_item_of_a_list_is_not_all_of_it() -> None:
    class Sets(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.last = [torch.zeros(())]

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = super().forward(input)
            self.last[0] = output.detach().mean()
            return output

    with pytest.warns(UserWarning, match=r"forward sets self\.last; .* will not set that"):
        auto_checkpoint(Sets(), torch.randn(8, 16), budget_mb=None)


def test_what_it_reads_there_is_said() -> None:
    class Reads(Collects):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stats["mean"] = x.mean()
            return super().forward(x * self.stats["mean"])

    with pytest.warns(UserWarning, match=r"forward sets self\.stats\['mean'\], self\.stats\['both'\]; .* will not set"):
        auto_checkpoint(Reads(), torch.randn(8, 16), budget_mb=None, regions="whole")


class Keeps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.log: Any = []
        self.stats: Any = {}
        self.key, self.get = "log", operator.attrgetter("log")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        self.log.append(output.detach().mean())
        return output * 3 if self.is_long() else output

    def is_long(self) -> bool:
        return False


class KeepsAndMatches(Keeps):
    def is_long(self) -> bool:
        match self:
            case Keeps(log=[_, _, _, *_]):
                return True
        return False


class KeepsAndComputes(Keeps):
    def is_long(self) -> bool:
        return len(getattr(self, self.key)) > 2


class KeepsAndGets(Keeps):
    def is_long(self) -> bool:
        return len(self.get(self)) > 2


class KeepsAndLooks(Keeps):
    def is_long(self) -> bool:
        return sum(len(value) for value in vars(self).values() if isinstance(value, list)) > 2


@pytest.mark.parametrize("kind", [KeepsAndMatches, KeepsAndComputes, KeepsAndGets, KeepsAndLooks])
def test_what_no_name_shows_to_be_read_is_said(kind: Any) -> None:
    with pytest.warns(UserWarning, match=r"forward sets self\.log; .* will not set that"):
        auto_checkpoint(kind(), torch.randn(8, 16), budget_mb=None, regions="whole")


def test_a_dict_that_forward_clears_is_said() -> None:
    class Clears(Keeps):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = nn.Linear.forward(self, input)
            self.stats.clear()
            self.stats["mean"] = output.detach().mean()
            return output

    with pytest.warns(UserWarning, match=r"forward sets self\.stats\['mean'\]; .* will not set that"):
        auto_checkpoint(Clears(), torch.randn(8, 16), budget_mb=None)


class Doubled(list[Any]):
    def append(self, value: Any) -> None:
        self.extend([value, value])


@pytest.mark.parametrize("other", [Doubled(), deque(maxlen=2)])
@pytest.mark.parametrize("check", [True, False])
def test_another_kind_of_list_is_planned_for_anew(other: Any, check: bool) -> None:
    model, x = Keeps(), torch.randn(8, 16)
    module = auto_checkpoint(model, x, budget_mb=8, progress=False, check=check).module
    module(x)
    assert len(model.log) == 1
    model.log = module.log = other
    with pytest.warns(UserWarning, match=r"forward sets self\.log.* will not set that"):
        module(x)


class Counts(nn.Linear):
    """Counts in tensors that nothing it returns depends on."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.steps, self.rate, self.of = torch.zeros(()), torch.ones(()), [torch.zeros(()), 3]
        self.last, self.before = torch.zeros(()), torch.zeros(())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        self.rate = self.rate * 0.9
        self.of[0] = self.of[0] + len(input)
        output = super().forward(input)
        self.before, self.last = self.last, output.detach().mean()
        return output


def test_counts_in_tensors_go_on() -> None:
    model = Counts()
    plain = copy.deepcopy(model)
    auto_checkpoint(model, torch.randn(8, 16), budget_mb=8, progress=False).apply(model)
    for _ in range(6):
        x = torch.randn(8, 16)
        for each in (model, plain):
            each(x).pow(2).mean().backward()
        names = ("steps", "rate", "of", "last", "before")
        assert all(_alike(getattr(model, name), getattr(plain, name)) for name in names)


def test_counts_outside_of_the_model_are_refused() -> None:
    class Outside(Counts):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            KEEPER.top = torch.zeros(()) if KEEPER.top is None else KEEPER.top + 1
            return super().forward(input)

    KEEPER.top = torch.zeros(())
    with pytest.raises(Unsupported, match=r"state that forward changes and reads at .*top"):
        auto_checkpoint(Outside(), torch.randn(8, 16), budget_mb=None)


KEEPER = Keeper()
