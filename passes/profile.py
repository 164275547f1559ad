"""profile: bytes, FLOPs, cost, time and workspace of every op of the joint graph.

FLOPs come from torch's own registry (`torch.utils.flop_counter`); bytes moved are those of the arguments read
and the results written; a view costs nothing. Workspace and time are *measured*, one distinct (op, shapes) at a
time on the device, so a model that does not fit in memory can still be profiled.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from solvers.errors import BudgetError

from ._torch import FakeTensor, TorchDispatchMode, pytree
from .alias import device_of, is_compute, output_mask
from .device import kind_of
from .draws import drawing_privately, generators_kept, varies
from .errors import Unsupported
from .exclusive import exclusive, interrupt_point
from .flops import listed_flops, unlisted_flops
from .fuse.records import BY_OP, workspace_bytes
from .memory import high_water, span
from .op_class import op_class
from .ops import OPAQUE_RESULTS, VARIES, is_collective, is_custom, is_random, looks_at_values
from .run._torch import below_autograd
from .tape import Tape, record
from .trace.layouts import Made

aten = torch.ops.aten
Cost = str | Callable[["OpProfile"], float]
RIDGE = 10.0
REPEATS = 5
HEAP_BYTES = (32 << 20) - (1 << 16)
OTHERS_BYTES = 8 << 20
DRAWN = 1 << 13  # made-up numbers; further ones repeat them


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
        _settle_heap()
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
    return str(node.target), str(spec), tuple(_describe(leaf) for leaf in leaves)


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
            op = _as_node(func, args, kwargs or {}, result)
            if func._schema.is_mutable or is_compute(op):
                self.total += self.cost(replace(_count(op), seconds=time.perf_counter() - begin))
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
    for make_up in (_made_up, _identities):
        if seen and not looks_at_values(node):
            break
        try:
            run = _call(node, make_up)
            with generators_kept(device) if is_custom(node) else nullcontext():
                once = is_custom(node) and varies(run)
                workspace, results, tape = _memory(run, device, expected)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the device has no room to run {node.name} ({node.target}) by itself, as profiling does: {error}. "
                "Take a smaller batch, or free memory there."
            ) from error
        except (RuntimeError, IndexError, ValueError):
            continue
        _check_shapes(node, results)
        sizes = tuple(t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0 for t in results)
        told = expected if expected is not None else [value]
        layouts = tuple(_layout(*pair) for pair in zip(told, results, strict=False))
        seen.append(Measured(workspace, sizes, layouts, _time(run, device) if timed else None, tape, once))
    if not seen:
        counted = _count(node)
        return Measured(2 * (counted.bytes_read + counted.bytes_written), seconds=0.0 if timed else None)
    return max(seen, key=lambda found: found.workspace_bytes)


def _copied_bytes(node: fx.Node) -> int:
    """What gloo, which serves the CPU, copies before it sends: the arguments of all ops but those that sum in place."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    copies = name.startswith(("all_gather", "reduce_scatter")) and device_of(node).type == "cpu"
    return _count(node).bytes_read if copies else 0


def _layout(told: Any, made: Any) -> Made | None:
    """The strides and dtype that a kernel gave its result, where it is a tensor of the shape told."""
    both = isinstance(told, torch.Tensor) and isinstance(made, torch.Tensor)
    return (tuple(made.stride()), made.dtype) if both and told.shape == made.shape else None


def _memory(
    run: Callable[[], Any], device: torch.device, expected: Sequence[Any] | None
) -> tuple[int, Sequence[Any], Tape | None]:
    """Workspace, results and, where blocks are cached, the tape of an op."""
    if not kind_of(device).caches:
        return *high_water(run, device, expected), None
    tape, results = record(run, expected)
    return tape.workspace_bytes(kind_of(device).granule), results, tape


def _check_shapes(node: fx.Node, results: Sequence[Any]) -> None:
    """What follows was traced for the shapes that the op's rule tells: a kernel that makes others is refused."""
    value = node.meta.get("val")
    traced = value if isinstance(value, (tuple, list)) else [value]
    for told, made in zip(traced, results, strict=False):
        known = isinstance(told, torch.Tensor) and isinstance(made, torch.Tensor) and told.is_floating_point()
        if known and told.shape != made.shape and not _is_opaque(node) and not looks_at_values(node):
            empty = "" if told.numel() else "Run the model once, if its first call gives a buffer its size. "
            raise Unsupported(
                f"op {node.target}", node.name,
                f"its shape rule says {tuple(told.shape)} where its kernel makes {tuple(made.shape)}",
                f"{empty}Reshape its input so that both agree (add a batch dimension), or, for an op of your own, "
                "correct its fake kernel (torch.library.register_fake).",
            )  # fmt: skip


def _call(node: fx.Node, make_up: Callable[[Any], Any]) -> Callable[[], Any]:
    """The op on data that `make_up` gives, ready to run."""
    target: Any = node.target
    made: dict[fx.Node, Any] = {}
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _materialize(n, made, make_up))
    args = _full_bags(node, _even_lengths(node, _even_groups(node, args)))
    if not is_random(node):  # attention without dropout, which carries the tag all the same
        return partial(target, *args, **kwargs)
    return drawing_privately(target, args, kwargs, device_of(node))


def _full_bags(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient of maxima over bags copies what the bags that hold something get: made up, all would be empty."""
    if node.target is aten._embedding_bag_backward.default:
        args[_BAG_SIZES].fill_(1)
    return args


_BAG_SIZES = 4


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


def _even_lengths(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """CTC over whole inputs, and targets that share what there is: made-up lengths, all zero, would find nothing."""
    firsts: dict[Any, int] = {aten._ctc_loss: 0, aten._ctc_loss_backward: 1}
    first = firsts.get(getattr(node.target, "overloadpacket", None))
    if first is None or not isinstance(args[first + 2], torch.Tensor):
        return args
    values, targets, inputs, lengths = args[first : first + 4]
    batch = lengths.numel()
    inputs.fill_(values.shape[0])
    if targets.dim() == 2:
        lengths.fill_(targets.shape[1])
    else:
        ends = torch.arange(batch + 1, device=lengths.device) * targets.numel() // batch
        lengths.copy_(ends.diff())
    return args


def _materialize(node: fx.Node, made: dict[fx.Node, Any], make_up: Callable[[Any], Any]) -> Any:
    """Data in the shape and layout of a node's value; the results of an opaque op are really computed."""
    if node not in made:
        if _is_opaque(node):
            target: Any = node.target
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _materialize(n, made, make_up))
            made[node] = target(*args, **kwargs)
        elif node.target is operator.getitem and _is_opaque(node.args[0]):
            made[node] = _materialize(node.args[0], made, make_up)[node.args[1]]  # type: ignore[arg-type]
        else:
            made[node] = pytree.tree_map(make_up, node.meta["val"])
    return made[node]


def _is_opaque(node: Any) -> bool:
    packet = getattr(getattr(node, "target", None), "overloadpacket", None)
    return packet is not None and packet.__name__ in OPAQUE_RESULTS


def _made_up(value: Any) -> Any:
    if not isinstance(value, (torch.Tensor, FakeTensor)):
        return value
    flat = torch.zeros(span(value), dtype=value.dtype, device=value.device)
    if value.is_floating_point() or value.is_complex():
        numbers = torch.view_as_real(flat).view(-1) if value.is_complex() else flat
        numbers[:DRAWN].uniform_(0.25, 0.75, generator=torch.Generator(value.device))
        filled = DRAWN
        while filled < numbers.numel():
            numbers[filled : 2 * filled] = numbers[: numbers.numel() - filled][:filled]
            filled *= 2
    made = flat.as_strided(value.shape, value.stride())
    made = made.conj() if value.is_conj() else made  # which a kernel that knows no conjugates copies first
    return aten._neg_view.default(made) if value.is_neg() else made


def _identities(value: Any) -> Any:
    """Identity matrices and ones: what a factorization and its pivots may be."""
    if not isinstance(value, (torch.Tensor, FakeTensor)):
        return value
    made = _made_up(value)
    if value.dim() < 2 or not (value.is_floating_point() or value.is_complex()):
        return made.fill_(1)
    made.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
    return made


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
