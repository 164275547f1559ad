"""Why a planned step differs: the first op whose result is not the plain step's, and the likely cause.

Ops are not matched one to one, because eager and trace name and split them differently, but by value: a result that
some op of the plain step also has is right, wherever it came from. From a wrong result of the step the way leads back
through wrong values alone, to the first of them.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from passes._torch import DisableTorchFunction, TorchDispatchMode, pytree
from passes.alias import is_view
from passes.run._torch import below_autograd
from passes.trace.modules import module_path
from planner.decided import Decided
from planner.errors import CheckError

from .case import Case, Tensors, tangent
from .compare import Difference, Observed, differences

SPREAD = 4  # times as far from the plain step as the plain step is from itself
SHOWN = 3
REPORT = "This is a defect of the plan: please report it"
Known = set[bytes]
Differences = list[Difference]


def explain(case: Case, planned: Decided, plain: list[Observed], found: Differences, noise: Differences) -> str:
    """What to add to the record where the plain step differs from itself as much (`noise`); CheckError otherwise."""
    changed = case.changed
    if noise and _within(found, noise):
        worst = max(d.size or 0.0 for d in noise)
        return f"; the plain step does not repeat itself, and {_few(found)} as far as it does, by {worst:.3g} at most"
    first = found[0]
    if noise:
        cause = (
            f"the plain step does not repeat itself from equal state; two runs of it differ in {_few(noise)}. Its "
            "forward reads a clock or state outside the model, or changes state that could not be put back"
        )
        raise _error(case, found, None, cause)
    if planned.runs:
        raise _error(case, found, None, "one of its regions does not compute what its module does; planning them "
                     "one at a time (regions=) shows which")  # fmt: skip
    try:
        node, cause = _cause(_Values(case, planned, first.step - 1), plain, found, changed)
    except Exception as error:  # noqa: BLE001 - the difference must be told, whatever looking for its cause meets
        node, cause = None, f"unknown; looking for it met {type(error).__name__}: {' '.join(str(error).split())}"
    raise _error(case, found, node, cause)


def _within(found: Differences, noise: Differences) -> bool:
    """Whether all that differs are roundings, and none is much larger than those between two plain runs."""
    spread = {(d.step, d.what): d.size or 0.0 for d in noise}
    return all(d.rounding and (d.size or 0.0) <= SPREAD * spread.get((d.step, d.what), 0.0) for d in found)


def _few(found: Differences) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(map(str, found[:SHOWN])) + more


def _error(case: Case, found: Differences, node: fx.Node | None, cause: str) -> CheckError:
    first = found[0]
    here = [d for d in found if d.step == first.step]
    earlier = "" if first.step == 1 else ", though the first one is equal"
    place = "" if node is None else f" First op with another result: {_place(case, node)}."
    return CheckError(
        f"the planned step {first.step} differs from the plain one{earlier}: {_few(here)}.{place} "
        f"Likely cause: {cause}. check=False would hand the plan over unchecked.",
        differs=first.what, step=first.step, op=None if node is None else node.name, cause=cause,
    )  # fmt: skip


def _place(case: Case, node: fx.Node) -> str:
    source = node.args[0] if node.target is operator.getitem else node
    node = source if isinstance(source, fx.Node) else node
    path = module_path(node)
    module = dict(case.model.named_modules()).get(path)
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None) if module is not None else None
    line = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{node.name} ({node.target}) in {path or 'the model'}{line}"


# Where and why --------------------------------------------------------------------------------------------------------


def _cause(
    values: _Values, plain: list[Observed], found: Differences, changed: list[str]
) -> tuple[fx.Node | None, str]:
    wrong, of_trace, first = values.of_rewrite(), values.of_model(), found[0]
    if wrong is not None:
        return wrong, f"this op of the rewritten step does not compute what was traced. {REPORT}"
    if any(d.kind == "generator" for d in found):
        return of_trace, (
            "forward seeds, forks or restores a generator, or draws from Python's random or NumPy's: a trace does that "
            "once and the planned step never again"
        )
    if changed:
        return of_trace, (
            f"forward changes state that is not a buffer ({', '.join(changed[:SHOWN])}), which the planned step does "
            "not; register it as a buffer (self.register_buffer)"
        )
    if first.kind == "state":
        return of_trace, (
            "this is changed in a way that a trace does not show: through .data, or once more where "
            "torch.utils.checkpoint repeats a forward in the backward"
        )
    if values.route_differs(plain):
        return values.of_route(), "an op of torch takes another formula while it is traced than in eager"
    if all(d.rounding for d in found):
        cause = "eager sums in another order here: another memory layout, or another kernel"
        return of_trace or values.producer(first), cause
    if first.step > 1:
        return of_trace, (
            "a value was read while tracing - of a parameter, a buffer, the inputs or Python - and is a constant now"
        )
    if of_trace is not None:
        return of_trace, (
            "in eager this op has another kernel, another memory layout or another value that was read while tracing"
        )
    return None, f"a result is handed out in the wrong place or form. {REPORT}"


class _Values:
    """What each op computes in one step: of the plain model, of the trace, and of the rewritten halves."""

    def __init__(self, case: Case, planned: Decided, step: int) -> None:
        self.case, self.planned, self.step = case, planned, step
        recorder = _Recorder()
        self.recorded = case.take(self._only(lambda *a: _with(recorder, case.plain, *a), case.plain), step + 1)
        self.plain = recorder.known
        self.trace = self._interpreted(self._trace)
        self.rewrite = self._interpreted(self._halves)

    def route_differs(self, plain: list[Observed]) -> bool:
        """Whether the plain step itself differs when it runs under a dispatch mode, as a trace does."""
        return bool(differences(plain[: self.step + 1], self.recorded))

    def of_model(self) -> fx.Node | None:
        """The first op of the trace whose result the plain step does not have."""
        return _first_wrong(self.planned.prepared.traced.graph_module.graph, self.trace, self.plain)

    def of_route(self) -> fx.Node | None:
        """The same, where the plain step has other results when its ops are looked at: by what passes between them."""
        outer = _Outer()
        self.case.take(self._only(lambda *a: _with(outer, self.case.plain, *a), self.case.plain), self.step + 1)
        return _first_wrong(self.planned.prepared.traced.graph_module.graph, self.trace, outer.known)

    def producer(self, first: Difference) -> fx.Node | None:
        """The op of the trace that computes a gradient: where its value is right in some other place."""
        traced = self.planned.prepared.traced
        results: Any = traced.graph_module.graph.output_node().args[0]
        gradients = dict(zip(map("the gradient of {}".format, self.case.names), results[traced.num_forward_outputs :],
                             strict=False))  # fmt: skip
        node = gradients.get(first.what)
        while isinstance(node, fx.Node) and is_view(node):
            node = node.all_input_nodes[0]
        return node if isinstance(node, fx.Node) and node.op == "call_function" else None

    def of_rewrite(self) -> fx.Node | None:
        """The first op of the rewritten halves whose result the trace does not have."""
        known = set(self.trace.values())
        halves = self.planned.rewritten.forward, self.planned.rewritten.backward
        found = (_first_wrong(half.graph, self.rewrite, known) for half in halves)
        return next((node for node in found if node is not None), None)

    def _only(self, run: Any, otherwise: Any) -> Any:
        """`run` at the step in question, the other before it."""
        return lambda tensors, step, backward: (run if step == self.step else otherwise)(tensors, step, backward)

    def _interpreted(self, interpret: Callable[[Tensors, dict[fx.Node, bytes]], None]) -> dict[fx.Node, bytes]:
        found: dict[fx.Node, bytes] = {}
        run = self.case.planned(self.planned)

        def first(tensors: Tensors, step: int, backward: Any) -> Any:
            state = self.case.generators.state()
            with below_autograd():
                interpret([t.detach().clone() for t in tensors], found)
            self.case.generators.set(state)
            return run(tensors, step, backward)

        self.case.take(self._only(first, run), self.step + 1)
        return found

    def _tangents(self) -> Tensors:
        traced = self.planned.prepared.traced
        metas = [p.meta["val"] for p in traced.placeholders[traced.num_primals :]]
        return [tangent(m, m.stride(), self.step) for m in metas]

    def _trace(self, tensors: Tensors, found: dict[fx.Node, bytes]) -> None:
        graph_module = self.planned.prepared.traced.graph_module
        _Noting(graph_module, found).run(*tensors, *self._tangents())

    def _halves(self, tensors: Tensors, found: dict[fx.Node, bytes]) -> None:
        traced, step, rewritten = self.planned.prepared.traced, self.planned.step, self.planned.rewritten
        results = _Noting(rewritten.forward, found).run(list(tensors))
        for i, value in zip(traced.mutated, results, strict=False):
            tensors[i] = value
        primals = [tensors[i] for i in step.saved_primals]
        saved = results[rewritten.num_forward_outputs :]
        _Noting(rewritten.backward, found).run([*saved, *primals, *self._tangents()])


class _Noting(fx.Interpreter):
    """Runs a graph op by op and notes a digest of each op's first float result."""

    def __init__(self, graph_module: fx.GraphModule, found: dict[fx.Node, bytes]) -> None:
        super().__init__(graph_module)
        self.found = found

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and not is_view(n) and (digests := _digests(result)):
            self.found[n] = digests[0]
        return result


    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A view that eager's layout does not allow becomes a copy: the numbers are what counts."""
        return super().call_function(torch.reshape if target is torch.ops.aten.view.default else target, args, kwargs)


class _Recorder(TorchDispatchMode):
    """Collects the digests of all float results of the ops in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Known = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.known.update(_digests(result))
        return result


class _Outer(TorchFunctionMode):
    """Collects the digests of the tensors that the forward's Python sees, and of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Known = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result)
        with DisableTorchFunction():
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._note)
        return result

    def _note(self, value: Any) -> None:
        with DisableTorchFunction():
            self.known.update(_digests(value))


def _with(mode: Any, run: Any, *arguments: Any) -> Any:
    with mode:
        return run(*arguments)


def _digests(result: Any) -> list[bytes]:
    """Of the numbers alone: an op's twin may give them another shape or layout."""
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.numel()]
    return [_digest(t) for t in tensors if t.is_floating_point() or t.is_complex()]


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format) if len(flat) == 1 else flat  # one may have any stride
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def _first_wrong(graph: fx.Graph, values: dict[fx.Node, bytes], known: Known) -> fx.Node | None:
    """The first of the wrong values that lead to a wrong result of the graph."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    wrong: set[fx.Node] = set()
    waiting = list(graph.output_node().all_input_nodes)
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        passed_on = node not in values  # a view, an item, a mask
        if not passed_on and values[node] in known:
            continue
        if not passed_on:
            wrong.add(node)
        waiting += node.all_input_nodes
    return min(wrong, key=order.__getitem__, default=None)
