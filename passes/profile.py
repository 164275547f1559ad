"""profile: bytes, FLOPs, cost, time and workspace of every op of the joint graph.

FLOPs come from torch's own registry (`torch.utils.flop_counter`); bytes moved are those of the arguments read
and the results written; a view costs nothing. Workspace and time are *measured*, one distinct (op, shapes) at a
time on the device, so a model that does not fit in memory can still be profiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from solvers.errors import BudgetError

from ._torch import TorchDispatchMode, pytree
from .alias import device_of, is_compute, output_mask
from .draws import generators_kept, varies
from .exclusive import exclusive, interrupt_point
from .flops import listed_flops, unlisted_flops
from .fuse.records import BY_OP, workspace_bytes
from .one_op import (
    check_shapes,
    copied_memory,
    identities,
    laid_out_as,
    made_up,
    memory_of_run,
    on_made_up,
    settle_heap,
    time_of,
)
from .op_class import op_class
from .ops import VARIES, is_collective, is_custom, looks_at_values
from .run._torch import below_autograd
from .tape import Tape
from .trace.strides import Made

aten = torch.ops.aten
Cost = str | Callable[["OpProfile"], float]
RIDGE = 10.0


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
        result_layouts: each result's strides and dtype as the kernel made it, likewise; None for what is not a tensor.
        tape: what it asks the device's caching allocator for; None on the CPU, which has none, or when not measured.
        dtype: what it computes in, `bfloat16`: that of the first floating-point tensor read, else written; "" for none.
        kind: its class (`passes.op_class`), by which it goes at another rate than others.
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
    result_layouts: tuple[Made | None, ...] | None = None
    tape: Tape | None = None
    kind: str = ""

    @property
    def op(self) -> str:
        """The op without its library and overload: `addmm`."""
        return self.target.split(".")[1] if self.target.count(".") > 1 else self.target

    @property
    def work(self) -> int:
        """All floating-point operations known of."""
        return self.flops + self.unlisted_flops


@dataclass(frozen=True)
class Measured:
    """What running an op showed: see `OpProfile`; and whether another run of it gave other values."""

    workspace_bytes: int
    result_bytes: tuple[int, ...] | None = None
    result_layouts: tuple[Made | None, ...] | None = None
    seconds: float | None = None
    tape: Tape | None = None
    varies: bool = False


def roofline(op: OpProfile, ridge: float = RIDGE) -> float:
    """Bytes an op keeps the memory busy for where all ops go at one rate: `max(FLOPs / ridge, bytes moved)`.

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
    "measured": measured_cost,
}


def profile(
    graph: fx.Graph,
    *,
    measure: bool = True,
    timed: bool = False,
    progress: Callable[[Sequence[Any], str], Any] | None = None,
    known: dict[Any, Measured] | None = None,
) -> dict[fx.Node, OpProfile]:
    """Annotate every op that runs a kernel.

    Args:
        measure: run each distinct (op, shapes) once for its workspace.
        timed: run it several times more for its time.
        progress: wraps the sequence of distinct ops, as tqdm does.
        known: what was measured before, by signature; what is measured now is added.
    """
    nodes = [n for n in graph.nodes if is_compute(n)]
    static = {n: _count(n) for n in nodes}
    if not measure:
        return static
    distinct: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        distinct.setdefault(signature(node), []).append(node)
    known = {} if known is None else known
    new = [(key, group[0]) for key, group in distinct.items() if key not in known]
    if timed:
        settle_heap()
    with exclusive(), below_autograd():
        for key, node in progress(new, "profile") if progress else new:
            interrupt_point()
            known[key] = _measure(node, timed)
    for key, group in distinct.items():
        for node in group:
            node.meta[VARIES] = known[key].varies
    return {node: _annotated(static[node], known[key]) for key, group in distinct.items() for node in group}


def _annotated(op: OpProfile, found: Measured) -> OpProfile:
    return replace(
        op, seconds=found.seconds, workspace_bytes=found.workspace_bytes, result_bytes=found.result_bytes,
        result_layouts=found.result_layouts, tape=found.tape,
    )  # fmt: skip


def signature(node: fx.Node) -> Any:
    """What decides an op's time and workspace: the op, its constants, shapes, strides and dtypes of its tensors."""
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return str(node.target), str(spec), tuple(_describe(leaf) for leaf in leaves), copied_memory(node)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, fx.Node):
        value = leaf.meta["val"]
        if isinstance(value, torch.Tensor):
            lazily = value.is_conj(), value.is_neg()
            return tuple(value.shape), tuple(value.stride()), str(value.dtype), str(value.device), lazily
        return str(value)
    return repr(leaf)


def _count(node: fx.Node) -> OpProfile:
    result = node.meta.get("val")
    written = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
    read = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    listed, unlisted = listed_flops(node, result), unlisted_flops(node, result)
    inner = written * (BY_OP[node.target].intermediates if node.target in BY_OP else 0)
    read, written = [*read, *inner, *inner], [*written, *inner]  # each is made and used beside what made it
    return OpProfile(
        name=node.name,
        target=str(node.target),
        flops=listed,
        unlisted_flops=unlisted,
        elements=sum(t.numel() for t in written),
        bytes_read=sum(t.numel() * t.element_size() for t in read),
        bytes_written=sum(t.numel() * t.element_size() for t in written),
        dtype=_dtype([*read, *written]),
        workspace_bytes=workspace_bytes(node),  # of our own ops it is known without running them
        kind=op_class(node.target, listed + unlisted),
    )


class Counting(TorchDispatchMode):
    """Adds up what ops cost as they run, views left out; its switch is `on`."""

    def __init__(self, cost: Callable[[OpProfile], float]) -> None:
        super().__init__()
        self.cost, self.total, self.on = cost, 0.0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if self.on:
            seconds = time.perf_counter() - begin
            op = _as_node(func, args, kwargs or {}, result)
            if func._schema.is_mutable or is_compute(op):
                self.total += self.cost(replace(_count(op), seconds=seconds))
            for node in op.graph.nodes:  # in a cycle: autograd would copy gradients that something else holds
                node.meta.clear()
        return result


def _as_node(func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
    """A call that was made, as the graph of it would have it."""
    graph = fx.Graph()

    def read(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("read")
        node.meta["val"] = value
        return node

    node = graph.create_node("call_function", func, *pytree.tree_map(read, (tuple(args), dict(kwargs))))
    node.meta["val"] = result
    return node


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    return next((str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()), "")


def _measure(node: fx.Node, timed: bool) -> Measured:
    """Run the op on made-up data; one that cannot run on any of it is taken to copy all that it reads and writes.

    One that talks to other ranks is not run, as they would have to join in; its workspace is known by a rule.
    """
    if is_collective(node):
        return Measured(_copied_bytes(node), seconds=0.0 if timed else None)
    value = node.meta.get("val")
    expected = None
    if isinstance(value, (tuple, list)):
        expected = [v if wanted else None for v, wanted in zip(value, output_mask(node, len(value)), strict=True)]
    device = device_of(node)
    seen: list[Measured] = []
    for make_up in (made_up, identities):
        if seen and not looks_at_values(node):
            break
        try:
            run = on_made_up(node, make_up)
            with generators_kept(device) if is_custom(node) else nullcontext():
                once = is_custom(node) and varies(run)
                workspace, results, tape = memory_of_run(run, device, expected)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the device has no room to run {node.name} ({node.target}) by itself, as profiling does: {error}. "
                "Take a smaller batch, or free memory there."
            ) from error
        except (RuntimeError, IndexError, ValueError):
            continue
        check_shapes(node, results)
        sizes = tuple(t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0 for t in results)
        told = expected if expected is not None else [value]
        layouts = tuple(laid_out_as(*pair) for pair in zip(told, results, strict=False))
        seen.append(Measured(workspace, sizes, layouts, time_of(run, device) if timed else None, tape, once))
    if not seen:
        counted = _count(node)
        return Measured(2 * (counted.bytes_read + counted.bytes_written), seconds=0.0 if timed else None)
    return max(seen, key=lambda found: found.workspace_bytes)


def _copied_bytes(node: fx.Node) -> int:
    """What gloo, which serves the CPU, copies before it sends: the arguments of all ops but those that sum in place."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    copies = name.startswith(("all_gather", "reduce_scatter")) and device_of(node).type == "cpu"
    return _count(node).bytes_read if copies else 0


