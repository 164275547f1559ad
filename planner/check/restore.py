"""The model that a check runs is left as it was: attributes, training flags, generators, whatever happens."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from passes.run._torch import node_number
from passes.run.tensors import nodes_behind
from passes.trace.nodes import refill

CONTAINERS = (dict, OrderedDict, list, set)
DEPTH = 3
MOST_BYTES = 1 << 28
SKIPPED = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.Generator, torch.device, torch.dtype)


class Snapshot:
    """What modules, and the containers and objects that they hold, contain; and the data of the tensors in them.

    So it is of modules that are held without being registered (a teacher in a list): their buffers, and parameters of
    up to `MOST_BYTES` in all, and of parameters that are held so.

    Args:
        roots: modules (with all below them), and other values that the step is given.
        own: tensors that need no copy, because the step runs on others in their place.
    """

    def __init__(self, roots: Iterable[Any], own: Iterable[torch.Tensor]) -> None:
        self.contents: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.seen, self.room = {id(t) for t in own}, MOST_BYTES
        every = [value for root in roots for value in (root.modules() if isinstance(root, nn.Module) else [root])]
        self.registered = {id(value) for value in every if isinstance(value, nn.Module)}
        for value in every:
            self._walk(value, 0)

    def _walk(self, value: Any, depth: int) -> None:
        if id(value) in self.seen or isinstance(value, SKIPPED) or depth > DEPTH:
            return
        if isinstance(value, nn.Module) and depth:
            for module in value.modules() if id(value) not in self.registered else ():  # else a root of its own
                self._walk(module, 0)
            return
        if type(value).__module__.startswith("torch.distributed"):
            return  # what gathers parameters and sums gradients keeps its own house
        self.seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if depth <= 2 and type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta:
                self.keep(value)
            return
        held = value if type(value) in (*CONTAINERS, tuple) else getattr(value, "__dict__", None)
        if not isinstance(held, (*CONTAINERS, tuple)):
            return
        if not isinstance(held, tuple):
            self.contents.append((held, held.copy()))
        inside = list(held.values()) if isinstance(held, dict) else list(held)
        for child in inside:
            self._walk(child, depth + 1)

    def keep(self, tensor: torch.Tensor) -> None:
        """Give a tensor its data back, too."""
        if not isinstance(tensor, nn.Parameter):
            self.tensors.append((tensor, tensor.detach().clone()))
            return
        self.gradients.append((tensor, tensor.grad))
        self.room -= tensor.nbytes
        if self.room >= 0:  # on the host: a device may be full
            self.tensors.append((tensor, tensor.detach().to("cpu", copy=True)))

    def changed(self) -> list[str]:
        """Names of attributes and keys that now hold something else."""
        names = []
        for held, before in self.contents:
            if isinstance(held, dict):
                keys = [k for k in {**before, **held} if k != "training"]
                names += [str(k) for k in keys if held.get(k, self) is not before.get(k, self)]
            elif not _same(held, before):
                names.append(f"a {type(held).__name__}")
        return list(dict.fromkeys(names))

    def restore(self) -> None:
        """Give everything its content back."""
        for held, before in self.contents:
            if not _same(held, before):
                refill(held, before)
        for tensor, before in self.tensors:
            if tensor.shape != before.shape:
                tensor.data = before.to(tensor.device)
                continue
            now = tensor.detach().to(before.device)
            if tensor.layout is not torch.strided or not torch.equal(now, before):  # sparse ones are not compared
                tensor.data.copy_(before)
        for tensor, gradient in self.gradients:
            tensor.grad = gradient


def _same(held: Any, before: Any) -> bool:
    if len(held) != len(before):
        return False
    if isinstance(held, dict):
        return all(a is b and held[a] is before[b] for a, b in zip(held, before, strict=True))
    return held == before if isinstance(held, set) else all(a is b for a, b in zip(held, before, strict=True))


class Generators:
    """torch's generators of some devices, Python's and NumPy's: their states, taken and given back."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices = devices

    def state(self) -> dict[str, Any]:
        """By name; NumPy's only where something has imported NumPy."""
        numpy = sys.modules.get("numpy")
        state: dict[str, Any] = {"torch's generator": torch.get_rng_state(), "Python's random": random.getstate()}
        for index in self.devices:
            state[f"CUDA's generator {index}"] = torch.cuda.get_rng_state(index)
        return state if numpy is None else {**state, "NumPy's random": numpy.random.get_state()}

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Generators:
        """Those of the devices that tensors are on."""
        return cls(tuple(sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})))

    def set(self, state: Mapping[str, Any]) -> None:
        """Give every generator the state it has in `state`."""
        for name, value in state.items():
            if name == "torch's generator":
                torch.set_rng_state(value)
            elif name == "Python's random":
                random.setstate(value)
            elif name == "NumPy's random":
                sys.modules["numpy"].random.set_state(value)
            else:
                torch.cuda.set_rng_state(value, int(name.rpartition(" ")[2]))

    def advance(self) -> None:
        """Move every generator on, to where a training loop's other draws might have left it."""
        torch.rand(3)
        for index in self.devices:
            torch.rand(3, device=f"cuda:{index}")
        random.random()
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.random()


@contextlib.contextmanager
def put_back(snapshot: Snapshot, generators: Generators) -> Iterator[None]:
    """Gradients on and warnings off in the block; at its end what `snapshot` holds and the generators as they were."""
    before = generators.state()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        snapshot.restore()
        generators.set(before)


@contextlib.contextmanager
def strangers_kept(
    outputs: Sequence[torch.Tensor], is_own: Callable[[torch.Tensor], bool], since: int
) -> Iterator[Callable[..., None]]:
    """Leave alone what a backward from `outputs` reaches and is not the step's: a loss's parameters, a hypernetwork.

    Gradients of parameters are put back, and their hooks hear of none; graphs from before the step are not entered, as
    their owner's backward would find them freed.

    Args:
        since: `next_node` as the step began.

    Yields:
        `torch.autograd.backward`.
    """
    leaves, all_new = _leaves_of(outputs, since)
    strangers = [leaf for leaf in leaves if not is_own(leaf)]
    with gradients_aside(strangers), hooks_aside(strangers):
        backward = torch.autograd.backward
        yield backward if all_new else functools.partial(backward, inputs=leaves) if leaves else lambda *_: None


@contextlib.contextmanager
def gradients_aside(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """No gradients in the block; at its end those from before."""
    before = [(t, t.grad) for t in tensors]
    for tensor, _ in before:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


@contextlib.contextmanager
def hooks_aside(parameters: Iterable[Any], instead: Callable[[Any], None] | None = None) -> Iterator[None]:
    """No hooks hear of the parameters' gradients in the block, except for `instead` of each once it is accumulated."""
    given = [p for p in parameters if p.requires_grad and p.is_leaf]
    hooks = [held for p in given for held in (p._backward_hooks, p._post_accumulate_grad_hooks) if held]
    before = [(held, dict(held)) for held in hooks]
    for held in hooks:
        held.clear()
    handles = [p.register_post_accumulate_grad_hook(instead) for p in given] if instead else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for held, hooks_then in before:
            held.update(hooks_then)


def _leaves_of(outputs: Iterable[torch.Tensor], since: int) -> tuple[list[torch.Tensor], bool]:
    """The leaves that outputs were computed from since then, and whether nothing else was."""

    def is_new(node: Any) -> bool:
        return hasattr(node, "variable") or node_number(node) >= since

    nodes = list(nodes_behind(outputs, enters=is_new))
    return [node.variable for node in nodes if hasattr(node, "variable")], all(map(is_new, nodes))
