"""Python state that a forward could change: found from its modules, compared, and put back.

The walk starts at the modules and the loss function. It follows attributes, plain containers, objects, class
attributes, functions with their closures, defaults and the globals they name, and random generators; it takes a
shallow copy of each mutable thing that it meets, so that nested ones are compared where they are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import Unsupported
from .places import is_users, is_users_module, is_users_own, place, user_frame

MAX_NODES = 50_000
LARGEST_COPY = 1 << 24  # elements of a plain tensor or array that are copied; a larger one is only watched

_OF_MODULE = frozenset(nn.Module().__dict__)
_TENSORS_OF_MODULE = ("_parameters", "_buffers")  # the trace gives these other values
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_ATOMS = (*_PLAIN, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)
_ITERATORS = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})), type(iter({}.values())),
    type(iter({}.items())), type(reversed([])), type(iter("")), type(iter(set())), itertools.count, itertools.cycle,
    itertools.chain, itertools.islice, itertools.repeat, enumerate, zip, map, filter, types.GeneratorType,
)  # fmt: skip


_CACHE = functools._lru_cache_wrapper
_FUNCTIONS = (
    types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.partial, _CACHE,
)  # fmt: skip
_HOLDERS = frozenset({"collections", "types", "queue", "weakref", "argparse", "_thread"})  # whose objects hold others


class Missing:
    """What stands in a place that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


@contextlib.contextmanager
def really() -> Iterator[None]:
    """Read and write tensors as they are, also while something is traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@dataclass
class Node:
    """One mutable thing: how it is reached, and what it held.

    Attributes:
        path: as the user writes it (`self.block.seen`).
        name: the attribute, global or variable that holds it, by which code refers to it.
        kind: "attributes", "items", "generator", "tensor", "array", "iterator", "variable", ...
    """

    owner: Any
    path: str
    name: str
    kind: str
    take: Callable[[], Any]
    give: Callable[[Any], None]
    content: Any = field(init=False)

    def __post_init__(self) -> None:
        self.content = self.take()

    def refresh(self) -> None:
        """A tensor's version counts on when its data is put back; a cache that was cleared stays empty."""
        if self.kind in ("tensor", "cache"):
            self.content = self.take()


@dataclass(frozen=True)
class Change:
    """One place whose value differs from the snapshot's."""

    node: Node
    path: str
    name: str
    before: Any
    after: Any


class Held:
    """Stands for an iterator while a forward is traced."""

    def __init__(self, path: str, key: Any) -> None:
        self.path = f"{path}[{key!r}]" if isinstance(key, int) else f"{path}.{key}"

    def _refuse(self, *_: Any) -> Any:
        raise Unsupported(
            "an iterator advanced in forward", f"{self.path}, {place(user_frame(sys._getframe(1)))}",
            "it would be advanced once, while tracing, and not in the planned steps",
            "Advance it outside forward, and pass what it gives as an argument.",
        )  # fmt: skip

    __next__ = __iter__ = send = close = _refuse


class Snapshot:
    """The state that can be reached from a model, as it is now."""

    def __init__(self, model: nn.Module, *others: Any) -> None:
        self.nodes: list[Node] = []
        self._seen: dict[int, Any] = {}
        self._queue: deque[tuple[Any, str, str]] = deque()
        for prefix, module in model.named_modules():
            self._queue.append((module, f"self.{prefix}" if prefix else "self", ""))
        self._queue.extend((other, "loss_fn", "loss_fn") for other in others if other is not None)
        self._queue.append((random._inst, "Python's random", "random"))  # type: ignore[attr-defined]
        self._queue.append((torch.default_generator, "torch's random generator", "torch"))
        if (numpy := sys.modules.get("numpy")) is not None:
            self._queue.append((numpy.random.mtrand._rand, "numpy.random", "random"))
        with really():
            while self._queue and len(self.nodes) < MAX_NODES:
                self._visit(*self._queue.popleft())
        self._queue.clear()

    def changes(self, alike: Callable[[Any, Any], bool] | None = None) -> list[Change]:
        """Places that differ from what was taken."""
        with really():
            return [change for node in self.nodes for change in node_changes(node, alike or same)]

    def restore(self) -> None:
        """Put back what differs."""
        with really():
            for node in self.nodes:
                if next(node_changes(node, identical), None) is not None:
                    node.give(node.content)
                    node.refresh()

    @contextlib.contextmanager
    def iterators_held(self) -> Iterator[None]:
        """Let iterators and generators refuse to be advanced: what one has given out cannot be put back."""
        found = [(node, k, v) for node in self.nodes for k, v in _pairs(node.content) if isinstance(v, _ITERATORS)]
        try:
            for node, key, _ in found:
                node.content[key] = Held(node.path, key)
                node.give(node.content)
            yield
        finally:
            for node, key, value in found:
                node.content[key] = value
            self.restore()

    # The walk -------------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str, name: str) -> None:
        if (isinstance(value, _ATOMS) and not isinstance(value, type)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        for kinds, visit in _VISITORS:
            if isinstance(value, kinds):
                visit(self, value, path, name)
                return
        if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
            _visit_object(self, value, path, name)

    def add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def follow(self, values: Iterable[tuple[Any, str, str]]) -> None:
        self._queue.extend(values)


# What there is to visit ---------------------------------------------------------------------------------------------


def _visit_tensor(snapshot: Snapshot, tensor: torch.Tensor, path: str, name: str) -> None:
    if type(tensor) is not torch.Tensor:  # parameters and buffers are the graph's
        return
    small = tensor.numel() <= LARGEST_COPY and not tensor.is_meta and tensor.layout is torch.strided
    data = tensor.detach().clone() if small else None

    def give(_: Any) -> None:
        if data is not None:
            tensor.detach().copy_(data)

    snapshot.add(Node(tensor, path, name, "tensor", lambda: tensor._version, give))


def _visit_module(snapshot: Snapshot, module: nn.Module, path: str, name: str) -> None:
    own = module.__dict__
    node = snapshot.add(Node(module, path, name, "attributes", lambda: dict(own), lambda c: refill(own, c)))
    for key, value in node.content.items():
        if key in _TENSORS_OF_MODULE:
            taken: Any = value
            node_path = f"{path}.{key}"
            snapshot.add(Node(taken, node_path, key, "names", _shallow(taken), _refiller(taken)))
        elif key == "_modules" or key not in _OF_MODULE:
            snapshot.follow([(value, f"{path}.{key}", key)])
        elif type(value) in (dict, OrderedDict, set):  # hooks
            snapshot.add(Node(value, f"{path}.{key}", key, "names", _shallow(value), _refiller(value)))
    snapshot.follow((cls, cls.__qualname__, cls.__name__) for cls in type(module).__mro__ if is_users(cls))


def _visit_object(snapshot: Snapshot, value: Any, path: str, name: str) -> None:
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

    node = snapshot.add(Node(value, path, name, "attributes", take, give))
    snapshot.follow((v, f"{path}.{k}", k) for k, v in node.content.items())
    if isinstance(value, (dict, list, set, deque)):  # a subclass of a container holds items too
        _visit_container(snapshot, value, path, name)
    snapshot.follow((cls, cls.__qualname__, cls.__name__) for cls in type(value).__mro__ if is_users(cls))


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(s for s in named if s not in ("__dict__", "__weakref__") and not s.startswith("__"))


def _visit_container(snapshot: Snapshot, value: Any, path: str, name: str) -> None:
    if isinstance(value, tuple):
        snapshot.follow((v, f"{path}[{i}]", name) for i, v in enumerate(value))
        return
    node = snapshot.add(Node(value, path, name, "items", _shallow(value), _refiller(value)))
    pairs = node.content.items() if isinstance(value, dict) else enumerate(node.content)
    snapshot.follow((v, f"{path}[{k!r}]" if isinstance(k, (int, str)) else path, name) for k, v in pairs)


def _visit_class(snapshot: Snapshot, cls: type, path: str, name: str) -> None:
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

    node = snapshot.add(Node(cls, path, name, "attributes", take, give))
    snapshot.follow((v, f"{path}.{k}", k) for k, v in node.content.items())
    functions = [f for f in vars(cls).values() if isinstance(f, _FUNCTIONS)]
    snapshot.follow((f, path, name) for f in functions)


def _visit_function(snapshot: Snapshot, value: Any, path: str, name: str) -> None:
    inner = (value.__func__,) if isinstance(value, (staticmethod, classmethod)) else ()
    inner = (value.fget, value.fset) if isinstance(value, property) else inner
    if isinstance(value, types.MethodType):
        inner = (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        inner = (value.func, value.args, value.keywords)
    if isinstance(value, _CACHE):
        snapshot.add(Node(value, path, name, "cache", lambda: value.cache_info()[1::2], lambda _: value.cache_clear()))
        inner = (value.__wrapped__,)
    snapshot.follow((f, path, name) for f in inner)
    if not isinstance(value, types.FunctionType) or not is_users(value):
        return
    code = value.__code__
    for variable, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        _visit_cell(snapshot, cell, variable)
    last = code.co_varnames[: code.co_argcount][-len(value.__defaults__ or ()) :]
    defaults = {**dict(zip(last, value.__defaults__ or (), strict=False)), **(value.__kwdefaults__ or {})}
    snapshot.follow((v, f"the default {k}", k) for k, v in defaults.items())
    own = value.__dict__
    if own:
        snapshot.add(Node(value, value.__name__, value.__name__, "attributes", lambda: dict(own), lambda c: refill(own, c)))
        snapshot.follow((v, f"{value.__name__}.{k}", k) for k, v in own.items())
    _visit_globals(snapshot, value)


def _visit_cell(snapshot: Snapshot, cell: types.CellType, variable: str) -> None:
    if id(cell) in snapshot._seen:
        return
    snapshot._seen[id(cell)] = cell

    def take() -> dict[str, Any]:
        try:
            return {variable: cell.cell_contents}
        except ValueError:  # not bound yet
            return {}

    def give(content: dict[str, Any]) -> None:
        if variable in content:
            cell.cell_contents = content[variable]

    node = snapshot.add(Node(cell, "the enclosing function's ", variable, "variable", take, give))
    snapshot.follow((v, f"the enclosing function's {variable}", variable) for v in node.content.values())


def _visit_globals(snapshot: Snapshot, function: types.FunctionType) -> None:
    space, names = function.__globals__, sorted(set(_names(function.__code__)))
    modules = [space[n] for n in names if isinstance(space.get(n), types.ModuleType) and is_users_module(space[n])]
    if is_users_own(function):
        _visit_variables(snapshot, space, names, "the global ")
        for module in modules:
            _visit_variables(snapshot, vars(module), names, f"{module.__name__}.")
    else:
        kept = [n for n in names if isinstance(space.get(n), (*_PLAIN, _CACHE)) and space.get(n) is not None]
        _visit_variables(snapshot, space, kept, "the global ")


def _visit_variables(snapshot: Snapshot, space: dict[str, Any], names: list[str], what: str) -> None:
    def take() -> dict[str, Any]:
        return {n: space[n] for n in names if n in space and not isinstance(space[n], types.ModuleType)}

    def give(content: dict[str, Any]) -> None:
        for name in [n for n in take() if n not in content]:
            del space[name]
        space.update(content)

    node = snapshot.add(Node(space, what, "", "variable", take, give))
    snapshot.follow((v, what + k, k) for k, v in node.content.items())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _visit_random(snapshot: Snapshot, generator: random.Random, path: str, name: str) -> None:
    snapshot.add(Node(generator, path, name, "generator", generator.getstate, generator.setstate))


def scramble(generator: Any, seed: int) -> None:
    """Bring a generator of Python's or NumPy's into another state."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed)


def _visit_torch_generator(snapshot: Snapshot, generator: torch.Generator, path: str, name: str) -> None:
    snapshot.add(Node(
        generator, path, name, "generator", lambda: bytes(generator.get_state().numpy().tobytes()),
        lambda c: generator.set_state(torch.frombuffer(bytearray(c), dtype=torch.uint8)) and None,
    ))  # fmt: skip


def _visit_numpy(snapshot: Snapshot, value: Any, path: str, name: str) -> None:
    def fill(content: Any) -> None:
        value[...] = content

    kind = type(value).__name__
    if kind == "ndarray" and value.size <= LARGEST_COPY:
        snapshot.add(Node(value, path, name, "array", value.copy, fill))
    elif kind == "RandomState":
        snapshot.add(Node(value, path, name, "generator", lambda: value.get_state(legacy=False), value.set_state))
    elif kind == "Generator":
        bits = value.bit_generator
        snapshot.add(Node(
            value, path, name, "generator", lambda: copy.deepcopy(bits.state), lambda c: setattr(bits, "state", c),
        ))  # fmt: skip


class _NumpyKind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return type(value).__module__.startswith("numpy")


class _Numpy(metaclass=_NumpyKind):
    """Whatever numpy made; numpy itself is not imported for it."""


_VISITORS: tuple[tuple[Any, Callable[[Snapshot, Any, str, str], None]], ...] = (
    (torch.Tensor, _visit_tensor),
    (nn.Module, _visit_module),
    (type, _visit_class),
    (_FUNCTIONS, _visit_function),
    (random.Random, _visit_random),
    (torch.Generator, _visit_torch_generator),
    (_Numpy, _visit_numpy),
)


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set, deque, bytearray))


class _ContainerKind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return _is_container(value) and not is_users(type(value))


class _Container(metaclass=_ContainerKind):
    """A container of Python's own types."""


_VISITORS = (*_VISITORS, (_Container, _visit_container))


def _is_data(value: Any) -> bool:
    behaviour = (types.FunctionType, staticmethod, classmethod, property, types.MemberDescriptorType, types.GetSetDescriptorType)
    return not isinstance(value, behaviour) and not hasattr(type(value), "__get__")


def _pairs(content: Any) -> list[tuple[Any, Any]]:
    if isinstance(content, dict):
        return list(content.items())
    return list(enumerate(content)) if isinstance(content, list) else []


def _shallow(value: Any) -> Callable[[], Any]:
    def take() -> Any:
        return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)

    return take


def _refiller(value: Any) -> Callable[[Any], None]:
    return lambda content: refill(value, content)


def refill(container: Any, content: Any) -> None:
    """Give a container its content back; at no moment, not even for an interrupt, is what it held and holds missing."""
    if isinstance(container, (list, bytearray)):
        container[:] = content
        return
    if isinstance(container, deque):
        container.extend(content)
        while len(container) > len(content):
            container.popleft()
        return
    container.update(content)
    for extra in [k for k in container if k not in content]:
        container.remove(extra) if isinstance(container, set) else container.pop(extra)
    if isinstance(container, dict) and list(container) != list(content):
        for key in content:
            container[key] = container.pop(key)


# Comparing ----------------------------------------------------------------------------------------------------------


def identical(now: Any, before: Any) -> bool:
    """The same object, or an equal plain value."""
    return now is before or (type(now) is type(before) and isinstance(now, _PLAIN) and (now == before or now != now))


def same(now: Any, before: Any) -> bool:
    """As `identical`; a tuple by its items, a fresh bound method by what it binds."""
    if identical(now, before):
        return True
    if isinstance(now, types.MethodType) and type(before) is type(now):
        return now == before
    return type(now) is type(before) is tuple and len(now) == len(before) and all(map(same, now, before))


def alike(now: Any, before: Any, depth: int = 0) -> bool:
    """Whether two values are built equally; tensors count as equal where their shapes and types are."""
    if same(now, before) or depth > 6:
        return True
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return now.shape == before.shape and now.dtype == before.dtype
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return list(now) == list(before) and all(alike(now[k], before[k], depth + 1) for k in now)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(before) and all(alike(a, b, depth + 1) for a, b in zip(now, before, strict=True))
    if isinstance(now, (set, frozenset)):
        return len(now) == len(before)
    held, was = getattr(now, "__dict__", None), getattr(before, "__dict__", None)
    return held is not None and was is not None and alike(dict(held), dict(was), depth + 1)


def changed(change: Change) -> bool:
    """Whether the place of this change differs from the snapshot now."""
    with really():
        return any(c.path == change.path for c in node_changes(change.node, same))


def node_changes(node: Node, alike: Callable[[Any, Any], bool]) -> Iterator[Change]:
    """How one node differs from what was taken of it."""
    now, before = node.take(), node.content
    if isinstance(before, dict) and node.kind in ("attributes", "variable", "items", "names"):
        for key in dict.fromkeys([*before, *now]):
            a, b = now.get(key, MISSING), before.get(key, MISSING)
            if key not in _ignored(node) and not (identical if node.kind == "names" else alike)(a, b):
                yield _change(node, key, b, a)
    elif isinstance(before, list) and isinstance(now, list):
        if len(now) != len(before) or not all(map(alike, now, before)):
            yield Change(node, node.path, node.name, before, now)
    elif not _equal(now, before):
        yield Change(node, node.path, node.name, before, now)


def _change(node: Node, key: Any, before: Any, after: Any) -> Change:
    if node.name in ("_modules", *_TENSORS_OF_MODULE):
        return Change(node, f"{node.path.rpartition('.')[0]}.{key}", str(key), before, after)
    if node.kind == "items":
        return Change(node, f"{node.path}[{key!r}]", node.name, before, after)
    path = f"{node.path}{key}" if node.kind == "variable" else f"{node.path}.{key}"
    return Change(node, path, str(key), before, after)


def _ignored(node: Node) -> tuple[str, ...]:
    own = isinstance(node.owner, nn.RNNBase)  # its list of its weights
    return ("_flat_weights", "_flat_weight_refs") if own else ()


def _equal(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_equal(now[k], before[k]) for k in now)
    if type(now).__module__ == "numpy" and hasattr(now, "tobytes"):
        return now.dtype == before.dtype and now.shape == before.shape and now.tobytes() == before.tobytes()
    if isinstance(now, (tuple, list)):
        return len(now) == len(before) and all(map(_equal, now, before))
    return bool(now == before)
