"""Rooflines of devices: published rates, exact picoseconds, and the same plan from every spelling."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from passes.profile import OpProfile
from passes.rates import DEVICES, Roofline, cost_function, device_roofline, is_cost
from planner import Plan, auto_checkpoint
from planner.command.cli import app
from planner.session import open_session
from solvers import PlannerError

GPUS = tuple(name for name in DEVICES if name != "cpu")
NAMES = (*DEVICES, "h100:tf32", "h200:tf32", "a100:tf32", "rtx4090:tf32")
COUNTS = st.integers(0, 10**18)
RATES = st.integers(1, 10**16)


def op(flops: int = 0, moved: int = 0, dtype: str = "float32") -> OpProfile:
    return OpProfile("op", "aten.op", flops, 0, moved, 0, dtype=dtype)


def mlp(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    with torch.device(device):
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(64, 1)).to(dtype)
    return model, torch.randn(512, 64, dtype=dtype)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().mean()


@given(COUNTS, COUNTS, RATES, RATES)
def test_picoseconds_are_exact_and_rounded_up(flops: int, moved: int, flop_rate: int, byte_rate: int) -> None:
    exact = max(Fraction(flops * 10**12, flop_rate), Fraction(moved * 10**12, byte_rate))
    cost = Roofline(flop_rate, byte_rate)(op(flops, moved))
    assert isinstance(cost, int)
    assert 0 <= cost - exact < 1


@pytest.mark.parametrize(
    ("device", "dtype", "tflops", "gigabytes"),
    [
        ("h100", "bfloat16", 989.4, 3350), ("h100", "float32", 67, 3350), ("h100:tf32", "float32", 494.7, 3350),
        ("h200", "float16", 989.4, 4800), ("a100", "bfloat16", 312, 2039), ("a100:tf32", "float32", 156, 2039),
        ("a100", "float64", 19.5, 2039), ("rtx4090", "bfloat16", 165.2, 1008),
    ],
)  # fmt: skip
def test_published_rates(device: str, dtype: str, tflops: float, gigabytes: float) -> None:
    """A TFLOP and a GB take what the data sheets say."""
    cost = device_roofline(device)
    assert cost(op(flops=10**12, dtype=dtype)) == pytest.approx(1e12 / tflops, abs=1)
    assert cost(op(moved=10**9)) == pytest.approx(1e12 / gigabytes, abs=1)


def test_ridges_are_those_of_the_devices() -> None:
    """FLOP per byte at which bf16 work stops being bound by memory."""
    ridges = {name: device_roofline(name).rate("bfloat16") / device_roofline(name).bandwidth() for name in GPUS}
    assert {name: round(ridge) for name, ridge in ridges.items()} == {
        "h100": 295, "h200": 206, "a100": 153, "rtx4090": 164,
    }  # fmt: skip


def test_a_dtype_that_is_not_named_goes_by_float32_or_the_slowest() -> None:
    assert Roofline({"float32": 10, "float16": 40}, 1).rate("int32") == 10
    assert Roofline({"bfloat16": 30, "float16": 40}, 1).rate("float32") == 30
    assert Roofline(50, 1).rate("bfloat16") == 50


def test_by_default_ops_go_by_the_rates_of_the_device_that_the_step_runs_on() -> None:
    assert cost_function("roofline") == cost_function("roofline:cpu")
    assert cost_function("roofline", torch.device("cuda")) == cost_function("roofline:a100")  # none is here


@pytest.mark.parametrize("name", NAMES)
def test_a_name_makes_the_same_roofline_again(name: str) -> None:
    cost = cost_function(f"roofline:{name}")
    assert cost.__name__ == f"roofline:{name}"
    assert cost_function(cost.__name__) == cost


@pytest.mark.parametrize(
    "cost", [Roofline(989e12, 3.35e12), Roofline({"bfloat16": 3e14, "float32": 2e13}, 2_039 * 10**9)]
)
def test_your_numbers_make_the_same_roofline_again(cost: Roofline) -> None:
    assert cost_function(cost.__name__) == cost
    assert is_cost(cost.__name__)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ("roofline:h300", "'roofline:h300' names no device: it takes roofline:NAME with one of h100, h200, a100, rtx"),
        ("roofline:cpu:tf32", "'roofline:cpu:tf32' names no device"),
        ("roofline:h100:fp8", "h100:tf32"),
        ("roofline:", "names no device"),
        ("roofline:flops=1e12", "lacks bytes=RATE"),
        ("roofline:flops=fast,bytes=1e12", "'flops=fast' is not a NAME=RATE"),
        ("roofline:flops=-1,bytes=1e12", "flops_per_second['flops']=-1.0 is not a rate"),
        ("roofline:bytes=1e12", "flops_per_second is empty"),
        ("watts", "one of flops, roofline, measured, device, roofline:DEVICE with one of h100"),
        (["roofline"], "cost=['roofline'] is unknown"),
    ],
)
def test_refused_with_what_is_allowed(cost: Any, words: str) -> None:
    with pytest.raises(PlannerError) as caught:
        auto_checkpoint(*mlp(), cost=cost, loss_fn=mean, progress=False)
    assert words in str(caught.value)
    assert not is_cost(cost)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), True, "fast"])
def test_rates_are_positive_numbers(rate: Any) -> None:
    with pytest.raises(PlannerError, match="is not a rate"):
        Roofline(rate, 1e12)
    with pytest.raises(PlannerError, match="bytes_per_second"):
        Roofline(1e12, rate)


def test_the_dtype_of_the_operands_counts() -> None:
    """bf16 products are cheaper than float32 ones where compute binds."""
    slow_memory_is_no_matter = Roofline({"float32": 1e9, "bfloat16": 1e10}, 1e15)
    costs = []
    for dtype in (torch.float32, torch.bfloat16):
        problem = open_session(*mlp(dtype), cost=slow_memory_is_no_matter, loss_fn=mean, progress=False).problem
        costs.append(sum(o.cost for o in problem.ops if "mm" in o.name))
    assert costs[0] == pytest.approx(10 * costs[1], rel=1e-6)


@pytest.mark.parametrize("name", DEVICES)
def test_a_model_on_meta_is_costed_like_a_real_one(name: str) -> None:
    """Same integers from shapes alone, every kernel at a cost and views at none."""
    real = open_session(*mlp(), cost=f"roofline:{name}", loss_fn=mean, progress=False).problem
    meta = open_session(*mlp(device="meta"), cost=f"roofline:{name}", loss_fn=mean, progress=False).problem
    assert [(o.name, o.cost) for o in meta.ops] == [(o.name, o.cost) for o in real.ops]
    assert all(o.cost > 0 for o in real.ops if "mm" in o.name or "gelu" in o.name)


@pytest.mark.parametrize("cost", ["roofline:h200", Roofline({"float32": 2e13, "bfloat16": 3e14}, 2e12)])
def test_a_plan_file_keeps_the_cost(cost: Any, tmp_path: Any) -> None:
    model, sample = mlp()
    plain = auto_checkpoint(model, sample, cost=cost, loss_fn=mean, progress=False)
    plan = auto_checkpoint(model, sample, plain.peak_bytes * 0.9 / 2**20, cost=cost, loss_fn=mean, progress=False)
    assert plan.overhead > 0
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", model, sample, loss_fn=mean)
    assert loaded.cost_name == plan.cost_name
    assert loaded.problem == plan.problem
    assert loaded.overhead == plan.overhead


FACTORY = '''
import torch
from torch import nn

def make():
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 1)), torch.randn(512, 64)
'''


def test_the_command_line_takes_it(tmp_path: Any) -> None:
    factory, out = tmp_path / "mlp.py", tmp_path / "plan.json"
    factory.write_text(FACTORY)
    arguments = ["plan", f"{factory}:make", "--budget", "90%", "--cost", "roofline:a100:tf32", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "roofline:a100:tf32" in out.read_text()
    shown = CliRunner().invoke(app, ["show", str(out)])
    assert "roofline:a100:tf32" in shown.output
    refused = CliRunner().invoke(app, [*arguments[:5], "roofline:h300"])
    assert isinstance(refused.exception, PlannerError)
    assert "h100, h200, a100, rtx4090, cpu" in str(refused.exception)
