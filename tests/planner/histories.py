"""`python -m tests.planner.histories --count 500`: random models trained for random steps, beside the plain model.

A history is a model of random ops, its plans (of one session, whole or by regions, applied or exported), and steps in
which something is drawn each time (`tests.planner.courses`): which plan runs, frozen parameters, autocast, two forwards
at once, hooks, another batch, where the backward starts from. Every step has the plain model's bits, or is refused by
name. With `--way compiled` the model is compiled by our backend under budgets: where AOT autograd has other bits than
the plain model, or fails, ours may have these, or fail too; where Dynamo draws other random numbers than the
plain model, nothing is compared. With `--way replicated` DistributedDataParallel is around both models, with `--way
sharded` `fully_shard` was called on parts of both, in a process group of one rank; with `--ranks 2` of two, in two
processes that are started for each history.
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
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from passes._torch import local_part
from passes.memory import measure_peak
from passes.trace.structure import flatten
from planner import BudgetError, Plan, RankError, auto_checkpoint
from planner.session import open_session
from solvers.errors import MIB, PlannerError
from tests.distributed.harness import Failed, try_ranks
from tests.passes.program_ops import Pick
from tests.passes.programs import Rejected, fresh
from tests.planner.courses import HOOKS_OF_LAYERS, Course, autocast, copied, draw_course, take, unsummed
from tests.planner.history_models import Blocks, draw_model, levelled
from tests.planner.history_ranks import REPLICATED, SHARDED, draw_spread
from tests.zoo.compare import same_bits

STEPS = 8
DRAWN = "generator state"
AOT: Any = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
NAMED = {"PlannerError", "ExportError", "UserWarning"}  # an export has classes of its own
WAYS = ("whole", "regions", "applied", "exported")
COMPILED = "compiled"
RANKS = (REPLICATED, SHARDED)
SUMS = ("is a sum, as the planned step reads it more than once", "a result of the planned step was changed in place")
CHANGED = "modified by an inplace operation"  # autograd's


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


def run(seed: int, steps: int = STEPS, way: str | None = None) -> History:
    """The history of a seed; raises WrongStep."""
    pick: Pick = random.Random(seed).randint
    way = way or WAYS[seed % len(WAYS)]
    torch.manual_seed(seed)
    try:
        model, sample = draw_model(pick, way == "regions" or (way in (COMPILED, *RANKS) and bool(pick(0, 3))))
        plain, frozen = copy.deepcopy(model), {n: not p.requires_grad for n, p in model.named_parameters()}
        for trial in range(seed, seed + 4):  # blocks are skipped by chance
            take(draw_course(pick, frozen, trial, 1, 0), *[copy.deepcopy(plain)] * 2, sample)
        if way in RANKS:
            if isinstance(model, Blocks) and any(glue.skipped for glue in model.glue):
                raise Rejected("what plain skips by chance, planning runs")
            spread = draw_spread(pick, model, way)
            plain, model = spread(plain), spread(model)
            frozen, before = {n: not p.requires_grad for n, p in model.named_parameters()}, _State(plain)
            take(draw_course(pick, frozen, seed, 1, 0), plain, plain, sample)
            before.restore(plain)
    except (Rejected, RuntimeError, ValueError) as error:
        return History(f"rejected: {_first_words(error)}")
    cast = pick(0, 3) == 0
    try:
        with autocast(cast):
            of_way = _plans_of_ranks if way in RANKS else _plans
            plans = [] if way == COMPILED else list(of_way(pick, model, sample, way))
        modules, owner = _modules(plans, model, way) if plans else (_compiled(pick, model), model)
    except PlannerError as error:
        return History(f"{way}, refused: {_first_words(error)}")
    pair = _Pair(plain, sample, way, plans, modules, owner)
    history, skips = History(way), isinstance(model, Blocks) and any(glue.skipped for glue in model.glue)
    if way in ("whole", "regions", SHARDED) and not skips:
        try:
            history.exact = all(_is_exact(plan, model, sample, way == SHARDED, cast) for plan in pair.plans)
        except PlannerError as error:
            return History(f"{way}, refused: {_first_words(error)}")
        _State(plain).restore(model)
    wild = pick(0, 3 if way == "exported" else 9)
    for i in range(steps):
        course = draw_course(pick, frozen, seed * 1000 + i, len(pair.planned), wild)
        course.rows *= not skips  # plain skips what would refuse them, planning takes the sample's course
        course.twice &= way != COMPILED  # AOT autograd wants to know whether a graph is retained
        if course.asked and course.hooks == 1:
            course.hooks = 0  # a gradient that the plan did not expect is not found, where the parameter has a hook
        if way in RANKS:
            course.before %= 2  # what they know of parameters is found once
        if way == "exported":  # it has none of the layers, and its own of what nobody registers
            course.hooks *= course.hooks not in HOOKS_OF_LAYERS
            course.before, course.touched = course.before % 5, course.touched % 5
        if not pair.take(course, i, history) and way in RANKS:
            break  # a step that failed leaves its parameters gathered
    return history


class _Pair:
    """A plain model and the plans of its twin, which take the same steps."""

    def __init__(
        self, plain: nn.Module, sample: tuple[torch.Tensor, ...], way: str, plans: list[Plan],
        planned: list[nn.Module], owner: nn.Module,
    ) -> None:  # fmt: skip
        self.plain, self.sample, self.way, self.plans = plain, sample, way, plans
        self.planned, self.owner, self.told = planned, owner, ""
        self.known: nn.Module | None = None
        if way == COMPILED:
            self.known = copy.deepcopy(plain)
            self.known.compile(backend=AOT)

    def take(self, course: Course, number: int, history: History) -> bool:
        """One step of both, where plain takes it; whether both took it."""
        before = _State(self.plain)
        self.owner.state_dict()  # as that of plain: FSDP2 scatters what an evaluation left gathered
        try:
            with redirect_stderr(io.StringIO()):  # a GraphModule prints where it fails
                expected = take(course, self.plain, self.plain, self.sample)
        except (RuntimeError, ValueError, IndexError, AssertionError):  # FSDP2 has the last
            before.restore(self.plain)
            return False
        of_torch = self._of_torch(course, before)
        try:
            got = self._take_planned(course)
        except Exception as error:
            error = getattr(error, "inner_exception", error)  # of a backend, in Dynamo's own
            kinds = {t.__name__ for t in type(error).__mro__}
            of_autograd = self.way == COMPILED and of_torch is None
            if CHANGED in str(error):  # of a compiled step; of statistics that a plain forward and a planned one wrote
                of_autograd = of_autograd or self.way == COMPILED or (self.way in RANKS and course.forwards > 1)
            if "VerificationError" in kinds or (NAMED.isdisjoint(kinds) and not of_autograd):
                raise WrongStep(f"step {number} fails: {type(error).__name__}: {error}\n{course}") from error
            history.refused.append(_first_words(error))
            if self.way == COMPILED and isinstance(error, BudgetError) and error.minimum_bytes is not None:
                self.planned[course.which] = _compiled_under(self.owner, error.minimum_bytes / MIB)
            if self.way not in RANKS:
                before.restore(self.plain)
                before.restore(self.owner)
            return False
        wrong = _differing(expected, got)
        if wrong and any(s in self.told for s in SUMS) and all(_is_a_sum(*w, course.autocast) for w in wrong):
            history.refused.append("the last bits of a sum differ, which is said")
            self._go_on()
            return True
        others = [] if of_torch is None else _differing(expected, of_torch)
        drawn = any(name == DRAWN for name, *_ in others)
        if wrong and not drawn and (not others or _differing(of_torch, got)):
            raise WrongStep(f"step {number} differs in {', '.join(n for n, *_ in wrong[:6])}\n{course}")
        if wrong:
            self._go_on()
        history.steps += not (wrong and drawn)
        return True

    def _go_on(self) -> None:
        """From the plain model's state."""
        _State(self.plain).restore(self.owner)

    def _of_torch(self, course: Course, before: _State) -> list[Any] | None:
        """What AOT autograd makes of the step, without a partition of ours; None where that fails."""
        if self.known is None:
            return None
        before.restore(self.known)
        try:
            with redirect_stderr(io.StringIO()):
                return take(course, self.known, self.known, self.sample)
        except Exception:  # noqa: BLE001 - whatever torch raises
            return None

    def _take_planned(self, course: Course) -> list[Any]:
        if self.way == "applied":
            self.plans[course.which].apply()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                warnings.filterwarnings("error", ".*there is no plain model to run")  # an export's last bits
                return take(course, self.planned[course.which], self.owner, self.sample)
        finally:
            self.told = " ".join(str(w.message) for w in told)
            if self.way == "applied":
                self.plans[course.which].remove()


def _differing(expected: list[Any], got: Any) -> list[tuple[str, Any, Any]]:
    """What does not have the same bits: its name, and both."""
    shown = {n for n, _ in got}  # by an export, nothing that is not registered
    expected = [(n, a) for n, a in expected if n in shown or not n.startswith("unregistered")]
    pairs = [(n, local_part(a), local_part(b)) for (n, a), (_, b) in zip(expected, got, strict=True)]
    return [(n, a, b) for n, a, b in pairs if not same_bits(a, b)]


def _is_a_sum(name: str, expected: torch.Tensor | None, got: torch.Tensor | None, autocast: bool) -> bool:
    """Whether it is a gradient, or was learned from one, and differs by what another order of a sum makes."""
    if not name.startswith(("gradient", "asked gradient", "parameter")) or expected is None or got is None:
        return False
    return bool((got - expected).abs().max() <= (2.0**-7 if autocast else 1e-5) * expected.abs().max())


def _is_exact(plan: Plan, model: nn.Module, sample: tuple[torch.Tensor, ...], sharded: bool, cast: bool) -> bool:
    """Whether a step like the sample's, under autocast where that is `cast`, takes what was predicted, to the byte.

    Raises:
        WrongStep: it takes more.
    """
    options, kept, measured = plan.prepared.options, list[Any](), list[int]()
    accumulated = options.gradients == "accumulated"
    with warnings.catch_warnings(record=True) as told, unsummed(model) if sharded and accumulated else nullcontext():
        warnings.simplefilter("always")
        for _ in range(5 if _is_one_of_several() else 2):  # the first makes what is made once
            kept.clear()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if accumulated and not sharded else None
            step = partial(_step_like_the_sample, plan.module, fresh(sample), kept, options.keep_outputs, cast)
            measured.append(plan.static_bytes + measure_peak(step))
    if sharded and accumulated:
        kept.clear()
        _step_like_the_sample(plan.module, fresh(sample), kept, True, cast)  # sums what the others have left
    if any("replays the plain forward" in str(w.message) for w in told):
        return False  # other gradients than those of the sample: the next step is planned anew
    least = min(measured[1:])
    copies = sum(p.nbytes for p in model.parameters()) if _is_one_of_several() else 0  # gloo's, freed by its own thread
    if least > plan.peak_bytes + copies:
        raise WrongStep(f"{least} bytes measured where {plan.peak_bytes} were predicted ({options.gradients})")
    return least == plan.peak_bytes


def _is_one_of_several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _step_like_the_sample(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], kept: list[Any], keep_outputs: bool, cast: bool
) -> None:
    with autocast(cast):
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
        self.gradients = {n: copied(p.grad) for n, p in module.named_parameters()}
        self.levels = [(part.level.clone(), part.factor, part.rows) for part in levelled(module)]

    def restore(self, module: nn.Module) -> None:
        module.load_state_dict(self.state)
        for part, (level, factor, rows) in zip(levelled(module), self.levels, strict=False):  # an export shows none
            part.level.copy_(level)
            part.factor, part.rows = factor, rows
        for name, parameter in module.named_parameters():
            parameter.grad = copied(self.gradients[name])


def _first_words(error: Exception) -> str:
    return f"{type(error).__name__} {re.sub('[0-9.]+', 'N', (str(error).splitlines() or [''])[0])[:60]}"


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


def _compiled(pick: Pick, model: nn.Module) -> list[nn.Module]:
    """The model compiled by our backend, under one budget or two."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 100  # beyond it Dynamo runs plain code
    budgets = [None if pick(0, 2) == 0 else f"{pick(60, 100)}%" for _ in range(pick(1, 2))]
    return [_compiled_under(model, budget) for budget in budgets]


def _compiled_under(model: nn.Module, budget: float | str | None) -> Any:
    options = {"inner": "eager", "solver": "greedy", "time_limit": 1.0, "budget_mb": budget}
    return torch.compile(model, backend="checkpoint_planner", options=options)


def _plans(pick: Pick, model: nn.Module, sample: tuple[torch.Tensor, ...], way: str) -> Iterator[Plan]:
    hints = ["*"] if pick(0, 2) else []  # with no budget, all that can be is computed again
    session = open_session(
        model, sample, time_limit=1, progress=False, solver="greedy", recompute=hints, check=False,
        regions=["blocks.*"] if way == "regions" else "whole",
        keep_outputs=bool(pick(0, 3)),
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


def _plans_of_ranks(pick: Pick, model: nn.Module, sample: tuple[torch.Tensor, ...], way: str) -> Iterator[Plan]:
    del way
    plan = partial(
        auto_checkpoint, model, sample, time_limit=1, progress=False, solver="greedy", check=False,
        keep_outputs=bool(pick(0, 3)), gradients=("fresh", "fresh", "accumulated")[pick(0, 2)],
    )  # fmt: skip
    if pick(0, 1):
        yield plan(recompute=["*"])
    for _ in range(pick(1, 2)):
        try:
            yield plan(f"{pick(60, 100)}%")
        except (BudgetError, RankError):  # of this rank, or of the first one
            yield plan()


def _on_rank(rank: int, seed: int, way: str) -> History:
    del rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(seed, way=way)


def run_on_ranks(seed: int, way: str, ranks: int) -> History:
    """The history of a seed in so many processes: the first rank's; raises WrongStep where one of them does."""
    answers = try_ranks(_on_rank, seed, way, ranks=ranks, seconds=90)
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, Failed)]
    if failed:
        raise WrongStep("\n".join(failed))
    return answers[0]


def main() -> int:
    """Run seeds; print what was found; exit 1 where a number was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="histories that are not rejected")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    ways = (*WAYS, COMPILED, *RANKS)
    parser.add_argument("--way", choices=ways, help="how all are planned; each in turn where not given")
    parser.add_argument("--ranks", type=int, default=1, help="processes, where the model is replicated or sharded")
    options = parser.parse_args()
    if options.ranks > 1 and options.way not in RANKS:
        parser.error("--ranks is for --way replicated and --way sharded")
    kinds: dict[str, list[int]] = defaultdict(list)
    exact: list[bool | None] = []
    failures, done, steps, seed, start = [], 0, 0, options.first, time.monotonic()
    while done < options.count and time.monotonic() - start < options.seconds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                spread = options.ranks > 1
                history = run_on_ranks(seed, options.way, options.ranks) if spread else run(seed, way=options.way)
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
