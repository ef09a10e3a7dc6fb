"""What lies beside weights in a HF folder: the config, and the files of the tokenizer."""

from __future__ import annotations

import copy
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_bridge.weights.dtypes import dtype_name

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from mcore_bridge.weights.provenance import Provenance

_COMPANIONS = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("generation_config.json", "preprocessor_config.json", "chat_template*", "*.jinja"),
    "*.py",  # of the model, the tokenizer and the processor; and what they import
)


def copy_companions(source: str | os.PathLike[str] | None, target: Path, *others: str) -> None:
    """Copy the files of the tokenizer and of the model's own code, and what ``others`` match.

    Args:
        source: the folder that the model came from; there is nothing to copy without one.
        others: ``fnmatch`` patterns. Indexes of weights are left out.
    """
    for path in Path(source).iterdir() if source is not None else ():
        wanted = any(fnmatchcase(path.name, pattern) for pattern in (*_COMPANIONS, *others))
        if wanted and path.is_file() and not path.name.endswith(".index.json"):
            shutil.copy2(path, target / path.name)


def config_in(provenance: Provenance, dtype: torch.dtype) -> PretrainedConfig:
    """A copy of the HF config that says that most weights are of ``dtype``."""
    hf = copy.deepcopy(provenance.hf)
    setattr(hf, "dtype" if hasattr(hf, "dtype") else "torch_dtype", dtype_name(dtype))
    return hf
