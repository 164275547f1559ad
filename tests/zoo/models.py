"""The zoo: real models with random weights, each a function returning `(model, sample)` in training mode."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

Entry = Callable[[], tuple[nn.Module, Any]]


def _tokens(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def gpt2(
    *, layers: int = 6, width: int = 256, heads: int = 4, vocabulary: int = 5000, length: int = 256, batch: int = 4,
    attention: str = "eager", cache: bool = False,
) -> tuple[nn.Module, Any]:  # fmt: skip
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=length, bos_token_id=0,
        eos_token_id=0, use_cache=cache, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    config._attn_implementation = attention
    tokens = _tokens(vocabulary, batch, length)
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def gpt2_sdpa() -> tuple[nn.Module, Any]:
    return gpt2(attention="sdpa", cache=True)


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=4000, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    tokens = _tokens(4000, 2, 256)
    return LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def bert() -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=4000
    )
    tokens = _tokens(4000, 4, 128)
    sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    return BertForMaskedLM(config).train(), sample


def vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768, image_size=96,
        patch_size=8, num_labels=100, hidden_dropout_prob=0.1,
    )  # fmt: skip
    sample = {"pixel_values": torch.randn(4, 3, 96, 96), "labels": torch.randint(0, 100, (4,))}
    return ViTForImageClassification(config).train(), sample


def mixtral() -> tuple[nn.Module, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=2000, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    tokens = _tokens(2000, 2, 128)
    return MixtralForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def resnet50(*, batch: int = 4, side: int = 224) -> tuple[nn.Module, Any]:
    from transformers import ResNetConfig, ResNetForImageClassification

    sample = {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 1000, (batch,))}
    return ResNetForImageClassification(ResNetConfig(num_labels=1000)).train(), sample


def densenet121(*, batch: int = 4, side: int = 128) -> tuple[nn.Module, Any]:
    from monai.networks.nets import DenseNet121

    return DenseNet121(spatial_dims=2, in_channels=3, out_channels=10).train(), torch.randn(batch, 3, side, side)


def vnet(*, side: int = 32) -> tuple[nn.Module, Any]:
    from monai.networks.nets import VNet

    return VNet(spatial_dims=3, in_channels=1, out_channels=2).train(), torch.randn(1, 1, side, side, side)


class LSTMLanguageModel(nn.Module):
    """Embedding, two LSTM layers with dropout between them, a linear head, cross entropy."""

    def __init__(self, vocabulary: int = 2000, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def lstm(*, length: int = 48) -> tuple[nn.Module, Any]:
    tokens = _tokens(2000, 8, length)
    return LSTMLanguageModel().train(), (tokens, tokens)


ZOO: dict[str, Entry] = {
    "gpt2": gpt2,
    "gpt2-sdpa": gpt2_sdpa,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "mixtral": mixtral,
    "resnet50": resnet50,
    "densenet121": densenet121,
    "vnet": vnet,
    "lstm": lstm,
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A zoo entry with reproducible weights and data."""
    torch.manual_seed(seed)
    return ZOO[name]()
