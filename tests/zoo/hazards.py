"""Small models, each with one thing that breaks planners; `HAZARDS[name]()` returns `(model, sample)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Entry = Callable[[], tuple[nn.Module, Any]]
HAZARDS: dict[str, Entry] = {}


def hazard(make: Entry) -> Entry:
    """Register a zoo entry under its function's name."""
    HAZARDS[make.__name__] = make
    return make


class Wrap(nn.Module):
    """A module whose forward is a function of itself and its inputs, over named children."""

    def __init__(self, forward: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(self, *args)


@hazard
def dropout_everywhere() -> tuple[nn.Module, Any]:
    layers = (nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.15), nn.Linear(64, 64), nn.ReLU(inplace=True),
              nn.Dropout(0.3), nn.Linear(64, 8))  # fmt: skip
    return nn.Sequential(*layers), torch.randn(16, 32)


class Siamese(nn.Module):
    """SimSiam: one encoder, its batch norms called once for each view, and a predictor (Chen and He 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2), nn.BatchNorm2d(width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 16), nn.BatchNorm1d(16, affine=False),
        )  # fmt: skip
        self.predictor = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, *images: torch.Tensor) -> torch.Tensor:
        found = [self.encoder(image) for image in images]
        pairs = [(self.predictor(a), b.detach()) for a in found for b in found if a is not b]
        return -sum(F.cosine_similarity(p, z).mean() for p, z in pairs) / len(pairs)


@hazard
def siamese() -> tuple[nn.Module, Any]:
    return Siamese(8), (torch.randn(4, 3, 12, 12), torch.randn(4, 3, 12, 12))


@hazard
def siamese_of_three() -> tuple[nn.Module, Any]:
    return Siamese(8), tuple(torch.randn(4, 3, 12, 12) for _ in range(3))


@hazard
def siamese_in_blocks() -> tuple[nn.Module, Any]:
    """Large enough for batch norms to be split."""
    return Siamese(8), tuple(torch.randn(4, 3, 96, 96) for _ in range(2))


@hazard
def shared_norm_of_three() -> tuple[nn.Module, Any]:
    """One norm in a row: each call is handed what the one before made of its statistics."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.a, self.b, self.c):
            x = x + self.norm(conv(x)).relu()
        return x.square().mean()

    convs = {name: nn.Conv2d(4, 4, 3, padding=1) for name in "abc"}
    return Wrap(forward, norm=nn.BatchNorm2d(4), **convs), torch.randn(4, 4, 132, 132)


@hazard
def batch_norm() -> tuple[nn.Module, Any]:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
              nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))  # fmt: skip
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


@hazard
def instance_and_group_norm() -> tuple[nn.Module, Any]:
    layers = (nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.SiLU(),
              nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3, stride=2))  # fmt: skip
    return nn.Sequential(*layers), torch.randn(2, 3, 16, 16)


@hazard
def depthwise_and_dilated() -> tuple[nn.Module, Any]:
    layers = (nn.Conv2d(4, 8, 3, groups=4), nn.Hardswish(), nn.Conv2d(8, 8, 3, dilation=2), nn.ELU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers), torch.randn(2, 4, 16, 16)


@hazard
def u_net_3d() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        top = self.down(x).relu()
        low = self.low(F.max_pool3d(top, 2)).relu()
        return self.out(torch.cat([top, F.interpolate(low, scale_factor=2, mode="trilinear")], 1))

    return Wrap(forward, down=nn.Conv3d(1, 4, 3, padding=1), low=nn.Conv3d(4, 4, 3, padding=1),
                out=nn.Conv3d(8, 1, 3, padding=1)), torch.randn(1, 1, 8, 8, 8)  # fmt: skip


@hazard
def tied_weights() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.body(self.embedding(x)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())

    model = Wrap(
        forward, embedding=nn.Embedding(50, 16), body=nn.Linear(16, 16), head=nn.Linear(16, 50, bias=False)
    )
    model.head.weight = model.embedding.weight
    return model, torch.randint(0, 50, (4, 8))


@hazard
def frozen_prefix_and_unused() -> tuple[nn.Module, Any]:
    model = Wrap(lambda self, x: self.b(torch.tanh(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8),
                 unused=nn.Linear(8, 8))  # fmt: skip
    model.a.requires_grad_(False)
    return model, torch.randn(4, 8)


@hazard
def lora() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(F.dropout(x, 0.1, self.training)))

    narrow = {"down": nn.Linear(16, 2, bias=False), "up": nn.Linear(2, 16, bias=False)}
    model = Wrap(forward, base=nn.Linear(16, 16), **narrow)
    model.base.requires_grad_(False)
    return model, torch.randn(4, 16)


@hazard
def attention_modules() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.attention(y, y, y)[0]

    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return Wrap(forward, layer=layer, attention=nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)), (
        torch.randn(2, 6, 16),
    )


@hazard
def encoder_decoder() -> tuple[nn.Module, Any]:
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
    return Wrap(lambda self, a, b: self.inner(a, b), inner=model), (torch.randn(2, 5, 16), torch.randn(2, 4, 16))


@hazard
def attention_with_dropout() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)

    return Wrap(forward, qkv=nn.Linear(16, 48)), torch.randn(2, 6, 16)


@hazard
def gru_bidirectional() -> tuple[nn.Module, Any]:
    gru = nn.GRU(8, 8, 2, dropout=0.2, bidirectional=True)
    return Wrap(lambda self, x: self.head(self.gru(x)[0]), gru=gru, head=nn.Linear(16, 4)), torch.randn(6, 3, 8)


@hazard
def state_space_scan() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, state, outputs = torch.sigmoid(self.gate(x)), x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            state = gate[:, t] * state + (1 - gate[:, t]) * x[:, t]
            outputs.append(state)
        return self.out(torch.stack(outputs, 1))

    return Wrap(forward, gate=nn.Linear(8, 8), out=nn.Linear(8, 8)), torch.randn(2, 6, 8)


@hazard
def mixture_of_experts() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        experts = torch.stack([self.first(x), self.second(x), self.third(x)], -1)
        picked = experts.gather(-1, chosen.unsqueeze(-2).expand(-1, 8, -1))
        return (picked * weights.unsqueeze(-2)).sum(-1)

    names = ("first", "second", "third")
    return Wrap(forward, router=nn.Linear(8, 3), **{n: nn.Linear(8, 8) for n in names}), torch.randn(6, 8)


@hazard
def same_module_twice() -> tuple[nn.Module, Any]:
    model = Wrap(lambda self, x: self.linear(self.drop(torch.relu(self.linear(self.drop(x))))),
                 linear=nn.Linear(8, 8), drop=nn.Dropout(0.5))  # fmt: skip
    return model, torch.randn(4, 8)


class StraightThrough(torch.autograd.Function):
    """Rounds forward; its backward is not what autograd would derive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@hazard
def custom_function() -> tuple[nn.Module, Any]:
    return Wrap(lambda self, x: StraightThrough.apply(self.linear(x)).tanh(), linear=nn.Linear(8, 8)), torch.randn(4, 8)


class MovingAverage(nn.Module):
    """Mutates one buffer in place, replaces another, counts in a third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("other", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.steps += 1
        self.other = self.other * 0.5 + y.detach().mean(0)
        return (y - self.average) * self.other


@hazard
def mutated_buffers() -> tuple[nn.Module, Any]:
    return MovingAverage(), torch.randn(4, 8)


@hazard
def parametrizations() -> tuple[nn.Module, Any]:
    from torch.nn.utils import parametrizations as p

    return nn.Sequential(p.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), p.weight_norm(nn.Linear(8, 4))), torch.randn(4, 8)


@hazard
def nested_outputs() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> Any:
        hidden = self.linear(x).relu()
        return {"a": self.head(hidden), "b": (hidden, None, 3), "x": x}

    return Wrap(forward, linear=nn.Linear(8, 8), head=nn.Linear(8, 3)), torch.randn(4, 8)


@hazard
def views_as_outputs() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> Any:
        a, b, c = self.linear(x).chunk(3, -1)
        return a, b, c, a

    return Wrap(forward, linear=nn.Linear(8, 12)), torch.randn(4, 8)


@hazard
def in_place_ops() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y += 1
        z = x.new_zeros(4, 8)
        z[:, :4] = y[:, :4]
        z.mul_(2)
        return z + y.relu_()

    return Wrap(forward, linear=nn.Linear(8, 8)), torch.randn(4, 8)


@hazard
def stochastic_depth() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c):
            x = x + x.new_empty(x.shape[0], 1).bernoulli_(0.8) * layer(x).relu() / 0.8
        return x

    return Wrap(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)), torch.randn(4, 8)


@hazard
def checks_of_values() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c):
            x = F.dropout(layer(x).relu(), 0.2)
            if not torch.isfinite(x).all():
                x = torch.nan_to_num(x)
        return torch.distributions.Normal(x.mean(0), x.exp().mean(0), validate_args=True).entropy().mean()

    return Wrap(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)), torch.randn(4, 8)


@hazard
def several_losses() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> Any:
        hidden = self.linear(x).tanh()
        return hidden.pow(2).mean(), self.head(hidden).abs().mean()

    return Wrap(forward, linear=nn.Linear(8, 8), head=nn.Linear(8, 3)), torch.randn(4, 8)


@hazard
def bfloat16() -> tuple[nn.Module, Any]:
    layers = (nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 8))
    return nn.Sequential(*layers).bfloat16(), torch.randn(16, 32).bfloat16()


@hazard
def float64() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)).double(), (
        torch.randn(16, 32).double()
    )


@hazard
def autocast_inside() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x).relu()
        return self.head(y.float())

    return Wrap(forward, linear=nn.Linear(16, 16), head=nn.Linear(16, 4)), torch.randn(4, 16)


@hazard
def channels_last() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    layout = torch.channels_last
    return model.to(memory_format=layout), torch.randn(2, 3, 16, 16).to(memory_format=layout)  # type: ignore[call-overload]


@hazard
def upsampling() -> tuple[nn.Module, Any]:
    layers = (nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 4, 3),
              nn.Upsample(scale_factor=2), nn.PixelShuffle(2))  # fmt: skip
    return nn.Sequential(*layers), torch.randn(2, 3, 9, 9)


@hazard
def embedding_bag() -> tuple[nn.Module, Any]:
    return Wrap(lambda self, x: self.head(self.bag(x)), bag=nn.EmbeddingBag(100, 16), head=nn.Linear(16, 4)), (
        torch.randint(0, 100, (8, 5))
    )


@hazard
def largest_in_bags() -> tuple[nn.Module, Any]:
    bag = nn.EmbeddingBag(100, 64, mode="max")
    return Wrap(lambda self, x: self.head(self.bag(x)), bag=bag, head=nn.Linear(64, 4)), torch.randint(0, 100, (64, 2))


@hazard
def checkpoint_inside() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return checkpoint(lambda t: self.drop(self.linear(t)).tanh(), x, use_reentrant=False)

    return Wrap(forward, linear=nn.Linear(8, 8), drop=nn.Dropout(0.5)), torch.randn(4, 8)


@hazard
def expanded_gradients() -> tuple[nn.Module, Any]:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w + self.v).sum() + self.w.sum() * x.sum()

    return Sums(), torch.randn(4, 8)


@hazard
def custom_op() -> tuple[nn.Module, Any]:
    _register_custom_op()
    return Wrap(lambda self, x: torch.ops.planner_zoo.cube(self.linear(x)), linear=nn.Linear(8, 8)), torch.randn(4, 8)


def _register_custom_op() -> None:
    if hasattr(torch.ops.planner_zoo, "cube"):
        return

    @torch.library.custom_op("planner_zoo::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    cube.register_fake(torch.empty_like)
    cube.register_autograd(
        lambda ctx, gradient: gradient * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )


@hazard
def conjugates() -> tuple[nn.Module, Any]:
    """What is returned is the negated half of a conjugate, which nobody has written out."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        y = self.first(x)
        return self.second(y * y + x).conj().imag

    first, second = (nn.Linear(8, 8, dtype=torch.complex64) for _ in range(2))
    return Wrap(forward, first=first, second=second), torch.randn(4, 8, dtype=torch.complex64).conj()
