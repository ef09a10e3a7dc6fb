"""Measures tokens per second of a forward and backward pass with images, for our model and Megatron-Bridge's.

    torchrun --nproc-per-node 1 benchmarks/vision.py --site SITE "qwen2.5-vl-7b layers=12" "qwen3-vl-8b layers=12"
    torchrun --nproc-per-node 1 benchmarks/vision.py --only ours --device cpu --tokens 96 --grid 4 "tiny-vl"

A row has three images and text, and everything is trained, the tower too. ``layers`` cuts the text alone. Weights are
random, and the libraries are measured in turns, each by its defaults. Our tower is transformers' own; Megatron-Bridge
has another one for Qwen3-VL. SITE is as for ``peers.py``, and Megatron-Bridge needs megatron-core 0.19.2. Each line of
JSON is one measurement, for a file in ``results``. Tokens of images count in ``tokens_s``.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import report
from libraries import MegatronBridge
from steps import Build, fill, in_turns, step_arguments, text, timed_steps
from transformers import AutoConfig, PretrainedConfig

import mcore_bridge as mb

MERGED = 2
"""The number of patches on each side of the square that becomes one token."""
TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128_000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    **TOKENS,
}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "deepstack_visual_indexes": [8, 16, 24],
        "num_position_embeddings": 2304,
    },
    **TOKENS,
}
TINY: dict[str, Any] = {
    **QWEN3_VL,
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
    "text_config": {
        **QWEN3_VL["text_config"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 1024,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": 4,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
}
MODELS = {"qwen2.5-vl-7b": QWEN2_5_VL, "qwen3-vl-8b": QWEN3_VL, "tiny-vl": TINY}


def main() -> None:
    """Each case by each library, in turns."""
    parser = step_arguments(__doc__, BUILDS)
    parser.add_argument("--images", type=int, default=3, help="in the row")
    parser.add_argument("--grid", type=int, default=48, help="patches on each side of an image")
    arguments = parser.parse_args()
    for fields, build in in_turns(arguments, BUILDS, config_of):
        measure(build(), arguments, **fields)


def measure(model: Any, arguments: Namespace, **fields: Any) -> None:
    """One report."""
    fill(model)
    config = config_of(fields["case"].split()[0], None)
    inputs = batch(config, arguments)
    seen = int((inputs["input_ids"] == config.image_token_id).sum())
    steps = timed_steps(model, inputs, arguments.tokens, arguments.repeats)
    report(**fields, images=arguments.images, image_tokens=seen, **steps)


def config_of(name: str, layers: int | None) -> PretrainedConfig:
    """The HF config of a composite, with ``layers`` layers of text, if given."""
    fields = dict(MODELS[name])
    own = {"num_hidden_layers": layers} if layers else {}
    fields["text_config"] = {**fields["text_config"], "dtype": "bfloat16", **own}
    return AutoConfig.for_model(**fields, dtype="bfloat16", tie_word_embeddings=False)


def batch(config: PretrainedConfig, arguments: Namespace) -> dict[str, Any]:
    """The inputs of a step: one row of random text that begins with images, and their patches."""
    vision, device = config.vision_config, arguments.device
    inputs = text(arguments.tokens, device)
    inputs["input_ids"] = inputs["labels"] = 10 + inputs["labels"] % 900  # no token of an image
    num_patches, length = arguments.grid**2, (arguments.grid // MERGED) ** 2
    if (needed := arguments.images * (length + 2)) > arguments.tokens:
        raise SystemExit(f"expected --tokens for {needed} tokens of images, found {arguments.tokens}")
    for number in range(arguments.images):
        start = number * (length + 2)
        inputs["input_ids"][0, start] = config.vision_start_token_id
        inputs["input_ids"][0, start + 1 : start + 1 + length] = config.image_token_id
        inputs["input_ids"][0, start + 1 + length] = config.vision_end_token_id
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator(device).manual_seed(2)
    patches = torch.randn(arguments.images * num_patches, width, generator=generator, device=device)
    sizes = torch.tensor([[1, arguments.grid, arguments.grid]] * arguments.images, device=device)
    return {**inputs, "pixel_values": patches.bfloat16(), "image_grid_thw": sizes}


def ours(folder: Path, sizes: dict[str, int], arguments: Namespace) -> Any:
    """By this library."""
    build = partial(mb.build_model, folder, dtype=torch.bfloat16, vision="train", load_weights=False)
    (model,) = build(dims=mb.ParallelDims(**sizes), device=arguments.device, backend=arguments.backend)
    return model


def theirs(folder: Path, sizes: dict[str, int], arguments: Namespace) -> Any:
    """By Megatron-Bridge."""
    return MegatronBridge(folder, sizes, arguments.device).models[0]


BUILDS: dict[str, Build[Any]] = {"ours": ours, "megatron_bridge": theirs}


if __name__ == "__main__":
    main()
