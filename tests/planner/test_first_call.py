"""What a forward remembers at its first call is in place when it is traced: no later forward ends the plan."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from planner import PlannerError, auto_checkpoint
from tests.zoo.compare import same_bits


class Remembers(nn.Module):
    """Scales what it computes by something that it makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(6), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(self.linear(x).tanh()) * self.scale(x.shape[1])).sin()

    def scale(self, length: int) -> Any:
        raise NotImplementedError


class Number(Remembers):
    value = None

    def scale(self, length: int) -> Any:
        if self.value is None:
            self.value = 0.5
        return self.value


class Flag(Remembers):
    is_new = True

    def scale(self, length: int) -> Any:
        if self.is_new:
            self.is_new = False
        return 0.5


class Table(Remembers):
    table = None

    def scale(self, length: int) -> Any:
        if self.table is None or len(self.table) < length:
            self.table = torch.arange(1.0, length + 1)[:, None]
        return self.table[:length]


class ByLength(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def scale(self, length: int) -> Any:
        if length not in self.tables:
            self.tables[length] = torch.arange(1.0, length + 1)[:, None]
        return self.tables[length]


class Listed(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[float] = []

    def scale(self, length: int) -> Any:
        if not self.made:
            self.made.append(0.5)
        return self.made[0]


class OfClass(Remembers):
    known: ClassVar[dict[str, float]] = {}

    def scale(self, length: int) -> Any:
        if "scale" not in self.known:
            self.known["scale"] = 0.5
        return self.known["scale"]


class Helper:
    factor = 0.5


class Lazy(Remembers):
    helper = None

    def scale(self, length: int) -> Any:
        if self.helper is None:
            self.helper = Helper()
        return self.helper.factor


class Marked(Number):
    """A buffer of this class has attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Buffer(torch.ones(1), persistent=False)

    def scale(self, length: int) -> Any:
        return super().scale(length) * self.unit


def _doubled(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


class Hooking(Remembers):
    """As transformers do to collect hidden states."""

    hooked = False

    def scale(self, length: int) -> Any:
        return 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.linear.register_forward_hook(_doubled)
            self.drop.register_forward_hook(lambda _, given, output: output + 1)
            self.hooked = True
        return super().forward(x)


def _step(model: nn.Module, called: Any, *given: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    called(*given).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _evaluate(model: nn.Module, x: torch.Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    OfClass.known.clear()


@pytest.mark.parametrize("kind", [Number, Flag, Table, ByLength, Listed, OfClass, Lazy, Marked])
def test_evaluation_does_not_end_the_plan(kind: type[Remembers]) -> None:
    model, x = kind(), torch.randn(4, 6, 8)
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    seed = torch.get_rng_state()
    attributes = dict(vars(model))
    plan = auto_checkpoint(model, x, progress=False)
    assert torch.equal(seed, torch.get_rng_state())
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert vars(model).keys() == attributes.keys() and not OfClass.known and not getattr(model, "tables", None)
    assert any("the first planned call leaves" in note for note in plan.notes)
    others = plan.apply(kind(), x), copy.deepcopy(plan.module)
    plan.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert all(map(same_bits, _step(model, model, x), _step(plain, plain, x)))
            _evaluate(model, x)
            _evaluate(plain, x)
        for other in others:
            _step(other, other, x)
    assert all(map(same_bits, model.buffers(), plain.buffers()))
    assert vars(model).keys() - {"forward"} == vars(plain).keys()


def _hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


def _hook_in_between(model: nn.Module, x: torch.Tensor) -> None:
    cast("Any", model).drop.register_forward_hook(_doubled)


@pytest.mark.parametrize("regions", ["whole", ["linear", "norm"]], ids=["whole", "regions"])
@pytest.mark.parametrize("first", [_evaluate, _hook_in_between, lambda *_: None], ids=["evaluated", "hooked", "no"])
def test_hooks_of_a_first_call_come_with_what_tells_that_they_are_there(first: Any, regions: Any) -> None:
    model, x = Hooking(), torch.randn(4, 6, 8)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, check=False, regions=regions)
    assert not any(_hooks(model)) and not model.hooked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of planning anew
        for each in (plain, model):
            first(each, x)
        for _ in range(2):
            assert all(map(same_bits, _step(model, plan.module, x), _step(plain, plain, x)))
            assert not model.hooked or _hooks(model) == _hooks(plain)
            _evaluate(model, x)
            _evaluate(plain, x)
            assert _hooks(model) == _hooks(plain) and model.hooked
    assert all(map(same_bits, model.buffers(), plain.buffers()))


def test_hooks_of_a_first_call_are_of_each_instance() -> None:
    model, x = Hooking(), torch.randn(4, 6, 8)
    plan = auto_checkpoint(model, x, progress=False, regions="whole")
    other = copy.deepcopy(plan.module)
    plain = copy.deepcopy(other._plan_state.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of planning anew
        for _ in range(2):
            found = _step(other._plan_state.model, other, x)
            assert all(map(same_bits, found, _step(plain, plain, x)))
    assert not any(_hooks(model))


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("way", ["applied", "module", "average"])
def test_a_planned_model_is_copied_before_and_after_its_first_call(way: str, calls: int) -> None:
    model, x = nn.Sequential(Number(), nn.Linear(8, 1)), torch.randn(4, 6, 8)
    plan = auto_checkpoint(model, x, progress=False)
    if way != "module":
        plan.apply(model)
    called = plan.module if way == "module" else model
    for _ in range(calls):
        _step(model, called, x)
    copied = AveragedModel(model).module if way == "average" else copy.deepcopy(called)
    assert all(map(same_bits, _step(copied, copied, x), _step(model, called, x)))


def test_a_plan_is_exported_before_its_first_call(tmp_path: Path) -> None:
    model, x = Number(), torch.randn(4, 6, 8)
    plan = auto_checkpoint(model, x, progress=False, check=False)
    assert (plan.export(tmp_path / "folder") / "spec.json").exists()
    assert model.value is None


class WarmUp(nn.Module):
    """Comes to full strength in training and stays there; an evaluation reads how far it came."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(8, 8), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.advance()
        return x + self.linear(x).sin() * self.strength

    def advance(self) -> None:
        self.held = min(1.0, self.held + 0.25)

    @property
    def strength(self) -> float:
        return float(self.held)

    def put(self, value: float) -> None:
        self.held = value


class WarmUpInList(WarmUp):
    def __init__(self, held: Any) -> None:
        super().__init__([held])

    def advance(self) -> None:
        self.held[0] = min(1.0, self.held[0] + 0.25)

    @property
    def strength(self) -> float:
        return float(self.held[0])

    def put(self, value: float) -> None:
        self.held[0] = value


@pytest.mark.every(1)
@pytest.mark.parametrize("regions", ["whole", ["*"]], ids=["whole", "regions"])
@pytest.mark.parametrize("kind", [WarmUp, WarmUpInList])
def test_a_warm_up_that_ends_in_a_call_planned_anew_has_ended(kind: type[WarmUp], regions: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(1.0), kind(1.0)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, check=False, regions=regions)
    for restarted in (False, True, False, True):
        for each in (plain, model) if restarted else ():
            for part in each:
                cast(WarmUp, part).put(0.75)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert all(map(same_bits, _step(model, plan.module, x), _step(plain, plain, x)))
        assert [cast(WarmUp, part).strength for part in model] == [1.0, 1.0]
        assert same_bits(model.eval()(x), plain.eval()(x))
        model.train()
        plain.train()


def test_a_warm_up_that_would_end_in_a_region_is_refused() -> None:
    model = nn.Sequential(WarmUp(0.75), WarmUp(1.0))
    with pytest.raises(Exception, match="state that forward changes and reads"):
        auto_checkpoint(model, torch.randn(4, 8), progress=False, regions=["0"])
    assert model[0].held == 0.75


def test_lengths_that_grow_in_training_are_planned_once_each() -> None:
    model, batches = Table(), [torch.randn(4, 6, 8)[:, :n] for n in (3, 6)]
    model.norm = nn.Identity()
    plan = auto_checkpoint(model, batches[0], progress=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            for x in batches:
                _step(model, plan.module, x)
    # For six, of which the call leaves a table; and for three with that table.
    assert len([w for w in said if "planning anew" in str(w.message)]) == 2


class OfTheLongest(Remembers):
    """As rotary embeddings by dynamic NTK: the longest batch decides the table of all after it."""

    longest, table, setting = 0, cast(Any, None), 1.0

    def scale(self, length: int) -> Any:
        if length > self.longest:
            self.longest = length
            self.table = torch.arange(1.0, length + 1)[:, None] / length
        return self.table[:length]


class UnderASetting(ByLength):
    setting = 1.0

    def scale(self, length: int) -> Any:
        if length not in self.tables:
            self.tables[length] = torch.full((length, 1), self.setting)
        return self.tables[length]


class ListedByLength(Listed):
    setting = 1.0

    def scale(self, length: int) -> Any:
        while len(self.made) < length:
            self.made.append(self.setting)
        return self.made[length - 1]


@pytest.mark.filterwarnings("ignore:planning anew", "ignore:5 calls were planned anew")
@pytest.mark.parametrize("check", [False, "auto"])
@pytest.mark.parametrize("kind", [OfTheLongest, UnderASetting, ListedByLength])
def test_what_a_longer_batch_leaves_is_left_by_the_planned_step(kind: type[Any], check: Any) -> None:
    model = kind()
    model.norm = nn.Identity()
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, torch.randn(4, 3, 8), progress=False, check=check)
    for length in (3, 6, 3, 5, 6, 7, 3, 6):
        x = torch.randn(4, length, 8)
        assert all(map(same_bits, _step(model, plan.module, x), _step(plain, plain, x)))
        for each in (model, plain):
            each.setting *= 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, plan.module, torch.randn(4, 6, 8))
    x = torch.randn(4, 4, 8)
    assert same_bits(model.eval()(x), plain.eval()(x))


MADE_BY_EXEC = """
class Made(ByLength):
    setting = 1.0

    def scale(self, length):
        if length not in self.tables:
            self.tables[length] = torch.full((length, 1), self.setting)
        return self.tables[length]
"""


def test_what_a_class_made_by_exec_remembers() -> None:
    space = {"ByLength": ByLength, "torch": torch}
    exec(MADE_BY_EXEC, space)  # noqa: S102
    model: Any = space["Made"]()  # type: ignore[operator]
    model.norm = nn.Identity()
    plan = auto_checkpoint(model, torch.randn(4, 3, 8), progress=False)
    _step(model, plan.module, torch.randn(4, 3, 8))
    assert list(model.tables) == [3]


class OfTheLatest(Remembers):
    """A mask of the batch's length, as torch's own language model keeps it."""

    table, setting = cast(Any, None), 1.0

    def scale(self, length: int) -> Any:
        if self.table is None or len(self.table) != length:
            self.table = torch.arange(1.0, length + 1)[:, None] * self.setting
        return self.table


def test_a_table_of_the_latest_length_is_planned_twice_for_each(recwarn: pytest.WarningsRecorder) -> None:
    model = OfTheLatest()
    model.norm = nn.Identity()
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, torch.randn(4, 3, 8), progress=False, check=False)

    def replans(lengths: list[int]) -> int:
        recwarn.clear()
        for length in lengths:
            x = torch.randn(4, length, 8)
            assert all(map(same_bits, _step(model, plan.module, x), _step(plain, plain, x)))
            assert same_bits(model.table, plain.table)
        return sum("planning anew" in str(w.message) for w in recwarn)

    assert replans([3, 5, 3, 4, 5, 4, 3]) <= 6
    assert replans([5, 3, 4, 4, 5, 4, 3, 5]) == 0
    model.setting = plain.setting = 0.5
    assert replans([3, 5, 3, 4, 5, 4, 3]) == 3
    assert replans([5, 3, 4, 4, 5, 4, 3, 5]) == 0


class Logs(nn.Module):
    """Keeps what it computed for others to read."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8), way
        self.seen: Any = {0: {}, 1: [], 2: deque(maxlen=2), 3: {"norm": 0.0, "length": 0}, 4: []}[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.way in (0, 3):
            self.seen["norm"], self.seen["length"] = y.detach().norm(), len(x)
        elif self.way == 1:
            self.seen.clear()
        if self.way in (1, 2):
            self.seen.append(y.detach())
        elif self.way == 4:
            self.seen[:] = [y.detach(), x.shape]
        return y.tanh()


@pytest.mark.filterwarnings("ignore:forward sets")
@pytest.mark.parametrize("way", range(5))
def test_what_forward_logs_is_not_planned_anew_in_each_step(way: int) -> None:
    model = nn.Sequential(Logs(way), Logs(way))
    plan = auto_checkpoint(model, torch.randn(4, 8), progress=False, check=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (4, 4, 6, 4, 6, 6, 4):
            _step(model, plan.module, torch.randn(rows, 8))
    assert len([w for w in said if "planning anew" in str(w.message)]) == 1


class FromTheBatch(Remembers):
    mean = None

    def scale(self, length: int) -> Any:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.mean()
        return super().forward(x - self.mean)


def test_what_depends_on_the_batch_is_refused_and_not_remembered() -> None:
    model = FromTheBatch()
    with pytest.raises(Exception, match="state that forward changes and reads"):
        auto_checkpoint(model, torch.randn(4, 6, 8), progress=False, regions="whole")
    assert model.mean is None


LIBRARY = """
_backends = {}

class Backend:
    scale = 0.5

def backend_of(tensor):
    if type(tensor) not in _backends:
        _backends[type(tensor)] = Backend()
    return _backends[type(tensor)]
"""


@pytest.mark.parametrize("regions", ["whole", ["*"]], ids=["whole", "regions"])
def test_what_an_installed_library_remembers_does_not_end_the_plan(
    regions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As einops does, by the type of the first tensor."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "remembering_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    library = importlib.import_module("remembering_library")
    monkeypatch.setattr(Remembers, "scale", lambda self, length: library.backend_of(self.linear.weight).scale)
    model, x = nn.Sequential(Remembers(), nn.Linear(8, 1)), torch.randn(4, 6, 8)
    plan = auto_checkpoint(model, x, progress=False, regions=regions)
    assert not any("Functional" in note or "Fake" in note for note in plan.notes)  # types of the trace's own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _step(model, plan.module, x)
    del sys.modules["remembering_library"]


PREPARES = """
from torch import nn

class Prepares(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.ready = nn.Linear(8, 8), False

    def forward(self, x):
        if not self.ready:
            self.prepare()
            self.ready = True
        return self.linear(x).tanh()
"""


def test_a_first_call_is_left_whole() -> None:
    """The flag is read by code that is in nobody's file, what is set beside it by a user's."""
    space: dict[str, Any] = {}
    exec(PREPARES, space)  # noqa: S102 - as a notebook would

    class Doubles(space["Prepares"]):
        def prepare(self) -> None:
            forward = self.linear.forward
            self.linear.forward = lambda given: 2 * forward(given)

    model, x = Doubles(), torch.randn(4, 6, 8)
    plain = copy.deepcopy(model)
    plan = auto_checkpoint(model, x, progress=False, regions="whole", check=False)
    for _ in range(2):
        assert all(map(same_bits, _step(model, plan.module, x), _step(plain, plain, x)))
    assert ("forward" in vars(model.linear)) == model.ready


class FromTheFirst(nn.Module):
    """What all calls are scaled by is that of the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.factor = nn.Linear(8, 8), 1.0
        self.frequencies = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("table", torch.zeros(16, 8))
        self.register_buffer("unit", torch.ones(8))
        self.number, self.made, self.by_name = None, cast(Any, None), dict[str, int]()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.scale(x, mask)

    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        raise NotImplementedError


class FirstLength(FromTheFirst):
    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        if self.number is None:
            self.number = x.shape[1]
        return self.number


class FirstLengthInDict(FromTheFirst):
    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        if "first" not in self.by_name:
            self.by_name["first"] = x.shape[1]
        return self.by_name["first"]


class FirstCount(FromTheFirst):
    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        if self.number is None:
            self.number = int(mask.sum())
        return self.number


class FirstFactor(FromTheFirst):
    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        if self.made is None:
            self.made = torch.arange(1.0, 9.0) * self.factor * self.unit
        return self.made


class FirstInABranch(FromTheFirst):
    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return FirstLength.scale(cast(Any, self), x, mask) if mask.all() else 1.0


class FillsItsTable(FromTheFirst):
    """As the rotary embeddings of many models do."""

    filled = 0

    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        length = x.shape[1]
        if length > self.filled:
            rows = torch.arange(length)[:, None] * self.frequencies
            self.table[:length] = rows
            self.filled = length
            return rows
        return self.table[:length].detach()


class MakesItsBuffer(FromTheFirst):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", None, persistent=False)

    def scale(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        length = x.shape[1]
        if self.rows is None or len(self.rows) < length:
            self.rows = torch.arange(length)[:, None] * self.unit
        return self.rows[:length]


class FillsByTheBatch(FillsItsTable):
    """Not the same for all batches."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self.filled:
            self.table[:1] = x.detach().mean()
            self.filled = 1
        return self.linear(x) * self.table[0]


def _masked(length: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(4 * length, dtype=torch.bool)
    mask[:count] = True
    return torch.randn(4, length, 8), mask


@pytest.mark.every(1)
@pytest.mark.parametrize("regions", ["auto", ["*"]], ids=["auto", "regions"])
@pytest.mark.parametrize(
    "kind", [FirstLength, FirstLengthInDict, FirstCount, FirstFactor, FirstInABranch, FillsItsTable, MakesItsBuffer]
)
def test_what_the_first_call_leaves_is_of_its_own_arguments(kind: type[FromTheFirst], regions: Any) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = kind(), nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(x, mask))

    model = Whole()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = auto_checkpoint(model, _masked(6, 3), progress=False, time_limit=1, regions=regions)
        for each in (model, plain):
            each.inner.factor = 2.0
            each.inner.unit.fill_(3)
        for length, count in ((4, 5), (6, 3), (4, 16), (6, 24), (4, 16), (6, 3)):
            given = _masked(length, count)
            assert all(map(same_bits, _step(model, plan.module, *given), _step(plain, plain, *given)))
    for name in ("number", "by_name", "filled"):
        assert getattr(model.inner, name, None) == getattr(plain.inner, name, None)
    assert same_bits(model.inner.table, plain.inner.table)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("kind", [FillsItsTable, MakesItsBuffer])
def test_a_table_that_a_first_call_fills_is_planned_with_it_in_place(kind: type[FromTheFirst], applied: bool) -> None:
    model, given = kind(), _masked(6, 3)
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    plan = auto_checkpoint(model, given, progress=False, regions="whole")
    assert not model.table.any() and getattr(model, "rows", None) is None
    trained, called = (model, plan.module) if not applied else (other, plan.apply(other, given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert all(map(same_bits, _step(trained, called, *given), _step(plain, plain, *given)))
    found, expected = dict(trained.named_buffers()), dict(plain.named_buffers())
    assert found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in found)


def test_a_table_that_is_filled_from_the_batch_is_refused() -> None:
    model = FillsByTheBatch()
    with pytest.raises(PlannerError, match="state that forward changes and reads at self.filled"):
        auto_checkpoint(model, _masked(6, 3), progress=False, regions="whole")
    assert not model.filled and not model.table.any()
