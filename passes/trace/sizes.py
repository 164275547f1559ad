"""One trace whose sizes are symbols, and the traces at other sizes that are made from it without tracing.

A `Pattern` is built from three calls whose inputs differ in their sizes alone. Two of them were traced as they are; the
third is traced with symbols in the place of the sizes that differ, which yields the graph's numbers as expressions, what
torch took as given about the symbols, and a script of all that the model asked of torch (`script.py`). The two traces
must come out of the pattern node by node. At any other sizes it holds where what torch took as given holds, and where
the model's own Python, run at those sizes, asks exactly what the script says; its reads and its questions about values
are recorded then, as in any trace. Where anything is otherwise, `Departed` is raised, and the step traced as usual.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from passes._torch import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    Symbols,
    disable_current_modes,
    local_part,
    native_kernels,
    number_of,
    pytree,
    refer_weakly,
    symbolic,
    without_sources,
)
from passes.exclusive import exclusive, interrupt_point
from passes.fuse.rules import fuse

from .arguments import call_signature, state_entries, state_tensors
from .capture import StepTracer, Traced, callers_alone, copied, drop_tangents_of_state, export_step
from .contexts import private_contexts
from .isolate import isolated
from .layouts import BATCH_NORMS, VIEWS, EagerFakes, Layouts
from .script import At, Departed, Items, Look, Pinned, Played, Script, Size, look_of, written
from .structure import Template, flatten, shared, slots
from .value_guards import KnownValues

aten = torch.ops.aten


class _SizedFakes(EagerFakes):
    """Fake tensors with symbols in their sizes, whose layouts are those that the kernels make, or `Departed`."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=symbols.shapes)
        self.cache_enabled, self.symbols = False, symbols

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        interrupt_point()
        if self.symbols.pinned:
            raise Pinned("a size is taken as a number")
        dispatch = FakeTensorMode.__torch_dispatch__
        result = dispatch(self, func, types, args, kwargs or {})
        if func is aten.expand.default and not kwargs:
            strides = _of_expand(args[0], result.shape)
            if self._plain(tuple(result.stride())) != self._plain(strides):
                result = dispatch(
                    self, aten.as_strided.default, types, (result, result.size(), strides, result.storage_offset()), {}
                )
        elif func in VIEWS or (func in BATCH_NORMS and args[0].device.type == "cpu"):
            self._check(func, args, kwargs, result if func in VIEWS else result[0])
        return result

    def _check(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        with disable_current_modes(), native_kernels():
            stand_ins = pytree.tree_map(self._stand_in, args)
            strides = func(*stand_ins, **(kwargs or {})).stride() if func in VIEWS else BATCH_NORMS[func](stand_ins)
        if tuple(strides) != self._plain(tuple(result.stride())):
            raise Departed(f"{func} is laid out in another way than its rule says")

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape, strides = self._plain(tuple(value.size())), self._plain(tuple(value.stride()))
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
        return self._plain(value)

    def _plain(self, value: Any) -> Any:
        return plain(value, self.symbols)


def _of_expand(source: torch.Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of an expanded tensor (inferExpandGeometry, ExpandUtils.cpp)."""
    strides: list[Any] = []
    for back in range(1, len(shape) + 1):
        size, inner = shape[-back], shape[len(shape) - back + 1 :]
        there = back <= source.dim()
        own = source.shape[-back] if there else 1
        stride = source.stride()[-back] if there else (inner[0] * strides[0] if strides else 1)
        strides.insert(0, stride if own == size else 0)
    return tuple(strides)


def plain(value: Any, symbols: Symbols) -> Any:
    """Numbers as they are in the sample, in the place of symbols."""
    if symbolic(value):
        return number_of(value.node.expr, symbols.sample)
    if isinstance(value, slice):
        return slice(*(plain(part, symbols) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: plain(part, symbols) for key, part in value.items()}
    if type(value) in (tuple, list, torch.Size):
        return type(value)([plain(part, symbols) for part in value])
    return value


class _SizedValues(KnownValues):
    def __init__(self, traced: Sequence[torch.Tensor], sample: Sequence[torch.Tensor], symbols: Symbols) -> None:
        super().__init__(traced, sample)
        self.symbols = symbols

    def plain(self, value: Any) -> Any:
        return plain(value, self.symbols)


class _Unrecorded:
    """In the place of a recorder: what is read is recorded where it counts, at each call's own sizes."""

    def stop(self) -> None: ...

    def follow_backward(self) -> None: ...

    def recording(self, tensors: Any) -> Any:
        return nullcontext()


class _SizedTracer(StepTracer):
    """Traces a step with symbols, and writes its script."""

    def __init__(self, symbols: Symbols, *args: Any) -> None:
        super().__init__(*args)
        self.symbols, self.recorder = symbols, _Unrecorded()  # type: ignore[assignment]
        self.script: Script | None = None
        self.returned: tuple[int, ...] = ()

    def _run(self, flat: Sequence[torch.Tensor], *modes: Any) -> Any:
        self.script = Script(flat, self.symbols.sample)
        self.below = (self.script,)
        try:
            value = super()._run(flat, *modes)
            tensors = flatten(value)[0]
            self.returned = self.script.of(tensors)
            _refuse_own_backwards(tensors)
        finally:
            self.script.close()
        return value

    def _first_run(self, flat: Sequence[torch.Tensor]) -> Any:
        return self._run(flat)

    def _known_values(self, inputs: Sequence[torch.Tensor]) -> KnownValues:
        return _SizedValues(inputs, self.sample, self.symbols)


def _refuse_own_backwards(outputs: Sequence[torch.Tensor]) -> None:
    """Python that runs in the backward is not in the script."""
    pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(pending)
    while pending:
        function: Any = pending.pop()
        if isinstance(function, torch.autograd.function.BackwardCFunction):
            raise Departed("a backward of the user's own")
        new = {f for f, _ in function.next_functions if f is not None} - seen
        seen |= new
        pending += new


@dataclass(frozen=True)
class _Told:
    """What a node of the graph is: its arguments, and how its values look; None where no size decides."""

    arguments: Any
    looks: Any


@dataclass(frozen=True)
class _Node:
    index: int


@dataclass(frozen=True)
class _Value:
    look: Look
    offset: Any
    nbytes: Any


@dataclass(frozen=True)
class Pattern:
    """A step's trace for any sizes.

    Attributes:
        traced: one of the traces that the pattern was held to.
        told: what each node of its graph is.
        returned: the numbers of the forward's results in the script.
    """

    traced: Traced
    symbols: Symbols
    told: tuple[_Told, ...]
    script: Script
    returned: tuple[int, ...]
    keep_outputs: bool

    def graph(self, at: At) -> fx.Graph:
        """The graph as it is traced at these sizes."""
        graph, nodes, mode = fx.Graph(), [], _mode(self.traced.pristine)
        for old, told in zip(self.traced.pristine.nodes, self.told, strict=True):
            args, kwargs = _at(told.arguments, at, nodes, mode)
            node = graph.create_node(old.op, old.target, tuple(args), kwargs, old.name, old.type)
            node.meta = copy.copy(old.meta)
            if told.looks is not None:
                node.meta["val"] = _at(told.looks, at, nodes, mode)
                node.meta.pop("tensor_meta", None)
            nodes.append(node)
        return graph

    def resized(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, bound: Mapping[str, Any],
        differentiated: tuple[str, ...] | None, layouts: Layouts,
    ) -> Traced:  # fmt: skip
        """The trace of this call.

        Raises:
            Departed: the pattern does not hold for it.
        """
        tracer = StepTracer(*_of_step(model, loss_fn, bound, differentiated, layouts))
        at = self._at(list(map(local_part, tracer.given)))
        graph = self.graph(at)
        failed: Exception | None = None
        with exclusive(), isolated(model, loss_fn, shared(tracer.input_template)) as tracer.before, private_contexts():
            try:
                output_template = self._play(tracer, at)
            except Exception as error:  # noqa: BLE001 - an error of the model's own, too: tracing it says more
                failed = error
        if failed is not None:
            raise Departed(str(failed)) from failed
        return self._traced(graph, tracer, output_template, layouts)

    def _play(self, tracer: StepTracer, at: At) -> Template:
        """How what the model returns at these sizes is built, where it asks what the script says."""
        played = Played(self.script, at)
        tracer.below, flat = (played,), played.given()
        _check_given(flat, tracer.given)
        value = tracer._run(flat, tracer.recorder.recording(flat[: len(tracer.entries)]))
        tensors, template = flatten(value)
        if played.of(tensors) != self.returned or slots(template) != slots(self.traced.output_template):
            raise Departed("the model returns something else")
        return template

    def _at(self, given: Sequence[torch.Tensor]) -> At:
        sizes = self.symbols.assignment(given)
        if not self.symbols.hold(sizes):
            raise Departed("the trace does not hold at these sizes")
        return At(sizes)

    def _traced(self, graph: fx.Graph, tracer: StepTracer, output_template: Any, layouts: Layouts) -> Traced:
        module = LazyGraphModule(self.traced.graph_module, copied(graph))
        refer_weakly(module)
        fuse(module.graph, () if self.keep_outputs else callers_alone(module.graph, self.traced.mutated, self.traced.outputs))
        return replace(
            self.traced, graph_module=module, pristine=graph, input_template=tracer.input_template,
            output_template=output_template, reads=tracer.recorder.finish(module), guard=tracer.guard,
            layouts=dict(layouts),
        )  # fmt: skip


def pattern(
    model: nn.Module, loss_fn: Callable[..., Any] | None, bound: Mapping[str, Any],
    differentiated: tuple[str, ...] | None, layouts: Layouts, keep_outputs: bool,
    seen: Sequence[tuple[Sequence[torch.Tensor], Traced]],
) -> Pattern:  # fmt: skip
    """The pattern of a step.

    Args:
        bound: the arguments of a call that is traced with symbols.
        seen: the inputs (their shapes alone count) and traces of two calls at other sizes.

    Raises:
        Departed: there is none; `Pinned`, where there is none for other calls either.
    """
    symbols = Symbols()
    tracer = _SizedTracer(symbols, *_of_step(model, loss_fn, bound, differentiated, layouts))
    first = len(tracer.entries)
    with exclusive(), isolated(model, loss_fn, shared(tracer.input_template)) as tracer.before:
        with private_contexts(), without_sources():
            try:
                joint = export_step(tracer, _sized_inputs(tracer, symbols, [inputs for inputs, _ in seen]))
            except Exception as error:
                raise (Pinned if symbols.pinned else Departed)(str(error)) from error
    drop_tangents_of_state(joint.graph_module.graph, len(tracer.given), sum(leaf.differentiated for leaf in tracer.leaves))
    assert tracer.script is not None
    traced = seen[0][1]
    told = _tell(joint.graph_module, traced)
    found = Pattern(traced, symbols, told, tracer.script, tracer.returned, keep_outputs)
    for inputs, other in seen:
        _check_same(found.graph(found._at([*tracer.given[:first], *inputs])), other, traced)
    return found


def _of_step(model: Any, loss_fn: Any, bound: Any, differentiated: Any, layouts: Any) -> tuple[Any, ...]:
    tensors, template = flatten(dict(bound))
    entries = state_entries(model)
    given = [*state_tensors(model, entries), *tensors]
    return model, loss_fn, call_signature(model, loss_fn), entries, template, differentiated, given, layouts


def _sized_inputs(
    tracer: StepTracer, symbols: Symbols, others: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The step's tensors as fakes; what differs between the calls is a symbol."""
    mode, first, fakes = _SizedFakes(symbols), len(tracer.entries), []
    for i, tensor in enumerate(map(local_part, tracer.given)):
        alike = [inputs[i - first] for inputs in others] if i >= first else []
        dims = [d for d in range(tensor.dim()) if any(t.shape[d] != tensor.shape[d] for t in alike)]
        fakes.append(symbols.fake(mode, i, tensor, dims).requires_grad_(tensor.requires_grad))
    return fakes


def _tell(module: fx.GraphModule, traced: Traced) -> tuple[_Told, ...]:
    """What each node is, the ones that compute sizes left out, in the order of the graph traced at one size."""
    numbers: dict[fx.Node, Any] = {}
    result = []
    expected = list(traced.pristine.nodes)
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if symbolic(value):
            numbers[node] = written(value, look_of)
            continue
        if isinstance(value, (bool, int)) and node.op == "call_function":
            numbers[node] = value
            continue
        like = expected[len(result)] if len(result) < len(expected) else None
        arguments = list(node.args), node.kwargs
        if like is not None and like.target is aten.alias.default and _is_whole(node):
            arguments = [node.args[0]], {}
        elif like is None or (node.op, node.target) != (like.op, like.target):
            if not _is_whole(node):
                if DBG: print(*(x.format_node() for x in list(module.graph.nodes)[len(numbers)-4:len(numbers)+4]),"--",*(x.format_node() for x in expected[len(result)-3:len(result)+4]),sep="\n")
                raise Departed(f"{node.name} is not traced without symbols")
            numbers[node] = numbers[node.args[0]]
            continue
        numbers[node] = _Node(len(result))
        if node.op == "get_attr" and not _same_constant(module, traced.graph_module, node, like):
            raise Departed(f"{node.name} is another constant")
        result.append(_Told(_tell_arguments(arguments, numbers), _tell_value(value)))
    if len(result) < len(expected):
        raise Departed("there are more ops without symbols")
    return tuple(result)


def _is_whole(node: fx.Node) -> bool:
    """Whether this slices all there is, which torch leaves out where it knows the size; or the gradient of that."""
    ranges: dict[Any, int] = {aten.slice.Tensor: 2, aten.slice_backward.default: 3}
    first = ranges.get(node.target)
    return first is not None and tuple(node.args[first:]) in ((0, _END), (0, _END, 1)) and not node.kwargs


_END = 2**63 - 1


def _tell_arguments(value: Any, numbers: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, slice):
        return Items(slice, tuple(_tell_arguments(part, numbers) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return Items(dict, tuple((key, _tell_arguments(part, numbers)) for key, part in value.items()))
    if isinstance(value, (tuple, list)):
        kind = tuple if isinstance(value, tuple) else list
        return Items(kind, tuple(_tell_arguments(part, numbers) for part in value))
    return written(value, look_of) if symbolic(value) else value


def _tell_value(value: Any) -> Any:
    """How a node's value looks; None where no size decides."""
    told = _tell_tensors(value)
    return told if _sized(told) else None


def _tell_tensors(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        offset, nbytes = (written(n, look_of) for n in (value.storage_offset(), value.untyped_storage().nbytes()))
        return _Value(look_of(value), offset, nbytes)
    if isinstance(value, (tuple, list)):
        return Items(tuple if isinstance(value, tuple) else list, tuple(map(_tell_tensors, value)))
    return value


def _sized(told: Any) -> bool:
    match told:
        case Size():
            return True
        case Items(_, parts):
            return any(map(_sized, parts))
        case _Value(look, offset, nbytes):
            return any(map(_sized, (look.shape, look.strides, offset, nbytes)))
    return False


def _at(told: Any, at: At, nodes: Sequence[fx.Node], mode: Any) -> Any:
    match told:
        case Size():
            return at.number(told)
        case _Node(index):
            return nodes[index]
        case _Value(look, offset, nbytes):
            meta = torch.empty(0, dtype=look.dtype, device="meta")
            memory = torch.UntypedStorage(at.number(nbytes), device="meta")
            meta.set_(memory, at.number(offset), at.numbers(look.shape), at.numbers(look.strides))  # type: ignore[call-overload]
            return FakeTensor(mode, meta, look.device)
        case Items(kind, parts):
            if kind is dict:
                return {key: _at(part, at, nodes, mode) for key, part in parts}
            found = [_at(part, at, nodes, mode) for part in parts]
            return slice(*found) if kind is slice else kind(found)
    return told


def _mode(graph: fx.Graph) -> Any:
    return next(iter(graph.nodes)).meta["val"].fake_mode


def _check_given(fakes: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    for told, tensor in zip(fakes, map(local_part, given), strict=True):
        looks = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in (told, tensor)]
        if looks[0] != looks[1] or (tensor.device.type != "meta" and told.device != tensor.device):
            raise Departed("a parameter, buffer or input looks otherwise")


def _check_same(graph: fx.Graph, traced: Traced, like: Traced) -> None:
    """The graph is the one traced, node by node."""
    said = [(t.outputs, t.mutated, t.num_outputs, t.notes, t.repeated, t.input_names) for t in (traced, like)]
    if said[0] != said[1]:
        raise Departed("two traces differ")
    for node, told in zip(traced.pristine.nodes, graph.nodes, strict=True):
        if difference := differs(node, told):
            raise Departed(f"{node.name} differs: {difference}")
        if node.op == "get_attr" and not _same_constant(traced.graph_module, like.graph_module, node, told):
            raise Departed(f"{node.name} is another constant")


def differs(a: fx.Node, b: fx.Node) -> str:
    """What is not the same about two nodes of two graphs, in words; "" where nothing is."""
    if (a.op, a.target, a.name) != (b.op, b.target, b.name):
        return f"{a.format_node()} and {b.format_node()}"
    if repr((a.args, a.kwargs)) != repr((b.args, b.kwargs)):
        return f"the arguments {a.args} {a.kwargs} and {b.args} {b.kwargs}"
    looks = [repr(pytree.tree_map(_describe, node.meta.get("val"))) for node in (a, b)]
    return "" if looks[0] == looks[1] else f"the values {looks[0]} and {looks[1]}"


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (
        type(value), tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device,
        value.requires_grad, value.untyped_storage().nbytes(),
    )  # fmt: skip


def _same_constant(a: fx.GraphModule, b: fx.GraphModule, one: fx.Node, other: fx.Node) -> bool:
    first, second = getattr(a, str(one.target)), getattr(b, str(other.target))
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return first is second
    return first is second or (first.dtype == second.dtype and torch.equal(first, second))

import os
DBG=os.environ.get("DBG")
