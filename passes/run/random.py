"""Replaying a random op: the generator's state is taken before its first run and lent to each later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import PlannerError


def get_rng_state(device: str) -> torch.Tensor:
    """The state of `device`'s default generator, as a byte tensor on the CPU.

    Raises:
        PlannerError: a CUDA graph is captured, during which nobody may ask for it.
    """
    if device.startswith("cuda"):
        if torch.cuda.is_current_stream_capturing():
            raise PlannerError(
                "a CUDA graph cannot capture this plan, which repeats draws of random numbers in the backward: plan "
                'with never_recompute= naming the ops that draw ("aten.native_dropout").'
            )
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: str) -> None:
    """Inverse of `get_rng_state`."""
    if device.startswith("cuda"):
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def run_with_rng_state(state: torch.Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `op` as if the generator were in `state`; the generator itself is left where it was."""
    current = get_rng_state(device)
    set_rng_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        set_rng_state(current, device)
