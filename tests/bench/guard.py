"""`python -m tests.bench.guard`: what it costs to tell, before each call, that a plan still holds.

The aims: at most 1 % of a step of GPT-2 with 12 layers of width 768 and 256 tokens, and 1 ms for 1,000 modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes.trace.arguments import bind_sample
from passes.trace.structure import flatten
from planner import auto_checkpoint
from planner.dropin.plan_key import call_key

CALLS = 200
SHARE_OF_STEP = 0.01
SECONDS_PER_1000_MODULES = 1e-3


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Twelve layers of width 768, a batch of one sequence of 256 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 50257, (1, 256))
    return GPT2LMHeadModel(GPT2Config()).train(), {"input_ids": tokens, "labels": tokens}


def thousand_modules() -> tuple[nn.Module, dict[str, Any]]:
    """A model of 1,000 modules: 111 blocks of nine, within one `Sequential`."""

    def block() -> nn.Module:
        linear = [nn.Linear(8, 8) for _ in range(3)]
        inner = (linear[0], nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), linear[1], nn.ReLU(), linear[2], nn.Tanh())
        return nn.Sequential(*inner)

    return nn.Sequential(*(block() for _ in range(111))), {"input": torch.randn(4, 8)}


def guard_seconds(model: nn.Module, sample: dict[str, Any]) -> tuple[float, int]:
    """Shortest seconds from a call's arguments to its plan and the model's tensors; how many places are read."""
    state = auto_checkpoint(model, sample, progress=False, solver="greedy").module._plan_state
    bound = bind_sample(model, sample)

    def find() -> None:
        tensors, template = flatten(dict(bound))
        entry, _ = state.find(call_key(tensors, template), tensors, bound)
        assert entry is not None

    find()
    matched = state.cache[0].matched
    assert matched is not None
    places = (matched.own.getters, matched.fixed.getters, matched.computed, matched.contents, matched.empty)
    return shortest_seconds(find, CALLS), sum(map(len, places))


def shortest_seconds(run: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def step_seconds(model: nn.Module, sample: dict[str, Any]) -> float:
    """Shortest seconds of a plain step."""
    return shortest_seconds(lambda: model(**sample).loss.backward(), 3)


def main() -> int:
    """Print both figures; 1 when one misses its aim."""
    model, sample = gpt2()
    seconds, places = guard_seconds(model, sample)
    share = seconds / step_seconds(model, sample)
    count = len(list(model.modules()))
    print(f"GPT-2, {count} modules, {places} places: {seconds * 1e3:.3f} ms, {share:.3%} of a step")
    model, sample = thousand_modules()
    other, places = guard_seconds(model, sample)
    print(f"{len(list(model.modules()))} modules, {places} places: {other * 1e3:.3f} ms")
    return int(share > SHARE_OF_STEP or other > SECONDS_PER_1000_MODULES)


if __name__ == "__main__":
    raise SystemExit(main())
