"""Whether state that a forward changed matters to the next step: the forward runs again from the state it left.

`Script` writes down what a run asks of torch, each tensor under the name of how it was computed. A tensor made of
constants alone that the first run remembered (a causal mask, rotary tables) goes under the same name when the second
run finds it, so remembering changes nothing; a tensor made of inputs, parameters or randomness that the second run
finds is another step's.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from passes._torch import TorchDispatchMode, is_traced, outside_tracing, pytree

from .guards import writes
from .nodes import Change, changed
from .places import is_users_file, place, user_frame
from .reach import LARGEST_COPY

_BY_SHAPE = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch, ("zeros_like", "ones_like", "empty_like", "full_like")),
        (torch.Tensor, ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")),
    )
    for name in names
)


class Stale(Exception):
    """A tensor of an earlier step was read; `where` says at which place."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class _Draws(TorchDispatchMode):
    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.script.lines.append(f"draw {func}")
            self.script.draws += 1
        return func(*args, **(kwargs or {}))


class Script(TorchFunctionMode):
    """What a run of the forward asked of torch.

    Args:
        given: the run's tensors by name; the names in `constants` count as constants.
        earlier: the script of the run before, some of whose tensors this run may find on the modules.
        held: places of those that were there before both, by id. Of two with the same data one may change later.
    """

    def __init__(
        self, given: Mapping[str, torch.Tensor], constants: Iterable[str], earlier: Script | None = None,
        held: Mapping[int, str] = types.MappingProxyType({}),
    ) -> None:  # fmt: skip
        super().__init__()
        pure = set(constants)
        self.names = {id(t): (name, name in pure) for name, t in given.items()}
        self.kept: list[Any] = list(given.values())  # an id stands for its tensor only while that lives
        self.earlier, self.held, self.lines, self.draws, self.watch = earlier, held, list[str](), 0, _Draws(self)

    def __enter__(self) -> Any:
        self.watch.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.watch.__exit__(*error)

    def name_of(self, leaf: Any) -> tuple[str, bool]:
        """A value's name, and whether it is made of constants alone."""
        if not isinstance(leaf, torch.Tensor):
            return _shown(leaf), True
        if (known := self.names.get(id(leaf))) is not None:
            return known
        if self.earlier is not None and (found := self.earlier.names.get(id(leaf))) is not None:
            if not found[1]:
                raise Stale(place(user_frame(sys._getframe(1))))
            return found
        held = self.held.get(id(leaf), "")
        return f"{tuple(leaf.shape)} {leaf.dtype} {_data(leaf)} {held}", not leaf.requires_grad

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = [self.name_of(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        drawn = self.draws
        result = func(*args, **kwargs)
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if func in _BY_SHAPE:
            named = [(f"{tuple(made[0].shape)} {made[0].dtype}", True)] if made else []
        changed = self.written(func, args, kwargs)
        pure = self.draws == drawn and all(p for _, p in named)
        if not made and not changed:
            self.told(func, result, pure)
            return result
        line = f"{_function(func)}({', '.join(n for n, _ in named)}) {torch.is_grad_enabled()}"
        if not pure:
            self.lines.append(line)
        for i, tensor in enumerate([*made, *changed]):
            self.name(tensor, f"{hash(line)}.{i}", pure)
        return result

    def written(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """What a call has written into."""
        if not writes(func, kwargs):
            return []
        first = kwargs.get("out", args[0] if args else None)
        return [t for t in (first, getattr(first, "_base", None)) if isinstance(t, torch.Tensor)]

    def name(self, tensor: torch.Tensor, name: str, pure: bool) -> None:
        """Note how a tensor was computed, and whether of constants alone."""
        self.names[id(tensor)] = (name, pure)
        self.kept.append(tensor)

    def told(self, func: Any, result: Any, pure: bool) -> None:
        """Hear of a call that makes no tensor."""


_SHOWN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, slice, type(...))


def _shown(leaf: Any) -> str:
    if isinstance(leaf, _SHOWN):
        return repr(leaf)
    if type(leaf).__module__ == "numpy":
        return f"{leaf!r} {hash(leaf.tobytes())}" if hasattr(leaf, "tobytes") else repr(leaf)
    return type(leaf).__qualname__


def _data(tensor: torch.Tensor) -> int:
    """What distinguishes a real tensor that no run was given; 0 for a traced one."""
    # Rows of a traced one, of which its `tolist` asks, are plain but for that.
    plain = type(tensor) is torch.Tensor and not is_traced(tensor)
    if not plain or tensor.numel() > LARGEST_COPY or tensor.device.type != "cpu":
        return 0
    with outside_tracing():
        return hash(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else 0


def _function(func: Any) -> str:
    name: str = getattr(func, "__qualname__", "") or getattr(func, "__name__", "")
    owner = getattr(getattr(func, "__self__", None), "__name__", "") if "__" in name else ""
    return f"{owner}.{name}"


# Where it happens ---------------------------------------------------------------------------------------------------


class _Found(BaseException):
    """The line was found: nothing more has to run."""


def line_of_change(run: Callable[[], Any], change: Change) -> str:
    """The line of the user's code that changes this place, found by running the forward once more; "" if none."""
    if sys.gettrace() is not None:  # a debugger's
        return ""
    last: list[str] = [""]

    def line(frame: types.FrameType, event: str, _: Any) -> Any:
        if changed(change):
            raise _Found
        if event != "return":
            last[0] = place(frame)
        return line

    def call(frame: types.FrameType, event: str, _: Any) -> Any:
        return line if is_users_file(frame.f_code.co_filename) else None

    sys.settrace(call)
    try:
        run()
    except _Found:
        return last[0]
    except Exception:  # noqa: BLE001 - it ran before; whatever it is now, the place stays unknown
        return ""
    finally:
        sys.settrace(None)
    return last[0] if changed(change) else ""


# Whether code reads a name ------------------------------------------------------------------------------------------


_WRITERS = frozenset({"append", "extend", "add", "update", "insert", "appendleft", "extendleft", "clear", "discard"})


def reads(codes: Iterable[types.CodeType], name: str) -> str:
    """Where one of these functions reads what is called `name`, other than to change it; "" where none does."""
    for code in codes:
        if not _mentions(code, name):
            continue
        nodes = _nodes_in(code)
        if nodes is None:
            return f"{code.co_filename}:{code.co_firstlineno}"
        for node, parents in nodes:
            if _is_read(node, parents, name):
                text = linecache.getline(code.co_filename, node.lineno).strip()
                return f"{code.co_filename}:{node.lineno} `{text}`"
    return ""


def only_adds_to(codes: Iterable[types.CodeType], name: str) -> bool:
    """Whether all that these functions do with what is called `name` is `+=` or `-=`."""
    found = [_nodes_in(code) for code in codes if _mentions(code, name)]
    said = [pair for nodes in found if nodes is not None for pair in nodes if _called(pair[0]) == name]
    added = (isinstance(p[-1], ast.AugAssign) and isinstance(p[-1].op, (ast.Add, ast.Sub)) for node, p in said)
    return None not in found and bool(said) and all(added)


def _called(node: Any) -> Any:
    return node.value if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else node.id


def is_named(codes: Iterable[types.CodeType], name: str) -> bool:
    """Whether a function names this attribute or variable, as opposed to computing its name."""
    return any(_mentions(code, name) for code in codes)


def _mentions(code: types.CodeType, name: str) -> bool:
    return name in (*code.co_names, *code.co_freevars, *code.co_cellvars, *code.co_varnames, *code.co_consts)


def _is_read(node: Any, parents: tuple[ast.AST, ...], name: str) -> bool:
    if isinstance(node, ast.Constant):
        written = isinstance(parents[-1], ast.Subscript) and not isinstance(parents[-1].ctx, ast.Load)
        return node.value == name and not written and not isinstance(parents[-1], ast.Expr)
    if _called(node) != name or not isinstance(node.ctx, ast.Load):
        return False
    above = list(parents)
    while above and isinstance(above[-1], ast.Subscript) and isinstance(above[-1].ctx, ast.Load):
        above.pop()
    if above and isinstance(above[-1], (ast.Subscript, ast.Attribute)):
        holder = above.pop()
        if isinstance(holder, (ast.Subscript, ast.Attribute)) and not isinstance(holder.ctx, ast.Load):
            return False
        statement = [type(p) for p in above[-2:]] == [ast.Expr, ast.Call]
        return not (statement and isinstance(holder, ast.Attribute) and holder.attr in _WRITERS)
    return True


def _nodes_in(code: types.CodeType) -> Iterator[tuple[Any, tuple[ast.AST, ...]]] | None:
    parsed = _parsed(code.co_filename)
    lines = {line for _, _, line in code.co_lines() if line is not None}
    return None if parsed is None else ((n, p) for n, p in parsed if getattr(n, "lineno", None) in lines)


@functools.lru_cache(maxsize=32)
def _parsed(path: str) -> list[tuple[Any, tuple[ast.AST, ...]]] | None:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return None
    found: list[tuple[Any, tuple[ast.AST, ...]]] = []
    pending: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while pending:
        node, parents = pending.pop()
        if isinstance(node, (ast.Attribute, ast.Name, ast.Constant)):
            found.append((node, parents[-6:]))
        pending.extend((child, (*parents[-6:], node)) for child in ast.iter_child_nodes(node))
    return found if found else None
