"""The models of the benchmark: random weights, one training step each, sized for minutes on two cores."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.zoo.models import ZOO, Entry, densenet121, gpt2, lstm, resnet50, vnet

GPT2_SIZES: dict[str, Any] = {
    "layers": 12, "width": 384, "heads": 6, "vocabulary": 8192, "length": 512, "batch": 1,
}  # fmt: skip


def llama(*, layers: int = 8, batch: int = 1, length: int = 512) -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=8192, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 8192, (batch, length))
    return LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def bert(*, batch: int = 2, length: int = 256) -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, vocab_size=8192
    )
    tokens = torch.randint(0, 8192, (batch, length))
    return BertForMaskedLM(config).train(), {"input_ids": tokens, "labels": tokens}


def vit(*, batch: int = 2) -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, image_size=224,
        patch_size=16, num_labels=100, hidden_dropout_prob=0.1,
    )  # fmt: skip
    sample = {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.randint(0, 100, (batch,))}
    return ViTForImageClassification(config).train(), sample


def mixtral(*, batch: int = 2, length: int = 256) -> tuple[nn.Module, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=4000, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 4000, (batch, length))
    return MixtralForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def diffusion(*, batch: int = 2, side: int = 32) -> tuple[nn.Module, Any]:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=side, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model.train(), {"sample": torch.randn(batch, 3, side, side), "timestep": torch.arange(batch)}


def segresnet(*, side: int = 48) -> tuple[nn.Module, Any]:
    from monai.networks.nets import SegResNet

    model = SegResNet(spatial_dims=3, init_filters=16, in_channels=1, out_channels=2, dropout_prob=0.1)
    return model.train(), torch.randn(1, 1, side, side, side)


BENCH: dict[str, Entry] = {
    "gpt2": functools.partial(gpt2, **GPT2_SIZES),
    "gpt2-sdpa": functools.partial(gpt2, attention="sdpa", **GPT2_SIZES),
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "mixtral": mixtral,
    "diffusion": diffusion,
    "resnet50": functools.partial(resnet50, batch=2),
    "densenet121": densenet121,
    "vnet": functools.partial(vnet, side=64),
    "segresnet": segresnet,
    "lstm": lstm,
}

LONG = ("gpt2", "vnet", "segresnet")  # measured with --full, or when named


def build(name: str, seed: int = 0, **sizes: int) -> tuple[nn.Module, Any]:
    """A benchmark model with reproducible weights and data; `zoo:NAME` is the test suite's smaller one."""
    torch.manual_seed(seed)
    make: Any = ZOO[name.removeprefix("zoo:")] if name.startswith("zoo:") else BENCH[name]
    model, sample = make(**sizes)
    return model, sample
