"""One run of a forward on the sample, with its values: it leaves all as it was, and keeps nothing for a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from passes._torch import TorchDispatchMode, compiling_flags, swapped_state

from ..exclusive import alone, exclusive
from ..ops import COLLECTIVES
from .arguments import call_signature, run_model
from .binding import names_given
from .failure import capture_error
from .given import left_alone
from .isolate import isolated
from .nodes import twin
from .state import Snapshot
from .structure import Bound, flatten, unflatten
from .templates import shared
from .unregistered import equal


def may_run(model: nn.Module, bound: Mapping[str, Any]) -> bool:
    """Whether a forward can run now: with data, and while no other thread does, which would draw the same numbers."""
    given = (*model.parameters(), *model.buffers(), *flatten(dict(bound))[0])
    return alone() and not any(t.is_meta for t in given)


def refuse_failing(model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None) -> None:
    """Run a forward on a sample that could be traced: types that a kernel does not take are no matter to a trace.

    Raises:
        ForwardFailed: it raises.
    """
    if not may_run(model, bound) or (dist.is_available() and dist.is_initialized()):
        return
    buffers = {name: twin(buffer) for name, buffer in model.named_buffers()}
    with once(model, bound, loss_fn, buffers) as (_, run, _):
        try:
            run()
        except Exception as error:
            raise capture_error(error) from error


def alike_when_compiling(model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a forward computes the same, bit for bit, where `torch.compiler.is_compiling()` holds.

    Without data that cannot be told, nor is anything trained; else what fails is another one.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return True
    found = []
    for way in (nullcontext, compiling_flags):
        state = {name: twin(buffer) for name, buffer in model.named_buffers()}
        try:
            with once(model, bound, loss_fn, state) as (_, run, inputs), way():
                found.append([*(t.detach() for t in flatten(run())[0]), *state.values(), *inputs])
        except Exception:  # noqa: BLE001 - whatever it is, the two cannot be compared
            return False
    return len(found[0]) == len(found[1]) and all(map(equal, *found))


@contextmanager
def once(
    model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None, state: dict[str, torch.Tensor]
) -> Iterator[tuple[Snapshot, Callable[[], Any], list[torch.Tensor]]]:
    """What the model is before its forward runs, what runs it, and the copies of the inputs that it runs on.

    Args:
        state: what it has in the places of its own parameters and buffers, by their names.
    """
    tensors, template = flatten(dict(bound))
    inputs = list(map(twin, tensors))
    copies = Bound(unflatten(template, inputs), names_given(bound))
    with (
        exclusive(), torch.random.fork_rng(devices=[]), isolated(model, loss_fn, shared(template)) as before,
        swapped_state(model, state), left_alone(copies), _save_nothing(),
        _Silent() if dist.is_available() and dist.is_initialized() else nullcontext(),
    ):  # fmt: skip
        yield before, lambda: run_model(model, loss_fn, call_signature(model, loss_fn), copies), inputs


class _Silent(TorchDispatchMode):
    """Ends a forward that talks to other ranks, which may not run one now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise RuntimeError(f"{func} waits for other ranks")
        return func(*args, **(kwargs or {}))


def _save_nothing() -> Any:
    """Let a forward take the course that it takes with gradients, and hold nothing for its backward."""
    def nothing(_: Any) -> Any:
        return None

    return torch.autograd.graph.saved_tensors_hooks(nothing, nothing)
