"""`python -m tests.passes.corruptions --count 500`: random damage to valid rewrites of random programs.

Damage counts when running the damaged halves on the same inputs gives other bits anywhere (or raises); every one that
counts must be refused by `verify`.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import operator
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.errors import Unsupported, VerificationError
from passes.ops import DONATIONS, FUNCTIONAL, is_random
from passes.rewrite import Rewritten, rewrite
from passes.run._torch import below_autograd
from passes.run.random import get_rng_state, run_with_rng_state
from passes.trace.arguments import bind_sample, state_tensors
from passes.verify import verify
from planner.prepared import Prepared, prepare
from planner.progress import Progress
from solvers.schedule import Schedule
from tests.passes.program_ops import Pick
from tests.passes.programs import OPTIONS, Rejected, draw_program, draw_schedule
from tests.zoo.compare import same_bits

aten = torch.ops.aten
Damage = Callable[[Pick, Rewritten], "Rewritten | None"]
DAMAGES: dict[str, Damage] = {}

FAMILIES: tuple[tuple[Any, ...], ...] = (
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor), (aten.tanh.default, aten.sigmoid.default, aten.sin.default),
    (aten.relu.default, aten.abs.default, aten.neg.default), (aten.amax.default, aten.mean.dim, aten.sum.dim_IntList),
    (aten.add.Scalar, aten.mul.Scalar), (aten.maximum.default, aten.minimum.default),
    (aten._softmax.default, aten._log_softmax.default), (aten.rand_like.default, aten.randn_like.default),
)  # fmt: skip


def damage(function: Damage) -> Damage:
    """Register under the function's name."""
    DAMAGES[function.__name__] = function
    return function


def _half(pick: Pick, r: Rewritten) -> fx.Graph:
    return (r.forward, r.backward)[pick(0, 1)].graph


def _choose(pick: Pick, options: Sequence[Any]) -> Any:
    return options[pick(0, len(options) - 1)] if options else None


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def _before(node: fx.Node) -> list[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[: nodes.index(node)]


def _alike(node: fx.Node, at: fx.Node) -> list[fx.Node]:
    """Values that could stand for `node` at `at`: the same shape and dtype, already there."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return []
    return [n for n in _before(at) if n is not node and isinstance(n.meta.get("val"), torch.Tensor)
            and n.meta["val"].shape == value.shape and n.meta["val"].dtype == value.dtype]  # fmt: skip


@damage
def swap_two_arguments(pick: Pick, r: Rewritten) -> Rewritten | None:
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if len(_tensor_places(n)) > 1])
    if node is None:
        return None
    first, second = _tensor_places(node)[:2]
    args = list(node.args)
    args[first], args[second] = args[second], args[first]
    node.args = tuple(args)
    return r


def _tensor_places(node: fx.Node) -> list[int]:
    return [i for i, a in enumerate(node.args) if isinstance(a, fx.Node)]


@damage
def another_argument(pick: Pick, r: Rewritten) -> Rewritten | None:
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if n.all_input_nodes and n.target is not operator.getitem])
    old = _choose(pick, node.all_input_nodes) if node is not None else None
    new = _choose(pick, _alike(old, node)) if old is not None else None
    if new is None:
        return None
    node.replace_input_with(old, new)
    return r


@damage
def skip_a_compute(pick: Pick, r: Rewritten) -> Rewritten | None:
    """Let the readers of a value read another one in its place, as when a recompute is forgotten."""
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if n.users])
    new = _choose(pick, _alike(node, node)) if node is not None else None
    if new is None:
        return None
    node.replace_all_uses_with(new)
    return r


@damage
def change_a_constant(pick: Pick, r: Rewritten) -> Rewritten | None:
    node = _choose(pick, _calls(_half(pick, r)))
    places = [] if node is None else [i for i, a in enumerate(node.args) if _changed(a) is not None]
    if not places or node.target in (get_rng_state, run_with_rng_state, operator.getitem):
        return None
    place = _choose(pick, places)
    node.update_arg(place, _changed(node.args[place]))
    return r


def _changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if value <= 0 else value - 1
    if isinstance(value, float):
        return value * 0.5 + 0.25
    if isinstance(value, (list, tuple)) and len(value) > 1 and all(isinstance(v, int) for v in value):
        return [value[-1], *value[1:-1], value[0]]
    return None


@damage
def change_a_keyword(pick: Pick, r: Rewritten) -> Rewritten | None:
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if n.kwargs])
    if node is None:
        return None
    name = _choose(pick, sorted(node.kwargs))
    value = node.kwargs[name]
    if isinstance(value, torch.dtype):
        changed: Any = torch.float64 if value is not torch.float64 else torch.float32
    else:
        changed = _changed(value)
    if changed is None:
        return None
    node.kwargs = {**node.kwargs, name: changed}
    return r


@damage
def another_result(pick: Pick, r: Rewritten) -> Rewritten | None:
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if n.target is operator.getitem])
    if node is None:
        return None
    results = node.args[0].meta.get("val")
    if not isinstance(results, (list, tuple)) or len(results) < 2:
        return None
    node.args = (node.args[0], (node.args[1] + pick(1, len(results) - 1)) % len(results))
    return r


@damage
def another_op(pick: Pick, r: Rewritten) -> Rewritten | None:
    known = {op: family for family in FAMILIES for op in family}
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if n.target in known])
    if node is None:
        return None
    node.target = _choose(pick, [op for op in known[node.target] if op is not node.target])
    return r


@damage
def in_place_twin(pick: Pick, r: Rewritten) -> Rewritten | None:
    found = [
        (n, p, twin) for n in _calls(_half(pick, r)) for p, twin in DONATIONS.get(n.target, {}).items()
        if p < len(n.args) and isinstance(n.args[p], fx.Node)
    ]  # fmt: skip
    chosen = _choose(pick, found)
    if chosen is None:
        return None
    node, position, twin = chosen
    node.target = twin.target
    if twin.out is not None:
        node.kwargs = {**node.kwargs, twin.out: node.args[position]}
    return r


@damage
def overwrite_a_value(pick: Pick, r: Rewritten) -> Rewritten | None:
    graph = _half(pick, r)
    places = _calls(graph)
    at = _choose(pick, places)
    values = [] if at is None else [n for n in _before(at) if isinstance(n.meta.get("val"), torch.Tensor)]
    value = _choose(pick, [n for n in values if n.meta["val"].is_floating_point()])
    if value is None:
        return None
    with graph.inserting_before(at if pick(0, 1) else graph.output_node()):
        graph.call_function(aten.mul_.Tensor, (value, 2)).meta["val"] = value.meta["val"]
    return r


@damage
def move_a_node(pick: Pick, r: Rewritten) -> Rewritten | None:
    """Anywhere between what it reads and what reads it; past a write or a draw that changes a value."""
    graph = _half(pick, r)
    special = [n for n in _calls(graph) if is_random(n) or n.target in (*FUNCTIONAL, get_rng_state)]
    node = _choose(pick, special if special and pick(0, 2) else _calls(graph))
    if node is None:
        return None
    nodes = list(graph.nodes)
    first = max([nodes.index(a) for a in node.all_input_nodes] + [sum(n.op == "placeholder" for n in nodes) - 1])
    last = min([nodes.index(u) for u in node.users] + [len(nodes) - 1]) - 1
    target = nodes[pick(min(first, last), last)]
    if target is node:
        return None
    target.append(node)
    return r


@damage
def swap_two_outputs(pick: Pick, r: Rewritten) -> Rewritten | None:
    output = _half(pick, r).output_node()
    values = list(output.args[0])
    first, second = pick(0, len(values) - 1), pick(0, len(values) - 1)
    if values[first] is values[second]:
        return None
    values[first], values[second] = values[second], values[first]
    output.args = (tuple(values),)
    return r


@damage
def another_output(pick: Pick, r: Rewritten) -> Rewritten | None:
    """Return or save another value, or None."""
    output = _half(pick, r).output_node()
    values = list(output.args[0])
    place = _choose(pick, [i for i, v in enumerate(values) if isinstance(v, fx.Node)])
    if place is None:
        return None
    values[place] = _choose(pick, [*_alike(values[place], output), None])
    output.args = (tuple(values),)
    return r


@damage
def another_saved_primal(pick: Pick, r: Rewritten) -> Rewritten | None:
    count = sum(n.op == "placeholder" for n in r.forward.graph.nodes)
    if not r.saved_primals or count < 2:
        return None
    place = pick(0, len(r.saved_primals) - 1)
    primals = list(r.saved_primals)
    primals[place] = (primals[place] + pick(1, count - 1)) % count
    return replace(r, saved_primals=tuple(primals))


@damage
def draw_anew(pick: Pick, r: Rewritten) -> Rewritten | None:
    """A random op recomputed without its state."""
    node = _choose(pick, [n for n in _calls(r.backward.graph) if n.target is run_with_rng_state])
    if node is None:
        return None
    node.target, node.args = node.args[2], node.args[3:]
    return r


@damage
def another_state(pick: Pick, r: Rewritten) -> Rewritten | None:
    graph = _half(pick, r)
    node = _choose(pick, [n for n in _calls(graph) if n.target is run_with_rng_state])
    states = [n for n in graph.nodes if node is not None and n is not node.args[0]
              and getattr(n.meta.get("val"), "dtype", None) is torch.uint8]  # fmt: skip
    if node is None or not states:
        return None
    node.args = (_choose(pick, states), *node.args[1:])
    return r


@damage
def another_device(pick: Pick, r: Rewritten) -> Rewritten | None:
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if n.target in (run_with_rng_state, get_rng_state)])
    if node is None:
        return None
    node.update_arg(0 if node.target is get_rng_state else 1, "cuda:7")
    return r


@damage
def draw_twice(pick: Pick, r: Rewritten) -> Rewritten | None:
    node = _choose(pick, [n for n in _calls(_half(pick, r)) if is_random(n)])
    if node is None:
        return None
    with node.graph.inserting_after(node):
        node.graph.node_copy(node)
    return r


# Judging -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A random program, prepared, with a schedule and inputs to run its halves on."""

    prepared: Prepared
    schedule: Schedule
    primals: tuple[torch.Tensor, ...]
    tangents: tuple[torch.Tensor, ...]

    def rewritten(self) -> Rewritten:
        return rewrite(self.prepared.traced, self.prepared.aliases, self.prepared.lowered, self.schedule)


def draw_case(pick: Pick) -> Case:
    """Raises Rejected or Unsupported for a program that cannot be planned."""
    program = draw_program(pick, 8)
    model = copy.deepcopy(program.model)
    prepared = prepare(model, bind_sample(model, program.sample), OPTIONS, Progress(False))
    primals = (*state_tensors(model, prepared.traced.state), *program.sample)
    schedule = draw_schedule(pick, prepared.lowered.problem)
    return Case(prepared, schedule, tuple(p.detach() for p in primals), tuple(program.tangents.values()))


def gradients_of(r: Rewritten, values: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """All gradients, which the backward yields in groups."""
    found: dict[int, torch.Tensor | None] = {}
    for outputs, yielded in zip(r.leaves, r.backward.forward(values), strict=True):
        found.update(zip(outputs, yielded, strict=True))
    results: Any = r.backward.graph.output_node().args[0]
    return [found.get(i) for i in range(len(results))]


def run_halves(case: Case, r: Rewritten) -> list[torch.Tensor | None]:
    """Everything a step leaves behind: outputs, gradients, primals, the generator's state."""
    primals, tangents = [p.clone() for p in case.primals], [t.clone() for t in case.tangents]
    torch.manual_seed(1)
    with below_autograd():
        results = r.forward.forward([p.detach() for p in primals])
        outputs, saved = results[: r.num_forward_outputs], results[r.num_forward_outputs :]
        for i, value in zip(case.prepared.traced.mutated, outputs, strict=False):
            primals[i].copy_(value)
        gradients = gradients_of(r, [*saved, *(primals[i].detach() for i in r.saved_primals), *tangents])
    return [*outputs, *gradients, *primals, torch.get_rng_state()]


def changes_a_value(case: Case, expected: list[torch.Tensor | None], damaged: Rewritten) -> bool:
    """Whether running the damaged halves gives other bits, raises or crashes.

    In a child process, because kernels trust the sizes and places that a traced graph hands them. Parent and child
    both run under `one_thread`: a forked child has none of its parent's threads, and sums split otherwise differ.
    """
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        changed = True
        try:
            damaged.forward.recompile()
            damaged.backward.recompile()
            got = run_halves(case, damaged)
            changed = len(got) != len(expected) or not all(map(same_bits, expected, got))
        finally:
            os._exit(int(changed))
    _, status = os.waitpid(child, 0)
    return status != 0


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_refused(case: Case, damaged: Rewritten) -> bool:
    try:
        verify(case.prepared.traced, damaged)
    except VerificationError:
        return True
    return False


@dataclass
class Tally:
    """Per kind of damage: how many changed a value and were refused, changed nothing, or slipped through."""

    caught: Counter[str]
    harmless: Counter[str]
    missed: list[str]


@one_thread()
def run(count: int, first: int = 0, per_program: int = 6) -> Tally:
    """Damage rewrites until `count` cases changed a value."""
    tally = Tally(Counter(), Counter(), [])
    seed = first
    while sum(tally.caught.values()) + len(tally.missed) < count:
        generator = random.Random(seed)
        seed += 1
        try:
            case = draw_case(generator.randint)
        except (Rejected, Unsupported):
            continue
        expected = run_halves(case, case.rewritten())
        for _ in range(per_program):
            name = generator.choice(list(DAMAGES))
            damaged = DAMAGES[name](generator.randint, case.rewritten())
            if damaged is not None:
                _judge(tally, name, seed - 1, changes_a_value(case, expected, damaged), is_refused(case, damaged))
    return tally


def _judge(tally: Tally, name: str, seed: int, changed: bool, refused: bool) -> None:
    if changed and not refused:
        tally.missed.append(f"{name} (seed {seed})")
        print(f"missed: {name} (seed {seed})", file=sys.stderr, flush=True)
    else:
        (tally.caught if changed else tally.harmless)[name] += 1


def main() -> int:
    """Print the tally; exit 1 when damage that changes a value was accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many that change a value")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    tally = run(options.count, options.first)
    for name in DAMAGES:
        print(f"{name:24s} {tally.caught[name]:5d} caught {tally.harmless[name]:5d} harmless")
    print(f"{sum(tally.caught.values())} caught, {len(tally.missed)} missed: {', '.join(tally.missed) or 'none'}")
    return 1 if tally.missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
