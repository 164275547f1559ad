"""More small models, each built around one kind of layer; `LAYERS[name]()` returns `(model, sample)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.hazards import Entry, Wrap

LAYERS: dict[str, Entry] = {}


def layer(make: Entry) -> Entry:
    """Register a zoo entry under its function's name."""
    LAYERS[make.__name__] = make
    return make


@layer
def gru_of_odd_width() -> tuple[nn.Module, Any]:
    """Gates that are changed in place where they lie in a wider buffer: their layout decides last bits."""
    return Wrap(lambda self, x: self.gru(self.linear(x))[0], linear=nn.Linear(6, 6), gru=nn.GRU(6, 5)), (
        torch.randn(3, 12, 6)
    )


@layer
def recurrent_cells() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], 5)
        g = h
        for step in x:
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
        return g

    return Wrap(forward, lstm=nn.LSTMCell(6, 5), gru=nn.GRUCell(5, 5)), torch.randn(2, 3, 6)


@layer
def projected_lstm() -> tuple[nn.Module, Any]:
    return Wrap(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(6, 5, proj_size=3)), torch.randn(4, 3, 6)


@layer
def attention_by_hand() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        mask = x.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = self.drop(scores.masked_fill(~mask, float("-inf")).softmax(-1))
        return self.out(weights @ v)

    return Wrap(forward, qkv=nn.Linear(16, 48), drop=nn.Dropout(0.1), out=nn.Linear(16, 16)), torch.randn(2, 6, 16)


@layer
def u_net_2d() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.first(x))
        second = F.relu(self.second(F.max_pool2d(first, 2)))
        low = F.relu(self.low(F.max_pool2d(second, 2)))
        up = F.relu(self.join(torch.cat([second, self.up_low(low)], 1)))
        return self.out(torch.cat([first, self.up(up)], 1))

    convolutions = {"first": (2, 4), "second": (4, 8), "low": (8, 8), "join": (16, 4), "out": (8, 1)}
    ups = {"up_low": nn.ConvTranspose2d(8, 8, 2, stride=2), "up": nn.ConvTranspose2d(4, 4, 2, stride=2)}
    return Wrap(forward, **{n: nn.Conv2d(*c, 3, padding=1) for n, c in convolutions.items()}, **ups), (
        torch.randn(2, 2, 16, 16)
    )


@layer
def dense_concatenations() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            features.append(convolution(F.relu(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1).mean((2, 3))

    channels = [4 * (i + 1) for i in range(4)]
    norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels)
    convolutions = nn.ModuleList(nn.Conv2d(c, 4, 3, padding=1) for c in channels)
    return Wrap(forward, norms=norms, convolutions=convolutions), torch.randn(2, 4, 8, 8)


@layer
def embedding_heavy() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = [table(x[:, i]) for i, table in enumerate(self.tables)]
        return F.binary_cross_entropy_with_logits(self.head(torch.cat([*found, self.bag(x)], -1)).squeeze(-1), y)

    tables = nn.ModuleList(nn.Embedding(rows, 8, padding_idx=0) for rows in (500, 300, 20))
    model = Wrap(forward, tables=tables, bag=nn.EmbeddingBag(40, 8, mode="mean"), head=nn.Linear(32, 1))
    return model, (torch.randint(0, 20, (16, 3)), torch.rand(16))


@layer
def spectral_convolution() -> tuple[nn.Module, Any]:
    """Complex weights between two Fourier transforms."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.cfloat))
            self.mix = nn.Conv1d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.einsum("bik,iok->bok", torch.fft.rfft(self.mix(x)), self.weight), n=8)

    return Spectral(), torch.randn(2, 3, 8)


@layer
def buffers_change_places() -> tuple[nn.Module, Any]:
    class Swap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("now", torch.ones(4))
            self.register_buffer("before", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) * (self.now + 1)
            self.now, self.before = self.before, self.now
            return y

    return Swap(), torch.randn(3, 4)


@layer
def variational_autoencoder() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean, log_scale = self.encode(x).chunk(2, -1)
        latent = torch.distributions.Normal(mean, log_scale.exp(), validate_args=False).rsample()
        return F.mse_loss(self.decode(latent), x) + (mean.pow(2) + log_scale.exp() - log_scale).mean()

    return Wrap(forward, encode=nn.Linear(6, 8), decode=nn.Linear(4, 6)), torch.randn(4, 6)


@layer
def random_choices() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.noisy(F.gumbel_softmax(self.linear(x), tau=0.7, hard=True) * self.linear(x))

    noisy = nn.Sequential(nn.RReLU(), nn.AlphaDropout(0.2), nn.Linear(6, 6), nn.FeatureAlphaDropout(0.2))
    return Wrap(forward, linear=nn.Linear(6, 6), noisy=noisy), torch.randn(4, 6)


@layer
def channel_dropout() -> tuple[nn.Module, Any]:
    layers = (nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.GLU(1), nn.Conv2d(4, 4, 3), nn.Dropout2d(0.5, inplace=True))
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


@layer
def frozen_batch_norm() -> tuple[nn.Module, Any]:
    """Its statistics are used, not updated, though the model trains."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x)).tanh()

    return Frozen(), torch.randn(6, 4)


@layer
def orthogonal_weight() -> tuple[nn.Module, Any]:
    orthogonal = nn.utils.parametrizations.orthogonal
    return nn.Sequential(orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)


@layer
def unused_output() -> tuple[nn.Module, Any]:
    """Only the loss is differentiated; the branch beside it is computed and returned."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        return {"loss": self.used(x).pow(2).mean(), "beside": self.beside(x)}

    return Wrap(forward, used=nn.Linear(4, 4), beside=nn.Linear(4, 4)), torch.randn(3, 4)


@layer
def masked_writes() -> tuple[nn.Module, Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = torch.zeros_like(y)
        z[:, ::2] = y[:, ::2]
        z[torch.tensor([0, 2], device=x.device)] += 1
        return z * y

    return Wrap(forward, linear=nn.Linear(6, 6)), torch.randn(4, 6)


@layer
def gradient_inside() -> tuple[nn.Module, Any]:
    """A penalty on the gradient with respect to the input, taken inside the forward."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)
        return gradient.pow(2).sum()

    return Wrap(forward, linear=nn.Linear(4, 4)), torch.randn(3, 4)
