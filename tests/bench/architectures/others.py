"""diffusers' and MONAI's models: small arguments of the constructor by name, then inputs of several shapes."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .catalogue import Builds, Entry, spread
from .shrink import Shrinker, Size

TEXT = 8
CONDITION = r"^(joint_attention|cross_attention|text(_embed)?|caption|context|cond(ition)?|encoder_hid|image)_(dim|size|chan)"


def of_diffusers(everything: bool) -> Iterator[Entry]:
    import diffusers

    found = (name for name in dir(diffusers) if not name.startswith(("Auto", "Multi")) and "Dual" not in name)
    names = [name for name in found if _is_model(diffusers, name)]
    for name in names if everything else spread(names, 44):
        yield Entry(f"{name} (diffusers)", "diffusers", _diffusers(name))


def _is_model(library: Any, name: str) -> bool:
    found = getattr(library, name, None)
    base = getattr(library, "ModelMixin", None)
    return isinstance(found, type) and base is not None and issubclass(found, base) and found is not base


def _diffusers(name: str) -> Builds:
    def candidates() -> Iterator[tuple[nn.Module, Any]]:
        import diffusers

        kind: Any = getattr(diffusers, name)
        for size in (Size(), Size(width=128)):
            torch.manual_seed(0)
            options = shrunk_options(kind, size)
            model = kind(**options).train()
            yield from _with_inputs(model, options, kind)

    return candidates


def shrunk_options(kind: type, size: Size) -> dict[str, Any]:
    """The constructor's defaults, made small."""
    shrinker, options = Shrinker(size), {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        default = parameter.default
        if default is inspect.Parameter.empty or default is None:
            continue
        if re.search(r"axes_dims?|rope_dims|rope_dim_list", name) and isinstance(default, (list, tuple)):
            options[name] = type(default)(_even_parts(default, size.head))
        else:
            options[name] = size.image // 4 if name == "sample_size" else shrinker.value(name, default)
    return options


def _even_parts(values: Any, total: int) -> list[int]:
    """Even parts of a head, as many as there were."""
    rest = [max(2, total * v // sum(values) // 2 * 2) for v in values[1:]]
    return [total - sum(rest), *rest]


def _with_inputs(model: nn.Module, options: dict[str, Any], kind: Any) -> Iterator[tuple[nn.Module, Any]]:
    names = inspect.signature(kind.forward).parameters
    main = next((n for n in ("hidden_states", "sample", "x", "inputs_embeds") if n in names), None)
    if main is None:
        return
    channels = next((options[n] for n in ("in_channels", "num_channels", "in_dim") if isinstance(options.get(n), int)), 4)
    side = 16
    shapes = ((2, channels, side, side), (2, channels, 5, side, side), (2, 64, channels), (2, channels, 64),
              (2, 5, channels, side, side), (2, 64, options.get("hidden_size", 64)))  # fmt: skip
    for shape in shapes:
        torch.manual_seed(0)
        sample = {main: torch.randn(shape), **_conditions(options, names)}
        yield model, sample


def _conditions(options: dict[str, Any], names: Any) -> dict[str, Any]:
    width = next((v for n, v in options.items() if re.search(CONDITION, n) and isinstance(v, int)), 64)
    axes = len(options.get("axes_dims_rope", options.get("axes_dim", (0, 0, 0))))
    made = {
        "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": torch.randn(2, TEXT, width),
        "encoder_attention_mask": torch.ones(2, TEXT, dtype=torch.bool),
        "encoder_hidden_states_mask": torch.ones(2, TEXT, dtype=torch.bool),
        "pooled_projections": torch.randn(2, options.get("pooled_projection_dim", 64)),
        "img_ids": torch.zeros(64, axes),
        "txt_ids": torch.zeros(TEXT, axes),
        "guidance": torch.ones(2) if options.get("guidance_embeds") else None,
        "class_labels": torch.tensor([0, 1]) if options.get("num_embeds_ada_norm") else None,
        "controlnet_cond": torch.randn(2, 3, 128, 128) if "sample" in names else torch.randn(2, 64, 4),
        "img_shapes": [[(1, 8, 8)]] * 2,
        "num_frames": 5 if "rope_interpolation_scale" in names else None,
        "height": 4 if "rope_interpolation_scale" in names else None,
        "width": 4 if "rope_interpolation_scale" in names else None,
        "fps": 8 if "condition_mask" in names else None,
        "target_size": torch.tensor([[64, 64]] * 2),
        "original_size": torch.tensor([[64, 64]] * 2),
        "crop_coords": torch.zeros(2, 2),
        "added_time_ids": torch.ones(2, 3),
        "proj_embedding": torch.randn(2, options.get("embedding_dim", 64)),
    }
    return {n: v for n, v in made.items() if n in names and v is not None}


def of_monai(everything: bool) -> Iterator[Entry]:
    import monai.networks.nets as nets

    found = {getattr(nets, n): n for n in sorted(dir(nets)) if n[0].isupper() and isinstance(getattr(nets, n), type)}
    names = sorted({kind.__name__ for kind in found if issubclass(kind, nn.Module)})
    names = [n for n in names if hasattr(nets, n) and not re.search(PARTS_OF_OTHERS, n)]
    for name in names if everything else spread(names, 28):
        yield Entry(f"{name} (MONAI)", "MONAI", _monai(name))


PARTS_OF_OTHERS = (
    r"^Bert|^SE(Net|Res)|DenseNet(1|2)|Block|Pooler|Bottleneck|Merging|FullyConnected|Topology|Adapter|Features|Encoder$"
)
GIVEN: dict[str, Any] = {
    "in_channels": 1, "out_channels": 2, "num_classes": 3, "classes": 3, "label_nc": 2, "kernel_size": (3, 3, 3),
    "upsample_kernel_size": (2, 2), "patch_size": 8, "model_name": "efficientnet-b0", "backbone": "resnet18",
    "num_channel_initial": 4, "extract_levels": (0, 1, 2), "depth": 2, "hidden_channels": [16, 16],
    "encode_channels": [16, 8], "decode_channels": [8, 16], "latent_size": 8, "in_planes": 8, "planes": 4,
    "feature_size": 12, "init_filters": 8, "features": (4, 4, 8, 8, 16, 4), "hidden_size": 64, "mlp_dim": 128,
    "num_layers": 2, "num_heads": 4, "num_tokens": 32, "max_seq_len": 64, "attn_layers_dim": 32,
    "attn_layers_depth": 2, "attn_layers_heads": 4, "num_d": 2, "num_layers_d": 2, "unet_out_channels": 8,
    "final_conv_channels": (8,), "pretrained": False, "dropout_prob": 0.1, "hyena_stages": (True,) * 4,
    "num_res_units": 1, "num_mixed_layers": 1, "num_language_layers": 1, "num_vision_layers": 1,
}  # fmt: skip


def _monai(name: str) -> Builds:
    def candidates() -> Iterator[tuple[nn.Module, Any]]:
        import monai.networks.nets as nets

        kind: Any = getattr(nets, name)
        last: Exception = LookupError("no inputs")
        built = False
        for dims, side, more in itertools.product((2, 3), (64, 96), (0, 1)):
            try:
                torch.manual_seed(0)
                model = kind(**_monai_options(kind, dims, side if dims == 2 else side // 2, more)).train()
            except Exception as error:  # noqa: BLE001 - another choice may do
                last = error
                continue
            built = True
            yield from _monai_inputs(model, kind, dims, side if dims == 2 else side // 2)
        if not built:
            raise last

    return candidates


def _monai_options(kind: Any, dims: int, side: int, more: int) -> dict[str, Any]:
    """`more` tries the other number of strides."""
    shape = (1, *(side,) * dims)
    given = {**GIVEN, "spatial_dims": dims, "channels": (8, 16, 32), "strides": (2, 2, 1)[: 2 + more], "img_size": side,
             "image_size": (side,) * dims, "in_shape": shape, "input_image_size": (side,) * dims, "input_shape": shape[1:],
             "latent_shape": (8,), "start_shape": (8, *(side // 4,) * dims), "out_shape": (2,),
             "strides_": None}  # fmt: skip
    names = inspect.signature(kind.__init__).parameters
    chosen = {n: given[n] for n, p in names.items() if n in given and _is_asked(n, p)}
    if "upsample_kernel_size" in chosen:
        chosen.update(strides=(1, 2, 2))
    if "img_size" in chosen and "feature_size" in names:
        chosen.update(img_size=(side,) * dims)
    return chosen


def _is_asked(name: str, parameter: inspect.Parameter) -> bool:
    small = ("feature_size", "init_filters", "spatial_dims", "pretrained", "dropout_prob", "in_channels", "out_channels")
    return parameter.default is inspect.Parameter.empty or name in small


def _monai_inputs(model: nn.Module, kind: Any, dims: int, side: int) -> Iterator[tuple[nn.Module, Any]]:
    names = [n for n in inspect.signature(kind.forward).parameters if n != "self"]
    for channels, rank in itertools.product((1, 3, 2, 8), (dims, 0)):
        torch.manual_seed(0)
        shape = (2, channels, *(side,) * rank) if rank else (2, channels)
        sample = {names[0]: torch.randn(shape)}
        if "timesteps" in names:
            sample["timesteps"] = torch.tensor([3, 5])
        for other in ("seg", "controlnet_cond", "fixed"):
            if other in names and rank and other != "controlnet_cond":
                sample[other] = torch.randn(2, 2 if other == "seg" else channels, *(side,) * rank)
        yield model, sample
    if names[0] == "x":
        yield model, {names[0]: torch.randint(0, 16, (2, 32))}
