"""Write a small checkpoint with transformers: every value random, none zero.

python examples/make_checkpoint.py FOLDER            # Qwen3, some 100 MB in several shards
python examples/make_checkpoint.py FOLDER --images   # Qwen3-VL, 2 MB, for grpo.py --images; needs transformers 5.17
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def text() -> Any:
    """Qwen3, of a size that is read and written in shards."""
    return Qwen3ForCausalLM(
        Qwen3Config(
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
    )


def with_images() -> Any:
    """Qwen3-VL, with the tokens of images in a vocabulary of 256."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
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
    )
    return Qwen3VLForConditionalGeneration(config)


def main() -> None:
    """Norms are drawn around one: all ones would look right in each other's places."""
    folder = Path(sys.argv[1])
    generator = torch.Generator().manual_seed(0)
    model = (with_images() if "--images" in sys.argv[2:] else text()).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name and "bias" not in name else 0.02 * values)
    model.save_pretrained(folder, max_shard_size="30MB")
    files = sorted(folder.glob("*.safetensors"))
    print(f"{folder}: {sum(file.stat().st_size for file in files) / 1e6:.0f} MB in {len(files)} files")


if __name__ == "__main__":
    main()
