"""Planners that have not run here on a CPU: tried each time they are asked for, so that the refusal stays current."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes._torch import FakeTensorMode

from .measure import step


def sac_ilp(model: nn.Module, sample: Any) -> str:
    """torch's own integer program over modules (`torch.distributed._tools.sac_ilp`): what it answers.

    It names modules and the share of each to recompute; torch has nothing that turns this into a running step, so
    there is no peak to measure even where it answers.
    """
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import sac_milp

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, sample)
        twin = nn.Module.to(model, "cpu")
        tracker, runtime, selective = MemTracker(), RuntimeEstimator(), SACEstimator()
        optimizer = torch.optim.SGD(twin.parameters())
        tracker.track_external(twin, optimizer)
        with tracker:
            step(twin, fake)
        with runtime(estimate_mode_type="operator-level-cost-model"):
            step(twin, fake)
        with selective(estimate_mode_type="operator-level-cost-model"):
            step(twin, fake)
    stats: Any = aggregate_stats(twin, optimizer, tracker, runtime, selective, torch.device("cpu"))
    return f"it answers {sac_milp(parse_module_info(stats), memory_budget=1.0)}, which nothing in torch runs"


def rockmate(model: nn.Module, sample: Any) -> str:
    """Rockmate (Zhao et al. 2023), where it is installed; its 2.0 wheel lacks the package `rkgb.core` it imports."""
    importlib.import_module("rockmate")
    return "it imports: measure it"


EXTERNAL: dict[str, Callable[[nn.Module, Any], str]] = {"sac_ilp": sac_ilp, "rockmate": rockmate}
