"""What changes between steps that are planned by regions, and what planning them leaves behind."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes.memory import measure_peak
from planner import Plan, RegionError, auto_checkpoint
from planner.session import open_session
from solvers.errors import BudgetError
from tests.zoo.compare import differences, run_step

from .steps import assert_same_gradients, twins


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Three blocks; `around` says how each is called, `between` what happens after it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = self.settings.get("around", _call)(block, hidden)
            self.settings.get("between", _call)(_nothing, block)
        return hidden.square().mean()


def _call(block: Callable[[Any], Any], value: Any) -> Any:
    return block(value)


def _nothing(value: Any) -> Any:
    return value


def _checkpointed(reentrant: bool) -> Callable[..., Any]:
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant)


def frugal(model: nn.Module, x: torch.Tensor) -> Plan:
    """Blocks as regions, at the smallest budget."""
    session = open_session(model, x, regions=["blocks.*"], progress=False, time_limit=2)
    try:
        return session.plan(1)
    except BudgetError as error:
        return session.plan(error.minimum_bytes)


def _patched(model: Net) -> None:
    model.blocks[2].forward = lambda x: x * 2


def _patched_as_a_method(model: Net) -> None:
    model.blocks[1].forward = types.MethodType(lambda self, x: self.down(self.up(x)), model.blocks[1])


def _replaced(model: Net) -> None:
    torch.manual_seed(5)
    model.blocks[1] = Block()


def _shorter(model: Net) -> None:
    del model.blocks[2]


def _swapped(model: Net) -> None:
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


def _checkpoints(model: Net) -> None:
    model.settings["around"] = _checkpointed(False)


def _reentrant_checkpoints(model: Net) -> None:
    model.settings["around"] = _checkpointed(True)


CHANGES = [_patched, _patched_as_a_method, _replaced, _shorter, _swapped, _checkpoints, _reentrant_checkpoints]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_takes_effect_and_can_be_undone(change: Callable[[Net], None]) -> None:
    model, x = Net(), torch.randn(8, 16)
    plain, plan = copy.deepcopy(model), frugal(model, x)
    assert plan.recomputed
    assert differences(run_step(plain, plain, x, 1), run_step(plan.module, model, x, 1)) == []
    change(model)
    change(plain)
    own = [dict(block.__dict__) for block in model.blocks]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a region runs plain
        for seed in (2, 3):
            assert differences(run_step(plain, plain, x, seed), run_step(plan.module, model, x, seed)) == []
    assert [block.__dict__.get("forward") for block in model.blocks] == [d.get("forward") for d in own]


def test_a_change_to_a_region_is_planned_for_and_what_was_planned_before_is_found_again() -> None:
    model, sample = Net(), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    auto_checkpoint(model, sample, budget_mb="90%", regions="blocks.*", progress=False).apply(model)

    def step() -> None:
        assert not differences(run_step(plain, plain, sample), run_step(model, model, sample))

    step()
    for rate, planned in ((0.4, False), (0.1, True), (0.4, True)):
        for each in (model, plain):
            each.blocks[1].drop.p = rate
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
        told = [str(w.message) for w in said if "planning anew" in str(w.message)]
        assert bool(told) is not planned
        assert planned or "region blocks.1" in told[0]
        assert not any("it runs plain" in str(w.message) for w in said)


def test_regions_that_change_in_every_step_are_not_planned_anew_for_ever() -> None:
    model, sample = Net(), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    auto_checkpoint(model, sample, budget_mb="90%", regions="blocks.*", progress=False).apply(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 9):
            for each in (model, plain):
                each.blocks[1].drop.p = step / 10
            assert not differences(run_step(plain, plain, sample), run_step(model, model, sample))
    messages = [str(w.message) for w in said]
    assert sum("planning anew" in m for m in messages) == 5
    plain_runs = [m for m in messages if "region blocks.1 runs plain" in m]
    assert len(plain_runs) == 1 and "p=0.7, planned for p=0.6. So will others like it" in plain_runs[0]


class Chooses(nn.Module):
    """Blocks that are handed a mask only where some of `x` is to be masked, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask: Any = keep
        if keep.tolist().count(0) == 0:
            mask = None
        elif keep.tolist().count(0) > 1:
            mask = keep[: int(keep.sum())]
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


class Masked(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x if mask is None else x * mask.sum())


def _keep(masked: int) -> torch.Tensor:
    return torch.cat([torch.zeros(masked), torch.ones(16 - masked)])


def test_regions_that_are_called_otherwise_where_values_say_so_are_planned_for_both() -> None:
    model, x = Chooses(), torch.randn(512, 16)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, (x, _keep(1)), budget_mb="70%", regions=["blocks.*"], progress=False)
    plan.apply(model)

    def steps(masked: int) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for seed in (1, 2):
                given = (x, _keep(masked))
                assert not differences(run_step(plain, plain, given, seed), run_step(model, model, given, seed))
        return [str(w.message) for w in said]

    def peak(of: nn.Module) -> int:
        of.zero_grad(set_to_none=True)
        return measure_peak(lambda: of(x, _keep(0)).backward())

    assert steps(1) == []
    (said,) = steps(0)
    assert "call 1 of region blocks.0 runs plain, as do 2 other regions" in said
    assert "mask is None, planned for a tensor. When the model is next called" in said
    assert plan.budget_bytes is not None and peak(model) <= plan.budget_bytes - plan.static_bytes < peak(plain)
    for masked in (0, 1, 0):
        assert steps(masked) == []


def test_courses_are_planned_for_some_times_only() -> None:
    model, x = Chooses(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    auto_checkpoint(model, (x, _keep(0)), regions=["blocks.*"], progress=False).apply(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for masked in range(2, 9):
            given = (x, _keep(masked))
            assert not differences(run_step(plain, plain, given), run_step(model, model, given))
    messages = [str(w.message) for w in said]
    assert sum("When the model is next called" in m for m in messages) == 3
    assert sum("So will others like it" in m for m in messages) == 1


def test_calls_of_another_course_run_plain_where_nothing_is_to_be_planned_anew() -> None:
    model, x = Chooses(), torch.randn(64, 16)
    plan = auto_checkpoint(model, (x, _keep(1)), regions=["blocks.*"], progress=False, on_new_shape="eager")
    with pytest.warns(UserWarning, match="So will others like it"):
        plan.module(x, _keep(0)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.module(x, _keep(0)).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_under_a_checkpoint_stays_eager(reentrant: bool) -> None:
    model = Net(around=_checkpointed(reentrant))
    with pytest.raises(RegionError, match="torch.utils.checkpoint.*: leave that out"):
        auto_checkpoint(model, torch.randn(8, 16), regions=["blocks.*"], progress=False)


class Redrawn(Block):
    """Draws other numbers when its checkpoint recomputes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


def test_a_module_whose_checkpoint_draws_anew_stays_eager() -> None:
    model, x = Net(), torch.randn(8, 16)
    model.blocks[1] = Redrawn()
    plan = auto_checkpoint(model, x, regions="auto", progress=False)
    planned = [region.path for region in plan.regions if not region.eager]
    assert "blocks.0" in planned and "blocks.2" in planned and "blocks.1" not in planned
    assert differences(run_step(model, model, (x,)), run_step(plan.module, model, (x,))) == []


def test_a_step_that_fails_while_it_is_planned_leaves_the_gradients() -> None:
    model, x = Net(), torch.randn(8, 16)
    plan = frugal(model, x)
    plan.module(x).backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plan.module(torch.randn(8, 15))
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert old is not None and parameter.grad is not None and torch.equal(old, parameter.grad)


def _moves_weights(_: Any, block: Block) -> None:
    block.up.weight.data.mul_(1.01)
    torch._foreach_add_([block.norm.bias.data, block.down.bias.data], 0.01)


def test_planning_leaves_parameters_and_the_sample_as_they_were() -> None:
    model, x = Net(between=_moves_weights), torch.randn(8, 16)
    model.register_forward_pre_hook(lambda module, args: None)
    before, sample = copy.deepcopy(model.state_dict()), x.clone()
    open_session(model, x, regions=["blocks.*"], progress=False)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert torch.equal(x, sample)


class ChangesItsInput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


def test_planning_leaves_a_sample_that_the_forward_changes_as_it_was() -> None:
    x = torch.randn(8, 16)
    sample = x.clone()
    open_session(ChangesItsInput(), x, regions=["blocks.*"], progress=False)
    assert torch.equal(x, sample)


class Iterated(nn.Module):
    """Runs a Sequential item by item, so that it is never called itself; other Sequentials are regions."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).requires_grad_(False)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.frozen:
            x = layer(x)
        for head in self.heads:
            x = head(x)
            x = x * 2 if x.sum().item() > 1e9 else x
        return x.pow(2).mean()


@pytest.mark.filterwarnings("error:planning anew")
def test_a_module_of_a_regions_class_that_is_not_its_equal_replans_nothing() -> None:
    model, plain = twins(Iterated())
    x = torch.randn(32, 64)
    plan = auto_checkpoint(model, x, budget_mb=None)
    assert plan.prepared.regions.spare == ("frozen",)
    for _ in range(2):
        plan.module(x).backward()
        plain(x).backward()
    assert_same_gradients(model, plain)


class Convolved(nn.Module):
    """Convolutions, batch norms and dropout, with a branch between blocks: by regions alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Conv2d(8, 4, 3))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x * 2 if x.detach().sum() > 1e9 else x
        return x.square().mean()


def _by_convolutions(model: nn.Module, x: torch.Tensor) -> Plan:
    session = open_session(model, x, progress=False, solver="greedy")
    plan = session.plan(session.minimum().minimum_bytes)
    assert plan.recomputed and {run.path for run in plan.runs} == {"blocks.0", "blocks.1", "blocks.2"}
    return plan


IN_EVAL: dict[str, Callable[[nn.Module], Any]] = {
    "all": lambda m: m.blocks.eval(),
    "one": lambda m: m.blocks[1].eval(),
    "two": lambda m: (m.blocks[0].eval(), m.blocks[2].eval()),
    "within": lambda m: m.blocks[1][1].eval(),
}


def _said(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in said]


@pytest.mark.parametrize("modes", IN_EVAL)
def test_regions_in_eval_mode_are_planned_in_it(modes: str) -> None:
    model, x = Convolved().train(), torch.randn(4, 4, 12, 12)
    IN_EVAL[modes](model)
    before = [module.training for module in model.modules()]
    plain, plan = copy.deepcopy(model), _by_convolutions(model, x)
    assert [module.training for module in model.modules()] == before
    for seed in (1, 2):
        assert not differences(run_step(plain, plain, x, seed), run_step(plan.module, model, x, seed))
    model.zero_grad(set_to_none=True)
    assert plan.budget_bytes is not None
    assert measure_peak(lambda: plan.module(x).backward()) <= plan.budget_bytes - plan.static_bytes


@pytest.mark.parametrize("modes", IN_EVAL)
def test_regions_that_change_their_mode_are_planned_anew_once(modes: str) -> None:
    model, x = Convolved().train(), torch.randn(4, 4, 12, 12)
    plain = copy.deepcopy(model)
    plan = _by_convolutions(model, x).apply(model)

    def step() -> None:
        assert not differences(run_step(plain, plain, x), run_step(plan, model, x))

    assert _said(step) == []
    for change, known in ((IN_EVAL[modes], False), (nn.Module.train, True), (IN_EVAL[modes], True)):
        change(model)
        change(plain)
        said = _said(step)
        assert known is (said == []) and all("planning anew: argument 'region blocks." in s for s in said)
        assert _said(step) == []


@pytest.mark.parametrize("mode", [True, False])
def test_an_evaluation_runs_plain_though_regions_are_planned_in_eval_mode(mode: bool) -> None:
    model, x = Convolved().train(), torch.randn(4, 4, 12, 12)
    model.blocks.eval()
    plain, plan = copy.deepcopy(model), _by_convolutions(model, x)
    found: list[torch.Tensor] = []
    for each in (plan.module, plain):
        each.train(mode)
        torch.manual_seed(0)
        with torch.no_grad():
            said = _said(lambda each=each: found.append(each(x[:1])))  # of another size, which would be planned anew
        assert said == []
    assert torch.equal(*found)
    for each in (model, plain):
        each.train()
        each.blocks.eval()
    assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))


def test_a_model_in_eval_mode_is_planned_by_regions_for_training() -> None:
    model, x = Convolved().eval(), torch.randn(4, 4, 12, 12)
    plain, plan = copy.deepcopy(model).train(), _by_convolutions(model, x)
    assert not any(module.training for module in model.modules())
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not differences(run_step(plain, plain, x), run_step(plan.module, model, x))


class Grows(nn.Module):
    """Blocks, to which more may be added, with a branch between them; `kind` makes one."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
            x = x * 2 if x.detach().sum() > 1e9 else x
        return x.pow(2).mean()


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def _activations() -> nn.Module:
    return nn.Sequential(nn.GELU(), nn.Tanh(), nn.Dropout(0.2))


def _append(model: Any) -> None:
    model.blocks.append(copy.deepcopy(model.blocks[0]))


def _share(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def _take_out_the_last_and_share_no_more(model: Any) -> None:
    del model.blocks[3]
    model.blocks[1] = copy.deepcopy(model.blocks[0])


def _give_another_name(model: Any) -> None:
    model.weight, model.other = model.first.weight, model.blocks[1]


CHANGES_OF_BLOCKS: dict[Callable[[Any], None], bool] = {  # and whether each is planned for, where they are trained
    _append: True, _share: True, _take_out_the_last_and_share_no_more: False, _give_another_name: False,
}  # fmt: skip


@pytest.mark.parametrize("kind", [_perceptron, _activations])
def test_blocks_that_are_added_and_shared_are_planned_for_once(kind: Callable[[], nn.Module]) -> None:
    model, plain = twins(Grows(kind))
    x = torch.randn(32, 16)
    auto_checkpoint(model, x, budget_mb=1, solver="greedy", progress=False).apply(model)

    def step(seed: int) -> None:
        assert not differences(run_step(plain, plain, x, seed), run_step(model, model, x, seed))

    for change, new in CHANGES_OF_BLOCKS.items():
        for each in (model, plain):
            change(each)
        said = _said(lambda: step(1))
        assert len(said) == (new and kind is _perceptron), said
        assert all("planning anew: argument '(parameters)'" in s for s in said)
        assert _said(lambda: step(2)) == _said(lambda: step(3)) == []


class LendsWeights(nn.Module):
    """Calls its memory with weights of another shape, which it makes anew in each call (titans)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.memory, self.gate = Block(), nn.Sequential(nn.Linear(16, 16, bias=False)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.mean() > 1e3:
            hidden = hidden * 2
        weight = self.memory[0].weight[:8] * self.gate(hidden).mean()
        return torch.func.functional_call(self.memory, {"0.weight": weight}, (F.gelu(hidden),)).square().mean()


def test_a_region_that_is_lent_its_weights_is_planned_once() -> None:
    x = torch.randn(64, 16)
    model, plain = twins(LendsWeights())
    plan = auto_checkpoint(model, x, regions=["first", "memory"], progress=False, time_limit=2)
    assert not any(region.eager for region in plan.regions if region.path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            assert not differences(run_step(plain, plain, x, seed), run_step(plan.module, model, x, seed))
    model.memory[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="region memory"):
        assert not differences(run_step(plain, plain, x, 3), run_step(plan.module, model, x, 3))


class Viewed(nn.Module):
    """Its scale is in the memory of a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.register_buffer("steady", torch.ones(2))
        self.level = self.steady[:1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steady.mul_(1.5)
        return self.layers((x * self.level).tanh())


def test_a_view_of_a_buffer_that_a_region_changes() -> None:
    model = nn.Sequential(Viewed(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, torch.randn(4, 8), progress=False, check=False, recompute="*", regions=["0", "1"])
    assert [r.path for r in plan.regions if r.runs] == ["1"]
    assert torch.equal(model[0].steady, torch.ones(2))
    for _ in range(2):
        x = torch.randn(4, 8)
        outputs = [each(x) for each in (plan.module, plain)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
