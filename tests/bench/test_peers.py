"""The benchmark measures what it says, and notices a peer whose numbers are wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from passes.memory import measure_peak
from tests.bench.peers import batch
from tests.bench.peers.blocks import checkpoint_each, checkpoint_groups, find_blocks
from tests.bench.peers.measure import Subject, clear, compare, memory, reference, relative, step, work
from tests.bench.peers.methods import Peers
from tests.bench.peers.mincut import compile_with_budget, patient_dynamo
from tests.bench.peers.models import BENCH
from tests.bench.peers.ours import Ours
from tests.bench.peers.point import Point, read, write
from tests.bench.peers.show import draw
from tests.bench.peers.verdict import duels, lowest, summary
from tests.planner.small import conv_net

WIDTH, DEPTH, ROWS = 64, 9, 256


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training),)


class Stack(nn.Module):
    """Blocks that return tuples, in a list, under a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            (x,) = block(x)
        return self.head(x).pow(2).mean()


def stack(dropout: float = 0.0) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Stack(dropout).train(), torch.randn(ROWS, WIDTH)


def subject_of(model: nn.Module) -> Subject:
    twin = copy.deepcopy(model)
    return Subject(twin, twin)


def test_the_peak_of_the_profiler_is_the_peak_of_the_allocator() -> None:
    model, sample = stack()
    subject = subject_of(model)
    step(subject.module, sample)
    clear(subject.owner)
    found = memory(subject, sample)
    resident = found.parameters + found.buffers + found.inputs
    clear(subject.owner)
    assert found.peak - resident == measure_peak(lambda: step(subject.module, sample))


def test_gradients_and_activations_are_told_apart() -> None:
    model, sample = stack()
    found = memory(subject_of(model), sample)
    assert found.gradients == found.parameters == 64 * sum(-(-p.numel() * 4 // 64) for p in model.parameters())
    assert found.inputs == ROWS * WIDTH * 4
    # The head's backward begins with every activation saved and no gradient made: only then are both peaks near.
    assert found.activations < found.peak - found.parameters - found.inputs <= found.activations + found.gradients


def test_work_counts_what_torch_counts() -> None:
    model, sample = stack()
    subject = subject_of(model)
    with FlopCounterMode(display=False) as counter:
        step(subject.module, sample)
    counted = work(subject, sample)
    assert counted.flops == counter.get_total_flops() > 0
    assert counted.moved_bytes > sample.numel() * 4 * 2 * DEPTH


def test_blocks_are_found_and_fed_one_by_another() -> None:
    model, sample = stack()
    blocks = next(b for b in find_blocks(model, sample) if "Block" in b.label)
    assert blocks.runs == (tuple(f"blocks.{i}" for i in range(DEPTH)),)
    assert [len(g) for g in blocks.groups()] == [3, 3, 3]


@pytest.mark.parametrize("apply", [checkpoint_each, checkpoint_groups])
def test_checkpointing_recomputes_the_blocks_and_keeps_the_numbers(apply: Any) -> None:
    model, sample = stack(dropout=0.1)
    blocks = next(b for b in find_blocks(model, sample) if "Block" in b.label)
    plain, peer = subject_of(model), subject_of(model)
    apply(peer.owner, blocks)
    assert compare(peer, sample, reference(model, sample)) == ((), 0.0)
    assert memory(peer, sample).peak < memory(plain, sample).peak
    product = 2 * ROWS * WIDTH * 2 * WIDTH  # FLOPs of either layer of a block
    added = work(peer, sample).flops - work(plain, sample).flops
    # The mask of a block's dropout comes after its last product, so both products of every block run again.
    assert added == product * 2 * DEPTH


def test_a_stretch_across_a_skip_connection_is_not_offered() -> None:
    class Skipping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = []
            for block in self.blocks:
                (x,) = block(x)
                kept.append(x)
            return (self.head(x) + self.head(kept[0])).pow(2).mean()

    torch.manual_seed(0)
    (way,) = Peers(Skipping(), torch.randn(ROWS, WIDTH), (), ()).ways(("sqrt",))
    assert way.subject is None
    assert "not a chain" in (way.error or "")


def test_wrong_numbers_are_named() -> None:
    """Per-block checkpointing runs batch norm's statistics twice; a shifted gradient and buffer are seen."""
    model, sample = conv_net()
    plain = reference(model, sample)
    subject = subject_of(model)
    assert compare(subject, sample, plain) == ((), 0.0)
    with torch.no_grad():
        subject.owner.get_parameter("norm_1.bias").register_hook(lambda g: g + 1)
    different, largest = compare(subject, sample, plain)
    assert different == ("gradient norm_1.bias",)
    gradient = plain.result.gradients["norm_1.bias"]
    assert gradient is not None
    assert largest == pytest.approx(1 / float(gradient.abs().max()), rel=1e-3)
    assert not Point("m", "x", difference=largest).correct


def test_recomputed_batch_norm_is_seen_in_its_buffers() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
                                          for _ in range(3)))  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).pow(2).mean()

    torch.manual_seed(0)
    model, sample = Normed().train(), torch.randn(4, 3, 8, 8)
    plain = reference(model, sample)
    subject = subject_of(model)
    blocks = next(b for b in find_blocks(model, sample) if b.names == ("layers.0", "layers.1", "layers.2"))
    checkpoint_each(subject.owner, blocks)
    different, _ = compare(subject, sample, plain)
    assert different
    assert all(d.startswith("buffer layers.") for d in different)


def test_min_cut_through_dropout_is_caught() -> None:
    """Below a budget of 1 the partitioner computes dropout again without its generator state (pytorch#190758).

    When this fails the partitioner has been mended, and its points become bars to beat on models with dropout.
    """
    model, sample = stack(dropout=0.5)
    plain = reference(model, sample)
    twin = copy.deepcopy(model)
    with patient_dynamo():
        compiled, graphs = compile_with_budget(twin, 0.1, "dp")
        step(compiled, sample)
        different, largest = compare(Subject(compiled, twin), sample, plain)
        graphs.restart()
        step(compiled, sample)
    assert len(graphs.nodes) == 1
    assert graphs.added_flops > 0
    assert any(d.startswith("gradient") for d in different)
    assert not Point("m", "mincut", different=different, difference=largest).correct


def test_peers_and_ours_side_by_side(tmp_path: Path) -> None:
    model, sample = stack()
    points = [Point("stack", "plain", ratio=1.0, peak_bytes=memory(subject_of(model), sample).peak, flops=100)]
    peers = Peers(model, sample, (), ())
    (way,) = peers.ways(("block",))
    assert way.subject is not None
    peak = memory(way.subject, sample).peak
    points.append(Point("stack", "block", ratio=1.3, peak_bytes=peak, flops=130))
    ours = Ours(copy.deepcopy(model), sample, time_limit=5)
    planned = ours.at("at block", peak)
    assert planned.plan is not None
    measured = memory(ours.subject(planned.plan), sample).peak
    assert measured == planned.plan.peak_bytes <= peak
    points.append(Point("stack", "ours", "at block", budget_bytes=peak, peak_bytes=measured, ratio=1.1, flops=110))
    write(tmp_path / "points.jsonl", points)
    assert read(tmp_path / "points.jsonl") == points
    later = [Point("stack", "plain", run="later")]
    write(tmp_path / "points.jsonl", later, append=True)
    assert read(tmp_path / "points.jsonl") == later
    (duel,) = duels(points)
    assert duel.losses == ()
    assert duel.share_of_added == pytest.approx(1 / 3)
    assert lowest(points)[0].ours == measured
    assert any("0.33" in line for line in summary(points))
    draw(points, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_budget_that_nothing_meets_is_a_loss() -> None:
    model, sample = stack()
    planned = Ours(model, sample, time_limit=5).at("at x", 1000)
    assert planned.plan is None
    assert "BudgetError" in (planned.error or "")
    points = [Point("m", "plain", flops=10, ratio=1.0), Point("m", "block", peak_bytes=1000, flops=13, ratio=1.3),
              Point("m", "ours", "at block", error=planned.error, budget_bytes=1000)]  # fmt: skip
    (duel,) = duels(points)
    assert duel.losses == ("does not fit",)
    assert duel.dominated


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 13, 40])
def test_the_largest_batch_is_found(most: int) -> None:
    assert batch.largest(lambda size: size <= most, 32) == min(most, 32)


@pytest.mark.slow
def test_ours_trains_a_larger_batch_under_the_same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(size: int) -> tuple[nn.Module, Any]:
        return stack()[0], torch.randn(64 * size, WIDTH)

    monkeypatch.setitem(batch.MODELS, "stack", make)
    monkeypatch.setattr(batch, "METHODS", ("plain", "block"))
    plain, block, ours = batch.rows("stack", base=2, limit=4, budget=0.1)
    assert plain[2] == "2"
    assert int(ours[2]) >= int(block[2]) > 2
    assert "OVER" not in ours[-1]


def test_last_bits_are_told_from_wrong_numbers() -> None:
    model, sample = stack()
    plain = reference(model, sample).result
    other = copy.deepcopy(plain)
    name = "blocks.0.up.weight"
    gradient = other.gradients[name]
    assert gradient is not None
    gradient[0, 0] += 1e-7 * gradient.abs().max()
    assert 0 < relative(plain, other) < 1e-6
    other.gradients[name] = None
    assert relative(plain, other) == 1.0


def test_every_model_of_the_benchmark_has_a_name_of_its_own() -> None:
    assert len(BENCH) >= 11
