"""Several threads at once, real interrupts, and what a plan leaves in the process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import gc
import linecache
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from passes import exclusive as deferral
from passes._torch import compiling_flags, eager_kernels, private_generator
from passes.exclusive import alone, exclusive, interrupt_point, turn
from planner import Plan, PlannerError, auto_checkpoint
from planner.check import restore
from tests.planner import interrupts, mutations
from tests.planner.residue import left_behind, state
from tests.planner.small import python
from tests.planner.steps import SmallGPT, batch, conv_net, linear, mlp, plan, tight

Case = tuple[nn.Module, Any]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes' temporary files are not what is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def cases() -> list[Case]:
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3)
    return [(mlp(), torch.randn(8, 32)), (SmallGPT(), torch.randint(0, 64, (2, 16))),
            (conv_net(), torch.randn(4, 3, 8, 8)), (lstm, torch.randn(4, 3, 8))]  # fmt: skip


def at_once(acts: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions run in threads that start together."""
    results: list[Any] = [None] * len(acts)
    start = threading.Barrier(len(acts))

    def work(i: int) -> None:
        start.wait()
        try:
            results[i] = acts[i]()
        except BaseException as error:  # noqa: BLE001 - looked at by the caller
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def four_threads_plan(rounds: int) -> None:
    given = cases()
    expected = [tight(*case) for case in given]
    before = [state(model) for model, _ in given]
    for _ in range(rounds):
        found = at_once([lambda case=case: tight(*case) for case in given])  # type: ignore[misc]
        assert all(isinstance(f, Plan) for f in found), found
        assert [f.schedule for f in found] == [e.schedule for e in expected]
        assert [f.peak_bytes for f in found] == [e.peak_bytes for e in expected]
        assert [left_behind(m, b) for (m, _), b in zip(given, before, strict=True)] == [[]] * len(given)


@pytest.mark.slow
def test_four_threads_plan_at_once() -> None:
    four_threads_plan(2)


@pytest.mark.slow
def test_four_threads_plan_at_once_again_and_again() -> None:
    four_threads_plan(20)


def train(model: nn.Module, sample: torch.Tensor, until: Callable[[int], bool]) -> list[float]:
    """Losses of plain steps, dropout and all."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 1e-3), []
    torch.manual_seed(1)
    while not until(len(losses)):
        optimizer.zero_grad()
        loss = model(sample).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_thread_that_trains_is_not_disturbed_by_planning() -> None:
    first, (model, tokens), _, last = cases()
    twin, done = copy.deepcopy(model), threading.Event()

    def plan_all() -> None:
        try:
            for case in (first, last):
                tight(*case, cost="measured")
        finally:
            done.set()

    losses, failed = at_once([lambda: train(model, tokens, lambda n: n > 5 and done.is_set()), plan_all])
    assert failed is None and losses == train(twin, tokens, lambda n: n == len(losses))


def test_replanning_in_a_thread_waits_for_a_plan() -> None:
    model, x = mlp(0.0), torch.randn(8, 32)
    module = tight(model, x).module
    other, sample = cases()[1]

    def replanned() -> torch.Tensor:
        return module(torch.ones(5, 32)).sum()

    with pytest.warns(UserWarning, match="planning anew"):
        loss, made = at_once([replanned, lambda: tight(other, sample)])
    assert torch.equal(loss, model(torch.ones(5, 32)).sum()) and isinstance(made, Plan)


class Whole(nn.Module):
    """Two blocks whose numbers stay integers, so that gradients add up alike in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(linear(4), nn.ReLU(), linear(4)) for _ in range(2))
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).sum()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("regions", ["whole", "?"])
def test_a_model_that_is_planned_anew_in_one_thread_trains_in_another(regions: str) -> None:
    torch.manual_seed(0)
    model, done = Whole(), threading.Event()
    plain = copy.deepcopy(model)
    module = tight(model, torch.ones(8, 4), regions=regions).module
    taken: list[torch.Tensor] = []

    def train_on(batches: Iterator[torch.Tensor]) -> None:
        for x in batches:
            module(x).backward()
            taken.append(x)

    def others() -> None:
        try:
            train_on(torch.randint(-2, 3, (rows, 4)).float() for rows in range(2, 7))
        finally:
            done.set()

    def evaluate() -> None:
        while not done.is_set():
            with torch.no_grad():
                module(torch.ones(3, 4))

    same = (torch.randint(-2, 3, (8, 4)).float() for _ in iter(done.is_set, True))
    assert at_once([lambda: train_on(same), others, evaluate]) == [None, None, None]
    for x in taken:
        plain(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_turn_is_one_threads_and_that_of_those_that_it_waits_for() -> None:
    model, here = mlp(), threading.get_ident()

    def took(**how: Any) -> bool:
        try:
            with turn(model, **how):
                return True
        except PlannerError as error:
            return "another thread plans or runs this model" not in str(error)

    with turn(model), turn(model):
        assert elsewhere(lambda: took(patience=0.01)) is False
        assert elsewhere(lambda: took(caller=here, patience=0.01)) is True
    assert elsewhere(lambda: took(caller=here, patience=0.01)) is True
    assert elsewhere(lambda: took()) is True


def elsewhere(look: Callable[[], Any]) -> Any:
    """What another thread sees."""
    return at_once([look])[0]


def test_other_threads_see_torch_as_it_was() -> None:
    before = torch.random.get_rng_state()
    x = torch.randn(3, 3, generator=torch.Generator())
    dropped = lambda: nn.functional.dropout(x, 0.5)  # noqa: E731
    torch.manual_seed(7)
    plain = dropped()
    with compiling_flags(), eager_kernels({}), private_generator():
        assert torch.compiler.is_compiling() and torch.compiler.is_exporting()
        assert not elsewhere(lambda: bool(torch.compiler.is_compiling() or torch.compiler.is_exporting()))
        torch.manual_seed(99)
        assert torch.initial_seed() == 99 and elsewhere(torch.initial_seed) == 7
        elsewhere(lambda: torch.manual_seed(7))
        assert torch.equal(elsewhere(dropped), plain)
        after = elsewhere(torch.random.get_rng_state)
    assert torch.equal(torch.random.get_rng_state(), after)
    torch.random.set_rng_state(before)


# Interrupts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """SIGINTs that reached the handler which is in force outside."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_or_a_point(heard: list[int]) -> None:
    with exclusive():
        with exclusive():
            interrupt()
        assert heard == []
        interrupt_point()
        assert heard == [signal.SIGINT]
        interrupt_point()
        interrupt()
    assert heard == [signal.SIGINT] * 2
    interrupt()
    assert len(heard) == 3


def test_a_second_interrupt_after_a_while_does_not_wait(heard: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferral, "PATIENCE_SECONDS", 0.05)
    with exclusive():
        interrupt()
        interrupt()
        assert heard == []
        time.sleep(0.06)
        interrupt()
        assert heard == [signal.SIGINT]
    assert heard == [signal.SIGINT]


class TimeIsUp(Exception):
    pass


@pytest.fixture
def timed() -> Iterator[list[int]]:
    """SIGTERMs that reached their handler, and SIGALRMs, whose handler raises as a test's time limit does."""
    numbers: list[int] = []

    def hear(number: int, _: Any) -> None:
        numbers.append(number)
        if number == signal.SIGALRM:
            raise TimeIsUp

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGALRM)}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_other_signals_wait_too_and_what_one_raises_loses_none(heard: list[int], timed: list[int]) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)]

    def signalled() -> None:
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)

    def work() -> None:
        assert signal.getsignal(signal.SIGUSR1) is handlers[2]
        signalled()
        assert heard == timed == []
        with contextlib.suppress(Exception):  # as what forward raises is caught
            interrupt_point()
        raise AssertionError("what the handler raised was caught")

    with pytest.raises(TimeIsUp), exclusive(), exclusive():
        work()
    assert heard == [signal.SIGINT] and sorted(timed) == [signal.SIGALRM, signal.SIGTERM]
    with pytest.raises(TimeIsUp), exclusive():
        signalled()
    assert len(heard) == 2 and len(timed) == 4
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)] == handlers


def test_a_second_signal_after_a_while_does_not_wait(timed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferral, "PATIENCE_SECONDS", 0.05)
    with exclusive():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.06)
        with deferral.interruptible():
            assert timed == [signal.SIGTERM]
            signal.raise_signal(signal.SIGTERM)
            assert timed == [signal.SIGTERM] * 2
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.06)
        assert len(timed) == 2
        signal.raise_signal(signal.SIGTERM)
        assert len(timed) == 3
    assert len(timed) == 3


class Alarming(nn.Module):
    """Its forward is interrupted by an alarm, and goes on."""

    rings = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.GELU(), linear())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rings:
            signal.raise_signal(signal.SIGALRM)
        return self.layers(x)


@pytest.mark.parametrize("regions", ["whole", "auto", ["layers"]])
def test_an_alarm_while_planning_is_raised_and_leaves_nothing_behind(timed: list[int], regions: Any) -> None:
    model, x = Alarming(), batch()
    before = state(model)
    with pytest.raises(TimeIsUp):
        plan(model, x, regions=regions)
    assert left_behind(model, before) == [] and len(timed) == 1
    model.rings = False
    plan(model, x, regions=regions).module(x).square().sum().backward()


def test_threads_and_ignored_interrupts_are_left_alone(heard: list[int]) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def look() -> Any:
        with exclusive():
            interrupt_point()
            return signal.getsignal(signal.SIGINT)

    assert elsewhere(look) is handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert look() is signal.SIG_IGN
    interrupt()
    assert heard == []


def test_waiting_for_another_thread_can_be_interrupted(heard: list[int]) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive():
            held.set()
            let_go.wait(30)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    signal.signal(signal.SIGINT, stop)
    timer = threading.Timer(0.1, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt), exclusive():
        pass
    let_go.set()
    thread.join()
    timer.join()
    with exclusive():
        pass


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def test_garbage_of_a_block_cut_short_goes_where_interrupts_wait(heard: list[int]) -> None:
    """While the collector runs, weak references call Python, where an exception is lost."""
    before: list[int] = []  # how many were heard when garbage went, and interrupted

    def leave_garbage() -> None:
        garbage = _Cycle()
        weakref.finalize(garbage, lambda: (interrupt(), before.append(len(heard))))

    def cut_short() -> None:
        with exclusive():
            leave_garbage()
            raise ValueError

    gc.disable()
    try:
        with pytest.raises(ValueError):
            cut_short()
        assert before == []
        with exclusive():
            pass
        assert before == [0] and len(heard) == 1
        with exclusive():
            with pytest.raises(ValueError):
                cut_short()
            assert before == [0]
        assert before == [0, 1] and len(heard) == 2
    finally:
        gc.enable()


LOST_BY_PYTHON = "Exception ignored in: <function Weak"  # an interrupt that came in a weak reference's callback


@pytest.mark.parametrize("of", ["plan", pytest.param("backend", marks=pytest.mark.slow)])
def test_real_interrupts_leave_nothing_behind(of: str) -> None:
    stages, wrong = interrupts.send(2, of=of)
    if wrong and all(line.startswith(LOST_BY_PYTHON) for line in wrong):
        stages, wrong = interrupts.send(2, seed=1, of=of)
    assert wrong == [] and sum(stages.values()) == 2


@pytest.mark.slow
def test_many_real_interrupts_leave_nothing_behind() -> None:
    assert interrupts.send(300)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("of", ["backend", "inductor", "compile"])
def test_many_real_interrupts_of_a_compilation_leave_nothing_behind(of: str) -> None:
    assert interrupts.send(60 if of == "backend" else 20, of=of)[1] == []


def test_mutated_plan_files_are_refused_or_right() -> None:
    verdicts, wrong, _ = mutations.run(40)
    assert wrong == [] and verdicts["refused"] > verdicts["loaded"] > 0


@pytest.mark.slow
def test_many_mutated_plan_files_are_refused_or_right() -> None:
    assert mutations.run(2000)[1] == []


@pytest.mark.parametrize("options", [{"check": True}, {"check": False, "regions": ["blocks.*"]}], ids=str)
def test_an_interrupt_while_a_run_is_undone_waits_until_it_is(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, sample = SmallGPT(), torch.randint(0, 64, (2, 16))
    undo = restore.Snapshot.restore

    def pressed(self: restore.Snapshot) -> None:
        signal.raise_signal(signal.SIGINT)
        undo(self)

    monkeypatch.setattr(restore.Snapshot, "restore", pressed)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        plan(model, sample, **options)
    assert left_behind(model, before) == []


# What stays -----------------------------------------------------------------------------------------------------------


def sources() -> int:
    return sum("<eval_with_key>" in name for name in linecache.cache)


def test_a_dropped_plan_goes_at_once_with_its_model_and_sources() -> None:
    gc.collect()
    before = sources()
    gc.disable()
    try:
        for _ in range(2):
            model = mlp()
            made = auto_checkpoint(model, torch.randn(8, 32), progress=False)
            made.module(torch.randn(8, 32)).sum().backward()
            kept = [weakref.ref(o) for o in (made, made.module, model, made.module.forward_graph)]
            _ = str(made), made._repr_html_(), made.explain()
            del made, model
            assert [r() is None for r in kept] == [True] * 4
            assert sources() == before
    finally:
        gc.enable()


def test_the_graph_of_a_plan_still_knows_its_module() -> None:
    made = plan(linear(), batch())
    made.module.graph.lint()
    assert not made.module.graph.eliminate_dead_code()
    assert made.module.graph.owning_module.planned_step is made.module.planned_step  # type: ignore[union-attr]
    copy.deepcopy(made.module)(batch()).sum().backward()


@pytest.mark.slow
def test_pythons_generator_is_not_drawn_from(tmp_path: Path) -> None:
    done = python("""
import random, sys, torch
from pathlib import Path
from tests.planner.steps import mlp, tight
before = random.getstate()
made = tight(mlp(), torch.randn(8, 32))
folder = Path(sys.argv[1])
str(made), made._repr_html_(), made.explain(), made.tables(), made.plot(), made.plot_graph()
made.save(folder / "plan.json"), made.report(folder / "page.html"), made.export(folder / "out")
assert random.getstate() == before
""", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_the_compiling_flag_is_an_ordinary_answer() -> None:
    with compiling_flags():
        flag: Any = torch.compiler.is_compiling()
        assert (flag | False) is (False | flag) is True and (flag & True) is (True & flag) is True
        assert flag and flag == True  # noqa: E712
    assert torch.compiler.is_compiling() is False


def test_a_pool_without_work_is_no_other_thread() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        time.sleep(0.05)
        assert alone()
        busy = pool.submit(time.sleep, 0.3)
        time.sleep(0.05)
        assert not alone()
        busy.result()
