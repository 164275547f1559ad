"""`python -m tests.passes.programs --count 2000`: random programs under random valid schedules, held to the promises.

A program is an `fx.GraphModule` of random ATen ops. Its schedule is drawn, not solved for: recomputes anywhere, frees
early or late. Proof, numbers and memory must agree with plain eager.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from passes.device import kind_of
from passes.errors import Unsupported, VerificationError
from passes.memory import measure_peak
from passes.run import kernels
from passes.run.tensors import laid_out
from passes.trace.arguments import bind_sample
from passes.trace.structure import flatten
from planner import BudgetError, auto_checkpoint
from planner.options import GRADIENTS, Options
from planner.pipeline import emit_schedule
from planner.plan import Plan
from planner.prepared import Prepared, prepare
from planner.progress import Progress
from solvers.problem import Problem
from solvers.schedule import Schedule, computes, with_frees
from solvers.simulate import simulate
from tests.passes.program_ops import FAMILIES, SIZES, Builder, Pick, Value
from tests.solvers.strategies import lazier, make_order
from tests.zoo.compare import same_bits

MIB = 1 << 20
SMALL_BLOCKS = 48, 96  # bytes: merges are drawn too, and their blocks are several
OPTIONS = Options(progress=False)


@dataclass(frozen=True)
class Program:
    """A random model, its sample, and the gradients that its backward starts from, by output position."""

    model: fx.GraphModule
    sample: tuple[torch.Tensor, ...]
    tangents: dict[int, torch.Tensor]


class Rejected(Exception):
    """The plain model does not train on this draw (an in-place op broke its backward, no gradient, ...)."""


class WrongPlan(AssertionError):
    """A promise is broken; says which."""


def draw_shape(pick: Pick) -> tuple[int, ...]:
    """Of a program's first input."""
    return tuple(SIZES[:4][pick(0, 3)] for _ in range(pick(2, 4)))


def draw_program(pick: Pick, max_ops: int = 12, shape: tuple[int, ...] = ()) -> Program:
    """A random program, for a first input of `shape` if one is given.

    Raises:
        Rejected: the draw does not train in plain eager.
    """
    b = Builder(pick)
    shape = shape or draw_shape(pick)
    first = b.input(b.randn(*shape))
    b.sample[0].requires_grad_(pick(0, 4) == 4)
    b.module(nn.Linear(shape[-1], b.choose(SIZES)), first)
    for _ in range(pick(1, max_ops)):
        b.choose(FAMILIES)(b)
    b.graph.output(_outputs(b))
    model = fx.GraphModule(b.root, b.graph).train()
    for parameter in model.parameters():
        parameter.requires_grad_(pick(0, 7) < 7)
    sample = tuple(b.sample)
    return Program(model, sample, _tangents(model, sample, b.generator))


def _outputs(b: Builder) -> Any:
    """What the program returns: a loss, a loss and more, or tensors alone; sometimes aliases of one another."""
    values = [_of_its_own(b, b.float()) for _ in range(3)]
    loss = b.call(torch.mean, b.call(torch.square, b.values[-1]))
    for value in (*values[:2], b.values[1]):  # the last one is the first layer's result, so that something is trained
        loss = b.call(torch.add, loss, b.call(torch.mean, value))
    first, second = (v.node for v in values[:2])
    last = _of_its_own(b, b.values[-1]).node
    kind = b.pick(0, 7)
    if kind == 0:
        return {"loss": loss.node, "hidden": first, "nothing": None}
    if kind == 1:
        return loss.node, first, [second, 3, first]
    if kind == 2:
        return first, second
    if kind == 3:
        return b.call(torch.transpose, values[0], 0, -1).node, first, last
    if kind == 4:
        return {"a": first, "b": b.call(torch.argmax, values[1]).node, "x": b.graph.find_nodes(op="placeholder")[0]}
    if kind == 5:
        return loss.node, b.call(torch.mean, b.call(torch.abs, values[2])).node, b.call(torch.detach, values[1]).node
    return loss.node


def _of_its_own(b: Builder, value: Value) -> Value:
    """A clone of what would be a view of an input, which is refused; now and then the view itself."""
    inputs = [x.untyped_storage().data_ptr() for x in b.sample]
    view = value.example.untyped_storage().data_ptr() in inputs
    return b.call(torch.clone, value) if view and b.pick(0, 9) < 9 else value


def _tangents(model: nn.Module, sample: tuple[torch.Tensor, ...], generator: torch.Generator) -> dict[int, Any]:
    """Gradients for what the plan differentiates: the scalars, or all outputs; and a trial of the plain step."""
    trial, inputs = copy.deepcopy(model), fresh(sample)
    try:
        tensors, _ = flatten(trial(*inputs))
    except (RuntimeError, ValueError, IndexError) as error:
        raise Rejected(str(error)) from error
    candidates = [i for i, t in enumerate(tensors) if t.requires_grad and not any(t is x for x in inputs)]
    scalars = [i for i in candidates if tensors[i].dim() == 0]
    tangents = {i: torch.empty_like(tensors[i]).normal_(generator=generator) for i in scalars or candidates}
    try:
        torch.autograd.backward([tensors[i] for i in tangents], list(tangents.values()))
    except RuntimeError as error:
        raise Rejected(str(error)) from error
    if all(p.grad is None for p in (*trial.parameters(), *inputs)):
        raise Rejected("nothing gets a gradient")
    return tangents


def fresh(sample: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A copy of the inputs."""
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in sample)


def draw_schedule(pick: Pick, problem: Problem) -> Schedule:
    """A valid schedule that no solver would choose."""
    kind = pick(0, 3)
    if kind <= 1:
        schedule = with_frees(problem, make_order(pick, problem, 12))
        return schedule if kind else lazier(pick, schedule, problem)
    order = list(problem.required())
    again = [i for i in problem.forward if problem.ops[i].recomputable]
    if kind == 2:
        order[order.index(problem.num_forward) + 1 : 0] = [i for i in again if pick(0, 3)]
        return with_frees(problem, order)
    for _ in range(pick(1, 3)):
        position = pick(order.index(problem.num_forward), len(order) - 1)
        order[position:position] = _chain(pick, problem, order[position])
    return with_frees(problem, order)


def _chain(pick: Pick, problem: Problem, op: int) -> list[int]:
    """Recompute what `op` reads, and what that was computed from, a few levels deep."""
    wanted: dict[int, None] = {}
    front = [op]
    for _ in range(pick(1, 5)):
        reads = dict.fromkeys(t for i in front for t in problem.ops[i].inputs)
        front = [p for p in dict.fromkeys(problem.producer[t] for t in reads) if problem.ops[p].recomputable]
        wanted.update(dict.fromkeys(front))
    return sorted(wanted)


@dataclass(frozen=True)
class Outcome:
    """What a run found: bytes predicted and measured for the step, static bytes included."""

    predicted_bytes: int
    measured_bytes: int
    recomputes: int


def check(program: Program, schedule_pick: Pick) -> Outcome:
    """Plan, prove, run and compare one program under a drawn schedule.

    Raises:
        WrongPlan: numbers differ, or memory is over prediction.
        Unsupported: the program is refused by name.
    """
    model = copy.deepcopy(program.model)
    bound = bind_sample(model, program.sample)
    gradients = GRADIENTS[schedule_pick(0, len(GRADIENTS) - 1)]
    prepared = prepare(model, bound, replace(OPTIONS, gradients=gradients), Progress(False))
    program = as_planned_for(program, prepared)
    schedule = draw_schedule(schedule_pick, prepared.lowered.problem)
    try:
        planned = emit_schedule(prepared, schedule)
    except VerificationError as error:
        if "once its gradient has left" not in str(error):
            raise
        raise Rejected("a recompute that nothing needs comes after its parameter's hook") from error
    module = Plan.of(model, bound, planned).module
    _compare(program, module, model)
    return _memory(prepared, schedule, _measure(program, module, model, gradients))


def as_planned_for(program: Program, prepared: Prepared) -> Program:
    """Its gradients of outputs in the strides that are planned for: in others, the plain step would run first."""
    traced = prepared.traced
    strides = [p.meta["val"].stride() for p in traced.placeholders[traced.num_primals :]]
    tangents = {i: laid_out(t, s) for (i, t), s in zip(program.tangents.items(), strides, strict=True)}
    return replace(program, tangents=tangents)


def check_auto(program: Program, share: int) -> Outcome:
    """The same through `auto_checkpoint` at `share` % between the proved floor and the plain peak."""
    model = copy.deepcopy(program.model)
    free = auto_checkpoint(model, program.sample, progress=False)
    budget = free.static_bytes + (free.baseline_peak_bytes - free.static_bytes) * share // 100
    try:
        plan = auto_checkpoint(model, program.sample, budget / MIB, time_limit=2, progress=False)
    except BudgetError as error:
        plan = auto_checkpoint(model, program.sample, error.minimum_mb, time_limit=2, progress=False)
    if plan.budget_bytes is None or plan.peak_bytes > plan.budget_bytes:
        raise WrongPlan(f"{plan.peak_bytes} bytes predicted where {plan.budget_bytes} were asked for")
    program = as_planned_for(program, plan.prepared)
    _compare(program, plan.module, model)
    return _memory(plan.prepared, plan.schedule, _measure(program, plan.module, model))


def _memory(prepared: Prepared, schedule: Schedule, above_static: int) -> Outcome:
    problem = prepared.lowered.problem
    predicted, measured = simulate(problem, schedule).peak_bytes, problem.static_bytes + above_static
    if measured > predicted:
        raise WrongPlan(f"{measured} bytes measured where {predicted} were predicted")
    if _is_lean(problem, schedule) and predicted - measured > _slack_bytes(problem):
        raise WrongPlan(f"only {measured} bytes measured where {predicted} were predicted, with the earliest frees")
    return Outcome(predicted, measured, len(computes(schedule)) - sum(1 for _ in problem.required()))


def _is_lean(problem: Problem, schedule: Schedule) -> bool:
    """Whether nothing is freed late or computed while it is still there: what runs may need less for such."""
    live: set[int] = set()
    for kind, i in schedule:
        if kind == "free":
            live.discard(i)
        elif live.intersection(problem.ops[i].outputs):
            return False
        else:
            live.update(problem.ops[i].outputs)
    return schedule == with_frees(problem, computes(schedule))


def _slack_bytes(problem: Problem) -> int:
    """By how much a step may stay below its prediction.

    Lending a generator's state is charged to a first run too; and a gradient that is the tangent itself is copied by
    autograd where the caller holds the tangent, which these runs do not. A batch norm whose two ops run as one makes
    its few numbers a channel once.
    """
    draws = any(tensor.category == "rng" for tensor in problem.tensors)
    tangents = problem.ops[problem.num_forward].outputs
    handed_on = [op for op in problem.ops[problem.num_forward + 1 :] if op.name.endswith("_grad")
                 and set(op.inputs) & set(tangents)]  # fmt: skip
    copied = sum(problem.tensors[t].bytes for op in handed_on for t in op.outputs)
    norms = [op for op in problem.ops if op.name.startswith("batch_norm_statistics")]
    numbers = max((sum(problem.tensors[t].bytes for t in op.outputs) for op in norms), default=0)
    return copied + numbers + (kind_of(torch.device("cpu")).rng_state_bytes if draws else 0)


def _compare(program: Program, module: nn.Module, model: nn.Module) -> None:
    plain = copy.deepcopy(model)
    for seed in (1, 2):
        expected, got = (_observe(program, m, s, seed) for m, s in ((plain, plain), (module, model)))
        if len(expected) != len(got):
            raise WrongPlan(f"{len(got)} values where plain has {len(expected)}")
        for (name, a), (_, b) in zip(expected, got, strict=True):
            if not same_bits(a, b):
                raise WrongPlan(f"{name} differs from the plain model's")
    _compare_ruined(_observe(program, plain, plain, 3), program, module, model)


def _compare_ruined(
    expected: list[tuple[str, Any]], program: Program, module: nn.Module, model: nn.Module
) -> None:
    """The same where each parameter and its gradient are ruined as soon as the gradient is there."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}

    def ruin(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # the backward could start from what it depends on, but did not
            return
        found[f"gradient of {name}"] = parameter.grad.clone()
        for tensor in (parameter.detach(), parameter.grad):
            tensor.fill_(math.nan)

    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(partial(ruin, n)) for n, p in trained]
    got = [(name, found.get(name, value)) for name, value in _observe(program, module, model, 3)]
    for hook in hooks:
        hook.remove()
    for name, parameter in model.named_parameters():
        parameter.detach().copy_(before[name])
    for (name, a), (_, b) in zip(expected, got, strict=True):
        if not same_bits(a, b):
            raise WrongPlan(f"{name} differs where hooks change parameters whose gradients have left")


def _observe(program: Program, module: nn.Module, state_of: nn.Module, seed: int) -> list[tuple[str, Any]]:
    """Everything observable after one seeded step, by name."""
    inputs = fresh(program.sample)
    for parameter in state_of.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    tensors = _step(program, module, inputs)
    found = [(f"output {i}", t) for i, t in enumerate(tensors)]
    found += [(f"requires_grad of output {i}", torch.tensor(t.requires_grad)) for i, t in enumerate(tensors)]
    found += [(f"gradient of {n}", p.grad) for n, p in state_of.named_parameters()]
    found += [(f"gradient of input {i}", x.grad) for i, x in enumerate(inputs)]
    found += [(f"buffer {n}", b.clone()) for n, b in state_of.named_buffers()]
    return [*found, ("generator state", torch.get_rng_state())]


def _step(program: Program, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    tensors, _ = flatten(module(*inputs))
    started = [tensors[i] for i in program.tangents]
    torch.autograd.backward(started, [t.clone() for t in program.tangents.values()])
    return tensors


def _measure(program: Program, module: nn.Module, state_of: nn.Module, gradients: str = "fresh") -> int:
    """Bytes above static at the highest point of a step, the outputs being held."""
    inputs = fresh(program.sample)
    trained = [p for p in state_of.parameters() if p.grad is not None]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if gradients == "accumulated" else None
    hooks = [p.register_post_accumulate_grad_hook(_consume) for p in trained if gradients == "consumed"]
    kept: list[Any] = []
    measured = measure_peak(lambda: kept.append(_step(program, module, inputs)))
    for hook in hooks:
        hook.remove()
    return measured


def _consume(parameter: torch.Tensor) -> None:
    parameter.grad = None


def run_seed(seed: int) -> tuple[str, Outcome | None]:
    """`("ok" | "auto" | "rejected: ..." | "refused: ...", outcome)` of the program of a seed; raises WrongPlan."""
    generator = random.Random(seed)
    try:
        program = draw_program(generator.randint)
        if seed % 10 == 9:
            return "auto", check_auto(program, generator.randint(40, 95))
        return "ok", check(program, generator.randint)
    except Rejected as error:
        return f"rejected: {str(error).splitlines()[0][:60]}", None
    except Unsupported as error:
        return f"refused: {error.construct}", None


def main() -> int:
    """Run seeds; print what was found; exit 1 on a broken promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="programs that must run, besides those rejected")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--small-blocks", action="store_true", help="merge ops and work on blocks whatever their size")
    options = parser.parse_args()
    if options.small_blocks:
        kernels.SMALLEST_BLOCK, kernels.NORM_BLOCK = SMALL_BLOCKS
    kinds: Counter[str] = Counter()
    failures: list[int] = []
    outcomes: list[Outcome] = []
    seed = options.first
    while len(outcomes) + len(failures) < options.count:
        try:
            kind, outcome = run_seed(seed)
        except Exception as error:  # noqa: BLE001 - every failure is counted and told, with its seed
            kind, outcome = f"FAILED: {type(error).__name__}", None
            failures.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        kinds[kind] += 1
        if outcome is not None:
            outcomes.append(outcome)
        seed += 1
        if seed % 100 == 0:
            told = f"{len(outcomes)} of {options.count}, seed {seed}, {len(failures)} failed"
            print(told, file=sys.stderr, flush=True)
    print("\n".join(_summary(kinds, outcomes, failures)))
    return 1 if failures else 0


def _summary(kinds: Counter[str], outcomes: list[Outcome], failures: list[int]) -> Iterator[str]:
    for kind, count in sorted(kinds.items()):
        yield f"{count:6d}  {kind}"
    exact = sum(o.measured_bytes == o.predicted_bytes for o in outcomes)
    below = max((1 - o.measured_bytes / o.predicted_bytes for o in outcomes), default=0.0)
    yield f"{exact} of {len(outcomes)} predicted to the byte; the furthest below its prediction by {below:.2%}"
    yield f"{sum(o.recomputes for o in outcomes)} recomputes; failed seeds: {failures or 'none'}"


if __name__ == "__main__":
    raise SystemExit(main())
