"""What a step needs of torch's semi-private names while it runs. Needs torch alone: exports hold a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import call
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import register_pytree_node

__all__ = [
    "DEFAULTS", "TORCH_VERSION", "Autocast", "active_autocast", "active_saving_hooks", "after_backward",
    "backward_number", "bare", "below_autograd", "is_wanted", "kernel_settings", "listen_first", "make_workspaces",
    "next_node", "node_number", "num_owners", "overwrite", "own_part", "passed_back", "register_pytree_node",
    "run_below_autograd", "segments_that_do_not_grow", "torch_defaults", "under_autocast", "under_default_dtype",
    "under_transform", "with_autograd", "within_autocast",
]  # fmt: skip

_C: Any = torch._C
_no_autocast = getattr(_C, "_DisableAutocast", contextlib.nullcontext)
_no_autograd = getattr(_C, "_AutoDispatchBelowAutograd", torch.no_grad)
_level: Callable[[], int | None] = getattr(getattr(_C, "_functorch", None), "maybe_current_level", lambda: None)
_batched: Callable[[Any], bool] = getattr(getattr(_C, "_functorch", None), "is_legacy_batchedtensor", lambda t: False)
TORCH_VERSION: str = torch.__version__
Autocast = tuple[tuple[str, torch.dtype], ...]  # kinds of devices, each with what is cast to there


def active_autocast() -> Autocast:
    """The autocast that code runs under now."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


def within_autocast() -> bool:
    """Whether a block of autocast is open, if only one that turns it off: casts are kept until the outermost ends."""
    is_nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    return is_nested or bool(active_autocast())


def kernel_settings() -> dict[str, Any]:
    """Torch's switches under which one op on the same tensors gives other bits, but for the default dtype."""
    backends: Any = torch.backends
    return {
        "oneDNN": backends.mkldnn.enabled,
        "cuDNN": backends.cudnn.enabled,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "flushing of denormals": _SMALLEST * _ONE == 0.0,  # which goes for Python's numbers in this thread, too
        "float32 precision of matrix products": (
            backends.mkldnn.matmul.fp32_precision, backends.cuda.matmul.fp32_precision
        ),
    }  # fmt: skip


_SMALLEST, _ONE = 5e-324, 1.0


def under_default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Run a block under a default dtype: trainers have one for the forward alone (Lightning's `bf16-true`)."""
    return _AS_IT_IS if torch.get_default_dtype() is dtype else _other_default_dtype(dtype)


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _other_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _default_device() -> torch.device:
    """`torch.get_default_device()`, at once where no mode says another one."""
    return torch.get_default_device() if _C._len_torch_function_stack() else _CPU


_CPU = torch.device("cpu")
# Process-wide settings that choose what torch's composite ops are made of, each with what tells it.
DEFAULTS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": _default_device,
    "flash attention": _C._get_flash_sdp_enabled,
    "memory-efficient attention": _C._get_mem_efficient_sdp_enabled,
    "math attention": _C._get_math_sdp_enabled,
    "cuDNN attention": _C._get_cudnn_sdp_enabled,
    "reduced precision in math attention": _C._get_math_sdp_allow_fp16_bf16_reduction,
    "oneDNN": _C._get_mkldnn_enabled,
    "cuDNN": _C._get_cudnn_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "autocast cache": torch.is_autocast_cache_enabled,
    "autocast dtype on cpu": partial(torch.get_autocast_dtype, "cpu"),
    "autocast dtype on cuda": partial(torch.get_autocast_dtype, "cuda"),
}


def torch_defaults() -> tuple[Any, ...]:
    """Process-wide settings that a trace takes as given, in the order of `DEFAULTS`."""
    return tuple(map(call, DEFAULTS.values()))


@contextlib.contextmanager
def under_autocast(wanted: Autocast) -> Iterator[None]:
    """Run the block under this autocast and no other."""
    dtypes = dict(wanted)
    with contextlib.ExitStack() as stack:
        if within_autocast():  # of the thread that called backward, where this is one of autograd's: its casts stay
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
        for kind in dict.fromkeys([*dtypes, *dict(active_autocast())]):
            stack.enter_context(torch.autocast(kind, dtypes.get(kind), enabled=kind in dtypes))
        yield


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops straight on their kernels: no autograd graph, no view bookkeeping, no autocast.

    Gradient mode stays on, as in the plain forward: some kernels ask for it (oneDNN's LSTM keeps what its backward
    needs only then).
    """
    with torch.enable_grad(), _no_autocast(), _no_autograd():
        yield


def run_below_autograd(call: Callable[..., Any], *given: Any) -> Any:
    """`call(*given)`, as in `below_autograd`.

    Blocks that are entered and left in C alone: within a block of Python's, a Ctrl-C that comes as it is left would
    leave gradient mode off once its traceback goes.
    """
    mode = torch.is_grad_enabled()
    try:
        _C._set_grad_enabled(True)
        with _no_autocast(), _no_autograd():
            return call(*given)
    finally:
        _C._set_grad_enabled(mode)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, and count of changes, in a tensor without a graph or a view's base."""
    with _no_autograd():
        return tensor.detach()


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Record an autograd graph again, also below it."""
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(_C.DispatchKey, key))
    with torch.enable_grad(), _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
        yield


def under_transform(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jvp, ...) runs this code, or has to do with the tensors.

    So has forward-mode differentiation with those that have a tangent, and `is_grads_batched` with gradients.
    """
    if _level() is not None:
        return True
    given = [t for t in tensors if t is not None]
    dual = getattr(forward_ad, "_current_level", -1) >= 0
    return any(map(_batched, given)) or (dual and any(forward_ad.unpack_dual(t).tangent is not None for t in given))


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a `DTensor`, without a gradient; any other tensor as it is."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def passed_back(node: Any, gradient: torch.Tensor) -> Any:
    """What a node of autograd's graph, of one tensor and what is none, makes of a gradient now."""
    found = node.apply(gradient) if isinstance(node, torch.autograd.function.BackwardCFunction) else node(gradient)
    return found[0] if isinstance(found, tuple) else found


def backward_number() -> int:
    """Tells the backward that is running from others; -1 outside of any."""
    return int(_C._current_graph_task_id())


def next_node() -> int:
    """The number of the node of autograd's graph that is made next in this thread."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    return int(node._sequence_nr())


def node_number(node: Any) -> int:
    """When a node of autograd's graph was made, as `next_node` counts."""
    return int(node._sequence_nr())


def is_wanted(tensor: torch.Tensor) -> bool:
    """Whether the backward that is running was asked for this gradient, or for one behind it."""
    try:
        return bool(_C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(tensor).node))
    except RuntimeError:  # as torch answers for a leaf whose gradient is handed to the caller
        return True


def listen_first(tensor: torch.Tensor, hook: Callable[..., Any]) -> dict[int, Callable[..., Any]]:
    """Have the hook called before all others of a tensor without any, also with None; the others, as they come."""
    tensor.register_hook(hook)
    tensor._backward_hooks = None  # its node goes on with that one
    tensor.register_hook(hook).remove()
    others: Any = tensor._backward_hooks
    return others


def after_backward(call: Callable[[], None]) -> None:
    """Call this once the backward that is running is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def overwrite(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value to its tensor: a batch norm has three of a few bytes, and on a GPU each copy is a launch."""
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(tensors, values)


def num_owners(storage: torch.UntypedStorage) -> int | None:
    """How many tensors and storage objects refer to the memory; None where torch does not say."""
    count = getattr(_C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))


def active_saving_hooks() -> str:
    """Who changes what autograd saves: `torch.utils.checkpoint`, `torch.autograd.graph.save_on_cpu`, ..., or ""."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(False)
    if not hooks:
        return ""
    module, name = hooks[0].__module__, getattr(hooks[0], "__qualname__", type(hooks[0]).__name__).partition(".")[0]
    return module if module == "torch.utils.checkpoint" else f"{module}.{name}"


def make_workspaces(device: torch.device) -> None:
    """Have the workspaces that cuBLAS keeps allocated: this thread's, and that of autograd's for the device."""
    unseen = getattr(_C, "_DisableTorchDispatch", contextlib.nullcontext)
    with torch.enable_grad(), _no_autocast(), _C.DisableTorchFunction(), unseen(), contextlib.suppress(RuntimeError):
        matrix = torch.zeros(16, 16, device=device, requires_grad=True)
        torch.mm(matrix, matrix).sum().backward()


@contextlib.contextmanager
def segments_that_do_not_grow() -> Iterator[None]:
    """Let torch's CUDA allocator take segments of the size asked for, also under `expandable_segments:True`.

    It knows both kinds in one process: turning the setting off for a moment is how memory is shared between processes.
    """
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    change, given = getattr(_C, "_accelerator_setAllocatorSettings", None), settings["PYTORCH_CUDA_ALLOC_CONF"]
    if change is None or not settings["expandable_segments"]:
        yield
        return
    change(f"{given},expandable_segments:False")
    try:
        yield
    finally:
        change(given)
