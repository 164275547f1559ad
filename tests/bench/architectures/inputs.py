"""Inputs for any of transformers' models: each argument of its forward by its name, several ways where one may fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .shrink import VOCABULARY, Size

BATCH, LENGTH, CLASSES = 2, 64, 2
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "thinker_config", "backbone_config")


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that a configuration has, or one below it."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    below = [v for v in vars(config).values() if hasattr(v, "model_type") and hasattr(v, "to_dict")]
    found = (find(part, *names) for part in below)
    return next((v for v in found if v is not None), default)


@dataclass(frozen=True)
class Asked:
    """For which model, task and variant inputs are asked."""

    model: nn.Module
    config: Any
    task: str
    size: Size
    variant: str = ""

    @property
    def names(self) -> list[str]:
        return list(inspect.signature(self.model.forward).parameters)

    @property
    def side(self) -> int:
        side = find(getattr(self.config, "vision_config", self.config), "image_size", default=self.size.image)
        return side[0] if isinstance(side, (list, tuple)) else side if isinstance(side, int) else self.size.image

    @property
    def channels(self) -> int:
        vision = getattr(self.config, "vision_config", self.config)
        found = find(vision, "num_channels", "in_channels", "in_chans", default=3)
        return found if isinstance(found, int) else 3

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of patches of one image given as a list of patches."""
        side = 2 * max(2, find(self.config, "spatial_merge_size", "merge_size", default=2))
        return (1, side, side) if isinstance(side, int) else (1, 4, 4)


ARGUMENTS: dict[str, Callable[[Asked], Any]] = {}


def argument(*names: str) -> Callable[[Callable[[Asked], Any]], Callable[[Asked], Any]]:
    """Register what makes these arguments; None leaves one out."""

    def register(make: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
        ARGUMENTS.update(dict.fromkeys(names, make))
        return make

    return register


def tokens(asked: Asked, length: int = LENGTH) -> torch.Tensor:
    vocabulary = min(find(asked.config, "vocab_size", "char_vocab_size", default=VOCABULARY), VOCABULARY // 2)
    return torch.randint(min(10, vocabulary // 2), vocabulary, (BATCH, length))


@argument("input_ids", "qformer_input_ids", "protein_input_ids")
def _input_ids(asked: Asked) -> Any:
    ids = tokens(asked, LENGTH)
    eos = find(asked.config, "eos_token_id")
    ids[:, -1] = eos if isinstance(eos, int) and 0 <= eos < VOCABULARY else ids[:, -1]
    return ids


@argument("attention_mask")
def _attention_mask(asked: Asked) -> Any:
    return torch.ones(BATCH, LENGTH, dtype=torch.long) if "input_ids" in asked.names else None


@argument("decoder_input_ids")
def _decoder_input_ids(asked: Asked) -> Any:
    return tokens(asked, LENGTH) if "decoder" in asked.variant else None


@argument("pixel_values", "pixel_values_images")
def _pixel_values(asked: Asked) -> Any:
    if "image_grid_thw" in asked.names or "patches" in asked.variant:
        frames, rows, columns = asked.grid
        patch = find(asked.config, "patch_size", default=14)
        times = find(asked.config, "temporal_patch_size", default=1)
        return torch.randn(BATCH * frames * rows * columns, asked.channels * times * patch * patch)
    if asked.task in ("video",):
        return torch.randn(BATCH, find(asked.config, "num_frames", default=4), asked.channels, asked.side, asked.side)
    images = (1,) if "several" in asked.variant else ()
    return torch.randn(BATCH, *images, asked.channels, asked.side, asked.side)


@argument("pixel_values_videos")
def _videos(asked: Asked) -> Any:
    if asked.task != "video":
        return None
    frames = find(asked.config, "frames_per_clip", "num_frames", default=4)
    return torch.randn(BATCH, frames, asked.channels, asked.side, asked.side)


@argument("image_grid_thw")
def _grid(asked: Asked) -> Any:
    return torch.tensor([asked.grid] * BATCH)


@argument("image_sizes")
def _image_sizes(asked: Asked) -> Any:
    return torch.tensor([[asked.side, asked.side]] * BATCH)


@argument("flattened_patches")
def _flattened(asked: Asked) -> Any:
    width = 2 + asked.channels * find(asked.config, "patch_size", default=16) ** 2
    return torch.rand(BATCH, LENGTH, width).clamp(0.1)


@argument("input_values")
def _waves(asked: Asked) -> Any:
    bins = find(asked.config, "num_mel_bins")
    if bins and not find(asked.config, "conv_dim"):
        return torch.randn(BATCH, find(asked.config, "max_length", default=64), bins)
    return tokens(asked) if asked.task == "spectrogram" else torch.randn(BATCH, 16000)


@argument("input_features")
def _features(asked: Asked) -> Any:
    bins = find(asked.config, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel",
                "input_feat_size", "input_dim", "feature_size", default=80)  # fmt: skip
    length = 2 * find(asked.config, "max_source_positions", default=64)
    return torch.randn(BATCH, length, bins) if "frames" in asked.variant else torch.randn(BATCH, bins, length)


@argument("bbox")
def _boxes(asked: Asked) -> Any:
    corner = torch.randint(0, 100, (BATCH, LENGTH, 2))
    return torch.cat([corner, corner + 50], -1)


@argument("past_values")
def _series(asked: Asked) -> Any:
    context = find(asked.config, "context_length", default=32)
    more = max(find(asked.config, "lags_sequence", default=[0]))
    channels = find(asked.config, "num_input_channels")
    return torch.randn(BATCH, context + more, *((channels,) if channels else ()))


@argument("future_values")
def _future(asked: Asked) -> Any:
    channels = find(asked.config, "num_input_channels")
    return torch.randn(BATCH, find(asked.config, "prediction_length", default=8), *((channels,) if channels else ()))


@argument("past_time_features", "future_time_features")
def _time_features(asked: Asked) -> Any:
    return None


@argument("return_loss")
def _return_loss(asked: Asked) -> Any:
    return True


@argument("task_inputs")
def _task_inputs(asked: Asked) -> Any:
    return tokens(asked, find(asked.config, "task_seq_len", default=LENGTH))


@argument("mask_labels")
def _mask_labels(asked: Asked) -> Any:
    return [torch.randint(0, 2, (2, asked.side, asked.side)).float() for _ in range(BATCH)]


@argument("class_labels")
def _class_labels(asked: Asked) -> Any:
    return [torch.tensor([0, 1]) for _ in range(BATCH)]


@argument("start_positions", "end_positions")
def _positions(asked: Asked) -> Any:
    return torch.tensor([1, 2]) if asked.task == "question" else None


@argument("bool_masked_pos")
def _masked(asked: Asked) -> Any:
    patches = (asked.side // find(asked.config, "patch_size", default=16)) ** 2
    if asked.task == "video":
        return None
    return torch.arange(BATCH * patches).reshape(BATCH, patches) % 2 == 0 if asked.task == "masked image" else None


@argument("labels")
def _labels(asked: Asked) -> Any:
    make = LABELS.get(asked.task)
    return make(asked) if make and "unlabelled" not in asked.variant else None


def _targets(asked: Asked) -> list[dict[str, torch.Tensor]]:
    boxes = torch.tensor([[0.4, 0.4, 0.3, 0.3], [0.6, 0.5, 0.2, 0.4]])
    masks = torch.zeros(2, asked.side, asked.side)
    masks[:, 4:20, 6:30] = 1
    return [{"class_labels": torch.tensor([0, 1]), "boxes": boxes.clone(), "masks": masks} for _ in range(BATCH)]


def _classes(asked: Asked) -> torch.Tensor:
    return torch.arange(BATCH) % CLASSES


LABELS: dict[str, Callable[[Asked], Any]] = {
    **dict.fromkeys(("classification", "video", "audio", "sequence", "time series"), _classes),
    "segmentation": lambda asked: torch.randint(0, CLASSES, (BATCH, asked.side, asked.side)),
    "detection": _targets,
    "token": lambda asked: torch.randint(0, CLASSES, (BATCH, LENGTH)),
    "ctc": lambda asked: torch.randint(3, 20, (BATCH, 4)),
    "rnnt": lambda asked: torch.randint(3, 20, (BATCH, 4)),
    "seq2seq": tokens,
    "speech": tokens,
    "depth": lambda asked: None,
    "spectrogram": lambda asked: torch.randn(BATCH, 2 * LENGTH, find(asked.config, "num_mel_bins", default=80)),
}

VARIANTS = ("", "decoder", "frames", "frames decoder", "several", "patches", "unlabelled", "unlabelled decoder",
            "frames unlabelled decoder", "several unlabelled")  # fmt: skip


def build(asked: Asked) -> dict[str, Any]:
    """The arguments that the forward has a name for."""
    made = {name: ARGUMENTS[name](asked) for name in asked.names if name in ARGUMENTS}
    sample = {name: value for name, value in made.items() if value is not None}
    if asked.task in ("causal", "masked", "image-text") and "labels" in asked.names and "input_ids" in sample:
        if "pixel_values" in sample:
            _place_images(asked, sample)
        if "unlabelled" not in asked.variant:
            sample["labels"] = sample["input_ids"].clone()
    if "mm_token_type_ids" in asked.names and "input_ids" in sample:
        image = find(asked.config, "image_token_id", "image_token_index", default=-1)
        sample["mm_token_type_ids"] = (sample["input_ids"] == image).long()
    return sample


def samples(model: nn.Module, config: Any, task: str, size: Size) -> Iterator[tuple[str, dict[str, Any]]]:
    """Different samples, the likeliest first."""
    seen: list[str] = []
    failed: list[Exception] = []
    for variant in VARIANTS:
        torch.manual_seed(0)
        try:
            sample = build(Asked(model, config, task, size, variant))
        except Exception as error:  # noqa: BLE001 - one way of several
            failed.append(error)
            continue
        outline = str({k: getattr(v, "shape", type(v)) for k, v in sample.items()})
        if outline not in seen:
            seen.append(outline)
            yield variant, sample
    if not seen:
        raise failed[0]


def _place_images(asked: Asked, sample: dict[str, Any]) -> None:
    """As many image tokens among the text as the model makes of the images, where it has such tokens."""
    token = find(asked.config, "image_token_id", "image_token_index", "media_token_id")
    count = image_tokens(asked.model, sample)
    if token is None or not count:
        return
    per_row = count // BATCH
    text = sample["input_ids"]
    start = find(asked.config, "vision_start_token_id")
    opening = torch.full((BATCH, 1), start if isinstance(start, int) else 5)
    image = torch.full((BATCH, per_row), token)
    sample["input_ids"] = torch.cat([text[:, :4], opening, image, text[:, 4:]], 1)
    if "attention_mask" in sample:
        sample["attention_mask"] = torch.ones_like(sample["input_ids"])


def image_tokens(model: nn.Module, sample: dict[str, Any]) -> int:
    """How many vectors the model makes of the sample's images; 0 where it does not say."""
    holder = next((m for m in (model, getattr(model, "model", None)) if hasattr(m, "get_image_features")), None)
    if holder is None:
        return 0
    names = inspect.signature(holder.get_image_features).parameters
    with torch.no_grad():
        found = holder.get_image_features(**{k: v for k, v in sample.items() if k in names})
    found = getattr(found, "pooler_output", found) if hasattr(found, "last_hidden_state") else found
    parts = found if isinstance(found, (list, tuple)) else [found]
    return sum(p.numel() // p.shape[-1] for p in parts if isinstance(p, torch.Tensor))
