"""The one door to what torch keeps semi-private (torch 2.11 and newer); `passes.run._torch` is its part at run time."""

from __future__ import annotations

import contextlib
import functools
import linecache
import logging
import operator
import os
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import sympy
import torch
import torch._meta_registrations
from torch import fx, nn

try:
    from torch._C._dynamo.guards import TensorGuards
    from torch._functorch import config as functorch_config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
    from torch._prims_common import suggest_memory_format
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn.utils.stateless import _reparametrize_module
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as get_dispatch_modes
    from torch.utils.flop_counter import flop_registry
    from torch.utils.weak import WeakIdKeyDictionary

    for _name in (  # what is reached further down, here and in `passes.run._torch`, by its name
        "_C.DisableTorchFunction", "_C._AutoDispatchBelowAutograd", "_C._ForceDispatchKeyGuard",
        "_C._dispatch_tls_local_exclude_set", "_C._dispatch_tls_local_include_set", "_C.DispatchKey.AutogradCUDA",
        "_C._autograd._top_saved_tensors_default_hooks", "_C._autograd._pop_saved_tensors_default_hooks",
        "_C._autograd._push_saved_tensors_default_hooks", "_is_functional_tensor",
        "_library.simple_registry.singleton.find", "compiler._is_compiling_flag", "compiler._is_exporting_flag",
        "random.default_generator", "fx.node._side_effectful_functions",
        "ops.aten.mm.default.py_kernels", "ops.aten.mm.default._dispatch_cache", "cuda.memory._record_memory_history",
        "cuda.memory._snapshot", "autograd.Function.apply", "_C._functorch.peek_interpreter_stack",
        "_C._len_torch_function_stack", "_C._get_function_stack_at", "_C._len_torch_dispatch_stack",
        "_C._get_flash_sdp_enabled", "_C._get_mem_efficient_sdp_enabled",
        "_C._get_math_sdp_enabled", "_C._get_cudnn_sdp_enabled", "_C._get_math_sdp_allow_fp16_bf16_reduction",
        "_C._get_mkldnn_enabled", "_C._get_cudnn_enabled", "Tensor._make_wrapper_subclass",
        "_C._disabled_torch_function_impl", "autograd.function.BackwardCFunction",
        "nn.utils.parametrize._cache_enabled", "library._scoped_library", "_is_all_true", "_is_any_true",
        "nn.modules.activation._is_make_fx_tracing", "_nested_tensor_from_mask_left_aligned",
        "_nested_tensor_from_mask", "_ops.OpOverloadPacket", "_C._dispatch_has_kernel_for_dispatch_key",
    ):  # fmt: skip
        operator.attrgetter(_name)(torch)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"checkpoint-planner needs torch >= 2.11, and was tested up to 2.15; torch {torch.__version__} lacks what it "
        f"needs: {error}"
    ) from error

from .errors import Unsupported
from .run._torch import DEFAULTS, Autocast

__all__ = [
    "AUTOGRAD_KEYS",
    "FUNCTIONAL_COLLECTIVES",
    "LEFT_ALIGNED",
    "NESTED_FROM_MASK",
    "TORCH_FOLDER",
    "TORCH_VERSION",
    "TRUE_OF_ALL_OR_ANY",
    "WAIT_FOR_COLLECTIVE",
    "BareTensor",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "HigherOrderOperator",
    "JointGraph",
    "LazyGraphModule",
    "OpOverload",
    "StorageWeakRef",
    "Symbols",
    "TorchDispatchMode",
    "WeakIdKeyDictionary",
    "allocator_events",
    "as_distributed",
    "behind_functional",
    "called_by_dynamo",
    "check_in_the_kernels",
    "checks_kept",
    "compiling_flags",
    "cuda_allocations",
    "custom_op",
    "direct_call",
    "disable_current_modes",
    "dispatch_modes",
    "eager_kernels",
    "ended_work",
    "export_joint",
    "flop_registry",
    "forget_cublas_workspaces",
    "forget_source",
    "function_modes",
    "global_hooks",
    "grouped_mm_of_any_type",
    "inside_transform",
    "is_compiled",
    "is_dense",
    "is_distributed",
    "is_traced",
    "keep_gradient_spread",
    "left_aligned",
    "local_part",
    "local_parts",
    "look_alike",
    "mutation_count",
    "native_kernels",
    "num_dispatch_modes",
    "number_of",
    "optimizer_hooks_aside",
    "outside_tracing",
    "own_call",
    "plain_class",
    "private_generator",
    "profiler_runs",
    "pytree",
    "quiet_fake_errors",
    "refer_weakly",
    "running_data_parallel",
    "scoped_library",
    "skip_autograd",
    "storage_events",
    "suggest_memory_format",
    "swapped_state",
    "symbolic",
    "torch_settings",
    "unaware_of_tracing",
    "with_modes_inside",
    "without_sources",
    "wrapped_tensors",
]

TORCH_VERSION: str = torch.__version__
TORCH_FOLDER = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
AUTOGRAD_KEYS = (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA)
FUNCTIONAL_COLLECTIVES: Any = torch.ops._c10d_functional
WAIT_FOR_COLLECTIVE: Any = FUNCTIONAL_COLLECTIVES.wait_tensor.default
DisableTorchFunction: Any = torch._C.DisableTorchFunction
TRUE_OF_ALL_OR_ANY = frozenset({torch._is_all_true, torch._is_any_true})
skip_autograd: Any = torch._C._AutoDispatchBelowAutograd
scoped_library: Any = torch.library._scoped_library


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Read and write tensors as they are, also while something is traced."""
    with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
        yield


@dataclass(frozen=True)
class JointGraph:
    """What torch's tracer returns, reduced to what we rely on.

    Attributes:
        graph_module: placeholders are the flat inputs then the tangents; outputs are the new values of mutated
            inputs, then the outputs, then bases of aliased outputs, then one gradient or None per input.
        mutated_inputs: indices of inputs whose data the forward changes, in output order.
        num_forward_outputs: how many of the graph's outputs belong to the forward.
        output_bases: for each output, None or the index of the extra output it is a view of.
    """

    graph_module: fx.GraphModule
    mutated_inputs: tuple[int, ...]
    metadata_mutated_inputs: tuple[int, ...]
    num_forward_outputs: int
    output_kinds: tuple[str, ...]
    output_bases: tuple[int | None, ...]


class _FlatFunction(nn.Module):
    def __init__(self, function: Callable[..., Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.function(*args))


def export_joint(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], autocast: Autocast = ()
) -> JointGraph:
    """Trace `function(*inputs)` and its backward into one ATen graph (`aot_export_joint_with_descriptors`).

    Args:
        autocast: what the backward runs under; the forward runs under whatever is active.
    """
    backward: Any = [{"device_type": kind, "dtype": dtype} for kind, dtype in autocast] or "off"
    with (
        contextlib.ExitStack() as stack, warnings.catch_warnings(),
        functorch_config.patch(backward_pass_autocast=backward),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "Error detected in")  # what cannot be traced is raised
        joint = aot_export_joint_with_descriptors(
            stack, _FlatFunction(function), tuple(inputs), {},
            decompositions={torch.ops.aten.native_dropout_backward.default: _dropout_backward},
        )  # fmt: skip
        metadata = joint._aot_state.fw_metadata
        graph_module = joint._aot_graph_capture.graph_module
    refer_weakly(graph_module)
    infos = metadata.output_info
    return JointGraph(
        graph_module=graph_module,
        mutated_inputs=tuple(i for i, info in enumerate(metadata.input_info) if info.mutates_data),
        metadata_mutated_inputs=tuple(i for i, info in enumerate(metadata.input_info) if info.mutates_metadata),
        num_forward_outputs=metadata.num_forward_returns,
        output_kinds=tuple(info.output_type.name for info in infos),
        output_bases=tuple(info.base_idx for info in infos),
    )


def is_traced(tensor: Any) -> bool:
    """Whether a tensor stands for one that a step computes or is given."""
    if isinstance(tensor, (FunctionalTensor, FakeTensor)):
        return True
    return isinstance(tensor, torch.Tensor) and torch._is_functional_tensor(tensor)


def behind_functional(tensor: Any) -> torch.Tensor:
    """The fake tensor that a functional one stands for."""
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def wrapped_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor of a class such as torchao's is made of; none for any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [inner for part in parts for inner in (wrapped_tensors(part) or [part])]


@contextlib.contextmanager
def swapped_state(module: nn.Module, state: dict[str, torch.Tensor]) -> Iterator[None]:
    """Run `module` with other tensors as parameters and buffers (`torch.func.functional_call`'s own helper).

    An RNN keeps a list of its weights besides, which the helper forgets where they are swapped for parameters, and weak
    references to them, which its forward makes anew. To `isinstance` each tensor is what it stands for, an
    `nn.Parameter` or `nn.Buffer`.
    """
    own = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in own:
        stands_in: Any = state.get(name, tensor)
        for kind, marks in _MARKS.items():
            if isinstance(tensor, kind) and not isinstance(stands_in, kind):
                for mark in marks:
                    setattr(stands_in, mark, getattr(tensor, mark, True))
    places = [(name, module.get_submodule(path), leaf) for name in state for path, _, leaf in [name.rpartition(".")]]
    swapped = {id(_registered(owner, leaf)[1]) for _, owner, leaf in places}
    before: list[tuple[dict[str, Any], str, Any]] = [
        (registry, leaf, tensor) for owner in module.modules() for registry in (owner._parameters, owner._buffers)
        for leaf, tensor in registry.items() if id(tensor) in swapped
    ]  # fmt: skip
    lists: list[tuple[nn.RNNBase, Any, Any]] = []

    def put_back() -> None:
        for registry, leaf, tensor in before:
            registry[leaf] = tensor
        for rnn, weights, references in lists:
            rnn.__dict__.update(_flat_weights=weights, _flat_weight_refs=references)

    try:
        with _reparametrize_module(module, state, tie_weights=True, strict=False, stack_weights=True):
            lists += [(m, m._flat_weights, m._flat_weight_refs) for m in module.modules() if isinstance(m, nn.RNNBase)]
            for rnn, *_ in lists:
                rnn.__dict__["_flat_weights"] = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
            try:
                yield
            finally:
                left = {name: _registered(owner, leaf)[1] for name, owner, leaf in places}
        state.update({name: tensor for name, tensor in left.items() if tensor is not None})
    finally:  # of a module that is there under two names, the helper confuses what was there with what came there
        try:
            put_back()
        finally:
            put_back()  # all of it, where an interrupt ended the first


def _registered(module: nn.Module, name: str) -> tuple[dict[str, Any], Any]:
    registry: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    return registry, registry.get(name)


# What their `isinstance` asks a tensor for, and what assigning a buffer does.
_MARKS = {nn.Parameter: ("_is_param",), nn.Buffer: ("_is_buffer", "persistent")}


class _InThisThread:
    """True in the thread that made it, False in all others."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self.thread

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    __ror__, __rand__ = __or__, __and__


@contextlib.contextmanager
def compiling_flags() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` and `is_exporting()` hold in this thread, as `torch.export` does in all."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    try:
        compiler._is_compiling_flag = compiler._is_exporting_flag = _InThisThread()
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


@contextlib.contextmanager
def unaware_of_tracing() -> Iterator[None]:
    """Let torch's modules that ask whether something traces them go eager's way in this thread (attention's fast path).

    They do so by `has_torch_function`, which holds under any function mode, and by make_fx's own mode.
    """
    asked = [(_OVERRIDES, "has_torch_function"), (_ATTENTION, "_is_make_fx_tracing")]
    before = [getattr(module, name) for module, name in asked]
    here = _InThisThread()

    def has_torch_function(values: Any) -> bool:
        if not here or not all(map(_is_of_a_trace, function_mode_stack())):
            return bool(before[0](values))
        return any(type(v) not in (torch.Tensor, nn.Parameter) and _overrides_functions(type(v)) for v in values)

    try:
        _OVERRIDES.has_torch_function = has_torch_function
        _ATTENTION._is_make_fx_tracing = lambda: not here and before[1]()
        yield
    finally:
        for (module, name), value in zip(asked, before, strict=True):
            setattr(module, name, value)


_OVERRIDES: Any = torch.overrides
_ATTENTION: Any = torch.nn.modules.activation
_OWN_OPS = frozenset({"aten", "prim", "prims", "planner", "c10d", "quantized", "profiler", "higher_order"})


def custom_op(func: Any) -> str:
    """The name of an operator that is not torch's own and has no autocast kernel; "" for all else."""
    if not isinstance(func, (OpOverload, torch._ops.OpOverloadPacket)):
        return ""
    name = func._schema.name if isinstance(func, OpOverload) else func._qualified_op_name
    if name.partition("::")[0] in _OWN_OPS or name.startswith("_c10d"):
        return ""
    keys = ("AutocastCPU", "AutocastCUDA")
    return "" if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys) else str(name)


NESTED_FROM_MASK = torch._nested_tensor_from_mask
LEFT_ALIGNED: Any = torch._nested_tensor_from_mask_left_aligned  # of a tensor and a mask: whether its True come first


def left_aligned(mask: torch.Tensor) -> bool:
    """The same of a mask alone; a trace, whose kernels would answer for zeros, has to know it.

    Raises:
        DataDependentOutputException: it has no values.
    """
    if isinstance(mask, (FakeTensor, FunctionalTensor)):
        raise DataDependentOutputException(LEFT_ALIGNED)
    return bool(LEFT_ALIGNED(mask.unsqueeze(-1), mask))


def _is_of_a_trace(mode: Any) -> bool:
    return type(mode).__module__.startswith(("passes.", "planner.", "torch._", "torch.fx."))


def _overrides_functions(kind: type) -> bool:
    disabled = torch._C._disabled_torch_function_impl
    return getattr(kind, "__torch_function__", disabled) is not disabled


class _GeneratorOfThread:
    """What `torch.random` takes for the CPU's default generator: in one thread another one."""

    def __init__(self, own: torch.Generator, others: Any) -> None:
        self.thread, self.own, self.others = threading.get_ident(), own, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own if threading.get_ident() == self.thread else self.others, name)


@contextlib.contextmanager
def private_generator() -> Iterator[torch.Generator]:
    """Let this thread's `torch.manual_seed`, `get_rng_state`, `set_rng_state` and `fork_rng` act on a copy (CPU).

    The default generator belongs to all threads: saved before tracing and put back after it, it would repeat what
    another thread drew in between. No op that is traced draws from it.
    """
    module: Any = torch.random
    before = module.default_generator
    own = torch.Generator()
    own.set_state(before.get_state())
    try:
        module.default_generator = _GeneratorOfThread(own, before)
        yield own
    finally:
        module.default_generator = before


@contextlib.contextmanager
def quiet_fake_errors() -> Iterator[None]:
    """Keep the fake-tensor logger's stack dumps off the terminal: a failure reaches the user as a CaptureError."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def plain_class(kind: type) -> type:
    """The class that `fully_shard` derived this one from when it sharded a module; else the class itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    derived = fsdp is not None and fsdp.FSDPModule in kind.__bases__
    return kind.__bases__[1] if derived else kind


def direct_call(op: Any) -> Any:
    """What calls an op without `OpOverload.__call__`'s frame of Python."""
    return getattr(op, "_op", op) if type(op) is OpOverload else op


def ended_work() -> Any:
    """What a collective returns that is over, as ops of torch's have it."""
    ended: Any = torch.futures.Future()
    ended.set_result([])
    bindings: Any = torch._C._distributed_c10d
    return bindings._create_work_from_future(ended).boxed()


def with_modes_inside(mode: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op's own code under the mode that was asked about the op: it sees what that code calls."""
    device = next(t.device.type for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
    if device == "meta":
        return op(*args, **kwargs)
    with mode:
        return op.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper())), *args, **kwargs)


def running_data_parallel() -> Any:
    """The `DistributedDataParallel` in whose forward this is called; None outside of one."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def is_distributed(t: Any) -> bool:
    """Whether a tensor is a `DTensor`, of which each rank has a part."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(t, distributed.DTensor)


def arrived(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, where those that a collective is still to fill are waited for, as their first reader would."""
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is None or not any(isinstance(v, collectives.AsyncCollectiveTensor) for v in arguments.values()):
        return arguments
    kind = collectives.AsyncCollectiveTensor
    return {name: _Arrived.apply(v) if isinstance(v, kind) else v for name, v in arguments.items()}


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Any) -> torch.Tensor:
        made: torch.Tensor = given.wait().detach()
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def local_parts(tensors: Sequence[Any], spread: Mapping[int, Any]) -> Sequence[Any]:
    """This rank's part of each; `spread` has the placements of their gradients (else a tensor's own)."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not any(isinstance(t, distributed.DTensor) for t in tensors):
        return tensors
    return [t.to_local(grad_placements=spread[i]) if i in spread else local_part(t) for i, t in enumerate(tensors)]


def local_part(t: Any) -> Any:
    """This rank's part of a `DTensor`, whose gradient is one; any other value as it is."""
    return t.to_local() if is_distributed(t) else t


def dense_parts(t: torch.Tensor) -> list[torch.Tensor]:
    """What is allocated for a tensor: of a sparse one its indices and values, of a `DTensor` this rank's part."""
    part = local_part(t)
    return [getattr(part, name)() for name in _DENSE_PARTS[part.layout]] if part.layout in _DENSE_PARTS else [part]


def storage_of(t: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's memory; of a sparse one that of its values."""
    return dense_parts(t)[-1].untyped_storage()


_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_DENSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"), torch.sparse_csr: _BY_ROW, torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN, torch.sparse_bsc: _BY_COLUMN,
}  # fmt: skip


def as_distributed(part: torch.Tensor, like: Any) -> torch.Tensor:
    """The `DTensor` of which `part` is this rank's part, spread as `like` is; `part` itself where that is not one."""
    if not is_distributed(like):
        return part
    made: torch.Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def keep_gradient_spread(made: Any, like: Any, note: Callable[[Any], None]) -> None:
    """Let the gradient of a `DTensor` that was made for `like` keep the placements in which it comes; `note` is told.

    Eager leaves a parameter's gradient in those: as sums that are not added up over the ranks, say. One of which a rank
    has another shape than of the tensor is spread as the tensor is.
    """
    shape = local_part(like).shape

    def keep(gradient: Any) -> Any:
        part = gradient.to_local()
        note(gradient.placements if part.shape == shape else like.placements)
        return as_distributed(part, like) if part.shape == shape else None

    if is_distributed(like) and made.requires_grad:
        made.register_hook(keep)


def torch_settings() -> dict[str, Any]:
    """All that torch's setters set for a thread or the process, by name: whatever has a getter beside its setter."""
    own = {"grad mode": torch.is_grad_enabled(), "inference mode": torch.is_inference_mode_enabled()}
    own |= {f"autocast on {kind}": torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    return {**own, **{name: get() for name, get in (DEFAULTS | _getters()).items()}}


# Looked at by themselves, deprecated, or (an order of attention's kernels) set by torch's own first call on a device.
NOT_SETTINGS = ("autocast", "tracing", "thread_name", "graph_exec", "num_interop", "sdp_priority_order")


@functools.cache
def _getters() -> dict[str, Callable[[], Any]]:
    """Those of `torch._C` that take no arguments, belong to a setter and are neither deprecated nor start anything."""
    found: dict[str, Callable[[], Any]] = {}
    for setter in (name for name in dir(torch._C) if name.startswith(("_set_", "set_"))):
        prefix, _, what = setter.partition("set_")
        getters = [getattr(torch._C, f"{prefix}{verb}_{what}", None) for verb in ("get", "is")]
        if any(getters) and not what.startswith(NOT_SETTINGS):
            get: Any = next(filter(None, getters))
            with contextlib.suppress(TypeError, RuntimeError):
                get()
                found[what.replace("_", " ")] = get
    return found


def look_alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """What tells of as many tensors whether they are as these: type, sizes, strides, dtype, device, `requires_grad`.

    The tensor guards of `torch.compile`, in C++; None for tensors of other kinds than they look at.
    """
    if any(type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer) or t.layout is not torch.strided for t in tensors):
        return None
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def mutation_count(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place so far, also while it is traced; 0 where that is not counted."""
    elem = getattr(tensor, "elem", tensor)
    counter: Any = getattr(torch, "_functionalize_mutation_counter", None)
    if counter is not None and torch._is_functional_tensor(elem):
        return int(counter(elem))
    return 0 if tensor.is_inference() else int(tensor._version)


@contextlib.contextmanager
def hashes_heard(hear: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Tell of each tensor that is looked for in a set or dict in the block."""
    usual = torch.Tensor.__hash__

    def __hash__(tensor: torch.Tensor) -> int:
        hear(tensor)
        return usual(tensor)

    torch.Tensor.__hash__ = __hash__  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__hash__ = usual  # type: ignore[method-assign]


def profiler_runs() -> bool:
    """Whether a profiler of torch's is on in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def allocator_events(run: Callable[[], Any]) -> list[int]:
    """Signed sizes of the CPU allocator's events while `run()` executes, in order.

    The legacy profiler reports the same events as `torch.profiler.profile(profile_memory=True)`, starts in
    microseconds and prints nothing; where a release has dropped it, the latter is used.
    """
    if profiler_runs():
        raise Unsupported(
            "a profiler of torch's that is running", "the call", "planning measures memory with one of its own, and a "
            "thread can have one", "Plan, or run a step of this shape, before it starts.",
        )  # fmt: skip
    enable = getattr(torch.autograd, "_enable_profiler_legacy", None)
    if enable is None:  # pragma: no cover - depends on the installed torch
        return _kineto_events(run)
    autograd: Any = torch.autograd
    flags = (False, True, False, False, False)  # shapes, memory, stack, flops, modules
    config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *flags, torch._C._profiler._ExperimentalConfig())
    enable(config)
    try:
        run()
    finally:
        threads = autograd._disable_profiler_legacy()
    return [e.cpu_memory_usage() for events in threads for e in events if e.kind() == "memory_alloc"]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


class _Storages(TorchDispatchMode):
    """Notes when storages that ops make come, and when they go."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self.alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            memory = tensor.untyped_storage()
            if memory.nbytes() and memory._cdata not in self.alive and memory._cdata not in read:
                self._note(memory, memory._cdata, memory.nbytes())
        return result

    def _note(self, memory: torch.UntypedStorage, key: int, size: int) -> None:

        def gone(_: Any) -> None:
            del self.alive[key]
            self.events.append(-size)

        self.alive[key] = weakref.ref(memory, gone)
        self.events.append(size)


def storage_events(run: Callable[[], Any]) -> list[int]:
    """Signed sizes of the storages that ops make while `run()` executes, and drop: all there is on the meta device.

    Sums of gradients that autograd makes in place are made out of place while it is looked at.
    """
    with _Storages() as seen:
        run()
    return seen.events


def cuda_allocations(run: Callable[[], Any]) -> tuple[list[tuple[int, int]], Any]:
    """`(address, bytes asked for)` of each allocation on the current CUDA device while `run()` executes, a free with
    its bytes negative; and what `run()` returned.
    """
    record = torch.cuda.memory._record_memory_history
    record("all", context=None, clear_history=True)
    try:
        result = run()
        traces = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        record(None)
    sign = {"alloc": 1, "free_requested": -1}
    return [(e["addr"], sign[e["action"]] * e["size"]) for e in traces if e["action"] in sign], result


def forget_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each of its handles; the next product allocates its own again."""
    torch._C._cuda_clearCublasWorkspaces()


def _kineto_events(run: Callable[[], Any]) -> list[int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def called_by_dynamo() -> bool:
    """Whether what called the calling function belongs to the compiler's front end."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("torch._dynamo")


def refer_weakly(module: fx.GraphModule) -> None:
    """Let the graph refer to its module without keeping it: dropped, the module and what it holds go at once."""
    module.graph.owning_module = weakref.proxy(module)  # type: ignore[assignment]


_sources: Any = getattr(fx.graph_module, "_loader", None)


_watched: dict[str, tuple[weakref.ref[fx.GraphModule], ...]] = {}  # by name of the source


def forget_source(module: fx.GraphModule) -> None:
    """Let the generated source of `module` go with it: torch keeps every source, for tracebacks, for ever.

    No Python runs when the module goes: Ctrl-C would be lost there.
    """
    name = getattr(getattr(getattr(module, "forward", None), "__code__", None), "co_filename", "")
    if _sources is not None and name in _sources.eval_cache:
        kept: list[dict[str, Any]] = [_sources.eval_cache, linecache.cache, _watched]
        _watched[name] = tuple(weakref.ref(module, functools.partial(each.pop, name)) for each in kept)


@contextlib.contextmanager
def without_sources() -> Iterator[None]:
    """Forget the generated sources of what this thread makes in the block."""
    if _sources is None:  # pragma: no cover - depends on the installed torch
        yield
        return
    thread, made, cache = threading.get_ident(), [], _sources.cache

    def noted(*args: Any, **kwargs: Any) -> str:
        name: str = cache(*args, **kwargs)
        if threading.get_ident() == thread:
            made.append(name)
        return name

    try:
        _sources.cache = noted
        yield
    finally:
        _sources.cache = cache
        _forget(made)


def _forget(names: Sequence[str]) -> None:
    for name in names:
        if _sources is not None and _sources.eval_cache.pop(name, None) is not None:
            linecache.cache.pop(name, None)


CLONES_BEFORE_CHANGES = "._swap_with_cloned"  # hooks of allow_mutation_on_saved_tensors, which looks into each op


@contextlib.contextmanager
def saving_hooks_aside() -> Iterator[None]:
    """Let nobody change, or count, what autograd saves in the block."""
    hooks, saving = [], torch._C._autograd
    while top := saving._top_saved_tensors_default_hooks(True):
        hooks.append(top)
        saving._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            saving._push_saved_tensors_default_hooks(*pair)


_OF_EVERY_MODULE = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def global_hooks() -> list[Any]:
    """What `register_module_forward_hook` and its like were given for every module, except for those who only watch."""
    tables = (getattr(torch.nn.modules.module, f"_global_{name}", {}) for name in _OF_EVERY_MODULE)
    # Others are FlopCounterMode's, and those of a trace in another thread.
    return [hook for table in tables for hook in table.values() if _is_users(hook)]


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s that are active, but for torch's own (of the default device) and ours."""
    return [mode for mode in function_mode_stack() if _is_users(type(mode))]


def function_mode_stack() -> list[Any]:
    """All that are active."""
    return list(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


def num_dispatch_modes() -> int:
    """How many `TorchDispatchMode`s are active, whoever's."""
    return int(torch._C._len_torch_dispatch_stack())


def dispatch_modes() -> list[Any]:
    """The user's `TorchDispatchMode`s that are active."""
    modes = get_dispatch_modes() if torch._C._len_torch_dispatch_stack() else ()
    return [mode for mode in modes if _is_users(type(mode))]


def _is_users(value: Any) -> bool:
    return not str(getattr(value, "__module__", "")).startswith(("torch.", "passes.", "planner."))


def keeps_parametrized() -> bool:
    """Whether a block of `torch.nn.utils.parametrize.cached()` is open, which keeps what parametrizations compute."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


@contextlib.contextmanager
def optimizer_hooks_aside() -> Iterator[None]:
    """Let no hook of every optimizer (`register_optimizer_step_post_hook` and its like) be called in the block."""
    optimizers = sys.modules["torch.optim.optimizer"]
    tables = [getattr(optimizers, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def native_kernels() -> contextlib.AbstractContextManager[Any]:
    """Run C++ kernels also where Python ones are registered for tracing."""
    guard: Any = getattr(torch._C, "_DisablePythonDispatcher", contextlib.nullcontext)
    return guard()


_CHECKED: Any = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors")
_EFFECT_OF_CHECKS = getattr(getattr(_CHECKED, "effect", None), "effect", None)

# Python decompositions that tracing needs: without them the update of running statistics would be lost.
_KEPT_DECOMPOSITIONS = frozenset({"native_batch_norm", "miopen_batch_norm", "broadcast_tensors"})


@contextlib.contextmanager
def eager_kernels(stand_ins: Mapping[tuple[Any, Any], Callable[..., Any]]) -> Iterator[None]:
    """Trace what eager executes.

    While tracing, torch replaces some composite ops (lstm, matmul, upsample, dropout, ...) by Python decompositions
    whose results differ from the C++ ones in the last bits. They are set aside for the block, so that the graph
    holds the kernels that the plain step runs. Dropout is the exception: where both are equal bit for bit, the
    fused `native_dropout` stands for it, whose mask takes a byte per element instead of four. `stand_ins` are further
    kernels, by op and key. And a check of a factorization, which torch would order by tokens, stays an op of the graph.
    """
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    dropout = torch.ops.aten.dropout.default
    replaced = [op for op in _loaded_overloads() if op.overloadpacket.__name__ not in _KEPT_DECOMPOSITIONS]
    saved = [(op, key, op.py_kernels[key]) for op in replaced for key in keys if key in op.py_kernels]
    try:  # from here on, so that an interrupt in between leaves nothing set aside
        for op, key, _ in saved:
            del op.py_kernels[key]
        for op in replaced:
            op._dispatch_cache.clear()
        if any(op is dropout for op, _, _ in saved):
            for key in keys:
                dropout.py_kernels[key] = _dropout
        for (op, key), kernel in stand_ins.items():
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
        with checks_kept(), grouped_mm_of_any_type():
            yield
    finally:
        for op, key in stand_ins:
            op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()
        for key in keys:
            dropout.py_kernels.pop(key, None)
        for op, key, kernel in saved:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
        dropout._dispatch_cache.clear()


@contextlib.contextmanager
def checks_kept() -> Iterator[None]:
    """Let a traced graph hold checks of factorizations as ops without a result (see `check_in_the_kernels`)."""
    check = torch.ops.aten._linalg_check_errors.default
    effects: Any = getattr(torch._library.simple_registry.singleton.find(check._name), "effect", None)
    try:
        fx.node._side_effectful_functions.add(check)
        if effects is not None:  # torch >= 2.13, ordered by tokens
            effects._effect = None
        yield
    finally:
        fx.node._side_effectful_functions.discard(check)
        if effects is not None:
            effects._effect = _EFFECT_OF_CHECKS


def check_in_the_kernels(graph: fx.Graph) -> None:
    """A factorization that is checked (`linalg.inv` of a singular matrix raises) checks itself: one op of the graph."""
    for check in graph.find_nodes(op="call_function", target=torch.ops.aten._linalg_check_errors.default):
        factorization: Any = check.args[0].args[0]
        factorization.kwargs = {**factorization.kwargs, "check_errors": True}
        graph.erase_node(check)


@contextlib.contextmanager
def grouped_mm_of_any_type() -> Iterator[None]:
    """torch's shape rule for `_grouped_mm` admits bfloat16 alone; its kernels also run float32 and float16."""
    meta: Any = torch._meta_registrations
    original = getattr(meta, "_meta_grouped_mm_common", None)
    if original is None:
        yield
        return
    try:
        meta._meta_grouped_mm_common = _grouped_mm_rule(original, meta)
        yield
    finally:
        meta._meta_grouped_mm_common = original


def _grouped_mm_rule(original: Callable[..., Any], meta: Any) -> Callable[..., Any]:
    def rule(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scaled = kwargs.get("scale_a", args[0] if args else None) is not None
        if scaled or mat_a.dtype is torch.bfloat16 or not hasattr(meta, "_create_grouped_mm_output_tensor"):
            return original(mat_a, mat_b, *args, **kwargs)
        offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
        return meta._create_grouped_mm_output_tensor(mat_a, mat_b, offs, kwargs.get("out_dtype") or mat_a.dtype)

    return rule


def _loaded_overloads() -> Iterator[Any]:
    aten = torch.ops.aten
    for name in sorted(aten):
        packet = getattr(aten, name)
        for overload in packet:
            yield getattr(packet, overload)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`aten::dropout` as eager computes it (ATen/native/Dropout.cpp), fused where that changes no bit."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    if x.device.type == "cuda" or (x.device.type == "cpu" and _same_scale(x.dtype, p)):
        return torch.ops.aten.native_dropout.default(x, p, train)[0]
    noise = torch.empty_like(x).bernoulli_(1 - p)
    return x * noise.div_(1 - p)


def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """The two multiplications of the CPU's `native_dropout_backward`, each of which can work in place."""
    return gradient * mask * scale if gradient.device.type == "cpu" else NotImplemented


def _same_scale(dtype: torch.dtype, p: float) -> bool:
    """Whether eager's scaled mask and the fused kernel's factor are the same number of `dtype`."""
    if dtype not in (torch.float32, torch.float64):
        return False
    if dtype is torch.float64:
        return True
    return _to_float32(1.0 / _to_float32(1 - p)) == _to_float32(1.0 / (1.0 - p))


def _to_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


# Sizes that are symbols while a step is traced ------------------------------------------------------------------------


class Symbols:
    """Sizes that are symbols while a step is traced, and what the trace takes as given about them."""

    def __init__(self) -> None:
        self.shapes = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.places: dict[Any, tuple[int, int]] = {}  # symbol -> which tensor, which of its dimensions
        self.sample: dict[Any, int] = {}  # symbol -> its size while it is traced

    def fake(self, mode: FakeTensorMode, number: int, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """Tensor `number`, whose sizes in `dims` are symbols."""
        kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(tensor.dim())]
        fake: torch.Tensor = mode.from_tensor(
            tensor.detach(), static_shapes=not dims or None,
            symbolic_context=StatelessSymbolicContext(kinds) if dims else None,
        )  # fmt: skip
        for d in dims:
            size: Any = fake.size(d)
            if not symbolic(size):  # 0 and 1 are cases of their own
                raise ValueError(f"a size of {size} is not a symbol")
            self.places[size.node.expr], self.sample[size.node.expr] = (number, d), tensor.size(d)
        return fake

    def assignment(self, tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
        """The size of each symbol where the tensors are these."""
        return {symbol: tensors[i].shape[d] for symbol, (i, d) in self.places.items()}

    @property
    def pinned(self) -> bool:
        """Whether a size was taken as the one number that it has in the sample."""
        return any(symbol in self.shapes.replacements and self.shapes.replacements[symbol].is_number
                   for symbol in self.places)  # fmt: skip

    def hold(self, sizes: Mapping[Any, int]) -> bool:
        """Whether all that the trace took as given is so at these sizes."""
        ranges = [self.shapes.var_to_range[symbol] for symbol in sizes]
        if not all(r.lower <= size <= r.upper for r, size in zip(ranges, sizes.values(), strict=True)):
            return False
        if self.shapes.deferred_runtime_asserts:
            return False
        return all(number_of(guard.expr, sizes) is True for guard in self.shapes.guards)


def number_of(expression: Any, sizes: Mapping[Any, int]) -> int | bool:
    """What an expression of symbols is at these sizes."""
    value = expression.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    if value in (sympy.true, sympy.false):
        return bool(value)
    if not isinstance(value, sympy.Integer):
        raise ValueError(f"{expression} is not a whole number at {dict(sizes)}")
    return int(value)


def symbolic(value: Any) -> bool:
    """Whether a number may depend on symbols."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_compiled(module: Any) -> bool:
    """Whether `module.compile()` was called: its calls are the compiler's."""
    own: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return own.get("_compiled_call_impl") is not None


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Its call with its hooks, and without the compiler where `module.compile()` was called."""
    return module._call_impl if is_compiled(module) else module


def inside_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class BareTensor(torch.Tensor):
    """A tensor without memory, which goes by the name of a traced one: libraries ask what they are given."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def made(
        cls, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, trained: bool
    ) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=device, requires_grad=trained
        )

    def __init_subclass__(cls) -> None:
        cls.__module__, cls.__qualname__ = FunctionalTensor.__module__, FunctionalTensor.__qualname__
        for name in _PYTHON_OF_TRACED & vars(FunctionalTensor).keys():
            setattr(cls, name, vars(FunctionalTensor)[name])


_PYTHON_OF_TRACED = frozenset({
    "bfloat16", "bool", "byte", "char", "cpu", "cuda", "double", "float", "half", "int", "long", "__bool__",
})  # fmt: skip
