"""Write a small Qwen3 checkpoint with transformers: some 100 MB in several shards, every value random, none zero.

python examples/make_checkpoint.py FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIG = Qwen3Config(
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


def main() -> None:
    """Norms are drawn around one: all ones would look right in each other's places."""
    folder = Path(sys.argv[1])
    generator = torch.Generator().manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * values if "norm" in name else 0.02 * values)
    model.save_pretrained(folder, max_shard_size="30MB")
    files = sorted(folder.glob("*.safetensors"))
    print(f"{folder}: {sum(file.stat().st_size for file in files) / 1e6:.0f} MB in {len(files)} files")


if __name__ == "__main__":
    main()
