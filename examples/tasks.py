"""What ``grpo.py`` trains: prompts, their images, and how good a response is."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

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
PROMPT = 6
"""Tokens of a random prompt."""


class Task:
    """What a random model says: even tokens are good. Prompts are random, too."""

    response = 10
    """Tokens of a response."""

    def __init__(self, hf: PretrainedConfig, num_prompts: int, group: int) -> None:
        self.hf, self.num_prompts, self.group = hf, num_prompts, group

    def prompts(self, step: int) -> Tensor:
        """``[num_prompts, PROMPT]`` of tokens."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, self.hf.vocab_size, (self.num_prompts, PROMPT), generator=generator)

    def images(self, step: int) -> list[dict[str, Tensor]]:
        """For each prompt what a processor makes of its image; empty without images."""
        return []

    def rewards(self, responses: Tensor, step: int) -> Tensor:
        """``[batch]``: of each of ``responses`` ``[batch, tokens]``, the share of even tokens."""
        return (responses % 2 == 0).float().mean(1)


class SumTask(Task):
    """A checkpoint adds numbers of two digits. A response is good if it begins with the sum."""

    response = 6

    def __init__(self, hf: PretrainedConfig, num_prompts: int, group: int) -> None:
        super().__init__(hf, num_prompts, group)
        self._tokenizer = AutoTokenizer.from_pretrained(hf.name_or_path)

    def prompts(self, step: int) -> Tensor:
        """``[num_prompts, tokens]``: questions in the words of the checkpoint's chats, and the begin of an answer."""
        return torch.tensor([self._tokens(*pair) for pair in self._pairs(step)])

    def rewards(self, responses: Tensor, step: int) -> Tensor:
        """``[batch]``: 1 for each of ``responses`` ``[batch, tokens]`` whose first number is the sum, else 0."""
        texts = self._tokenizer.batch_decode(responses)
        sums = [sum(pair) for pair in self._pairs(step) for _ in range(self.group)]
        return torch.tensor([float(_first_number(text) == right) for text, right in zip(texts, sums, strict=True)])

    def _pairs(self, step: int) -> list[tuple[int, int]]:
        chance = random.Random(step)
        return [(chance.randint(10, 49), chance.randint(10, 49)) for _ in range(self.num_prompts)]

    def _tokens(self, first: int, second: int) -> Sequence[int]:
        question, answer = f"What is {first} + {second}?", f"{first} + {second} ="
        if self._tokenizer.chat_template:
            chat = [{"role": "user", "content": question}]
            begin = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        else:
            begin = f"{question} "
        return self._tokenizer(f"{begin}{answer}", add_special_tokens=False).input_ids


def _first_number(text: str) -> int | None:
    found = re.match(r"\s*(\d+)", text)
    return int(found[1]) if found else None


class ImageTask(Task):
    """Half of the prompts have a light image of noise, and half a dark one: what is good to say depends on it."""

    def __init__(self, hf: PretrainedConfig, num_prompts: int, group: int) -> None:
        super().__init__(hf, num_prompts, group)
        self._token, self._vision = hf.image_token_id, hf.vision_config
        self._ends = hf.vision_start_token_id, hf.vision_end_token_id
        special = {self._token, hf.video_token_id, *self._ends}
        self._text = torch.tensor([token for token in range(hf.text_config.vocab_size) if token not in special])
        self._light = torch.arange(self.num_prompts) % 2 == 0

    def prompts(self, step: int) -> Tensor:
        """``[num_prompts, PROMPT]`` of tokens: an image of two features, and random text on both sides."""
        generator = torch.Generator().manual_seed(step)
        places = torch.randint(0, len(self._text), (self.num_prompts, PROMPT), generator=generator)
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

    def rewards(self, responses: Tensor, step: int) -> Tensor:
        """``[batch]``: as ``Task``, but for a dark image odd tokens are good."""
        light = self._light.repeat_interleave(self.group)[:, None]
        return ((responses % 2 == 0) == light).float().mean(1)


def followed(image: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """What stands for an image in a whole row: only in the prompt, since a response may have such tokens, too."""
    types = torch.nn.functional.pad(image["mm_token_type_ids"], (0, Task.response))
    return {name: value.to(device) for name, value in {**image, "mm_token_type_ids": types}.items()}
