"""Whether there is memory for a check: the device's, and the host's under the limits of a container and the process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import torch

from passes._torch import dense_parts
from planner.decided import Decided
from planner.units import show_bytes


@dataclass(frozen=True)
class Room:
    """Where a check can run.

    Attributes:
        fits: whether what is free is enough.
        offload: whether the plain step's saved tensors, and what is observed, are to wait on the host.
        why: what is missing, in words.
    """

    fits: bool
    offload: bool
    why: str


def room_for(planned: Decided, originals: list[torch.Tensor], anew: bool = False) -> Room:
    """A check needs copies of all tensors that the step is given, the higher of two peaks, and two steps' results.

    In training (`anew`) a GPU has no more for it than the budget leaves.
    """
    prepared = planned.prepared
    static = prepared.lowered.problem.static_bytes
    copies = sum(part.nbytes for t in originals for part in dense_parts(t))
    results = 2 * (sum(t.nbytes for t in originals if t.requires_grad) + _returned_bytes(planned))
    plain, ours = (max(0, p - static) for p in (prepared.baseline_peak_bytes, planned.solution.peak_bytes))
    needed, free = copies + results + max(plain, ours), free_bytes(prepared.device)
    if anew and planned.budget_bytes is not None and prepared.device.type == "cuda":
        free = min(free, planned.budget_bytes - torch.cuda.memory_allocated(prepared.device))
    why = f"it needs {show_bytes(needed)} and {show_bytes(free)} are free"
    if needed <= free or prepared.device.type != "cuda":
        return Room(needed <= free, False, why)
    host = free_bytes(torch.device("cpu"))
    return Room(copies + ours <= free and results + plain <= host, True, why)


def _returned_bytes(planned: Decided) -> int:
    traced = planned.prepared.traced
    results = traced.graph_module.graph.output_node().args[0][: traced.num_forward_outputs]  # type: ignore[index]
    return sum(n.meta["val"].nbytes for n in results)  # type: ignore[union-attr]


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min([_available(), *_control_groups(), *_of_process()])


def _available() -> int:
    """What the system has left; where it does not say, a quarter of what it has."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 30


def _control_groups() -> list[int]:
    """What control groups leave: their limit less what is in use and could not be dropped."""
    found = []
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = (_number(f"{folder}/{name}") for name in (limit, used))
        if most is not None and now is not None:
            stat = dict(line.split() for line in _lines(f"{folder}/memory.stat") if len(line.split()) == 2)
            found.append(max(0, most - now + int(stat.get(cache, 0))))
    return found


def _of_process() -> list[int]:
    """What the process's own limits leave (`ulimit -v` and `ulimit -d`): of its addresses, and of what it may write."""
    pages = [int(pages) for line in _lines("/proc/self/statm") for pages in line.split()]
    if resource is None or not pages:
        return []
    limits = {resource.RLIMIT_AS: pages[0], resource.RLIMIT_DATA: pages[5]}
    soft = {limit: resource.getrlimit(limit)[0] for limit in limits}
    size = resource.getpagesize()
    return [max(0, soft[i] - used * size) for i, used in limits.items() if soft[i] != resource.RLIM_INFINITY]


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
