"""What ``grpo.py`` trains: prompts, their images, and how good a response is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
PROMPTS, GROUP, PROMPT, RESPONSE = 4, 8, 6, 10
"""Prompts of a step, responses to each of them, and tokens of both."""
SENTENCES = (
    "The best thing about a long walk in the morning is",
    "My grandmother used to say that good bread needs",
    "When the train stopped in the middle of the night,",
    "A student who wants to learn mathematics should first",
)
"""What a checkpoint continues: as many as ``PROMPTS``, each of at least ``PROMPT`` tokens."""


class Task:
    """What is said, and how good it is: random prompts for a random model, or sentences for a checkpoint."""

    def __init__(self, folder: str | None) -> None:
        self.hf = AutoConfig.from_pretrained(folder) if folder else AutoConfig.for_model(**CONFIG)
        self._prompts: Tensor | None = None
        if folder is None:
            self._is_good = torch.arange(self.hf.vocab_size) % 2 == 0
            return
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._prompts = torch.tensor([tokenizer(text).input_ids[:PROMPT] for text in SENTENCES])
        words = [tokenizer.decode([token]) for token in range(self.hf.vocab_size)]
        self._is_good = torch.tensor(["e" in word for word in words])

    def prompts(self, step: int) -> Tensor:
        """``[PROMPTS, PROMPT]`` of tokens."""
        if self._prompts is not None:
            return self._prompts
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, self.hf.vocab_size, (PROMPTS, PROMPT), generator=generator)

    def images(self, step: int) -> list[dict[str, Tensor]]:
        """For each prompt what a processor makes of its image; empty without images."""
        return []

    def rewards(self, responses: Tensor) -> Tensor:
        """Of each of ``responses`` ``[batch, tokens]``, the share of good tokens."""
        return self._is_good[responses].float().mean(1)


class ImageTask(Task):
    """Half of the prompts have a light image of noise, and half a dark one: what is good to say depends on it."""

    def __init__(self, folder: str) -> None:
        self.hf = hf = AutoConfig.from_pretrained(folder)
        self._token, self._vision = hf.image_token_id, hf.vision_config
        self._ends = hf.vision_start_token_id, hf.vision_end_token_id
        special = {self._token, hf.video_token_id, *self._ends}
        self._text = torch.tensor([token for token in range(hf.text_config.vocab_size) if token not in special])
        self._light = torch.arange(PROMPTS) % 2 == 0

    def prompts(self, step: int) -> Tensor:
        """``[PROMPTS, PROMPT]`` of tokens: an image of two features, and random text on both sides."""
        generator = torch.Generator().manual_seed(step)
        places = torch.randint(0, len(self._text), (PROMPTS, PROMPT), generator=generator)
        prompts = self._text[places]
        prompts[:, 1:5] = torch.tensor([self._ends[0], self._token, self._token, self._ends[1]])
        return prompts

    def images(self, step: int) -> list[dict[str, Tensor]]:
        """Its pixels by patches, its grid of patches, and which tokens of the prompt stand for it."""
        generator = torch.Generator().manual_seed(step)
        merged = self._vision.spatial_merge_size
        size = 3 * self._vision.temporal_patch_size * self._vision.patch_size**2
        types = (self.prompts(step) == self._token).long()
        return [
            {
                "pixel_values": torch.randn(2 * merged**2, size, generator=generator) * 0.3 + (0.7 if light else -0.7),
                "image_grid_thw": torch.tensor([[1, merged, 2 * merged]]),
                "mm_token_type_ids": types[prompt : prompt + 1],
            }
            for prompt, light in enumerate(self._light)
        ]

    def rewards(self, responses: Tensor) -> Tensor:
        """Of each of ``responses`` ``[batch, tokens]``, the share of even tokens, or of odd ones for a dark image."""
        light = self._light.repeat_interleave(GROUP)[:, None]
        return ((responses % 2 == 0) == light).float().mean(1)


def followed(image: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """What stands for an image in a whole row: only in the prompt, since a response may have such tokens, too."""
    types = torch.nn.functional.pad(image["mm_token_type_ids"], (0, RESPONSE))
    return {name: value.to(device) for name, value in {**image, "mm_token_type_ids": types}.items()}
