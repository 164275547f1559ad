"""Where state can be reached from: attributes, containers, objects, classes, functions, what they name, generators."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes._torch import mutation_count

from .builtin_state import BUILTIN
from .closures import CACHE, visit_function
from .expected import bound_to, held_by
from .nodes import PLAIN, Node, Walk, refill
from .places import is_users

MAX_ITEMS = 10_000  # of one container that are followed; whether it changes itself is seen in any size
LARGEST_COPY = 1 << 24  # elements of a plain tensor or array that are copied; a larger one is only watched

_OF_MODULE = frozenset(nn.Module().__dict__)

_TENSORS_OF_MODULE = ("_parameters", "_buffers")  # the trace gives these other values

_ATOMS = (*PLAIN, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)

_FUNCTIONS = (
    types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.partial, CACHE,
)  # fmt: skip

_HOLDERS = frozenset({"collections", "types", "queue", "weakref", "argparse", "_thread"})  # whose objects hold others


def visit(walk: Walk, value: Any, path: str, name: str) -> None:
    """Add the nodes of one value, and follow what it holds."""
    value = bound_to(value)
    if isinstance(value, _ATOMS) and not isinstance(value, type):
        return
    if id(value) in walk.seen:
        walk.met_again.setdefault(id(value), []).append((path, name))
        return
    walk.seen[id(value)] = value
    for kinds, of_kind in _VISITORS:
        if isinstance(value, kinds):
            of_kind(walk, value, path, name)
            return
    for kinds, of_kind in BUILTIN:
        if isinstance(value, kinds):  # of a class derived from one there are attributes besides
            of_kind(walk, value, path, name)
    if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        _visit_object(walk, value, path, name)


def _visit_tensor(walk: Walk, tensor: torch.Tensor, path: str, name: str) -> None:
    if type(tensor) is not torch.Tensor:  # parameters and buffers are the graph's
        if isinstance(tensor, nn.Parameter) and id(tensor) not in walk.registered:
            _visit_parameter(walk, tensor, path, name)
        return
    small = tensor.numel() <= LARGEST_COPY and not tensor.is_meta and tensor.layout is torch.strided
    data = tensor.detach().clone() if small else None

    def give(_: Any) -> None:
        if data is not None:
            tensor.detach().copy_(data)

    walk.add(Node(tensor, path, name, "tensor", lambda: mutation_count(tensor), give))


def _visit_parameter(walk: Walk, parameter: nn.Parameter, path: str, name: str) -> None:
    """What hangs on one that nobody registers."""
    own = vars(parameter)

    def give(content: dict[str, Any]) -> None:
        parameter.grad = content["grad"]
        refill(own, {key: value for key, value in content.items() if key != "grad"})

    walk.add(Node(parameter, path, name, "attributes", lambda: {"grad": parameter.grad, **own}, give))


def _visit_optimizer(walk: Walk, optimizer: torch.optim.Optimizer, path: str, name: str) -> None:
    """Which state it has of each parameter, but not the numbers in that."""
    for held in (optimizer.state, *optimizer.state.values()):
        walk.add(Node(held, f"{path}.state", "state", "items", _shallow(held), _refiller(held)))


def _visit_module(walk: Walk, module: nn.Module, path: str, name: str) -> None:
    own = module.__dict__
    node = walk.add(Node(module, path, name, "attributes", lambda: dict(own), lambda c: refill(own, c)))
    for key, value in node.content.items():
        if key in _TENSORS_OF_MODULE:
            taken: Any = value
            node_path = f"{path}.{key}"
            walk.add(Node(taken, node_path, key, "names", _shallow(taken), _refiller(taken)))
            unregistered = taken.items() if id(module) not in walk.registered else ()
            walk.follow((tensor, f"{path}.{own_name}", own_name) for own_name, tensor in unregistered)
        elif key == "_modules" or key not in _OF_MODULE:
            walk.follow([(value, f"{path}.{key}", key)])
        elif type(value) in (dict, OrderedDict, set):  # hooks
            walk.add(Node(value, f"{path}.{key}", key, "names", _shallow(value), _refiller(value)))
            hooks = value.values() if isinstance(value, dict) else ()
            walk.follow_hooks((hook, f"a hook of {path}", key) for hook in hooks)
    walk.follow((cls, cls.__qualname__, cls.__name__) for cls in type(module).__mro__ if is_users(cls))


def _visit_object(walk: Walk, value: Any, path: str, name: str) -> None:
    if not is_users(type(value)) and type(value).__module__ not in _HOLDERS:
        return
    slots = [s for cls in type(value).__mro__ for s in _slots(cls) if hasattr(value, s)]
    own = getattr(value, "__dict__", None)

    def take() -> dict[str, Any]:
        held = dict(own) if isinstance(own, dict) else {}
        return held | {s: getattr(value, s) for s in slots if hasattr(value, s)}

    def give(content: dict[str, Any]) -> None:
        if isinstance(own, dict):
            refill(own, {k: v for k, v in content.items() if k not in slots})
        for slot in slots:
            object.__setattr__(value, slot, content[slot])

    node = walk.add(Node(value, path, name, "attributes", take, give))
    walk.follow((v, f"{path}.{k}", k) for k, v in node.content.items())
    if isinstance(value, (dict, list, tuple, set, deque)):  # a subclass of a container holds items too
        _visit_container(walk, value, path, name)
    walk.follow((cls, cls.__qualname__, cls.__name__) for cls in type(value).__mro__ if is_users(cls))


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(s for s in named if s not in ("__dict__", "__weakref__") and not s.startswith("__"))


def _visit_container(walk: Walk, value: Any, path: str, name: str) -> None:
    if not isinstance(value, tuple):
        walk.add(Node(value, path, name, "items", _shallow(value), _refiller(value)))
    pairs = held_by(value).items() if isinstance(value, dict) else enumerate(value)
    inner = itertools.islice(pairs, MAX_ITEMS)
    walk.follow([(v, f"{path}[{k!r}]" if isinstance(k, (int, str)) else path, name) for k, v in inner])


def _visit_class(walk: Walk, cls: type, path: str, name: str) -> None:
    if not is_users(cls):
        return

    def take() -> dict[str, Any]:
        return {k: v for k, v in vars(cls).items() if not k.startswith("__") and _is_data(v)}

    def give(content: dict[str, Any]) -> None:
        for key in take().keys() - content.keys():
            delattr(cls, key)
        for key, value in content.items():
            if vars(cls).get(key) is not value:
                setattr(cls, key, value)

    node = walk.add(Node(cls, path, name, "attributes", take, give))
    walk.follow((v, f"{path}.{k}", k) for k, v in node.content.items())
    functions = [f for f in vars(cls).values() if isinstance(f, _FUNCTIONS)]
    walk.follow((f, path, name) for f in functions)


def _visit_random(walk: Walk, generator: random.Random, path: str, name: str) -> None:
    walk.add(Node(generator, path, name, "generator", generator.getstate, generator.setstate))


def _visit_torch_generator(walk: Walk, generator: torch.Generator, path: str, name: str) -> None:
    def give(content: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    walk.add(Node(generator, path, name, "generator", lambda: generator.get_state().numpy().tobytes(), give))


def _visit_numpy(walk: Walk, value: Any, path: str, name: str) -> None:
    def fill(content: Any) -> None:
        value[...] = content

    kind = type(value).__name__
    if kind == "ndarray" and value.size <= LARGEST_COPY:
        walk.add(Node(value, path, name, "array", value.copy, fill))
        walk.follow((item, path, name) for item in itertools.islice(value.flat, MAX_ITEMS * value.dtype.hasobject))
    elif kind == "RandomState":
        walk.add(Node(value, path, name, "generator", lambda: value.get_state(legacy=False), value.set_state))
    elif kind == "Generator":
        bits = value.bit_generator
        walk.add(Node(
            value, path, name, "generator", lambda: copy.deepcopy(bits.state), lambda c: setattr(bits, "state", c),
        ))  # fmt: skip


class _NumpyKind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return type(value).__module__.startswith("numpy")


class _Numpy(metaclass=_NumpyKind):
    """Whatever numpy made; numpy itself is not imported for it."""


class _ContainerKind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, (dict, list, tuple, set, deque, bytearray)) and not is_users(type(value))


class _Container(metaclass=_ContainerKind):
    """A container of Python's own types."""


def _is_data(value: Any) -> bool:
    return not hasattr(type(value), "__get__") or isinstance(value, functools.partial)


def _shallow(value: Any) -> Callable[[], Any]:
    def take() -> Any:
        if isinstance(value, dict):
            return dict(held_by(value))
        kind: Any = next(k for k in (set, list, deque, bytearray) if isinstance(value, k))
        return (set if kind is set else list)(kind.__iter__(value))

    return take


def _refiller(value: Any) -> Callable[[Any], None]:
    return lambda content: refill(value, content)


_VISITORS: tuple[tuple[Any, Callable[[Walk, Any, str, str], None]], ...] = (
    (torch.Tensor, _visit_tensor),
    (nn.Module, _visit_module),
    (torch.optim.Optimizer, _visit_optimizer),
    (type, _visit_class),
    (_FUNCTIONS, visit_function),
    (random.Random, _visit_random),
    (torch.Generator, _visit_torch_generator),
    (_Numpy, _visit_numpy),
    (_Container, _visit_container),
)
