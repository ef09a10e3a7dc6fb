"""Families that transformers lacks, each with an equivalent family of transformers: its twin."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from mcore_bridge.architecture import read_hf
from tests.support import bailing

State = dict[str, Tensor]


@dataclass(frozen=True)
class Twin:
    """An equivalent family of transformers: functions that translate a family's config and tensors to it and back."""

    config: Callable[[Any], Any]
    """The config of the equivalent family."""
    named: Callable[[State], State] = dict
    """The equivalent family's tensors under the names of the family."""
    unnamed: Callable[[State, Any], State] = lambda state, hf: state
    """The family's tensors under the names of the equivalent family."""


def _called(model_type: str) -> Callable[[Any], Any]:
    return lambda hf: AutoConfig.for_model(**{**hf.to_dict(), "model_type": model_type})


def _of_ling(hf: Any) -> Any:
    fields = hf.to_dict()
    return bailing.twin({**fields.get("rope_parameters", {}), **fields})  # transformers 5 keeps some fields there


TWINS = {
    "mimo": Twin(_called("qwen2")),
    "kimi_k2": Twin(_called("deepseek_v3")),
    "bailing_moe_v2": Twin(_of_ling, bailing.renamed, bailing.unnamed),
}


def read(model_type: str, fields: Mapping[str, Any]) -> Any:
    """The config of a family that transformers lacks, as the library reads it from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**fields, "model_type": model_type}))
        return read_hf(folder)
