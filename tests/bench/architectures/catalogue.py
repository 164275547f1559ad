"""Which architectures there are: one entry for each model type of transformers' auto classes, diffusers and MONAI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch
from torch import nn

from .inputs import samples
from .shrink import Size, shrink

# (auto class' mapping, task, how many of it are taken): a model type counts for the first task that has it
TASKS: tuple[tuple[str, str, int], ...] = (
    ("CTC", "ctc", 13),
    ("RNNT", "rnnt", 3),
    ("SPEECH_SEQ_2_SEQ", "speech", 14),
    ("AUDIO_CLASSIFICATION", "audio", 4),
    ("OBJECT_DETECTION", "detection", 19),
    ("UNIVERSAL_SEGMENTATION", "universal segmentation", 8),
    ("SEMANTIC_SEGMENTATION", "segmentation", 6),
    ("DEPTH_ESTIMATION", "depth", 3),
    ("VIDEO_CLASSIFICATION", "video", 3),
    ("TIME_SERIES_PREDICTION", "series", 2),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", "contrastive", 6),
    ("IMAGE_TEXT_TO_TEXT", "image-text", 30),
    ("MASKED_IMAGE_MODELING", "masked image", 2),
    ("IMAGE_CLASSIFICATION", "classification", 16),
    ("SEQ_TO_SEQ_CAUSAL_LM", "seq2seq", 14),
    ("MASKED_LM", "masked", 14),
    ("CAUSAL_LM", "causal", 26),
)
SIZES = (Size(), Size(layers=4), Size(image=128), Size(lists=False), Size(width=512), Size(width=128, layers=4, image=224))

# builds candidates: model and sample
Builds = Callable[[], Iterator[tuple[nn.Module, Any]]]


@dataclass(frozen=True)
class Entry:
    """One architecture: `candidates()` are small models of it with samples; the first that trains counts."""

    name: str
    task: str
    candidates: Builds


def entries(everything: bool = False) -> list[Entry]:
    """The catalogue; `everything` takes each architecture rather than the share that `TASKS` names."""
    from .others import of_diffusers, of_monai

    return [*of_transformers(everything), *of_diffusers(everything), *of_monai(everything)]


def of_transformers(everything: bool) -> Iterator[Entry]:
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for mapping, task, count in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        fresh = [kind for kind in names if kind not in seen]
        seen.update(fresh)
        for kind in fresh if everything else spread(fresh, count):
            found = names[kind]
            yield Entry(f"{kind} ({task})", task, _builds(kind, found if isinstance(found, str) else found[0], task))


def spread(names: list[str], count: int) -> list[str]:
    """`count` of the names at equal distances."""
    return [names[i * len(names) // count] for i in range(count)] if count < len(names) else names


def _builds(kind: str, name: str, task: str) -> Builds:
    def candidates() -> Iterator[tuple[nn.Module, Any]]:
        import transformers

        last: Exception = LookupError("nothing was tried")
        built = False
        for size in SIZES:
            try:
                torch.manual_seed(0)
                model_class = getattr(transformers, name)
                config = shrink(model_class.config_class(), size)
                model = model_class(config).train()
            except Exception as error:  # noqa: BLE001 - the next size may do
                last = error
                continue
            for _, sample in samples(model, config, task, size):
                built = True
                yield model, sample
        if not built:
            raise last

    return candidates
