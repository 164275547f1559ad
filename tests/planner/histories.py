"""`python -m tests.planner.histories --count 500`: random models trained for random steps, beside the plain model.

A history is a model of random ops, its plans (of one session, whole or by regions, applied or exported), and steps in
which something is drawn each time: which plan runs, which outputs the backward starts from and in which strides, frozen
parameters, eval, autocast, two forwards at once, accumulation, another batch, an optimizer between. Every step has the
plain model's bits, or is refused by name.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import io
import random
import re
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from passes.memory import measure_peak
from passes.trace.structure import flatten
from planner import BudgetError, Plan
from planner.session import open_session
from solvers.errors import PlannerError
from tests.passes.program_ops import Pick
from tests.passes.programs import Program, Rejected, draw_program, draw_shape
from tests.zoo.compare import same_bits

STEPS = 8
WAYS = ("whole", "regions", "applied", "exported")


class Blocks(nn.Module):
    """Random programs one after another, each on what the one before has made of the first input.

    Args:
        glue: for each program how it is called and what becomes of its results.
    """

    def __init__(self, programs: list[Program], glue: list[Glue], alone: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(p.model for p in programs)
        self.extra, self.glue, self.alone = [len(p.sample) - 1 for p in programs], glue, alone

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        given, made, earlier = list(more), [], [x]
        for block, extra, glue in zip(self.blocks, self.extra, self.glue, strict=True):
            mine, given = given[:extra], given[extra:]
            if glue.skipped and torch.rand([]) < 0.3:
                continue
            before = x.sin() if glue.read_before else None
            made = _differentiable(block(x, *mine))
            if glue.twice:
                made += _differentiable(block(x * 0.5, *mine))
            alike = [t for t in made if t.shape == x.shape]
            if glue.changed and alike and _on_its_own(alike[-1], [x, *made]):
                alike[-1].mul_(0.5)
            if alike and glue.added:
                x = x.transpose(0, 1).mul(0.5).transpose(0, 1) + torch.tanh(alike[-1])
            else:
                x = x + torch.stack([torch.tanh(t).mean() for t in made]).sum()
            x = x if before is None else x + before
            x = x + earlier[0].detach().cos() + earlier[-1] if glue.from_before else x
            earlier.append(x)
        return x.square().mean() if self.alone else (x, *made)


@dataclass
class Glue:
    """What lies between two programs."""

    added: bool  # a result of the same shape is added; else a number of all results
    read_before: bool  # the input is read by others, too
    twice: bool  # the program is called twice
    changed: bool  # a result is changed in place
    from_before: bool  # what came before the last program is read again
    skipped: bool  # now and then


def _on_its_own(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether none of the others shares its memory: torch lets no such result of a region be changed in place."""
    place = tensor.untyped_storage().data_ptr()
    return [t.untyped_storage().data_ptr() for t in others].count(place) == 1


def _differentiable(results: Any) -> list[torch.Tensor]:
    return [t for t in flatten(results)[0] if t.is_floating_point()]


def draw_model(pick: Pick, way: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A random model and its sample.

    Raises:
        Rejected: the draw does not train plainly.
    """
    if way != "regions":
        program = draw_program(pick)
        return program.model, program.sample
    shape = draw_shape(pick)
    programs = [draw_program(pick, 5, shape) for _ in range(pick(2, 4))]
    glue = [Glue(bool(pick(0, 2)), *(pick(0, 3) == 3 for _ in range(4)), pick(0, 5) == 5) for _ in programs]
    model = Blocks(programs, glue, bool(pick(0, 2))).train()
    for program in programs[: pick(0, len(programs) - 1)] if pick(0, 3) == 0 else ():
        program.model.requires_grad_(False)
    return model, (programs[0].sample[0], *(x for p in programs for x in p.sample[1:]))


@dataclass
class Course:
    """What one step does; drawn once, done by both models."""

    seed: int
    training: bool
    frozen: frozenset[str]
    autocast: bool
    inside: bool  # the backward, too
    forwards: int
    last_first: bool
    clear: bool
    start: int  # of the backward: the scalars, or all where there are none; all; some
    layout: int  # of the gradients it starts from
    touched: int  # what happens between forward and backward
    rows: int  # added to the batch
    learn: bool
    inputs: bool  # `torch.autograd.grad` instead
    which: int  # plan
    no_grad: bool


def draw_course(pick: Pick, frozen: Mapping[str, bool], seed: int, plans: int, wild: int) -> Course:
    """A step, the more unusual the more `wild`; `frozen` are the parameters, and whether they are from the start."""

    def rarely(of: int = 8) -> bool:
        return wild > 0 and pick(0, max(1, of * 5 // wild)) == 0

    also = {n for n in frozen if pick(0, 2) == 0} if rarely(4) else set()
    still = frozenset(n for n, always in frozen.items() if always or n in also)
    return Course(seed, not rarely(), still, rarely(5), rarely(3), 2 if rarely(5) else 1, rarely(2), not rarely(4),
                  pick(1, 2) if rarely(4) else 0, pick(1, 3) if rarely(4) else 0, pick(1, 4) if rarely(8) else 0,
                  pick(1, 2) if rarely() else 0, rarely(3), rarely(), pick(0, plans - 1), rarely(10))  # fmt: skip


def take(course: Course, module: nn.Module, owner: nn.Module, sample: tuple[torch.Tensor, ...]) -> list[Any]:
    """Run the step; everything that can be seen afterwards, by name."""
    pick = random.Random(course.seed).randint
    torch.manual_seed(course.seed)
    owner.train(course.training)
    for name, parameter in owner.named_parameters():
        parameter.requires_grad_(name not in course.frozen)
        if course.clear:
            parameter.grad = None
    found: list[Any] = []
    pending, inputs = [], []
    for _ in range(course.forwards):
        inputs.append(_batch(sample, course))
        with torch.no_grad() if course.no_grad else nullcontext(), _autocast(course.autocast):
            tensors, _ = flatten(module(*inputs[-1]))
        found += [(f"output {i}", t.detach().clone()) for i, t in enumerate(tensors)]
        found += [(f"requires_grad of output {i}", torch.tensor(t.requires_grad)) for i, t in enumerate(tensors)]
        pending.append(tensors)
    _touch(course, owner)
    for tensors in reversed(pending) if course.last_first else pending:
        starts = [t for t in tensors if t.requires_grad and t.grad_fn is not None]
        if course.start == 0:
            starts = [t for t in starts if t.dim() == 0] or starts
        elif course.start == 2:
            starts = [t for t in starts if pick(0, 1)] or starts[-1:]
        if not starts:
            continue
        gradients = [_gradient(t, course.layout) for t in starts]
        with _autocast(course.autocast and course.inside):
            if course.inputs:
                asked = [p for p in owner.parameters() if p.requires_grad]
                got = torch.autograd.grad(starts, asked, gradients, allow_unused=True)
                found += [(f"asked gradient {i}", g) for i, g in enumerate(got)]
            else:
                torch.autograd.backward(starts, gradients)
    found += [(f"gradient of {n}", _copied(p.grad)) for n, p in owner.named_parameters()]
    found += [(f"gradient of input {i}", _copied(x.grad)) for xs in inputs for i, x in enumerate(xs)]
    if course.learn:
        with torch.no_grad():
            for parameter in owner.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)
    found += [(f"parameter {n}", _copied(p)) for n, p in owner.named_parameters()]
    found += [(f"buffer {n}", b.clone()) for n, b in owner.named_buffers()]
    return [*found, ("generator state", torch.get_rng_state())]


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _autocast(on: bool) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else nullcontext()


def _batch(sample: tuple[torch.Tensor, ...], course: Course) -> list[torch.Tensor]:
    """The sample's kind of inputs, with other numbers; with rows more in each, or strides that it had not."""
    made = []
    for x in sample:
        more = torch.cat([x, *[x[:1]] * course.rows]).detach() if course.rows and x.dim() else x.detach().clone()
        if more.is_floating_point():
            more = more + torch.randn(more.shape) * 0.1
        made.append(more.requires_grad_(x.requires_grad))
    return made


def _gradient(tensor: torch.Tensor, layout: int) -> torch.Tensor:
    """Random numbers in the tensor's strides, in others, in none (expanded), or as part of something larger."""
    drawn = torch.randn_like(tensor)
    if layout == 1 and tensor.dim() > 1:
        return drawn.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2:
        return torch.randn((), dtype=tensor.dtype).expand(tensor.shape)
    if layout == 3 and tensor.dim():
        return torch.cat([drawn, drawn], -1).narrow(-1, tensor.shape[-1], tensor.shape[-1])
    return drawn


def _touch(course: Course, owner: nn.Module) -> None:
    """Something changes between forward and backward, which plain eager allows or refuses as it does."""
    if course.touched == 1:
        owner.train(not course.training)
    elif course.touched == 2:
        for buffer in owner.buffers():
            buffer.data = buffer.data.clone() + 1
    elif course.touched == 3:
        with torch.no_grad():
            for buffer in owner.buffers():
                buffer.add_(1)
    elif course.touched == 4:
        torch.manual_seed(course.seed + 1)


class WrongStep(AssertionError):
    """A planned step has other numbers than the plain one."""


@dataclass
class History:
    """What became of one history: how many steps were compared, and what was said of those refused by name.

    Attributes:
        exact: whether the peak was predicted to the byte, where it was measured.
    """

    kind: str
    steps: int = 0
    exact: bool | None = None
    refused: list[str] = field(default_factory=list)


def run(seed: int, steps: int = STEPS) -> History:
    """The history of a seed; raises WrongStep."""
    generator = random.Random(seed)
    pick: Pick = generator.randint
    way = WAYS[seed % len(WAYS)]
    torch.manual_seed(seed)
    try:
        model, sample = draw_model(pick, way)
        plain, frozen = copy.deepcopy(model), {n: not p.requires_grad for n, p in model.named_parameters()}
        for trial in range(seed, seed + 4):  # blocks are skipped by chance
            take(draw_course(pick, frozen, trial, 1, 0), *[copy.deepcopy(plain)] * 2, sample)
    except (Rejected, RuntimeError, ValueError) as error:
        return History(f"rejected: {_first_words(error)}")
    try:
        plans = list(_plans(pick, model, sample, way))
        planned, owner = _modules(plans, model, way)
    except PlannerError as error:
        return History(f"{way}, refused: {_first_words(error)}")
    history, skips = History(way), isinstance(model, Blocks) and any(glue.skipped for glue in model.glue)
    if way in ("whole", "regions") and not skips:
        found = list(map(_Measured(model, sample), plans))
        history.exact = all(found)
        _State(plain).restore(model)
    wild = pick(0, 3 if way == "exported" else 9)
    for i in range(steps):
        course, before = draw_course(pick, frozen, seed * 1000 + i, len(planned), wild), _State(plain)
        course.rows *= not skips  # plain skips what would refuse them, planning takes the sample's course
        try:
            with redirect_stderr(io.StringIO()):  # a GraphModule prints where it fails
                expected = take(course, plain, plain, sample)
        except (RuntimeError, ValueError, IndexError):
            before.restore(plain)
            continue
        try:
            if way == "applied":
                plans[course.which].apply()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*there is no plain model to run")  # an export's last bits
                got = take(course, planned[course.which], owner, sample)
        except Exception as error:
            if not isinstance(error, (PlannerError, UserWarning)) and type(error).__name__ != "ExportError":
                raise WrongStep(f"step {i} fails: {type(error).__name__}: {error}\n{course}") from error
            history.refused.append(_first_words(error))
            before.restore(plain)
            before.restore(owner)
            continue
        finally:
            if way == "applied":
                plans[course.which].remove()
        _compare(expected, got, i, course)
        history.steps += 1
    return history


class _Measured:
    """Whether a step like the sample's takes what was predicted, to the byte; WrongStep where it takes more."""

    def __init__(self, model: nn.Module, sample: tuple[torch.Tensor, ...]) -> None:
        self.model, self.sample = model, sample

    def __call__(self, plan: Plan) -> bool:
        options, kept = plan.prepared.options, list[Any]()
        for _ in range(2):  # the first makes what is made once
            kept.clear()
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if options.gradients == "accumulated" else None
            inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.sample]
            step = partial(self._step, plan.module, inputs, kept, options.keep_outputs)
            measured = plan.static_bytes + measure_peak(step)
        if measured > plan.peak_bytes:
            raise WrongStep(f"{measured} bytes measured where {plan.peak_bytes} were predicted ({options.gradients})")
        return measured == plan.peak_bytes

    @staticmethod
    def _step(module: nn.Module, inputs: list[torch.Tensor], kept: list[Any], keep_outputs: bool) -> None:
        outputs = flatten(module(*inputs))[0]
        differentiable = [t for t in outputs if t.grad_fn is not None]
        starts = [t for t in differentiable if t.dim() == 0] or differentiable
        kept.append(outputs if keep_outputs else starts)
        del outputs, differentiable
        torch.autograd.backward(starts, [torch.ones_like(t) for t in starts])


class _State:
    """Parameters, gradients and buffers of a module, to go on from where a step was refused."""

    def __init__(self, module: nn.Module) -> None:
        self.state = {n: t.detach().clone() for n, t in module.state_dict().items()}
        self.gradients = {n: _copied(p.grad) for n, p in module.named_parameters()}

    def restore(self, module: nn.Module) -> None:
        module.load_state_dict(self.state)
        for name, parameter in module.named_parameters():
            parameter.grad = _copied(self.gradients[name])


def _first_words(error: Exception) -> str:
    return f"{type(error).__name__} {re.sub('[0-9.]+', 'N', str(error).splitlines()[0])[:60]}"


def _modules(plans: list[Plan], model: nn.Module, way: str) -> tuple[list[nn.Module], nn.Module]:
    """What runs for each plan, and the module that has the parameters."""
    if way == "exported":
        with tempfile.TemporaryDirectory() as folder:
            name = f"exported_{uuid.uuid4().hex}"
            plans[0].export(Path(folder) / name)
            sys.path.insert(0, folder)
            try:
                module = importlib.import_module(name).load()
            finally:
                sys.path.remove(folder)
        return [module], module
    return [model if way == "applied" else plan.module for plan in plans], model


def _plans(pick: Pick, model: nn.Module, sample: tuple[torch.Tensor, ...], way: str) -> Iterator[Plan]:
    hints = ["*"] if pick(0, 2) else []  # with no budget, all that can be is computed again
    session = open_session(
        model, sample, time_limit=1, progress=False, solver="greedy", recompute=hints, check=False,
        regions=["blocks.*"] if way == "regions" else "whole", keep_outputs=bool(pick(0, 3)),
        gradients=("fresh", "fresh", "accumulated")[pick(0, 2)],
    )  # fmt: skip
    if hints:
        yield session.plan(None)
    low = session.problem.static_bytes
    for _ in range(pick(0 if hints else 1, 2)):
        try:
            yield session.plan(low + (session.plain_peak_bytes - low) * pick(30, 100) // 100)
        except BudgetError as error:
            yield session.plan(error.minimum_bytes)


def _compare(expected: list[Any], got: list[Any], step: int, course: Course) -> None:
    wrong = [n for (n, a), (_, b) in zip(expected, got, strict=True) if not same_bits(a, b)]
    if wrong:
        raise WrongStep(f"step {step} differs in {', '.join(wrong[:6])}\n{course}")


def main() -> int:
    """Run seeds; print what was found; exit 1 where a number was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="histories that are not rejected")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    kinds: dict[str, list[int]] = defaultdict(list)
    exact: list[bool | None] = []
    failures, done, steps, seed, start = [], 0, 0, options.first, time.monotonic()
    while done < options.count and time.monotonic() - start < options.seconds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                history = run(seed)
        except Exception as error:  # noqa: BLE001 - every failure is counted and told, with its seed
            history = History(f"FAILED: {type(error).__name__}")
            failures.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, WrongStep):
                traceback.print_exc()
        done += not history.kind.startswith("rejected")
        steps += history.steps
        exact.append(history.exact)
        for kind in (history.kind, *(f"{history.kind}, a step refused: {why}" for why in history.refused)):
            kinds[kind].append(seed)
        seed += 1
    for kind, seeds in sorted(kinds.items()):
        print(f"{len(seeds):6d}  {kind} (seed {seeds[0]})")
    told = [e for e in exact if e is not None]
    print(f"{sum(told)} of {len(told)} predicted to the byte")
    print(f"{steps} steps compared; seeds {options.first} to {seed - 1}; failed: {failures or 'none'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
