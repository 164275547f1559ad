"""What the compiler's side of torch keeps private and this folder relies on (torch 2.11 and newer)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes, free_symbols
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from passes._torch import FakeTensor, check_in_the_kernels, checks_kept, symbolic
from passes.run._torch import active_autocast, under_autocast
from solvers.errors import PlannerError

from ._torch_inductor import planned_order

Halves = tuple[fx.GraphModule, fx.GraphModule]
# (joint graph, number of its outputs that belong to the forward) -> forward, backward
Partition = Callable[[fx.GraphModule, int], Halves]


class _Partitioner(CustomPartitionerFn):
    """Our partition as Inductor takes it; without a `uuid`, so that no cache hands out another budget's program."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        check_in_the_kernels(gm.graph)
        return self.partition(gm, kwargs["num_fwd_outputs"])

    def uuid(self) -> Any | None:
        return None


def compile_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], partition: Partition,
    run: Callable[[fx.GraphModule, bool], Callable[..., Any]],
) -> Callable[..., Any]:  # fmt: skip
    """AOT autograd with our partition; `run(half, is_backward)` makes each half callable."""

    def split(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Halves:
        check_in_the_kernels(joint.graph)
        return partition(joint, num_fwd_outputs)

    with functorch_config.patch(enable_autograd_cache=False), checks_kept():
        made = aot_autograd(
            fw_compiler=lambda half, _: run(half, False), bw_compiler=lambda half, _: run(half, True),
            partition_fn=split, keep_inference_input_mutations=True,
        )  # fmt: skip
        compiled: Callable[..., Any] = made(gm, inputs)
    return compiled


def compile_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], partition: Partition, options: Mapping[str, Any],
    seen: Callable[[Callable[..., Any], bool], Callable[..., Any]],
) -> Callable[..., Any]:  # fmt: skip
    """Inductor with our partition; `seen(half, is_backward)` may wrap each compiled half."""

    def inner(half: fx.GraphModule, half_inputs: Sequence[Any], **kwargs: Any) -> Any:
        check_in_the_kernels(half.graph)  # of an evaluation, too, which is not partitioned
        with planned_order(half, options):  # a backward for sizes that vary is compiled when it is first run
            compiled = compile_fx_inner(half, half_inputs, **kwargs)
        return seen(compiled, bool(kwargs.get("is_backward", False)))

    patches = {**options, "custom_partitioner_fn": _Partitioner(partition)}
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(patches), checks_kept():
        compiled: Callable[..., Any] = cast(Any, compile_fx)(gm, list(inputs), inner_compile=inner)
    return compiled


def tracing_context() -> TracingContext | None:
    """Dynamo's context of the present compilation."""
    return TracingContext.try_get()


def reentered(context: TracingContext | None) -> contextlib.AbstractContextManager[Any]:
    """That context once more, when the same graph is compiled again later, without others of `DDPOptimizer`."""
    if context is None or TracingContext.try_get() is context:
        return contextlib.nullcontext()
    own = copy.copy(context)  # each graph's backward may be compiled later, with what was noted of its own forward
    own.ddp_optimizer_ctx = None
    return tracing(own)


class Ambient:
    """What tracing depends on besides the graph, as it is now: a step may end where gradients are off, or precision
    is another.
    """

    def __init__(self) -> None:
        self.grad, self.inference, self.autocast = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), active_autocast()
        )  # fmt: skip

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The same once more."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), under_autocast(self.autocast):
            yield


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options for `torch.compile(mode=...)`."""
    return dict(torch._inductor.list_mode_options(mode))


def check_inductor(options: Any) -> None:
    """Raise unless these are options of Inductor's."""
    unknown = [name for name in options if not hasattr(inductor_config, name)] if isinstance(options, Mapping) else None
    if unknown != []:
        named = f"the option {unknown[0]!r}" if unknown else f"inductor={options!r}"
        raise PlannerError(f"{named} is unknown: it takes a dict of options by name, as torch._inductor.config has.")


def traced_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """What stands for the inputs in Dynamo's own trace: sizes without data, good for compiling once more later."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [_traced(n.meta.get("example_value", given)) for n, given in zip(placeholders, inputs, strict=True)]


def _traced(value: Any) -> Any:
    """The same in the mode that AOT autograd traces in, which would forget which symbol the item of a tensor is."""
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if mode is None or not isinstance(value, FakeTensor) or value.item_memo is None:
        return value
    moved = mode.from_tensor(value)
    moved.item_memo = value.item_memo
    return moved


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as Dynamo calls it without looking into it."""
    hidden: Callable[..., Any] = torch._dynamo.disable(function, reason="runs compiled graphs")
    return hidden


def is_profiling() -> bool:
    """Whether somebody records events already."""
    return bool(torch.autograd._profiler_enabled())


def keeps_graph() -> bool:
    """Whether the backward that is running keeps its graph, with all that was saved for it."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def symbol_name(value: Any) -> str:
    """The symbol that an input of a graph is; "" for what is not one."""
    if not isinstance(value, torch.SymInt):
        return ""
    expression = value.node.expr
    return str(expression) if expression.is_Symbol else ""


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Run ops as outside of the compilation that is under way: real ones, and with the errors that they raise there."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of a joint graph is the gradient of an output."""
    return bool(partitioners._is_tangent(node))


def is_plain_primal(node: fx.Node) -> bool:
    """Whether a placeholder of a joint graph is an input of the forward: not a seed, an offset or backward state."""
    return bool(partitioners._is_primal(node)) and not partitioners._is_backward_state(node)


def output_descriptions(graph: fx.Graph, count: int) -> list[Any]:
    """What AOT autograd notes about each output of its joint graph."""
    descriptions = graph.output_node().meta.get("desc")
    return list(descriptions) if descriptions is not None and len(descriptions) == count else [None] * count


def replaced_inputs(graph: fx.Graph, count: int) -> tuple[fx.Node, ...]:
    """The inputs whose new values come first among the results of a joint graph, and are copied over them outside."""
    given = {n.meta["desc"]: n for n in graph.nodes if n.op == "placeholder" and "desc" in n.meta}
    found = (getattr(note, "mutated_input", None) for note in output_descriptions(graph, count))
    return tuple(given[note] for note in found if note is not None)


def saved_description(index: int) -> Any:
    """The note of a value that the forward saves for the backward."""
    try:
        from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
    except ImportError:  # pragma: no cover - depends on the installed torch
        return None
    return SavedForBackwardsAOTOutput(index)


def is_symbolic(value: Any) -> bool:
    """Whether a value of a graph is a number rather than a tensor, symbolic or not."""
    return symbolic(value) or isinstance(value, (int, float))


def concrete(value: Any, sizes: Mapping[str, int]) -> Any:
    """A number without its symbols: those in `sizes` as given there, others as first seen. Adds no guard."""
    if not symbolic(value):
        return value
    node = value.node
    expression = node.expr
    values = {
        s: sympy.Integer(sizes[str(s)] if str(s) in sizes else _first_seen(node.shape_env, s))
        for s in expression.free_symbols
    }
    return _number(expression.xreplace(values), value)


def _first_seen(shape_env: Any, symbol: Any) -> Any:
    for table in ("backed_var_to_val", "var_to_val"):
        known = getattr(shape_env, table, None)
        if known is not None and symbol in known:
            return known[symbol]
    raise KeyError(str(symbol))


def _number(expression: Any, like: Any) -> Any:
    if isinstance(like, torch.SymBool):
        return bool(expression)
    return float(expression) if isinstance(like, torch.SymFloat) else int(expression)


def symbols_of(value: Any) -> tuple[str, ...]:
    """Names of the symbols in a number or a tensor's sizes, sorted."""
    return tuple(sorted(str(s) for s in free_symbols(value))) if value is not None else ()


def size_node(graph: fx.Graph, value: Any, symbols: Mapping[str, fx.Node]) -> fx.Node | None:
    """A symbolic size as a node at the end of the graph, computed from its symbols; None where one is not at hand."""
    expression = value.node.expr
    if not all(str(s) in symbols for s in expression.free_symbols):
        return None
    tracer, last = GraphAppendingTracer(graph), next(iter(reversed(graph.nodes)), None)
    known = {s: fx.Proxy(symbols[str(s)], tracer) for s in expression.free_symbols}
    made = sympy_interp(PythonReferenceAnalysis, known, expression)
    if not isinstance(made, fx.Proxy):
        return None
    for node in graph.nodes if last is None else _after(last):
        node.meta["val"] = cast(Any, node.target)(*fx.map_arg(node.args, lambda n: n.meta["val"]))
    return made.node


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while (node := node.next).op != "root":
        yield node


def symbol_nodes(graph: fx.Graph) -> dict[str, fx.Node]:
    """The node that first names each symbol."""
    return {str(symbol): node for symbol, node in find_symbol_binding_fx_nodes(graph).items()}
