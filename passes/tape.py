"""What one run of an op asks a caching allocator for, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._torch import cuda_allocations, forget_cublas_workspaces


@dataclass(frozen=True)
class Tape:
    """The allocations and frees of one op.

    Attributes:
        events: `n > 0` asks for n bytes, as allocation 0, 1, ...; `-1 - k` frees allocation k.
        results: for each result the allocation that holds its storage, or None where the op did not make it.
        kept: each allocation that the first op to need it leaves behind for ever (a workspace of cuBLAS): how many
            events come before it, and its bytes.
    """

    events: tuple[int, ...]
    results: tuple[int | None, ...]
    kept: tuple[tuple[int, int], ...] = ()

    def workspace_bytes(self, granule: int) -> int:
        """The highest point above what is returned, each allocation rounded up to `granule`."""
        sizes = [-(-n // granule) * granule for n in self.events if n > 0]
        level = highest = made = 0
        for event in self.events:
            level += sizes[made] if event > 0 else -sizes[-1 - event]
            made += event > 0
            highest = max(highest, level)
        return highest - sum(sizes[k] for k in dict.fromkeys(self.results) if k is not None)


NO_TAPE = Tape((), ())


def record(run: Callable[[], Any], expected: Sequence[Any] | None = None) -> tuple[Tape, Sequence[Any]]:
    """The tape of `run()` on CUDA, and what it returns.

    It runs twice: what the first run leaves behind and the second does not ask for again is kept for ever.

    Args:
        expected: the results by the op's shape rule; one that is not a tensor there is dropped by the caller.
    """
    forget_cublas_workspaces()
    events, result = cuda_allocations(run)
    left = _left_behind(_tape(events, result, None))
    del result
    events, result = cuda_allocations(run)
    found = _tape(events, result, expected)
    for _, size in _left_behind(_tape(events, result, None)):
        same = next((entry for entry in left if entry[1] == size), None)
        if same is not None:
            left.remove(same)
    return Tape(found.events, found.results, tuple(left)), _several(result)


def _several(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else [result]


def _tape(events: Sequence[tuple[int, int]], result: Any, expected: Sequence[Any] | None) -> Tape:
    """Events as `(address, size)`, a negative size being a free, with the results found at their addresses."""
    live: dict[int, int] = {}
    made, tape = 0, []
    for address, size in events:
        if size >= 0:
            live[address] = made
            made += 1
            tape.append(size)
        elif address in live:
            tape.append(-1 - live.pop(address))
    results = []
    for i, value in enumerate(_several(result)):
        dropped = expected is not None and i < len(expected) and not isinstance(expected[i], torch.Tensor)
        held = isinstance(value, torch.Tensor) and not dropped
        results.append(live.get(value.untyped_storage().data_ptr()) if held else None)
    return Tape(tuple(tape), tuple(results))


def _left_behind(tape: Tape) -> list[tuple[int, int]]:
    """Sizes of allocations that were neither freed nor returned, each after how many of the other events."""
    gone = {-1 - n for n in tape.events if n < 0} | set(tape.results)
    left, made, others = [], 0, 0
    for event in tape.events:
        kept = event > 0 and made not in gone
        if kept:
            left.append((others, event))
        made += event > 0
        others += not kept
    return left
