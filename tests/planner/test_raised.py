"""What a planned forward raises and the training loop catches: all is left as eager leaves it, and so the next step."""

from __future__ import annotations

import contextlib
import copy
import functools
import signal
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.errors import ForwardFailed, VerificationError
from planner import Plan
from planner.dropin import raised
from tests.planner.steps import assert_same_gradients, assert_same_state, conv_net, plan, tight


class Classifier(nn.Module):
    """Batch norms and a draw come before the op that raises for a label out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = conv_net(), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.drop(self.body(x)), labels)


class Part(nn.Module):
    """A region: the index may be beyond the embedding, after the batch norm and the draw."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.3))
        self.layers, self.codes = nn.Sequential(*layers), nn.Embedding(8, 16)

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) + self.codes(codes)).tanh()


class Parts(nn.Module):
    """A value decides between the regions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            x = part(x, codes + i)
            if x.max() > 50:
                x = x / 2
        return x.square().mean()


errors: list[Exception] = []  # raised by the op's next calls
op_calls: list[tuple[Any, int]] = []  # what each was given, and how many of those before were still held


@torch.library.custom_op("raised_tests::checked", mutates_args=())
def checked(x: torch.Tensor) -> torch.Tensor:
    op_calls.append((weakref.ref(x), sum(given() is not None for given, _ in op_calls)))
    if errors:
        raise errors.pop()
    return x.clone()


checked.register_fake(torch.empty_like)
checked.register_autograd(lambda ctx, gradient: gradient)


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checked(self.body(x)).square().mean()


Batch = tuple[torch.Tensor, ...]


def labelled() -> tuple[Batch, Batch, str, str]:
    x = torch.randn(8, 3, 8, 8)
    bad = torch.tensor([0, 1, 2, 3, 9, 0, 1, 2])
    return (x, torch.arange(8) % 4), (x, bad), "Target 9 is out of bounds", "F.cross_entropy(self.drop"


def coded() -> tuple[Batch, Batch, str, str]:
    """The third region alone finds a code beyond its embedding."""
    x = torch.randn(32, 16)
    return (x, torch.arange(32) % 6), (x, torch.arange(32) % 7), "index out of range", "self.codes(codes)"


def module_of(chosen: Plan, model: nn.Module) -> nn.Module:
    return chosen.module


def applied(chosen: Plan, model: nn.Module) -> nn.Module:
    chosen.apply(model)
    return model


def train(model: nn.Module, step: Any, batches: list[Batch]) -> list[BaseException]:
    """SGD that skips what raises."""
    skipped: list[BaseException] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for batch in batches:
        optimizer.zero_grad()
        try:
            step(*batch).backward()
            optimizer.step()
        except (IndexError, RuntimeError) as error:
            skipped.append(error)
    return skipped


def lines_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@pytest.mark.parametrize(("make", "called"), [
    (labelled, module_of),
    (coded, applied),
    pytest.param(labelled, applied, marks=pytest.mark.slow),
    pytest.param(coded, module_of, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.every(1)
@pytest.mark.filterwarnings("error")
def test_an_error_that_the_loop_catches_leaves_what_it_leaves_in_eager(
    make: Callable[[], tuple[Batch, Batch, str, str]], called: Callable[[Plan, nn.Module], nn.Module],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Running statistics lagged behind, silently, and a traceback of generated code was printed."""
    torch.manual_seed(0)
    model: nn.Module = Classifier() if make is labelled else Parts()
    plain = copy.deepcopy(model)
    good, bad, words, line = make()
    chosen = tight(model, good)
    assert bool(chosen.regions) == (make is coded) and chosen.recomputed
    step = called(chosen, model)
    left = []
    for own, call in ((plain, plain), (model, step)):
        errors = train(own, call, [good, bad, good, bad])
        assert len(errors) == 2
        for error in errors:
            assert type(error) is IndexError and words in str(error) and error.__cause__ is error.__context__ is None
            assert line in lines_of(error) and "eval_with_key" not in lines_of(error)
        left.append(torch.get_rng_state())
    assert torch.equal(*left)
    assert_same_state(model, plain)
    train(plain, plain, [good])
    train(model, step, [good])
    assert_same_state(model, plain)
    assert_same_gradients(model, plain)
    assert capfd.readouterr() == ("", "")


def test_under_autocast_and_with_a_loss_of_the_plan() -> None:
    torch.manual_seed(0)
    model = conv_net()
    plain = copy.deepcopy(model)
    x, good, bad = torch.randn(8, 3, 8, 8), torch.arange(8) % 4, torch.arange(8)
    runs = []
    with torch.autocast("cpu", torch.bfloat16):
        chosen = tight(model, (x, good), loss_fn=lambda output, labels: F.cross_entropy(output.float(), labels))
    for own, step in ((plain, lambda x, y: F.cross_entropy(plain(x).float(), y)), (model, chosen.module)):

        def call(x: torch.Tensor, y: torch.Tensor, step: Any = step) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return step(x, y)

        runs.append((list(map(str, train(own, call, [(x, good), (x, bad), (x, good)]))), torch.get_rng_state()))
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert runs[0][0] == runs[1][0] and len(runs[0][0]) == 1 and torch.equal(runs[0][1], runs[1][1])
    assert_same_state(model, plain)
    assert_same_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:planning anew")
def test_inputs_of_another_type_are_refused_as_in_eager(capfd: pytest.CaptureFixture[str]) -> None:
    """Such a call is planned anew; its error named a line of generated code, and no line of the model."""
    torch.manual_seed(0)
    model, x = Checked(), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    module = plan(model, x, 1.0).module
    said = [train(own, call, [(x,), (x.double(),), (x,)]) for own, call in ((plain, plain), (model, module))]
    assert list(map(str, said[0])) == list(map(str, said[1])) and "same dtype" in str(*said[1])
    assert "checked(self.body(x))" in lines_of(said[1][0])
    assert_same_state(model, plain)
    assert capfd.readouterr().err == ""


class Leaves(nn.Module):
    """Changes a buffer and what it is given before it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codes = nn.Linear(16, 16), nn.Embedding(8, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor, codes: torch.Tensor, found: dict[str, Any]) -> torch.Tensor:
        hidden = self.layer(x).relu()
        found["hidden"] = hidden
        self.seen += hidden.detach().mean(0)
        return (hidden * self.codes(codes)).sum()


@pytest.mark.filterwarnings("ignore:planning anew")
def test_what_forward_has_left_in_arguments_by_then_and_hooks_run_once() -> None:
    torch.manual_seed(0)
    model = Leaves()
    plain = copy.deepcopy(model)
    calls: list[nn.Module] = []
    for own in (plain, model):
        own.register_forward_pre_hook(lambda module, _: calls.append(module))
    x, good, bad = torch.randn(32, 16), torch.arange(32) % 8, torch.arange(32) % 9
    tight(model, (x, good, {})).apply(model)
    calls.clear()
    found: list[dict[str, Any]] = []
    for own in (plain, model):
        for codes in (good, bad, good):
            found.append({})
            own.zero_grad()
            with pytest.raises(IndexError) if codes is bad else contextlib.nullcontext():
                own(x, codes, found[-1]).backward()
    assert calls == [plain] * 3 + [model] * 3
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert list(ours) == list(theirs) == ["hidden"] and torch.equal(ours["hidden"], theirs["hidden"])
    assert_same_state(model, plain)
    assert_same_gradients(model, plain)


# Where the plain forward does not raise it, or is not run ---------------------------------------------------------

class CheckedParts(nn.Module):
    """A value decides between the regions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Checked() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.parts[0](x)
        return self.parts[1](x * y if y > 50 else x + y)


@pytest.fixture(scope="module")
def made() -> tuple[Checked, Plan, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Checked(), torch.randn(32, 16)
    return model, tight(model, x, check=False), x  # op_calls has no calls of spot checks


@pytest.fixture
def planned(made: tuple[Checked, Plan, torch.Tensor]) -> Iterator[tuple[Checked, Plan, torch.Tensor]]:
    made[0].zero_grad()
    op_calls.clear()
    yield made
    errors.clear()


def test_an_error_that_the_plain_forward_does_not_raise_is_told_by_name(
    planned: tuple[Checked, Plan, torch.Tensor],
) -> None:
    model, chosen, x = planned
    plain = copy.deepcopy(model)
    left = []
    for own, step in ((plain, plain), (model, chosen.module)):
        torch.manual_seed(1)
        said: Any = contextlib.nullcontext()
        if own is model:
            errors.append(ValueError("not now"))
            said = pytest.warns(UserWarning, match=r"ValueError: not now was raised by checked \(raised_tests.checked")
        with said:
            step(x).backward()
        own.zero_grad()
        step(x).backward()
        left.append(torch.get_rng_state())
    assert torch.equal(*left) and not errors
    assert_same_state(model, plain)
    assert_same_gradients(model, plain)


def test_another_error_of_the_plain_forward_names_the_first(planned: tuple[Checked, Plan, torch.Tensor]) -> None:
    errors.extend((KeyError("a key"), ValueError("not now")))
    with pytest.raises(KeyError, match=r"a key \(The plain forward raised this; .* because ValueError: not now"):
        planned[1].module(planned[2])
    assert len(op_calls) == 2


def test_the_planned_forwards_tensors_are_gone_as_the_plain_one_runs(
    planned: tuple[Checked, Plan, torch.Tensor],
) -> None:
    errors.append(ValueError("not now"))
    with pytest.warns(UserWarning, match="planned step not used"):
        planned[1].module(planned[2])
    assert [alive for _, alive in op_calls] == [0, 0]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_is_raised_with_what_is_known(
    error: Exception, planned: tuple[Checked, Plan, torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    """The plain forward may need more."""
    model, chosen, x = planned
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    errors.append(error)
    with pytest.raises(RuntimeError, match=r"by checked .*predicts a peak of .* are as before this call;"):
        chosen.module(x)
    assert len(op_calls) == 1 and torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert capfd.readouterr().err == ""
    chosen.module(x).backward()


def test_out_of_memory_in_a_region_names_it() -> None:
    torch.manual_seed(0)
    model, x = CheckedParts(), torch.randn(32, 16)
    chosen = tight(model, x)
    errors.append(torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError, match=r"by checked .* of parts\.0 .* before this call of parts\.0;"):
        chosen.module(x)
    assert [int(part.body[1].num_batches_tracked) for part in model.parts] == [0, 0]  # type: ignore[union-attr, index]
    chosen.module(x).backward()


def test_collectives_are_not_called_a_second_time(
    planned: tuple[Checked, Plan, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raised, "is_collective", lambda node: True)
    errors.append(ValueError("not now"))
    with pytest.raises(ValueError, match="not now .*collectives a second time.* are as before this call"):
        planned[1].module(planned[2])
    assert len(op_calls) == 1


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("regions", ["whole", ["*"]])
def test_a_type_that_no_kernel_takes_is_the_forwards_error(regions: Any) -> None:
    """A trace takes it; what recompute changes there cannot be proved, which is no defect of the proof."""
    model, x = normed(), torch.randn(4, 8)
    with pytest.raises(ForwardFailed, match="must have the same dtype"):
        plan(model, x.double(), regions=regions, recompute=["*"])
    chosen = plan(model, x, regions=regions, recompute=["*"])
    expected = "mat1 and mat2 must have the same dtype"
    with pytest.warns(UserWarning, match="planned step not used"), pytest.raises(RuntimeError, match=expected):
        chosen.module(x.double())
    assert model[1].num_batches_tracked == 0  # type: ignore[comparison-overlap]


def test_what_is_not_proved_of_a_model_that_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = normed(), torch.randn(4, 8)
    before = copy.deepcopy(model)

    def unproved(*_: Any) -> None:
        raise VerificationError("not proved")

    monkeypatch.setattr("planner.pipeline.verify", unproved)
    with pytest.raises(VerificationError, match="not proved"):
        plan(model, x)
    assert_same_state(model, before)


# Signals --------------------------------------------------------------------------------------------------------------


class Slow(Exception):
    """The step takes too long."""


RINGS = [False]


@torch.library.custom_op("planner_tests::may_ring", mutates_args=())
def may_ring(x: torch.Tensor) -> torch.Tensor:
    """A kernel during which a signal comes."""
    if RINGS[0]:
        signal.raise_signal(signal.SIGALRM)
    return x.clone()


may_ring.register_fake(torch.empty_like)
may_ring.register_autograd(lambda _, gradient: gradient)


class Rings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(may_ring(self.first(x).tanh()))


@pytest.mark.parametrize("partial", [False, True])
def test_what_a_handler_of_signals_raises_reaches_the_loop(partial: bool) -> None:
    """A limit of time for a step: the plain forward does not run in its place."""

    def handler(*_: Any) -> None:
        raise Slow

    model, x = Rings(), torch.randn(4, 8)
    chosen = plan(model, x, recompute=["*"])
    before = signal.signal(signal.SIGALRM, functools.partial(handler, 1) if partial else handler)
    RINGS[0] = True
    try:
        with pytest.raises(Slow):
            chosen.module(x)
    finally:
        RINGS[0] = False
        signal.signal(signal.SIGALRM, before)
    assert torch.equal(chosen.module(x), model(x))
