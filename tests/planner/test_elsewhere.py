"""Planning for another device than the model is on, and the costs of devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from passes.device import KINDS
from planner import Plan, PlannerError, auto_checkpoint
from tests.zoo.compare import differences, run_step

MIB = 1 << 20


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 15 * 15, 5))
    return model, torch.randn(4, 8, 15, 15)


def plan(share: float | None = None, **options: Any) -> Plan:
    model, sample = convolutional()
    asked: dict[str, Any] = {"progress": False, **options}
    free = auto_checkpoint(model, sample, **asked)
    if share is None:
        return free
    budget = free.static_bytes + share * (free.baseline_peak_bytes - free.static_bytes)
    return auto_checkpoint(model, sample, budget / MIB, **asked)


def costs(found: Plan) -> dict[str, int]:
    return {op.name: op.cost for op in found.problem.ops}


def test_sizes_are_those_of_the_other_devices_allocator() -> None:
    here, there = plan(), plan(device="cuda")
    assert all(t.bytes % 512 == 0 for t in there.problem.tensors)
    assert any(t.bytes % 512 for t in here.problem.tensors)
    assert there.static_bytes >= here.static_bytes + KINDS["cuda"].product_bytes
    assert here.notes == ()
    assert "planned for cuda on a CPU" in there.notes[1]


@pytest.mark.parametrize("device", ["h100", "a100:tf32", "cuda", torch.device("cuda", 0)])
def test_recompute_is_priced_by_the_other_devices_rates(device: Any) -> None:
    rates = {"h100": "h100", "a100:tf32": "a100:tf32"}.get(str(device), "a100")
    there = plan(device=device)
    assert costs(there) == costs(plan(cost=f"roofline:{rates}"))
    assert ("no rates of this GPU" in there.notes[0]) is (str(device) not in ("h100", "a100:tf32"))


def test_the_step_that_is_planned_elsewhere_has_the_plain_steps_numbers_here(tmp_path: Path) -> None:
    planned = plan(0.6, device="h100")
    assert planned.recomputed
    model, sample = convolutional()
    expected = run_step(model, model, sample)
    model, sample = convolutional()
    loaded = Plan.load(planned.save(tmp_path / "plan.json"), model, sample)
    assert (loaded.peak_bytes, loaded.notes[0]) == (planned.peak_bytes, planned.notes[0])
    assert differences(expected, run_step(loaded.module, model, sample)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "h300"}, "device='h300' is unknown: it takes one of cpu, cuda, h100"),
        ({"device": 3}, "device=3 is unknown"),
        ({"device": "h100", "cost": "measured"}, "measured on this machine"),
        ({"device": "cuda", "cost": "device"}, 'leave cost="roofline"'),
    ],
)
def test_what_is_not_known_elsewhere_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlannerError) as caught:
        plan(**options)
    assert words in str(caught.value)


SCRIPT = """
import sys
from tests.planner.test_elsewhere import plan
plan(0.6, cost="device").save(sys.argv[1])
"""


@pytest.mark.slow
def test_plan_files_of_two_processes_are_equal_under_one_calibration(tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "2"):
        out = tmp_path / f"{seed}.json"
        environment = {**os.environ, "CHECKPOINT_PLANNER_CACHE": str(tmp_path), "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", SCRIPT, out], env=environment, check=True, timeout=240)
        texts.append(out.read_bytes())
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["options"]["cost"].startswith("roofline:")
    assert len(list(tmp_path.glob("*-torch-*.json"))) == 1


def test_a_calibration_that_is_damaged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    from passes.calibrate import rates_path

    rates_path(torch.device("cpu")).write_text('{"rates": {"float32": -1}}')
    with pytest.raises(PlannerError, match="delete it to measure them anew"):
        plan(cost="device")


def blocks() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(16, 32)


def test_regions_keep_the_rates_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    planned = auto_checkpoint(*blocks(), cost="device", regions="*", progress=False)
    assert planned.cost_name.startswith("roofline:")


def test_regions_are_planned_on_the_models_own_device_alone() -> None:
    with pytest.raises(PlannerError, match="device='h100' with regions"):
        auto_checkpoint(*blocks(), device="h100", regions="*", progress=False)
