"""Small random-weight models of libraries that no part of this project was written for; `LIBRARY[name]()`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

Entry = Callable[[], tuple[nn.Module, Any]]
LIBRARY: dict[str, Entry] = {}


def entry(make: Entry) -> Entry:
    """Register under the function's name."""
    LIBRARY[make.__name__] = make
    return make


def _causal(config: Any, model: Any, *, length: int = 16, mask: bool = False) -> tuple[nn.Module, Any]:
    tokens = torch.randint(3, 500, (2, length))
    sample = {"input_ids": tokens, "labels": tokens}
    return model(config), {**sample, "attention_mask": torch.ones_like(tokens)} if mask else sample


def _sizes(**more: Any) -> dict[str, Any]:
    return {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, **more}  # fmt: skip


@entry
def t5() -> tuple[nn.Module, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return _causal(config, T5ForConditionalGeneration)


@entry
def qwen2_masked() -> tuple[nn.Module, Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _causal(Qwen2Config(**_sizes(num_key_value_heads=2)), Qwen2ForCausalLM, mask=True)


@entry
def qwen3_experts() -> tuple[nn.Module, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _sizes(num_key_value_heads=2, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=16)
    return _causal(Qwen3MoeConfig(**sizes), Qwen3MoeForCausalLM)


@entry
def gemma2() -> tuple[nn.Module, Any]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return _causal(Gemma2Config(**_sizes(num_key_value_heads=2, head_dim=16, sliding_window=8)), Gemma2ForCausalLM)


@entry
def mamba() -> tuple[nn.Module, Any]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, state_size=8)
    return _causal(config, MambaForCausalLM, length=12)


@entry
def opt() -> tuple[nn.Module, Any]:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=500, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
                       word_embed_proj_dim=64)  # fmt: skip
    return _causal(config, OPTForCausalLM)


@entry
def gpt_neox() -> tuple[nn.Module, Any]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return _causal(GPTNeoXConfig(**_sizes()), GPTNeoXForCausalLM)


@entry
def deberta() -> tuple[nn.Module, Any]:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    sizes = _sizes(num_hidden_layers=1, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return _causal(DebertaV2Config(**sizes), DebertaV2ForMaskedLM)


@entry
def whisper() -> tuple[nn.Module, Any]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=500, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=20,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sample = {"input_features": torch.randn(2, 16, 40), "labels": torch.randint(3, 500, (2, 8))}
    return WhisperForConditionalGeneration(config), sample


@entry
def swin() -> tuple[nn.Module, Any]:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4,
                        num_labels=5)  # fmt: skip
    sample = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return SwinForImageClassification(config), sample


@entry
def convnext() -> tuple[nn.Module, Any]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], num_labels=5, drop_path_rate=0.1)
    sample = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
    return ConvNextForImageClassification(config), sample


@entry
def diffusion_u_net() -> tuple[nn.Module, Any]:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 5])}


@entry
def monai_u_net() -> tuple[nn.Module, Any]:
    from monai.networks.nets import UNet

    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2,
                 dropout=0.1)  # fmt: skip
    return model, torch.randn(1, 1, 16, 16, 16)


@entry
def segresnet() -> tuple[nn.Module, Any]:
    from monai.networks.nets import SegResNet

    model = SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, dropout_prob=0.1)
    return model, torch.randn(1, 1, 16, 16, 16)


@entry
def efficientnet() -> tuple[nn.Module, Any]:
    from monai.networks.nets import EfficientNetBN

    return EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=3, num_classes=5), (
        torch.randn(2, 3, 64, 64)
    )
