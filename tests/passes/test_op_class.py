"""Classes of ops: by torch's own tags and FLOP registry on a real graph, and what they make of a cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.calibrate import calibrated, measure_rates, rates_path, was_disturbed
from passes.op_class import PRODUCTS, STREAMS, op_class
from passes.profile import OpProfile, profile
from passes.rates import DEVICES, cost_function, device_roofline
from passes.trace.arguments import bind_sample
from passes.trace.capture import capture
from tests.passes.corruptions import one_thread

aten, planner = torch.ops.aten, torch.ops.planner
CPU, CPU_RATES = torch.device("cpu"), device_roofline("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(F.relu(self.norm(self.conv(x)))), 0.1)
        x = F.max_pool2d(x, 2).flatten(2)[:, None]  # of three dimensions, attention is several ops
        return self.out(F.scaled_dot_product_attention(x, x, x).softmax(-1)).sum()


def profiles() -> list[OpProfile]:
    torch.manual_seed(0)
    model, sample = Net(), torch.randn(2, 3, 14, 14)
    return list(profile(capture(model, bind_sample(model, sample)).graph_module.graph, measure=False).values())


def test_ops_with_flops_are_products_and_no_others() -> None:
    found = profiles()
    expected = {"matmul", "convolution", "attention", "random", "transcendental", "pointwise", "reduction"}
    assert expected <= {p.kind for p in found} <= {*PRODUCTS, *STREAMS}
    assert all((p.kind in PRODUCTS) is (p.work > 0) for p in found)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (aten.native_dropout.default, "random"), (aten.tanh.default, "transcendental"),
        (aten.tanh_backward.default, "pointwise"), (aten.gelu_backward.default, "transcendental"),
        (aten.add.Tensor, "pointwise"), (aten.clone.default, "copy"), (aten._to_copy.default, "copy"),
        (aten.cat.default, "copy"), (aten.sum.dim_IntList, "reduction"), (aten._softmax.default, "reduction"),
        (aten.native_layer_norm.default, "reduction"), (aten.max_pool2d_with_indices.default, "reduction"),
        (planner.dropout.default, "random"), (planner.mul_mask.default, "pointwise"),
        (planner.batch_norm_relu.default, "pointwise"), (planner.batch_norm_statistics.default, "reduction"),
        (planner.cross_entropy.default, "reduction"), (planner.add_relu.default, "pointwise"),
    ],
)  # fmt: skip
def test_classes(target: Any, kind: str) -> None:
    assert op_class(target) == kind


def test_a_rate_of_an_op_comes_before_its_class_and_that_before_all() -> None:
    rates = "float32=1e12,convolution.float32=2e12,bytes=1e12,random.bytes=1e10,tanh.bytes=1e9"
    cost: Any = cost_function(f"roofline:{rates}")
    assert [cost(OpProfile("n", f"aten.{op}.default", 0, 0, 1000, 0, kind=kind)) for op, kind in (
        ("add", "pointwise"), ("bernoulli", "random"), ("tanh", "transcendental"), ("tanh", "random"),
    )] == [1000, 100_000, 1_000_000, 1_000_000]  # fmt: skip
    flops = [OpProfile("n", "aten.op.default", 10**6, 0, 0, 0, dtype="float32", kind=k) for k in PRODUCTS]
    assert [cost(op) for op in flops] == [10**6, 5 * 10**5, 10**6]


@one_thread()  # on a busy machine, every run by two threads waits for the second one's turn
def test_measured_rates_are_of_every_class_and_follow_the_clock() -> None:
    state = torch.get_rng_state()
    for _ in range(3):  # another process may have the clock
        found = measure_rates(CPU)
        assert torch.equal(state, torch.get_rng_state())
        if found["tanh.bytes"] < found["pointwise.bytes"] > 4 * found["random.bytes"]:
            break
    assert {f"{kind}.bytes" for kind in STREAMS} | {"float32", "convolution.float32", "calls"} <= set(found)
    assert found["random.bytes"] < found["pointwise.bytes"] / 4
    assert found["tanh.bytes"] < found["pointwise.bytes"]


def test_the_file_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    rates_path(CPU).write_text(json.dumps({"rates": {"float32": 7, "bytes": 5}}))
    assert (calibrated(CPU).rate("float32"), calibrated(CPU).bandwidth()) == (7, 5)


@pytest.mark.parametrize("name", ["tanh.bytes", "pointwise.bytes", "convolution.float32"])
def test_rates_of_a_busy_processor_are_not_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    slow = {n: r // 5 for n, r in {"pointwise.bytes": 10**11, **DEVICES["cpu"]}.items()}
    assert not was_disturbed({**slow, "bfloat16": slow["bfloat16"] // 100}, CPU_RATES)
    busy = {**slow, name: slow[name] // 20}
    monkeypatch.setattr("passes.calibrate.measure_rates", lambda *_: busy)
    with pytest.warns(UserWarning, match="other programs kept the processor too busy"):
        assert calibrated(CPU, CPU_RATES) == CPU_RATES
    assert not rates_path(CPU).exists()
    monkeypatch.setattr("passes.calibrate.measure_rates", lambda *_: slow)
    assert calibrated(CPU, CPU_RATES).bandwidth() == slow["bytes"]
    assert rates_path(CPU).exists()
