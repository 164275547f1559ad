"""One trace whose sizes are symbols, and the traces at other sizes that are made from it without tracing.

A `Pattern` is built from three calls whose inputs differ in their sizes alone. Two of them were traced as they are.
The third is traced with symbols in the place of the sizes that differ (`symbols.py`): the numbers in its graph are
expressions (`told.py`), torch notes what it takes as given about the symbols, and a script is written of all that the
model asks of torch (`script.py`). The two traces must come out of the pattern node by node. At any other sizes it holds
where what torch took as given holds, and where the model's own Python, run at those sizes, asks exactly what the script
says; its reads and its questions about values are recorded then, as in any trace. Where anything is otherwise,
`Departed` is raised, and the step is to be traced as usual.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from passes._torch import LazyGraphModule, Symbols, local_part, refer_weakly
from passes.exclusive import exclusive
from passes.fuse.rules import fuse
from passes.memory import own_bytes

from .arguments import call_signature, state_entries, state_tensors
from .binding import names_given
from .capture import StepTracer, Traced, copied, not_held
from .carried import carried
from .contexts import private_contexts
from .given import Returned, changed_slots
from .inside import places_among
from .isolate import isolated
from .layouts import Layouts
from .matching import match, match_arguments
from .notation import At, Departed
from .overlaps import overlaps
from .script import Played, Script
from .settings import set_slots
from .structure import flatten, held_objects
from .symbols import SizedTracer
from .templates import shared, slots
from .told import Told, at_sizes, check_same, tell


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
    told: tuple[Told, ...]
    script: Script
    returned: tuple[int, ...]
    keep_outputs: bool
    keep_inputs: bool

    def graph(self, at: At) -> fx.Graph:
        """The graph as it is traced at these sizes."""
        graph, mode = fx.Graph(), _mode(self.traced.pristine)
        nodes: list[fx.Node] = []
        for old, told in zip(self.traced.pristine.nodes, self.told, strict=True):
            args, kwargs = at_sizes(told.arguments, at, nodes, mode)
            node = graph.create_node(old.op, old.target, tuple(args), kwargs, old.name, old.type)
            node.meta = copy.copy(old.meta)
            if told.looks is not None:
                node.meta["val"] = at_sizes(told.looks, at, nodes, mode)
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
                result = self._play(tracer, at, held_objects(bound))
                tracer.recorder.let_go()
            except Exception as error:  # noqa: BLE001 - an error of the model's own, too: tracing it says more
                failed = error
        if failed is not None:
            raise Departed(str(failed)) from failed
        return self._traced(graph, tracer, result, layouts)

    def _play(self, tracer: StepTracer, at: At, objects: Sequence[Any]) -> Returned:
        """What the model returns at these sizes, where it is as it was and asks what the script says."""
        matched = match(self.traced.reads, tracer.model, tracer.loss_fn)
        match_arguments(self.traced.reads, matched, tracer.model, objects)
        played, tracer.places = Played(self.script, at), tuple(places_among(self.traced.settings))
        tracer.below, flat = (played,), played.given()
        _check_given(flat, tracer.given)
        result = tracer._run(flat, tracer.recorder.recording(flat[: len(tracer.entries)]))
        tracer.take_replaced(result)
        own = self.traced
        if played.of(result.tensors) != self.returned or slots(result.template) != slots(own.output_template):
            raise Departed("the model returns something else")
        if changed_slots(result.changes) != changed_slots(own.changes):
            raise Departed("the model changes something else")
        found, before = ((list(map(str, s)), set_slots(s)) for s in (tracer.sets, own.settings))
        if found != before:
            raise Departed("the model sets something else")
        return result

    def _at(self, given: Sequence[torch.Tensor]) -> At:
        sizes = self.symbols.assignment(given)
        if not self.symbols.hold(sizes):
            raise Departed("the trace does not hold at these sizes")
        return At(sizes)

    def _traced(self, graph: fx.Graph, tracer: StepTracer, result: Returned, layouts: Layouts) -> Traced:
        module = LazyGraphModule(self.traced.graph_module, copied(graph))
        refer_weakly(module)
        own = self.traced
        inputs, keeps = slice(len(own.state), own.num_primals), (self.keep_outputs, self.keep_inputs)
        fuse(module.graph, not_held(module.graph, own.mutated, own.outputs, inputs, *keeps))
        return replace(
            own, graph_module=module, pristine=graph, input_template=tracer.input_template,
            output_template=result.template, changes=result.changes,
            reads=tracer.recorder.finish(module).but(tracer.sets, tracer.carried), guard=tracer.guard,
            layouts=dict(layouts), by_name=tracer.by_name,
            overlaps=overlaps(tracer.given, own.mutated), resident=own_bytes(tracer.given), settings=tracer.sets,
            from_symbols=True,
        )  # fmt: skip


def pattern(
    model: nn.Module, loss_fn: Callable[..., Any] | None, bound: Mapping[str, Any],
    differentiated: tuple[str, ...] | None, layouts: Layouts, keep_outputs: bool, keep_inputs: bool,
    seen: Sequence[tuple[Sequence[torch.Tensor], Traced]],
) -> Pattern:  # fmt: skip
    """The pattern of a step.

    Args:
        bound: the arguments of a call that is traced with symbols.
        seen: the inputs (their shapes alone count) and traces of two calls at other sizes.

    Raises:
        Departed: there is none; `Pinned`, where there is none for other calls either.
    """
    traced = seen[0][1]
    tracer = SizedTracer(traced.settings, *_of_step(model, loss_fn, bound, differentiated, layouts))
    joint, first = tracer.trace([inputs for inputs, _ in seen]), len(tracer.entries)
    told = tell(joint.graph_module, traced)
    found = Pattern(traced, tracer.symbols, told, tracer.script, tracer.returned, keep_outputs, keep_inputs)
    for inputs, other in seen:
        check_same(found.graph(found._at([*tracer.given[:first], *inputs])), other, traced)
    return found


def _of_step(model: Any, loss_fn: Any, bound: Any, differentiated: Any, layouts: Any) -> tuple[Any, ...]:
    tensors, template = flatten(dict(bound))
    entries = state_entries(model, carried(bound))
    given = [*state_tensors(model, entries), *tensors]
    call = call_signature(model, loss_fn), entries, template, differentiated, given, layouts, names_given(bound)
    return model, loss_fn, *call


def _mode(graph: fx.Graph) -> Any:
    return next(iter(graph.nodes)).meta["val"].fake_mode


def _check_given(fakes: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    for told, tensor in zip(fakes, map(local_part, given), strict=True):
        looks = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in (told, tensor)]
        if looks[0] != looks[1] or (tensor.device.type != "meta" and told.device != tensor.device):
            raise Departed("a parameter, buffer or input looks otherwise")
