"""capture: model + arguments -> `Traced`, the joint forward+backward ATen graph.

The model's own Python runs once under fake tensors (no data, no memory), its parameters, buffers and inputs
being the graph's placeholders. Autograd runs too, so custom `autograd.Function`s, autocast and `no_grad`
regions are in the graph as executed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import linecache
import operator
import os
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ._torch import (
    JointGraph,
    compiling_flags,
    eager_kernels,
    export_joint,
    quiet_fake_errors,
    swapped_state,
)
from .constants import Guard, KnownValues
from .convolution import split_convolutions
from .errors import CaptureError, Unsupported
from .layouts import EagerFakes, EagerLayouts
from .merge import merge_all, save_logits
from .modules import fill_forward_paths, module_path, module_paths
from .ops import RUNNING_STATISTICS, result_ignores
from .refuse import storage_kind
from .structure import Template, Tree, argument_path, constants, flatten, slots, unflatten

Sample = Any
COMPILING = "traced as torch.compiler.is_compiling(), because the ordinary code asks for the values of its inputs"


@dataclass(frozen=True)
class StateEntry:
    """A parameter or buffer the graph reads, under its first name; `aliases` are its other names."""

    name: str
    aliases: tuple[str, ...]
    is_parameter: bool
    requires_grad: bool


@dataclass(frozen=True)
class OutputLeaf:
    """One tensor the model returns.

    Attributes:
        input: index of the placeholder it is, when the model returns an input, parameter or buffer itself.
        index: its position among the graph's outputs otherwise (-1 when `input` is set).
        requires_grad: whether the plain model's output requires a gradient.
        differentiated: whether the traced backward starts from it (its tangent is an input of the backward).
        view: `(size, stride, offset)` when it is a view of graph output `index`, to be taken outside the graph.
    """

    path: str
    input: int | None
    index: int
    requires_grad: bool
    differentiated: bool
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(frozen=True)
class Traced:
    """A captured training step.

    The joint graph's placeholders are, in this order: `state` (parameters, then buffers), `inputs`, tangents of
    the differentiated outputs. Its outputs are the new values of `mutated` placeholders, `num_outputs` further
    forward outputs, then one gradient (or None) per placeholder before the tangents. `guard` holds what the trace
    took as given about the inputs' values.
    """

    graph_module: fx.GraphModule
    state: tuple[StateEntry, ...]
    input_template: Template
    input_names: tuple[str, ...]
    num_inputs: int
    output_template: Template
    outputs: tuple[OutputLeaf, ...]
    mutated: tuple[int, ...]
    num_outputs: int
    guard: Guard | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_primals(self) -> int:
        return len(self.state) + self.num_inputs

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]

    @property
    def num_forward_outputs(self) -> int:
        return len(self.mutated) + self.num_outputs


def bind_sample(model: nn.Module, sample: Sample, loss_fn: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Bind a sample (tensor, tuple of args, dict of kwargs) to the names of `forward`'s parameters."""
    args, kwargs = split_sample(sample)
    return bind_call(call_signature(model, loss_fn), args, kwargs)


def split_sample(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample as `(args, kwargs)`."""
    if isinstance(sample, Mapping):
        return (), {str(k): v for k, v in sample.items()}
    if isinstance(sample, tuple) and not hasattr(sample, "_fields"):
        return sample, {}
    return (sample,), {}


def call_signature(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> inspect.Signature:
    """The signature of `model.forward`, with `loss_fn`'s further required arguments after it."""
    signature = inspect.signature(model.forward)
    extra = loss_arguments(loss_fn)
    if not extra:
        return signature
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    rest = [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p
            for p in parameters if p not in positional]  # fmt: skip
    taken = {p.name for p in parameters}
    added = [
        inspect.Parameter(n if n not in taken else f"loss_{n}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in extra
    ]
    rest.sort(key=lambda p: p.kind)
    return inspect.Signature([*positional, *added, *rest])


def loss_arguments(loss_fn: Callable[..., Any] | None) -> list[str]:
    """Names of the arguments `loss_fn` requires after the model's output: they are taken from the call."""
    if loss_fn is None:
        return []
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    required = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                and p.default is p.empty]  # fmt: skip
    return [p.name for p in required[1:]]


def bind_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; raises TypeError exactly as a call would."""
    return dict(signature.bind(*args, **kwargs).arguments)


def call_bound(function: Callable[..., Any], signature: inspect.Signature, bound: Mapping[str, Any]) -> Any:
    """Call with arguments bound by `bind_call`."""
    arguments = inspect.BoundArguments(signature, dict(bound))
    return function(*arguments.args, **arguments.kwargs)


def run_model(
    model: nn.Module, loss_fn: Callable[..., Any] | None, signature: inspect.Signature, bound: Mapping[str, Any]
) -> Any:
    """The plain step's forward: the model, then the loss where one was given."""
    if loss_fn is None:
        return call_bound(model, signature, bound)
    names = loss_arguments(loss_fn)
    own = set(inspect.signature(model.forward).parameters)
    extra = [bound[n if n in bound and n not in own else f"loss_{n}"] for n in names]
    inner = {k: v for k, v in bound.items() if k in own}
    return loss_fn(call_bound(model, inspect.signature(model.forward), inner), *extra)


def state_entries(model: nn.Module) -> list[StateEntry]:
    """Parameters then buffers, each object once, with the names tied to it."""
    entries: list[StateEntry] = []
    for named, is_parameter in ((model.named_parameters, True), (model.named_buffers, False)):
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        entries += [StateEntry(n[0], tuple(n[1:]), is_parameter, tensors[i].requires_grad) for i, n in names.items()]
    return entries


def state_tensors(model: nn.Module, entries: tuple[StateEntry, ...] | list[StateEntry]) -> list[torch.Tensor]:
    """The live tensors of `entries`; read before every step, hence no walk along each name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [_read(modules, e) for e in entries]


def _read(modules: dict[str, nn.Module], entry: StateEntry) -> Any:
    path, _, leaf = entry.name.rpartition(".")
    module = modules[path]
    found = (module._parameters if entry.is_parameter else module._buffers).get(leaf)
    return getattr(module, leaf) if found is None else found


def capture(
    model: nn.Module,
    bound: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    *,
    differentiated: tuple[str, ...] | None = None,
    device: torch.device | None = None,
    keep_outputs: bool = True,
) -> Traced:
    """Trace the training step of `model`.

    Args:
        bound: the arguments by name (`bind_sample`).
        loss_fn: called with the model's output (and the call's further arguments); the step then returns its value.
        differentiated: paths of the outputs that `backward` starts from; None chooses (`loss`, else scalars, else all).
        device: where meta tensors are to live.
        keep_outputs: whether the caller holds what the model returns besides its loss through the backward.

    Raises:
        CaptureError: the forward cannot be traced; carries the user's file and line.
        Unsupported: the forward does something the rewrite would not keep.
    """
    signature = call_signature(model, loss_fn)
    input_tensors, input_template = flatten(dict(bound))
    names = argument_names(input_template)
    _check_inputs(input_tensors, names, input_template)
    entries = state_entries(model)
    tracer = _StepTracer(model, loss_fn, signature, entries, input_template, differentiated, input_tensors)
    tensors = [*state_tensors(model, entries), *input_tensors]
    with _isolated(model):
        fake = _fake_inputs(tensors, device)
        try:
            joint = _export(tracer, fake)
        except CaptureError as error:
            # Libraries branch on `torch.compiler.is_compiling()` to offer code without data-dependent Python. The
            # model's ordinary path is tried first because it is the one the plain step executes.
            try:
                with compiling_flags():
                    joint = _export(tracer, _fake_inputs(tensors, device))
                tracer.notes = (f"{COMPILING} ({error.location or 'place unknown'})",)
            except CaptureError:
                raise error from error.__cause__
    _check(joint, [e.name for e in entries] + names, len(entries))
    return _traced(joint, tracer, entries, input_template, len(input_tensors), keep_outputs)


def _export(tracer: _StepTracer, fake: list[torch.Tensor]) -> JointGraph:
    try:
        with quiet_fake_errors(), eager_kernels(), module_paths(tracer.model):
            joint = export_joint(tracer, fake)
    except (Unsupported, CaptureError):
        raise
    except Exception as error:
        raise _capture_error(error) from error
    fill_forward_paths(joint.graph_module.graph.nodes)
    return joint


class _StepTracer:
    """The function handed to the tracer: flat tensors in, flat tensors out, structure kept on the side."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        signature: inspect.Signature,
        entries: list[StateEntry],
        input_template: Template,
        differentiated: tuple[str, ...] | None,
        sample: list[torch.Tensor],
    ) -> None:
        self.model, self.loss_fn, self.signature, self.sample = model, loss_fn, signature, sample
        self.entries, self.input_template, self.differentiated = entries, input_template, differentiated
        self.output_template: Template = Tree(None, ())
        self.leaves: list[OutputLeaf] = []
        self.guard: Guard | None = None
        self.notes: tuple[str, ...] = ()

    def __call__(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        state = {e.name: t for e, t in zip(self.entries, flat, strict=False)}
        bound = unflatten(self.input_template, flat[len(self.entries) :])
        known = KnownValues(flat[len(self.entries) :], self.sample)
        with swapped_state(self.model, state), known, EagerLayouts():
            value = run_model(self.model, self.loss_fn, self.signature, bound)
            _write_back_reassigned(self.model, self.entries, state)
        self.guard = known.guard
        tensors, self.output_template = flatten(value)
        paths: dict[int, str] = {}
        for path, i in slots(self.output_template):
            paths.setdefault(i, path)
        wanted = _choose_differentiated(self.output_template, tensors, paths, self.differentiated)
        self.leaves = []
        returned: list[torch.Tensor] = []
        for i, tensor in enumerate(tensors):
            same = next((k for k, t in enumerate(flat) if t is tensor), None)
            chosen = i in wanted and same is None
            index = -1 if same is not None else len(returned)
            self.leaves.append(OutputLeaf(paths[i], same, index, tensor.requires_grad, chosen))
            if same is None:
                returned.append(tensor if chosen else tensor.detach())
        return returned


def _choose_differentiated(
    template: Template, tensors: list[torch.Tensor], paths: dict[int, str], asked: tuple[str, ...] | None
) -> set[int]:
    candidates = [i for i, t in enumerate(tensors) if t.requires_grad and t.is_floating_point()]
    if asked is not None:
        return {i for i in candidates if paths[i] in asked}
    losses = [i for i in candidates if paths[i] in (".loss", "['loss']") and tensors[i].dim() == 0]
    scalars = [i for i in candidates if tensors[i].dim() == 0]
    if losses or scalars:
        return set(losses or scalars)
    if isinstance(template, Tree) and hasattr(template.spec.type, "to_tuple"):  # HF ModelOutput without a loss
        return set(candidates[:1])
    return set(candidates)


def _write_back_reassigned(model: nn.Module, entries: list[StateEntry], state: dict[str, torch.Tensor]) -> None:
    """`self.buffer = new` becomes an update of the buffer in place, as `state_dict` shows it."""
    originals = {id(t) for t in state.values()}
    updates: list[tuple[torch.Tensor, torch.Tensor]] = []
    for entry in entries:
        current = _attribute(model, entry.name)
        given = state[entry.name]
        if current is given:
            continue
        if not isinstance(current, torch.Tensor) or current.shape != given.shape or current.dtype != given.dtype:
            raise Unsupported(
                "buffer replaced in forward", entry.name, "its shape or type changes between steps",
                "Keep the buffer's shape and dtype, or update it outside forward.",
            )  # fmt: skip
        # Two buffers may have changed places: take both values before either is overwritten.
        updates.append((given, current.detach().clone() if id(current) in originals else current))
    with torch.no_grad():
        for given, current in updates:
            given.copy_(current)


def argument_names(template: Template) -> list[str]:
    """What the user calls each input tensor: `labels`, `batch.mask`, `x[0]`."""
    names: dict[int, str] = {}
    for path, i in slots(template):
        names.setdefault(i, argument_path(path))
    return [names[i] for i in sorted(names)]


def _check_inputs(tensors: list[torch.Tensor], names: list[str], template: Template) -> None:
    for tensor, name in zip(tensors, names, strict=True):
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise Unsupported(
                "tensor subclass", f"argument {name} ({type(tensor).__name__})", "what it stores cannot be seen from "
                "the graph", "Pass a plain tensor.",
            )  # fmt: skip
        if kind := storage_kind(tensor):
            raise Unsupported(
                f"{kind} tensor", f"argument {name}", "its memory is not one dense block",
                "Pass a dense tensor (to_dense(), dequantize(), or padding with a mask).",
            )  # fmt: skip
    for value in constants(template):
        if type(value).__module__ == "numpy":
            raise Unsupported(
                "numpy value", f"the arguments ({type(value).__name__})", "a plan would hold for this value alone",
                "Pass torch.from_numpy(array), or a Python number.",
            )  # fmt: skip


def _check(joint: JointGraph, names: list[str], num_state: int) -> None:
    _check_constants(joint.graph_module)
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
            "sparse gradient", "the backward", "its memory depends on the batch", "Use sparse=False in F.embedding."
        )
    for node in joint.graph_module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and (kind := storage_kind(value)):
                place = module_path(node)
                raise Unsupported(
                    f"{kind} tensor", f"{place}/{node.name}" if place else node.name, "its memory depends on the data",
                    "Use dense tensors in forward, or keep this part out of the planned module.",
                )  # fmt: skip
    if not any(g is not None for g in gradients):
        raise CaptureError(
            "the step has no backward: no output depends on a parameter that requires a gradient, so there is "
            "nothing to recompute. Check requires_grad of the parameters, and that forward does not run under no_grad."
        )


def _check_constants(graph_module: fx.GraphModule) -> None:
    """Tensors that the forward reads without being given them are constants: fine, unless they should be trained."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, str(node.target), None)
        if isinstance(value, torch.Generator):
            raise Unsupported(
                "random generator of its own", ", ".join(u.name for u in node.users) or node.name,
                "only the default generators' state is kept for what is computed again",
                "Draw from the default generator (torch.manual_seed), or pass the random tensor as an argument.",
            )  # fmt: skip
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise Unsupported(
                "a tensor to be trained that is no parameter of the model", f"shape {tuple(value.shape)}",
                "its gradient would be lost", "Register it: nn.Parameter, nn.ModuleList, nn.ParameterList, or make the "
                "loss a part of the model.",
            )  # fmt: skip


def _traced(
    joint: JointGraph, tracer: _StepTracer, entries: list[StateEntry], input_template: Template, num_inputs: int,
    keep_outputs: bool,
) -> Traced:  # fmt: skip
    num_outputs = joint.num_forward_outputs - len(joint.mutated_inputs)
    leaves = []
    for leaf in tracer.leaves:
        base = joint.output_bases[leaf.index] if leaf.input is None else None
        kind = joint.output_kinds[leaf.index] if leaf.input is None else ""
        if (base is not None and kind.startswith("alias_of_i")) or kind == "is_input":
            raise Unsupported(
                "view of an input or parameter returned", f"output {leaf.path or '(the output)'}",
                "a change of one would have to show in the other", "Return a clone() of it.",
            )  # fmt: skip
        leaves.append(leaf)
    _drop_running_statistics(joint.graph_module.graph)
    merge_all(joint.graph_module.graph)
    if not keep_outputs:
        save_logits(joint.graph_module.graph, _let_go(joint, leaves))
    split_convolutions(joint.graph_module.graph)
    bound_names = [path for path, _ in slots(input_template)]
    return Traced(
        graph_module=joint.graph_module,
        state=tuple(entries),
        input_template=input_template,
        input_names=tuple(bound_names),
        num_inputs=num_inputs,
        output_template=tracer.output_template,
        outputs=tuple(leaves),
        mutated=joint.mutated_inputs,
        num_outputs=num_outputs,
        guard=tracer.guard,
        notes=tracer.notes,
    )


def _let_go(joint: JointGraph, leaves: list[OutputLeaf]) -> list[fx.Node]:
    """Results of the forward that only the caller has after it: the backward does not start from them."""
    results: Any = joint.graph_module.graph.output_node().args[0]
    first = len(joint.mutated_inputs)
    found = [results[first + leaf.index] for leaf in leaves if leaf.input is None and not leaf.differentiated]
    return [n for n in found if isinstance(n, fx.Node)]


def _drop_running_statistics(graph: fx.Graph) -> None:
    """A batch norm's backward in training is handed the updated statistics and ignores them: hand it the buffers.

    They are resident anyway; the updated ones would have to be saved, or the whole batch norm recomputed.
    """
    for node in graph.nodes:
        for position in sorted(result_ignores(node.target, node.args, None)):
            source = node.args[position]
            if isinstance(source, fx.Node) and source.target is operator.getitem:
                normalize = source.args[0]
                assert isinstance(normalize, fx.Node)
                rule = RUNNING_STATISTICS.get(normalize.target)
                if rule is not None:
                    buffers = [normalize.args[i] for i in sorted(rule[0])]
                    of_type = sorted(result_ignores(node.target, node.args, None)).index(position)
                    node.update_arg(position, buffers[of_type])


def _fake_inputs(tensors: list[torch.Tensor], device: torch.device | None) -> list[torch.Tensor]:
    mode = EagerFakes(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # a cached answer forgets that two results are one tensor (the LSTM's bias gradients)
    fakes = []
    for tensor in tensors:
        if tensor.device.type == "meta":
            with mode:
                fake = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device or torch.device("cpu")
                )
        else:
            fake = mode.from_tensor(tensor.detach(), static_shapes=True)
        fakes.append(fake.requires_grad_(tensor.requires_grad))
    return fakes


@contextlib.contextmanager
def _isolated(model: nn.Module) -> Iterator[None]:
    """Trace in training mode with gradients on, and leave flags, RNG and attributes as they were."""
    before = [_Attributes(m) for m in model.modules()]
    devices = sorted({t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"})
    try:
        if not model.training:
            model.train()
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
        _check_attributes(model, before)
    except CaptureError as error:
        _check_tensors(model, before, error)
        raise
    finally:
        for attributes in before:
            attributes.restore()


class _Attributes:
    """What a module's `__dict__` held, one level deep, and the data of plain tensors in it."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes = module, dict(module.__dict__)
        self.containers = {k: copy.copy(v) for k, v in self.attributes.items() if type(v) in _CONTAINERS}
        plain = [v for v in self.attributes.values() if type(v) is torch.Tensor]
        self.tensors = [(t, t._version, t.detach().clone()) for t in plain]

    def changed_tensors(self) -> list[str]:
        changed = {id(t) for t, version, _ in self.tensors if t._version != version}
        return [name for name, value in self.attributes.items() if id(value) in changed]

    def left_behind(self) -> list[str]:
        """Attributes that the forward set, or lists that it appended to: the planned step will not."""
        now = self.module.__dict__
        new = [k for k, v in now.items() if k != "training" and not _same(v, self.attributes.get(k, now))]
        if isinstance(self.module, nn.RNNBase):  # its own list of its weights
            new = [k for k in new if not k.startswith("_flat_weight")]
        grown = [k for k, v in self.containers.items() if k not in _OF_MODULE and len(v) != len(now.get(k, v))]
        return list(dict.fromkeys(new + grown))

    def restore(self) -> None:
        _refill(self.module.__dict__, self.attributes)
        for name, content in self.containers.items():
            _refill(self.attributes[name], content)
        for tensor, version, data in self.tensors:
            if tensor._version != version:
                tensor.detach().copy_(data)


_CONTAINERS = (dict, OrderedDict, list, set)
_OF_MODULE = frozenset(nn.Module().__dict__)


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back; at no moment, not even for an interrupt, is what it held and holds missing."""
    if isinstance(container, list):
        container[:] = content
        return
    container.update(content)
    for extra in [k for k in container if k not in content]:
        container.remove(extra) if isinstance(container, set) else container.pop(extra)
    if isinstance(container, dict) and list(container) != list(content):
        for key in content:
            container[key] = container.pop(key)


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, (int, float, str)) and now == before)


def _check_tensors(model: nn.Module, before: list[_Attributes], error: CaptureError | None) -> None:
    """A plain tensor on a module is a constant of the plan; one that the forward changes is state, so a buffer."""
    for path, attributes in zip(_prefixes(model), before, strict=False):
        for name in attributes.changed_tensors():
            raise Unsupported(
                "in-place change of a tensor that is no buffer", f"self.{path}{name}",
                "a plan would take it as constant",
                "Register it: self.register_buffer(name, tensor, persistent=False).",
            ) from error  # fmt: skip


def _prefixes(model: nn.Module) -> list[str]:
    return [f"{name}." if name else "" for name, _ in model.named_modules()]


def _check_attributes(model: nn.Module, before: list[_Attributes]) -> None:
    """What the forward leaves on the modules besides buffers is not part of a plan: refused, or at least said."""
    _check_tensors(model, before, None)
    for path, attributes in zip(_prefixes(model), before, strict=False):
        for name in attributes.left_behind():
            warnings.warn(
                f"forward sets self.{path}{name}; the planned step computes the outputs and gradients alone and will "
                "not set it. Return it from forward, or register it as a buffer, if it is read elsewhere.",
                stacklevel=2,
            )


def _attribute(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path) if path else model
    return getattr(module, leaf)


_OWN = tuple(os.path.dirname(os.path.abspath(m)) + os.sep for m in (torch.__file__, __file__, contextlib.__file__))


def _capture_error(error: BaseException) -> CaptureError:
    stack = traceback.extract_tb(error.__traceback__)
    modules = os.path.join(_OWN[0], "nn", "modules")
    frames = [f for f in stack if not _is_ours(f.filename)] or [
        f for f in stack if f.filename.startswith(modules) and not f.filename.endswith(os.sep + "module.py")
    ]
    location = construct = None
    if frames:
        last = frames[-1]
        location = f"{last.filename}:{last.lineno}"
        construct = linecache.getline(last.filename, last.lineno or 0).strip()
    kind = type(error).__name__
    reason, remedy = _explain(kind, str(error))
    where = f" at {location}: `{construct}`" if location else ""
    return CaptureError(f"cannot trace the model{where}. {reason} {remedy}", location=location, construct=construct)


def _is_ours(filename: str) -> bool:
    path = os.path.abspath(filename)
    return path.startswith(_OWN[:2]) or (path.startswith(_OWN[2]) and "site-packages" not in path)


def _explain(kind: str, text: str) -> tuple[str, str]:
    if kind in ("DataDependentOutputException", "GuardOnDataDependentSymNode"):
        return (
            "The value of a tensor is needed in Python here (.item(), bool(), an `if` on data).",
            "A plan holds for every batch, so the branch must not depend on data: use torch.where, or move it out of "
            "forward.",
        )
    if kind == "DynamicOutputShapeException":
        return (
            "The shape of this result depends on data (nonzero, boolean indexing, unique).",
            "Use a mask with torch.where, or a fixed capacity.",
        )
    if "fake impl" in text or kind == "UnsupportedOperatorException":
        return (
            f"The custom op has no fake kernel, so its result's shape is not known here ({_first_line(text)}).",
            "Add one with register_fake (torch.library.register_fake).",
        )
    if "no autograd formula" in text:
        return f"{_first_line(text)}.", "Add one with register_autograd (torch.library.register_autograd)."
    if "Sparse" in text:
        return (
            f"A sparse tensor is made or read here, whose memory depends on the data ({_first_line(text)}).",
            "Use dense tensors, or keep this part out of the planned module.",
        )
    if "numpy" in text.lower():
        return "The tensor is turned into a numpy array here.", "Use torch functions instead."
    return f"{kind}: {_first_line(text) or kind}.", "Check that the model runs on the sample."


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(". ")
