"""The bench of other people's architectures: its shrinker, and ten of its cases."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import pytest

from tests.bench.architectures.case import GOOD, examine
from tests.bench.architectures.catalogue import entries, spread
from tests.bench.architectures.shrink import VOCABULARY, Size, shrink

TEN = (
    "wav2vec2 (ctc)", "nemotron3_5_asr (rnnt)", "speecht5 (speech)", "conditional_detr (detection)",
    "mask2former (universal segmentation)", "lighton_ocr (image-text)", "sew-d (ctc)", "parakeet_ctc (ctc)",
    "UNet2DConditionModel (diffusers)", "UNet (MONAI)",
)  # fmt: skip
QUICK = ("bert (masked)",)


def check(name: str) -> None:
    [entry] = [e for e in entries(everything=True) if e.name == name]
    found = examine(entry, 60, {"time_limit": 1, "check": False, "regions": "auto"}, plain_only=False)
    assert found.verdict in GOOD, found.detail


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_architecture(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_ten_architectures(name: str) -> None:
    check(name)


@pytest.mark.parametrize("kind", ["llama", "qwen2_vl", "wav2vec2", "swin", "whisper", "mask2former"])
def test_a_shrunk_configuration_keeps_its_behaviour(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    small = shrink(default, Size())
    assert type(small) is type(default)
    floats = {k: v for k, v in vars(default).items() if isinstance(v, float)}
    assert floats == {k: getattr(small, k) for k in floats}  # dropout, layer drop, SpecAugment
    for config in (small, getattr(small, "text_config", None)):
        if isinstance(getattr(config, "num_attention_heads", None), int) and hasattr(config, "hidden_size"):
            assert config.hidden_size % config.num_attention_heads == 0
        assert (getattr(config, "vocab_size", None) or 0) <= VOCABULARY


def test_a_spread_is_of_equal_distances() -> None:
    assert spread(list("abcdefgh"), 4) == list("aceg")
    assert spread(list("abc"), 9) == list("abc")
