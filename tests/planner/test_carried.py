"""State that forward carries from call to call in plain attributes: it goes on in planned steps as in plain ones."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from passes.errors import InputMismatch, StateChanged, Unsupported
from passes.memory import measure_peak
from passes.run.tensors import nodes_behind
from passes.trace.structure import flatten
from planner import BudgetError, Plan, PlannerError, auto_checkpoint

from .steps import assert_same_gradients, twins

BATCH, LENGTH, WIDTH = 4, 6, 16


class Deep(nn.Module):
    """Enough to recompute, on both sides of what has the state."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
            for _ in range(2)
        )

    def settle(self) -> None:
        """What a training loop does between two steps."""


class Recurrent(Deep):
    """Truncated backpropagation through time, from nothing on."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.hidden = nn.GRU(WIDTH, WIDTH, batch_first=True), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, hidden = self.rnn(self.before(x), self.hidden)
        self.hidden = hidden.detach()
        return self.after(y).pow(2).mean()


class Repackaged(Deep):
    """Two tensors, which the loop detaches."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.hidden = (torch.zeros(1, BATCH, WIDTH), torch.zeros(1, BATCH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, self.hidden = self.rnn(self.before(x), self.hidden)
        return self.after(y).pow(2).mean()

    def settle(self) -> None:
        self.hidden = tuple(tensor.detach() for tensor in self.hidden)


class Neuron(nn.Module):
    """Has its potential in a dict, which it changes in place: a float at first."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: dict[str, Any] = {"v": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        charged = self.memories["v"] * 0.9 + x
        spike = torch.sigmoid(4 * (charged - 1))
        self.memories["v"] = charged - spike
        return spike


class Spiking(Deep):
    """Neurons that the loop resets after each step; one of them is called in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Neuron(), Neuron()
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spikes = [self.after(self.second(self.before(self.again(self.first(x[:, t]))))) for t in range(3)]
        return torch.stack(spikes).pow(2).mean()

    def settle(self) -> None:
        self.first.memories["v"] = self.second.memories["v"] = 0.0


class Detached(Spiking):
    """The same, whose potentials go on."""

    def settle(self) -> None:
        for neuron in (self.first, self.second):
            neuron.memories["v"] = neuron.memories["v"].detach()


class Several(Deep):
    """A list of states, one that is another's, a table, a tensor of the call's, and a count beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.seen = [torch.zeros(BATCH, WIDTH) for _ in range(2)], 0
        self.mean, self.table = torch.zeros(WIDTH), {"n": torch.zeros(()), "last": (torch.zeros(BATCH, WIDTH), "x")}
        self.previous = torch.zeros(BATCH, LENGTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        y = self.before((x - self.previous)[:, 0] + self.mean)
        self.previous = x
        for i in range(2):
            y = torch.tanh(y + self.states[i])
            self.states[i] = y.detach()
        self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        self.table = {"n": self.table["n"] + 1, "last": (self.states[1], "x")}
        return self.after(y + self.table["last"][0] / self.table["n"]).pow(2).mean()


class Buffers(Deep):
    """A buffer in whose place forward puts a tensor with a gradient, of another shape at first (snnTorch)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mem", torch.zeros(0), persistent=False)
        self.register_buffer("traced", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        if self.mem.shape != y.shape:
            self.mem = torch.zeros_like(y)
        spike = torch.sigmoid(self.mem - 1)
        self.mem = 0.9 * self.mem + y - spike
        self.traced = x + (0.5 * self.traced if self.traced.numel() else 0.0)  # without a gradient
        return self.after(spike + self.mem + self.traced).pow(2).mean()

    def settle(self) -> None:
        self.mem.detach_()


class Turns(Deep):
    """Every other call has a state, and leaves none."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        if self.hidden is None:
            self.hidden = y.detach()
        else:
            y, self.hidden = y + self.hidden, None
        return self.after(y).pow(2).mean()


class Delayed(Deep):
    """What a step leaves is read three steps later, and until then moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.line = [torch.zeros(BATCH, LENGTH, WIDTH) for _ in range(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        self.line = [*self.line[1:], y.detach()]
        return self.after(y + self.line[0]).pow(2).mean()


ALL = (Recurrent, Repackaged, Spiking, Detached, Several, Turns, Buffers, Delayed)


def state_of(model: nn.Module) -> list[Any]:
    own = [{n: v for n, v in vars(m).items() if n[0] != "_" and n != "forward"} for m in model.modules()]
    return [*own, dict(model.named_buffers())]


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    (own, built), (expected, as_built) = flatten(state_of(model)), flatten(state_of(plain))
    assert str(built) == str(as_built)
    assert all(map(torch.equal, own, expected))
    assert [(t.requires_grad, t.stride()) for t in own] == [(t.requires_grad, t.stride()) for t in expected]


def batch() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def plan_near_minimum(model: nn.Module, **options: Any) -> Plan:
    with pytest.raises(BudgetError) as refused:
        auto_checkpoint(model, batch(), budget_mb=0.01, **options)
    return auto_checkpoint(model, batch(), budget_mb=1.25 * refused.value.minimum_mb, **options)


def train(runs: list[tuple[Callable[..., Any], Deep]], x: torch.Tensor, seed: int) -> None:
    for run, own in runs:
        torch.manual_seed(seed)
        own.zero_grad()
        run(x).backward()
        own.settle()


@pytest.mark.every(1)
@pytest.mark.filterwarnings("ignore:planning anew")
@pytest.mark.parametrize("kind", ALL)
def test_states_go_on_as_in_plain_steps(kind: type[Deep]) -> None:
    model, plain = twins(kind())
    plan = plan_near_minimum(model)
    assert not plan.regions and any("carries self." in note for note in plan.notes)
    for step in range(6):
        train([(plan.module, model), (plain, plain)], batch(), step)
        assert_same_gradients(model, plain)
        assert_same_state(model, plain)
        if step == 3:  # an evaluation between them moves the state, too
            x = batch()
            for run, own in ((plan.module, model), (plain, plain)):
                own.eval()
                with torch.no_grad():
                    run(x)
                own.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # planned for by now
        for step in (6, 7):
            train([(plan.module, model), (plain, plain)], batch(), step)
        assert_same_state(model, plain)


@pytest.mark.parametrize("kind", [Repackaged, Several, Spiking])
def test_states_are_counted(kind: type[Deep]) -> None:
    model = kind()
    train([(model, model)], batch(), 0)
    plan = plan_near_minimum(model)
    for step in range(3):
        model.zero_grad()
        before = sum(tensor.nbytes for tensor in flatten(state_of(model))[0])
        peak = plan.static_bytes + measure_peak(partial(train, [(plan.module, model)], batch(), step))
        if step and kind is Repackaged:  # nothing from before the first is freed where it is measured
            assert before + peak == plan.peak_bytes
        assert 0.8 * plan.peak_bytes <= peak <= plan.peak_bytes


def test_a_state_that_is_reset_needs_no_other_plan() -> None:
    model, plain = twins(Spiking())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = auto_checkpoint(model, batch(), budget_mb=None, on_new_shape="error")
        plan.apply(model)
        for step in range(2):
            train([(model, model), (plain, plain)], batch(), step)
        assert_same_gradients(model, plain)
    model.first.memories["v"] = torch.ones(BATCH, WIDTH)
    with pytest.raises(InputMismatch, match=r"self.first.memories\['v'\].*: got a tensor, the plan expects 0.0"):
        model(batch())
    plan.remove(model)


def test_an_evaluation_may_leave_a_state_of_another_shape() -> None:
    class Centred(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(BATCH, 1, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.before(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(1, keepdim=True)
            return self.after(y - self.mean).pow(2).mean()

    model, plain = twins(Centred())
    plan = auto_checkpoint(model, batch(), budget_mb=None)
    for is_training in (False, True):
        x = batch()
        train([(plan.module, model), (plain, plain)], x, 0)
        for run, own in ((plan.module, model), (plain, plain)):
            kept, own.mean = own.mean, torch.zeros(1, 1, WIDTH)
            own.train(is_training)
            torch.manual_seed(1)
            with torch.no_grad():
                run(x[:3])
            assert own.mean.shape == (3, 1, WIDTH)
            own.train()
            own.mean = kept
    train([(plan.module, model), (plain, plain)], x, 2)
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


@pytest.mark.filterwarnings("ignore:backward started from")
def test_a_replay_does_not_move_the_state_again() -> None:
    class Two(Recurrent):
        def forward(self, x: torch.Tensor) -> Any:
            y, hidden = self.rnn(self.before(x), self.hidden)
            self.hidden = hidden.detach()
            return self.after(y), y

    model, plain = twins(Two())
    model.hidden = plain.hidden = torch.zeros(1, BATCH, WIDTH)
    plan = auto_checkpoint(model, batch(), budget_mb=None)
    for step in range(2):
        x = batch()
        for run, own in ((plan.module, model), (plain, plain)):
            torch.manual_seed(step)
            own.zero_grad()
            run(x)[1].sum().backward()
        assert_same_gradients(model, plain)
        assert_same_state(model, plain)


@pytest.mark.filterwarnings("ignore:planning anew")
def test_copies_files_and_other_instances_carry_their_own(tmp_path: Path) -> None:
    model, plain = twins(Repackaged())
    plan = auto_checkpoint(model, batch(), budget_mb=None)
    plan.apply(model)
    plan.save(tmp_path / "plan.json")
    copied, loaded, other = copy.deepcopy(model), Repackaged(), Repackaged()
    for each in (loaded, other):
        each.load_state_dict(plain.state_dict())
    Plan.load(tmp_path / "plan.json", loaded, batch()).apply(loaded)
    plan.apply(other)
    for step, rows in enumerate((LENGTH, LENGTH, 3)):
        x = torch.randn(BATCH, rows, WIDTH)
        train([(each, each) for each in (model, copied, loaded, other, plain)], x, step)
        for each in (model, copied, loaded, other):
            assert_same_gradients(each, plain)
            assert_same_state(each, plain)
    with pytest.raises(PlannerError, match=r"forward changes self\.hidden, which an export does not do"):
        plan.export(tmp_path / "folder")


class Detaching(Deep):
    """Leaves a state with its graph, and detaches it as it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(BATCH, LENGTH, WIDTH, requires_grad=True)

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> Any:
        y = self.before(x) + (self.hidden if given is None else given).detach()
        self.hidden = y * 1
        return self.after(y).pow(2).mean(), y


@pytest.mark.parametrize("given", [False, True])
def test_graphs_of_earlier_steps_are_let_go(given: bool) -> None:
    """Whether the state is the model's, or one that the loop hands on."""
    model = Detaching()
    sample = (batch(), model.hidden) if given else (batch(),)
    plan = auto_checkpoint(model, sample, budget_mb=None)
    assert not plan.regions
    counts, more = list[int](), sample[1:]
    for _ in range(4):
        loss, y = plan.module(batch(), *more)
        loss.backward()
        more = (y,) if given else ()
        counts.append(len(list(nodes_behind([y, model.hidden]))))
    assert len(set(counts[1:])) == 1


def test_a_model_that_keeps_its_state_is_freed() -> None:
    model = Repackaged()
    gone, plan = weakref.ref(model), auto_checkpoint(model, batch(), budget_mb=None)
    plan.module(batch()).backward()
    assert model.hidden[0].requires_grad
    del model, plan
    gc.collect()
    assert gone() is None


def grows(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.hidden = torch.cat([self.hidden, x.detach()[:, :1]], 1)
    return self.after(self.before(x) + self.hidden.mean(1, keepdim=True))


def appends(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.after(self.before(x + sum(self.held)))
    self.held.append(y.detach())
    return y


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.steps += 1
    self.hidden = self.before(x + self.hidden).detach() * min(1, self.steps / 10)
    return self.after(self.before(x + self.hidden))


def views(self: Any, x: torch.Tensor) -> torch.Tensor:
    y, self.hidden = self.after(self.before(x + self.hidden)), x[:, :]
    return y


def checkpoints(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda x: self.before(x + self.hidden), x, use_reentrant=False)
    self.hidden = y.detach()
    return self.after(y)


@pytest.mark.every(1)
@pytest.mark.parametrize(("forward", "said"), [
    (grows, "state that has another shape or dtype after each call at self.hidden"),
    (appends, "state that has another shape or dtype after each call at self.held"),
    (counts, "state that forward changes and reads at self.steps"),
    (views, "view of an input or parameter returned at output self.hidden"),
    (checkpoints, "torch.utils.checkpoint beside state that forward carries in self.hidden"),
])  # fmt: skip
def test_what_cannot_be_carried_is_refused_and_planned_by_regions(forward: Callable[..., Any], said: str) -> None:
    model = type("Own", (Deep,), {"forward": forward})()
    model.hidden, model.steps, model.held = torch.zeros(BATCH, LENGTH, WIDTH), 0, [torch.zeros(WIDTH)]
    with pytest.raises(Unsupported, match=said):
        auto_checkpoint(model, batch(), budget_mb=None, regions="whole")
    model, plain = twins(model)
    plan = auto_checkpoint(model, batch(), budget_mb=None)
    assert {region.path for region in plan.regions} >= {"before", "after"}
    for step in range(3):
        x = batch()
        for run, own in ((plan.module, model), (plain, plain)):
            torch.manual_seed(step)
            own.zero_grad()
            run(x).pow(2).mean().backward()
        assert_same_gradients(model, plain)
        assert_same_state(model, plain)


class StartsAnew(Deep):
    """What it leaves is a tensor that was there before, with the same values as yet."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.hidden = torch.zeros(WIDTH), torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x) + self.hidden
        self.hidden = self.start
        return self.after(y).pow(2).mean()

    def settle(self) -> None:
        self.start = self.start + 1


class Alternates(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.zeros(WIDTH), torch.zeros(WIDTH)
        self.current = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.current = self.first if self.current is self.second else self.second
        return self.after(self.before(x) + self.current).pow(2).mean()

    def settle(self) -> None:
        self.first.add_(1)


@pytest.mark.every(1)
@pytest.mark.filterwarnings("ignore:planning anew")
@pytest.mark.parametrize("kind", [StartsAnew, Alternates])
def test_which_tensor_it_is_counts_and_not_its_values_alone(kind: type[Deep]) -> None:
    model, plain = twins(kind())
    plan = auto_checkpoint(model, batch(), progress=False)
    for step in range(5):
        train([(plan.module, model), (plain, plain)], batch(), step)
        assert_same_gradients(model, plain)
        assert_same_state(model, plain)


class LeavesLosses(Deep):
    """Losses in an attribute, a list and a dict, none of which it reads, beside the state that it carries."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.auxiliary = torch.zeros(WIDTH), None
        self.log: list[torch.Tensor] = []
        self.losses: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x) + self.hidden
        self.hidden = y.detach().mean((0, 1))
        self.auxiliary = y.abs().mean()
        self.log.append(y.square().mean())
        self.losses["mean"] = y.mean()
        return self.after(y).pow(2).mean()


def test_losses_beside_the_state_need_no_other_plan() -> None:
    model, plain = twins(LeavesLosses())
    plan = auto_checkpoint(model, batch(), progress=False)
    assert any("carries self.hidden from" in note for note in plan.notes)
    for step in range(5):
        x = batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if step == 0 else "error")  # another backward than planned for, once
            for run, own in ((plan.module, model), (plain, plain)):
                torch.manual_seed(step)
                own.zero_grad()
                (run(x) + own.auxiliary + own.log[-1] + own.losses["mean"]).backward()
        assert_same_gradients(model, plain)
        assert len(model.log) == len(plain.log) == step + 1
        assert all(map(torch.equal, (model.hidden, *model.log), (plain.hidden, *plain.log)))


@pytest.mark.filterwarnings("ignore:planning anew")
def test_what_begins_to_grow_is_planned_by_regions_from_then_on() -> None:
    class Growing(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = x.detach()[:, :1].clone()
            self.hidden = held if self.hidden is None else torch.cat([self.hidden, held], 1)
            return self.after(self.before(x) + self.hidden.mean(1, keepdim=True)).pow(2).mean()

    model, plain = twins(Growing())
    plan = auto_checkpoint(model, batch(), budget_mb=None)
    assert not plan.regions
    for step in range(5):
        with warnings.catch_warnings():
            if step > 1:
                warnings.simplefilter("error")
            train([(plan.module, model), (plain, plain)], batch(), step)
        assert_same_gradients(model, plain)
        assert_same_state(model, plain)
    with pytest.raises(StateChanged):
        auto_checkpoint(model, batch(), budget_mb=None, regions="whole")


class Averaged(nn.Module):
    """Replaces a buffer, which others may hold: an attribute, another name, the training loop."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.register_buffer("average", torch.ones(8))
        self.way, self.start = way, self.average if way == "an attribute" else torch.ones(8)
        if way == "two names":
            self.register_buffer("first", self.average)
        if way == "another buffer":
            self.register_buffer("large", torch.full((8,), 2.0))
            self.register_buffer("small", self.average)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x) + self.average + self.start
        if self.way == "another buffer":
            self.average = self.large if len(x) > 4 else self.small
        else:
            self.average = self.average * 0.9 + 0.1 * y.detach().mean(0)
        return y.cos()


class WithIt(nn.Module):
    """Traced by regions."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.last = Averaged(way), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.inner(x))
        return y if y.sum().item() < 1e9 else -y


@pytest.mark.filterwarnings("ignore:planning anew")
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("way", ["nobody", "the loop", "an attribute", "two names", "another buffer"])
def test_a_buffer_that_is_replaced_stays_as_it_was_for_others(way: str, regions: bool) -> None:
    model: Any = (WithIt if regions else Averaged)(way)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, torch.randn(4, 8), progress=False, check=False, recompute="*")
    held: list[Any] = []
    for rows in (4, 4, 6, 4, 6, 4):
        x = torch.randn(rows, 8)
        outputs = [each(x) for each in (plan.module, plain)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.mean().backward()
        mine, its = (each.inner if regions else each for each in (model, plain))
        assert all(map(torch.equal, mine.buffers(), its.buffers()))
        assert torch.equal(mine.start, its.start)
        assert all(torch.equal(*kept) for kept in held)
        held += [(mine.average, its.average)] if way == "the loop" else []
