"""Constraint 6 of the staged program: what is held while an op runs again, or is itself run twice.

Say that i is recomputed in stage k, that t is live at the end slot of k, and that w is t, or what t's op reads, or what
that one's op reads, and so on. If nothing from t to w is live while i runs, all of them are written later in the stage,
the op of w among others. If w has been live in the stage before i runs and was not when the stage began, its op has
run there before, so it runs twice. A path from w to i whose tensors are not resident when the stage begins shows that
w has been live. So, for each chain t..w of tensors written in earlier stages, which i neither reads nor writes,

    bytes live of t..w while i runs >= least bytes of t..w * (live at the end slot(t) + R[i, k] - 1
                                       - sum of A[u, k] over the path - sum of A[v, k] over t..w - Q[prod(w), k])

where a tensor of the chain that was resident when the stage began makes the right side zero or less, so that what
constraint 4 counts of it is not counted twice. A row takes chains that have no tensor in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .peaks import Peaks, Rows
from .stages import COEFFICIENT_LIMIT, Stages

LEAST = 1e-6
MOST_ROWS = 60
MOST_LINKS = 60
FAR = 9.0
ROOM = 1e-6

Paths = dict[int, tuple[float, tuple[int, ...]]]


class Chain(NamedTuple):
    """A chain t..w: `least_bytes` of it are live to the degree `value`."""

    tensors: tuple[int, ...]
    least_bytes: int
    value: float


class Stage(NamedTuple):
    """A solution's values in one stage, by tensor.

    Attributes:
        kept: A[t, k], for the tensors that are written in earlier stages.
        twice: Q[prod(t), k].
        wanted: how far it is live at the end slot.
    """

    kept: dict[int, float]
    twice: dict[int, float]
    wanted: dict[int, float]


class Twice:
    """The rows of constraint 6 that a solution of one model breaks."""

    def __init__(self, model: Stages, peaks: Peaks) -> None:
        self.model, self.problem, self.peaks = model, model.problem, peaks
        self.inputs = [tuple(dict.fromkeys(op.inputs)) for op in self.problem.ops]
        self.sizes = [t.bytes for t in self.problem.tensors]
        self.of_stage: dict[int, list[int]] = {}
        for j, (_, k) in enumerate(peaks.runs):
            self.of_stage.setdefault(k, []).append(j)
        self.made = 0

    def rows(self, values: np.ndarray, left_sides: np.ndarray) -> Rows:
        """Rows that `values` break, those by most bytes first; `left_sides` are those of constraint 4."""
        sides = left_sides[self.peaks.slots :].tolist()
        found = [row for k in self.of_stage for row in self._broken(k, values, sides)] if self.model.Q else []
        found.sort(key=lambda row: (-row[0], row[1]))
        made = [self._row(j, chains, paths) for _, j, chains, paths in found[:MOST_ROWS]]
        self.made += len(made)
        starts = np.cumsum([0, *(len(columns) for columns, _ in made)])
        columns = np.array([c for row, _ in made for c in row], dtype=np.int64)
        coefficients = np.array([v for row, _ in made for v in row.values()], dtype=float)
        names = -np.arange(self.made - len(made), self.made) - 1  # moments are not negative
        return Rows(names, starts, columns, coefficients, np.array([limit for _, limit in made], dtype=float))

    def _broken(
        self, k: int, values: np.ndarray, sides: list[float]
    ) -> Iterator[tuple[float, int, list[Chain], list[tuple[int, ...]]]]:
        """(bytes over the budget, run, chains, the path of each) of the runs of a stage."""
        stage = self._stage(k, values)
        paths: dict[int, Paths] = {}
        for j in self.of_stage[k] if stage.wanted else ():
            i = self.peaks.runs[j][0]
            paths[i] = self._paths(i, stage, paths)
            run, over = float(values[self._column(self.model.R[i, k])]), sides[j] - self.model.budget_bytes
            if run + max(stage.wanted.values()) <= 1 or over + self._most_bytes(run, stage) <= 0:
                continue
            chains = self._chains(i, run, stage, paths[i])
            over += sum(chain.least_bytes * chain.value for chain in chains)
            if over > LEAST * self.model.budget_bytes:
                yield over, j, chains, [paths[i][chain.tensors[-1]][1] for chain in chains]

    def _stage(self, k: int, values: np.ndarray) -> Stage:
        model, found = self.model, Stage({}, {}, {})
        read = set(self.problem.ops[model.ends[k]].inputs)
        for t in model.decided_tensors:
            if model.home[t] >= k:
                continue
            found.kept[t] = self._value(model.A.get((t, k)), values)
            again = model.Q.get((self.problem.producer[t], k))
            if again is not None:
                found.twice[t] = self._value(again, values)
            wanted = 1.0 if t in read else self._value(model.A.get((t, k + 1)), values)
            if wanted - found.kept[t] > LEAST:
                found.wanted[t] = wanted
        return found

    def _most_bytes(self, run: float, stage: Stage) -> float:
        return sum(self.sizes[t] * max(0.0, w + run - 1 - stage.kept[t]) for t, w in stage.wanted.items())

    def _paths(self, i: int, stage: Stage, paths: dict[int, Paths]) -> Paths:
        """For each tensor that a run of i shows to have been live: the least sum of A over a path, and the path."""
        found: Paths = {}
        direct = [u for u in self.inputs[i] if u in stage.kept]
        for u in direct:
            kept = stage.kept[u]
            for w, (least, path) in paths.get(self.problem.producer[u], {}).items() if kept < 1 - LEAST else ():
                if least + kept < min(1.0, found.get(w, (1.0, ()))[0]):
                    found[w] = least + kept, (u, *path)
        found.update((u, (0.0, ())) for u in direct)
        return found

    def _chains(self, i: int, run: float, stage: Stage, paths: Paths) -> list[Chain]:
        """Chains that have no tensor in common, and none with what i reads and writes."""
        used, found = {*self.inputs[i], *self.problem.ops[i].outputs}, []
        for t, wanted in stage.wanted.items():
            chain = None if t in used else self._chain(t, wanted + run - 1, stage, paths, used)
            if chain is not None:
                found.append(chain)
                used.update(chain.tensors)
        return found

    def _chain(self, t: int, value: float, stage: Stage, paths: Paths, used: set[int]) -> Chain | None:
        """The chain from t that most bytes are live of."""
        best, most = None, LEAST * self.sizes[t]
        stack, seen = [Chain((t,), self.sizes[t], value - stage.kept[t])], {t}
        for _ in range(MOST_LINKS):
            if not stack:
                break
            tensors, size, value = chain = stack.pop()
            w = tensors[-1]
            live = value - paths.get(w, (FAR,))[0] - stage.twice.get(w, FAR)
            if live * size > most:
                best, most = chain._replace(value=live), live * size
            for u in self.inputs[self.problem.producer[w]]:
                if u in stage.kept and u not in used and u not in seen:
                    further = Chain((*tensors, u), min(size, self.sizes[u]), value - stage.kept[u])
                    if further.least_bytes * further.value > most:
                        seen.add(u)
                        stack.append(further)
        return best

    def _row(self, j: int, chains: list[Chain], paths: list[tuple[int, ...]]) -> tuple[dict[int, float], float]:
        """Coefficients by column, and the limit; scaled so that they stay small."""
        (i, k), model = self.peaks.runs[j], self.model
        found: dict[int, int] = {-1: int(self.peaks.run_bytes[j])}

        def add(column: int, size: int) -> None:
            found[column] = found.get(column, 0) + size

        for column, size in self.peaks.run_terms(j):
            add(column, size)
        for chain, path in zip(chains, paths, strict=True):
            t, size = chain.tensors[0], chain.least_bytes
            read = t in self.problem.ops[model.ends[k]].inputs
            add(-1 if read else self._column(model.A[t, k + 1]), size)
            add(self._column(model.R[i, k]), size)
            add(-1, -size)
            for u in (*path, *chain.tensors):
                if (u, k) in model.A:
                    add(self._column(model.A[u, k]), -size)
            add(self._column(model.Q[self.problem.producer[chain.tensors[-1]], k]), -size)
        constant = found.pop(-1)
        unit = max(1.0, max(map(abs, found.values())) / COEFFICIENT_LIMIT)
        row = {column: size / unit for column, size in found.items() if size}
        return row, (model.budget_bytes - constant) / unit + ROOM

    def _column(self, variable: object) -> int:
        return self.model.column[str(variable)]

    def _value(self, variable: object, values: np.ndarray) -> float:
        return 0.0 if variable is None else float(values[self._column(variable)])
