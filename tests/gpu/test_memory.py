"""Predicted against measured on a CUDA device: allocated within .1 % and never below, reserved within 2 %."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from passes.allocator import GRANULE
from passes.device import empty_cache, round_up
from passes.run.arena import ask_for
from planner.events import Order
from tests.gpu.device import CUDA, HOLLOW, MIB, ON_A_GPU, is_expandable, measure, on_device, plan_for
from tests.gpu.table import most_reserved
from tests.planner.test_hostile import imported
from tests.planner.test_settings import Statistics
from tests.zoo.compare import differences, forward_backward, run_step
from tests.zoo.table import ENTRIES

pytestmark = ON_A_GPU
FREED = -1


@pytest.mark.parametrize("share", [None, 60, 40])
@pytest.mark.parametrize("name", ["gpt2-sdpa", "vit"])
def test_the_prediction_is_what_torch_counts(name: str, share: int | None) -> None:
    model, sample = on_device(ENTRIES[name])
    plan = plan_for(model, sample, share)
    found = measure(plan, model, sample)
    assert 0.999 * plan.peak_bytes <= found.allocated_bytes <= plan.peak_bytes
    assert plan.peak_bytes <= plan.budget_bytes
    assert found.reserved_bytes == pytest.approx(plan.reserved_bytes, rel=0.02)


def unequal() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Large tensors of sizes that no gaps of the others fit, of which the allocator takes the wrong ones."""
    layers = [nn.Linear(300, 900), nn.Mish(), nn.LayerNorm(900), nn.Linear(900, 900), nn.CELU(), nn.Linear(900, 300)]
    layers += [nn.Tanh(), nn.Linear(300, 900), nn.SiLU(), nn.Linear(900, 7), Mean()]
    return nn.Sequential(*layers).double(), (torch.randn(8000, 300, dtype=torch.double),)


@pytest.mark.parametrize("share", [None, 60])
@pytest.mark.parametrize("make", [lambda: convolutions(), unequal])
def test_the_allocator_is_asked_for_what_is_predicted_event_by_event(
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor]]], share: int | None
) -> None:
    model, sample = on_device(make)
    plan = plan_for(model, sample, share)
    has_spacers = make is unequal and share is not None and not is_expandable()
    assert bool(plan.reservation.spacing and plan.reservation.spacing.at) or not has_spacers
    for _ in range(2):  # what the first steps alone do
        plan.module(*sample).backward()
        model.zero_grad()
    torch.cuda.memory._record_memory_history(context=None)
    try:
        plan.module(*sample).backward()
        model.zero_grad()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    events = [(e["action"], round_up(e["size"], GRANULE)) for e in trace]
    found = [size if action == "alloc" else FREED for action, size in events if action in ("alloc", "free_requested")]
    prepared = plan.prepared
    predicted = Order(prepared.lowered, prepared.profiles, plan.schedule).asked(plan.reservation.spacing)[0][1]
    assert found == [FREED if size < 0 else round_up(size, GRANULE) for size in predicted]


def test_spacers_keep_what_is_reserved_low(tmp_path: Path) -> None:
    model, sample = on_device(unequal)
    plan = plan_for(model, sample, 60)
    found = measure(plan, model, sample)
    # Since torch 2.15 no workspaces of cuBLAS are kept and counted; what is aimed at may take more than a few spacers.
    most = 1.1 if torch.__version__ < "2.15" else 1.15
    assert plan.reserved_bytes == found.reserved_bytes <= most * found.allocated_bytes
    assert 0.999 * plan.peak_bytes <= found.allocated_bytes <= plan.peak_bytes and found.retries == 0
    if plan.reservation.spacing is None:
        return
    assert plan.step.spacers.device == torch.device("cuda", 0)
    exported = imported(plan.export(tmp_path / "with_spacers")).load(str(CUDA))
    del plan
    gc.collect()
    empty_cache(CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        exported(*sample).backward()
        exported.zero_grad()
    held = torch.cuda.memory_reserved() - before
    assert held <= found.reserved_bytes + 4 * MIB  # beside the planned model's own parameters, which stay


def test_more_than_foreseen_turns_spacers_off() -> None:
    """Where others allocate, a spacer could take memory that nothing else needs."""
    model, sample = on_device(unequal)
    plan = plan_for(model, sample, 60)
    if plan.reservation.spacing is None:
        pytest.skip("this allocator reserves little without spacers")
    plan.module(*sample).backward()
    assert plan.step.spacers.device is not None
    kept = torch.empty(200 * MIB, dtype=torch.uint8, device=CUDA)  # in the arena
    for _ in range(2):
        model.zero_grad()
        plan.module(*sample).backward()
    assert plan.step.spacers.device is None
    del kept
    model.zero_grad()
    empty_cache(CUDA)
    plan.module(*sample).backward()  # asked for anew
    assert plan.step.spacers.device is not None


def convolutions() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The halves of most convolutions' backward have room at once: its highest point lies elsewhere."""
    wide = [nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 1), nn.GELU()]
    narrow = [nn.Conv2d(16, 16, 3, padding=1), nn.GELU()]
    layers = [nn.Conv2d(3, 16, 3), *wide, nn.MaxPool2d(2), *narrow, nn.Flatten(), nn.LazyLinear(8), Mean()]
    model, x = nn.Sequential(*layers), torch.randn(2, 3, 66, 66)
    model(x)
    return model, (x,)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.mark.parametrize("name", ["llama", "vnet"])
def test_what_is_reserved_is_kept_low(name: str) -> None:
    model, sample = on_device(ENTRIES[name])
    plan = plan_for(model, sample, None)
    found = measure(plan, model, sample)
    assert found.reserved_bytes == pytest.approx(plan.reserved_bytes, rel=0.02)
    assert found.reserved_bytes <= most_reserved(plan.peak_bytes) < math.inf


@pytest.mark.parametrize("options", [{"optimizer": torch.optim.AdamW}, {"gradients": "accumulated"}])
def test_what_the_loop_holds_besides_is_predicted(options: dict[str, Any]) -> None:
    model, sample = on_device(ENTRIES["vit"])
    plan = plan_for(model, sample, 60, **options)
    optimizer = options["optimizer"](model.parameters()) if "optimizer" in options else None
    for parameter in model.parameters() if optimizer is None else ():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        output = forward_backward(plan.module, sample)
        del output
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    assert 0.999 * plan.peak_bytes <= torch.cuda.max_memory_allocated() <= plan.peak_bytes
    assert torch.cuda.max_memory_reserved() == pytest.approx(plan.reserved_bytes, rel=0.02)


@pytest.mark.filterwarnings("ignore:backward started")
@pytest.mark.parametrize("regions", ["whole", ["*"]])
def test_a_first_step_whose_gradient_comes_in_other_strides_keeps_the_budget(regions: Any) -> None:
    """The plain forward is replayed, and what it saves waits in the host's memory."""
    layers = [m for _ in range(8) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    model, sample = torch.nn.Sequential(*layers).to(CUDA), torch.randn(8192, 256, device=CUDA)
    plan = plan_for(model, sample, 40, regions=regions)
    with torch.no_grad():
        model(sample)  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    with pytest.warns(UserWarning, match="waits in the host's memory"):
        plan.module(sample).sum().backward()
    assert torch.cuda.max_memory_allocated() <= plan.budget_bytes < 0.7 * plan.baseline_peak_bytes


@pytest.mark.filterwarnings("ignore:backward started")
def test_a_replay_keeps_no_workspaces() -> None:
    """It runs the forward's products in the backward's thread, which no plan counts."""
    model, sample = on_device(ENTRIES["attention_modules"])
    plan = plan_for(model, sample, None)
    assert 0.999 * plan.peak_bytes <= measure(plan, model, sample).allocated_bytes <= plan.peak_bytes


def test_an_emptied_cache_is_asked_for_again() -> None:
    model, sample = on_device(ENTRIES["vit"])
    plan = plan_for(model, sample, None)
    assert plan.step.arena
    first = measure(plan, model, sample)
    assert measure(plan, model, sample) == first  # it empties the cache


@pytest.mark.parametrize("share", [None, 60])
@pytest.mark.parametrize("regions", ["whole", ["*"]])
def test_what_steps_leave_in_attributes_is_counted(regions: Any, share: int | None) -> None:
    """It lies where the step before has put it."""
    layers = [*(Statistics() for _ in range(6)), Mean()]
    model, sample = on_device(lambda: (nn.Sequential(*layers), (torch.randn(65536, 32),)))
    plan = plan_for(model, sample, share, regions=regions)
    found = measure(plan, model, sample)
    assert 0.999 * plan.peak_bytes <= found.allocated_bytes <= plan.peak_bytes
    assert found.reserved_bytes == pytest.approx(plan.reserved_bytes, rel=0.02) and found.retries == 0


class Cell(nn.Module):
    """Carries what it has computed to the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.states: dict[str, Any] = {"hidden": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.up(x + self.states["hidden"]).relu())
        self.states["hidden"] = hidden.detach()
        return x + hidden.tanh()


@pytest.mark.parametrize("share", [None, 60])
def test_state_that_steps_carry_is_counted(share: int | None) -> None:
    """It is there before the first step, which leaves another in its place."""
    model, sample = on_device(lambda: (nn.Sequential(*(Cell() for _ in range(6)), Mean()), (torch.randn(65536, 32),)))
    model(*sample).backward()
    model.zero_grad()
    plan = plan_for(model, sample, share)
    found = measure(plan, model, sample)
    assert 0.999 * plan.peak_bytes <= found.allocated_bytes <= plan.peak_bytes
    assert found.reserved_bytes == pytest.approx(plan.reserved_bytes, rel=0.02) and found.retries == 0


@pytest.mark.skipif(HOLLOW, reason="the kernels of the hollow GPU do nothing: there are no numbers to compare")
@pytest.mark.parametrize("name", ["gpt2-sdpa", "vit"])
def test_the_numbers_are_the_plain_models(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model, sample = on_device(ENTRIES[name])
        planned = plan_for(model, sample, 50)
        assert differences(run_step(model, model, sample), run_step(planned.module, model, sample)) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_each_step_asks_for_an_arena_of_its_own() -> None:
    """Also where another step's was as large, and its memory is in use."""
    device, arena = CUDA, (64 * MIB,)
    empty_cache(device)
    before = torch.cuda.memory_reserved()
    ask_for(arena, device, test_each_step_asks_for_an_arena_of_its_own)
    used = torch.empty(arena[0], dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved() == before + arena[0]
    for _ in range(2):
        ask_for(arena, device, ask_for)
        assert torch.cuda.memory_reserved() == before + 2 * arena[0]
    del used


def _fill(megabytes: int) -> str:
    environment = {**os.environ, "HOLLOW_MB": str(megabytes)}
    command = [sys.executable, "-m", "tests.gpu.fill"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout.strip() or done.stderr[-2000:]


@pytest.mark.skipif(not HOLLOW, reason="a real device's memory is what it is")
def test_without_a_budget_the_plan_fills_the_device_and_no_more() -> None:
    found = dict(pair.split("=") for pair in _fill(420).split())
    assert int(found["retries"]) == 0, found
    assert float(found["plain_mib"]) > 420, "the plain step fits: nothing was tested"
    assert float(found["reserved_mib"]) == pytest.approx(float(found["predicted_reserved_mib"]), rel=0.02)
    assert 0.95 * 420 <= float(found["reserved_mib"]) <= 420


@pytest.mark.skipif(not HOLLOW, reason="a real device's memory is what it is")
def test_a_device_that_is_too_small_is_refused_before_it_runs_out() -> None:
    assert _fill(150).startswith("BudgetError: ")


def test_an_arena_is_missed_whatever_was_allocated_since() -> None:
    """cuBLAS's workspaces, made in the first step, hid that as much had been given back."""
    device, owner = CUDA, test_an_arena_is_missed_whatever_was_allocated_since
    empty_cache(device)
    before = torch.cuda.memory_reserved()
    ask_for((22 * MIB,), device, owner)
    kept = torch.empty(60 * MIB, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before + kept.nbytes
    ask_for((22 * MIB,), device, owner)
    assert torch.cuda.memory_reserved() == before + kept.nbytes + 22 * MIB


def test_a_larger_arena_serves_a_smaller_one() -> None:
    """Two steps that take turns do not take each other's arena away."""
    device, owners = CUDA, (test_a_larger_arena_serves_a_smaller_one, ask_for)
    empty_cache(device)
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        for owner, size in zip(owners, (44 * MIB, 22 * MIB), strict=True):
            ask_for((size,), device, owner)
    freed = torch.cuda.memory_stats()["reserved_bytes.all.freed"]
    for owner, size in zip(owners, (44 * MIB, 22 * MIB), strict=True):
        ask_for((size,), device, owner)
    assert torch.cuda.memory_reserved() == before + 44 * MIB
    assert torch.cuda.memory_stats()["reserved_bytes.all.freed"] == freed
