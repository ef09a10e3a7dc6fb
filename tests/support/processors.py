"""Files of a composite's folder that vLLM reads beside the config: an image processor, and a tokenizer of words."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.support.seeing import SPECIAL

TOKENS = {
    "<|vision_start|>": SPECIAL["vision_start_token_id"],
    "<|vision_end|>": SPECIAL["vision_end_token_id"],
    "<|image_pad|>": SPECIAL["image_token_id"],
    "<|video_pad|>": SPECIAL["video_token_id"],
}
"""The ids of special tokens in small configs, by the published names of the tokens."""
_VIDEOS_OF_3 = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")


def processor(hf: Any) -> Any:
    """A processor like Qwen's, with transformers' defaults. Words other than ``TOKENS`` are ``w`` and their id.

    Args:
        hf: config of the composite.
    """
    special = {number: name for name, number in TOKENS.items()}
    words = {special.get(number, f"w{number}"): number for number in range(hf.text_config.vocab_size)}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="w0", pad_token="w0", eos_token="w1", extra_special_tokens=list(TOKENS)
    )
    kind, video = ("Qwen3VL", "Qwen3VL") if hf.model_type in _VIDEOS_OF_3 else ("Qwen2_5_VL", "Qwen2VL")
    return getattr(transformers, f"{kind}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{video}VideoProcessor")(),
    )


def folder_of(hf: Any, folder: Path) -> Path:
    """Write the config of a composite and its processor."""
    hf.save_pretrained(folder)
    processor(hf).save_pretrained(folder)
    return folder


def prompts(vocab_size: int) -> list[tuple[str, list[Any]]]:
    """Texts with images of noise: two images, none, and one that is resized."""
    from PIL import Image

    generator = torch.Generator().manual_seed(5)
    made = []
    for parts in ([3, (56, 84), 4, (112, 56), 6], [14], [5, (70, 90), 9]):
        words: list[str] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                ids = torch.randint(10, vocab_size, (part,), generator=generator).tolist()
                words += [f"w{number}" for number in ids]
                continue
            pixels = torch.randint(0, 256, (*part, 3), generator=generator, dtype=torch.uint8)
            images.append(Image.fromarray(pixels.numpy()))
            words += ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
        made.append((" ".join(words), images))
    return made
