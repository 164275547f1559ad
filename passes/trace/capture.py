"""capture: model + arguments -> `Traced`, the joint forward+backward ATen graph.

The model's own Python runs once under fake tensors (no data, no memory), its parameters, buffers and inputs
being the graph's placeholders. Autograd runs too, so custom `autograd.Function`s, autocast and `no_grad`
regions are in the graph as executed.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge

from passes._torch import (
    JointGraph,
    OpOverload,
    as_distributed,
    check_in_the_kernels,
    compiling_flags,
    eager_kernels,
    export_joint,
    is_dense,
    is_distributed,
    keep_gradient_spread,
    local_part,
    mutation_count,
    pytree,
    quiet_fake_errors,
    swapped_state,
    torch_settings,
    without_sources,
)
from passes.alias import ancestors
from passes.errors import CaptureError, NoBackward, OnlyInEager, StateChanged, Unsupported, VerificationError
from passes.exclusive import exclusive
from passes.fuse.rules import fuse
from passes.memory import own_bytes
from passes.ops import is_random
from passes.printable import few
from passes.run._torch import Autocast
from passes.run.tensors import nodes_behind

from . import routes
from .answers import Asked, Unanswered
from .arguments import (
    StateEntry,
    argument_names,
    call_signature,
    check_inputs,
    lend_attributes,
    lend_kind,
    run_model,
    runs_hooks,
    state_entries,
    state_tensors,
)
from .binding import names_given
from .buffers import refuse_with_gradient, replaced_in, storage_place
from .carried import STATE, Carries, carried, is_carried, may_be_carried, notes_of, of_one_kind, refuse_several_names
from .collectives import functional_collectives
from .compiled import refuse_compiled_parts
from .constants import Constants
from .constructs import ACCUMULATED, IDENTITY, LAZY, LEAF, refuse_settings
from .contexts import private_contexts
from .custom_backward import refuse_left_for_backward, used_in_backward
from .expected import MISSING
from .failure import Failures, capture_error, value_needed
from .first_call import FirstCall, Remembers
from .given import Changed, Given, Returned, changed_slots, left_alone
from .gradient_layouts import gradient_strides
from .guards import Guard
from .hidden import refuse_hidden
from .inside import lengths_of, only_set, renews, set_now, settings_inside
from .isolate import isolated
from .layouts import BACKWARD_AUTOCAST, LAID_OUT, EagerFakes, EagerLayouts, GivenGradient, Layouts, settle_gradients
from .leaks import Remembered
from .modules import fill_forward_paths, module_path, module_paths
from .next_step import Rerun
from .notice import Left, check_backward, judged, notice, say_what_is_left
from .once import alike_when_compiling
from .overlaps import Overlaps, overlaps
from .owned import Owned
from .pieces import Pieces
from .readers import readers
from .reads import Reads
from .recorder import Recorder
from .refuse import (
    hook_of_given,
    own_generator,
    refuse_attributes,
    refuse_backward_hooks,
    refuse_not_dense,
    storage_kind,
)
from .rerun import is_named, only_adds_to, reads
from .settings import Setting, set_slots, steady, taken_apart, tensors_in
from .state import Snapshot
from .stores import Place
from .structure import Bound, flatten, unflatten
from .templates import Template, Tree, shared, slots
from .value_guards import KnownValues
from .watch import Watch

EVERY_OUTPUT = ("*",)  # differentiated: all that require a gradient
COMPILING = "traced as torch.compiler.is_compiling(), because the ordinary code asks for the values of its inputs"


@dataclass(frozen=True)
class OutputLeaf:
    """One tensor the model returns.

    Attributes:
        input: index of the placeholder it is, when the model returns an input, parameter or buffer itself.
        index: its position among the graph's outputs otherwise (-1 when `input` is set).
        requires_grad: whether the plain model's output requires a gradient.
        differentiated: whether the traced backward starts from it (its tangent is an input of the backward).
        is_view: whether the plain model's output is a view, of whatever memory.
        stays: whether forward leaves it in an attribute of the model, where it is until the next call.
        readers: the outputs, by `index`, whose gradients go on to it, as they are computed from it.
    """

    path: str
    input: int | None
    index: int
    requires_grad: bool
    differentiated: bool
    is_view: bool = False
    stays: bool = False
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Traced:
    """A captured training step.

    The joint graph's placeholders are, in this order: `state` (parameters, then buffers), `inputs`, tangents of
    the differentiated outputs. Its outputs are the new values of `mutated` placeholders, `num_outputs` further
    forward outputs, then one gradient (or None) per placeholder before the tangents. `pristine` is the graph as torch
    traced it, with `graph_module`'s constants; in `graph_module` fused ops have taken the place of others. `guard`
    holds what the trace took as given about the inputs' values, `reads` what it took as given about everything else,
    `layouts` what it was told about how kernels lay out what they make. `repeated` has for calls of
    torch.utils.checkpoint the place, and the buffers that the plain step updates there again when it recomputes, and
    the planned step once. `by_name` are the arguments that the call gave by name, `overlaps` the primals that had
    memory of a mutated one, `resident` what memory each primal adds to those before it (`own_bytes`). `changes` is what
    forward changes in its arguments; the tensors that it puts there follow those of the output in `outputs`. `left` are
    the places elsewhere that forward sets and does not read, which a planned step leaves as they are; `settings` are
    the attributes of the model's modules that it sets to plain values and to tensors, which come next in `outputs`, as
    a planned step does, too. `within` are the
    parameters by which the backward of a custom function differentiates: they may have no hooks. `spread` are the
    placements of the gradients of `DTensor`s, by the numbers of the primals, `arrivals` those in the order in which
    autograd comes to their gradients. `first_call` is what a first call of forward remembers and was in place.
    `changed_later` are primals that code after a region changes in place. `asked` are the questions about computed
    values that the sample answered; what was asked about are the last of `outputs`. `detached` are inputs that
    require a gradient, and to which no output passes any on. `from_symbols` is whether it was made of a trace with
    symbols for sizes.
    """

    graph_module: fx.GraphModule
    pristine: fx.Graph
    state: tuple[StateEntry, ...]
    input_template: Template
    input_names: tuple[str, ...]
    num_inputs: int
    output_template: Template
    outputs: tuple[OutputLeaf, ...]
    mutated: tuple[int, ...]
    num_outputs: int
    reads: Reads
    guard: Guard | None = None
    notes: tuple[str, ...] = ()
    repeated: tuple[tuple[str, tuple[str, ...]], ...] = ()
    layouts: Layouts = field(default_factory=dict)
    by_name: frozenset[str] = frozenset()
    overlaps: Overlaps = ()
    resident: tuple[int, ...] = ()
    changes: tuple[Changed, ...] = ()
    left: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    within: tuple[int, ...] = ()
    spread: Mapping[int, Any] = field(default_factory=dict)
    arrivals: tuple[int, ...] = ()
    first_call: Remembers | None = None
    changed_later: tuple[int, ...] = ()
    asked: tuple[Asked, ...] = ()
    detached: tuple[int, ...] = ()
    from_symbols: bool = False

    @property
    def overwritten(self) -> tuple[int, ...]:
        """Primals that the backward would find with other values."""
        return (*self.mutated, *self.changed_later)

    @property
    def counts(self) -> bool:
        """Whether the step holds for inputs with the sample's numbers alone, where forward takes lengths from them."""
        return self.guard is not None and self.guard.counts

    @property
    def num_primals(self) -> int:
        return len(self.state) + self.num_inputs

    @property
    def primal_names(self) -> tuple[str, ...]:
        return (*(entry.name for entry in self.state), *self.input_names)

    @property
    def backward_autocast(self) -> Autocast:
        """What the backward was traced under: no autocast, as torch advises, unless it was seen to run under one."""
        return self.layouts.get(BACKWARD_AUTOCAST, ())

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]

    @property
    def num_forward_outputs(self) -> int:
        return len(self.mutated) + self.num_outputs

    @property
    def gradients(self) -> list[Any]:
        """For each primal the node that is its gradient, or None."""
        results: Any = self.graph_module.graph.output_node().args[0]
        return list(results[self.num_forward_outputs :])


def capture(
    model: nn.Module,
    bound: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    *,
    differentiated: tuple[str, ...] | None = None,
    keep_outputs: bool = True,
    keep_inputs: bool = True,
    layouts: Layouts | None = None,
    is_first: bool = False,
    may_remember: bool = False,
    asked: Sequence[Asked] | None = None,
    may_ask: bool = False,
    may_count: bool = False,
) -> Traced:
    """Trace the training step of `model`, in the mode that each of its modules is in.

    Args:
        bound: the arguments by name (`bind_sample`).
        loss_fn: called with the model's output (and the call's further arguments); the step then returns its value.
        differentiated: paths of the outputs that `backward` starts from; None chooses (`loss`, else scalars if they
            depend on all that the first other output depends on, else all), `EVERY_OUTPUT` takes all that require a
            gradient.
        keep_outputs, keep_inputs: whether the caller holds what the model returns besides its loss, and what it is
            given, through the backward.
        layouts: how kernels lay out what they make, where another trace had it otherwise (`layouts.learned`), and in
            which strides the gradients of outputs come (`gradient_key`), and under which autocast
            (`BACKWARD_AUTOCAST`).
        is_first: whether to raise `FirstCall` where the forward would remember something, as at its first call. Else
            it is noted, and refused where it is a plain value that was another one before.
        may_remember: whether to raise it where nothing was remembered there before, and where the next call would be
            another one.
        asked: what the forward asks about values on the sample; None where that is not known.
        may_ask: whether to raise `Unanswered` where that is needed, and else to refuse it.
        may_count: whether the trace may hold for inputs with the sample's numbers alone (lengths, how many elements a
            mask picks), where the forward asks for them.

    Raises:
        CaptureError: the forward cannot be traced; carries the user's file and line.
        Unsupported: the forward does something the rewrite would not keep.
    """
    refuse_backward_hooks(model, own=runs_hooks(model, loss_fn))
    refuse_compiled_parts(model)
    signature = call_signature(model, loss_fn)
    input_tensors, input_template = flatten(dict(bound))
    names = argument_names(input_template)
    check_inputs(input_tensors, names, input_template)
    entries = state_entries(model, carried(bound))
    given = [*state_tensors(model, entries), *input_tensors]
    for entry, tensor in zip(entries, given, strict=False):
        refuse_not_dense(tensor, entry.name)
    tracer = StepTracer(model, loss_fn, signature, entries, input_template, differentiated, given, layouts or {},
                        names_given(bound), is_first, may_remember, asked, may_count)  # fmt: skip
    tensors = [local_part(t) for t in given]
    alone = isolated(model, loss_fn, shared(input_template))
    with exclusive(), alone as tracer.before, private_contexts(), without_sources():
        fake = _fake_inputs(tensors, layouts)
        try:
            joint = export_step(tracer, fake)
            _refuse_drawn(joint, tracer.asked)
        except CaptureError as error:
            if tracer.asks and may_ask:
                raise Unanswered from error
            # Libraries branch on `torch.compiler.is_compiling()` to offer code without data-dependent Python. The
            # model's ordinary path is tried first because it is the one the plain step executes.
            try:
                tracer.sample_asked, tracer.sets_tensors = None, False
                with compiling_flags():
                    joint = export_step(tracer, _fake_inputs(tensors, layouts))
                tracer.settings = ()  # the ordinary code may set something else
                tracer.notes += (f"{COMPILING} ({error.location or 'place unknown'})",)
            except CaptureError:
                raise error from error.__cause__
            if not alike_when_compiling(model, bound, loss_fn):
                raise
        if tracer.asked:
            tracer.notes += (_note_of(tracer.asked),)
        if tracer.guard is not None and tracer.guard.counts:
            tracer.notes += (COUNTS,)
        check_backward(tracer.before, tracer.judged, tracer.settings)
    for tensor, name in zip(input_tensors, names, strict=True):
        refuse_attributes(vars(tensor).keys() & tracer.recorder.said.keys(), name)
    tracer.recorder.let_go()
    tracer.remembered.check()
    _check(joint, [e.name for e in entries] + names, len(entries))
    _check_constants(joint.graph_module, {id(t): e.name for e, t in zip(entries, tensors, strict=False)})
    every_name = [*(e.name for e in entries), *names]
    _refuse_overwritten(joint, given, every_name)
    _refuse_views_of_inputs(joint, tracer.leaves)
    _refuse_conjugates(joint, tracer.leaves)
    _refuse_parts_of_conjugates(joint.graph_module.graph, given, every_name)
    drop_tangents_of_state(joint.graph_module.graph, len(tensors), sum(leaf.differentiated for leaf in tracer.leaves))
    inputs = slice(len(entries), len(tensors))
    dropped = not_held(
        joint.graph_module.graph, joint.mutated_inputs, tracer.leaves, inputs, keep_outputs, keep_inputs
    )
    traced = _traced(joint, tracer, entries, input_template, len(input_tensors), dropped)
    return replace(_with_settings(traced, tracer, model), layouts=dict(layouts or {}))


def _with_settings(traced: Traced, tracer: StepTracer, model: nn.Module) -> Traced:
    """With what the forward sets besides its outputs, as a planned step does, too; what it does not set is said."""
    codes = () if tracer.watch.has_checkpoints else tracer.watch.codes
    is_added_to = partial(only_adds_to, codes)
    first = {left.path: left.value for left in tracer.left} | {str(place): place.value for place in tracer.places}
    plain = steady(tracer.settings, first, model, is_added_to)
    set_plainly = (*plain, *tracer.replaced)
    refuse_left_for_backward(tracer.left, plain, tracer.carried, tracer.recorder.read_late)
    others = (Left(path, None, False, False) for path in tracer.recorder.set_as_before(tracer.watch.codes))
    notes, left = say_what_is_left((*tracer.left, *others), set_plainly)
    return replace(
        traced, settings=set_plainly, reads=traced.reads.but(set_plainly, tracer.carried),
        notes=tuple(dict.fromkeys((*traced.notes, *notes, *notes_of(tracer.carried)))),
        left=tuple(p for p in dict.fromkeys((*left, *traced.left)) if p not in set(map(str, set_plainly))),
    )  # fmt: skip


def export_step(tracer: StepTracer, fake: list[Any]) -> JointGraph:
    tracer.runs = 0
    tracer.constants = next((tensor.fake_mode.constants for tensor in fake), tracer.constants)
    try:
        with (
            quiet_fake_errors(), eager_kernels(routes.kernels()), module_paths(tracer.model), tracer.in_backward,
            functional_collectives(),
        ):  # fmt: skip
            joint = export_joint(tracer, fake, tracer.layouts.get(BACKWARD_AUTOCAST, ()))
    except (Unsupported, CaptureError, FirstCall):
        raise
    except Exception as error:
        _refuse_overlaps(error, tracer)
        raise capture_error(error) from error
    finally:
        tracer.watch.stop()
        tracer.recorder.stop()
        tracer.assigned = {}
    _drop_ranges(joint.graph_module.graph)
    check_in_the_kernels(joint.graph_module.graph)
    settle_gradients(joint.graph_module.graph)
    for node in joint.graph_module.graph.nodes:
        node.meta.setdefault("val", None)  # an assertion returns nothing
    fill_forward_paths(joint.graph_module.graph.nodes)
    return joint


class StepTracer:
    """The function handed to the tracer: flat tensors in, flat tensors out, structure kept on the side."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        signature: inspect.Signature,
        entries: list[StateEntry],
        input_template: Template,
        differentiated: tuple[str, ...] | None,
        given: list[torch.Tensor],
        layouts: Layouts,
        by_name: frozenset[str],
        is_first: bool = False,
        may_remember: bool = False,
        sample_asked: Sequence[Asked] | None = None,
        may_count: bool = False,
    ) -> None:
        self.model, self.loss_fn, self.signature, self.by_name = model, loss_fn, signature, by_name
        self.given, self.is_first, self.may_remember = given, is_first, may_remember
        self.entries, self.input_template, self.differentiated = entries, input_template, differentiated
        bound = unflatten(input_template, given[len(entries) :])
        self.recorder = Recorder(model, loss_fn, entries, flatten(bound.get(STATE))[0])
        self.output_template: Template = Tree(None, ())
        self.changes: tuple[Changed, ...] = ()
        self.written: set[tuple[Place, str]] = set()
        self.layouts = layouts
        self.leaves: list[OutputLeaf] = []
        self.guard: Guard | None = None
        self.sample_asked, self.asks = sample_asked, False  # whether a run asked what is not known
        self.may_count, self.constants = may_count, Constants()  # those of the fake tensors that are traced
        self.asked: tuple[Asked, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.left: tuple[Left, ...] = ()  # by the first run
        self.settings: tuple[Setting, ...] = ()  # of the latest run
        self.sets_tensors = True
        self.places: tuple[Setting, ...] = ()  # inside of what modules hold, which forward only sets
        self.lengths: list[int] = []  # of what holds these, before the latest run
        self.carried = carried(bound)
        self.before: Snapshot
        self.watch = Watch()
        self.judged: frozenset[str] = frozenset()
        self.runs = 0
        self.order: list[str] = []  # of the outputs, in the latest run
        self.remembered = Remembered()
        self.changing: set[int] = set()  # the numbers of the buffers that the first run changed
        self.given_now: list[Given] = []  # of the run that goes on
        self.put: list[Setting] = []  # the tensors that the latest run put in the place of buffers
        self.replaced: tuple[Setting, ...] = ()  # and these, taken apart
        self.assigned: dict[str, torch.Tensor] = {}  # and by the buffers' names
        self.below: tuple[AbstractContextManager[Any], ...] = ()  # modes to run the forward in, before all others
        self.keeps_casts = torch.is_autocast_cache_enabled()
        self.within: list[int] = []
        self.detached: list[int] = []  # of the latest run
        self.spread: dict[int, Any] = {}
        self.arrivals: list[int] = []  # the primals, as their gradients came
        self.pieces = Pieces()  # of the latest run
        self.in_backward = ExitStack()  # what holds while torch traces the backward

    def __call__(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        self.recorder.stop()
        self.before.restore()  # torch traces several times: each time from what the model held
        _make_leaves(parts[: len(self.entries)])
        flat = tuple(map(as_distributed, parts, self.given))
        for i, (stand_in, tensor) in enumerate(zip(flat, self.given, strict=True)):
            keep_gradient_spread(stand_in, tensor, partial(self.spread.__setitem__, i))
            lend = lend_attributes if i < len(self.entries) else lend_kind
            lend(tensor, stand_in)
        self.remembered = Remembered()
        self.remembered.add(flat)
        recording = self.recorder.recording(flat[: len(self.entries)])
        result = self._run(flat, recording) if self.runs else self._first_run(flat)
        if self.recorder.identity:
            raise IDENTITY.at(self.recorder.identity)
        self.take_replaced(result)
        tensors, self.output_template, self.changes = result.tensors, result.template, result.changes
        _refuse_distributed(tensors, self.output_template)
        paths: dict[int, str] = {}
        for path, i in (*slots(self.output_template), *changed_slots(self.changes), *set_slots(self.sets)):
            paths.setdefault(i, path)
        of_state = [change for change in self.changes if change.place.steps[0][1] == STATE]
        stay = {i for _, i in (*set_slots(self.sets), *changed_slots(of_state))}
        wanted = choose_differentiated(self.output_template, tensors, paths, self.differentiated)
        self.leaves, self.arrivals, self.detached = [], [], self._detached(flat, tensors)
        aliased, of_given = _sharing(tensors, flat)
        returned: list[torch.Tensor] = []
        made = [t for t in tensors if not any(t is each for each in flat)]
        read_by = readers(dict(enumerate(made)))
        for i, tensor in enumerate(tensors):
            same = next((k for k, t in enumerate(flat) if t is tensor), None)
            chosen = i in wanted and same is None
            index = -1 if same is not None else len(returned)
            is_view, stays, by = tensor._is_view(), i in stay, read_by.get(index, ())
            self.leaves.append(OutputLeaf(paths[i], same, index, tensor.requires_grad, chosen, is_view, stays, by))
            if same is None and tensor.requires_grad and tensor.is_leaf:
                raise LEAF.at(f"output {paths[i] or '(the output)'}")
            if id(tensor) in of_given and same is None:
                returned.append(tensor)  # refused in `_traced`, which has to see it
            elif same is None:
                own = tensor.stride() if id(tensor) in aliased else None
                if chosen:
                    returned.append(self._started(paths[i], tensor, own))
                else:
                    returned.append(tensor.detach() if own is None else LAID_OUT(tensor.detach(), own))
        self.asked = tuple(asked for asked, _ in result.answers)
        for asked, answer in result.answers:
            self.leaves.append(OutputLeaf(f"(the answer at {asked.place})", None, len(returned), False, False))
            returned.append(answer)
        if self.runs:  # torch goes on with the backward
            self.recorder.follow_backward()
            for i, stand_in in enumerate(flat):
                if stand_in.requires_grad:
                    stand_in.register_hook(lambda _, i=i: self.arrivals.append(i))
            if self.pieces.stale:
                self.in_backward.enter_context(self.pieces)
            if self.watch.custom_backward:
                self.watch.start()
            used = used_in_backward(self.model, self.entries, flat, self.given, self.assigned)
            self.within = self.in_backward.enter_context(used)
        before, self.order = self.order, [leaf.path for leaf in self.leaves]
        if self.runs and self.order != before:
            raise VerificationError("the outputs came in another order when they were traced again")
        self.runs += 1
        return returned

    def _run(self, flat: Sequence[torch.Tensor], *modes: AbstractContextManager[Any]) -> Returned:
        """What forward returns, and changes in its arguments, for these parameters, buffers and inputs."""
        state = {e.name: t for e, t in zip(self.entries, flat, strict=False)}
        bound = Bound(unflatten(self.input_template, flat[len(self.entries) :]), self.by_name)
        known, failures, self.pieces = self._known_values(flat), Failures(), Pieces()
        with left_alone(bound) as given, ExitStack() as stack:
            first = (casts_kept(self.keeps_casts), swapped_state(self.model, state), *self.below)
            entered: list[AbstractContextManager[Any]] = [
                *first, known, self.constants.asking(known.counted), failures, EagerLayouts(self.remembered),
                self.pieces, *modes,
            ]  # fmt: skip
            for mode in entered:
                stack.enter_context(mode)
            usual, hooks = [dict(vars(tensor)) for tensor in flat], list(map(_hooks_of, flat))  # and a buffer's marks
            self.recorder.take_arguments(bound, self.input_template)
            self.given_now[:] = [given]
            self.lengths = lengths_of(self.places, self.model)
            torch_was = torch_settings()
            try:
                with of_one_kind(bound):
                    value = run_model(self.model, self.loss_fn, self.signature, bound)
            finally:
                self.asks = self.asks or known.computed.wanted
            failures.check()
            refuse_settings(torch_was)
            refuse_with_gradient(self.model, self.entries, state, self.given, self.carried)
            self.put = replaced_in(self.model, self.entries, state, self.carried, flat)
            stack.close()  # what follows is not read by forward
            if any(t.is_leaf and t.grad is not None for t in flat[: len(self.entries)]):
                raise ACCUMULATED.at("forward")
            self.written |= given.places(self.recorder.written)
            owned = Owned(self.model, self.before, self.recorder.looked_at)
            result = given.returned(value, self.written, owned)
            self.settings = self._settings(flat, result.tensors)
            self.pieces.check((*flat, *result.tensors))
            self._refuse_attributes(flat, usual, result.tensors)
            for i, before in enumerate(hooks):
                if _hooks_of(flat[i]) != before:
                    raise hook_of_given(self._name_of(i))
            known.computed.check_all_asked()
        self.given_now.clear()
        self.guard = known.guard
        self.recorder.take_numbers(known.taken)
        return replace(result, answers=known.computed.found)

    def _refuse_attributes(
        self, flat: Sequence[torch.Tensor], before: list[dict[str, Any]], returned: list[torch.Tensor]
    ) -> None:  # fmt: skip
        """Refuse what the forward has set on a tensor, of those it was given since `before`."""
        for i, tensor in enumerate(flat):
            changed = [name for name, value in vars(tensor).items() if value is not before[i].get(name, MISSING)]
            refuse_attributes(changed, self._name_of(i))
        of_torch = {name for own, given in zip(before, self.given, strict=True) for name in own.keys() - vars(given)}
        for tensor in returned:
            if not any(tensor is each for each in flat):
                refuse_attributes(vars(tensor).keys() - of_torch, "what forward returns")

    def take_replaced(self, result: Returned) -> None:
        """Let what a run put in the place of buffers follow what else it returned and set."""
        self.assigned = {str(s).removeprefix("self."): s.value for s in self.put}
        self.replaced, self.put = tuple(taken_apart(self.put, result.tensors, lambda _: True)), []

    @property
    def sets(self) -> tuple[Setting, ...]:
        """What forward leaves in the model."""
        return *self.settings, *self.replaced

    def _settings(self, flat: Sequence[torch.Tensor], returned: list[torch.Tensor]) -> tuple[Setting, ...]:
        """What forward sets in the model; tensors of that are added to what it returned.

        They are inputs, or none that share memory with what the step is given, and no constants: such are refused.
        """
        kinds, inputs = set(map(type, flat)), flat[len(self.entries) :]

        def may_be_kept(tensor: torch.Tensor) -> bool:
            own = any(tensor is each for each in inputs) or not _sharing([tensor], flat)[1]
            return self.sets_tensors and type(tensor) in kinds and own

        found = [setting for setting in self.recorder.settings() if not is_carried(str(setting), self.carried)]
        inside = set_now(self.places, self.model, self.lengths)
        return tuple(taken_apart([*found, *inside], returned, may_be_kept))

    def _detached(self, flat: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]) -> list[int]:
        """The inputs with a gradient to which no output passes any on; those that a checkpoint hides might get one."""
        inputs = [i for i, t in enumerate(flat) if i >= len(self.entries) and t.requires_grad]
        if not inputs or self.watch.has_checkpoints:
            return []
        behind = set(nodes_behind(t for t in returned if t.requires_grad))
        return [i for i in inputs if get_gradient_edge(flat[i]).node not in behind]

    def _name_of(self, index: int) -> str:
        """Of a tensor that the forward is given, in an error message."""
        return self.entries[index].name if index < len(self.entries) else "what forward takes"

    def _known_values(self, flat: Sequence[torch.Tensor]) -> KnownValues:
        return KnownValues(flat, self.given, len(self.entries), self.changing, self.sample_asked, self.may_count)

    def _first_run(self, flat: Sequence[torch.Tensor]) -> Returned:
        """As `_run`; what a trace cannot see is refused or said."""
        buffers = {e.name: t for e, t in zip(self.entries, flat, strict=False) if not e.is_parameter}

        def changes() -> dict[str, int]:
            return {name: mutation_count(t) for name, t in buffers.items()}

        refuse_several_names(self.model, self.carried, self.before.met_again)
        counts, written = changes(), list(map(mutation_count, flat))
        given = self.given_now  # the tracer itself would be a reference cycle
        count = len(self.entries)
        watch = Watch(lambda: changes() | given[0].changed(), flat[:count], flat[count:])
        result = self._run(flat, watch.drawn, watch)
        filled, put = watch.fills_containers, self.put
        refuse_hidden(result.template, "the output")
        replaced = {str(s).removeprefix("self.") for s in put}
        steady = frozenset(n for n, count in changes().items() if count == counts[n] and n not in replaced)
        names = [*(e.name for e in self.entries), *(f"input {i}" for i in range(len(flat) - len(self.entries)))]
        self.changing = {
            i for i, entry in enumerate(self.entries) if not entry.is_parameter and entry.name not in steady
        }
        arguments = shared(self.input_template)

        def settings(copies: Sequence[torch.Tensor]) -> tuple[Setting, ...]:
            self.before.restore()  # what is read first is what the model holds
            self._run(copies, self.recorder.recording(copies[:count]))
            return self.settings

        def set_first(copies: Sequence[torch.Tensor]) -> set[str]:
            return {str(setting) for setting in settings(copies) if setting.added is None}

        rerun = Rerun(
            self._run, flat, names, steady, lambda: Snapshot(self.model, self.loss_fn, arguments), set_first,
            self.carried,
        )
        every = self.before.changes()
        self.judged, found = judged(every), rerun.others(every)
        held = {(id(c.node.owner), c.key): c.after for c in found if tensors_in(c.after)}
        now = zip(self.entries, flat, written, strict=False)
        overwritten = [entry.name for entry, t, then in now if mutation_count(t) != then or entry.name in replaced]
        try:
            self.left = notice(self.before, found, watch, rerun, may_move=self.is_first)
        except StateChanged as error:
            if self.may_remember:
                raise FirstCall((), overwritten, evolves=True) from error
            unread = [c for c in found if is_named(watch.codes, c.name) and not reads(watch.codes, c.name)]
            renewed = {change.path for change in unread if renews(change)}
            added = only_set(self.before, watch.codes, rerun.script, unread, renewed)
            only = {change.path for change in added} | rerun.set_first(rerun.copies())
            self.before.restore()
            if paths := may_be_carried(self.model, found, only, self.before.met_again):
                raise Carries(error, (*self.carried, *paths)) from error
            raise
        kept = [left for left in self.left if left.is_kept and left.holder]
        if self.may_remember and (kept or (self.is_first and filled)):
            first = [left.holder for left in self.left if left.is_first and left.holder]  # some of it tells of the rest
            raise FirstCall(first, overwritten)
        self.notes = tuple(dict.fromkeys((*self.notes, *watch.notes)))
        self.watch = watch
        if self.sets_tensors:
            seen = {left.path for left in self.left if left.is_only_set}
            renewed = {left.path for left in self.left if left.is_renewed}
            every = only_set(self.before, watch.codes, rerun.script, [c for c in found if c.path in seen], renewed)
            self.places = tuple(settings_inside(self.model, rerun.others(every), renewed, self.before.met_again))
        if held or self.places:  # such as this run has set, too; it is not recorded
            of_tensors = [s for s in settings(rerun.copies()) if s.template is not None]
            self.before.restore()
            inside = {str(place): place.value for place in self.places}

            def left_at(s: Setting) -> Any:
                return inside[str(s)] if s.within else held[id(self.model.get_submodule(s.path)), s.name]

            mine = [replace(s, value=left_at(s), template=None) for s in of_tensors]
            self.settings = tuple(taken_apart(mine, result.tensors, lambda _: True))
        self.put = put
        return result

    def _started(self, path: str, tensor: torch.Tensor, aliased: Sequence[int] | None) -> torch.Tensor:
        """A gradient comes in its output's strides until another is seen (torch 2.11 expects it contiguous).

        One that shares memory with another output has its own gradient: torch would ask for that of both together.
        """
        dense = tensor.layout is torch.strided and is_dense(tensor)
        own = tuple(tensor.stride()) if dense and not tensor.is_contiguous() else None
        if aliased is not None and own is None:
            own = tuple(aliased) if dense else torch.empty(tensor.shape, device="meta").stride()
        strides = gradient_strides(self.layouts, path, tensor) or own
        return tensor if strides is None else GivenGradient.apply(tensor, strides)


def _hooks_of(tensor: torch.Tensor) -> int:
    """How many hooks are registered on a tensor."""
    return sum(len(hooks or ()) for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks))


def _sharing(outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> tuple[set[int], set[int]]:
    """The ids of the outputs that share memory with other outputs alone, and with what was given."""

    owners = Counter(map(storage_place, outputs))
    inputs = set(map(storage_place, given))
    shared = {id(t) for t in outputs if owners[storage_place(t)] > 1 and storage_place(t) not in inputs}
    return shared, {id(t) for t in outputs if storage_place(t) in inputs}


def _refuse_distributed(tensors: list[torch.Tensor], template: Template) -> None:
    for path, i in slots(template):
        if is_distributed(tensors[i]):
            raise Unsupported(
                "DTensor returned", f"output {path or '(the output)'}", "a planned step returns a rank's own tensors",
                "Return its to_local(), keep use_local_output=True in the parallel style of the last module, or plan "
                "the module around this one.",
            )  # fmt: skip


def _drop_unread_constants(module: fx.GraphModule, pristine: fx.Graph) -> None:
    """A table that forward makes and nothing reads in the end would stay in memory as long as the plan does."""
    read = {str(node.target) for graph in (module.graph, pristine) for node in graph.find_nodes(op="get_attr")}
    for name in module._buffers.keys() - read:
        delattr(module, name)


def _make_leaves(parameters: Sequence[torch.Tensor]) -> None:
    """Torch hands them over as if something had computed them, and autocast keeps its casts of leaves alone.

    One that the forward changes is a copy, through which the gradient goes.
    """
    for parameter in parameters:
        if parameter.requires_grad and type(parameter.grad_fn).__name__ != "CloneBackward0":
            parameter.detach_().requires_grad_()


@contextmanager
def casts_kept(enabled: bool) -> Iterator[None]:
    """Let autocast cast a weight once per forward, as in eager: the gradients of its uses are added up in that type.

    None of its copies from before is used, and none stays.
    """
    before = torch.is_autocast_cache_enabled()  # tracers of torch's own turn it off
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@contextmanager
def casts_dropped() -> Iterator[None]:
    """Let autocast keep none of the copies that it makes in the block, beside those that it has: these are stand-ins'.

    A region's are its own.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def choose_differentiated(
    template: Template, tensors: list[torch.Tensor], paths: dict[int, str], asked: tuple[str, ...] | None
) -> set[int]:
    """Which of a forward's tensors the backward starts from: those at the paths asked for, else the likely ones."""
    candidates = [i for i, t in enumerate(tensors) if t.requires_grad]
    if asked is not None and asked is not EVERY_OUTPUT:
        return {i for i in candidates if paths[i] in asked}
    returned = {i for _, i in slots(template)}
    given_back = [i for i in candidates if i in returned]  # not what forward puts into its arguments
    if asked is EVERY_OUTPUT:
        return set(given_back)
    candidates = given_back or candidates  # but where it returns nothing else
    losses = [i for i in candidates if paths[i] in (".loss", "['loss']") and tensors[i].dim() == 0]
    scalars = [i for i in candidates if tensors[i].dim() == 0]
    others = [i for i in candidates if tensors[i].dim()]
    if losses or (scalars and _sources(tensors, scalars) >= _sources(tensors, others[:1])):
        return set(losses or scalars)
    if isinstance(template, Tree) and hasattr(template.spec.type, "to_tuple"):  # HF ModelOutput without a loss
        return {*candidates[:1], *scalars}
    return set(candidates)  # also where a scalar is but a part of the loss, as in `(reconstruction, kl)`


def _sources(tensors: Sequence[torch.Tensor], picked: Sequence[int]) -> set[Any]:
    """Where the backward from those picked ends: the nodes of parameters and inputs."""
    return {n for n in nodes_behind(tensors[i] for i in picked) if not any(before for before, _ in n.next_functions)}


def _check(joint: JointGraph, names: list[str], num_state: int) -> None:
    for i in joint.metadata_mutated_inputs:
        raise Unsupported(
            "in-place change of an input's shape", names[i], "the caller would see another shape after the step",
            "Use the out-of-place op (t() instead of t_()).",
        )  # fmt: skip
    for i in joint.mutated_inputs:
        if i >= num_state:
            raise Unsupported(
                "in-place change of an input", names[i], "the step would overwrite the caller's data",
                "Clone the input inside forward before changing it.",
            )  # fmt: skip
    gradients = list(joint.graph_module.graph.output_node().args[0])[joint.num_forward_outputs :]  # type: ignore[arg-type]
    if any(g is not None and g.meta["val"].layout is not torch.strided for g in gradients):
        raise Unsupported(
            "sparse gradient", "the backward", "its memory depends on the batch",
            'Use sparse=False, or name submodules to plan that have none (regions=["encoder.*"]): others may.',
        )  # fmt: skip
    for node in joint.graph_module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and (kind := storage_kind(value)):
                place = module_path(node)
                raise Unsupported(
                    f"{kind} tensor", f"{place}/{node.name}" if place else node.name, "its memory depends on the data",
                    "Use dense tensors in forward, or keep this part out of the planned module.",
                )  # fmt: skip
    if not any(g is not None for g in gradients):
        raise NoBackward(
            "the step has no backward: no output depends on a parameter that requires a gradient, so there is "
            "nothing to recompute. Check requires_grad of the parameters, and that forward does not run under no_grad."
        )


def _refuse_views_of_inputs(joint: JointGraph, leaves: Sequence[OutputLeaf]) -> None:
    for leaf in leaves:
        base = joint.output_bases[leaf.index] if leaf.input is None else None
        kind = joint.output_kinds[leaf.index] if leaf.input is None else ""
        if (base is not None and kind.startswith("alias_of_i")) or kind == "is_input":
            raise Unsupported(
                "view of an input or parameter returned", f"output {leaf.path or '(the output)'}",
                "a change of one would have to show in the other", "Return a clone() of it.",
            )  # fmt: skip


def _refuse_conjugates(joint: JointGraph, leaves: Sequence[OutputLeaf]) -> None:
    """Refuse what is returned before it is conjugated or negated: its gradient comes with or without that bit, and ops
    of a graph are made for one of them.
    """
    outputs: Any = joint.graph_module.graph.output_node().args[0]
    for leaf in leaves:
        node: Any = outputs[len(joint.mutated_inputs) + leaf.index] if leaf.input is None else None
        if leaf.is_view and getattr(node, "target", None) is torch.ops.aten.clone.default:
            node = node.args[0]
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            raise Unsupported(
                "an output that is yet to be conjugated or negated", f"output {leaf.path or '(the output)'}",
                "its gradient may be so, or not", "Return its resolve_conj(), or resolve_neg().",
            )  # fmt: skip


def _refuse_parts_of_conjugates(graph: fx.Graph, given: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Refuse the real or imaginary part of what is yet to be conjugated: the trace's tensors are not, and no op has it
    as it lies in memory.
    """
    placeholders = graph.find_nodes(op="placeholder")
    views = {node: name for node, t, name in zip(placeholders, given, names, strict=False) if t.is_conj()}
    for node in graph.nodes if views else ():
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in views and isinstance(node.target, OpOverload):
            if node.target is torch.ops.aten.view_as_real.default:
                raise LAZY.at(views[source])
            if node.target.is_view:
                views[node] = views[source]


def drop_tangents_of_state(graph: fx.Graph, num_primals: int, num_differentiated: int) -> None:
    """A parameter that the forward overwrites (under `no_grad`) gets a tangent of its own, before the outputs'.

    It is zero: a step differentiates its outputs, and a parameter is a leaf. What is added to it is the gradient.
    """
    tangents = graph.find_nodes(op="placeholder")[num_primals:]
    output = graph.output_node()
    for tangent in tangents[: len(tangents) - num_differentiated]:
        for user in list(tangent.users):
            if user.target is torch.ops.aten.add.Tensor and not user.kwargs:
                user.replace_all_uses_with(next(a for a in user.all_input_nodes if a is not tangent))
                graph.erase_node(user)
        results: Any = output.args[0]
        output.args = ([None if result is tangent else result for result in results],)
        if tangent.users:
            raise Unsupported(
                "parameter overwritten in forward", tangent.name, "its gradient is computed from its new value",
                "Change it under torch.no_grad(), outside forward.",
            )  # fmt: skip
        graph.erase_node(tangent)


def _drop_ranges(graph: fx.Graph) -> None:
    """Those of `torch.profiler.record_function` name what runs between two of its ops, and compute nothing."""
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)


def _refuse_overwritten(joint: JointGraph, given: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Refuse constants in memory that forward changes: the graph would read them as they are before the step."""
    every = [*given, *(t for t in joint.graph_module.buffers() if t.layout is torch.strided)]
    for i, j in overlaps(every, joint.mutated_inputs):
        if j >= len(given):
            raise OnlyInEager(
                f"a tensor of shape {tuple(every[j].shape)} that is not registered, in the memory of {names[i]}",
                "forward", f"it changes {names[i]}, and the plan would read the other as it was before",
                f"Take the view in forward, of {names[i]} itself, or clone() it once.",
            )  # fmt: skip


def _check_constants(graph_module: fx.GraphModule, parameters: Mapping[int, str]) -> None:
    """Tensors that the forward reads without being given them are constants: fine, unless they should be trained.

    Args:
        parameters: the names of the model's own, by their ids.
    """
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, str(node.target), None)
        readers = ", ".join(u.name for u in node.users) or node.name
        if isinstance(value, torch.Generator):
            raise own_generator(readers)
        if isinstance(value, torch.ScriptObject):
            raise OnlyInEager(
                "a packed object of C++ (the weights of a quantized layer)", readers, "a plan does not know what it is "
                "made of", "Keep the layer out of the modules that are to be planned (regions=).",
            )  # fmt: skip
        if isinstance(value, torch.Tensor) and id(value) in parameters:
            raise Unsupported(
                "a parameter that forward reads from a list, a closure or an object of its own", parameters[id(value)],
                "its gradient would be lost: a trace knows parameters by their modules", "Read it from its module "
                "(self.name), or hold these in an nn.ParameterList.",
            )  # fmt: skip
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise Unsupported(
                "a tensor to be trained that is not a parameter of the model", f"shape {tuple(value.shape)}",
                "its gradient would be lost", "Register it: nn.Parameter, nn.ModuleList, nn.ParameterList, or make the "
                "loss a part of the model.",
            )  # fmt: skip


def _traced(
    joint: JointGraph, tracer: StepTracer, entries: list[StateEntry], input_template: Template, num_inputs: int,
    dropped: Sequence[fx.Node],
) -> Traced:  # fmt: skip
    num_outputs = joint.num_forward_outputs - len(joint.mutated_inputs)
    pristine = copied(joint.graph_module.graph)
    fuse(joint.graph_module.graph, dropped)
    _drop_unread_constants(joint.graph_module, pristine)
    paths = {i: path for path, i in reversed(slots(input_template))}  # of tensors that come twice, the first
    return Traced(
        graph_module=joint.graph_module,
        pristine=pristine,
        state=tuple(entries),
        input_template=input_template,
        input_names=tuple(paths[i] for i in sorted(paths)),
        num_inputs=num_inputs,
        output_template=tracer.output_template,
        outputs=tuple(tracer.leaves),
        mutated=joint.mutated_inputs,
        num_outputs=num_outputs,
        reads=tracer.recorder.finish(joint.graph_module),
        guard=tracer.guard,
        notes=tracer.notes,
        repeated=tuple(tracer.watch.checkpoints),
        by_name=tracer.by_name,
        changes=tracer.changes,
        asked=tracer.asked,
        left=tuple(p for p in tracer.recorder.left(tracer.watch.codes) if not is_carried(p, tracer.carried)),
        within=tuple(tracer.within),
        detached=tuple(tracer.detached),
        spread=tracer.spread,
        arrivals=tuple(dict.fromkeys(tracer.arrivals)),
        overlaps=overlaps(tracer.given, joint.mutated_inputs),
        resident=own_bytes(tracer.given),
    )


COUNTS = (
    "forward takes lengths from values of its inputs (how many elements a mask picks, a maximum): the plan of the "
    "whole model holds for calls with the sample's, and others are planned by regions"
)


def _note_of(asked: Sequence[Asked]) -> str:
    places = list(dict.fromkeys(each.place for each in asked))
    return (
        f"forward asks about values that it computes, at {few(places)}: a step that answers otherwise than the sample "
        "runs the plain forward, not under the budget"
    )


def _refuse_drawn(joint: JointGraph, asked: Sequence[Asked]) -> None:
    """An answer that comes of random numbers alone is another one in each step."""
    outputs = joint.num_forward_outputs
    results: Any = joint.graph_module.graph.output_node().args[0]
    for question, answer in zip(asked, results[outputs - len(asked) : outputs], strict=True):
        before = ancestors([answer])
        if any(map(is_random, before)) and not any(node.op == "placeholder" for node in before):
            raise value_needed(question.place)


def not_held(
    graph: fx.Graph, mutated: Sequence[int], leaves: Sequence[OutputLeaf], inputs: slice, keep_outputs: bool,
    keep_inputs: bool,
) -> tuple[fx.Node, ...]:  # fmt: skip
    """What nobody holds through the backward: of the results of the forward, and of the inputs among the primals."""
    alone = () if keep_outputs else _callers_alone(graph, mutated, leaves)
    given = () if keep_inputs else graph.find_nodes(op="placeholder")[inputs]
    return (*alone, *given)


def _callers_alone(graph: fx.Graph, mutated: Sequence[int], leaves: Sequence[OutputLeaf]) -> tuple[fx.Node, ...]:
    """Results of the forward that only the caller has after it: the backward does not start from them."""
    results: Any = graph.output_node().args[0]
    first = len(mutated)
    alone = [leaf for leaf in leaves if leaf.input is None and not (leaf.differentiated or leaf.stays)]
    found = [results[first + leaf.index] for leaf in alone]
    return tuple(n for n in found if isinstance(n, fx.Node))


def _refuse_overlaps(error: Exception, tracer: StepTracer) -> None:
    """Say of which tensors AOT autograd found that they share memory that the forward changes."""
    names = [*(e.name for e in tracer.entries), *argument_names(tracer.input_template)]
    found = [(i, j) for i, j in overlaps(tracer.given, range(len(names))) if i < j]
    if not found or not any(said in str(error) for said in _OF_SHARED_MEMORY):
        return
    raise OnlyInEager(
        "memory that " + ", ".join(f"{names[i]} and {names[j]} share" for i, j in found), "the call",
        "forward changes one of them, and so the other", "Give each memory of its own: clone() one of them.",
    ) from error


_OF_SHARED_MEMORY = ("share storage", "view input mutations")  # AOT autograd's words; the second are torch 2.11's


def copied(graph: fx.Graph) -> fx.Graph:
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = result.node_copy(node, copies.__getitem__)
    return result


def _fake_inputs(
    tensors: list[torch.Tensor], layouts: Layouts | None
) -> list[torch.Tensor]:
    mode = EagerFakes(layouts, allow_non_fake_inputs=True)
    # A cached answer forgets that two results are one tensor (the LSTM's bias gradients), or parts of a larger one.
    mode.cache_enabled = False
    fakes = []
    for tensor in tensors:
        if tensor.device.type == "meta":
            with mode:
                fake = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=torch.device("cpu")
                )
        else:
            fake = mode.from_tensor(tensor.detach(), static_shapes=True)
        fakes.append(fake.requires_grad_(tensor.requires_grad))
    return fakes
