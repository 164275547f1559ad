"""Which module an op came from: recorded while tracing, read back from a node.

torch's tracer copies `nn_module_stack` from the current tracing metadata to each node it makes, and links a backward
node to the forward op it differentiates by `seq_nr`; all there is to do is to keep that entry while modules call
each other.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn
from torch.fx import traceback as fx_traceback
from torch.nn.modules import module as module_hooks

from passes.printable import printable

STACK = "nn_module_stack"
FORWARD_STACK = "fwd_nn_module_stack"


@contextlib.contextmanager
def module_paths(model: nn.Module) -> Iterator[None]:
    """Record the calling module of every op that is traced in the block."""
    names = {id(module): printable(name) for name, module in model.named_modules()}
    stack: list[tuple[str, str]] = []

    def show() -> None:
        meta = fx_traceback.get_current_meta()
        meta[STACK] = {f"{i}:{path}": (path, kind) for i, (path, kind) in enumerate(stack)}

    def enter(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            stack.append((names[id(module)], f"{type(module).__module__}.{type(module).__qualname__}"))
            show()

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names and stack:
            stack.pop()
            show()

    with contextlib.ExitStack() as hooks:
        hooks.callback(module_hooks.register_module_forward_pre_hook(enter).remove)
        hooks.callback(module_hooks.register_module_forward_hook(leave).remove)
        with fx_traceback.preserve_node_meta():
            yield


def fill_forward_paths(nodes: Iterable[fx.Node]) -> None:
    """Give each backward node the module of the forward op that has its sequence number."""
    found: dict[int, Any] = {}
    for node in nodes:
        number, stack = node.meta.get("seq_nr"), node.meta.get(STACK)
        backward = node.meta.get("autograd_backward") or node.meta.get("partitioner_tag") == "is_backward"
        if not backward and stack and number is not None:
            found.setdefault(number, stack)
        elif backward:
            inherited = next((n.meta[FORWARD_STACK] for n in node.all_input_nodes if n.meta.get(FORWARD_STACK)), None)
            node.meta[FORWARD_STACK] = node.meta.get(FORWARD_STACK) or found.get(number or -1) or inherited
            node.meta.pop(STACK, None)


def module_path(node: fx.Node | None) -> str:
    """The module that an op came from (or the one it differentiates), e.g. `transformer.h.3.mlp`; "" at the top."""
    meta = {} if node is None else node.meta
    stack = meta.get(STACK) or meta.get(FORWARD_STACK) or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] if paths else ""


def ancestors(path: str) -> list[str]:
    """A module path and all paths above it, from the model itself ("") down."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def misnamed(model: nn.Module) -> Iterator[str]:
    """Parameters and buffers with a dot in their names, and a model that does not tell of all of its own."""
    for path, module in model.named_modules():
        yield from (f"{path}[{name!r}]" for name in (*module._parameters, *module._buffers) if "." in name)
    own = type(model).named_parameters
    if own is not nn.Module.named_parameters and "remove_duplicate" not in inspect.signature(own).parameters:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(own).parameters.values())
        yield from () if takes_any else (f"{type(model).__name__}.named_parameters",)
