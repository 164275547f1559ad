"""Spacers: blocks packed, where the allocator is steered to them, and the code that asks for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from passes.allocator import CachingAllocator
from passes.run.arena import Spacers, Spacing
from planner import auto_checkpoint
from planner.arena import Reservation
from planner.events import Apart
from planner.footprint import Footprint, Start, footprint, larger_of, ready
from planner.packing import FAR, Gap, Held, Packer, Run, gaps_of, held_blocks, with_spacers
from planner.placing import World
from planner.prepared import Prepared
from planner.spacing import spaced
from solvers.errors import MIB

EMPTY = Start((), 0, 1 << 40, False, False)


class Given:
    """A step that is given by its events, each op of which asks for one block."""

    def __init__(self, events: Sequence[int]) -> None:
        runs = [Run(k, place, place + 1) for k, place in enumerate(k for k, e in enumerate(events) if e > 0)]
        self.apart = Apart((tuple(events), tuple(events)), [runs, runs], ())
        self.before = ()

    def measure(self, reservation: Reservation) -> Footprint:
        steps = self.apart.spaced(dict(reservation.spacing.at)) if reservation.spacing else self.apart.steps
        starts = [replace(EMPTY, descending=way) for way in (False, True)]
        return larger_of(footprint(steps, start, 0, reservation.arena) for start in starts)


def _random_step(rng: random.Random, count: int) -> list[int]:
    """Blocks of a few sizes, half of them held for long, as the activations of a step are."""
    events, held = [], []
    sizes = [rng.randrange(3, 90) * MIB // 2 for _ in range(5)]
    for k in range(count):
        events.append(rng.choice(sizes))
        held.append(k)
        while len(held) > 10 or (held and rng.random() < 0.45):
            events.append(-1 - held.pop(-1 if rng.random() < 0.6 else rng.randrange(len(held))))
    return events + [-1 - k for k in reversed(held)]


def _live(events: Sequence[int]) -> int:
    allocator = CachingAllocator(expandable=True)
    allocator.play(tuple(events))
    return allocator.peak_allocated_bytes


def _meet(address: int, block: Held, other_address: int, other: Held) -> bool:
    in_time = other.born < block.dies and block.born < other.dies
    return in_time and other_address < address + block.size and address < other_address + other.size


@pytest.mark.parametrize("seed", range(6))
def test_packed_blocks_never_lie_upon_each_other(seed: int) -> None:
    rng = random.Random(seed)
    events = _random_step(rng, 80)
    blocks = held_blocks(events)
    gaps = [Gap(30 * MIB, 5), Gap(11 * MIB, 100 * MIB), Gap(FAR, FAR)]
    lying = {-1: (FAR + 7 * MIB, Held(9 * MIB, 0, 60))}
    found, top = Packer(blocks).pack(blocks, gaps, lying.values(), seed)
    placed = [(found[n], blocks[n]) for n in blocks] + list(lying.values())
    for k, (address, block) in enumerate(placed):
        assert any(gap.address <= address and address + block.size <= gap.address + gap.size for gap in gaps)
        assert not any(_meet(address, block, *other) for other in placed[:k])
    assert top == max(address + block.size for address, block in placed[:-1]) - FAR
    alone, needed = Packer(blocks).pack(blocks, [Gap(FAR, FAR)], (), 0)
    assert len(alone) == len(blocks) and _live(events) <= needed <= 1.25 * _live(events)


@pytest.mark.parametrize("seed", range(6))
def test_spacers_are_there_while_their_ops_run_and_nothing_else_changes(seed: int) -> None:
    rng = random.Random(seed)
    given = Given(_random_step(rng, 40))
    events, runs = given.apart.steps[1], given.apart.runs[1]
    at = {run.place: tuple(rng.randrange(1, 9) * MIB for _ in range(rng.randrange(3))) for run in runs[::3]}
    named: list[Any] = []  # each allocation by a name, a free as the name of what it frees
    for k, event in enumerate(events):
        sizes = dict(enumerate(at.get(next((run.place for run in runs if run.start == k), -1), ())))
        named += [(size, (k, n)) for n, size in sizes.items()]
        named += [(event, sum(e > 0 for e in events[:k]))] if event > 0 else [-1 - event]
        named += [(k, n) for n in sizes]
    numbers = {name: n for n, name in enumerate(each[1] for each in named if _asks(each))}
    expected = [each[0] if _asks(each) else -1 - numbers[each] for each in named]
    assert list(with_spacers(events, runs, at)) == expected and len(expected) > len(events)
    assert with_spacers(events, runs, {}) == events


def _asks(each: Any) -> bool:
    return isinstance(each, tuple) and each[0] >= MIB


def test_less_is_reserved_for_it_and_little_more_allocated() -> None:
    """On steps whose blocks do not fit together in the order in which they come."""
    gained = []
    for seed in range(12):
        given = Given(_random_step(random.Random(seed), 60))
        plain = given.measure(Reservation())
        most = plain.allocated_bytes
        arena = Reservation((max(12 * MIB, -(-most // (2 * MIB)) * 2 * MIB),))
        before = min((given.measure(r) for r in (Reservation(), arena)), key=lambda f: f.reserved_bytes)
        may = most if seed % 2 else 1 << 50
        found: Any = spaced(given, EMPTY, given.measure, may, 0, Reservation())  # type: ignore[arg-type]
        after = given.measure(found)
        assert after.allocated_bytes <= min(may, 1.01 * most) and after.reserved_bytes <= plain.reserved_bytes
        if found.spacing is not None:
            grown = CachingAllocator()
            for size in found.arena:
                grown.reserve(size)
            assert grown.reserved_bytes + found.spacing.growth == after.reserved_bytes
        gained.append((after.reserved_bytes / most, before.reserved_bytes / most))
    assert sum(a for a, _ in gained) < sum(b for _, b in gained) - 0.5
    assert sum(a <= 1.06 for a, _ in gained) >= 8


WORKSPACE = 32 * MIB


class Multiplying(Given):
    """A step each op of which asks for a block, and then twice for a workspace, as cuBLAS does since torch 2.15."""

    def __init__(self, events: Sequence[int]) -> None:
        found, runs, numbers, count = list[int](), list[Run](), list[int](), 0
        for event in events:
            if event < 0:
                found.append(-1 - numbers[-1 - event])
                continue
            numbers.append(count)
            runs.append(Run(len(runs), len(found), len(found) + 5))
            found += [event, WORKSPACE, -2 - count, WORKSPACE, -3 - count]
            count += 3
        self.apart, self.before = Apart((tuple(found), tuple(found)), [runs, runs], ()), ()


def test_workspaces_lie_where_one_does() -> None:
    """Those of a call are packed once, and the step is spaced as well as one without them is."""
    gained = []
    for seed in range(8):
        given = Multiplying(_random_step(random.Random(seed), 40))
        packer = Packer(held_blocks(given.apart.steps[1]))
        found, _ = packer.pack(packer.blocks, [Gap(FAR, FAR)], (), 0)
        spaces = [address for n, address in sorted(found.items()) if n % 3]
        assert len(packer.repeats) >= 40 and all(a == b for a, b in zip(spaces[::2], spaces[1::2], strict=True))
        plain = given.measure(Reservation())
        most = plain.allocated_bytes
        after = given.measure(spaced(given, EMPTY, given.measure, most, 0, Reservation()))  # type: ignore[arg-type]
        assert after.allocated_bytes <= most and after.reserved_bytes <= plain.reserved_bytes
        gained.append((after.reserved_bytes / most, plain.reserved_bytes / most))
    assert sum(a for a, _ in gained) < sum(b for _, b in gained) - 0.4


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("expandable", [False, True])
def test_spacers_that_are_tried_leave_the_allocator_as_it_was(descending: bool, expandable: bool) -> None:
    rng = random.Random(descending)
    given = Given(_random_step(rng, 40))
    events, blocks = given.apart.steps[1], held_blocks(given.apart.steps[1])
    arena = (3 * _live(events) // 4 // (2 * MIB) * 2 * MIB,)
    start = replace(EMPTY, descending=descending, expandable=expandable)
    world = World(ready(start, arena, ()), arena[0], blocks, None)
    planned, _ = Packer(blocks).pack(blocks, [*world.own, Gap(FAR, FAR)], (), 0)
    for run in given.apart.runs[1]:
        before = gaps_of(world.allocator), world.allocator.reserved_bytes, world.allocator.peak_reserved_bytes
        for _ in range(4):
            sizes = [rng.randrange(2, arena[0] // MIB) * MIB for _ in range(rng.randrange(1, 4))]
            world.wrong(sizes, events, run, planned, 1 << 50)
        assert before == (gaps_of(world.allocator), world.allocator.reserved_bytes, world.allocator.peak_reserved_bytes)
        world.play(events[run.start : run.end], planned)


def test_spacers_without_an_arena_are_none() -> None:
    spacers = Spacers(0)
    assert spacers(MIB, MIB) is None
    spacers.device = torch.device("cpu")
    assert [s.nbytes() for s in spacers(512, 1024) or ()] == [512, 1024]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of every schedule has spacers."""

    def reservation(prepared: Prepared, schedule: Any, budget_bytes: int | None) -> Reservation:
        return Reservation((64 * MIB,), Spacing(tuple((place, (512 + place, 4096)) for place in range(len(schedule)))))

    monkeypatch.setattr(Prepared, "reservation", reservation)


@pytest.mark.usefixtures("everywhere")
def test_the_code_asks_for_them_around_its_ops(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 16)
    plan = auto_checkpoint(model, x, budget_mb=None, recompute=["*"], progress=False)
    spacers = plan.step.spacers
    assert isinstance(spacers, Spacers) and spacers.growth == 0
    ops = [n for half in (plan.rewritten.forward, plan.rewritten.backward) for n in half.graph.nodes]
    state = torch.get_rng_state()
    model(x).backward()
    plain = [p.grad for p in model.parameters()]
    for device in (None, torch.device("cpu")):
        spacers.device = device
        model.zero_grad()
        torch.set_rng_state(state)
        plan.module(x).backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    code = plan.rewritten.forward.code + plan.rewritten.backward.code
    places = [int(line.split("(")[1].split(",")[0]) - 512 for line in code.splitlines() if "SPACERS(" in line]
    assert places == sorted(set(places)) and 20 < len(places) <= len(ops)
    assert code.count("spacers = None") == len(places)

    folder = plan.export(tmp_path / "exported")
    text = (folder / "backward.py").read_text()
    assert "from .arena import SPACERS" in text
    assert text.count("SPACERS(") == text.count("spacers = None") == plan.rewritten.backward.code.count("SPACERS(")
