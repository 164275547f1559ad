"""lookups: the names under which code may look for attributes and globals: those it says, and those it computes."""

from __future__ import annotations

import dis
import functools
import types
from itertools import chain

_SPACES = frozenset({"__dict__", "globals", "vars"})
_BY_NAME = frozenset({"attrgetter", "getattr", "getattr_static", "hasattr"})
_LOOKUPS = frozenset({"import_module", "modules", *_BY_NAME, *_SPACES})


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that code says, and the strings that it may look up as names."""
    if _LOOKUPS.isdisjoint(code.co_names):
        return code.co_names
    parts = chain(*(c if isinstance(c, (tuple, frozenset)) else (c,) for c in code.co_consts))
    strings = sorted({s for s in parts if isinstance(s, str) and all(p.isidentifier() for p in s.split("."))})
    return tuple(dict.fromkeys((*code.co_names, *strings)))


@functools.lru_cache(maxsize=4096)
def computes_names(code: types.CodeType) -> bool:
    """Whether code looks up a name that it does not say: `getattr(config, f"scale_{kind}")`, `vars(config)[key]`."""
    names = frozenset(code.co_names)
    if _BY_NAME.isdisjoint(names) and _SPACES.isdisjoint(names):
        return False
    steps = list(dis.get_instructions(code))
    by_key = any(map(_is_by_computed_key, steps, steps[1:]))
    if not _SPACES.isdisjoint(names) and ("get" in names or by_key):
        return True
    return any(step.argval in _BY_NAME and not _is_said(steps, k) for k, step in enumerate(steps))


def _is_by_computed_key(before: dis.Instruction, step: dis.Instruction) -> bool:
    """Whether an instruction looks an item up whose key the one before does not load as a constant."""
    return (step.opname == "BINARY_SUBSCR" or step.argrepr == "[]") and before.opname != "LOAD_CONST"


def _is_said(steps: list[dis.Instruction], k: int) -> bool:
    """Whether the second argument of the call of what instruction `k` loads is a constant; False where it is not told.

    What the code pushes between the two is followed in order: past a jump it may be said, and is not found to be.
    """
    depth, second = 0, k
    for i in range(k + 1, len(steps)):
        depth += dis.stack_effect(steps[i].opcode, steps[i].arg)
        if depth <= 0:  # the arguments are taken
            return steps[second].opname == "LOAD_CONST" and "CALL" in steps[i].opname and steps[k].opname != "LOAD_ATTR"
        if depth == 1:
            second = i + 1
        elif depth == 2 and i != second:
            second = k  # computed of constants
    return False
