"""A batch norm as statistics and result: the same bits, cheaper to run again, one op where both run at once."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from passes.errors import VerificationError
from passes.fuse import records
from passes.fuse.records import WITH_RUNNING
from passes.fuse.rules import NORMALIZE, STATISTICS
from passes.profile import profile
from passes.rewrite import Rewritten
from passes.trace.capture import capture
from passes.verify import verify
from planner import Plan
from planner.session import open_session
from tests.zoo.compare import measured_peak_bytes, same_bits

aten = torch.ops.aten


class Normed(nn.Module):
    """Two normalized convolutions; `kind` says by what, and what comes after."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList(self.norm() for _ in range(2))
        self.wide = nn.Parameter(torch.randn(32)) if kind == "strided" else None

    def norm(self) -> nn.Module:
        if self.kind == "instance":
            return nn.InstanceNorm2d(16)
        if self.kind == "frozen":
            return nn.BatchNorm2d(16).requires_grad_(False).eval()
        return nn.BatchNorm2d(16, affine=self.kind != "no weight", track_running_stats=self.kind != "alone")

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        if self.kind == "frozen":
            self.norms.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "channels last":
            x = x.to(memory_format=torch.channels_last)
        if self.kind == "strided":
            hidden = nn.functional.batch_norm(self.first(x), None, None, self.wide[::2], self.wide[1::2], True)
        else:
            hidden = self.norms[0](self.first(x))
        hidden = nn.functional.elu(hidden) if self.kind == "elu" else hidden.relu_()
        out = self.norms[1](self.second(hidden))
        if self.kind == "read twice":
            return out.relu().square().mean() + out.mean()
        if self.kind == "doubled":
            return (out + out).relu().square().mean()
        if self.kind == "added second":
            return (hidden + out).relu().square().mean()
        return (out + hidden).relu().square().mean() if self.kind == "residual" else out.relu().square().mean()


ALONE, RELU, ADD_RELU = records.BATCH_NORM.op, records.BATCH_NORM_RELU.op, records.BATCH_NORM_ADD_RELU.op
KINDS: dict[str, set[Any]] = {
    "relu": {RELU}, "no weight": {RELU}, "alone": {RELU}, "residual": {RELU, ADD_RELU}, "elu": {ALONE, RELU},
    "instance": {ALONE}, "read twice": {ALONE, RELU}, "added second": {ALONE, RELU}, "channels last": set(),
    "frozen": set(), "strided": {RELU}, "doubled": {ALONE, RELU},
}  # fmt: skip
IMAGE = torch.randn(4, 3, 72, 72, generator=torch.Generator().manual_seed(0))


def planned(kind: str, share: float) -> tuple[nn.Module, Plan]:
    """The model and its plan, `share` of the way from the least budget to the plain peak."""
    torch.manual_seed(0)
    model = Normed(kind)
    session = open_session(model, IMAGE, progress=False)
    low = session.minimum().minimum_bytes
    return model, session.plan(low + int((session.plain_peak_bytes - low) * share))


def run_again(kind: str, pattern: str) -> tuple[nn.Module, Plan]:
    """The model and a plan that runs again what the pattern names, whatever the budget."""
    torch.manual_seed(0)
    model = Normed(kind)
    return model, open_session(model, IMAGE, progress=False, recompute=[pattern]).plan(1 << 40)


def targets(module: fx.GraphModule) -> set[Any]:
    return {n.target for n in module.graph.nodes}


def after_a_step(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.zero_grad()
    loss = module(IMAGE)
    loss.backward()
    values = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
    values = [v.clone() for v in values]
    model.load_state_dict(before)
    return values


@pytest.mark.every(5)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_step_is_the_plain_one(kind: str, share: float) -> None:
    model, plan = planned(kind, share)
    found = targets(plan.prepared.traced.graph_module)
    assert found & NORMALIZE == KINDS[kind]
    assert bool(found & STATISTICS) == bool(KINDS[kind])
    assert (aten._native_batch_norm_legit.no_stats in found) == (kind == "strided")
    for expected, got in zip(after_a_step(model, model), after_a_step(model, plan.module), strict=True):
        assert same_bits(expected, got)
    assert measured_peak_bytes(plan.module, model, IMAGE, plan.static_bytes) <= plan.peak_bytes


@pytest.mark.parametrize("kind", ["relu", "alone", "residual", "instance", "elu"])
def test_a_forward_runs_the_whole_batch_norm(kind: str) -> None:
    for plan in (planned(kind, 1.0)[1], run_again(kind, "aten.relu")[1]):
        rewritten = plan.rewritten
        found = targets(rewritten.forward)
        assert not found & (STATISTICS | NORMALIZE)
        assert {WITH_RUNNING, aten._native_batch_norm_legit.no_stats} & found
    again = targets(rewritten.backward)
    assert bool(again & NORMALIZE) == (kind != "instance") and not again & STATISTICS


@pytest.mark.parametrize("pattern", ["aten._native_batch_norm*", "aten.batch_norm"])
def test_a_batch_norm_may_be_run_again_whole(pattern: str) -> None:
    model, plan = run_again("relu", pattern)
    assert WITH_RUNNING in targets(plan.rewritten.backward)
    for expected, got in zip(after_a_step(model, model), after_a_step(model, plan.module), strict=True):
        assert same_bits(expected, got)


def swap_the_statistics(again: fx.Node) -> None:
    values, weight, bias, mean, invstd = again.args[:5]
    again.args = (values, weight, bias, invstd, mean, *again.args[5:])


def take_no_bias(again: fx.Node) -> None:
    again.args = (*again.args[:2], None, *again.args[3:])


def leave_out_the_relu(again: fx.Node) -> None:
    again.target, again.args = ALONE, again.args[:5]


def take_the_bias_for_the_weight(again: fx.Node) -> None:
    again.args = (again.args[0], again.args[2], *again.args[2:])


@pytest.mark.parametrize(
    "damage", [swap_the_statistics, take_no_bias, leave_out_the_relu, take_the_bias_for_the_weight],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_broken_recompute_is_caught(damage: Any) -> None:
    planned_step = run_again("residual", "aten.relu")[1]
    traced, rewritten = planned_step.prepared.traced, planned_step.rewritten
    verify(traced, rewritten)
    damage(next(n for n in rewritten.backward.graph.nodes if n.target in NORMALIZE))
    with pytest.raises(VerificationError):
        verify(traced, rewritten)


@pytest.mark.parametrize("place", range(1, 8))
def test_a_broken_whole_is_caught(place: int) -> None:
    planned_step = planned("relu", 1.0)[1]
    rewritten: Rewritten = planned_step.rewritten
    whole = next(n for n in rewritten.forward.graph.nodes if n.target is WITH_RUNNING)
    whole.update_arg(place, {5: False, 6: 0.2, 7: 1e-4}.get(place, whole.args[2 if place != 2 else 1]))
    with pytest.raises(VerificationError):
        verify(planned_step.prepared.traced, rewritten)


def test_workspace_is_known_without_running_it() -> None:
    graph = capture(Normed("residual"), {"x": IMAGE}).graph_module.graph
    measured, known = (profile(graph, measure=m) for m in (True, False))
    sizes = {n.target: (measured[n].workspace_bytes, known[n].workspace_bytes) for n in measured}
    for target in (records.BATCH_NORM_STATISTICS.op, ADD_RELU):
        assert 0 < sizes[target][1] <= sizes[target][0] <= 1.02 * sizes[target][1]


def test_an_exported_step_holds_the_same_kernels(tmp_path: Path) -> None:
    model, plan = run_again("residual", "aten.relu")
    plan.export(tmp_path / "normed_step")
    source = (tmp_path / "normed_step" / "backward.py").read_text()
    assert "batch_norm_relu(" in source and "planner" not in source.replace("planner's", "")
    sys.path.insert(0, str(tmp_path))
    try:
        exported = importlib.import_module("normed_step").load()
    finally:
        sys.path.remove(str(tmp_path))
    model.zero_grad()
    model(IMAGE).backward()
    exported(IMAGE).backward()
    found = dict(exported.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and same_bits(parameter.grad, found[name].grad)
