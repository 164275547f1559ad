"""Two ranks train as they do unplanned, bit for bit, each under its budget; and hear of each other's failures."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from planner import RankError, auto_checkpoint
from planner.ranks.talk import Ranks

from . import cases, models
from .harness import Failed, run_ranks, try_ranks
from .talking import REGIONS, talk

CASES: dict[str, Callable[[int], cases.Compared]] = {
    "DDP, planned wrapped": cases.ddp_planned,
    "DDP around plan.module": cases.ddp_around,
    "DDP, no_sync": cases.ddp_no_sync,
    "DDP, no_sync, gradient_as_bucket_view": partial(cases.ddp_no_sync, gradient_as_bucket_view=True),
    "FSDP2, planned sharded": cases.fsdp_after,
    "FSDP2, applied before": cases.fsdp_before,
    "FSDP2, a plan file loaded": cases.fsdp_loaded,
    "FSDP2, another shape": cases.fsdp_other_shape,
    "FSDP2, another shape, plan.module": partial(cases.fsdp_other_shape, applied=False),
    "FSDP2, another shape, autocast": partial(cases.fsdp_other_shape, autocast=True, share="60%"),
    "FSDP2, accumulated": cases.fsdp_accumulated,
    "FSDP2, the root alone": partial(cases.fsdp_after, shard=models.shard_whole),
    "DDP, first batch": partial(cases.first_batch, sharded=False),
    "FSDP2, first batch": partial(cases.first_batch, sharded=True),
    "tensor parallel, by hand": cases.by_hand,
    "tensor parallel": cases.tensor_parallel,
    "tensor parallel, by regions": partial(cases.tensor_parallel, share="85%", regions="blocks.*"),
    "tensor parallel, loss_parallel, by regions": cases.loss_in_parallel,
    "pipeline, GPipe": partial(cases.pipeline, kind=ScheduleGPipe),
    "pipeline, 1F1B": partial(cases.pipeline, kind=Schedule1F1B),
}


def run_all(rank: int, names: list[str]) -> dict[str, Any]:
    """These cases, one after the other; what one raises is its answer, on both ranks alike."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = CASES[name](rank)
        except Exception:  # noqa: BLE001
            found[name] = Failed(traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> list[Any]:
    items: list[Any] = [i for i in request.session.items if "answers" in getattr(i, "fixturenames", ())]
    return try_ranks(run_all, [item.callspec.params["name"] for item in items], seconds=600.0)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_parameters_are_those_of_the_unplanned_training(answers: list[Any], name: str) -> None:
    for answer in answers:
        assert not isinstance(answer, Failed), answer
        assert_as_planned(answer[name])


def assert_as_planned(found: Any) -> None:
    assert isinstance(found, cases.Compared), found
    assert found.same
    assert found.overhead > 0
    assert abs(found.off) < 0.01
    assert found.measured <= found.budget * 1.005


def test_tensor_parallel_within_sharding_trains_as_unplanned() -> None:
    for found in run_ranks(cases.spread_and_sharded, ranks=4):
        assert_as_planned(found)


def in_turn(rank: int) -> tuple[bool, list[bool]]:
    """Whether the order of gradients is that of the plain training, and whether each gradient of three steps is."""
    (want, plain), *planned = (three_steps(rank, gradients) for gradients in ("", "fresh", "accumulated"))
    equal = [torch.equal(g, p) for _, found in planned for g, p in zip(found, plain, strict=True)]
    return all(order == want for order, _ in planned), equal


def three_steps(rank: int, gradients: str) -> tuple[list[str], list[torch.Tensor]]:
    """In which order gradients come in the first step, and those of the next two, for which buckets follow it."""
    model, order = DistributedDataParallel(models.language()), list[str]()
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    batches = [models.tokens(rank + 10 * i) for i in range(3)]
    call: nn.Module = model
    if gradients:
        call = auto_checkpoint(model, (batches[0],) * 2, "80%", gradients=gradients, **cases.QUICK).module
    order.clear()
    torch.manual_seed(1)
    found = []
    for batch in batches:
        model.zero_grad(set_to_none=gradients != "accumulated")
        call(batch, batch).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return order[: len(found) // 3], found


def test_three_ranks_bucket_gradients_in_the_order_of_the_plain_training() -> None:
    for in_order, equal in run_ranks(in_turn, ranks=3):
        assert in_order
        assert all(equal) and len(equal) > 120


def test_a_rank_plans_alone_what_talks_to_others_and_counts_what_that_holds() -> None:
    first, second = run_ranks(talk)
    assert first[1] == dict.fromkeys(REGIONS, True)  # no check either, for which others would have to run steps
    for (predicted, measured), _ in (first, second):
        assert abs(predicted / measured - 1) < 0.01


class Routed(nn.Module):
    """Rows go to the expert that their own values choose, so that each rank's have other numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(32, 32), nn.Linear(32, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Tanh(), nn.Linear(256, 32)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        weight, chosen = self.router(hidden).softmax(-1).max(-1, keepdim=True)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            hidden = hidden.index_add(0, rows, weight[rows] * expert(hidden[rows]))
        return hidden.square().mean()


class Contrasted(nn.Module):
    """Rows of all ranks are compared, in a list in which each rank puts its own, with their gradient, in its place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(models.Block(32) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.blocks(x)
        gathered = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows)
        gathered[dist.get_rank()] = rows
        return (rows @ torch.cat(gathered).T).softmax(-1).diagonal().square().mean()


class Skipping(nn.Module):
    """Another block on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(models.Block(32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(2 + dist.get_rank()):
            x = self.blocks[i](x)
        return x.square().mean()


def route(rank: int, kind: type[nn.Module]) -> tuple[bool, int, int]:
    """Whether losses and parameters are the plain ones, the peak, and the plain one's."""
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(rank))
    kinds = [DistributedDataParallel(kind(), find_unused_parameters=kind is Skipping) for _ in range(2)]
    plan = auto_checkpoint(kinds[1], x, "90%", **cases.QUICK)
    plan.apply(kinds[1])
    losses = []
    for model in kinds:
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            optimizer.step()
    pairs = zip(losses[:3] + list(kinds[0].parameters()), losses[3:] + list(kinds[1].parameters()), strict=True)
    return all(torch.equal(a, b) for a, b in pairs), plan.peak_bytes, plan.baseline_peak_bytes


@pytest.mark.parametrize("kind", [Routed, Contrasted, Skipping])
@pytest.mark.every(1)
def test_ranks_whose_steps_are_to_differ_each_plan_their_own(kind: type[nn.Module]) -> None:
    (same, peak, plain), other = run_ranks(route, kind)
    assert same and other[0]
    assert peak < plain and other[1] < other[2] and (plain != other[2] or kind is Contrasted)


def train_on_more(rank: int) -> list[bool]:
    """For each step whether its gradients are the plain ones, with buckets that stay as they are."""
    found = []
    for planned in (False, True):
        model = DistributedDataParallel(models.language(), find_unused_parameters=True)
        batch = models.tokens(rank)
        call = auto_checkpoint(model, (batch, batch), "80%", **cases.QUICK).module if planned else model
        torch.manual_seed(1)
        for _ in range(3):
            model.zero_grad()
            call(batch, batch).backward()
            found.append([p.grad for p in model.parameters()])
    return [all(map(torch.equal, a, b)) for a, b in zip(found[:3], found[3:], strict=True)]


def test_on_more_than_two_ranks_gradients_are_the_plain_ones_where_buckets_stay() -> None:
    assert run_ranks(train_on_more, ranks=3) == [[True] * 3] * 3


def listen(rank: int) -> str:
    """Plan steps that differ, where a hook could send each gradient as it leaves; the error."""
    model = Skipping()
    model.blocks[0].wide.weight.register_post_accumulate_grad_hook(lambda p: None)
    try:
        auto_checkpoint(model, torch.randn(64, 32), "90%", group=dist.group.WORLD, **cases.QUICK)
    except RankError as error:
        return str(error)
    return ""


def test_steps_that_differ_are_refused_where_gradients_have_hooks() -> None:
    assert all("the ranks' steps differ" in text for text in run_ranks(listen))


# Ranks that cannot go on ----------------------------------------------------------------------------------------------


class BrokenOnOneRank(models.Language):
    """A model that one rank cannot run."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("there is no such table")
        return super().forward(tokens, labels)


def fail(rank: int, how: str) -> tuple[str, str, float]:
    """Plan while one rank does something else; the error's type and text, and how long it took to hear of it."""
    model = DistributedDataParallel(BrokenOnOneRank() if how == "broken" else models.language())
    batch = models.tokens(rank, 4 if how == "other shape" and rank else 8)
    if rank == {"killed": 1, "first killed": 0}.get(how):
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    options = {**cases.QUICK, "save": [f"blocks.{rank}"]} if how == "other hints" else cases.QUICK
    begin = time.monotonic()
    try:
        auto_checkpoint(model, (batch, batch), "1%" if how == "no budget" else "80%", **options)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


def test_a_rank_with_another_batch_shape_says_so_on_all() -> None:
    for name, text, seconds in try_ranks(fail, "other shape"):
        assert name == RankError.__name__
        assert "rank 1 has input ['tokens']: i64[4, 32], rank 0 has input ['tokens']: i64[8, 32]" in text
        assert "drop_last" in text and seconds < 30


def test_a_rank_with_other_hints_says_so_on_all() -> None:
    for name, text, _ in try_ranks(fail, "other hints"):
        assert name == RankError.__name__ and "rank 1 has save=['blocks.1'], rank 0 has save=['blocks.0']" in text


def test_a_rank_that_fails_to_plan_is_heard_of_by_the_others() -> None:
    first, second = try_ranks(fail, "broken")
    assert first[0] == RankError.__name__ and "rank 1 of 2" in first[1] and "no such table" in first[1]
    assert second[0] != RankError.__name__ and "no such table" in second[1] and first[2] < 30


def test_a_budget_that_nothing_fits_is_an_error_on_all() -> None:
    first, second = try_ranks(fail, "no budget")
    assert first[0] == "BudgetError" and second[0] == RankError.__name__
    assert "smallest budget known to work" in second[1] and second[2] < 30


def interrupt(rank: int, when: str) -> tuple[str, bool]:
    """What planning raises where one rank gets Ctrl-C or a wrong budget; and whether they plan together afterwards."""
    model, batch = DistributedDataParallel(models.language()), models.tokens(rank)
    asked, report = "nonsense" if when == "budget" and rank else "80%", Ranks._report

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return report(*args)

    handle = model.module.words.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    if when != "working" or not rank:
        handle.remove()
    try:
        with patch.object(Ranks, "_report", interrupted if when == "talking" else report):
            auto_checkpoint(model, (batch, batch), asked, **cases.QUICK)
        said = ""
    except BaseException as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    handle.remove()
    return said, auto_checkpoint(model, (batch, batch), "80%", **cases.QUICK).overhead > 0


@pytest.mark.parametrize("when", ["working", "talking", "budget"])
@pytest.mark.every(1)
def test_a_rank_that_is_interrupted_or_has_a_wrong_budget_is_an_error_on_the_others(when: str) -> None:
    (first, planned), (second, _) = run_ranks(interrupt, when, seconds=60.0)
    assert second.startswith("BudgetError" if when == "budget" else "KeyboardInterrupt")
    assert first.startswith("RankError: rank 1 of 2") and second[:11] in first and planned


def test_a_killed_rank_is_an_error_on_the_others() -> None:
    first, second = try_ranks(fail, "killed")
    assert isinstance(second, Failed)
    assert first[0] == RankError.__name__ and "rank 1 of 2" in first[1] and first[2] < 30
    said = r"Connection closed by peer[^()]*[0-9]|Read error[^()]*[0-9]: Connection reset by peer"  # as gloo notices
    assert re.fullmatch(rf".* cannot be reached \(({said})\)", first[1])


def test_a_killed_first_rank_is_an_error_on_all_others() -> None:
    first, *others = try_ranks(fail, "first killed", ranks=3)
    assert isinstance(first, Failed)
    for name, text, seconds in others:
        assert name == RankError.__name__ and "rank 0 of 3" in text and seconds < 30


# Ranks that end while they train --------------------------------------------------------------------------------------


def end_in_training(rank: int, how: str) -> tuple[str, float]:
    """Train while the last rank is killed after its second step; the error here, and how long it took."""
    batch = models.tokens(0 if how == "tensor parallel" else rank)
    if how == "pipeline":
        step = cases.pipeline_step(rank, Schedule1F1B)
    else:
        model = {"DDP": DistributedDataParallel, "FSDP2": models.shard, "tensor parallel": models.spread}[how](
            models.language()
        )
        plan = auto_checkpoint(model, (batch, batch), "85%", **cases.QUICK)
        step = lambda: plan.module(batch, batch).backward()  # noqa: E731
    begin = 0.0
    try:
        for i in range(8):
            if rank and i == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            step()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("how", ["DDP", "FSDP2", "tensor parallel", "pipeline"])
def test_a_rank_that_is_killed_while_training_is_an_error_on_the_others(how: str) -> None:
    first, second = try_ranks(end_in_training, how, seconds=60.0)
    assert isinstance(second, Failed)
    assert not isinstance(first, Failed), first
    assert "onnection" in first[0] and first[1] < 30
