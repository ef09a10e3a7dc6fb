"""What lies beside weights in a HF folder: the config, and the files of the tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from mcore_bridge.rules.mapping import matches

_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("chat_template*", "*.jinja"),
)
_COMPANIONS = ("generation_config.json", "preprocessor_config.json", "*.py")
"""And code: of the model, the tokenizer and the processor, and what they import."""


def copy_companions(
    source: str | os.PathLike[str] | None, target: Path, *others: str, kept: Collection[str] = ()
) -> None:
    """Copy the files of the tokenizer and of the model's own code, and what ``others`` match.

    Args:
        source: the folder that the model came from; there is nothing to copy without one.
        others: ``fnmatch`` patterns. Indexes of weights are left out.
        kept: names of files that are there already, and stay. Where they have a tokenizer, no file of another one
            comes: an old ``special_tokens_map.json`` would undo what a new ``tokenizer_config.json`` says.
    """
    tokenizer = () if any(matches(name, _TOKENIZER) for name in kept) else _TOKENIZER
    for path in Path(source).iterdir() if source is not None else ():
        wanted = matches(path.name, (*tokenizer, *_COMPANIONS, *others)) and path.name not in kept
        if wanted and path.is_file() and not path.name.endswith(".index.json"):
            shutil.copy2(path, target / path.name)


def config_places(source: Path, found: Path) -> tuple[Path, ...]:
    """Where the HF config of a checkpoint may be: in it, or where verl writes it.

    Args:
        source: the folder as it was named.
        found: that of the iteration in it; or ``source``.
    """
    return tuple(dict.fromkeys((found, source, source / "huggingface", found.parent / "huggingface")))


def first_with_config(places: Iterable[Path]) -> Path | None:
    """The first of these folders that has an HF config."""
    return next((place for place in places if (place / "config.json").is_file()), None)
