"""profile: bytes, FLOPs, cost, time and workspace of every op of the joint graph.

FLOPs come from torch's own registry (`torch.utils.flop_counter`); bytes moved are those of the arguments read
and the results written; a view costs nothing. Workspace and time are *measured*, one distinct (op, shapes) at a
time on the device, so a model that does not fit in memory can still be profiled.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._torch import FakeTensor, below_autograd
from .alias import device_of, is_compute
from .device import kind_of
from .draws import drawing_privately
from .exclusive import exclusive, interrupt_point
from .flops import listed_flops, unlisted_flops
from .fuse import library
from .memory import high_water, span
from .ops import OPAQUE_RESULTS
from .tape import Tape, record

Cost = str | Callable[["OpProfile"], float]
RIDGE = 10.0
REPEATS = 5
HEAP_BYTES = (32 << 20) - (1 << 16)
OTHERS_BYTES = 8 << 20


@dataclass(frozen=True)
class OpProfile:
    """What one op needs.

    Attributes:
        name, target: the node's name and its op, e.g. `aten.addmm.default`.
        flops: floating-point operations by torch's registry; 0 for ops that it does not list.
        elements: elements written.
        unlisted_flops: floating-point operations that the registry leaves out but costs must not.
        bytes_read, bytes_written: logical bytes of the tensors read and written.
        seconds: shortest measured time, or None when it was not measured.
        workspace_bytes: memory above inputs and outputs while it runs, measured; 0 when it was not.
        result_bytes: measured size of each result's storage; None when it was not measured.
        tape: what it asks the device's caching allocator for; None on the CPU, which has none, or when not measured.
        dtype: what it computes in, `bfloat16`: that of the first floating-point tensor read, else written; "" for none.
    """

    name: str
    target: str
    flops: int
    elements: int
    bytes_read: int
    bytes_written: int
    seconds: float | None = None
    workspace_bytes: int = 0
    result_bytes: tuple[int, ...] | None = None
    dtype: str = ""
    unlisted_flops: int = 0
    tape: Tape | None = None

    @property
    def work(self) -> int:
        """All floating-point operations known of."""
        return self.flops + self.unlisted_flops


def roofline(op: OpProfile, ridge: float = RIDGE) -> float:
    """Bytes an op keeps the memory busy for: `max(FLOPs / ridge, bytes read + bytes written)`.

    Source: the roofline model (Williams, Waterman, Patterson 2009); `ridge` is the device's FLOP per byte.
    """
    return max(op.work / ridge, op.bytes_read + op.bytes_written)


def flop_cost(op: OpProfile) -> float:
    """FLOPs, an op outside the registry counting one per element written."""
    return op.work or op.elements


def measured_cost(op: OpProfile) -> float:
    """Nanoseconds, as measured."""
    return (op.seconds or 0.0) * 1e9


COSTS: dict[str, Callable[[OpProfile], float]] = {
    "flops": flop_cost,
    "roofline": roofline,
    "measured": measured_cost,
}


def profile(
    graph: fx.Graph,
    *,
    measure: bool = True,
    timed: bool = False,
    progress: Callable[[Sequence[Any], str], Any] | None = None,
) -> dict[fx.Node, OpProfile]:
    """Annotate every op that runs a kernel.

    Args:
        measure: run each distinct (op, shapes) once for its workspace.
        timed: run it several times more for its time.
        progress: wraps the sequence of distinct ops, as tqdm does.
    """
    nodes = [n for n in graph.nodes if is_compute(n)]
    static = {n: _count(n) for n in nodes}
    if not measure:
        return static
    distinct: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        distinct.setdefault(signature(node), []).append(node)
    groups = list(distinct.values())
    measured: dict[fx.Node, OpProfile] = {}
    if timed:
        _settle_heap()
    with exclusive(), below_autograd():
        for group in progress(groups, "profile") if progress else groups:
            interrupt_point()
            found = _measure(group[0], timed)
            for node in group:
                measured[node] = replace(static[node], **found)
    return measured


def signature(node: fx.Node) -> Any:
    """What decides an op's time and workspace: the op, its constants, shapes, strides and dtypes of its tensors."""
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return str(node.target), str(spec), tuple(_describe(leaf) for leaf in leaves)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, fx.Node):
        value = leaf.meta["val"]
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), tuple(value.stride()), str(value.dtype), str(value.device)
        return str(value)
    return repr(leaf)


def _count(node: fx.Node) -> OpProfile:
    result = node.meta.get("val")
    written = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
    read = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if node.target is library.CROSS_ENTROPY_BACKWARD.default:  # its two kernels are each handed the log-probabilities
        written, read = 2 * written, [*read, *written, *written]
    return OpProfile(
        name=node.name,
        target=str(node.target),
        flops=listed_flops(node, result),
        unlisted_flops=unlisted_flops(node, result),
        elements=sum(t.numel() for t in written),
        bytes_read=sum(t.numel() * t.element_size() for t in read),
        bytes_written=sum(t.numel() * t.element_size() for t in written),
        dtype=_dtype([*read, *written]),
        workspace_bytes=library.workspace_bytes(node),  # of our own ops it is known without running them
    )


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    return next((str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()), "")


def _measure(node: fx.Node, timed: bool) -> dict[str, Any]:
    """Run the op on made-up data; an op that cannot run on it (an index out of range) counts nothing.

    Raises:
        torch.OutOfMemoryError: the device has no room for this op alone.
    """
    target: Any = node.target
    made: dict[fx.Node, Any] = {}
    try:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _materialize(n, made))
        args = _even_groups(node, args)
        value = node.meta.get("val")
        expected = value if isinstance(value, (tuple, list)) else None
        run = drawing_privately(target, args, kwargs, device_of(node))
        found = _memory(run, device_of(node), expected)
        seconds = _time(run, device_of(node)) if timed else None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, ValueError):
        return {"workspace_bytes": 0, "seconds": 0.0 if timed else None}
    return {**found, "seconds": seconds}


def _memory(run: Callable[[], Any], device: torch.device, expected: Sequence[Any] | None) -> dict[str, Any]:
    if kind_of(device).caches:
        tape, sizes = record(run, expected)
        return {"workspace_bytes": tape.workspace_bytes(kind_of(device).granule), "result_bytes": sizes, "tape": tape}
    workspace, sizes = high_water(run, device, expected)
    return {"workspace_bytes": workspace, "result_bytes": sizes}


def _even_groups(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A product of groups costs what its groups hold: made-up ends of groups, all zero, would leave them empty."""
    packet = getattr(node.target, "overloadpacket", None)
    if getattr(packet, "__name__", "") != "_grouped_mm" or len(args) < 3 or not isinstance(args[2], torch.Tensor):
        return args
    left, right, ends = args[:3]
    if left.dim() == 2:
        rows = left.shape[0] if right.dim() == 3 else left.shape[1]
    else:
        rows = right.shape[1]
    spread = torch.arange(1, ends.numel() + 1, device=ends.device) * rows // ends.numel()
    return (left, right, spread.to(ends.dtype), *args[3:])


def _materialize(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    """Data in the shape and layout of a node's value; the results of an opaque op are really computed."""
    if node not in made:
        if _is_opaque(node):
            target: Any = node.target
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _materialize(n, made))
            made[node] = target(*args, **kwargs)
        elif node.target is operator.getitem and _is_opaque(node.args[0]):
            made[node] = _materialize(node.args[0], made)[node.args[1]]  # type: ignore[arg-type]
        else:
            made[node] = pytree.tree_map(_made_up, node.meta["val"])
    return made[node]


def _is_opaque(node: Any) -> bool:
    packet = getattr(getattr(node, "target", None), "overloadpacket", None)
    return packet is not None and packet.__name__ in OPAQUE_RESULTS


def _made_up(value: Any) -> Any:
    if not isinstance(value, (torch.Tensor, FakeTensor)):
        return value
    flat = torch.zeros(span(value), dtype=value.dtype, device=value.device)
    if value.is_floating_point():
        flat.uniform_(0.25, 0.75, generator=torch.Generator(value.device))
    return flat.as_strided(value.shape, value.stride())


def _settle_heap() -> None:
    """Let the CPU's allocator keep what ops free, as it does in a step, whose live tensors lie above it.

    glibc gives memory at the end of the heap back to the system, so that an op run by itself would touch new pages each
    time, which can take longer than the op. How much it keeps grows with the largest block freed so far, up to 32 MiB.
    """
    torch.empty(HEAP_BYTES, dtype=torch.uint8)


def _time(run: Callable[[], Any], device: torch.device) -> float:
    run()
    samples = []
    others = torch.empty(OTHERS_BYTES, dtype=torch.uint8, device=device)
    for _ in range(REPEATS):
        others.zero_()  # in a step, other ops have used the cache since
        kind_of(device).synchronize(device)
        start = time.perf_counter()
        run()
        kind_of(device).synchronize(device)
        samples.append(time.perf_counter() - start)
    return min(samples)  # whatever else the machine does can only add to it
