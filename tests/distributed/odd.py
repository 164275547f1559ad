"""What people do with ranks besides plain steps: each trained unplanned and planned, to be compared bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from planner import auto_checkpoint

from . import cases, models

Made = Callable[[], nn.Module]
Trained = tuple[list[float], list[torch.Tensor]]


class Odd(models.Language):
    """A normalization over the batch, a layer that only some steps use, and a sum over all ranks."""

    def __init__(self, normed: bool = False, summed: bool = False) -> None:
        super().__init__()
        self.extra, self.used = nn.Linear(models.WIDTH, models.WIDTH), False
        self.over_batch = nn.BatchNorm1d(models.WIDTH) if normed else None
        self.summed = summed

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        if self.over_batch is not None:
            x = self.over_batch(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        if self.used:
            x = self.extra(x)
        if self.summed:
            mean = x.detach().mean((0, 1)).contiguous()
            dist.all_reduce(mean)
            x = x - mean / 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def odd(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Odd(**options)


def train(
    model: nn.Module, batches: list[torch.Tensor], joined: bool, clipped: bool, pairs: bool, kept: bool
) -> Trained:  # fmt: skip
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    losses = []
    with model.join() if joined else nullcontext():  # type: ignore[operator]
        for i, batch in enumerate(batches):
            getattr(model, "module", model).used = bool(i % 2)
            if kept:
                model.set_requires_gradient_sync(bool(i % 2))  # type: ignore[operator]
                model.set_reshard_after_backward(bool(i % 2))  # type: ignore[operator]
            loss = model(batch, batch)
            if pairs:
                loss = loss + model(batches[0], batches[0])
            loss.backward()
            losses.append(loss.item())
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
            if kept and not i % 2:
                continue
            optimizer.step()
            optimizer.zero_grad()
    return losses, [*cases.whole(model), *(b.detach().clone() for b in model.buffers())]


def same(
    rank: int, made: Made, rows: tuple[int, int] = (8, 8), steps: tuple[int, int] = (4, 4), joined: bool = False,
    clipped: bool = False, pairs: bool = False, kept: bool = False,
) -> tuple[bool, float]:  # fmt: skip
    """Whether losses, parameters and buffers are equal, and what the plan recomputes.

    Args:
        rows, steps: of each rank: how many rows its last batch has, and how many batches there are.
        kept: batches are accumulated two by two, with whole parameters kept between them.
    """
    batches = [models.tokens(10 * rank + i) for i in range(steps[rank])] + [models.tokens(rank + 5, rows[rank])]
    loop = {"joined": joined, "clipped": clipped, "pairs": pairs, "kept": kept}
    want = train(made(), batches, **loop)
    model = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another shape
        plan = auto_checkpoint(model, (batches[0], batches[0]), "85%", **cases.QUICK)
        plan.apply(model)
        got = train(model, batches, **loop)
    return cases.equal(got, want), plan.overhead


def data_parallel(model: Made = models.language, hook: Any = None, state: Any = None, **options: Any) -> nn.Module:
    made = DistributedDataParallel(model(), **options)
    if hook is not None:
        made.register_comm_hook(state() if state else dist.group.WORLD, hook)
    return made


def sharded(model: Made = models.language, **options: Any) -> nn.Module:
    return models.shard(model(), **options)


def low_rank() -> Any:
    return powerSGD_hook.PowerSGDState(dist.group.WORLD, 1, start_powerSGD_iter=2)


def two_models(rank: int) -> tuple[bool, float]:
    """A generator and a critic, each in a wrapper and with a plan of its own, trained in turns."""
    noise, real = (torch.randn(8, 32, models.WIDTH, generator=torch.Generator().manual_seed(rank + s)) for s in (0, 9))
    want, _ = _adversaries(noise, real, False)
    got, overhead = _adversaries(noise, real, True)
    return cases.equal(got, want), overhead


def _adversaries(noise: torch.Tensor, real: torch.Tensor, planned: bool) -> tuple[Trained, float]:
    torch.manual_seed(0)
    parts = [nn.Sequential(models.Block(), models.Block()) for _ in range(2)]
    generator, critic = (DistributedDataParallel(part, broadcast_buffers=False) for part in parts)
    plans = []
    if planned:
        for model, sample in ((generator, noise), (critic, noise.clone().requires_grad_())):
            plans.append(auto_checkpoint(model, sample, "90%", **cases.QUICK))
            plans[-1].apply(model)
    torch.manual_seed(5)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (generator, critic)]
    losses = []
    for _ in range(3):
        for i, optimizer in reversed(list(enumerate(optimizers))):
            made = generator(noise)
            loss = critic(made.detach()).mean() - critic(real).mean() if i else -critic(made).mean()
            loss.backward()
            optimizer.step()
            for each in optimizers:
                each.zero_grad()
            losses.append(loss.item())
    overhead = min((plan.overhead for plan in plans), default=0.0)
    return (losses, [*cases.whole(generator), *cases.whole(critic)]), overhead


PRECISION = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
ODD: dict[str, Callable[[int], tuple[bool, float]]] = {
    "DDP, a layer used now and then": partial(same, made=partial(data_parallel, odd, find_unused_parameters=True)),
    "DDP, batch norm": partial(
        same, made=partial(data_parallel, partial(odd, normed=True), find_unused_parameters=True)
    ),
    "DDP, a sum over ranks in the forward": partial(
        same, made=partial(data_parallel, partial(odd, summed=True), find_unused_parameters=True)
    ),
    "DDP, the last batch is smaller": partial(same, made=data_parallel, rows=(5, 5)),
    "DDP, the last batch is smaller on one rank": partial(same, made=data_parallel, rows=(8, 5)),
    "DDP, join": partial(same, made=data_parallel, steps=(4, 2), joined=True),
    "DDP, clipped": partial(same, made=data_parallel, clipped=True),
    "DDP, two forwards": partial(same, made=data_parallel, pairs=True),
    "DDP, fp16 hook": partial(same, made=partial(data_parallel, hook=default_hooks.fp16_compress_hook)),
    "DDP, low-rank hook": partial(same, made=partial(data_parallel, hook=powerSGD_hook.powerSGD_hook, state=low_rank)),
    "DDP, two models in turns": two_models,
    "FSDP2, the last batch is smaller on one rank": partial(same, made=sharded, rows=(8, 5)),
    "FSDP2, kept between micro-batches": partial(same, made=sharded, rows=(8, 5), steps=(3, 3), kept=True),
    "FSDP2, a layer used now and then": partial(same, made=partial(sharded, odd)),
    "FSDP2, batch norm": partial(same, made=partial(sharded, partial(odd, normed=True))),
    "FSDP2, clipped": partial(same, made=sharded, clipped=True),
    "FSDP2, two forwards": partial(same, made=sharded, pairs=True),
    "FSDP2, reduced in bf16": partial(same, made=partial(sharded, mp_policy=PRECISION)),
    "FSDP2, kept gathered": partial(same, made=partial(sharded, reshard_after_forward=False)),
    "FSDP2, on the host": partial(same, made=partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False))),
}  # fmt: skip
