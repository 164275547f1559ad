"""The walk of `metropolis` and the steps of `local`, compiled from `walk.c` where installing the package could.

The library calls nothing of Python, so `ctypes` loads it; while it runs, other threads do, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

from .live import Live
from .problem import LARGE, Problem
from .schedule import Recompute

LARGEST = 1 << 53  # cost of a step whose sums fit in 64 bits and are the same in floats
VERSION = 2  # of `walk.c`: a library that was built from another is left alone


def library_for(problem: Problem) -> ctypes.CDLL | None:
    """The library that annealing of a problem runs in; None where it runs in Python."""
    return library() if problem.step_cost < LARGEST else None


@cache
def library() -> ctypes.CDLL | None:
    """The library that was built beside this file; None where there is none."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_walk{suffix}")
        if path.exists():
            return loaded(path)
    return None


def loaded(path: Path) -> ctypes.CDLL | None:
    """The library in a file; None where it is of another version, or none that this machine can load."""
    try:
        lib = ctypes.CDLL(str(path))
        lib.walk_version.restype = ctypes.c_int64
        if lib.walk_version() != VERSION:
            return None
    except (OSError, AttributeError):  # built for another machine, or something else
        return None
    numbers, walk = ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p
    lib.walk_new.argtypes, lib.walk_new.restype = (numbers, ctypes.c_double, ctypes.c_double), walk
    lib.walk_moves.argtypes, lib.walk_moves.restype = (walk, ctypes.c_int64, ctypes.c_double, ctypes.c_double), None
    lib.walk_improve.argtypes, lib.walk_improve.restype = (walk, *[ctypes.c_int64] * 4), ctypes.c_int
    lib.walk_recomputes.argtypes = (walk, ctypes.c_int, numbers, ctypes.c_int64)
    lib.walk_recomputes.restype = ctypes.c_int64
    lib.walk_end.argtypes, lib.walk_end.restype = (walk,), None
    return lib


class CompiledWalk:
    """What `metropolis.Walk` and `local.Search` are, move by move and step by step; one walk does either."""

    def __init__(
        self, lib: ctypes.CDLL, live: Live, room: int, seed: int, op_cost: float, tensor_bytes: float
    ) -> None:
        self.lib, self.stride = lib, live.stride
        self.sections = np.array(list(_sections(live, room, seed)), dtype=np.int64)  # the library reads it throughout
        self.walk = lib.walk_new(_pointer(self.sections), op_cost, tensor_bytes)

    def __del__(self) -> None:
        if (walk := vars(self).get("walk")) is not None:
            self.lib.walk_end(walk)

    def moves(self, count: int, temperature: float, weight: float) -> None:
        """So many moves at one temperature, with the slots that are tight when they begin."""
        self.lib.walk_moves(self.walk, count, temperature, weight)

    def improve(self, first: int, count: int, steps: int, target_cost: int) -> bool:
        """So many steps of local search, as `local.Search` takes them, from a plan that fits."""
        return bool(self.lib.walk_improve(self.walk, first, count, steps, target_cost))

    def recomputes(self, best: bool) -> list[Recompute] | None:
        """Those of the state that the walk is in, or of the cheapest that fits; None where none was seen."""
        count = self.lib.walk_recomputes(self.walk, best, None, 0)
        if count < 0:
            return None
        keys = np.empty(count, dtype=np.int64)
        self.lib.walk_recomputes(self.walk, best, _pointer(keys), count)
        return [divmod(key, self.stride) for key in keys.tolist()]


def _pointer(numbers: np.ndarray) -> ctypes._Pointer[ctypes.c_int64]:
    return numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))


def _sections(live: Live, room: int, seed: int) -> Iterator[int]:
    """What `walk_new` reads, in its order."""
    problem, ops = live.problem, live.problem.ops
    replayed = [sorted({problem.producer[t] for t in op.replay_inputs}) for op in ops]
    yield from _section((len(ops), len(problem.tensors), room, seed, live.cost, problem.unit, len(ops) > LARGE))
    yield from _section(problem.producer)
    yield from _section(live.bytes)
    yield from _section(live.pinned)
    yield from _section([op.cost for op in ops])
    yield from _section(live.alloc)
    yield from _section([op.recomputable for op in ops])
    yield from _section(problem.evictable)
    yield from _lists(live.outputs)
    yield from _lists(live.replays)
    yield from _lists(live.reuse)
    yield from _lists([[p for p in found if ops[p].optional] for found in replayed])
    yield from _lists([problem.replayers.get(i, ()) for i in range(len(ops))])
    yield from _lists(live.events)
    yield from _lists(live.items)
    yield from _lists(live.slots_of)
    yield from _section(live.total.tolist())
    yield from _section(live.relative)
    yield from _section([live.optional_slot.get(i, -1) for i in range(len(ops))])
    yield from _section([live.key(slot, op) for slot, op in live.recomputes()])


def _section(numbers: Sequence[int]) -> Iterator[int]:
    yield len(numbers)
    yield from numbers


def _lists(lists: Iterable[Sequence[int]]) -> Iterator[int]:
    """Where each list begins, and where the last one ends; then all of them as one."""
    lists = list(lists)
    yield from _section(np.cumsum([0, *map(len, lists)]).tolist())
    yield from _section([number for numbers in lists for number in numbers])
