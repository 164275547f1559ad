"""Wrapped and sharded models in a process group of one rank, which gathers and reduces as several do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from passes._torch import local_part
from passes.errors import CaptureError, Unsupported
from passes.memory import measure_peak
from passes.run.step import ChangedInPlace
from planner import Plan, PlanFileError, auto_checkpoint
from planner.integrations import plan_on_first_batch
from planner.integrations.compile import checkpoint_planner, plans
from solvers.errors import MIB
from tests.planner.histories import RANKS, run

QUICK: dict[str, Any] = {"solver": "greedy", "time_limit": 2, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))


def sharded(root: bool = True, model: nn.Sequential | None = None, **options: Any) -> nn.Sequential:
    model, mesh = model or blocks(), init_device_mesh("cpu", (1,))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options) if root else model


def planned(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    plan = auto_checkpoint(model, x, "95%", **{**QUICK, **options})
    assert plan.recomputed
    return plan


def parts(model: nn.Module) -> list[torch.Tensor]:
    return [local_part(p) for p in model.parameters()]


def assert_same_training(module: nn.Module, model: nn.Module, plain: nn.Module, batches: list[torch.Tensor]) -> None:
    for each, owner in ((module, model), (plain, plain)):
        optimizer = torch.optim.AdamW(owner.parameters(), 1e-2, foreach=False)
        for batch in batches:
            each(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, parts(model), parts(plain)))


def test_planning_leaves_what_scatters_for_state_dict() -> None:
    model, x = sharded(), torch.randn(64, 16)
    planned(model, x)
    with torch.no_grad():
        model(x)  # leaves the parameters of the root's own gathered
    assert all(isinstance(t, DTensor) for t in model.state_dict().values())


def test_planning_steps_no_optimizer_in_the_backward() -> None:
    model, x = sharded(), torch.randn(64, 16)
    called = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    before = [p.clone() for p in parts(model)]
    plan = planned(model, x, gradients="consumed")
    assert called == [] and all(map(torch.equal, before, parts(model)))
    plan.module(x).square().mean().backward()
    assert len(called) == len(before)


class CutShort(nn.Module):
    """Between blocks: raises in the forward, or in the backward, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.error = "", BaseException()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise self.error
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self._raise)
        return x * 2.0

    def _raise(self, gradient: torch.Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")], ids=["interrupted", "failed"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.every(1)
def test_a_planning_step_that_is_cut_short_leaves_a_model_that_trains(where: str, error: BaseException) -> None:
    def model() -> nn.Sequential:
        model = blocks()
        model.insert(1, CutShort()).append(nn.Linear(16, 16))  # the root has parameters of its own
        for i in (0, 2, 3):
            fully_shard(model[i], mesh=init_device_mesh("cpu", (1,)))
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    (cut, plain), x = (model() for _ in range(2)), torch.randn(64, 16)
    cut[1].where, cut[1].error = where, error
    with pytest.raises((type(error), CaptureError)):
        auto_checkpoint(cut, x, "95%", **QUICK)
    cut[1].where = ""
    assert_same_training(cut, cut, plain, [x, x])
    assert_same_training(planned(cut, x).module, cut, plain, [x, x])


@pytest.mark.parametrize("reshard", [True, False])
def test_whole_parameters_that_an_evaluation_leaves_are_in_no_ones_way(reshard: bool) -> None:
    options = {"root": False, "reshard_after_forward": reshard}
    (model, plain), x = (sharded(**options) for _ in range(2)), torch.randn(64, 16)
    plan = planned(model, x, on_new_shape="replan")
    with torch.no_grad():
        model(x), plain(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another shape
        assert_same_training(plan.module, model, plain, [torch.randn(32, 16), x, torch.randn(32, 16)])


@pytest.mark.parametrize("reduce", [None, torch.float64])
def test_a_new_length_among_micro_batches_loses_none_of_what_they_accumulated(reduce: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    (model, plain), x = (sharded(mp_policy=policy) for _ in range(2)), torch.randn(64, 16)
    plan = planned(model, x, on_new_shape="replan")
    plan.apply(model)
    batches = [x, torch.randn(32, 16), torch.randn(48, 16)]
    for each in (model, plain):
        for i, batch in enumerate(batches):
            each.set_requires_gradient_sync(i == len(batches) - 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # another shape
                each(batch).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(local_part(p.grad), local_part(q.grad)) for p, q in pairs)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = blocks(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.body(x)).sin()
        return output


def headed() -> nn.Module:
    """With parameters of the root's own behind its regions."""
    torch.manual_seed(0)
    model = Headed()
    sharded(root=False, model=model.body)
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("gradients", ["fresh", "accumulated"])
def test_what_is_planned_on_a_first_micro_batch_counts_what_the_last_one_holds(gradients: str) -> None:
    (model, plain, other), x = (headed() for _ in range(3)), torch.randn(64, 16)
    waiting = plan_on_first_batch(model, "95%", gradients=gradients, **QUICK)
    for each in (model, plain):
        for last in (False, True):
            each.set_requires_gradient_sync(last)
            each.set_is_last_backward(last)
            each(x).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(local_part(p.grad), local_part(q.grad)) for p, q in pairs)
    assert waiting.plan is not None
    assert waiting.plan.peak_bytes == planned(other, x, gradients=gradients).peak_bytes


@pytest.mark.parametrize(("root", "applied"), [(True, True), (True, False), (False, False)])
def test_whole_parameters_from_before_an_optimizer_step_serve_where_eager_uses_them(root: bool, applied: bool) -> None:
    (model, plain), x = (sharded(root, reshard_after_forward=True) for _ in range(2)), torch.randn(64, 16)
    plan = planned(model, x, recompute=["0.0", "1.0", "2.0"])
    assert "addmm" in str(plan.recomputed)  # which reads a gathered weight once more
    steps = [(plan.apply(model) if applied else plan.module, model), (plain, plain)]
    owners = [list(owner.parameters()) for _, owner in steps]
    optimizers = [torch.optim.SGD(own, 0.5) for own in owners]
    for kept, said in ((False, False), (True, False), (True, True), (False, False), (False, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for (module, owner), optimizer in zip(steps, optimizers, strict=True):
                for block in owner.modules():
                    if isinstance(block, FSDPModule):
                        block.set_reshard_after_backward(not kept)
                optimizer.zero_grad()
                module(x).square().mean().backward()
        assert said == ("kept the whole parameters of 0, 1, 2" in "".join(str(w.message) for w in caught))
        assert all(torch.equal(local_part(p.grad), local_part(q.grad)) for p, q in zip(*owners, strict=True))
        for optimizer in optimizers:
            optimizer.step()


def test_a_new_length_is_planned_with_what_an_evaluation_left_gathered_as_it_was() -> None:
    model, plain = headed(), headed()
    planned(model, torch.randn(64, 16), on_new_shape="replan").apply(model)
    x, found = torch.randn(32, 16), []
    for each in (model, plain):
        own = list(each.parameters())
        with torch.no_grad():
            each(x)  # leaves the root's own gathered
            for parameter in own:
                parameter.mul_(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another shape
            loss = each(x).square().mean()
        loss.backward()
        found.append([loss, *(local_part(p.grad) for p in own)])
    assert all(map(torch.equal, *found))


def two_micro_batches(module: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        module(x).square().mean().backward()


KEPT = [(False, "MiB of gradients that the plan"), (True, r"parameters \(set_reshard_after_backward\(False")]


@pytest.mark.parametrize(("kept", "said"), KEPT)
def test_what_sharded_micro_batches_hold_besides_the_plan_is_said(kept: bool, said: str) -> None:
    model, x = sharded(), torch.randn(64, 16)
    plan = planned(model, x)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not kept)
    with pytest.warns(UserWarning, match=said):
        two_micro_batches(plan.module, x)
    room = auto_checkpoint(model, x, "200%", gradients="accumulated", reserve_mb=1, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        room.module(x).square().mean().backward()


def test_inputs_that_fully_shard_casts_are_those_of_the_plan() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    (model, plain), x = (sharded(mp_policy=policy) for _ in range(2)), torch.randn(64, 16)
    plan = planned(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a call that is not planned for says so
        assert_same_training(plan.module, model, plain, [x, torch.randn(64, 16)])
        plan.apply(model)
        assert_same_training(model, model, plain, [x, torch.randn(64, 16)])


def test_a_model_that_is_sharded_under_a_policy_once_it_is_planned_is_planned_anew() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plan = planned(model := blocks(), x := torch.randn(64, 16), regions="*", on_new_shape="replan")
    plan.apply(model)
    sharded(model=model, mp_policy=policy)
    with pytest.warns(UserWarning, match="planning anew"):
        assert_same_training(model, model, sharded(mp_policy=policy), [x, x, torch.randn(64, 16)])
    assert plan.module._plan_state.latest is not plan.module._plan_state.first.planned


def test_an_optimizer_that_steps_between_forward_and_backward_is_refused_by_name() -> None:
    model, x = sharded(), torch.randn(64, 16)
    plan = planned(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, second = (plan.module(x).square().mean() for _ in range(2))
    second.backward()
    optimizer.step()
    with pytest.raises(ChangedInPlace, match="weight was changed in place between forward and backward"):
        first.backward()


def test_replicas_on_top_of_sharding_hooks_are_refused_by_name() -> None:
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    model = replicate(blocks(), mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("replicate",)))
    with pytest.raises(Unsupported, match=r"replicate\(\) of torch.distributed at the model.*DistributedDataParallel"):
        auto_checkpoint(model, torch.randn(64, 16), "95%", **QUICK)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = blocks()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        return {"loss": hidden.square().mean(), "hidden": hidden}


def test_a_plan_file_that_reserves_what_a_wrapper_holds_is_for_what_it_wraps(tmp_path: Path) -> None:
    model, x = blocks(), torch.randn(64, 16)
    plan = auto_checkpoint(model, x, "95%", reserve_mb=sum(p.nbytes for p in model.parameters()) / MIB, **QUICK)
    plan.save(tmp_path / "plan.json")
    wrapped = DistributedDataParallel(model)
    with pytest.raises(PlanFileError, match=r"MiB of DistributedDataParallel, which .*: load it for model.module"):
        Plan.load(tmp_path / "plan.json", wrapped, x, progress=False)
    assert Plan.load(tmp_path / "plan.json", wrapped.module, x, progress=False).peak_bytes == plan.peak_bytes


def test_another_start_of_the_backward_of_a_wrapped_model_is_replayed() -> None:
    model, x = Two(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    plan = planned(DistributedDataParallel(model), x)
    with pytest.warns(UserWarning, match="replays the plain forward"):
        plan.module(x)["hidden"].sin().sum().backward()
    plain(x)["hidden"].sin().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_wrapped_model_is_planned_on_its_first_batch_as_what_it_wraps_would_be() -> None:
    plain, model, inner = Two(), DistributedDataParallel(Two()), Two()
    waiting = [plan_on_first_batch(model, "95%", **QUICK), plan_on_first_batch(inner, "95%", **QUICK)]
    wrapped = DistributedDataParallel(inner)
    for each in (plain, model, wrapped):
        each(torch.ones(64, 16))["loss"].backward()
    assert len({first.plan.peak_bytes for first in waiting if first.plan is not None}) == 1
    for other in (model, wrapped):
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(other.parameters(), plain.parameters(), strict=True))


def test_what_a_wrapper_does_is_looked_at_on_the_first_batch() -> None:
    model = Two()
    plan_on_first_batch(model, "95%", **QUICK)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, noop_hook)
    with pytest.warns(UserWarning, match="what the communication hook .* holds is not known"):
        wrapped(torch.ones(64, 16))


class Wide(nn.Module):
    """Of a class that Dynamo looks into, unlike torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("way", ["ddp", pytest.param("fully_shard", marks=pytest.mark.slow)])
def test_a_wrapped_model_compiled_under_a_budget_trains_as_uncompiled(way: str) -> None:
    """DDP's buckets and hooks of sharded modules cut it into graphs, which share the budget."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Wider()
    plain, options = copy.deepcopy(model), {"budget_mb": "80%", "inner": "eager", "time_limit": 0.2}
    if way == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model, bucket_cap_mb=2)
    else:
        wrapped = model
        sharded(model=cast(Any, model.blocks), root=False)
    compiled: Any = torch.compile(wrapped, backend=checkpoint_planner, options=options)
    assert_same_training(compiled, model, plain, [torch.randn(2048, 256) for _ in range(3)])
    assert 0 < max(program.overhead for program in plans(options)) < 1
    x = torch.randn(2048, 256)

    def peak(run: Any) -> int:
        for _ in range(3):
            run.zero_grad()
            run(x).backward()
        run.zero_grad()
        return measure_peak(lambda: run(x).backward())

    if way == "ddp":  # between sharded blocks the model's own code runs, which is not planned
        resident = sum(p.nbytes for p in plain.parameters()) + x.nbytes
        unplanned: Any = torch.compile(plain, backend="aot_eager")
        assert peak(compiled) + resident <= 0.8 * (peak(unplanned) + resident)


@pytest.mark.every(1)
@pytest.mark.parametrize("way", ["applied", "in place", "first batch"])
def test_a_sharded_model_compiled_after_apply_runs_the_planned_step(way: str) -> None:
    """Dynamo looks into neither the step nor the hooks that look for its plan before the model's own hooks."""
    torch._dynamo.reset()
    (model, plain), x = (sharded() for _ in range(2)), torch.randn(64, 16)
    if way == "first batch":
        plan_on_first_batch(model, "95%", **QUICK)
    else:
        planned(model, x).apply(model)
    if way == "in place":
        model.compile(backend="eager")
    compiled: Any = model if way == "in place" else torch.compile(model, backend="eager")
    assert_same_training(compiled, model, plain, [x, torch.randn(64, 16)])


@pytest.mark.every(8)
@pytest.mark.parametrize("first", [150_346, 150_348, 150_371, 150_374])
@pytest.mark.parametrize("way", RANKS)
@pytest.mark.filterwarnings("ignore")
def test_random_models_train_for_random_steps(way: str, first: int) -> None:
    assert sum(run(seed, way=way).steps for seed in range(first, first + 3)) > 2
