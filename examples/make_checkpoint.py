"""Write a small checkpoint with transformers: every value random, none zero.

python examples/make_checkpoint.py FOLDER            # Qwen3, some 100 MB in several shards
python examples/make_checkpoint.py FOLDER --images   # Qwen3-VL, 2 MB, for grpo.py --images; needs transformers 5.17
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import torch
from transformers import Qwen3Config

from mcore_bridge.commands.draw import draw


def text() -> Any:
    """Qwen3, of a size that is read and written in shards."""
    return Qwen3Config(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def with_images() -> Any:
    """Qwen3-VL, with the tokens of images in a vocabulary of 256."""
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "rope_parameters": rope,
            "rope_scaling": rope,  # transformers 4 reads it
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 8,
            "num_position_embeddings": 16,
            "out_hidden_size": 128,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=250,
        video_token_id=251,
        vision_start_token_id=252,
        vision_end_token_id=253,
        tie_word_embeddings=False,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def main() -> None:
    """As ``mcore-bridge draw`` does, but in small files."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the new folder")
    parser.add_argument("--images", action="store_true", help="a model of images and text")
    arguments = parser.parse_args()
    config = with_images() if arguments.images else text()
    drawn = draw(config, arguments.folder, dtype=torch.bfloat16, max_shard_bytes=30_000_000)
    count = sum(name.endswith(".safetensors") for name in drawn.files)
    print(f"{arguments.folder}: {drawn.bytes / 1e6:.0f} MB in {count} files")


if __name__ == "__main__":
    main()
