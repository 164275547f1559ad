"""refuse: what is not supported, as a table of construct -> reason -> remedy, checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from passes._torch import (
    function_modes,
    global_hooks,
    is_distributed,
    keeps_parametrized,
    plain_class,
    wrapped_tensors,
)
from passes.errors import OnlyInEager, Unsupported

from .constructs import UNTRACKED
from .modules import misnamed


@dataclass(frozen=True)
class Refusal:
    """One row: `find` yields the places where a model uses the construct."""

    construct: str
    reason: str
    remedy: str
    find: Callable[[nn.Module], Iterator[str]]

    def check(self, model: nn.Module) -> None:
        """Raise Unsupported where `model` uses it."""
        for place in self.find(model):
            raise Unsupported(self.construct, place or "(the model itself)", self.reason, self.remedy)


def refuse(model: nn.Module) -> None:
    """Raise Unsupported for the first construct of `model` that a plan would not keep faithful."""
    for row in TABLE:
        row.check(model)


def refuse_backward_hooks(module: nn.Module, own: bool) -> None:
    """Raise OnlyInEager for a module's backward hook in what is to be one step; `own` ones run within it, too."""
    for name, part in module.named_modules():
        if (name or own) and (part._backward_hooks or part._backward_pre_hooks):
            raise OnlyInEager(
                "module backward hook", name or "(the model itself)", "a planned backward runs no module boundaries",
                'Plan by regions (regions="auto", or patterns), or use hooks on parameters (they fire as usual).',
            )  # fmt: skip


def _hooks_of_the_last_op(model: nn.Module) -> Iterator[str]:
    return (n for n, m in model.named_modules() if m._backward_hooks and not m._is_full_backward_hook)


def _hooks_of_every_module(model: nn.Module) -> Iterator[str]:
    return (getattr(hook, "__qualname__", type(hook).__name__) for hook in global_hooks())


def cached_parametrizations(model: nn.Module) -> Iterator[str]:
    """Where a parametrization computes what an open block of `cached()` keeps."""
    return (n for n, m in model.named_modules() if is_parametrized(m)) if keeps_parametrized() else iter(())


def _subclasses(model: nn.Module) -> Iterator[str]:
    plain = (torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in plain and not is_distributed(tensor) and not is_quantized_weight(tensor):
            yield f"{name} ({type(tensor).__name__})"


def own_generator(place: str) -> Unsupported:
    """The refusal of a draw that is not from a default generator (torch 2.11 cannot trace it, later releases can)."""
    return Unsupported(
        "random generator of its own", place, "only the default generators' state is kept for what is computed again",
        "Draw from the default generator (torch.manual_seed), or pass the random tensor as an argument.",
    )  # fmt: skip


def hook_of_given(name: str) -> Unsupported:
    """The refusal of `x.register_hook(...)`, of an x that is there before forward runs."""
    return Unsupported(
        "hook that forward registers on a tensor that it is given", name, "each step would register another one, and "
        "it acts on the gradient of all uses, also of those outside forward",
        "Register it once, before planning; or on what forward computes (x * 1).",
    )  # fmt: skip


def part_drawn() -> Unsupported:
    """The refusal of `x[:, :4].normal_()` on the CPU, which draws other numbers than a whole tensor of that shape."""
    return Unsupported(
        "normal_ on a part of a tensor", "forward", "a traced step draws it as a tensor of its own, with other numbers",
        "Draw a tensor (torch.randn), and copy it to its place.",
    )  # fmt: skip


def is_quantized_weight(tensor: torch.Tensor) -> bool:
    """Whether it is frozen, and made of plain tensors in a way that torch can trace, as torchao's are.

    Its parts are constants of a plan. Tensors of `torch.distributed` are not: what they are made of changes.
    """
    return not tensor.requires_grad and not is_distributed(tensor) and bool(wrapped_tensors(tensor))


def storage_kind(tensor: torch.Tensor) -> str:
    """What makes a tensor's memory other than one strided block; "" for an ordinary tensor."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return "sparse"
    return "quantized" if tensor.is_quantized else ""


def refuse_not_dense(tensor: torch.Tensor, place: str) -> None:
    """Raise OnlyInEager for a tensor whose memory is not one strided block, in what is to be one step."""
    if kind := storage_kind(tensor):
        raise OnlyInEager(
            f"{kind} tensor", place, "its memory is not one dense block",
            "Use a dense tensor (to_dense(), dequantize(), padding with a mask), or, if it is sparse, name submodules "
            'to plan that take none (regions=["encoder.*"]): code between them may read it.',
        )  # fmt: skip


def refuse_untracked(tensor: torch.Tensor, place: str) -> None:
    """Raise Unsupported for a tensor made under `inference_mode`."""
    if tensor.is_inference():
        raise UNTRACKED.at(place)


def untracked(model: nn.Module) -> Iterator[str]:
    """The parameters and buffers made under `inference_mode`."""
    return (name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_inference())


def refuse_sparse(gradient: torch.Tensor | None) -> None:
    """Raise Unsupported for a gradient that grows where steps add to it; autograd calls hooks without one, too."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise Unsupported(
            "sparse gradient", f"the backward, of {list(gradient.shape)}", "it grows with each step that adds to it",
            'Use sparse=False, or gradients="fresh".',
        )  # fmt: skip


def _uninitialized(model: nn.Module) -> Iterator[str]:
    return (n for n, p in model.named_parameters() if torch.nn.parameter.is_lazy(p))


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return plain_class(type(module)) is not type(module)


def sharded_modules(model: nn.Module) -> Iterator[str]:
    """Paths of the modules on which it was called, the model's own among them."""
    return (n for n, m in model.named_modules() if is_sharded(m))


def has_sharded(model: nn.Module) -> bool:
    """Whether it was called on the model or on anything in it."""
    return next(sharded_modules(model), None) is not None


def refuse_sharded(model: nn.Module, running: bool = False) -> None:
    """Raise Unsupported for a module that is to be one step and in which parameters are gathered as it runs.

    Args:
        running: it is called in a step that runs, so that its own parameters are there.
    """
    for place in sharded_modules(model):
        if running and not place:
            continue
        raise Unsupported(
            "fully_shard on what is planned as one step", place or "(the model itself)",
            "its parameters are gathered and scattered by hooks as the step runs",
            'Plan by regions (regions="auto", or patterns): what is to be planned has to be in submodules.',
        )  # fmt: skip


def _mixed_devices(model: nn.Module) -> Iterator[str]:
    devices: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        devices.setdefault(tensor.device, name)
    if len({d for d in devices if d.type != "meta"}) > 1:
        yield ", ".join(f"{name} on {device}" for device, name in devices.items())


def _compiled(model: nn.Module) -> Iterator[str]:
    return _of_kinds(model, ("OptimizedModule",))


def _wrapped(model: nn.Module) -> Iterator[str]:
    kinds = (
        "ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule", "DataParallel",
        "DistributedDataParallel", "FullyShardedDataParallel",
    )  # fmt: skip
    return _of_kinds(model, kinds)


def _replicated(model: nn.Module) -> Iterator[str]:
    """Where `replicate()` was called, as it is on top of `fully_shard`'s hooks."""
    for name, module in model.named_modules():
        if any(kind.__name__ == "ReplicateModule" for kind in type(module).__bases__):
            yield name or "the model"


def _of_kinds(model: nn.Module, kinds: tuple[str, ...]) -> Iterator[str]:
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            yield f"{name or 'the model'} ({type(module).__name__})"


def _runs_a_plan(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if any(getattr(place, "runs_plan", False) for place in (type(module), module.__dict__.get("forward"))):
            yield name


def _waits(model: nn.Module) -> Iterator[str]:
    return (n for n, m in model.named_modules() if getattr(m.__dict__.get("forward"), "waits_for_a_batch", False))


CACHED = Refusal(
    "parametrization within torch.nn.utils.parametrize.cached()", "what a step computes once for all forwards of the "
    "block, a planned one computes for itself", "Open the block in the forward of what is planned, or leave it out.",
    cached_parametrizations,
)  # fmt: skip

TABLE: tuple[Refusal, ...] = (
    Refusal(
        "compiled module", "a plan replaces what the compiler would compile",
        "Plan the module inside it (its attribute _orig_mod), or compile that one under a budget: "
        'torch.compile(module, backend="checkpoint_planner", options={"budget_mb": ...}).', _compiled,
    ),
    Refusal(
        "scripted or data-parallel module", "its Python cannot be traced",
        "Plan the module inside it, and wrap plan.module afterwards.", _wrapped,
    ),
    Refusal(
        "replicate() of torch.distributed", "its hooks swap the parameters while the step runs",
        "Use DistributedDataParallel, or fully_shard over a mesh of one dimension.", _replicated,
    ),
    Refusal(
        "module that runs a plan", "its planned step cannot be traced",
        "Plan the original model: call plan.remove(model) first, or pass the model instead of plan.module.",
        _runs_a_plan,
    ),
    Refusal(
        "module that waits for its first batch", "it is planned within its own forward then",
        "Run that batch, or call stop() of what plan_on_first_batch returned (close() of the PlanCallback) first.",
        _waits,
    ),
    Refusal(
        "lazy parameter", "its shape is not known yet", "Run the model once on a sample before planning.",
        _uninitialized,
    ),
    Refusal(
        "hook of register_backward_hook", "it is given what the last op of forward makes, which may be a planned step",
        "Use register_full_backward_hook.", _hooks_of_the_last_op,
    ),
    Refusal(
        "hook of every module (register_module_forward_hook, ...)", "it would run on modules of the tracer's own",
        "Remove it before planning, or register it on the model's submodules (register_forward_hook).",
        _hooks_of_every_module,
    ),
    Refusal(
        "TorchFunctionMode", "it would be told of ops that are not those of forward, or of none",
        "Leave it before planning, and before steps that are to be planned ones.",
        lambda model: (type(mode).__qualname__ for mode in function_modes()),
    ),
    CACHED,
    Refusal(
        "tensor subclass", "what it stores cannot be seen from the graph",
        "Convert the parameter to a plain tensor before planning. A frozen one of a class that torch can trace "
        "(__tensor_flatten__, as torchao's quantized weights) may stay.", _subclasses,
    ),
    Refusal(
        "a parameter that is not found by its name", "torch's own functions look for it by module and name",
        "Give it a name without dots. Where the model has a named_parameters() of its own, plan nn.Sequential(model).",
        misnamed,
    ),
    Refusal(UNTRACKED.what, UNTRACKED.why, UNTRACKED.remedy, untracked),
    Refusal(
        "parameters on several devices", "one budget covers one device", "Move the model to one device.",
        _mixed_devices,
    ),
)  # fmt: skip


def refuse_attributes(names: Collection[str], tensor: str) -> None:
    """Refuse attributes of a tensor that the forward may read or sets: a trace has tensors of its own."""
    if others := [name for name in names if not name.startswith("_")]:  # torch's own
        raise Unsupported(
            f"attribute of a tensor ({min(others)})", tensor, "what is computed while tracing has no such attribute, "
            "and a planned step sets none", "Pass it as an argument, or in an object beside the tensor.",
        )  # fmt: skip
