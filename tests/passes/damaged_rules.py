"""`python -m tests.passes.damaged_rules --count 200`: random damage to the fused ops' records and to the rules.

A damaged record (another meaning or kernel, operands swapped, a cast left out, a guard that admits too much, a donated
argument that is not free) counts when some result or some meaning has other bits; `tests.passes.registry` must refuse
it. A damaged rule (operands swapped, another op, a guard or a cast not looked at, results mixed up) counts when the
step that is planned with it has other bits; the proof must refuse it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from passes.alias import alias
from passes.fuse import match, normal_form, records, rules
from passes.fuse.fused import Fused
from passes.fuse.meaning import run as run_meaning
from passes.lower import lower
from passes.profile import profile
from passes.rates import cost_function
from passes.trace.arguments import bind_sample, state_tensors
from passes.trace.capture import capture
from planner.options import Options
from planner.prepared import Prepared
from solvers.schedule import plain_order, with_frees
from tests.passes import registry
from tests.passes.corruptions import Case, Pick, Tally, changes_a_value, is_refused, one_thread, run_halves
from tests.passes.programs import draw_schedule

aten = torch.ops.aten
Change = Callable[[Pick, Fused], "Fused | None"]
CHANGES: dict[str, Change] = {}  # a record -> a damaged one
Patch = Callable[[Pick], "Patched | list[Patched] | None"]
Patched = tuple[Any, str, Any]  # a module, a name in it and what to put there while a step is captured and rewritten
PATCHES: dict[str, Patch] = {}
MEANT = [fused for fused in records.FUSED if fused.meaning]


def change(function: Change) -> Change:
    """Register under the function's name."""
    CHANGES[function.__name__] = function
    return function


def patch(function: Patch) -> Patch:
    """Register under the function's name."""
    PATCHES[function.__name__] = function
    return function


def _choose(pick: Pick, options: list[Any]) -> Any:
    return options[pick(0, len(options) - 1)] if options else None


def _tensors(fused: Fused) -> list[int]:
    return [i for i, a in enumerate(fused.op._schema.arguments) if "Tensor" in str(a.type)]


def _swapped(pick: Pick, fused: Fused) -> Callable[[Any], tuple[Any, ...]] | None:
    pair = _choose(pick, list(itertools.combinations(_tensors(fused), 2)))
    if pair is None:
        return None
    order = list(range(len(fused.op._schema.arguments)))
    order[pair[0]], order[pair[1]] = pair[1], pair[0]
    return lambda arguments: tuple(arguments[i] for i in order)


# Records ------------------------------------------------------------------------------------------------------------


@change
def swap_operands_of_the_meaning(pick: Pick, fused: Fused) -> Fused | None:
    swap, meaning = _swapped(pick, fused), fused.meaning
    return swap and replace(fused, meaning=lambda *a: meaning(*swap(a)))  # type: ignore[misc]


@change
def swap_operands_of_the_kernel(pick: Pick, fused: Fused) -> Fused | None:
    swap, kernel = _swapped(pick, fused), fused.kernel
    return swap and replace(fused, kernel=lambda *a, **k: kernel(*swap(a), **k))


def _other(pick: Pick, fused: Fused) -> Fused | None:
    count = len(fused.op._schema.arguments)
    return _choose(pick, [f for f in MEANT if f is not fused and len(f.op._schema.arguments) == count])


@change
def meaning_of_another_op(pick: Pick, fused: Fused) -> Fused | None:
    other = _other(pick, fused)
    return other and replace(fused, meaning=other.meaning)


@change
def kernel_of_another_op(pick: Pick, fused: Fused) -> Fused | None:
    other = _other(pick, fused)
    return other and replace(fused, kernel=other.kernel)


@change
def constant_of_the_meaning(pick: Pick, fused: Fused) -> Fused | None:
    """Another reduction, class to ignore, padding, probability."""
    meaning = fused.meaning
    place = _choose(pick, [i for i in range(len(fused.op._schema.arguments)) if i not in _tensors(fused)])
    if place is None or meaning is None:
        return None

    def other(*arguments: Any) -> Any:
        value = arguments[place]
        changed = value / 2 if isinstance(value, float) else (value + 1) % 3 if isinstance(value, int) else value
        return meaning(*arguments[:place], changed, *arguments[place + 1 :])

    return replace(fused, meaning=other)


@change
def leave_out_a_cast(pick: Pick, fused: Fused) -> Fused | None:
    """Compute in another type, and return that or round to the type that was asked for."""
    kernel, dtype = fused.kernel, (torch.float32, torch.bfloat16, torch.float64)[pick(0, 2)]
    back = bool(pick(0, 1))

    def other(*arguments: Any, **keywords: Any) -> Any:
        kind = next(a.dtype for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point())
        found = kernel(*(a.to(dtype) if _is_real(a) else a for a in arguments))
        results = found if isinstance(found, tuple) else (found,)
        results = tuple(r.to(kind) if back and r.is_floating_point() else r for r in results)
        for out in keywords.values():
            return out.copy_(results[0])
        return results if isinstance(found, tuple) else results[0]

    return replace(fused, kernel=other)


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@change
def admit_any_layout(pick: Pick, fused: Fused) -> Fused:
    when = fused.when
    return replace(fused, when=lambda *a: when(*(v.contiguous() if isinstance(v, torch.Tensor) else v for v in a)))


@change
def admit_any_type(pick: Pick, fused: Fused) -> Fused:
    when = fused.when
    return replace(fused, when=lambda *a: when(*(_as_float(v) for v in a)))


def _as_float(value: Any) -> Any:
    if not _is_real(value):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=torch.float32)


@change
def admit_everything(pick: Pick, fused: Fused) -> Fused:
    return replace(fused, when=lambda *_: True)


@change
def admit_what_is_large(pick: Pick, fused: Fused) -> Fused:
    """A guard that looks at the size alone."""
    place = _tensors(fused)[0]
    return replace(fused, when=lambda *a: a[place].numel() > 8)


@change
def donate_another_argument(pick: Pick, fused: Fused) -> Fused | None:
    """Or one that no kernel form takes."""
    free = [i for i in _tensors(fused) if i not in fused.donates]
    return replace(fused, donates=(*fused.donates, _choose(pick, free))) if fused.written and free else None


@change
def write_before_reading(pick: Pick, fused: Fused) -> Fused | None:
    kernel, written = fused.kernel, fused.written
    if written is None or fused.checks_owner:
        return None

    def other(*arguments: Any, out: torch.Tensor | None = None) -> Any:
        return kernel(*arguments, **({written: out.zero_()} if out is not None else {}))

    return replace(fused, kernel=other)


def changes_a_record(fused: Fused, damaged: Fused) -> bool:
    """Whether some result of the kernel, or some meaning, has other bits than the sound meaning where it is used."""
    torch.manual_seed(99)
    for arguments in registry.CASES[fused.name]():
        if not damaged.takes(*arguments):
            continue
        try:
            sound = registry._outcome(lambda a=arguments: run_meaning(fused.meaning(*a)))  # type: ignore[misc]
        except (RuntimeError, IndexError):
            continue  # torch refuses such arguments
        if not registry._agree(sound, lambda a=arguments: run_meaning(damaged.meaning(*a))):  # type: ignore[misc]
            return True
        if any(registry._found(damaged, arguments, place, sound) is False for place in (None, *damaged.donates)):
            return True
    return False


def judge_a_record(pick: Pick) -> tuple[str, bool, bool] | None:
    """Damage a record: what was done, whether it changes a value, whether it is refused."""
    fused = _choose(pick, MEANT)
    name = _choose(pick, list(CHANGES))
    damaged = CHANGES[name](pick, fused)
    if damaged is None:
        return None
    torch.manual_seed(0)
    refused = bool(registry.wrong(damaged))
    return f"{name}", changes_a_record(fused, damaged), refused


# Rules --------------------------------------------------------------------------------------------------------------


def _replaced(fused: Fused, other: Fused) -> Patched:
    return records, "FUSED", tuple(other if f is fused else f for f in records.FUSED)


@patch
def operands_swapped(pick: Pick) -> Patched | None:
    fused, substitute = _choose(pick, MEANT), match.substitute
    swap = _swapped(pick, fused)

    def other(op: Fused, root: Any, arguments: Any) -> Any:
        return substitute(op, root, swap(arguments) if swap and op.name == fused.name else arguments)

    return match, "substitute", other


@patch
def another_op_put_in(pick: Pick) -> Patched | None:
    fused, substitute = _choose(pick, MEANT), match.substitute
    put = _other(pick, fused)
    return put and (
        match, "substitute", lambda op, root, arguments: substitute(put if op is fused else op, root, arguments)
    )  # fmt: skip


@patch
def another_constant(pick: Pick) -> Patched:
    substitute = match.substitute

    def other(op: Fused, root: Any, arguments: Any) -> Any:
        places = [i for i, a in enumerate(arguments) if isinstance(a, (int, float))]
        place = _choose(pick, places)
        value = None if place is None else arguments[place] / 2 if isinstance(arguments[place], float) else 2
        changed = arguments if place is None else (*arguments[:place], value, *arguments[place + 1 :])
        return substitute(op, root, changed)

    return match, "substitute", other


@patch
def no_guard_looked_at(pick: Pick) -> Patched:
    fused = _choose(pick, MEANT)
    pays = fused.pays and (lambda *_: True)
    return _replaced(fused, replace(fused, when=lambda *_: True, pays=pays))


@patch
def pattern_of_another_op(pick: Pick) -> Patched | None:
    fused = _choose(pick, [f for f in MEANT if f.pays])
    other = _other(pick, fused)
    return other and _replaced(fused, replace(fused, meaning=other.meaning, when=lambda *_: True))


@patch
def pattern_with_swapped_operands(pick: Pick) -> Patched | None:
    fused = _choose(pick, [f for f in MEANT if f.pays])
    damaged = swap_operands_of_the_meaning(pick, fused)
    return damaged and _replaced(fused, replace(damaged, when=lambda *_: True))


@patch
def casts_not_seen(pick: Pick) -> list[Patched]:
    seen_through = (aten._to_copy.default, aten.neg.default, aten.clone.default, aten.mul.Tensor)[: pick(1, 4)]
    same = normal_form.SAME | set(seen_through)
    return [(normal_form, "SAME", same), (match, "SAME", same)]


@patch
def other_readers_forgotten(pick: Pick) -> Patched:
    return match, "only_reads", lambda *_: True


@patch
def parts_mixed_up(pick: Pick) -> Patched:
    place = pick(0, 1)

    def other(*arguments: Any) -> Any:
        first, mean, invstd, *rest = split.parts(*arguments)
        return first, invstd, mean, *rest

    split = records.SPLITS[place]
    return records, "SPLITS", tuple(replace(s, parts=other) if s is split else s for s in records.SPLITS)


@patch
def parts_without_a_guard(pick: Pick) -> Patched:
    return records, "SPLITS", tuple(replace(s, when=lambda *_: True) for s in records.SPLITS)


@patch
def halves_mixed_up(pick: Pick) -> Patched:
    halves, kind = records.halves, pick(0, 2)

    def other(gradient: Any, values: Any, weight: Any, *rest: Any) -> Any:
        of_input, _, of_bias = halves(gradient, values, weight, *rest)
        if kind == 0:  # the weight's gradient without the input's values
            return of_input, of_input.call[1], of_bias
        if kind == 1 and len(rest[2]) == 2:  # another padding
            return halves(gradient, values, weight, *rest[:2], [p + 1 for p in rest[2]], *rest[3:])
        return halves(values, gradient, weight, *rest)

    return records, "halves", other


@patch
def stand_in_of_another_shape(pick: Pick) -> Patched:
    stand_in = rules._stand_in

    def other(node: Any, candidates: Any, source: Any) -> Any:
        found = stand_in(node, candidates, source)
        if found is not source:
            found.args = (found.args[0], found.args[1][::-1], found.args[2][::-1])
        return found

    return rules, "_stand_in", other


@patch
def input_stood_in_for_everywhere(pick: Pick) -> Patched:
    """Any tensor will do, the right shape or not."""
    return rules, "_stand_in", lambda node, candidates, source: candidates[pick(0, len(candidates) - 1)]


@patch
def statistics_of_another_norm(pick: Pick) -> Patched:
    return rules, "_normalizes", lambda normal, found: normal.target in rules.NORMALIZE


@patch
def what_follows_a_norm_forgotten(pick: Pick) -> Patched:
    return rules, "_followed", lambda normal, result: result


@patch
def buffers_of_the_other_kind(pick: Pick) -> Patched:
    buffer = rules._buffer
    return rules, "_buffer", lambda statistics, place: buffer(statistics, 1 - place)


class Words(nn.Module):
    """A language model in miniature: tied weights, dropout, residuals through casts, logits that are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        y = F.dropout(self.first(x), 0.3)
        x = (x + y).relu() + (x - y).double().add(y.double()).float().relu()
        z = torch.where(keep, self.second(x), x * 0.5) * keep
        x = (z + (y + x).relu().transpose(0, 1).contiguous().transpose(0, 1)).relu() + (y + y).relu() + (-z + x).relu()
        logits = (x @ self.embedding.weight.t()).flatten(0, 1)
        target = tokens.flatten()
        loss = F.cross_entropy(logits, target) + F.cross_entropy(logits.double(), target, reduction="sum").float()
        return {"loss": loss + F.cross_entropy((logits * 2)[:, 1:], target % 9, ignore_index=3), "logits": logits}


class Images(nn.Module):
    """A residual network in miniature; one norm is called twice, and one works on another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, 4, 3, padding=1) for i in (2, 4, 4))
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(x)).relu()
        y = self.norm(self.b(x))
        z = (y + x).relu() + self.other(self.c(x).contiguous(memory_format=torch.channels_last)).relu()
        w = self.other(self.c(z))
        total = (w + z).relu() + (w - x).relu()
        return total.square().mean() + (self.other(z) + self.norm(w)).relu().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "words": lambda: (Words(), (torch.randint(0, 11, (3, 5)), torch.rand(3, 5, 8) > 0.3)),
    "images": lambda: (Images(), (torch.randn(2, 2, 6, 6),)),
}


def make_case(name: str) -> Case:
    """A step of a model, captured and lowered under whatever is patched, with the plain schedule."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    traced = capture(model, bind_sample(model, sample), keep_outputs=False)
    graph, cpu = traced.graph_module.graph, torch.device("cpu")
    aliases, profiles = alias(graph), profile(graph, measure=False)
    lowered = lower(traced, aliases, profiles, cost_function("roofline"), device=cpu, keep_outputs=False)
    options = Options(keep_outputs=False, progress=False)
    prepared = Prepared(traced, aliases, profiles, lowered, cpu, 0, options, {}, name, {})
    schedule = with_frees(lowered.problem, plain_order(lowered.problem))
    primals = tuple(p.detach() for p in (*state_tensors(model, traced.state), *sample))
    return Case(prepared, schedule, primals, (torch.ones(()),))


@cache
def plain_results(name: str) -> list[torch.Tensor | None]:
    """What the step leaves behind without any fused op."""
    with registry.small_blocks(1 << 40, 1 << 40):
        case = make_case(name)
        return run_halves(case, case.rewritten())


@contextmanager
def patched(damage: Patched | list[Patched]) -> Iterator[None]:
    changes = damage if isinstance(damage, list) else [damage]
    before = [getattr(place, name) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for (place, name, _), value in zip(changes, before, strict=True):
            setattr(place, name, value)


def judge_a_rule(pick: Pick) -> tuple[str, bool, bool] | None:
    """Damage a rule, and plan a step with it: what was done, whether the step has other bits, whether it is refused."""
    model, name = _choose(pick, list(MODELS)), _choose(pick, list(PATCHES))
    damage = PATCHES[name](pick)
    if damage is None:
        return None
    expected = plain_results(model)
    try:
        with patched(damage):
            case = make_case(model)
            case = replace(case, schedule=draw_schedule(pick, case.prepared.lowered.problem))
            rewritten = case.rewritten()
    except Exception:  # noqa: BLE001 - a rule that cannot even be applied makes no plan
        return None
    return name, changes_a_value(case, expected, rewritten), is_refused(case, rewritten)


@one_thread()
def run(count: int, first: int = 0) -> Tally:
    """Damage records and rules until `count` cases changed a value."""
    tally, seed = Tally(Counter(), Counter(), []), first
    while sum(tally.caught.values()) + len(tally.missed) < count:
        generator = random.Random(seed)
        with registry.small_blocks():
            judged = (judge_a_record, judge_a_rule)[seed % 2](generator.randint)
        seed += 1
        if judged is None:
            continue
        name, changed, refused = judged
        if changed and not refused:
            tally.missed.append(f"{name} (seed {seed - 1})")
        else:
            (tally.caught if changed else tally.harmless)[name] += 1
    return tally


def main() -> int:
    """Print the tally; exit 1 when damage that changes a value was accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many that change a value")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    tally = run(options.count, options.first)
    for name in (*CHANGES, *PATCHES):
        print(f"{name:32s} {tally.caught[name]:5d} caught {tally.harmless[name]:5d} harmless")
    print(f"{sum(tally.caught.values())} caught, {len(tally.missed)} missed: {', '.join(tally.missed) or 'none'}")
    return 1 if tally.missed else 0


if __name__ == "__main__":
    sys.exit(main())
