"""Training life: whatever a training loop does with a module, it may do with a planned one."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from passes._torch import allocator_events
from passes.run import step as runtime
from passes.run._torch import kernel_settings
from passes.run.step import ChangedInPlace
from planner import CaptureError, Plan, PlannerError, auto_checkpoint
from planner.integrations import plan_on_first_batch
from tests.planner.steps import (
    SmallGPT,
    Wrap,
    assert_same_gradients,
    assert_same_state,
    batch,
    conv_net,
    linear,
    mlp,
    plan,
    squares,
    tight,
    twins,
)
from tests.zoo.compare import measured_peak_bytes


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def planned_twins(model: nn.Module, x: Any, **options: Any) -> tuple[Plan, nn.Module, nn.Module]:
    """A plan that recomputes, its model, and the same model to be trained plainly."""
    model, plain = twins(model)
    chosen = tight(model, x, **options)
    assert chosen.recomputed
    return chosen, model, plain


# The loop -------------------------------------------------------------------------------------------------------


def train(
    module: nn.Module, owner: nn.Module, data: list[Any], make: Callable[..., Any], *, clip: bool = False
) -> list[float]:
    """Adam (or another) over `data`, seeded; the losses."""
    optimizer = make(owner.parameters())
    torch.manual_seed(11)
    losses = []
    for x in data:
        optimizer.zero_grad()
        output = module(x)
        loss = output if output.dim() == 0 else squares(output)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(owner.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (4, 16))


def images() -> torch.Tensor:
    return torch.randn(4, 3, 12, 12)


def steps_are_bitwise_equal(make: Callable[[], nn.Module], sample: Callable[[], Any], count: int) -> None:
    torch.manual_seed(0)
    chosen, model, plain = planned_twins(make(), sample())
    data = [sample() for _ in range(count)]
    with no_warning():
        planned_losses = train(chosen.module, model, data, adam, clip=True)
    rng = torch.get_rng_state()
    assert planned_losses == train(plain, plain, data, adam, clip=True)
    assert torch.equal(rng, torch.get_rng_state())
    assert_same_state(model, plain)


@pytest.mark.parametrize(("make", "sample"), [(SmallGPT, tokens), (conv_net, images)])
def test_20_adam_steps(make: Callable[[], nn.Module], sample: Callable[[], Any]) -> None:
    steps_are_bitwise_equal(make, sample, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "sample"), [(SmallGPT, tokens), (conv_net, images)])
def test_200_adam_steps(make: Callable[[], nn.Module], sample: Callable[[], Any]) -> None:
    steps_are_bitwise_equal(make, sample, 200)


def test_gradient_accumulation() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    data = [batch(16, 32) for _ in range(4)]
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        for x in data:
            (squares(module(x)) / len(data)).backward()
    assert_same_gradients(model, plain)


def test_zero_grad_that_keeps_the_buffers() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    x = batch(16, 32)
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        squares(module(x)).backward()
        held = [p.grad for p in module.parameters()]
        module.zero_grad(set_to_none=False)
        squares(module(x)).backward()
        assert all(p.grad is g for p, g in zip(module.parameters(), held, strict=True))
    assert_same_gradients(model, plain)


class Masked(nn.Conv2d):
    """PixelCNN's convolution, which masks its weight before it reads it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 3, 3, padding=1)
        self.register_buffer("mask", (torch.rand_like(self.weight) > 0.4).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


class Branches(nn.Module):
    """Asks for a value, so that it is planned by its parts."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) if float(x.detach().sum()) else x


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("by_regions", [False, True])
def test_a_weight_that_forward_masks_in_place(calls: int, by_regions: bool) -> None:
    torch.manual_seed(0)
    masked = Masked(3)  # called twice, the backward reads of both calls what the second one left
    twice = [m for _ in range(calls) for m in (masked, nn.GELU())]
    net = nn.Sequential(*twice, nn.Conv2d(3, 16, 1), nn.GELU(), nn.Conv2d(16, 3, 1), nn.GELU())
    chosen, model, plain = planned_twins(Branches(net) if by_regions else net, images())
    optimizers = adam(model.parameters()), adam(plain.parameters())
    for factor in (1.0, 1.0, 1.25, 1.0):
        x = images()
        for module, each, optimizer in zip((chosen.module, plain), (model, plain), optimizers, strict=True):
            next(m for m in each.modules() if isinstance(m, Masked)).mask.mul_(factor)
            optimizer.zero_grad()
            squares(module(x)).backward()
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(model, plain)


def test_clipping_where_one_value_is_the_gradient_of_several_parameters() -> None:
    """Their `.grad` must not share memory, or clipping would scale it twice, as two of the plain model's do."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
            self.c, self.layer = nn.Parameter(torch.randn(64)), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer((self.a + self.b + self.c.view(8, 8)).tanh() + x)

    model, plain = twins(Shares())
    x = batch(8)
    for each in (plan(model, x).module, plain):
        squares(each(x)).backward()
    assert_same_gradients(model, plain)
    places = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(places) == len(list(model.parameters()))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert torch.equal(model.b.grad, model.a.grad)


def test_gradients_that_share_no_memory_after_accumulation() -> None:
    model, plain = twins(Wrap(lambda self, x: self.a(x) + self.b(x), a=linear(), b=linear()))
    x = batch()
    for each in (plan(model, x).module, plain):
        for _ in range(3):
            squares(each(x)).backward()
    assert_same_gradients(model, plain)


def test_several_forwards_before_one_backward() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    data = [batch(16, 32) for _ in range(3)]
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        sum(squares(module(x)) for x in data).backward()  # type: ignore[union-attr]
    assert_same_gradients(model, plain)


def test_backwards_in_the_other_order() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    data = [batch(16, 32) for _ in range(3)]
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        losses = [squares(module(x)) for x in data]
        for loss in reversed(losses):
            loss.backward()
    assert_same_gradients(model, plain)


def test_two_planned_modules_in_one_loss() -> None:
    x = batch(16, 32)
    first, second = planned_twins(mlp(), x, share=0.95), planned_twins(mlp(), x, share=0.95)
    for a, b in ((first[0].module, second[0].module), (first[2], second[2])):
        torch.manual_seed(1)
        (squares(b(a(x))) + squares(a(x) * b(x))).backward()
    assert_same_gradients(first[1], first[2])
    assert_same_gradients(second[1], second[2])


def test_a_planned_module_as_a_layer_of_another() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    head, plain_head = twins(nn.Linear(32, 4))
    outer, plain_outer = nn.Sequential(chosen.module, head), nn.Sequential(plain, plain_head)
    data = [batch(16, 32) for _ in range(3)]
    assert train(outer, outer, data, adam) == train(plain_outer, plain_outer, data, adam)
    assert_same_state(model, plain)
    outer.eval()
    plain_outer.eval()
    assert not model.training
    assert torch.equal(outer(data[0]), plain_outer(data[0]))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rows", [16, 5])
def test_a_planned_module_inside_a_checkpoint(reentrant: bool, rows: int) -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32), share=0.95)
    x = batch(rows, 32).requires_grad_()
    got = []
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            squares(checkpoint(module, x, use_reentrant=reentrant)).backward()
        got.append(x.grad)
        x.grad = None
    assert torch.equal(*got)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("first", [False, True])
def test_a_model_planned_by_regions_inside_a_checkpoint(first: bool) -> None:
    """Regions make way, also where the call is the first; planning saves nothing that the checkpoint counts."""
    model, plain = twins(SmallGPT())
    tokens = torch.randint(0, 64, (2, 8))
    options: dict[str, Any] = {"regions": "blocks.*", "solver": "greedy", "progress": False}
    if first:
        plan_on_first_batch(model, **options)
    else:
        plan(model, tokens, **options).apply(model)
    for rows in (2, 1):
        for module in (model, plain):
            torch.manual_seed(1)
            said = pytest.warns(UserWarning, match="the plan makes way")
            with said if rows == 2 and module is model else nullcontext():
                checkpoint(module, tokens[:rows], use_reentrant=False).backward()
        assert_same_gradients(model, plain)


def test_the_last_smaller_batch_of_an_epoch() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    epoch = [batch(16, 32), batch(16, 32), batch(3, 32)]
    with pytest.warns(UserWarning, match="planning anew") as said:
        planned_losses = train(chosen.module, model, epoch * 2, adam)
    assert len([w for w in said if "planning anew" in str(w.message)]) == 1
    assert said[0].filename == __file__
    assert planned_losses == train(plain, plain, epoch * 2, adam)
    assert_same_state(model, plain)


def test_an_unexpected_start_of_backward_is_replayed_then_planned() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        return {"loss": squares(hidden), "hidden": hidden}

    body = nn.Sequential(mlp(0.3), nn.BatchNorm1d(32))
    chosen, model, plain = planned_twins(Wrap(forward, body=body), batch(16, 32), share=0.95)
    data = [batch(16, 32) for _ in range(3)]

    def run(module: nn.Module) -> None:
        torch.manual_seed(1)
        for x in data:
            module(x)["hidden"].sin().sum().backward()

    with pytest.warns(UserWarning, match=r"backward started from \['hidden'\].*replays the plain forward") as said:
        run(chosen.module)
    assert sum("backward started" in str(w.message) for w in said) == 1
    rng = torch.get_rng_state()
    run(plain)
    assert torch.equal(rng, torch.get_rng_state())
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


class Stateful(nn.Module):
    """Two outputs whose gradients depend on the old values of a counter and of a vector, and on what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(mlp(0.3), mlp(0.3))
        self.register_buffer("steps", torch.ones((), dtype=torch.long))
        self.register_buffer("average", torch.linspace(-1, 1, 32))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.body(x) + self.average * self.steps)
        with torch.no_grad():
            self.steps += 1
            self.average.mul_(0.5).add_(hidden.mean(0))
        return {"loss": squares(hidden), "hidden": hidden}


def test_a_first_loss_of_another_kind_is_forgotten() -> None:
    model = nn.Sequential(linear(), nn.GELU(), linear())
    plain, chosen, x = copy.deepcopy(model), plan(model, batch(), recompute=["*"]), batch()
    replays = []
    for i in range(12):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for run in (chosen.module, plain):
                run.zero_grad()
                output = run(x)
                (output.sum() if i == 0 else output.pow(2).mean()).backward()
        replays.append(any("in other strides" in str(w.message) for w in said))
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert replays[0] and not any(replays[4:])


@pytest.mark.parametrize("regions", ["auto", ["?"]])
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.backward(torch.randn(*y.shape[::-1]).t())])
def test_another_shape_is_planned_for_gradients_in_the_order_of_the_first(loss: Any, regions: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(2)))
    plain, chosen = copy.deepcopy(model), plan(model, batch(), regions=regions)
    for i, size in enumerate((4, 4, 4, 6, 6, 9)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for run in (chosen.module, plain):
                torch.manual_seed(i)
                run.zero_grad()
                if (value := loss(run(batch(size)))) is not None:
                    value.backward()
        texts = [str(w.message) for w in said]
        assert not i > 2 or not any("strides" in text for text in texts), texts
        assert_same_gradients(model, plain)


def test_a_replay_starts_from_the_old_values() -> None:
    chosen, model, plain = planned_twins(Stateful(), batch(16, 32))
    x = batch(16, 32)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="replays the plain forward"):
        chosen.module(x)["hidden"].sin().sum().backward()
    rng = torch.get_rng_state()
    torch.manual_seed(1)
    plain(x)["hidden"].sin().sum().backward()
    assert torch.equal(rng, torch.get_rng_state())
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


def test_a_replay_leaves_the_lists_of_weights_that_an_rnn_keeps() -> None:
    """With others in them the next call would be planned anew."""
    model, x = nn.LSTM(8, 16), torch.randn(5, 4, 8)
    chosen = auto_checkpoint(model, x, progress=False)
    weights, references = model._flat_weights, model._flat_weight_refs
    with pytest.warns(UserWarning, match="replays the plain forward"):
        chosen.module(x)[0].sum().backward()
    assert model._flat_weights is weights and model._flat_weight_refs is references
    assert all(r() is w for r, w in zip(references, weights, strict=True))


def hidden_of(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.body(x)["hidden"]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_replay_of_one_output_starts_from_the_old_values_too(autocast: bool) -> None:
    """In other strides than planned for, or under autocast."""
    chosen, model, plain = planned_twins(Wrap(hidden_of, body=Stateful()), batch(16, 32))
    gradient = batch(16, 32) if autocast else batch(32, 16).t()
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        hidden = module(batch(16, 32))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hidden.backward(gradient)
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


class Shifted(nn.Module):
    """A buffer that the forward overwrites, read by nothing but a sum that a batch norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.register_buffer("shift", torch.linspace(-1, 1, 8).unsqueeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.norm(self.first(x) + self.shift)
        self.shift.mul_(self.shift)
        return torch.tanh(result)


def test_a_buffer_that_only_a_batch_norm_sees_decides_what_a_replay_gives() -> None:
    model, plain = twins(Shifted())
    x, gradient = batch(8, 32), batch(16, 8).t()
    for module in (plan(model, x).module, plain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module(x).backward(gradient)
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


def test_a_loss_whose_old_values_were_not_kept_is_not_replayed() -> None:
    def loss(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)["loss"]

    model, plain = twins(Wrap(loss, body=Stateful()))
    x = batch(16, 32)
    planned = plan(model, x).module
    torch.manual_seed(1)
    found, told = planned(x), r"overwrote body.steps, whose old value was not kept. Call the model"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(runtime.ChangedInPlace, match=told):
        found.backward()
    torch.manual_seed(1)
    plain(x)
    for module in (planned, plain):  # now planned for it
        torch.manual_seed(1)
        found = module(x)
        with torch.autocast("cpu", torch.bfloat16):
            found.backward()
    assert_same_gradients(model, plain)


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "mode": (lambda m: m.eval(), "training=False, in the forward training=True"),
    "attribute": (lambda m: setattr(m.body[2], "p", 0.9), r"p=0.9, in the forward p=0.3"),
    "submodule": (lambda m: setattr(m, "body", nn.Identity()), "body.0.weight nothing, in the forward a parameter"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_replay_reads_must_be_as_in_the_forward(change: str) -> None:
    act, told = CHANGES[change]
    chosen, model, _ = planned_twins(Wrap(lambda self, x: self.body(x), body=mlp(0.3)), batch(16, 32))
    output = chosen.module(batch(16, 32))
    act(model)
    with pytest.raises(runtime.ChangedInPlace, match=f"between forward and backward: .*{told}"):
        output.backward(batch(*output.shape[::-1]).t())


def test_torchs_switches_must_be_as_in_the_forward_for_a_replay() -> None:
    chosen, *_ = planned_twins(Wrap(lambda self, x: self.body(x), body=mlp(0.3)), batch(16, 32))
    output = chosen.module(batch(16, 32))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(runtime.ChangedInPlace, match="torch's deterministic algorithms is True"):
            output.backward(batch(*output.shape[::-1]).t())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_replay_has_the_forwards_autocast() -> None:
    """Its type too, which outside of its block is another again."""
    model, plain = twins(Wrap(lambda self, x: self.body(x), body=mlp(0.3)))
    x, gradient = batch(16, 32), batch(32, 16).t().half()
    with torch.autocast("cpu", torch.float16):
        planned = plan(model, x).module
    for module in (planned, plain):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.float16):
            output = module(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output.backward(gradient)
    assert_same_gradients(model, plain)


def test_replays_of_several_forwards_with_statistics() -> None:
    """Each forward of a batch norm overwrites them; the plain backward does not read them."""
    body = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
    model, plain = twins(Wrap(lambda self, x: self.body(x), body=body))
    x, gradient = batch(16, 32), batch(32, 16).t()
    for module in (plan(model, x).module, plain):
        outputs = [module(x + i) for i in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for output in outputs:
                output.backward(gradient)
    assert_same_gradients(model, plain)
    assert_same_state(model, plain)


def kept_for_replay(chosen: Plan) -> list[int]:
    return [t.bytes for t in chosen.problem.tensors if t.name == "kept_for_replay"]


def test_what_a_replay_needs_is_counted_where_there_can_be_one() -> None:
    chosen, model, _ = planned_twins(Stateful(), batch(16, 32))
    assert kept_for_replay(chosen) == [4 * 32]  # `average`; counter and generator are kept as no tensor
    measured = measured_peak_bytes(chosen.module, model, batch(16, 32), chosen.static_bytes)
    assert measured == chosen.peak_bytes

    def loss(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)["loss"]

    assert kept_for_replay(tight(Wrap(loss, body=Stateful()), batch(16, 32))) == []


def test_inputs_get_their_gradients() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32).requires_grad_())
    leaf = batch(16, 32).requires_grad_()
    found = []
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        squares(module(leaf)).backward()
        squares(module(leaf * 2)).backward()
        found.append(leaf.grad)
        leaf.grad = None
    assert torch.equal(*found)
    assert_same_gradients(model, plain)


def test_an_input_that_requires_grad_later_is_noticed() -> None:
    chosen, _, plain = planned_twins(mlp(0.0), batch(64, 32), share=0.9)
    x = batch(64, 32).requires_grad_()
    with pytest.warns(UserWarning, match=r"got \(64, 32\) float32 on cpu, requires_grad, the plan expects"):
        (planned_grad,) = torch.autograd.grad(squares(chosen.module(x)), x)
    assert torch.equal(planned_grad, torch.autograd.grad(squares(plain(x)), x)[0])


def test_a_loss_function_with_its_target() -> None:
    x, y = batch(16, 32), torch.randint(0, 32, (16,))
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    chosen, model, plain = planned_twins(mlp(), (x, y), loss_fn=loss_fn)
    torch.manual_seed(1)
    loss = chosen.module(x, y)
    loss.backward()
    torch.manual_seed(1)
    expected = loss_fn(plain(x), y)
    expected.backward()
    assert loss.dim() == 0 and torch.equal(loss, expected)
    assert_same_gradients(model, plain)
    chosen.module.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(chosen.module(x, y), loss_fn(plain(x), y))


def test_a_loss_function_of_the_output_alone() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32), loss_fn=squares)
    x = batch(16, 32)
    torch.manual_seed(1)
    chosen.module(x).backward()
    torch.manual_seed(1)
    squares(plain(x)).backward()
    assert_same_gradients(model, plain)


def test_the_random_stream_has_a_witness_without_a_twin() -> None:
    """For `loss = sum(dropout(x) * exp(a))`, d loss / d a = dropout(x) * exp(a): it sums to the loss."""

    class Witness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(64, 64))
            self.tail = nn.Sequential(*(nn.Dropout(0.5) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.tail(F.dropout(x, 0.5) + 1) * self.a.exp()).sum()

    model, x = Witness().double(), torch.randn(64, 64).double()
    chosen = tight(model, x, 0.5)
    for _ in range(3):
        model.zero_grad()
        loss = chosen.module(x)
        loss.backward()
        torch.testing.assert_close(model.a.grad.sum(), loss.detach(), rtol=1e-12, atol=0)


# The module as an object ----------------------------------------------------------------------------------------


def test_it_is_a_drop_in_graph_module() -> None:
    model = SmallGPT()
    chosen = tight(model, tokens())
    assert isinstance(chosen.module, fx.GraphModule)
    assert list(chosen.module.state_dict()) == list(model.state_dict())
    assert [n for n, _ in chosen.module.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(chosen.module.parameters(), model.parameters(), strict=True))
    assert dict(chosen.module.named_modules()).keys() == dict(model.named_modules()).keys()
    assert chosen.module.head is model.head
    assert chosen.module.training


@pytest.mark.parametrize("before", [False, True])
def test_optimizers_made_before_and_after(before: bool) -> None:
    model, plain = twins(mlp())
    x = batch(16, 32)
    optimizer = adam(model.parameters()) if before else None
    chosen = tight(model, x)
    optimizer = optimizer or adam(chosen.module.parameters())
    plain_optimizer = adam(plain.parameters())
    for module, each in ((chosen.module, optimizer), (plain, plain_optimizer)):
        torch.manual_seed(1)
        for _ in range(3):
            each.zero_grad()
            squares(module(x)).backward()
            each.step()
    assert_same_state(model, plain)


def test_deepcopy_is_independent_and_trains_the_same() -> None:
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    other = copy.deepcopy(chosen.module)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    data = [batch(16, 32) for _ in range(3)]
    expected = train(plain, plain, data, adam)
    with no_warning():
        assert train(other, other, data, adam) == expected
        assert all(p.grad is None for p in model.parameters())
        assert train(chosen.module, model, data, adam) == expected
    assert_same_state(model, other)


def test_a_deepcopy_plans_for_its_own_model() -> None:
    chosen, _, _ = planned_twins(nn.Sequential(mlp(0.0), nn.Linear(32, 32)), batch(64, 32))
    other = copy.deepcopy(chosen.module)
    head = other.get_submodule("1")
    head.requires_grad_(False)
    reference = copy.deepcopy(other._plan_model)
    x = batch(64, 32)
    with pytest.warns(UserWarning, match="planning anew: argument '1.weight'"):
        squares(other(x)).backward()
    squares(reference(x)).backward()
    assert_same_gradients(other, reference)
    assert head.weight.grad is None


@pytest.mark.parametrize("changed", ["float32 precision of matrix products", "oneDNN"])
def test_what_is_computed_again_needs_the_forwards_switches(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without recompute follows the plain step, which reads them where it runs."""
    model, x = mlp(dropout=0.0), batch(256, 32)
    settings = iter([{changed: True}, {changed: False}, {changed: True}, {changed: False}])
    kept, again = plan(model, x, check=False), tight(model, x, check=False)
    monkeypatch.setattr(runtime, "kernel_settings", lambda: next(settings))
    kept.module(x).pow(2).sum().backward()
    model.zero_grad()
    with pytest.raises(runtime.ChangedInPlace, match=f"torch's {changed} is False, in the forward True: .* one sett"):
        again.module(x).pow(2).sum().backward()


def test_kernel_settings_are_those_of_torch() -> None:
    before = kernel_settings()
    assert before == kernel_settings()
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_settings() != before
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_shallow_copy_shares_the_model() -> None:
    chosen, model, _ = planned_twins(mlp(), batch(16, 32))
    other = copy.copy(chosen.module)
    squares(other(batch(16, 32))).backward()
    assert model[0].weight.grad is not None


def test_a_plan_is_not_pickled_and_its_module_not_traced() -> None:
    model, x = linear(), batch()
    chosen = plan(model, x)
    with pytest.raises(PlannerError, match=r"a plan is not pickled: .* plan.save\(path\) writes it"):
        pickle.dumps(chosen)
    with pytest.raises(PlannerError, match=r"torch.jit.trace cannot look into a planned step"):
        torch.jit.trace(chosen.module, x)
    with pytest.raises(PlannerError, match=r"torch.jit.script cannot look into a planned step"):
        torch.jit.script(chosen.module)
    with pytest.raises(PlannerError, match=r"torch.export cannot look into a planned step: give it the original"):
        torch.export.export(nn.Sequential(chosen.module, nn.ReLU()), (x,))
    chosen.apply(model)
    for look in (lambda: torch.export.export(model, (x,)), lambda: torch.jit.script(model)):
        with pytest.raises(PlannerError, match=r"cannot look into a planned step. Call plan.remove\(model\)"):
            look()
    assert not hasattr(model.forward, "__code__")


@pytest.mark.parametrize("dump", [pickle.dumps, lambda m: torch.save(m, "/dev/null")])
def test_pickling_is_refused_with_what_to_do(dump: Callable[[Any], Any]) -> None:
    chosen = plan(linear(), batch())
    with pytest.raises(PlannerError, match=r"not pickled: it holds generated code. Save the weights \(state_dict\)"):
        dump(chosen.module)


def test_state_dicts_go_both_ways() -> None:
    chosen, model, plain = planned_twins(SmallGPT(), tokens())
    plain.load_state_dict(chosen.module.state_dict())
    chosen.module.load_state_dict(plain.state_dict())
    assert_same_state(model, plain)
    torch.manual_seed(2)
    x = tokens()
    fresh = SmallGPT()
    chosen.module.load_state_dict(fresh.state_dict())
    for module in (chosen.module, fresh):
        torch.manual_seed(1)
        module(x).backward()
    assert_same_gradients(model, fresh)


# Hooks ----------------------------------------------------------------------------------------------------------


def test_parameter_hooks_fire_once_a_backward() -> None:
    chosen, model, plain = planned_twins(SmallGPT(), tokens())
    fired: dict[int, list[str]] = {}
    for each in (model, plain):
        log = fired.setdefault(id(each), [])
        for name, parameter in each.named_parameters():
            parameter.register_hook(lambda g, name=name, log=log: log.append(name))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name, log=log: log.append(f"post {name}"))
    x = tokens()
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        module(x).backward()
    assert sorted(fired[id(model)]) == sorted(fired[id(plain)])
    assert len(fired[id(model)]) == len(set(fired[id(model)])) == 2 * len(list(model.parameters()))


def test_a_hook_that_changes_the_gradient() -> None:
    chosen, model, plain = planned_twins(mlp(0.0), batch(64, 32))
    for each in (model, plain):
        each[0].weight.register_hook(lambda g: g * 2)
    x = batch(64, 32)
    for module in (chosen.module, plain):
        squares(module(x)).backward()
    assert_same_gradients(model, plain)


def test_an_optimizer_step_inside_the_backward() -> None:
    """A hook that updates each parameter as its gradient arrives, and drops the gradient."""
    chosen, model, plain = planned_twins(mlp(), batch(16, 32))
    for each in (model, plain):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in each.parameters()}

        def update(p: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    data = [batch(16, 32) for _ in range(3)]
    for module in (chosen.module, plain):
        torch.manual_seed(1)
        for x in data:
            squares(module(x)).backward()
    assert_same_state(model, plain)


def test_hooks_on_the_planned_module_itself() -> None:
    chosen = plan(linear(), batch())
    seen = []
    chosen.module.register_forward_hook(lambda m, a, out: seen.append(out))
    output = chosen.module(batch())
    assert seen == [output] or seen[0] is output


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("on_the_model", [True, False])
def test_backward_hooks_of_the_model_itself(kind: str, on_the_model: bool) -> None:
    model = nn.Sequential(linear(), nn.GELU(), linear())
    plain = copy.deepcopy(model)
    chosen, x = plan(model, batch(), recompute=["*"]), batch()
    holders = [plain, model if on_the_model else chosen.module]
    handles = [getattr(h, f"register_{kind}")(lambda _, *gradients: (gradients[0][0] * 2,)) for h in holders]
    for removed in (False, True):
        for handle in handles if removed else ():
            handle.remove()
        for run, owner in ((plain, plain), (chosen.module, model)):
            owner.zero_grad()
            run(x.detach().requires_grad_()).sin().sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


# Memory ---------------------------------------------------------------------------------------------------------


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Weak references to every tensor that ops of the block return, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(t) for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result

    @property
    def alive(self) -> int:
        return sum(r() is not None for r in self.made)


def saved_of(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to what planned forwards hand to their backwards, from now on."""
    references: list[weakref.ref[torch.Tensor]] = []
    apply = runtime._Run.forward

    def forward(run: Any) -> Any:
        outputs = apply(run)
        references.extend(weakref.ref(t) for t in run.saved)
        return outputs

    monkeypatch.setattr(runtime._Run, "forward", forward)
    return references


def test_saved_activations_die_during_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, model, _ = planned_twins(mlp(), batch(16, 32))
    references = saved_of(monkeypatch)
    alive: list[int] = []
    loss = squares(chosen.module(batch(16, 32)))
    assert references and all(r() is not None for r in references)
    gc.disable()
    try:
        for op in _spy_on_backward(chosen, monkeypatch):
            op.append(lambda: alive.append(sum(r() is not None for r in references)))
        loss.backward()
        assert alive == sorted(alive, reverse=True)
        assert alive[0] > alive[-1]
        assert all(r() is None for r in references)
    finally:
        gc.enable()
    assert model[0].weight.grad is not None


def _spy_on_backward(chosen: Plan, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """Lists of functions to be called as the backward runs each of its ops."""
    calls: list[Callable[[], None]] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            result = func(*args, **(kwargs or {}))
            del args
            for call in calls:
                call()
            return result

    graph = chosen.module.backward_graph
    original = graph.forward

    def forward(values: list[torch.Tensor]) -> Any:
        program = original(values)
        while True:
            with Spy():
                handed = next(program, None)
            if handed is None:
                return
            yield handed

    monkeypatch.setattr(graph, "forward", forward)
    yield calls


def test_saved_activations_die_with_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, _, _ = planned_twins(mlp(), batch(16, 32))
    references = saved_of(monkeypatch)
    gc.disable()
    try:
        output = chosen.module(batch(16, 32))
        assert any(r() is not None for r in references)
        del output
        assert all(r() is None for r in references)
    finally:
        gc.enable()


def test_the_input_dies_with_the_output() -> None:
    chosen, _, _ = planned_twins(mlp(), batch(16, 32))
    gc.disable()
    try:
        x = batch(16, 32)
        watched = weakref.ref(x)
        output = chosen.module(x)
        squares(output).backward()
        del x, output
        assert watched() is None
    finally:
        gc.enable()


def test_memory_returns_to_where_it_was() -> None:
    chosen, model, _ = planned_twins(mlp(), batch(64, 32))
    x = batch(64, 32)

    def step() -> None:
        squares(chosen.module(x)).backward()
        model.zero_grad()

    def dropped() -> None:
        chosen.module(x)

    step()
    for run in (step, dropped):
        assert sum(allocator_events(run)) == 0


# No residue -----------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    modules = list(model.modules())
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(), torch.compiler.is_compiling(), torch.compiler.is_exporting(),
        [m.training for m in modules],
        [[(k, id(v), len(v) if isinstance(v, (dict, list, set)) else None) for k, v in m.__dict__.items()]
         for m in modules],
        [[(k, id(v)) for d in (m._parameters, m._buffers, m._modules) for k, v in d.items()] for m in modules],
        [(n, id(p), p._version, p.grad, p.requires_grad) for n, p in model.named_parameters()],
        [(n, id(b), b._version) for n, b in model.named_buffers()],
        len(torch.nn.modules.module._global_forward_hooks), len(torch.nn.modules.module._global_forward_pre_hooks),
        torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
    )  # fmt: skip


class Fails(nn.Module):
    """Does all that leaves traces, then reads a value."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.body, self.norm, self.fails = mlp(), nn.BatchNorm1d(32), fails
        self.history: list[torch.Tensor] = []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        self.history.append(x)
        self.late = nn.Linear(32, 32)
        y = self.norm(self.body(x))
        return y * y.sum().item() if self.fails else y


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore:forward sets self")
def test_planning_leaves_no_residue(fails: bool, mode: str) -> None:
    model, x = Fails(fails), batch(16, 32)
    model.train(mode != "eval")
    model.norm.train(mode == "train")
    values = copy.deepcopy(model.state_dict())
    before, rng = snapshot(model), torch.get_rng_state()
    if fails:
        with pytest.raises(CaptureError):
            plan(model, x, regions="whole")
        assert snapshot(model) == before
    tight(model, x)
    assert snapshot(model) == before
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


def test_planning_draws_nothing_from_the_generator() -> None:
    model, x = mlp(), batch(16, 32)
    before = torch.get_rng_state()
    tight(model, x)
    assert torch.equal(before, torch.get_rng_state())


def test_planning_under_no_grad_leaves_it_off() -> None:
    model, x = mlp(), batch(16, 32)
    with torch.no_grad():
        chosen = plan(model, x)
        assert not torch.is_grad_enabled()
    squares(chosen.module(x)).backward()
    assert model[0].weight.grad is not None


def test_an_interrupt_leaves_no_residue(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Fails):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model, x = Interrupted(False), batch(16, 32)
    before, rng = snapshot(model), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        plan(model, x)
    assert snapshot(model) == before
    assert torch.equal(rng, torch.get_rng_state())


STAGES = ("capture", "alias", "resolve", "profile", "lower", "solve_step", "rewrite", "verify")


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_in_any_stage_leaves_no_residue(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner import fit, pipeline, prepared, session, sizes

    model, x = mlp(), batch(16, 32)
    budget = tight(model, x).budget_bytes
    assert budget is not None
    places = [m for m in (session, prepared, sizes, fit, pipeline) if hasattr(m, stage)]
    original = getattr(places[0], stage)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise KeyboardInterrupt

    for place in places:
        monkeypatch.setattr(place, stage, interrupted)
    before, rng = snapshot(model), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        plan(model, x, budget / (1 << 20))
    assert snapshot(model) == before
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:planned step not used", "ignore:backward started from")
def test_a_plain_batch_norm_waits_for_its_backward_while_planned_steps_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    plain, x, other = copy.deepcopy(model), torch.randn(6, 4), torch.randn(5, 4)
    plan = auto_checkpoint(model, x, progress=False, on_new_shape="eager")
    for module in (plain, plan.module):
        for _ in range(2):
            (module(other).sum() + module(x).sum()).backward()
    assert_same_gradients(plain, model)
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


def test_a_plan_makes_way_where_changes_of_saved_tensors_are_allowed() -> None:
    model, x = mlp(), batch(16, 32)
    plain, chosen = copy.deepcopy(model), plan(model, x)
    for module in (plain, chosen.module):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            torch.manual_seed(0)
            said = nullcontext() if module is plain else pytest.warns(UserWarning, match="the plan makes way")
            with said:
                loss = squares(module(x))
            loss.backward()
    assert_same_gradients(plain, model)


@pytest.mark.filterwarnings("ignore")
def test_a_backward_that_cannot_be_replayed_is_planned_for() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    module = auto_checkpoint(model, torch.randn(6, 8), budget_mb=8, progress=False).module
    failed = []
    for _ in range(4):
        output = module(torch.randn(6, 8))
        with torch.no_grad():
            model[2].bias.mul_(0.9)  # no gradient needs it, but a forward that runs again does
        try:
            output.sum().backward()  # in other strides than planned for
            failed.append(False)
        except ChangedInPlace:
            failed.append(True)
    assert failed == [True, False, False, False]


@pytest.mark.filterwarnings("ignore")
def test_a_replay_within_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    plain, x = copy.deepcopy(model), torch.randn(6, 8)
    losses = auto_checkpoint(model, x, budget_mb=8, progress=False).module(x).sum(), plain(x).sum()
    with torch.inference_mode():
        for loss in losses:
            loss.backward()
    assert_same_gradients(model, plain)
