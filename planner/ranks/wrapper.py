"""What a model is wrapped in for training on several ranks, and what that holds besides the step's own tensors."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from passes._torch import running_data_parallel
from passes.errors import Unsupported

T = TypeVar("T")
COPIES = {default_hooks.fp16_compress_hook: 2, default_hooks.bf16_compress_hook: 2}  # bytes of an element
NO_COPY = (default_hooks.allreduce_hook,)
UNKNOWN_HOOK = "what the communication hook {} holds is not known: set reserve_mb to its MiB"


def inner_module(model: nn.Module) -> nn.Module:
    """The module whose forward is the step: what DistributedDataParallel wraps, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def running_wrapper(model: nn.Module) -> nn.Module | None:
    """The DistributedDataParallel in whose forward a part of it is called, if any; not the model itself."""
    wrapper = running_data_parallel()
    return wrapper if wrapper is not model and wrapper is not None and model in set(wrapper.modules()) else None


def group_of(model: nn.Module | None) -> Any:
    """The process group that trains the model, where the model tells; else None."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    if not isinstance(model, nn.Module):
        return None
    mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
    return mesh.get_group() if mesh is not None and mesh.ndim == 1 else None


def wrapper_bytes(model: nn.Module | None) -> int:
    """What the wrapper holds throughout: the buckets in which gradients travel, and the copies that a hook makes."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    reduced = _reduced(model)
    sizes = [COPIES[hook] for hook, _ in _hooks(model) if hook in COPIES]
    buckets = 0 if model.gradient_as_bucket_view else sum(p.nbytes for p in reduced)
    return buckets + sum(p.numel() * size for size in sizes for p in reduced)


def wrapper_gradients(model: nn.Module | None, asked: T) -> T | Literal["accumulated"]:
    """What becomes of gradients: where they lie in the buckets, which are there throughout, each is copied there."""
    bucketed = isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view
    return "accumulated" if bucketed and asked == "fresh" else asked


def in_turn(model: nn.Module) -> bool:
    """Whether bits depend on the order in which gradients come, which decides their places in the buckets: a sum over
    three ranks or more rounds by these.
    """
    around = model if isinstance(model, DistributedDataParallel) else running_wrapper(model)
    return isinstance(around, DistributedDataParallel) and bool(around.process_group.size() > 2)


def unsent_bytes(model: nn.Module | None, asked: str) -> int:
    """Gradients of micro-batches under `no_sync()`, which lie besides the buckets that hold those of the last one."""
    if not isinstance(model, DistributedDataParallel) or not model.gradient_as_bucket_view or asked == "fresh":
        return 0
    return sum(p.nbytes for p in _reduced(model))


def wrapper_notes(model: nn.Module) -> tuple[str, ...]:
    """What of the wrapper's memory is not counted, in words."""
    unknown = [hook for hook, _ in _hooks(model) if hook not in COPIES and hook not in NO_COPY]
    return tuple(UNKNOWN_HOOK.format(getattr(hook, "__qualname__", hook)) for hook in unknown)


def check_wrapper(model: nn.Module) -> None:
    """Refuse a wrapper that changes what the forward computes with.

    Raises:
        Unsupported: the wrapper casts parameters and inputs, or hooks make `DTensor`s of parameters.
    """
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():  # others are refused later
        if any(getattr(h, "__name__", "") == "_reconstruct_dtensor" for h in module._forward_pre_hooks.values()):
            raise Unsupported(
                "tensor parallel within DistributedDataParallel (_pre_dp_module_transform)", name or "the model itself",
                "its hooks put DTensors in the places of parameters while the step runs, and others back",
                "Use one of the two: parallelize_module over all ranks, or DistributedDataParallel.",
            )  # fmt: skip
    if getattr(model, "mixed_precision", None) is not None and isinstance(model, DistributedDataParallel):
        raise Unsupported(
            "DistributedDataParallel(mixed_precision=...)", "the model itself", "it casts parameters and inputs in "
            "hooks of its own, between which the planned step would run on others than it was planned for",
            "Use torch.autocast, around planning and training alike.",
        )  # fmt: skip


def _reduced(model: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = model.parameters_to_ignore
    return [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]


def _hooks(model: nn.Module) -> list[tuple[Any, Any]]:
    return list(getattr(model, "_comm_hooks", ())) if isinstance(model, DistributedDataParallel) else []
