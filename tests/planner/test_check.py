"""`check`: what it finds, what it costs, and that it leaves everything as it was."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import random
import re
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes.memory import measure_peak
from passes.run import kernels
from passes.trace.arguments import bind_sample
from planner import CheckError, Plan, PlannerError, pipeline
from planner.check import case, room
from planner.check.record import Checked
from planner.check.run import check_step
from planner.decided import Decided
from tests.planner import residue
from tests.planner.plants import PLANTS, REPLAYS, after, damaged, everything, op
from tests.planner.steps import Wrap, batch, conv_net, linear, mlp, plan, tight
from tests.zoo import compare

Built = tuple[nn.Module, Any, Decided]


def checked(model: nn.Module, planned: Decided, sample: Any) -> Checked:
    return check_step(model, planned, bind_sample(model, sample), None, True)


# What it finds --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> Built:
    model, sample = everything()
    made = tight(model, sample, 0.3, check=False, recompute=["aten.convolution.default", "aten.embedding.default"])
    assert made.recomputed
    return model, sample, made


@pytest.fixture(scope="module")
def replaying() -> Built:
    torch.manual_seed(0)
    model, sample = mlp(), batch(16, 32)
    made = plan(model, sample, check=False, recompute=["aten.native_dropout"])
    assert any("native_dropout" in name for name in made.recomputed)
    return model, sample, made


def test_a_right_plan_passes(built: Built, replaying: Built) -> None:
    for model, sample, planned in (built, replaying):
        assert checked(model, planned, sample).steps == 2


@pytest.mark.every(4)
@pytest.mark.parametrize("name", PLANTS)
def test_planted_divergence(name: str, built: Built) -> None:
    model, sample, planned = built
    with pytest.raises(CheckError) as caught:
        checked(model, PLANTS[name](planned, model, sample), sample)
    assert caught.value.differs
    assert caught.value.cause


@pytest.mark.parametrize("name", REPLAYS)
def test_planted_replay(name: str, replaying: Built) -> None:
    model, sample, planned = replaying
    with pytest.raises(CheckError):
        checked(model, REPLAYS[name](planned, model, sample), sample)


def test_there_are_enough() -> None:
    assert len(PLANTS) + len(REPLAYS) >= 40


def _own_ops(planned: Decided) -> dict[str, Any]:
    graphs = (planned.step.forward.graph, planned.step.backward.graph)
    targets = {str(n.target): n.target for g in graphs for n in g.nodes if n.op == "call_function"}
    return {name: target for name, target in sorted(targets.items()) if name.startswith("planner.")}


def test_wrong_kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALLEST_BLOCK", 0)
    found: set[str] = set()
    for built in (residual, everything):
        model, sample = built()
        planned = tight(model, sample, 0.4, check=False)
        assert checked(model, planned, sample)
        for name, target in _own_ops(planned).items():
            found.add(name)
            with damaged(target), pytest.raises(CheckError):
                checked(model, planned, sample)
    assert len(found) >= 4


def residual() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    conv_1, norm, conv_2 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.norm(self.conv_1(x))), 0.2)
        return F.relu(self.conv_2(x) + x).pow(2).mean()

    return Wrap(forward, conv_1=conv_1, norm=norm, conv_2=conv_2), torch.randn(4, 3, 8, 8)


def _counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.inner(x).sin().sum() * min(1.0, self.calls / 10)


def _counting_in_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    COUNTS.append(1)
    return self.inner(x).sin().sum() * len(COUNTS)


def _seeding(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return F.dropout(self.inner(x), 0.3).sum()


def _forking(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        noise = torch.rand(8)
    return (self.inner(x) * noise).sum()


def _flipping_a_coin(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).sin().sum() * (1 if random.random() < 0.5 else 2)


def _numpy_noise(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).sin().sum() * float(np.random.rand())


def _product(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).prod(1).sin().sum()


def _clamping(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.inner.weight.data = self.inner.weight.data.clamp(-0.1, 0.1)
    return self.inner(x).sin().sum()


def _clock(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x).sin().sum() * (time.perf_counter() % 100)


COUNTS: list[int] = []
UNSEEN = (_counting, _counting_in_a_list, _seeding, _forking, _flipping_a_coin, _numpy_noise, _product, _clamping,
          _clock)  # fmt: skip


@pytest.mark.parametrize("forward", UNSEEN, ids=lambda f: f.__name__.strip("_"))
def test_what_the_trace_cannot_see(forward: Callable[..., Any]) -> None:
    """A forward that a trace may get wrong is refused, found, or planned rightly: never a wrong plan."""
    torch.manual_seed(0)
    model, sample = Wrap(forward, inner=linear()), batch()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = plan(model, sample, check=True)
        except PlannerError:
            return
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed)
        expected = compare.run_step(twin, twin, sample, seed)
        random.seed(seed), np.random.seed(seed)
        assert compare.differences(expected, compare.run_step(made.module, model, sample, seed)) == []


def test_the_error_names_op_gradient_and_cause(built: Built) -> None:
    model, sample, planned = built
    with pytest.raises(CheckError, match=r"native_dropout \(aten.native_dropout.default\) in drop .*\.py:") as caught:
        checked(model, PLANTS["dropout with another probability"](planned, model, sample), sample)
    assert (caught.value.step, caught.value.op) == (1, "native_dropout")
    with pytest.raises(CheckError, match="the gradient of norm.weight") as caught:
        checked(model, PLANTS["a gradient one bit off"](planned, model, sample), sample)
    with pytest.raises(CheckError, match="though the first one is equal") as caught:
        checked(model, PLANTS["a stale weight in the forward"](planned, model, sample), sample)
    assert caught.value.step == 2
    with pytest.raises(CheckError, match=r"'hidden'.*\[1\].*in the memory of .*, plain \['logits'\]"):
        checked(model, PLANTS["the last logits on their own"](planned, model, sample), sample)
    with pytest.raises(CheckError, match="unused"):
        checked(model, PLANTS["zeros for no gradient"](planned, model, sample), sample)


def test_the_error_names_the_op_whose_route_differs() -> None:
    model = Wrap(_product, inner=linear())
    planned = plan(model, batch(), check=False)
    with contextlib.suppress(CheckError):
        assert checked(model, planned, batch()).steps == 2  # where the trace takes eager's formula
        return
    with pytest.raises(CheckError, match="First op .* another formula"):
        checked(model, planned, batch())


def test_gradients_of_outputs_come_as_planned_for() -> None:
    like = torch.empty(2, 3, 4, 4)
    strides = torch.empty(2, 3, 4, 4, memory_format=torch.channels_last).stride()
    first, second = (case.tangent(like, strides, step) for step in range(2))
    assert first.stride() == second.stride() == strides
    assert not torch.equal(first, second)


def test_state_that_forward_changes_is_named() -> None:
    model = Wrap(_counting, inner=linear())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PlannerError, match="calls"):
            plan(model, batch(), check=True)


@pytest.mark.parametrize("regions", ["whole", "inner"])
@pytest.mark.parametrize("named", [True, False])
def test_results_of_a_class_that_forward_defines(named: bool, regions: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        if named:
            return collections.namedtuple("Out", ["h", "y"])(x.sin(), self.inner(x))
        return dataclasses.make_dataclass("Out", ["h", "y"])(x.sin(), self.inner(x))

    made = plan(Wrap(forward, inner=linear()), batch(), check=True, regions=regions)
    assert made.checked.steps == 2
    assert type(made.module(batch())).__name__ == "Out"


def test_a_plain_step_that_does_not_repeat_itself_is_no_false_alarm() -> None:
    model = Wrap(lambda self, x: noisy(self.inner(x)).pow(2).sum(), inner=linear())
    found = plan(model, batch(), check=True).checked
    assert found.steps == 2
    assert "does not repeat itself" in str(found)


def test_a_step_that_repeats_itself_by_deterministic_algorithms_alone_is_compared_by_them() -> None:
    """cuDNN's gradients of convolutions differ from run to run by more than roundings unless it is told not to."""
    model = Wrap(lambda self, x: noisy(self.inner(x), 1e4).pow(2).sum(), inner=linear())
    found = plan(model, batch(), check=True).checked
    assert found.steps == 2
    assert "by deterministic algorithms of torch" in str(found)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_wrong_step_is_told_though_the_plain_one_does_not_repeat_itself() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        traced = str(type(x)) != "<class 'torch.Tensor'>"
        return noisy(self.inner(x) * (1.5 if traced else 1.0), 1e4).pow(2).sum()

    model = Wrap(forward, inner=linear())
    with pytest.raises(CheckError, match="does not repeat itself"):
        plan(model, batch(), check=True)


NOISE = itertools.cycle((0.0, 1e-6, 2e-6))


@torch.library.custom_op("check_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    """Repeats itself where torch is told to use deterministic algorithms, and `times` is given."""
    steady = times != 1.0 and torch.are_deterministic_algorithms_enabled()
    return x * (1 + (0.0 if steady else times * next(NOISE)))


noisy.register_fake(lambda x, times=1.0: torch.empty_like(x))
noisy.register_autograd(lambda ctx, gradient: (gradient, None))


# That it leaves everything as it was ----------------------------------------------------------------------------------


def observed_model() -> tuple[nn.Module, torch.Tensor, list[str]]:
    """A model in use: gradients, hooks on parameters, a frozen layer, attributes of its own, modes of training."""
    torch.manual_seed(0)
    model = conv_net()
    sample = torch.randn(4, 3, 16, 16)
    model(sample).sum().backward()
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: fired.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    model[0].requires_grad_(False)
    model.eval()
    model.history = [1, {"loss": [0.5]}]  # type: ignore[assignment]
    return model, sample, fired


def everything_about(model: nn.Module) -> Any:
    tensors = [*model.parameters(), *model.buffers()]
    return (
        residue.state(model), [t.detach().clone() for t in tensors], [id(t.grad) for t in tensors],
        [None if t.grad is None else t.grad.clone() for t in tensors], np.random.get_state()[1].tolist(),
        [m.training for m in model.modules()], copy.deepcopy(model.__dict__.get("history")),
        [len(t._backward_hooks or ()) for t in model.parameters()],
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return compare.same_bits(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_the_model_is_left_as_it_was() -> None:
    model, sample, fired = observed_model()
    planned = plan(model, sample, check=False)
    before, given = everything_about(model), sample.clone()
    assert checked(model, planned, sample).steps == 2
    assert same(everything_about(model), before)
    assert torch.equal(sample, given)
    assert not fired


@pytest.mark.parametrize("name", ["gelu one bit off", "a parameter overwritten", "the loss as float64"])
def test_it_is_after_a_difference(name: str, built: Built) -> None:
    model, sample, planned = built
    wrong = PLANTS[name](planned, model, sample)
    before = everything_about(model)
    with pytest.raises(CheckError):
        checked(model, wrong, sample)
    assert same(everything_about(model), before)


def _appending(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen.append(x.shape)
    self.settings["calls"] = self.settings.get("calls", 0) + 1
    self.record.calls += 1
    self.latest = self.inner(x)
    return self.latest.sin().sum()


def test_attributes_that_forward_sets_are_put_back() -> None:
    model = Wrap(_appending, inner=linear())
    model.seen, model.settings, model.record, model.latest = [], {}, types.SimpleNamespace(calls=0), None  # type: ignore[assignment]
    sample = batch()
    planned = plan(Wrap(lambda self, x: self.inner(x).sin().sum(), inner=model.inner), sample, check=False)
    assert checked(model, planned, sample).steps == 2
    assert (model.seen, model.settings, model.record.calls, model.latest) == ([], {}, 0, None)


class Merging(dict[str, int]):
    """Adds up, as `Counter` does; a list that keeps what it held, and a deque that repeats, alike."""

    def update(self, *others: Any, **more: int) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = self.get(key, 0) + value


class Keeping(list[int]):
    def __setitem__(self, place: Any, values: Any) -> None:
        super().extend(values)


class Repeating(collections.deque[int]):
    def extend(self, values: Any) -> None:
        super().extend([*values] * 2)


class Sorted(collections.OrderedDict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key, last=False)


def _counting_in(self: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(self.seen, dict):
        self.seen["a"] = self.seen.get("a", 0) + 1
    else:
        self.seen.append(len(x))
    return self.inner(x).sin().sum()


@pytest.mark.filterwarnings("ignore:forward sets", "ignore:planning anew")
@pytest.mark.parametrize("check", [False, "auto"])
@pytest.mark.parametrize("kind", [collections.Counter, Merging, Keeping, Repeating, Sorted])
def test_containers_of_other_classes_are_put_back(kind: type[Any], check: Any) -> None:
    model = Wrap(_counting_in, inner=linear())
    model.seen = kind({"b": 2, "a": 1} if issubclass(kind, dict) else [1])
    before = [*getattr(model.seen, "items", model.seen.__iter__)()]
    planned = plan(model, batch(), check=check, regions=["inner"])
    assert [*getattr(model.seen, "items", model.seen.__iter__)()] == before
    planned.module(batch(6)).backward()
    assert (model.seen["a"] if issubclass(kind, dict) else len(model.seen)) == 2


@pytest.mark.every(3)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
def test_it_is_after_an_interrupt(share: float) -> None:
    model, sample, fired = observed_model()
    planned = plan(model, sample, check=False)
    among = (str(residue.ROOT / "planner" / "check"),)
    with residue.interrupted(None, among=among) as lines:
        checked(model, planned, sample)
    before = everything_about(model)
    with pytest.raises(KeyboardInterrupt), residue.interrupted(int(lines.count * share), among=among):
        checked(model, planned, sample)
    assert same(everything_about(model), before)
    assert not fired
    assert checked(model, planned, sample)


# What it costs, and when it runs --------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the plain and the planned step run; `fail` counts down to a plain step that fails."""
    counts = {"plain": 0, "planned": 0, "fail": -1}
    plain, planned = case.run_model, Decided.run

    def run_plain(*arguments: Any) -> Any:
        counts["plain"] += 1
        if counts["plain"] == counts["fail"]:
            raise IndexError("out of range")
        time.sleep(counts.get("sleep", 0))
        return plain(*arguments)

    def run_planned(*arguments: Any) -> Any:
        counts["planned"] += 1
        return planned(*arguments)

    monkeypatch.setattr(case, "run_model", run_plain)
    monkeypatch.setattr(Decided, "run", run_planned)
    return counts


def test_it_costs_two_steps(calls: dict[str, int]) -> None:
    assert plan(mlp(), batch(4, 32)).checked.steps == 2
    assert (calls["plain"], calls["planned"]) == (2, 2)


def test_no_check(calls: dict[str, int]) -> None:
    made = plan(mlp(), batch(4, 32), check=False)
    assert not made.checked
    assert "not run" in str(made.checked)
    assert (calls["plain"], calls["planned"]) == (0, 0)


def auto(model: nn.Module, planned: Decided, sample: Any) -> Checked:
    return check_step(model, planned, bind_sample(model, sample), None, "auto")


def test_auto_takes_no_longer_than_planning(built: Built, calls: dict[str, int]) -> None:
    model, sample, planned = built
    calls["sleep"] = 0.6  # type: ignore[assignment]
    assert auto(model, replace(planned, seconds={"solve": 2.0}), sample).steps == 1
    assert (calls["plain"], calls["planned"]) == (1, 1)
    slow = auto(model, replace(planned, seconds={"solve": 0.5}), sample)
    assert re.search("a step of the plain model takes .* a check is given 1.0 s", str(slow))
    assert (calls["plain"], calls["planned"]) == (2, 1)


def test_auto_needs_free_memory(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample, planned = built
    monkeypatch.setattr(room, "free_bytes", lambda _: 1000)
    assert re.search("needs .* and .* are free", str(auto(model, planned, sample)))
    assert checked(model, planned, sample).steps == 2
    assert room._available() > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process_are_kept(name: str) -> None:
    resource = pytest.importorskip("resource")
    kind, (pages, *_, data, _) = getattr(resource, name), map(int, Path("/proc/self/statm").read_text().split())
    used = (pages if name == "RLIMIT_AS" else data) * resource.getpagesize()
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (used + (100 << 20), hard))
        free = room.free_bytes(torch.device("cpu"))
    finally:
        resource.setrlimit(kind, (soft, hard))
    assert 60 << 20 < free <= 110 << 20


def test_memory_that_it_needs_is_not_underestimated() -> None:
    model, sample = mlp(width=64), batch(512, 64)
    planned = plan(model, sample, check=False)
    needed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "show_bytes", lambda size: needed.append(size) or "")
        room.room_for(planned, [*model.parameters(), sample])
    assert measure_peak(lambda: checked(model, planned, sample)) <= 1.2 * needed[0]


def test_a_plain_step_that_fails(calls: dict[str, int]) -> None:
    model, sample = mlp(), batch(4, 32)
    planned = plan(model, sample, check=False)
    calls["fail"] = 2  # with the other batch: the same batch twice
    assert checked(model, planned, sample).steps == 2
    calls["plain"] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case, "run_model", lambda *_: 1 / 0)
        assert "the plain step raises ZeroDivisionError" in str(auto(model, planned, sample))
        with pytest.raises(CheckError, match="cannot run: the plain step raises ZeroDivisionError"):
            checked(model, planned, sample)


def test_meta_device() -> None:
    with torch.device("meta"):
        model, sample = mlp(), batch(4, 32)
    assert "meta device" in str(plan(model, sample).checked)
    with pytest.raises(CheckError, match="meta device"):
        plan(model, sample, check=True)


# How it is asked for --------------------------------------------------------------------------------------------------


def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every plan scales what its first gelu gives."""
    real = pipeline.bind_step

    def make(*arguments: Any) -> Any:
        step = real(*arguments)
        graph = step.forward.graph
        after(graph, op(graph, "gelu"), lambda t: t * 1.0001)
        step.forward.recompile()
        return step

    monkeypatch.setattr(pipeline, "bind_step", make)


def test_no_wrong_plan_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    model, sample = mlp(), batch(4, 32)
    for how in ({}, {"check": "auto"}, {"check": True}):
        with pytest.raises(CheckError):
            plan(model, sample, **how)
    made = plan(model, sample, check=False)
    with pytest.raises(CheckError):
        made.check(model, sample)


def test_plans_for_other_shapes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample, other = mlp(), batch(4, 32), batch(6, 32)
    asked, automatic, never = (plan(model, sample, check=how) for how in (True, "auto", False))
    plain = compare.run_step(model, model, other)

    def differences(made: Plan) -> list[str]:
        return compare.differences(plain, compare.run_step(made.module, model, other))

    sabotage(monkeypatch)
    with pytest.warns(UserWarning, match="planning anew"):
        assert differences(never)
    with pytest.warns(UserWarning, match="planning anew"), pytest.raises(CheckError):
        asked.module(other)
    with pytest.warns(UserWarning, match="Such calls run in eager, not under the budget"):
        assert not differences(automatic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not differences(automatic)  # nor is it planned again


def test_unknown_value() -> None:
    for value in ("yes", 1, None):
        with pytest.raises(PlannerError, match='takes "auto", True or False'):
            plan(mlp(), batch(4, 32), check=value)


def test_every_view_says_it() -> None:
    made = plan(mlp(), batch(4, 32), check=True)
    for text in (repr(made), re.sub(r"\s+", " ", str(made)), made._repr_html_()):
        assert made.checked.line in text
    assert "2 steps beside the plain model, equal bit for bit" in made.checked.line


def test_check_of_a_plan(tmp_path: Path) -> None:
    model, sample = mlp(), batch(4, 32)
    made = plan(model, sample, check=False)
    again = Plan.load(made.save(tmp_path / "plan.json"), model, sample, progress=False)
    assert "not run" in str(again.checked)
    assert again.check(model, sample) == again.checked
    assert again.checked.steps == 2
    again.apply(model)
    assert again.check(sample=sample).steps == 2
    assert getattr(model.forward, "runs_plan", False)
    assert again.check(copy.deepcopy(again.remove(model)), sample).steps == 2


def test_check_of_a_plan_with_another_sample_or_model() -> None:
    model, sample = mlp(), batch(4, 32)
    made = plan(model, sample, check=False)
    with pytest.raises(PlannerError, match=r"not been made for this model and sample: .*\(5, 32\).*expects \(4, 32\)"):
        made.check(model, batch(5, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.module(batch(5, 32))
    assert made.check(model, batch(5, 32)).steps == 2
    for arguments, message in (((), "a sample"), ((model, {"x": sample}), "does not fit"),
                               ((mlp(width=16), batch(4, 16)), "has not been made for this model")):  # fmt: skip
        with pytest.raises(PlannerError, match=message):
            made.check(*arguments)


def test_under_autocast() -> None:
    model, sample = mlp(), batch(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(model, sample, check=True).checked.steps == 2


def test_loss_function() -> None:
    made = plan(linear(), (batch(), torch.randint(0, 8, (4,))), loss_fn=F.cross_entropy, check=True)
    assert made.checked.steps == 2


def test_a_plan_for_the_gradient_of_a_sum_is_checked() -> None:
    x = batch(width=32)
    checked = plan(mlp(), x, check=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first replays the plain forward, the second is planned anew
        for _ in range(2):
            checked.module(x).sum().backward()


def test_buffers_that_are_not_compared_are_counted() -> None:
    model = Wrap(
        lambda self, x: self.outer(checkpoint(self.inner, x, use_reentrant=False)),
        inner=nn.Sequential(linear(), nn.BatchNorm1d(8)), outer=nn.BatchNorm1d(8),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="contains an update of inner.1.running_mean"):
        found = plan(model, batch(), check=True).checked
    assert "3 changed buffers, generators; not compared: 3 buffers that the plain step updates again" in str(found)
