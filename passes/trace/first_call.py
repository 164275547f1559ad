"""What a forward remembers at its first call (a mask, a table, a library's choice): remembered before it is traced.

A step that was traced without it holds until some other forward, in evaluation for one, has remembered it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from passes._torch import TorchDispatchMode, swapped_state

from ..exclusive import alone, exclusive
from ..ops import COLLECTIVES
from .arguments import call_signature, names_given, run_model
from .given import left_alone
from .isolate import isolated
from .nodes import MISSING, Change, identical
from .notice import holder
from .structure import Bound, flatten, unflatten
from .templates import shared


class FirstCall(Exception):
    """Ends a trace whose forward would remember something.

    Attributes:
        paths: the places, and the containers in which there are some.
        changed: the parameters and buffers that it changes, too.
    """

    def __init__(self, paths: Iterable[str], changed: Iterable[str]) -> None:
        super().__init__()
        self.paths, self.changed = tuple(paths), tuple(changed)

    def make(self, model: nn.Module, bound: Mapping[str, Any], loss_fn: Callable[..., Any] | None) -> tuple[str, ...]:
        """Call the forward, and leave what it remembers; everything else is put back.

        Returns:
            What is left, in words for the plan; nothing where the forward cannot run: without data, where other threads
            run, which would draw the same random numbers, or where other ranks would have to run it, too.
        """
        tensors, template = flatten(dict(bound))
        if not alone() or any(t.is_meta for t in (*model.parameters(), *model.buffers(), *tensors)):
            return ()
        devices = sorted({t.device.index or 0 for t in (*model.parameters(), *tensors) if t.device.type == "cuda"})
        copies = Bound(unflatten(template, list(map(_twin, tensors))), names_given(bound))
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own = {name: _twin(named[name]) for name in self.changed}
        left: list[Change] = []
        with (
            exclusive(), torch.random.fork_rng(devices=devices), isolated(model, loss_fn, shared(template)) as before,
            suppress(Exception), swapped_state(model, own), left_alone(copies), _save_nothing(),
            _Silent() if dist.is_available() and dist.is_initialized() else nullcontext(),
        ):  # fmt: skip
            run_model(model, loss_fn, call_signature(model, loss_fn), copies)
            left = [change for change in before.changes(identical) if holder(change) in self.paths]
        for change in left:
            _put(change)
        return tuple(f"forward was called once for {change.path}, which its first call remembers" for change in left)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Silent(TorchDispatchMode):
    """Ends a forward that talks to other ranks, which may not run one now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise RuntimeError(f"{func} waits for other ranks")
        return func(*args, **(kwargs or {}))


def _put(change: Change) -> None:
    """Let the place be as after the change."""
    content = change.after
    if change.key is not MISSING:
        content = change.node.take()
        content[change.key] = change.after
        if change.after is MISSING:
            del content[change.key]
    change.node.give(content)


def _save_nothing() -> Any:
    """Let a forward take the course that it takes with gradients, and hold nothing for its backward."""
    def nothing(_: Any) -> Any:
        return None

    return torch.autograd.graph.saved_tensors_hooks(nothing, nothing)
