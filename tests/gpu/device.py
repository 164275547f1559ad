"""The CUDA device that these tests run on: a real one, or the hollow one of `make hollow`, whose kernels do nothing."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from passes.device import empty_cache
from planner import BudgetError, Plan, auto_checkpoint
from tests.zoo.compare import forward_backward

MIB = 1 << 20
AVAILABLE = torch.cuda.is_available()
HOLLOW = AVAILABLE and "Hollow" in torch.cuda.get_device_name()
CUDA = torch.device("cuda", 0)
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not AVAILABLE, reason="there is no CUDA device; `make hollow` measures memory without one"),
]

if HOLLOW:  # its cuDNN does not answer
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class Measured:
    """What torch's allocator counted over some steps, at its highest."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int


def is_expandable() -> bool:
    """Whether the allocator's segments grow."""
    block = torch.empty(1 << 20, device=CUDA)
    found = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    del block
    return found


def on_device(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    """A model and its sample on an allocator that caches nothing."""
    gc.collect()
    if AVAILABLE:
        empty_cache(CUDA)
    torch.manual_seed(0)
    model, sample = make()
    if HOLLOW and isinstance(sample, dict):  # forward asks whether it is all ones, and nothing answers truly here
        sample.pop("attention_mask", None)
    return model.train().to(CUDA), tree_map_only(torch.Tensor, lambda t: t.to(CUDA), sample)


def plan_for(model: nn.Module, sample: Any, share: int | None, **options: Any) -> Plan:
    """A plan at `share` % of what the step needs above static, or at the minimum that the refusal states."""
    free = plan_within(model, sample, float(1 << 20), **options)
    if share is None:
        return free
    budget = free.static_bytes + (free.baseline_peak_bytes - free.static_bytes) * share // 100
    try:
        return plan_within(model, sample, budget / MIB, **options)
    except BudgetError as error:
        minimum = error.minimum_mb
    return plan_within(model, sample, minimum, **options)


def plan_within(model: nn.Module, sample: Any, budget_mb: float | None, **options: Any) -> Plan:
    """A plan within so much, soon."""
    asked: dict[str, Any] = {"check": not HOLLOW, "progress": False, "time_limit": 5.0, **options}
    return auto_checkpoint(model, sample, budget_mb, **asked)


def measure(plan: Plan, model: nn.Module, sample: Any, steps: int = 4, again: bool = True) -> Measured:
    """Run some steps, each from cleared gradients; once `again` where they taught the planner what to plan for."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    with warnings.catch_warnings(record=True) as said:
        for _ in range(steps):
            output = forward_backward(plan.module, sample)
            del output
            for parameter in model.parameters():
                parameter.grad = None
    if again and any("later calls are planned for it" in str(w.message) for w in said):
        return measure(plan, model, sample, steps, again=False)
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
    return Measured(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), retries)
