"""Small configurations of any architecture: the default one, each size in it made small by what its name says.

What must agree keeps agreeing, because a rule depends on a name and a value alone: `hidden_size` of a text model and
`out_hidden_size` of the vision model that feeds it both become the width, heads times their size is the width, token
numbers stay distinct. Whatever is not a size (dropout, layer drop, SpecAugment, losses, activations) is as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

HEADS, VOCABULARY, EXPERTS = 4, 256, 4


@dataclass(frozen=True)
class Size:
    """How small: width of the hidden states, layers where the default has more, the side of an image, lists of widths."""

    width: int = 64
    layers: int = 2
    image: int = 64
    lists: bool = True

    @property
    def head(self) -> int:
        return self.width // HEADS


Rule = tuple[str, Callable[[int, Size], int]]

# The first pattern that matches a name decides; a value is never raised except by `image`.
RULES: tuple[Rule, ...] = (
    (r"head_in_index|ignore_index|^max_(2d_)?position|local_attention|sliding_window", lambda v, s: v),
    (r"vocab_size|vocab_offset|num_embeddings$|num_embeds", lambda v, s: min(v, VOCABULARY)),
    (r"codebook_size|num_codevectors|max_source_positions|n_window|max_num_bins", lambda v, s: min(v, 32)),
    (r"num_codevector_groups|num_groups$|n_group|topk_group|groups$|num_negatives", lambda v, s: min(v, 4)),
    (r"image_size|img_size|input_size|resolution|crop_size", lambda v, s: s.image if v > s.image else v),
    (r"num_frames|num_mel_bins|num_channels|^in_channels$|in_chans|out_chans", lambda v, s: min(v, 16)),
    (r"per_tok|top_?k$|num_hash", lambda v, s: min(v, 2)),
    (r"(key_?value|kv)_(heads|groups)|n_kv_heads|linear_num_key_heads", lambda v, s: min(v, HEADS // 2)),
    (r"head_dim|d_kv$|head_size|d_head|dim_head|kv_channels|attention_channels|rotary_dim", lambda v, s: min(v, s.head)),
    (r"mamba.*heads$", lambda v, s: min(v, 2 * HEADS)),
    (r"heads?(_per_stage)?$", lambda v, s: min(v, HEADS)),
    (r"experts?$|expert_num|num_experts", lambda v, s: min(v, EXPERTS)),
    (r"layers?$|depths?$|num_blocks|n_layer|num_hidden|max_window_layers", lambda v, s: min(v, s.layers)),
    (r"num_queries|num_query|num_denoising|n_latents|num_latents|num_proposals", lambda v, s: min(v, 10)),
    (r"train_num_points|num_conv_pos_embeddings|state_size|d_state|ssm_state|num_pos_feats",
     lambda v, s: min(v, s.width // 4)),
    (r"(kernel|window|patch|chunk|block|stride|tubelet|merge|type_vocab|context|feat_size|mask)_?s?i?z?e?$|stride|ratio"
     r"|rank_ratio|^scale|length|positions|rate|_id$|_ids$|_index$|frequency|temperature|num_buckets|distance|hop|"
     r"n_codebooks|num_codebooks|mel_bins|num_labels|topk", lambda v, s: v),
    (r"intermediate|ffn|d_ff|inner|feed_?forward|mlp_dim|linear_units", lambda v, s: min(v, 2 * s.width)),
    (r"lora_rank|time_step_rank|rank$", lambda v, s: min(v, s.head)),
    (r"size|dim|width|embd|channel|model|filters|features|units|hidden|scalar", lambda v, s: min(v, s.width)),
)  # fmt: skip


class Shrinker:
    """Shrinks one configuration with all below it; token numbers are dealt out once for all of them."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.tokens: dict[int, int] = {}

    def config(self, config: Any) -> Any:
        """A small configuration of the same class (a timm backbone becomes a ResNet: timm is not needed then)."""
        if getattr(config, "model_type", "") == "timm_backbone":
            return self._resnet(config)
        values = {name: getattr(config, name) for name in _fields(config) if hasattr(config, name)}
        kept = layers_kept(values, self.size.layers)
        shrunk = {name: self.value(name, value, kept) for name, value in values.items()}
        # what the class derives from other fields is derived again
        asked = {n: v for n, v in shrunk.items() if n not in ("out_features", "out_indices", "stage_names", "label2id")}
        if values.get("num_key_value_heads") == values.get("num_attention_heads") is not None:
            asked["num_key_value_heads"] = asked["num_attention_heads"]
        small = type(config)(**asked)
        stages = len(getattr(small, "stage_names", None) or ()) - 1
        wanted = min(len(getattr(config, "_out_indices", None) or ()), stages)
        return type(config)(**asked, out_indices=[*range(stages - wanted + 1, stages + 1)]) if wanted > 0 else small

    def _resnet(self, config: Any) -> Any:
        from transformers import ResNetConfig

        stages = ["stage1", "stage2", "stage3", "stage4"]
        last = [s for i, s in enumerate(stages, 1) if i in (getattr(config, "out_indices", None) or [4])]
        return ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], out_features=last)

    def value(self, name: str, value: Any, kept: tuple[int, list[int]] | None = None) -> Any:
        """What a field becomes."""
        if name == "vocab_size" and value is None:
            return 32
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            return self.config(value)
        if isinstance(value, Mapping):
            return self._mapping(name, value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._sequence(name, list(value), kept))
        if kept is not None and re.search(r"^(num_hidden_layers|n_layers?|num_layers)$", name):
            return len(kept[1]) if value == kept[0] else self.number(name, value)
        return self.number(name, value)

    def number(self, name: str, value: Any) -> Any:
        """What one number becomes; anything else stays."""
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if re.search(r"token_?(id|index)$|_token_(id|index)s?$|(boi|eoi|boa|eoa)_token|token_id", name):
            return self._token(value)
        for pattern, rule in RULES:
            if re.search(pattern, name):
                return rule(value, self.size)
        return value

    def _token(self, value: int) -> int:
        if value < VOCABULARY // 2:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 2 - len(self.tokens))

    def _mapping(self, name: str, values: Mapping[Any, Any]) -> Any:
        if name in ("id2label", "label2id"):
            return dict(list(values.items())[:3])
        return {k: self._sections(v) if k == "mrope_section" else self.value(str(k), v) for k, v in values.items()}

    def _sections(self, values: list[int]) -> list[int]:
        """Rotary sections fill half a head."""
        total, half = sum(values), self.size.head // 2
        parts = [max(1, v * half // total) for v in values[1:]]
        return [half - sum(parts), *parts]

    def _sequence(self, name: str, values: list[Any], kept: tuple[int, list[int]] | None) -> list[Any]:
        if kept is not None and len(values) == kept[0] and len(values) > 8:
            return [self.value(name, values[i]) for i in kept[1]]
        if not values or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            return [self.value(name, v, kept) for v in values]
        if re.search(r"ind(ex|ices)|indexes|_layers?$|blocks$", name) and values == sorted(set(values)):
            return [min(i, self.size.layers - 1) for i in range(len(values))] if max(values) > 3 else values
        if re.search(r"heads", name):
            return [1 << (v.bit_length() - 1) for v in values]
        if re.search(r"depths|num_block|blocks_per_stage|numb_of_layers|repeats", name):
            return [min(v, 1 if len(values) > 2 else 2) for v in values]
        shrunk = [self.number(name, v) for v in values]
        if not self.size.lists and len(set(values)) > 1:
            return values
        if shrunk != values and len(set(values)) > 1 and not re.search(r"image|resol|token", name):
            first = min(values)
            return [max(8, v * min(first, self.size.width // 2) // first // 8 * 8) for v in values]
        return shrunk


def _fields(config: Any) -> list[str]:
    if is_dataclass(config):
        return [f.name for f in fields(config) if f.init]
    return [n for n in vars(config) if not n.startswith("_")]


def layers_kept(values: Mapping[str, Any], at_least: int) -> tuple[int, list[int]] | None:
    """How many layers there are, and which to keep where lists tell layers apart: the first of each kind, four at most.

    None where nothing is told layer by layer.
    """
    names = [n for n in values if re.search(r"^(num_hidden_layers|n_layers?|num_layers)$", n)]
    count = next((values[n] for n in names if isinstance(values[n], int)), 0)
    if count <= 8:
        return None
    lists = [v for v in values.values() if isinstance(v, (list, tuple)) and len(v) == count]
    if not lists:
        return None
    kinds = [tuple(map(str, kind)) for kind in zip(*lists, strict=True)]
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]][:4]
    more = [i for i in range(count) if i not in first][: max(0, at_least - len(first))]
    return count, sorted([*first, *more])


def shrink(config: Any, size: Size) -> Any:
    """A small configuration like `config`."""
    return Shrinker(size).config(config)
