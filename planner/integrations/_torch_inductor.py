"""What Inductor keeps private and this folder relies on: its scheduler, and compiling one graph by itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._inductor import memory
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine, can_match_buffer_size
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._ordered_set import OrderedSet

from passes.exclusive import interrupt_point

from .order import Buffer, Order

HELD = "held_outside"  # in the meta of a half's input that others hold as well
# In the meta of a node whose result is written to memory where it stands in the graph. Inductor would compute what is
# pointwise wherever it is read, and have all that it is computed from wait.
WRITTEN = "inductor_realize_to_strides"
CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


class _Scheduling:
    """Inductor's scheduler held to the planned order (see `order`), for one half."""

    def __init__(self, held: frozenset[str]) -> None:
        self.held = held
        choices: Any = copy.copy(V.choices)
        self.choices = choices
        self.is_worth_it, choices.can_fuse = choices.can_fuse, self.can_fuse
        self.accepted: tuple[int, int, int] | None = None
        self.index: dict[str, int] = {}

    def before_fusion(self, nodes: list[Any]) -> list[Any]:
        interrupt_point()
        nodes = _late(_as_planned(nodes), self.held)
        self.index = {n.get_name(): i for i, n in enumerate(nodes)}
        self.names = list(self.index)
        self.accepted, self.order = None, Order(*_kernels(nodes, self.index, self.held))
        return nodes

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if not self.is_worth_it(scheduler, node1, node2, shared_data_score):
            return False
        self._follow(scheduler)
        first, second = (self.index.get(n.get_nodes()[0].get_name()) for n in (node1, node2))
        if first is None or second is None:
            return True  # made by the scheduler after the passes; none of the plan's
        at = self.order.place_for(first, second)
        self.accepted = None if at is None else (first, second, at)
        return at is not None

    def _follow(self, scheduler: Any) -> None:
        """Note the latest fusion, should the scheduler have gone on with it."""
        if self.accepted is not None:
            first, second, at = self.accepted
            one, other = (scheduler.name_to_fused_node[self.names[i]] for i in (first, second))
            if one is other:
                self.order.fuse(first, second, at)
        self.accepted = None

    def after_fusion(self, nodes: list[Any]) -> list[Any]:
        interrupt_point()
        scheduler = V.graph.scheduler
        self._follow(scheduler)
        ordered: list[Any] = scheduler.topological_sort_schedule(sorted(nodes, key=self._place))
        _lifetimes(ordered)  # Inductor reuses memory by what it knows of them
        return ordered

    def _place(self, node: Any) -> int:
        return max(self.order.place[self.index[n.get_name()]] for n in node.get_nodes() if n.get_name() in self.index)


def _as_planned(nodes: list[Any]) -> list[Any]:
    """In the order of the graph: Inductor has a pointwise result made when a kernel of a library first needs it."""
    module: Any = V.graph.module
    places = {n: i for i, n in enumerate(module.graph.nodes)}
    ordered: list[Any] = sorted(nodes, key=lambda n: max((places[o] for o in _origins(n) if o in places), default=-1))
    return cast(list[Any], V.graph.scheduler.topological_sort_schedule(ordered))


def _origins(node: Any) -> set[Any]:
    """The nodes of the graph that a kernel computes."""
    return {o for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()}


def _late(nodes: list[Any], held: frozenset[str]) -> list[Any]:
    """What is generated from inputs that others hold anyway stands right before its first reader.

    Inductor copies the inputs of convolutions into another layout before all else.
    """
    dying = _lifetimes(nodes).keys() - held
    waiting: set[Any] = set()
    ordered: list[Any] = []

    def place(node: Any) -> None:
        waiting.discard(node)
        for earlier in (p for p in nodes if p in waiting and p in node.mpi_node.pred_nodes):
            place(earlier)
        ordered.append(node)

    for node in nodes:
        dies = any(b.get_name() in dying for b in node.mpi_node.pred_buffers)
        if node.is_extern() or dies or not node.mpi_node.succ_nodes or node.mpi_node.pred_nodes - waiting:
            place(node)
        else:
            waiting.add(node)
    return ordered


def _lifetimes(nodes: list[Any]) -> dict[str, Any]:
    """Have Inductor note on these nodes who reads which buffer; the inputs that can be freed, by name."""
    graph, scheduler = V.graph, V.graph.scheduler
    _, inputs = memory.prepare_planning_info(
        nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, OrderedSet(graph.graph_inputs),
        OrderedSet(graph.get_output_names()),
    )  # fmt: skip
    return dict(inputs)


def _kernels(nodes: list[Any], index: Mapping[str, int], held: frozenset[str]) -> tuple[list[set[int]], list[Buffer]]:
    """What each kernel must come after, and the memory that they share; `held` are inputs that others hold as well."""
    inputs, outputs = _lifetimes(nodes), held.union(V.graph.get_output_names())
    before = [{index[p.get_name()] for p in n.mpi_node.pred_nodes} for n in nodes]
    buffers: dict[str, Buffer] = {}

    def add(name: str, memory: Any, maker: int | None, over: Sequence[str] = ()) -> None:
        if memory.size_free:
            readers = tuple(sorted(index[r.get_name()] for r in memory.succ_nodes))
            buffers[name] = Buffer(memory.size_free, maker, readers, name in outputs, _places(buffers, over))

    for name, given in inputs.items():
        add(name, given.mpi_buffer, None)
    for i, node in enumerate(nodes):
        for made in node.get_outputs():  # one of several results is made with the others
            maker = i if made.mpi_buffer.size_alloc else min(before[i], default=i)
            add(made.get_name(), made.mpi_buffer, maker, _overwritable(node, made))
    return before, list(buffers.values())


def _places(names: Mapping[str, Any], some: Sequence[str]) -> tuple[int, ...]:
    """Where these stand among the keys, those that do."""
    return tuple(i for i, name in enumerate(names) if name in some)


def _overwritable(node: Any, made: Any) -> list[str]:
    """What Inductor may have a kernel write its result over, as far as the two are concerned."""
    scheduler, found = V.graph.scheduler, []
    if node.is_extern() or not made.node.has_tensor_output():  # it adds to what is there
        return []
    for read in sorted(d.name for d in node.read_writes.reads):
        given = scheduler.name_to_donated_buffer.get(read) or scheduler.name_to_buf.get(read)
        if given is None or given.node is None or not given.node.has_tensor_output():
            continue
        if not can_match_buffer_size(given.node, made.node):
            continue
        if any(u.node is node and u.can_inplace for u in given.users):
            found.append(read)
    return found


@contextlib.contextmanager
def planned_order(half: fx.GraphModule, options: Mapping[str, Any]) -> Iterator[None]:
    """Have it compiled in the order of its graph, and fused only where that leaves the peak as it is; not cached."""
    interrupt_point()
    held = frozenset(n.target for n in half.graph.nodes if n.op == "placeholder" and n.meta.get(HELD))
    scheduling = _Scheduling(held)
    _save_inputs_as_they_are(half.graph)
    _leave_layouts_to_convolutions(half.graph)
    patches = {
        **options, "fx_graph_cache": False, "_pre_fusion_custom_pass": scheduling.before_fusion,
        "_post_fusion_custom_pass": scheduling.after_fusion, "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
    }  # fmt: skip
    with (
        inductor_config.patch(patches), V.set_choices_handler(scheduling.choices),
        mock.patch.object(AllocateLine, "should_reuse_buffer", _follows),
        mock.patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", 0),  # a call for each kernel: it frees at its end
    ):  # fmt: skip
        yield


def _follows(self: AllocateLine, freed: FreeIfNotReusedLine, size: int) -> bool:
    """Whether memory passes from one kernel to the next: waiting longer for its next use, it is held for nothing."""
    return bool(freed.scheduler_node_index + 1 == self.scheduler_node_index)


def _save_inputs_as_they_are(graph: fx.Graph) -> None:
    """Have Inductor return inputs that are returned, rather than copies in the layout that convolutions prefer."""
    output = graph.output_node()
    returned: Any = output.args[0]
    inputs = [i for i, n in enumerate(returned) if isinstance(n, fx.Node) and n.op == "placeholder"]
    visible = output.meta.get("user_visible_output_idxs", ())
    output.meta["user_visible_output_idxs"] = sorted({*visible, *inputs})


def _leave_layouts_to_convolutions(graph: fx.Graph) -> None:
    """What is `WRITTEN` is written in the traced layout, which is not the one that Inductor has around convolutions."""
    if any(getattr(n.target, "overloadpacket", None) in CONVOLUTIONS for n in graph.nodes):
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dim() > 3:
                node.meta[WRITTEN] = False


# A half that is not a graph of Dynamo's -------------------------------------------------------------------------------


def decomposed(gm: fx.GraphModule) -> fx.GraphModule:
    """A joint graph in the ops that Inductor generates code for, random ones drawing from seeds."""
    mode = FakeTensorMode()
    with mode, fx_traceback.preserve_node_meta(), V.set_fake_mode(mode):
        made = _traced(fx.Interpreter(gm).run, gm, mode, {**select_decomp_table(), **_left_over(gm.graph)})
        joint_graph_passes(made)
    return made


def _left_over(graph: fx.Graph) -> dict[Any, Callable[..., Any]]:
    """Decompositions that torch has of ops for which Inductor has neither one nor code: Dynamo traces them away."""
    ops = {n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    return dict(get_decompositions([op for op in ops if op not in lowerings]))


def _traced(
    run: Callable[..., Any], like: fx.GraphModule, mode: FakeTensorMode, table: Mapping[Any, Callable[..., Any]],
) -> fx.GraphModule:  # fmt: skip
    """`run` traced on inputs like the placeholders of a graph."""
    given = [n.meta["val"] for n in like.graph.nodes if n.op == "placeholder"]
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
    made: fx.GraphModule = make_fx(run, decomposition_table=dict(table), _allow_non_fake_inputs=True)(*fakes)
    return made


def compile_half(
    half: fx.GraphModule, options: Mapping[str, Any], *, is_backward: bool, visible: Sequence[int],
    strides: Sequence[Sequence[int] | None] = (),
) -> tuple[Callable[..., Any], list[Any]]:  # fmt: skip
    """A functional half of a decomposed graph through Inductor, in its order; and the strides that its outputs have.

    Args:
        visible: outputs whose layout is to stay as traced.
        strides: of the first inputs, which the half alone holds; None where they are as traced.
    """
    mode = FakeTensorMode()
    with mode:
        made = _traced(fx.GraphModule(half, _plain_copy(half.graph)), half, mode, {})
    made.graph.output_node().meta["user_visible_output_idxs"] = list(visible)
    computed, planned = ([n for n in g.nodes if n.op == "call_function"] for g in (made.graph, half.graph))
    if [n.target for n in computed] == [n.target for n in planned]:
        for node, old in zip(computed, planned, strict=True):
            node.meta[WRITTEN] = old.meta.get(WRITTEN, False)
    given = half.graph.find_nodes(op="placeholder")
    for i, (node, old) in enumerate(zip(made.graph.find_nodes(op="placeholder"), given, strict=True)):
        node.meta[HELD] = old.meta.get(HELD)
        node.name = node.target = f"{'saved' if i < len(strides) else 'primals'}_{i}"  # tells Inductor what dies early
    traced = (n.meta["val"] for n in made.graph.nodes if n.op == "placeholder")
    fakes = [t.as_strided(t.shape, s) if s else t for t, s in zip_longest(traced, strides)]
    with (
        planned_order(made, options), tracing(TracingContext(mode)), V.set_fake_mode(mode),
        TracingContext.report_output_strides() as found,
    ):  # fmt: skip
        compiled = compile_fx_inner(made, fakes, is_backward=is_backward)
    return cast(Any, compiled), list(found or ())


def _plain_copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    values: Any = copied.graph_copy(graph, {})
    copied.output(tuple(values))
    return copied
