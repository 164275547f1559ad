"""The peers: each is a function from a model to ways of running it, best of its settings first chosen by peak."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from passes.memory import measure_peak

from . import selective
from .blocks import Blocks, checkpoint_each, checkpoint_groups, find_blocks
from .external import EXTERNAL
from .measure import Subject, clear, step
from .mincut import Graphs, compile_with_budget

Failure = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, OSError, ImportError, AssertionError)


@dataclass
class Way:
    """A peer at one setting, ready to be measured.

    Attributes:
        graphs: what was compiled, where the peer compiles.
        blocks: what was checkpointed, where the peer takes a choice of blocks.
        error: why it cannot run; then there is no subject.
    """

    method: str
    setting: str
    subject: Subject | None = None
    note: str = ""
    planning_seconds: float = 0.0
    graphs: Graphs | None = None
    error: str | None = None
    blocks: Blocks | None = None


def quoted(error: BaseException) -> str:
    """The error as one line, for the results file."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


class Peers:
    """Every peer on one model."""

    def __init__(self, model: nn.Module, sample: Any, budgets: Sequence[float], knapsacks: Sequence[str]) -> None:
        self.model, self.sample, self.budgets, self.knapsacks = model, sample, budgets, knapsacks
        self.chosen: Blocks | None = None
        self.loss = self._seeded(copy.deepcopy(model))

    def ways(self, methods: Sequence[str]) -> Iterator[Way]:
        """All settings of the named methods, one by one."""
        choices = find_blocks(self.model, self.sample) if {"block", "sqrt", "selective"} & set(methods) else []
        if "block" in methods or "selective" in methods:
            way = self._best("block", checkpoint_each, choices)
            if "block" in methods:
                yield way
        if "sqrt" in methods:
            yield self._best("sqrt", checkpoint_groups, [c for c in choices if any(len(g) > 1 for g in c.groups())])
        if "selective" in methods:
            chosen = [self.chosen] if self.chosen else []
            yield self._best("selective", partial(checkpoint_each, context_fn=selective.contexts), chosen)
        if "mincut" in methods:
            for knapsack in self.knapsacks:
                for budget in self.budgets:
                    yield self._mincut(budget, knapsack)
        for name in (n for n in EXTERNAL if n in methods):
            yield self._external(name)

    def _best(self, method: str, apply: Callable[[nn.Module, Blocks], None], choices: Sequence[Blocks]) -> Way:
        """The choice of blocks with the lowest peak."""
        best: tuple[int, Way] | None = None
        errors = []
        for blocks in choices:
            twin = copy.deepcopy(self.model)
            apply(twin, blocks)
            try:
                losses: list[float] = []
                peak = measure_peak(lambda twin=twin, losses=losses: losses.append(self._seeded(twin)))
                if losses != [self.loss]:  # the stretch cut through a skip connection: no such step is ever written
                    errors.append(f"{blocks.label}: not a chain of blocks")
                    continue
            except Failure as error:
                errors.append(f"{blocks.label}: {quoted(error)}")
                continue
            if best is None or peak < best[0]:
                best = peak, Way(method, "", Subject(twin, twin), blocks.label, blocks=blocks)
        if best is None:
            return Way(method, "", error="; ".join(errors) or "the model has no such blocks")
        if method == "block":
            self.chosen = best[1].blocks
        return best[1]

    def _seeded(self, module: nn.Module) -> float:
        """The loss of one step from a fixed generator state."""
        torch.manual_seed(1)
        return step(module, self.sample)

    def _mincut(self, budget: float, knapsack: str) -> Way:
        setting = f"{budget} {knapsack}"
        twin = copy.deepcopy(self.model)
        compiled, graphs = compile_with_budget(twin, budget, knapsack)
        start = time.perf_counter()
        try:
            step(compiled, self.sample)
            clear(twin)
            seconds = time.perf_counter() - start
            step(compiled, self.sample)
            clear(twin)
        except Failure as error:
            return Way("mincut", setting, error=quoted(error))
        if not graphs.nodes:
            return Way("mincut", setting, error="Dynamo captured no graph with a backward")
        note = "" if len(graphs.nodes) == 1 else f"{len(graphs.nodes)} graphs"
        return Way("mincut", setting, Subject(compiled, twin), note, seconds, graphs)

    def _external(self, name: str) -> Way:
        try:
            return Way(name, "", error=EXTERNAL[name](copy.deepcopy(self.model), self.sample))
        except Failure as error:
            return Way(name, "", error=quoted(error))
