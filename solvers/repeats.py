"""Parts of a step that repeat: transformer blocks, the steps of an unrolled LSTM.

The forward is read as a string whose letters are the ops' figures (cost, sizes, workspace). A stretch that repeats with
some period is cut into runs of several periods where the fewest bytes cross, and the backward where it begins to read
what is inside an earlier run. Runs are a proposal: who plans with them looks at each one for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .problem import Op, Problem

FEWEST_PERIODS = 4
SHORTEST_STRETCH = 32
ABOUT = 0.9
RUN_OPS = 60


@dataclass(frozen=True)
class Run:
    """One run of a repeated part: its ops in the forward, and those of its backward.

    Attributes:
        kind: runs of one kind have equal forward ops up to a shift of op and tensor numbers.
    """

    forward: range
    backward: range
    kind: int


def repeats(problem: Problem) -> tuple[Run, ...]:
    """The runs of the repeated parts of a step, in the order of the forward; none where nothing repeats."""
    letters, crossing = _letters(problem), _crossing_bytes(problem)
    pieces: list[range] = []
    for first, stop, period in sorted(_stretches(letters, 0, len(letters))):
        pieces += _pieces(crossing, first, stop, period)
    kinds: dict[bytes, int] = {}
    runs = []
    for piece, backward in zip(pieces, backward_of(problem, pieces), strict=True):
        kind = kinds.setdefault(letters[piece.start : piece.stop].tobytes(), len(kinds))
        runs.append(Run(piece, backward, kind))
    return tuple(run for run in runs if run.backward)


def _letters(problem: Problem) -> np.ndarray:
    """A number for each forward op: equal where costs and sizes are."""
    numbers: dict[tuple[object, ...], int] = {}
    return np.array([numbers.setdefault(_figures(problem, problem.ops[i]), len(numbers)) for i in problem.forward])


def _figures(problem: Problem, op: Op) -> tuple[object, ...]:
    written, read = (tuple(problem.tensors[t].bytes for t in group) for group in (op.outputs, op.inputs))
    return op.cost, op.workspace, op.recomputable, op.optional, written, read, len(op.reuse), len(op.replay_inputs)


def _crossing_bytes(problem: Problem) -> np.ndarray:
    """For each forward op, bytes written before it and read by it or by a later forward op."""
    change = np.zeros(problem.num_forward + 1, dtype=np.int64)
    for t, p in enumerate(problem.producer):
        last = max((r for r in problem.readers[t] if r < problem.num_forward), default=p)
        if p < last:
            change[p + 1] += problem.tensors[t].bytes
            change[last + 1] -= problem.tensors[t].bytes
    crossing: np.ndarray = np.cumsum(change)[:-1]
    return crossing


def _stretches(letters: np.ndarray, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(first, stop, period) of stretches that repeat, the longest first, then those on its sides."""
    found = _longest_stretch(letters[first:stop])
    if found is None:
        return
    begin, end, period = first + found[0], first + found[1], found[2]
    yield begin, end, period
    yield from _stretches(letters, first, begin)
    yield from _stretches(letters, end, stop)


def _longest_stretch(letters: np.ndarray) -> tuple[int, int, int] | None:
    """The longest stretch that repeats often enough, with the shortest period that covers about as much."""
    best: tuple[int, int, int] | None = None
    for period in range(1, len(letters) // FEWEST_PERIODS + 1):
        breaks = np.flatnonzero(np.concatenate(([True], letters[period:] != letters[:-period], [True])))
        widest = int(np.diff(breaks).argmax())
        begin, end = int(breaks[widest]), int(breaks[widest + 1]) - 1 + period
        long = end - begin >= max(SHORTEST_STRETCH, FEWEST_PERIODS * period)
        if long and (best is None or ABOUT * (end - begin) > best[1] - best[0]):
            best = begin, end, period
    return best


def _pieces(crossing: np.ndarray, first: int, stop: int, period: int) -> list[range]:
    """The stretch cut into equal pieces of a few periods, where the fewest bytes cross."""
    begin = min(range(first, first + period), key=lambda s: float(crossing[s:stop:period].mean()))
    count = (stop - begin) // period
    most = max(1, RUN_OPS // period)
    together = next((k for k in range(most, most // 2, -1) if count % k == 0), most)
    ends = [*range(0, count, together), count]
    return [range(begin + a * period, begin + b * period) for a, b in pairwise(ends)]


def backward_of(problem: Problem, pieces: Sequence[range]) -> list[range]:
    """For each piece the ops from the first that reads inside it or inside an earlier one, until those of the next."""
    owner = np.full(len(problem.ops), -1)
    for number, piece in enumerate(pieces):
        owner[piece.start : piece.stop] = number
    begins = [len(problem.ops)] * len(pieces)
    for t, p in enumerate(problem.producer):
        readers = problem.readers[t]
        if owner[p] >= 0 and all(r >= problem.num_forward or owner[r] == owner[p] for r in readers):
            begin = next((r for r in readers if r >= problem.num_forward), len(problem.ops))
            begins[owner[p]] = min(begins[owner[p]], begin)
    result, end = [], len(problem.ops)
    for begin in begins:
        result.append(range(min(begin, end), end))
        end = min(begin, end)
    return result
