"""Budgets: what the user may ask for, and what has to be set aside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solvers.errors import MIB, BudgetError

from .units import parse_size

LARGEST_MB = float(1 << 43)  # above any machine's, and exact in a float
ACCEPTED = 'budget_mb takes MiB as an int or a float, a size ("12GB"), a share of the plain peak ("50%"), or None'


@dataclass(frozen=True)
class Budget:
    """A budget as the user wrote it: MiB, a size with its unit, a share of the plain peak, or None.

    Raises:
        BudgetError: the value is none of these.
    """

    value: Any

    def __post_init__(self) -> None:
        self.to_bytes(MIB)

    def to_bytes(self, plain_peak_bytes: int | None) -> int | None:
        """Bytes, rounded down; None sets no limit but the device's own.

        Raises:
            BudgetError: a share is asked for where `plain_peak_bytes` is not known.
        """
        if self.value is None:
            return None
        if isinstance(self.value, str):
            return parse_size(self.value, plain_peak_bytes)
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise BudgetError(f"budget_mb={self.value!r} is not a number of MiB: {ACCEPTED}.")
        if not 0 < self.value <= LARGEST_MB:
            raise BudgetError(f"budget_mb={self.value!r} is not a usable budget: {ACCEPTED}.")
        return int(self.value * MIB)


def reserve_to_bytes(reserve_mb: Any) -> int:
    """`reserve_mb` in bytes, rounded up."""
    if isinstance(reserve_mb, bool) or not isinstance(reserve_mb, (int, float)) or not 0 <= reserve_mb <= LARGEST_MB:
        raise BudgetError(f"reserve_mb={reserve_mb!r} is not a number of MiB: it takes one that is not negative.")
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
            f"optimizer={optimizer!r} is not an optimizer: pass an instance, a class such as torch.optim.AdamW, or "
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
