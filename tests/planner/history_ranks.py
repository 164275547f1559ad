"""Models of random programs spread over ranks, for `tests.planner.histories`: a group of one, where none is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.passes.program_ops import Pick

REPLICATED, SHARDED = "replicated", "sharded"
Spread = Callable[[nn.Module], nn.Module]


def draw_spread(pick: Pick, model: nn.Module, way: str) -> Spread:
    """How a model like this one is spread: by DDP, or by `fully_shard` of some of its parts."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return _draw_replicated(pick) if way == REPLICATED else _draw_sharded(pick, model)


def own_seed(seed: int) -> int:
    """Another one on each rank, as batches of ranks differ."""
    return seed + 7919 * dist.get_rank() if dist.is_initialized() else seed


def _draw_replicated(pick: Pick) -> Spread:
    options: dict[str, Any] = {
        "find_unused_parameters": bool(pick(0, 2)), "gradient_as_bucket_view": bool(pick(0, 1)),
        "broadcast_buffers": bool(pick(0, 1)), "bucket_cap_mb": (25, 0.001)[pick(0, 1)],
    }  # fmt: skip
    return lambda model: DistributedDataParallel(model, **options)


def _draw_sharded(pick: Pick, model: nn.Module) -> Spread:
    blocks = [name for name, _ in model.named_modules() if name.removeprefix("blocks.").isdigit() and pick(0, 3)]
    root = not blocks or bool(pick(0, 3))
    bf16 = torch.bfloat16
    policies = (
        MixedPrecisionPolicy(), MixedPrecisionPolicy(), MixedPrecisionPolicy(bf16),
        MixedPrecisionPolicy(bf16, torch.float32), MixedPrecisionPolicy(bf16, bf16, torch.float32),
    )  # fmt: skip
    options: dict[str, Any] = {"mp_policy": policies[pick(0, 4)]}
    if pick(0, 2) == 0:
        options["reshard_after_forward"] = bool(pick(0, 1))

    def spread(plain: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name in blocks:
            fully_shard(plain.get_submodule(name), mesh=mesh, **options)
        return fully_shard(plain, mesh=mesh, **options) if root else plain

    return spread
