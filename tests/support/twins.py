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
from mcore_bridge.config.hf import with_fields
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


_EXAONE = (
    *(
        ("model.embed_tokens.", "transformer.wte."),
        ("model.layers.", "transformer.h."),
        ("model.norm.", "transformer.ln_f."),
    ),
    *((".self_attn.o_proj.", ".attn.attention.out_proj."), (".self_attn.", ".attn.attention.")),
    *((".input_layernorm.", ".ln_1."), (".post_attention_layernorm.", ".ln_2.")),
    *((".gate_proj.", ".c_fc_0."), (".up_proj.", ".c_fc_1."), (".down_proj.", ".c_proj.")),
)
"""Parts of names of a llama, each with the part in EXAONE 3."""


def _as_exaone(name: str) -> str:
    for old, new in _EXAONE:
        name = name.replace(old, new)
    return name


def _from_exaone(name: str) -> str:
    for old, new in _EXAONE:
        name = name.replace(new, old)
    return name


def _of_sarvam(hf: Any) -> Any:
    fields = hf.to_dict()
    whole = {"partial_rotary_factor": 1.0}  # a glm4_moe rotates half of each head by default
    rope = {"rope_parameters": fields["rope_parameters"] | whole} if fields.get("rope_parameters") else whole
    return AutoConfig.for_model(**{**fields, **rope, "model_type": "glm4_moe", "use_qk_norm": True})


TWINS = {
    "exaone": Twin(
        _called("llama"),
        lambda state: {_as_exaone(name): tensor for name, tensor in state.items()},
        lambda state, hf: {_from_exaone(name): tensor for name, tensor in state.items()},
    ),
    "sarvam_moe": Twin(_of_sarvam, bailing.renamed, bailing.unnamed),
    "sarvam_mla": Twin(lambda hf: _called("deepseek_v3")(with_fields(hf, {"head_dim": hf.qk_rope_head_dim}))),
    "mimo": Twin(_called("qwen2")),
    "kimi_k2": Twin(_called("deepseek_v3")),
    "bailing_moe_v2": Twin(_of_ling, bailing.renamed, bailing.unnamed),
}


def read(model_type: str, fields: Mapping[str, Any]) -> Any:
    """The config of a family that transformers lacks, as the library reads it from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**fields, "model_type": model_type}))
        return read_hf(folder)
