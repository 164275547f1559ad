"""Recording what a forward reads while it is traced.

Attributes are seen by a `__getattribute__` that `nn.Module` and the classes of configs and other plain objects have for
the time of the trace: objects keep their types, and every way to an attribute leads through it. What a forward sets
before it reads it, seen by a `__setattr__`, is its own. Globals, methods and
closures are taken from the code that ran, seen by a profile function: what its names mean is recorded before it runs.
Torch's own ops are not looked into.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import gc
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch.nn.modules import module as module_file
from torch.overrides import TorchFunctionMode

from passes._torch import TORCH_FOLDER, FunctionalTensor, hashes_heard, wrapped_tensors
from passes.printable import describe_kind

from .arguments import StateEntry, state_tensors
from .closures import CACHE
from .expected import (
    LARGEST,
    LITERALS,
    MISSING,
    ON_THE_HEAP,
    Contents,
    Expected,
    Literal,
    Object,
    Same,
    State,
    Whole,
    compared_in,
    has_attributes,
    parts_of,
    stood_for,
)
from .getters import (
    HOOKS,
    NAMES,
    REGISTERED,
    Getter,
    by_attribute,
    by_path,
    by_plain_attribute,
    names_among,
    names_of,
    of_call,
    of_class,
    of_compiled,
    of_globals,
    of_hooks,
    of_instance,
    of_remembered,
)
from .lookups import computes_names, names_in
from .nodes import kept_by_torch, same
from .places import OUR_FOLDERS, is_users, is_users_file, place
from .reads import Known, Read, Reads
from .rerun import reads
from .settings import Setting, is_plain, tensors_in
from .structure import copies_in, flatten, held_objects
from .templates import Template, argument_path, object_paths
from .unregistered import Constant


class Recorder:
    """Collects the reads of one capture, in which the forward may run several times: the first value found counts."""

    def __init__(
        self, model: nn.Module, loss_fn: Any, entries: list[StateEntry], carried: Sequence[torch.Tensor] = ()
    ) -> None:
        self.model, self.loss_fn, self.entries = model, loss_fn, entries
        self.thread = threading.get_ident()
        self.state: dict[int, int] = {}
        self.objects: list[Any] = []
        self.known: list[Known] = []
        self.numbers: dict[int, int] = {}
        self.reads: dict[tuple[Any, ...], Read] = {}
        self.looked_at: set[tuple[int, str]] = set()
        self.written: dict[tuple[int, str], None] = {}  # plain attributes that were set before they were read
        self.stored: dict[tuple[int, str], None] = {}  # the others
        self.added_to: dict[tuple[int, str], Any] = {}  # what was in those that were read, and then set to an integer
        self.filled: set[tuple[int, str]] = set()  # those that were set to something else than None at first
        self.elsewhere: list[tuple[int, str, Any]] = []  # plain values that it set in other objects than modules
        self.entered: set[Any] = set()
        self.functions: dict[int, types.FunctionType] = {}
        self.watched: dict[type, dict[str, Any]] = {}
        self.opaque: dict[int, Any] = {}
        self.taken: list[torch.Tensor] = []
        self.open: set[int] = set()  # containers that are being taken apart
        self.room = _ROOM  # items of containers that may be
        self.registered: dict[tuple[int, Any, str], torch.Tensor] = {}
        self.said: dict[str, None] = {}
        self.said_of_types: dict[str, None] = {}
        self.in_backward = self.on = False
        self.marking = False  # whether what is read is read by what the backward runs
        self.late: set[tuple[Any, ...]] = set()
        self.identity = ""  # where forward asks which tensor one is
        self.carried, self.inputs = carried, set(map(id, carried))
        self.arguments: tuple[Expected, ...] | None = None
        self.copies: dict[int, Any] = {}
        for path, module in model.named_modules():
            self._add(module, path, is_submodule=True)

    def follow_backward(self) -> None:
        """Go on recording attributes that the user's code reads: custom functions and hooks of tensors run in it."""
        self.in_backward = self.marking = True
        self.looked_at = {*self.written, *self.stored}
        for kind in (nn.Module, *(known.kind for known in self.known)):
            if not issubclass(kind, nn.Module) or kind is nn.Module:
                self._watch(kind)

    def stop(self) -> None:
        """Undo `follow_backward`, or what an interrupt left of `recording`."""
        self.in_backward = self.marking = False
        while self.watched:
            kind, own = self.watched.popitem()
            for name, method in own.items():
                if method is not None:
                    type.__setattr__(kind, name, method)
                elif name in vars(kind):
                    type.__delattr__(kind, name)

    @contextlib.contextmanager
    def recording(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Record in the block, in which `tensors` stand for the model's parameters and buffers."""
        self.state = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.registered = self._registered()
        self.loss = self.snapshot(self.loss_fn, "loss_fn")
        before, collects, self.added_to = sys.getprofile(), gc.isenabled(), {}
        try:
            gc.disable()  # what a collection calls back is not the forward
            for kind in (nn.Module, *self.watched):
                self._watch(kind)
            sys.setprofile(self._profile)
            with hashes_heard(self._hashed), _NotInsideOps(self._profile, self._runs_late):
                self.on = True
                yield
        finally:
            self.on = False
            _profile_again(before)
            if collects:
                gc.enable()
            self.stop()
            self.registered = {}

    def take_arguments(self, bound: Mapping[str, Any], template: Template) -> None:
        """Record what forward reads of what it is given, too, where this run is the first that is recorded."""
        if not self.on or self.arguments is not None:
            return
        given = dict(bound)
        self.inputs |= {id(leaf) for leaf in flatten(given)[0]}
        self.copies = {id(each): each for each in copies_in(template, given)}
        values = held_objects(bound)
        found = [self.snapshot(v, argument_path(p)) for v, p in zip(values, object_paths(template), strict=True)]
        # Functions are the same by the key of a call; what their closures hold was noted.
        self.arguments = tuple(f if is_looked_into(v) else None for v, f in zip(values, found, strict=True))

    def take_numbers(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that Python took numbers from these: their changes in place count, also where the graph holds them."""
        self.taken += tensors

    def let_go(self) -> None:
        """Keep no copies of what the call was given, as these hold tensors of the trace."""
        self.objects = [None if id(each) in self.copies else each for each in self.objects]
        self.numbers = {each: number for each, number in self.numbers.items() if each not in self.copies}
        self.copies.clear()
        self._let_functions_go()

    def _let_functions_go(self) -> None:
        """Nor functions that forward made, and each call makes anew, with some in their closures: a tensor's hook."""
        cells = {each: [c for c in f.__closure__ or () if _of_a_trace(c)] for each, f in self.functions.items()}
        gone = {number for each, found in cells.items() if found for number in (each, *map(id, found))}
        self.functions = {each: f for each, f in self.functions.items() if each not in gone}
        self.reads = {key: read for key, read in self.reads.items() if id(read.holder) not in gone}

    def left(self, codes: Iterable[types.CodeType]) -> tuple[str, ...]:
        """Attributes of the model's modules that forward sets, whatever was there before.

        Of plain ones those that it does not read: others are `settings`.
        """
        found = {
            (i, name) for of_kind in (self.written, self.stored) for i, name in self._numbered(of_kind)
            if self.known[i].is_submodule and name not in kept_by_torch(self.objects[i])
        }  # fmt: skip
        values = {(i, name): by_attribute(self.objects[i])(name, MISSING) for i, name in found}
        left = [key for key, value in values.items() if not (is_plain(value) and reads(codes, key[1]))]
        return tuple(sorted(str(Setting(self.known[i].path, name, None)) for i, name in left))

    def settings(self) -> tuple[Setting, ...]:
        """What forward sets before it reads it, of attributes of the model's modules: plain values, and tensors."""
        written = [(i, name, by_attribute(self.objects[i])(name, MISSING)) for i, name in self._numbered(self.written)]
        plain = [each for each in written if is_plain(each[2])]
        filled = set(self._numbered(self.filled))  # and cleared in the end, where None is there now
        elsewhere = [(i, n, v) for i, n, v in plain if not self.known[i].is_submodule
                     and n not in kept_by_torch(self.objects[i])]  # fmt: skip
        self.elsewhere = [each for each in elsewhere if each[2] is not None or each[:2] not in filled]
        read = [(self.numbers[each], n, then) for (each, n), then in self.added_to.items() if each in self.numbers]
        now = [(i, name, by_attribute(self.objects[i])(name, None), then) for i, name, then in read]
        added = [(i, name, v, v - then) for i, name, v, then in now if type(v) is type(then) is int]
        tensors = [each for each in (*written, *self._stored()) if tensors_in(each[2])]
        every = (*((*each, None) for each in (*plain, *tensors)), *added)
        return tuple(Setting(self.known[i].path, *each) for i, *each in every if self.known[i].is_submodule)

    def _stored(self) -> Iterator[tuple[int, str, Any]]:
        for i, name in self._numbered(self.stored):
            if self.known[i].is_submodule and name in (own := object.__getattribute__(self.objects[i], "__dict__")):
                yield i, name, own[name]

    def set_as_before(self, codes: Iterable[types.CodeType]) -> tuple[str, ...]:
        """What else forward sets to what it is outside of the trace: globals, attributes of a loss function."""
        found = [(i, n, v) for i, n, v in self.elsewhere if self.objects[i] is not None]
        alike = [(i, n) for i, n, v in found if same(by_attribute(self.objects[i])(n, MISSING), v)]
        named, stored = ({n for code in codes for n in _globals(code, op)} for op in (_LOADS, _STORES))
        return (*(f"{self.known[i].path}.{n}" for i, n in alike), *(f"the global {n}" for n in sorted(stored - named)))

    @property
    def read_late(self) -> frozenset[str]:
        """The attributes that Python in the backward reads, as the user writes them."""
        own = ((self.known[i].path, name) for i, _, name in self.late if i < len(self.known))
        return frozenset(".".join(filter(None, ("self", path, name))) for path, name in own)

    def _numbered(self, attributes: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        return [(self.numbers[each], name) for each, name in attributes if each in self.numbers]

    def finish(self, graph_module: fx.GraphModule) -> Reads:
        """What was read; outside the model's modules, as it is after the trace."""
        self.state = {id(t): i for i, t in enumerate(state_tensors(self.model, self.entries))}
        self.marking = False
        self._come_to_otherwise()
        self.stop()
        by_object: dict[int, list[Read]] = {}
        fixed: list[Read] = []
        while self.reads:
            key = next(iter(self.reads))
            read = self._as_it_is_now(replace(self.reads.pop(key), late=key in self.late))
            (by_object.setdefault(read.holder.index, []) if isinstance(read.holder, Object) else fixed).append(read)
        nodes = graph_module.graph.find_nodes(op="get_attr")
        live = frozenset(id(getattr(graph_module, str(n.target), None)) for n in nodes)
        return Reads(
            tuple(self.entries), tuple(self.known), by_object, tuple(fixed), self.loss, live, self.arguments or (),
            frozenset(map(id, self.taken)),
        )  # fmt: skip

    def _as_it_is_now(self, read: Read) -> Read:
        holder = read.holder
        if isinstance(holder, Object):
            holder, known = self.objects[holder.index], self.known[holder.index]
            if known.is_submodule or holder is None:
                return read
        found = [read.getter(holder)(read.name, MISSING) for _ in range(2)]
        expected = self.snapshot(found[0], read.label)
        made_anew = isinstance(expected, Same) and found[0] is not found[1]
        return replace(read, expected=None if made_anew else expected)

    # Values ---------------------------------------------------------------------------------------------------------

    def snapshot(self, value: Any, path: str, depth: int = 0) -> Expected:
        """What a later call has to find in the place of `value`."""
        value = stood_for(value)
        if type(value) in LITERALS or (isinstance(value, numpy.generic) and not isinstance(value, numpy.void)):
            return Literal(value)
        if value is sys.modules:  # any import adds to it
            return None
        if isinstance(value, torch.Tensor):
            if id(value) in self.inputs:
                return None  # the key of a call has it
            if id(value) in self.state:
                return State(self.state[id(value)])
            if wrapped_tensors(value):
                return self._contents(value, parts_of(value) or [], path, depth)
            if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) and not is_users(type(value)):
                return None  # of the trace itself
            if vars(value):
                self.opaque.setdefault(id(value), value)
            return Constant.of(value)
        if id(value) in self.numbers:
            return Object(self.numbers[id(value)])
        parts = None if isinstance(value, enum.Enum) else parts_of(value)
        if parts is not None:
            return self._contents(value, parts, path, depth)
        if has_attributes(value):
            return self._add(value, path)
        self._discover(value)
        if id(value) not in self.opaque:
            self.opaque[id(value)] = value
            if not isinstance(value, types.ModuleType):
                self._opaque(value)
        return Same(value)

    def _contents(self, value: Any, parts: list[Any], path: str, depth: int) -> Expected:
        if len(parts) > self.room or (len(parts) > LARGEST and all(type(part) in LITERALS for part in parts)):
            return Whole(type(value), compared_in(value))
        if depth > _DEEPEST or id(value) in self.open:  # it holds itself
            return None
        self.room -= len(parts)
        self.open.add(id(value))
        taken = tuple(self.snapshot(part, path, depth + 1) for part in parts)
        self.open.discard(id(value))
        return Contents(type(value), taken)

    def _add(self, value: Any, path: str, is_submodule: bool = False) -> Object:
        number = self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        self.known.append(Known(type(value), path, is_submodule))
        self._special_methods(type(value))
        if not isinstance(value, nn.Module):
            self._watch(type(value))
        return Object(number)

    def _special_methods(self, kind: type) -> None:
        """Python looks them up by itself, and the functions may have other names; no `__init__` of what is there.

        Of torch's own those that run are seen as they do.
        """
        if kind in self.entered:
            return
        self.entered.add(kind)
        for name in [n for n in dir(kind) if n != "__init__"]:
            function = getattr(kind, name, None) if name.startswith("__") else None
            if isinstance(function, types.FunctionType) and (is_users(function) or name == "__call__"):
                self._class_attribute(kind, name)

    def _discover(self, value: Any) -> None:
        """A function reads its closure and defaults; a wrapper's function is one too."""
        cached = isinstance(value, CACHE)
        if cached:
            name = getattr(value, "__qualname__", type(value).__name__)  # a partial one has none
            self._read(value, of_remembered, "answers", f"the cache of {name}()")
        value = _function_of(value)
        if not isinstance(value, types.FunctionType) or (id(value) in self.functions and not self.marking):
            return
        self.functions[id(value)] = value
        where = f"function {value.__qualname__}"
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self._read(cell, by_attribute, "cell_contents", f"{name} in the closure of {value.__qualname__}")
        if cached:  # what it read when it ran is in what it remembers
            self._enter(value.__code__, None, value.__globals__)
        if is_users(value):  # of torch's, that it is this one is enough
            for name in ("__code__", "__defaults__", "__kwdefaults__", "__dict__"):
                self._read(value, by_attribute, name, where)

    def _read(self, holder: Any, getter: Callable[[Any], Getter], name: str, label: str) -> Any:
        """Record a read of what does not belong to the model; returns what is there."""
        value = getter(holder)(name, MISSING)
        key = (id(holder), getter, name)
        if self.marking:
            self.late.add(key)
        if key not in self.reads:
            self.reads[key] = Read(holder, getter, name, None, label)
            self.reads[key] = Read(holder, getter, name, self.snapshot(value, label), label)
        return value

    # Attributes -----------------------------------------------------------------------------------------------------

    def _watch(self, kind: type) -> None:
        if kind in self.watched:
            return
        usual: Any = kind.__getattribute__
        usually_set: Any = kind.__setattr__

        def __getattribute__(obj: Any, name: str) -> Any:
            if id(obj) in self.numbers and (id(obj), name) not in self.looked_at:
                self._look(obj, name, usual)
            elif self.in_backward and (id(obj), name) in self.stored:
                self.late.add((self.numbers[id(obj)], None, name))
            return usual(obj, name)

        def __setattr__(obj: Any, name: str, value: Any) -> None:
            if id(obj) in self.numbers and (id(obj), name) not in self.looked_at:
                self._set(obj, name, value)
            elif id(obj) in self.numbers and type(value) is int and isinstance(obj, nn.Module):
                own, of_class = object.__getattribute__(obj, "__dict__"), getattr(type(obj), name, None)
                self.added_to.setdefault((id(obj), name), own.get(name, of_class))
            usually_set(obj, name, value)

        new = {f.__name__: f for f in (__getattribute__, __setattr__)}
        try:
            self.watched[kind] = {name: vars(kind).get(name) for name in new}
            for name, method in new.items():
                type.__setattr__(kind, name, method)
        except TypeError:  # an immutable class, written in C
            del self.watched[kind]

    def _look(self, obj: Any, name: str, usual: Callable[[Any, str], Any]) -> None:
        caller = sys._getframe(2).f_code
        machinery = caller.co_filename == module_file.__file__ and caller.co_name in _MACHINERY
        if threading.get_ident() != self.thread or (machinery and name not in _READ_BY_MACHINERY):
            return
        if self.in_backward and not is_users_file(caller.co_filename):
            return
        self.looked_at.add((id(obj), name))
        if name in HOOKS:
            self._own(obj, "hooks", of_hooks)
            if self.numbers[id(obj)]:  # what is planned may be compiled later: its call is not the forward's
                self._own(obj, "compiled", of_compiled)
        elif name in _READ_AS_A_WHOLE:
            self._whole(obj)
        elif not (name.startswith("__") and name.endswith("__")):
            self._attribute(obj, name, usual)

    def _set(self, obj: Any, name: str, value: Any) -> None:
        """A plain attribute is the forward's own from here on: what it was before does not matter."""
        own = object.__getattribute__(obj, "__dict__") if isinstance(obj, nn.Module) else {}
        registered = any(name in own.get(table, ()) for table in REGISTERED)
        defined = next((vars(c)[name] for c in type(obj).__mro__ if name in vars(c)), None)
        described = hasattr(defined, "__set__") and not isinstance(defined, types.MemberDescriptorType)
        if described or threading.get_ident() != self.thread or self.in_backward:
            return
        plain = not (registered or isinstance(value, (torch.Tensor, nn.Module)))
        (self.written if plain else self.stored)[id(obj), name] = None
        if value is not None:
            self.filled.add((id(obj), name))
        if plain:
            self.looked_at.add((id(obj), name))
            self._class_attribute(type(obj), name)

    def _whole(self, obj: Any) -> None:
        if type(obj).__dictoffset__:
            self._own(obj, NAMES, names_of)
            for name in ("forward", *object.__getattribute__(obj, "__dict__")):
                self._own(obj, name)
        for kind in type(obj).__mro__:
            for name, value in vars(kind).items():
                if isinstance(value, types.MemberDescriptorType):
                    self._own(obj, name, by_attribute)

    def _attribute(self, obj: Any, name: str, usual: Callable[[Any, str], Any]) -> None:
        """The place where Python finds the attribute, and those where it looks before."""
        own = object.__getattribute__(obj, "__dict__") if type(obj).__dictoffset__ else None
        in_class = next((vars(c)[name] for c in type(obj).__mro__ if name in vars(c)), MISSING)
        if in_class is not MISSING:
            self._class_attribute(type(obj), name)
        if isinstance(in_class, types.MemberDescriptorType):
            self._own(obj, name, by_attribute)
        elif in_class is MISSING or not hasattr(type(in_class), "__set__"):
            found = own is not None and name in own
            tables = [t for t in REGISTERED if own and not found and name in own.get(t, ())]
            if own is not None and not tables:
                self._own(obj, name)
            if isinstance(obj, nn.Module):
                for table in tables or (() if found or in_class is not MISSING else REGISTERED):
                    self._own(obj, name, REGISTERED[table])
            elif in_class is MISSING and not found:
                self._own(obj, name, by_attribute)
            elif usual is not object.__getattribute__ and not hasattr(type(in_class), "__get__"):
                self._own(obj, name, by_attribute)  # `threading.local` has other attributes in each thread

    def _registered(self) -> dict[tuple[int, Any, str], torch.Tensor]:
        """What stands in the place of each parameter and buffer as the forward starts.

        What the forward puts there itself for a while (`torch.func.functional_call`) is not what a later call finds.
        """
        return {
            (number, REGISTERED[table], name): value
            for number, module in enumerate(self.objects) if self.known[number].is_submodule
            for table in ("_parameters", "_buffers")
            for name, value in object.__getattribute__(module, "__dict__")[table].items() if value is not None
        }  # fmt: skip

    def _own(self, obj: Any, name: str, getter: Callable[[Any], Getter] = of_instance) -> None:
        number = self.numbers[id(obj)]
        if self.marking:
            self.late.add((number, getter, name))
        if (number, getter, name) in self.reads:
            return
        place = Object(number)
        self.reads[number, getter, name] = Read(place, getter, name, None)
        value = getter(obj)(name, MISSING)
        if isinstance(value, torch.Tensor):
            value = self.registered.get((number, getter, name), value)
        path, kind = self.known[number].path, type(obj).__name__
        expected = self.snapshot(value, f"{path}.{name}".strip("."))
        self.reads[number, getter, name] = Read(place, getter, name, expected, f"{path or 'the model'} ({kind})")

    # Code -----------------------------------------------------------------------------------------------------------

    def _hashed(self, tensor: torch.Tensor) -> None:
        frame = sys._getframe(2)
        if self.on and id(tensor) in self.state and is_users_file(frame.f_code.co_filename):
            self.identity = place(frame)

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if called is id and event == "c_call" and is_users_file(code.co_filename):
            self.identity = place(frame)
        if event == "call" and threading.get_ident() == self.thread and _is_users(code) and not _is_ours(frame):
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            known = id(first) in self.numbers or (code.co_argcount and code.co_varnames[0] == "self")
            self._enter(code, first if isinstance(first, type) else type(first) if known else None, frame.f_globals)

    def _enter(self, code: types.CodeType, owner: type | None, names: dict[str, Any]) -> None:
        """Record what the code's names mean: globals, attributes of modules and classes, environment variables."""
        if (code, owner, id(names), self.marking) in self.entered:
            return
        self.entered.add((code, owner, id(names), self.marking))
        label, said = f"module {names.get('__name__', '?')}", names_in(code)
        self.said.update(dict.fromkeys(said))
        if not _ASK_FOR_TYPES.isdisjoint(said):
            self.said_of_types.update(dict.fromkeys(said))
        for name in said:
            if name in names and not (_is_data(names[name]) and _is_attribute(name, code)):
                self._named(self._read(names, of_globals, name, label), code)
            elif isinstance(imported := sys.modules.get(name), types.ModuleType):
                self._named(imported, code)
        for inner in code.co_consts:  # a hook of a tensor runs in the backward
            if isinstance(inner, types.CodeType):
                self._enter(inner, None, names)
        if computes_names(code) and not {"globals", "modules"}.isdisjoint(code.co_names):
            self._literals(names, label)
        if owner is not None:
            for name in (code.co_name, *said):
                self._class_attribute(owner, name)
            if not _ASK_FOR_TYPES.isdisjoint(said) or "cls" in code.co_varnames:  # on objects each name is seen
                self._computed(owner, code)
        if not {"environ", "getenv"}.isdisjoint(code.co_names):
            for name in filter(lambda c: isinstance(c, str), code.co_consts):
                self._read(os.environ, of_globals, name, "the environment")

    def _named(self, value: Any, code: types.CodeType) -> None:
        """The code may read attributes of the modules and classes that it names."""
        if isinstance(value, type):
            for name in names_in(code):
                self._class_attribute(value, name)
            self._computed(value, code)
            if issubclass(value, torch.autograd.Function):
                self._autograd_function(value)
        if self.marking and isinstance(value, types.FunctionType) and is_users(value):  # no profile function runs then
            self._enter(value.__code__, None, value.__globals__)
        if not isinstance(value, types.ModuleType) or (code, value, self.marking) in self.entered:
            return
        self.entered.add((code, value, self.marking))
        if value.__name__.startswith("torch"):
            self._settings(value, code)
        users = _is_users_file(getattr(value, "__file__", None) or "")
        if users and computes_names(code):
            self._literals(vars(value), f"module {value.__name__}")
        for name in names_in(code):
            found = vars(value).get(name, MISSING)
            if found is not MISSING and (users or callable(found) or isinstance(found, types.ModuleType)):
                self._named(self._read(vars(value), of_globals, name, f"module {value.__name__}"), code)

    def _computed(self, kind: type, code: types.CodeType) -> None:
        """Code that computes names may read all data of a class that it knows."""
        if computes_names(code):
            self._class_data(kind, dict.fromkeys(chain(*map(vars, kind.__mro__))))

    def _literals(self, space: dict[str, Any], label: str) -> None:
        """Code that computes names may read all numbers and strings of a module that it knows."""
        for name in [n for n, value in space.items() if type(value) in LITERALS and not n.startswith("__")]:
            self._read(space, of_globals, name, label)

    def _settings(self, module: types.ModuleType, code: types.CodeType) -> None:
        """What torch answers to code that asks for its settings: by functions, and by attributes that compute."""
        for name in code.co_names:
            label = f"{module.__name__}.{name}"
            if name in _SETTINGS and callable(function := getattr(module, name, None)):
                self._read(function, of_call, f"{name}()", label)
            elif hasattr(vars(type(module)).get(name), "__get__") and type(getattr(module, name)) in LITERALS:
                self._read(module, by_attribute, name, label)

    def _autograd_function(self, kind: type) -> None:
        """Torch calls these by name, and the backward after the forward."""
        if not is_users(kind):
            return
        for name in ("forward", "setup_context", "backward"):
            self._class_attribute(kind, name)
            if name == "backward":
                self._runs_late(getattr(kind, name), kind)
            elif isinstance(function := getattr(kind, name), types.FunctionType) and _is_users(function.__code__):
                self._enter(function.__code__, kind, function.__globals__)

    def _runs_late(self, function: Any, owner: type | None = None) -> None:
        """Record what a function that the backward calls reads, as far as its code tells."""
        while isinstance(function, (types.MethodType, functools.partial)):
            function = function.__func__ if isinstance(function, types.MethodType) else function.func
        if not isinstance(function, types.FunctionType) or not _is_users(function.__code__):
            return
        before, self.marking = self.marking, True
        try:
            self._discover(function)
            self._enter(function.__code__, owner, function.__globals__)
        finally:
            self.marking = before

    def _come_to_otherwise(self) -> None:
        """Reads of what was not come to by its name: the code that ran may have read any attribute that it says.

        Classes in attributes and containers, or asked of an object; modules; objects of Python's and of C's classes.
        """
        for kind in dict.fromkeys(known.kind for known in self.known):
            self._class_data(kind, self.said_of_types)
        places = {known.path: i for i, known in enumerate(self.known) if known.is_submodule}
        for entry, tensor in zip(self.entries, state_tensors(self.model, self.entries), strict=True):
            path, _, leaf = entry.name.rpartition(".")
            for name in [n for n in vars(tensor) if n in self.said and path in places]:
                self._own(self.objects[places[path]], f"{leaf}.{name}", by_path)
        done = 0
        while done < len(self.opaque):  # what is read may lead to further ones
            found = list(self.opaque.values())[done:]
            done += len(found)
            for value in found:
                self._opaque(value)
                if isinstance(value, threading.local):
                    self._read(value, names_among(frozenset(self.said)), NAMES, describe_kind(type(value)))

    def _opaque(self, value: Any) -> None:
        if isinstance(value, type):
            self._class_data(value, self.said)
            if issubclass(value, torch.autograd.Function):
                self._autograd_function(value)
        elif isinstance(value, torch.Tensor):
            for name in [n for n in vars(value) if n in self.said]:
                self._read(value, by_attribute, name, "a tensor")
        elif isinstance(value, types.ModuleType):
            # One of another class (transformers' lazy ones) changes as it is used.
            if type(value) is types.ModuleType and _is_users_file(getattr(value, "__file__", None) or ""):
                for name in [n for n in self.said if _is_data(vars(value).get(n, len))]:
                    self._read(vars(value), of_globals, name, f"module {value.__name__}")
        elif not (callable(value) or hasattr(type(value), "__get__") or type(value).__module__.startswith("torch")):
            kind, own = type(value), getattr(value, "__dict__", {})  # of this thread, of a `threading.local`
            held = {*own, *chain(*map(vars, kind.__mro__))}
            for name in [n for n in self.said if n in held and not n.startswith("__")]:
                if name in own:
                    self._read(value, by_attribute, name, describe_kind(kind))
                elif by_plain_attribute(value)(name, MISSING) is not MISSING:
                    self._read(value, by_plain_attribute, name, describe_kind(kind))

    def _class_data(self, kind: type, names: dict[str, None]) -> None:
        """Those of the names under which a class of the user's has data, a class, or a function that holds values."""
        held = chain(*(vars(c).items() for c in kind.__mro__ if is_users(c))) if is_users(kind) else ()
        for name in [n for n, v in held if n in names and (_is_data(v) or isinstance(v, type) or _holds_values(v))]:
            if not name.startswith("__"):
                self._class_attribute(kind, name)

    def _class_attribute(self, kind: type, name: str) -> None:
        """A name as the classes define it: where it is found, and in what comes before; of metaclasses the user's."""
        meta: Any = type(kind)
        look = (*kind.__mro__, *(c for c in meta.__mro__ if is_users(c)))
        defined = [c for c in look if name in vars(c)]
        if not defined or kind.__module__ == "builtins":
            return
        for each in look[: look.index(defined[-1]) + 1]:
            if each.__flags__ & ON_THE_HEAP:
                self._read(each, of_class, name, f"class {each.__qualname__}")


def _profile_again(before: Any) -> None:
    """Give the thread its profile function back; cProfile's object is not one, and is started again."""
    if hasattr(before, "enable"):
        sys.setprofile(None)
        before.enable()
    else:
        sys.setprofile(before)


class _NotInsideOps(TorchFunctionMode):
    """Suspends the profile function while torch works on an op, unless the op is handed a function."""

    def __init__(self, profile: Callable[..., None], runs_late: Callable[[Any], None]) -> None:
        super().__init__()
        self.profile, self.runs_late = profile, runs_late

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.register_hook:
            self.runs_late(args[1] if len(args) > 1 else kwargs.get("hook"))
        if any(map(callable, args)) or any(map(callable, kwargs.values())):
            return func(*args, **kwargs)
        sys.setprofile(None)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(self.profile)


def _of_a_trace(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionalTensor)
    except ValueError:  # it is empty
        return False


def _is_data(value: Any) -> bool:
    return not (callable(value) or isinstance(value, types.ModuleType) or hasattr(type(value), "__get__"))


def _holds_values(value: Any) -> bool:
    function = _function_of(value)
    held = ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")
    return isinstance(function, types.FunctionType) and any(getattr(function, name) for name in held)


def _function_of(value: Any) -> Any:
    """The function behind what wraps it."""
    for kind, attribute in _WRAPPERS.items():
        value = getattr(value, attribute) if isinstance(value, kind) else value
    return value


def _is_attribute(name: str, code: types.CodeType) -> bool:
    """Whether code says a name without reading the global: `x.step` where the loop counts a `step`."""
    return name in code.co_names and name not in _globals(code, _LOADS)


@functools.lru_cache(maxsize=4096)
def _globals(code: types.CodeType, ops: tuple[str, ...]) -> frozenset[str]:
    """Those that code reads or sets."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ops)


_LOADS, _STORES = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL",)


_ASK_FOR_TYPES = frozenset({"__class__", "__mro__", "type"})
_DEEPEST = 100
_ROOM = 200_000
_SETTINGS = frozenset({
    "are_deterministic_algorithms_enabled", "get_deterministic_debug_mode", "get_float32_matmul_precision",
    "get_num_interop_threads", "get_num_threads", "is_anomaly_check_nan_enabled", "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "is_warn_always_enabled",
})  # fmt: skip
_WRAPPERS = {
    property: "fget", staticmethod: "__func__", classmethod: "__func__", CACHE: "__wrapped__"
}  # fmt: skip
_READ_BY_MACHINERY = frozenset({"forward", *HOOKS})
_MACHINERY = frozenset({
    "__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward", "inner",
    "__getattr__", "__setattr__", "__delattr__", "register_buffer",  # which assigning a buffer calls
})  # fmt: skip
_READ_AS_A_WHOLE = frozenset({"__dict__", "__reduce_ex__", "__reduce__", "__getstate__", "__deepcopy__", "__copy__"})


def is_looked_into(value: Any) -> bool:
    """Whether an argument is compared by what forward reads of it, or by what it consists of."""
    if type(value) in LITERALS or isinstance(value, enum.Enum):
        return False
    return has_attributes(value) or parts_of(value) is not None


_OURS = frozenset({"planner", "passes", "solvers"})
_TORCH_NN = os.path.join(TORCH_FOLDER, "nn", "")
_PYTHON = os.path.join(sysconfig.get_paths()["stdlib"], "")


def _is_users(code: types.CodeType) -> bool:
    return _is_users_file(code.co_filename)


def _is_ours(frame: types.FrameType) -> bool:
    """Whether the code is what `dataclasses` wrote for us or for torch, which has no file."""
    root = str(frame.f_globals.get("__name__")).partition(".")[0]
    return root in _OURS or (root == "torch" and frame.f_code.co_filename.startswith("<"))


@functools.lru_cache(None)
def _is_users_file(file: str) -> bool:
    """Whether the code of this file is looked into: neither Python's own nor ours, and of torch only torch.nn."""
    if file.startswith(TORCH_FOLDER):
        return file.startswith(_TORCH_NN) and file != module_file.__file__
    if "site-packages" not in file and file.startswith(_PYTHON):
        return False
    return not file.startswith(("<frozen", *OUR_FOLDERS))


