"""Divergences planted into a step that was proved right: what `check` is there to find."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F

from passes.codegen import ResumedCodeGen
from passes.run.random import run_with_rng_state
from passes.trace.templates import Constant, Tree
from planner.decided import Decided

Value = Callable[[torch.Tensor], Any]
Plant = Callable[[Decided, nn.Module, dict[str, torch.Tensor]], Decided]
PLANTS: dict[str, Plant] = {}


class Everything(nn.Module):
    """A bit of all that a plan can get wrong: dropout, batch norm, a counter, tied and unused weights, outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor, shift: torch.Tensor) -> dict[str, Any]:
        self.count += 1
        x = self.embedding(tokens) * self.scale + shift
        x = self.drop(F.gelu(self.mix(x)))
        y = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = self.drop(F.relu(x + y))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"loss": loss, "logits": logits, "hidden": [x, logits[:, -1]], "note": "fine"}


def everything() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Everything(), {"tokens": torch.randint(0, 16, (4, 6)), "shift": torch.randn(4, 6, 8)}


# Damaging the halves --------------------------------------------------------------------------------------------------

FORWARD, BACKWARD = "forward", "backward"


def edited(planned: Decided, half: str, edit: Callable[[fx.Graph], None]) -> Decided:
    """The planned step with one half changed after the proof."""
    module = copy.deepcopy(getattr(planned.step, half))
    edit(module.graph)
    module.recompile()
    rewritten = replace(planned.rewritten, **{half: module})
    return replace(planned, halves=(rewritten, replace(planned.step, **{half: module})))


def op(graph: fx.Graph, target: str, number: int = 0) -> fx.Node:
    found = [n for n in graph.nodes if n.op == "call_function" and target in str(n.target)]
    assert len(found) > number, f"no {target} in {[str(n.target) for n in graph.nodes]}"
    return found[number]


def after(graph: fx.Graph, node: fx.Node, value: Callable[..., Any], *arguments: Any) -> None:
    """Pass what `node` gives through `value`."""
    with graph.inserting_after(node):
        new = graph.call_function(value, (node, *arguments))
    node.replace_all_uses_with(new, lambda user: user is not new)


def plant(name: str) -> Callable[[Plant], Plant]:
    def add(make: Plant) -> Plant:
        PLANTS[name] = make
        return make

    return add


def on_op(name: str, half: str, target: str, value: Value, number: int = 0) -> None:
    """A wrong kernel: what an op gives is passed through `value`."""
    PLANTS[name] = lambda planned, *_: edited(planned, half, lambda g: after(g, op(g, target, number), value))


def leave_late(graph: fx.Graph) -> None:
    """Let the gradients leave in the same groups, but at the end, when all of them are there."""
    code = graph._codegen
    if isinstance(code, ResumedCodeGen):
        with graph.inserting_before(graph.output_node()):
            places = [graph.call_function(int).name for _ in code.handovers]
        code.handovers = tuple(h._replace(after=name) for h, name in zip(code.handovers, places, strict=True))


def on_result(name: str, half: str, index: int, value: Callable[[Any], Any]) -> None:
    """A wrong result: number `index` of what a half returns."""

    def edit(graph: fx.Graph) -> None:
        output = graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        with graph.inserting_before(output):
            results[index] = graph.call_function(value, (results[index],))
        output.args = (tuple(results),)
        leave_late(graph)

    PLANTS[name] = lambda planned, *_: edited(planned, half, edit)


def swapped(name: str, half: str, first: int, second: int) -> None:
    def edit(graph: fx.Graph) -> None:
        output = graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        results[first], results[second] = results[second], results[first]
        output.args = (tuple(results),)
        leave_late(graph)

    PLANTS[name] = lambda planned, *_: edited(planned, half, edit)


def frozen(name: str, half: str, primal: str, value: Callable[[nn.Module, dict[str, Any]], torch.Tensor]) -> None:
    """A stale constant: what a half is given as `primal` is what it was while planning."""

    def make(planned: Decided, model: nn.Module, sample: dict[str, torch.Tensor]) -> Decided:
        kept = value(model, sample).detach().clone()

        def edit(graph: fx.Graph) -> None:
            node = next(n for n in graph.nodes if n.op == "placeholder" and n.name == primal)
            assert node.users
            after(graph, node, lambda given: kept)
            # fx wants placeholders first
            placeholders = [n for n in graph.nodes if n.op == "placeholder"]
            moved = next(n for n in graph.nodes if n.op == "call_function" and node in n.args)
            placeholders[-1].append(moved)

        return edited(planned, half, edit)

    PLANTS[name] = make


def ulp(t: torch.Tensor) -> torch.Tensor:
    """Every element one bit off."""
    return torch.nextafter(t, torch.tensor(9e9))


def one(t: torch.Tensor, value: float) -> torch.Tensor:
    t = t.clone()
    t.reshape(-1)[0] = value
    return t


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same numbers in another layout."""
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def drawing(t: torch.Tensor) -> torch.Tensor:
    torch.rand(2)
    return t


def python_drawing(t: torch.Tensor) -> torch.Tensor:
    random.random()
    return t


def numpy_drawing(t: torch.Tensor) -> torch.Tensor:
    np.random.rand()
    return t


class First:
    """Gives for ever what it was given first."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        self.kept = t.clone() if self.kept is None else self.kept
        return self.kept.clone()


def overwritten(half: str, primal: str) -> Plant:
    """The step writes into a parameter or an input, behind autograd's back."""

    def edit(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.op == "placeholder" and n.name == primal)
        first = next(n for n in graph.nodes if n.op == "call_function")
        with graph.inserting_before(first):
            graph.call_function(lambda t: t.data.mul_(0.5), (node,))

    return lambda planned, *_: edited(planned, half, edit)


# Wrong kernels
on_op("gelu one bit off", FORWARD, "gelu", ulp)
on_op("gelu by another formula", FORWARD, "gelu", lambda t: t * 1.0001)
on_op("relu forgotten", FORWARD, "add.Tensor", lambda t: t.abs(), 2)
on_op("matrix product rounded", FORWARD, "aten.mm", lambda t: t.bfloat16().float())
on_op("convolution shifted", FORWARD, "aten.convolution.default", lambda t: t.roll(1, -1))
on_op("log softmax of other logits", FORWARD, "_log_softmax", lambda t: t - 1e-3)
on_op("embedding of other rows", FORWARD, "embedding", lambda t: t.flip(0))
on_op("recomputed convolution one bit off", BACKWARD, "aten.convolution.default", ulp)
on_op("recomputed embedding scaled", BACKWARD, "aten.embedding.default", lambda t: t * 2)
on_op("gelu's backward negated", BACKWARD, "gelu_backward", torch.neg)
on_op("cross entropy's backward not averaged", BACKWARD, "cross_entropy_backward", lambda t: t * 24)
on_op("a NaN for a number", FORWARD, "gelu", lambda t: one(t, float("nan")))
on_op("sum of a bias gradient in another order", BACKWARD, "sum.dim", lambda t: t.nextafter(torch.full_like(t, 9.0)))

# Random ops
on_op("dropout skipped", FORWARD, "native_dropout", lambda r: (r[0].clone(), torch.ones_like(r[1])))  # type: ignore[arg-type]
on_op("another mask saved", FORWARD, "native_dropout", lambda r: (r[0], ~r[1]))  # type: ignore[arg-type]
on_op("masks that never change", FORWARD, "native_dropout", lambda r: (r[0], first_mask(r[1])))  # type: ignore[arg-type]
on_op("one draw too many", FORWARD, "gelu", drawing)
on_op("a draw in the backward", BACKWARD, "aten.mm", drawing)
on_op("a draw of Python's", FORWARD, "gelu", python_drawing)
on_op("a draw of NumPy's", FORWARD, "gelu", numpy_drawing)
first_mask = First()


@plant("dropout with another probability")
def _(planned: Decided, *_: Any) -> Decided:
    def edit(graph: fx.Graph) -> None:
        node = op(graph, "native_dropout")
        node.args = (node.args[0], 0.2, *node.args[2:])

    return edited(planned, FORWARD, edit)


@plant("two random ops in the other order")
def _(planned: Decided, *_: Any) -> Decided:
    def edit(graph: fx.Graph) -> None:
        node = op(graph, "native_dropout")
        with graph.inserting_before(node):
            late = graph.call_function(torch.rand, (4,))
        assert late.next is node

    return edited(planned, FORWARD, edit)


# Stale constants (placeholders: parameters, buffers, inputs, in the order of the step's primals)
frozen("a stale weight in the forward", FORWARD, "primals_3", lambda m, _: m.mix.weight)  # type: ignore[union-attr, return-value]
frozen("a stale weight in the backward", BACKWARD, "primals_3", lambda m, _: m.mix.weight)  # type: ignore[union-attr, return-value]
frozen("a stale bias", FORWARD, "primals_4", lambda m, _: m.mix.bias)  # type: ignore[union-attr, return-value]
frozen("a stale norm weight in the backward", BACKWARD, "primals_6", lambda m, _: m.norm.weight)  # type: ignore[union-attr, return-value]
frozen("a stale buffer", FORWARD, "primals_8", lambda m, _: m.scale)  # type: ignore[return-value]
frozen("a stale counter", FORWARD, "primals_9", lambda m, _: m.count)  # type: ignore[return-value]
frozen("a stale running mean", FORWARD, "primals_10", lambda m, _: m.norm.running_mean)  # type: ignore[union-attr, return-value]
frozen("stale tokens", FORWARD, "primals_13", lambda _, s: s["tokens"])
frozen("stale tokens in the backward", BACKWARD, "primals_13", lambda _, s: s["tokens"])
frozen("a stale float input", FORWARD, "primals_14", lambda _, s: s["shift"])
frozen("a stale gradient of the loss", BACKWARD, "tangents_1", lambda *_: torch.tensor(1.0))

# Results: new buffers (0-3), the loss, logits, x, the last logits; gradients by primal
on_result("a counter that counts twice", FORWARD, 0, lambda t: t + 1)
on_result("running mean not averaged", FORWARD, 1, lambda t: t * 10)
on_result("running variance one bit off", FORWARD, 2, ulp)
on_result("the loss as float64", FORWARD, 4, torch.Tensor.double)
on_result("the loss one bit off", FORWARD, 4, ulp)
on_result("logits in another layout", FORWARD, 5, strided)
on_result("the last logits on their own", FORWARD, 7, lambda t: torch.empty_strided(t.shape, t.stride()).copy_(t))
on_result("a negative zero", FORWARD, 6, lambda t: torch.where(t == 0, -0.0, t))
on_result("zeros for no gradient", BACKWARD, 0, lambda _: torch.zeros(3))
_with_zeros = PLANTS["zeros for no gradient"]


@plant("zeros for no gradient")
def _(planned: Decided, *others: Any) -> Decided:
    damaged = _with_zeros(planned, *others)
    *early, last = planned.step.leaves
    rewritten, step = damaged.rewritten, damaged.step
    return replace(damaged, halves=(rewritten, replace(step, leaves=(*early, (0, *last)), others=())))


on_result("no gradient", BACKWARD, 3, lambda _: None)
on_result("a gradient one bit off", BACKWARD, 5, ulp)
on_result("a gradient transposed", BACKWARD, 2, torch.Tensor.t)
on_result("a gradient doubled", BACKWARD, 1, lambda t: t * 2)
swapped("two gradients changed places", BACKWARD, 5, 6)
swapped("two buffers changed places", FORWARD, 1, 2)
PLANTS["a parameter overwritten"] = overwritten(FORWARD, "primals_3")
PLANTS["an input overwritten"] = overwritten(FORWARD, "primals_14")
PLANTS["a parameter overwritten in the backward"] = overwritten(BACKWARD, "primals_5")


@plant("an output that needs no gradient")
def _(planned: Decided, *_: Any) -> Decided:
    wanted = planned.step.differentiable
    step = replace(planned.step, differentiable=(wanted[0], False, *wanted[2:]))
    return replace(planned, halves=(planned.rewritten, step))


@plant("buffers left as they were")
def _(planned: Decided, *_: Any) -> Decided:
    def edit(graph: fx.Graph) -> None:
        output = graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        given = [n for n in graph.nodes if n.op == "placeholder"]
        output.args = ((*(given[i] for i in planned.step.mutated), *results[len(planned.step.mutated) :]),)

    return edited(planned, FORWARD, edit)


def _with_output(planned: Decided, change: Callable[[Tree], Any]) -> Decided:
    traced = planned.prepared.traced
    assert isinstance(traced.output_template, Tree)
    traced = replace(traced, output_template=change(traced.output_template))
    return replace(planned, prepared=replace(planned.prepared, traced=traced))


@plant("another constant returned")
def _(planned: Decided, *_: Any) -> Decided:
    return _with_output(planned, lambda t: replace(t, children=(*t.children[:-1], Constant("stale"))))


@plant("outputs under each other's names")
def _(planned: Decided, *_: Any) -> Decided:
    return _with_output(planned, lambda t: replace(t, children=(t.children[1], t.children[0], *t.children[2:])))


# A replayed random op -------------------------------------------------------------------------------------------------

REPLAYS: dict[str, Plant] = {}


def _on_replay(name: str, instead: Callable[..., Any]) -> None:
    def edit(graph: fx.Graph) -> None:
        node = [n for n in graph.nodes if n.target is run_with_rng_state][-1]
        node.target = instead

    REPLAYS[name] = lambda planned, *_: edited(planned, BACKWARD, edit)


def _fresh(state: torch.Tensor, device: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return kernel(*args, **kwargs)


def _kept(state: torch.Tensor, device: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.set_rng_state(state)
    return kernel(*args, **kwargs)


def _seeded(state: torch.Tensor, device: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kernel(*args, **kwargs)


_on_replay("drawn again", _fresh)
_on_replay("replayed, and the generator left there", _kept)
_on_replay("replayed from another state", _seeded)


# Wrong kernels of our own ---------------------------------------------------------------------------------------------


@contextmanager
def damaged(target: Any) -> Iterator[None]:
    """Register a kernel for one of our ops on the CPU whose first float result is half as much again."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = target._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        next(t for t in (result if isinstance(result, (tuple, list)) else [result]) if t.is_floating_point()).mul_(1.5)
        return result

    library = torch.library.Library("planner", "IMPL")
    library.impl(target._name.removeprefix("planner::"), wrong, "CPU")
    try:
        yield
    finally:
        library._destroy()
