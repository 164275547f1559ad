"""Training on two ranks, plain and planned: what is compared, and what is measured."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from passes._torch import local_part
from passes.memory import measure_peak
from planner import Plan, auto_checkpoint
from planner.integrations import plan_on_first_batch
from planner.session import open_session

from . import models

QUICK: dict[str, Any] = {"time_limit": 2.0, "gap": 0.2, "progress": False}
STEPS = 4
Call = Callable[..., Any]


@dataclass(frozen=True)
class Compared:
    """One case on one rank.

    Attributes:
        same: whether losses and parameters are those of the unplanned training, bit for bit.
        overhead: recompute over the step's cost.
        predicted, measured: bytes of the step's peak.
    """

    same: bool
    overhead: float
    budget: int
    predicted: int
    measured: int

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


def train(model: nn.Module, call: Call, micro_batches: int = 1, sync: Call | None = None) -> tuple[list[float], Any]:
    """Four steps of AdamW; losses, and each parameter as a whole."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    losses = []
    for _ in range(STEPS):
        for i in range(micro_batches):
            with sync(i == micro_batches - 1) if sync else nullcontext():
                loss = call()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole(model)


def whole(model: nn.Module) -> list[torch.Tensor]:
    """The parameters, gathered where ranks have parts of them."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def equal(got: Any, want: Any) -> bool:
    return got[0] == want[0] and all(map(torch.equal, got[1], want[1]))


def peak(model: nn.Module, step: Call, given: Iterator[torch.Tensor] | tuple[torch.Tensor, ...], times: int = 8) -> int:
    """The step's peak with what is there before it. The least of several that was measured twice: gloo's thread frees
    what it sent when it next runs, late or, of an earlier step, within this one.
    """
    step()
    model.zero_grad()
    held = sum(local_part(t).untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), *given))
    found = []
    for _ in range(times):
        found.append(held + measure_peak(step))
        model.zero_grad()
    return min([peak for peak in found if found.count(peak) > 1] or found)


def compared(
    plain: nn.Module, model: nn.Module, plan: Plan, call: nn.Module, batch: torch.Tensor, autocast: bool = False,
    of: Callable[[Iterable[int]], int] = max, **loop: Any,
) -> Compared:  # fmt: skip
    """Train `plain`, and `model` by calling `call`; what is measured is the largest, or smallest, `of` three steps."""

    def loss_of(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = module(batch, batch)
        return loss

    want = train(plain, lambda: loss_of(plain), **loop)
    got = train(model, lambda: loss_of(call), **loop)
    buckets = _size(model) if isinstance(model, DistributedDataParallel) else 0

    def step() -> None:
        count = loop.get("micro_batches", 1)
        for i in range(count):
            with loop["sync"](i == count - 1) if "sync" in loop else nullcontext():
                loss_of(call).backward()

    # What is gathered ahead is sometimes freed before the peak, sometimes after it.
    measured = of(peak(model, step, (batch,)) for _ in range(3)) + buckets
    return Compared(equal(got, want), plan.overhead, plan.budget_bytes or 0, plan.peak_bytes, measured)


# DistributedDataParallel ----------------------------------------------------------------------------------------------


def ddp_planned(rank: int, share: str = "75%", **options: Any) -> Compared:
    """The wrapped model is planned, and `plan.module` trained."""
    batch = models.tokens(rank)
    plain, model = (DistributedDataParallel(models.language(), **options) for _ in range(2))
    plan = auto_checkpoint(model, (batch, batch), share, **QUICK)
    return compared(plain, model, plan, plan.module, batch)


def ddp_around(rank: int, share: str = "75%") -> Compared:
    """The model is planned, and `plan.module` wrapped."""
    batch, model = models.tokens(rank), models.language()
    plan = auto_checkpoint(model, (batch, batch), share, reserve_mb=_mb(model), group=dist.group.WORLD, **QUICK)
    wrapped = DistributedDataParallel(plan.module)
    return compared(DistributedDataParallel(models.language()), wrapped, plan, wrapped, batch)


def ddp_no_sync(rank: int, share: str = "80%", **options: Any) -> Compared:
    """Two micro-batches, the first without communication; the plan is applied to the wrapped model."""
    batch = models.tokens(rank)
    plain, model = (DistributedDataParallel(models.language(), **options) for _ in range(2))
    plan = auto_checkpoint(model, (batch, batch), share, gradients="accumulated", **QUICK)
    want = train(plain, lambda: plain(batch, batch), 2, lambda last: nullcontext() if last else plain.no_sync())
    plan.apply(model)
    loop = {"micro_batches": 2, "sync": lambda last: nullcontext() if last else model.no_sync()}
    found = compared(models.language(), model, plan, model, batch, **loop)
    again = DistributedDataParallel(models.language(), **options)
    plan.apply(again)
    got = train(again, lambda: again(batch, batch), 2, lambda last: nullcontext() if last else again.no_sync())
    return Compared(equal(got, want), found.overhead, found.budget, found.predicted, found.measured)


def first_batch(rank: int, sharded: bool, share: str = "85%") -> Compared:
    """The first batch is planned: of a sharded model, or of one within a wrapper that is not told of."""
    batch, model = models.tokens(rank), models.language()
    waiting = plan_on_first_batch(models.shard(model) if sharded else model, share, **QUICK)
    spread: Call = models.shard if sharded else DistributedDataParallel
    wrapped = model if sharded else DistributedDataParallel(model)
    plain = spread(models.language())
    want = train(plain, lambda: plain(batch, batch))
    got = train(wrapped, lambda: wrapped(batch, batch))
    assert waiting.plan is not None
    found = compared(models.language(), wrapped, waiting.plan, wrapped, batch)
    return Compared(equal(got, want), found.overhead, found.budget, found.predicted, found.measured)


def _size(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _mb(model: nn.Module) -> float:
    return _size(model) / 2**20


# FSDP2 ----------------------------------------------------------------------------------------------------------------


def fsdp_after(rank: int, share: str = "85%", shard: Call = models.shard, **options: Any) -> Compared:
    """The sharded model is planned, and `plan.module` trained."""
    batch, model = models.tokens(rank), shard(models.language(), **options)
    plan = auto_checkpoint(model, (batch, batch), share, **QUICK)
    return compared(shard(models.language(), **options), model, plan, plan.module, batch)


def fsdp_before(rank: int, share: str = "85%") -> Compared:
    """The plan is made and applied before the model is sharded, and made anew at the second step."""
    batch, model = models.tokens(rank), models.language()
    plan = auto_checkpoint(model, (batch, batch), share, regions="blocks.*", group=dist.group.WORLD, **QUICK)
    plan.apply(model)
    models.shard(model)
    return compared_anew(models.shard(models.language()), model, plan, model, batch)


def fsdp_other_shape(rank: int, applied: bool = True, autocast: bool = False, share: str = "70%") -> Compared:
    """The sharded model is planned for another batch than it is trained on."""
    batch, model = models.tokens(rank, rows=6), models.shard(models.language())
    plan = auto_checkpoint(model, (models.tokens(rank),) * 2, share, **QUICK)
    call = plan.apply(model) if applied else plan.module
    return compared_anew(models.shard(models.language()), model, plan, call, batch, autocast=autocast)


def compared_anew(
    plain: nn.Module, model: nn.Module, plan: Plan, call: nn.Module, batch: torch.Tensor, autocast: bool = False
) -> Compared:
    """As `compared`, with the figures of the plan that was made while the model was trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compared(plain, model, plan, call, batch, autocast)
    latest = plan.module._plan_state.latest
    assert latest is not plan.module._plan_state.first.planned
    return replace(found, overhead=latest.overhead, predicted=latest.peak_bytes)


def fsdp_loaded(rank: int, share: str = "85%") -> Compared:
    """A plan file of the whole model is loaded into the sharded one, whose figures the plan then has."""
    batch, made = models.tokens(rank), models.language()
    options = {"regions": "blocks.*", "group": dist.group.WORLD, **QUICK}
    with tempfile.TemporaryDirectory() as folder:
        path = auto_checkpoint(made, (batch, batch), share, **options).save(f"{folder}/plan.json")
        model = models.shard(models.language())
        plan = Plan.load(path, model, (batch, batch), progress=False)
    return compared(models.shard(models.language()), model, plan, plan.module, batch)


def fsdp_accumulated(rank: int, share: str = "85%") -> Compared:
    """Two micro-batches, gradients reduced at the second."""
    batch, model, plain = models.tokens(rank), *(models.shard(models.language()) for _ in range(2))
    plan = auto_checkpoint(model, (batch, batch), share, gradients="accumulated", **QUICK)
    both: Any = (model, plain)

    def sync(last: bool) -> Any:
        for each in both:
            each.set_requires_gradient_sync(last)
        return nullcontext()

    return compared(plain, model, plan, plan.module, batch, micro_batches=2, sync=sync)


# Tensor parallel ------------------------------------------------------------------------------------------------------


def tensor_parallel(rank: int, share: str = "80%", spread: Call = models.spread, **options: Any) -> Compared:
    """Parameters are DTensors; both ranks have the same batch."""
    batch, model = models.tokens(0), spread(models.language())
    plan = auto_checkpoint(model, (batch, batch), share, **options, **QUICK)
    return compared(spread(models.language()), model, plan, plan.module, batch)


def spread_and_sharded(rank: int, share: str = "85%") -> Compared:
    """Tensor parallel over pairs of ranks with one batch, and sharded over the pairs."""
    batch, model = models.tokens(rank // 2), models.spread_and_shard(models.language())
    plan = auto_checkpoint(model, (batch, batch), share, group=dist.group.WORLD, **QUICK)
    return compared(models.spread_and_shard(models.language()), model, plan, plan.module, batch)


def loss_in_parallel(rank: int, share: str = "85%") -> Compared:
    """The loss is a DTensor, and so are the logits; the blocks are planned."""
    batch, model, plain = models.tokens(0), *(models.spread_logits(models.language()) for _ in range(2))
    with loss_parallel():
        plan = auto_checkpoint(model, (batch, batch), share, regions="blocks.*", **QUICK)
        return compared(plain, model, plan, plan.module, batch)


def by_hand(rank: int, share: str = "80%") -> Compared:
    """Collectives that write into their arguments, in the forward and the backward of custom functions."""
    batch, model = models.tokens(0), models.by_hand(rank)
    plan = auto_checkpoint(model, (batch, batch), share, regions="whole", **QUICK)
    # A thread of gloo's may hold what it has reduced a moment after it has said so.
    return compared(models.by_hand(rank), model, plan, plan.module, batch, of=min)


# Pipelines ------------------------------------------------------------------------------------------------------------

MICRO_BATCHES = 4


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def pipeline(rank: int, kind: Call, share: float = 0.8, rows: int = 4) -> Compared:
    """Two stages, each with a budget of its own (its minimum, where that is more)."""
    batch = models.tokens(0, MICRO_BATCHES * rows)
    plain, plain_schedule = _stage(rank, kind)
    model, schedule = _stage(rank, kind)
    plan = _plan_stage(rank, model, schedule, batch, share)
    want = _train_stage(rank, plain, plain_schedule, batch)
    same = equal(_train_stage(rank, model, schedule, batch), want)
    stage = schedule._stage
    received = [i.buffer for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()) for i in infos
                if getattr(i, "buffer", None) is not None]  # fmt: skip
    given = (*received, *stage.output_chunks, *([batch] if rank == 0 else []))
    measured = peak(model, lambda: _run(rank, schedule, batch), given)
    return Compared(same, plan.overhead, plan.budget_bytes or 0, plan.peak_bytes, measured)


def pipeline_step(rank: int, kind: Call) -> Call:
    """A call of a schedule whose stages are planned."""
    batch = models.tokens(0, 16)
    model, schedule = _stage(rank, kind)
    _plan_stage(rank, model, schedule, batch, 0.8)
    return lambda: _run(rank, schedule, batch)


def _plan_stage(rank: int, model: nn.Module, schedule: Any, batch: torch.Tensor, share: float) -> Plan:
    rows = len(batch) // MICRO_BATCHES
    inputs = batch[:rows].clone() if rank == 0 else torch.randn(rows, 32, models.WIDTH, requires_grad=True)
    session = open_session(model, inputs, pipeline=schedule, loss_fn=lambda y: loss_of(y, batch[:rows]), **QUICK)
    plan = session.plan(max(session.minimum().minimum_bytes, int(session.plain_peak_bytes * share)))
    plan.apply(model)
    return plan


def _stage(rank: int, kind: Call) -> tuple[nn.Module, Any]:
    torch.manual_seed(rank)
    model = (models.First, models.Last)[rank]()
    return model, kind(PipelineStage(model, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of)


def _run(rank: int, schedule: Any, batch: torch.Tensor) -> list[float]:
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch, losses=losses)
    return [loss.item() for loss in losses]


def _train_stage(rank: int, model: nn.Module, schedule: Any, batch: torch.Tensor) -> tuple[list[float], Any]:
    torch.manual_seed(5 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    losses = []
    for _ in range(STEPS):
        losses += _run(rank, schedule, batch)
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole(model)
