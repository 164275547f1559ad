"""The models that ranks train in the tests, and how they are spread over two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WORDS, WIDTH = 100, 64


class Block(nn.Module):
    """A residual feed-forward block with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.back(F.gelu(self.wide(self.norm(x)))))


class Language(nn.Module):
    """Embedding, blocks, head and loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class _Copied(torch.autograd.Function):
    """As Megatron-LM's: what all ranks have, whose gradient is the sum of theirs, summed up in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient, async_op=True).wait()
        return gradient


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class ByHand(Language):
    """Tensor parallel without DTensors, and statistics of all ranks by every collective that can be traced."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            hidden = F.gelu(block.wide(_Copied.apply(block.norm(x))))  # type: ignore[union-attr, operator]
            x = x + block.drop(_Summed.apply(block.back(hidden)))  # type: ignore[union-attr, operator]
        return F.cross_entropy(self.head(x + _statistics(x.detach())).flatten(0, 1), labels.flatten())


def _statistics(x: torch.Tensor) -> torch.Tensor:
    ranks, mine = dist.get_world_size(), x + dist.get_rank()
    largest, first, sent = x.clone(), mine.clone(), torch.empty_like(x)
    part, whole = x.new_empty(len(x) // ranks, *x.shape[1:]), torch.empty_like(x)
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.broadcast(first, 0)
    dist.all_to_all_single(sent, mine)
    dist.all_gather(parts, mine)
    dist.reduce_scatter_tensor(part, mine)
    dist.all_gather_into_tensor(whole, part)
    return (largest + first + sent + parts[-1] + whole) / 100


class Scored(Language):
    """A model that returns its logits, too."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class First(nn.Module):
    """The first stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(Block(), Block())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.words(tokens))


class Last(nn.Module):
    """The last stage of a pipeline, without its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def language(layers: int = 3) -> Language:
    """The same numbers each time."""
    torch.manual_seed(0)
    return Language(layers)


def scored() -> Scored:
    """One block of it."""
    torch.manual_seed(0)
    return Scored(1)


def by_hand(rank: int) -> ByHand:
    """Each rank has other parts of the blocks' products, and the rest alike."""
    torch.manual_seed(0)
    model = ByHand()
    torch.manual_seed(rank)
    for block in model.blocks:
        for product in (block.wide, block.back):
            nn.init.normal_(product.weight, std=0.1)  # type: ignore[union-attr, arg-type]
    return model


def tokens(rank: int, rows: int = 8) -> torch.Tensor:
    """A batch of this rank's own."""
    return torch.randint(0, WORDS, (rows, 32), generator=torch.Generator().manual_seed(rank))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """`fully_shard` each block, and the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def shard_whole(model: nn.Module) -> nn.Module:
    """`fully_shard` the model alone."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def spread(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Tensor parallel: each block's two products, the table and the head."""
    styles: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.wide": ColwiseParallel(), "blocks.*.back": RowwiseParallel(),
    }  # fmt: skip
    return parallelize_module(model, mesh or init_device_mesh("cpu", (dist.get_world_size(),)), styles)


def spread_and_shard(model: nn.Module) -> nn.Module:
    """Tensor parallel over each two of four ranks, and `fully_shard` over the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    spread(model, mesh["tensor"])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def spread_logits(model: nn.Module) -> nn.Module:
    """The same, with a head that returns a DTensor: the loss is one, too, under `loss_parallel()`."""
    styles: dict[str, Any] = {
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.wide": ColwiseParallel(), "blocks.*.back": RowwiseParallel(),
    }  # fmt: skip
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)


def spread_sequence(model: nn.Module) -> nn.Module:
    """Tensor and sequence parallel."""
    along = Shard(1)
    styles: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=along, use_local_output=False),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
        "blocks.*.norm": SequenceParallel(use_local_output=False),
        "blocks.*.wide": ColwiseParallel(input_layouts=along),
        "blocks.*.back": RowwiseParallel(output_layouts=along, use_local_output=False),
    }  # fmt: skip
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)
