"""Autocast's cache of casts, which lives as long as the caller's block: planning leaves it as it was, and a loop in one
block, in which the plain model goes on with casts of old parameters, is refused by name."""

from __future__ import annotations

import copy
import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from passes.casts import casts_aside
from passes.run._torch import under_autocast
from passes.run.stale import StaleCasts
from planner import auto_checkpoint
from tests.planner.steps import gradients

QUICK: dict[str, Any] = {"solver": "greedy", "time_limit": 5, "progress": False}
WAYS: dict[str, dict[str, Any]] = {  # regions compute something again: else they may run as they are
    "whole": {},
    "regions": {"regions": ["0", "1"], "budget_mb": "90%"},
}


def bf16(cache_enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled)


def layers(count: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(count)])


def batch(size: int = 64) -> torch.Tensor:
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(size))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().sub(1).square().mean()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = [n for n, g in expected.items() if g is None or not torch.equal(g, found[n])]
    assert not wrong


# Planning within the caller's block -----------------------------------------------------------------------------------


def surrounded(model: nn.Module, head: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], size: int) -> Any:
    """Gradients of a step in which an unplanned head is used before and after the call, so that it is cast once."""
    model.zero_grad()
    head.zero_grad()
    with bf16():
        loss = loss_of(head(call(head(batch(size)).float())))
    loss.backward()
    return gradients(head), gradients(model)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_planned_within_a_block_leaves_the_callers_casts(way: str) -> None:
    model, head = layers(), nn.Linear(32, 32)
    plain, plain_head = copy.deepcopy(model), copy.deepcopy(head)
    plans: list[Any] = []

    def planned(x: torch.Tensor) -> torch.Tensor:
        if not plans:
            plans.append(auto_checkpoint(model, x.detach().requires_grad_(), check=True, **WAYS[way], **QUICK))
        found: torch.Tensor = plans[0].module(x)
        return found

    def checked(x: torch.Tensor) -> torch.Tensor:
        plans[0].check(model, x.detach().requires_grad_())
        return planned(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size, call in ((96, planned), (96, planned), (64, planned), (64, planned), (64, checked)):
            found = surrounded(model, head, call, size)
            expected = surrounded(plain, plain_head, plain, size)
            assert_equal(found[0], expected[0])
            assert_equal(found[1], expected[1])
    once, twice = (surrounded(plain, plain_head, call, 64)[0] for call in (plain, after_clearing(plain)))
    assert not torch.equal(once["weight"], twice["weight"])  # a cleared cache shows in the head's gradient


def after_clearing(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def cleared(x: torch.Tensor) -> torch.Tensor:
        torch.clear_autocast_cache()
        return call(x)

    return cleared


def test_planning_does_not_read_the_callers_casts() -> None:
    model, x = layers(), batch()
    with bf16():
        outside = auto_checkpoint(model, x, check=True, **QUICK)
    with bf16():
        before = model(x)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        inside = auto_checkpoint(model, x, check=True, **QUICK)  # the check would see the old casts
        assert torch.equal(model(x), before)  # of which the plain model goes on with
    assert inside.checked
    assert inside.peak_bytes == outside.peak_bytes
    with bf16():
        assert not torch.equal(model(x), before)


def test_casts_of_any_shape_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 4, 4)
    with bf16():
        before = model(images)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        auto_checkpoint(layers(), batch(), **QUICK)
        assert torch.equal(model(images), before)
        loss_of(model(images)).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_thread_that_works_for_a_block_leaves_its_casts() -> None:
    """Autograd's threads for GPUs: autocast is on there, but no block was entered, and leaving one clears the cache."""
    model, x = layers(1), batch()

    def replay() -> None:
        torch.set_autocast_enabled("cpu", True)
        with under_autocast(()):
            pass

    with bf16():
        before = model(x)
        with torch.no_grad():
            model[0][0].weight.mul_(2)
        thread = threading.Thread(target=replay)
        thread.start()
        thread.join()
        assert torch.equal(model(x), before)


def test_casts_of_what_the_collector_leaves_out_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc.freeze()`, as programs call it before they fork."""
    model, x = layers(1), batch()
    monkeypatch.setattr("gc.get_objects", list)
    monkeypatch.setattr("gc.get_freeze_count", lambda: sys.maxsize)
    monkeypatch.setattr("passes.casts._frozen", (0, []))
    with bf16():
        before = model(x)
        with torch.no_grad():
            model[0][0].weight.mul_(2)
        with casts_aside():
            assert not torch.equal(model(x), before)
        assert torch.equal(model(x), before)


# A loop in one block --------------------------------------------------------------------------------------------------


def plan_in(way: str, model: nn.Module, **options: Any) -> Any:
    with bf16():
        return auto_checkpoint(model, batch(), **{"check": False, **WAYS[way], **QUICK, **options})


def stepped(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.5)
    model.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_within_one_block_is_refused(way: str) -> None:
    model = layers()
    plain, plan = copy.deepcopy(model), plan_in(way, model)
    with bf16(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the backward in the block
        for each in (plan.module, plain):
            loss_of(each(batch())).backward()
        assert_equal(gradients(model), gradients(plain))
        stepped(model)
        with pytest.raises(StaleCasts, match=r"0\.0\.weight was changed .* torch.clear_autocast_cache\(\) after"):
            plan.module(batch())
        stepped(plain)
        goes_on = loss_of(plain(batch()))
    with bf16():
        assert not torch.equal(loss_of(plain(batch())), goes_on)  # the plain model does go on with the old ones
        plan.module(batch())


def test_regions_that_run_as_they_are_go_on_as_the_plain_model() -> None:
    model = layers()
    plain, plan = copy.deepcopy(model), plan_in("regions", model, budget_mb=None)
    if not plan.plain:
        pytest.skip("on this CPU the plain step holds more than the planned one")
    losses = []
    with bf16(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the backward in the block
        for each, trained in ((plan.module, model), (plain, plain)):
            for _ in range(3):
                losses.append(loss_of(each(batch())))
                losses[-1].backward()
                stepped(trained)
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("remedy", ["leave", "clear", "cache_enabled=False"])
@pytest.mark.parametrize("way", WAYS)
def test_with_each_remedy_a_loop_has_the_plain_bits(way: str, remedy: str) -> None:
    model = layers()
    plain, plan = copy.deepcopy(model), plan_in(way, model)
    losses = []
    for each, trained in ((plan.module, model), (plain, plain)):
        with warnings.catch_warnings(), nullcontext() if remedy == "leave" else bf16(remedy == "clear"):
            warnings.simplefilter("ignore")
            for _ in range(3):
                with bf16() if remedy == "leave" else nullcontext():
                    loss = loss_of(each(batch()))
                loss.backward()
                losses.append(loss.item())
                stepped(trained)
                if remedy == "clear":
                    torch.clear_autocast_cache()
    assert losses[:3] == losses[3:]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_accumulated_within_one_block(way: str) -> None:
    model = layers()
    plain, plan = copy.deepcopy(model), plan_in(way, model, gradients="accumulated")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (plan.module, plain):
            with bf16():
                for _ in range(3):
                    loss_of(each(batch())).backward()
    assert_equal(gradients(model), gradients(plain))


def test_a_change_is_noticed_across_shapes_and_plain_calls() -> None:
    model = layers()
    plan = plan_in("whole", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with bf16():
            loss_of(plan.module(batch())).backward()
            stepped(model)
            with pytest.raises(StaleCasts):
                plan.module(batch(12))  # planned anew in the block
        with bf16():
            loss_of(plan.module(batch())).backward()
            stepped(model)
            with pytest.raises(StaleCasts), torch.no_grad():
                plan.module.eval()(batch())
        plan.module.train()
        with bf16():
            with allow_mutation_on_saved_tensors():  # runs plain
                loss_of(plan.module(batch())).backward()
            stepped(model)
            with pytest.raises(StaleCasts):
                plan.module(batch())


def test_a_parameter_that_is_not_cast_may_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    plan = plan_in("whole", model)
    with bf16():
        plan.module(batch())
        with torch.no_grad():
            model[1].weight.mul_(2)
        found = plan.module(batch())
        assert torch.equal(found, model(batch()))


def test_an_exported_step_in_a_loop_within_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_in("whole", layers())
    plan.export(tmp_path / "cast_step")
    monkeypatch.syspath_prepend(tmp_path)
    exported = importlib.import_module("cast_step").load()
    with bf16():
        output = exported(batch())
    loss_of(output).backward()
    stepped(exported)
    with bf16():
        exported(batch())
        with torch.no_grad():
            exported.get_parameter("0.0.weight").mul_(2)
        with pytest.raises(RuntimeError, match=r"0\.0\.weight was changed since this block of autocast began"):
            exported(batch())


def test_outside_of_autocast_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    plan = auto_checkpoint(model, batch(), **QUICK)
    monkeypatch.setattr(torch, "addmm", None)
    for _ in range(2):
        plan.module(batch()).square().sum().backward()
        stepped(model)


@pytest.mark.parametrize("before", [False, True])
def test_a_part_that_is_called_outside_shares_its_casts_in_eager(before: bool) -> None:
    """One weight is looked at in each step, in turn."""
    model = layers()
    plan = plan_in("whole", model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(len(list(model.parameters())) + 1):
            with bf16():
                inputs = (batch(), batch())
                calls = [model[-1], plan.module] if before else [plan.module, model[-1]]
                losses = [loss_of(call(x)) for call, x in zip(calls, inputs, strict=True)]
            sum(losses).backward()  # type: ignore[union-attr]
            model.zero_grad()
    assert any("autocast casts it" in str(w.message) for w in said)


def test_two_calls_that_share_a_cast_in_eager_are_told_of() -> None:
    plan = plan_in("whole", layers())
    with bf16(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = loss_of(plan.module(batch())) + loss_of(plan.module(batch()))
    with pytest.warns(UserWarning, match=r"gradient of [\w.]+ is a sum, as the planned step .* autocast casts"):
        loss.backward()


def test_tensors_that_torch_says_nothing_of_are_passed_over() -> None:
    base = torch.randn(3, 4, requires_grad=True) * 1
    views = base.unbind(0)
    with torch.no_grad():
        base.mul_(2)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        views[0].is_leaf  # noqa: B018
    model = layers(1)
    with bf16():
        auto_checkpoint(model, torch.randn(4, 32), budget_mb=8, **QUICK).module(torch.randn(4, 32)).sum().backward()
    assert model[0][0].weight.grad is not None
