"""Budgets: what the user may ask for, and what has to be set aside."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from solvers.errors import MIB, BudgetError

LARGEST_MB = float(1 << 43)  # above any machine's, and exact in a float
ACCEPTED = "budget_mb takes a positive number of MiB (an int or a float), or None"


def budget_to_bytes(budget_mb: Any, device: torch.device) -> int | None:
    """A budget in MiB as bytes, rounded down; None asks for the device's free memory on CUDA, else no limit.

    Raises:
        BudgetError: the value is no positive, finite number.
    """
    if budget_mb is None:
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + int(cached) + int(torch.cuda.memory_allocated(device))
    if isinstance(budget_mb, bool) or not isinstance(budget_mb, (int, float)):
        raise BudgetError(f"budget_mb={budget_mb!r} is no number of MiB: {ACCEPTED}. Write 12 GiB as 12 * 1024.")
    if not 0 < budget_mb <= LARGEST_MB:
        raise BudgetError(f"budget_mb={budget_mb!r} is no usable budget: {ACCEPTED}.")
    return int(budget_mb * MIB)


def reserve_to_bytes(reserve_mb: Any) -> int:
    """`reserve_mb` in bytes, rounded up."""
    if isinstance(reserve_mb, bool) or not isinstance(reserve_mb, (int, float)) or not 0 <= reserve_mb <= LARGEST_MB:
        raise BudgetError(f"reserve_mb={reserve_mb!r} is no number of MiB: it takes a number that is not negative.")
    return math.ceil(reserve_mb * MIB)


def optimizer_state_bytes(optimizer: Any, model: nn.Module) -> int:
    """Bytes of state that `optimizer` keeps for the parameters of `model` that require a gradient.

    `optimizer` is an instance, or a class or function that makes one from a list of parameters. The state is
    measured: a small parameter of each dtype and number of dimensions is stepped once, and what it leaves per
    element is scaled up.
    """
    if optimizer is None:
        return 0
    make = _factory(optimizer)
    total = 0.0
    per_element: dict[tuple[torch.dtype, bool], float] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        key = (parameter.dtype, parameter.dim() > 1)
        if key not in per_element:
            per_element[key] = _state_per_element(make, *key)
        total += per_element[key] * parameter.numel()
    return math.ceil(total)


def _factory(optimizer: Any) -> Any:
    if isinstance(optimizer, torch.optim.Optimizer):
        defaults = {k: v for k, v in optimizer.defaults.items() if k not in ("differentiable",)}

        kind: Any = type(optimizer)

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            try:
                return kind(parameters, **defaults)
            except TypeError:
                return kind(parameters)

        return make
    if not callable(optimizer):
        raise BudgetError(
            f"optimizer={optimizer!r} is no optimizer: pass an instance, a class such as torch.optim.AdamW, or "
            "set reserve_mb to the bytes its state needs."
        )
    return optimizer


def _state_per_element(make: Any, dtype: torch.dtype, matrix: bool) -> float:
    parameter = nn.Parameter(torch.zeros((64, 64) if matrix else (4096,), dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    try:
        instance = make([parameter])
    except TypeError:
        instance = make([parameter], lr=1e-3)
    instance.step()
    held = [v for v in instance.state[parameter].values() if isinstance(v, torch.Tensor)]
    return sum(v.numel() * v.element_size() for v in held if v.numel() > 1) / parameter.numel()
