"""Language models around the text decoders of composites, for which transformers has only the decoder.

Importing this lets ``AutoModelForCausalLM`` find them.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

COMPOSITES = {
    "glm4v_moe_text": "glm4v_moe",
    "glm5_next_text": "glm5_next",
    "glm4v_text": "glm4v",
    "hunyuan_vl_text": "hunyuan_vl",
    "muse_glimmer_text": "muse_glimmer",
    "qwen2_5_omni_text": "qwen2_5_omni",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_omni_moe_text": "qwen3_omni_moe",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "qwen3_vl",
    "step3p5": "step3p7",
}
"""The composite of each text model, which has the names of tensors in files."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SPEAKS_4 = transformers.__version__.startswith("4.")


class TextHalf(PreTrainedModel):  # type: ignore[misc]  # without types
    """The decoder as ``model``, and a head."""

    base_model_prefix = "model"
    _tied_weights_keys = [_HEAD] if _SPEAKS_4 else {_HEAD: _EMBEDDING}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MODEL_MAPPING[self.config_class](config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, **options: Any) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids=input_ids, **options).last_hidden_state)
        if self.config.model_type == "muse_glimmer_text":  # as in MuseGlimmerForConditionalGeneration.forward
            cap = self.config.final_logit_softcapping
            logits = torch.tanh(logits * self.config.output_multiplier / cap) * cap
        return CausalLMOutput(logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Any, **options: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, **options}  # which peft looks for

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def _register(model_type: str, composite: str) -> None:
    config = CONFIG_MAPPING[model_type]
    name = "Step3p5" if model_type == "step3p5" else config.__name__.removesuffix("Config")
    made = type(f"{name}ForCausalLM", (TextHalf,), {"config_class": config})
    AutoModelForCausalLM.register(config, made, exist_ok=True)
    if not _SPEAKS_4:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )

        conversion = get_checkpoint_conversion_mapping(composite)
        if composite == "step3p7":  # without the prefixes of a composite
            conversion = [step for step in conversion if re.search("moe|share_expert", str(step.source_patterns))]
        if conversion is not None and ("moe" in composite or composite in ("step3p7", "glm5_next")):
            register_checkpoint_conversion_mapping(made.__name__, conversion)


if "mistral4" in CONFIG_MAPPING:
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM  # in no list, as it has images

    AutoModelForCausalLM.register(CONFIG_MAPPING["mistral4"], Mistral4ForCausalLM, exist_ok=True)
if _SPEAKS_4:  # transformers' own list lacks its class
    CONFIG_MAPPING.register(CONFIG_MAPPING["glm4v_moe_text"].model_type, CONFIG_MAPPING["glm4v_moe_text"])
if "qwen3_omni_moe" in CONFIG_MAPPING:  # whose decoders no list has, and in 4.57 nor their configs
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerTextModel
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

    for _decoder in (Qwen2_5OmniThinkerTextModel, Qwen3OmniMoeThinkerTextModel):
        CONFIG_MAPPING.register(_decoder.config_class.model_type, _decoder.config_class, exist_ok=True)
        MODEL_MAPPING.register(_decoder.config_class, _decoder, exist_ok=True)
if "step3p5" in CONFIG_MAPPING:
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    MODEL_MAPPING.register(CONFIG_MAPPING["step3p5"], Step3p7TextModel, exist_ok=True)
if "minimax_m3_vl_text" in CONFIG_MAPPING:  # it has a class, whose tensors have names of files only in a composite
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    _OTHERS = re.compile("language_model|vision_tower|projector|patch_merge")
    _steps = get_checkpoint_conversion_mapping("minimax_m3_vl")
    register_checkpoint_conversion_mapping(
        "MiniMaxM3VLForCausalLM", [step for step in _steps if not _OTHERS.search(str(step.source_patterns))]
    )
for _half, _composite in COMPOSITES.items():
    if _half in CONFIG_MAPPING:
        _register(_half, _composite)


def published_shape(hf: Any, name: str, shape: torch.Size) -> torch.Size:
    """The shape of a tensor in published files. Experts of Qwen3-VL are transposed there; transformers 5 reads this."""
    if hf.model_type == "qwen3_vl_moe_text" and ".experts." in name and not _SPEAKS_4:
        return torch.Size((shape[0], shape[2], shape[1]))
    return shape


WRITTEN = {
    "kimi_linear": (".block_sparse_moe.", ".mlp.", "mlp_layer_types", "dense"),
    "bailing_hybrid": (".attention.dense.", ".attention.o_proj.", "layer_types", "linear_attention"),
    "olmo_hybrid": (".feedforward_layer_norm.", ".post_attention_layernorm.", "layer_types", "full_attention"),
}
"""A part of names that transformers writes, and its published form, in layers of which a field of the config has this
kind. Engines read published names alone.
"""


_HY_V4 = (
    (r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r".\1.hc_pre."),
    (r"\.hc_pre\.hc_head\.", ".hc_head."),
    (r"\.(mlp|shared_experts)\.linear_gate\.", r".\1.gate_proj."),
)
"""Names of Hunyuan 4 that transformers 5.24 writes otherwise than it reads them, as patterns."""


_DEEPSEEK_V4 = (
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"^model\.(hc_head)\.hc", r"\1"),
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.", ""),
)
"""Names of DeepSeek V4 that transformers 5.24 writes otherwise than it reads them, as patterns."""
_OTHER = {"hy_v4": _HY_V4, "deepseek_v4": _DEEPSEEK_V4}


def random_experts(hf: Any, generator: torch.Generator) -> torch.Tensor:
    """A table with different experts for each token, in no order; transformers begins with zeros."""
    ranked = torch.rand(hf.vocab_size, hf.n_routed_experts, generator=generator).argsort()
    return ranked[:, : hf.num_experts_per_tok].contiguous()


def hashes(hf: Any, name: str) -> torch.Tensor:
    """The integers of an embedding of n-grams, under their name in files. transformers makes them of the config."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    layer = int(name.split(".")[2])
    with torch.device("cpu"):
        made = Qwen4ExpTextNGramEmbedding(hf, hf.ple_embed_dim, layer, hf.ple_layer_ids.index(layer + 1))
    return dict(made.named_buffers())[name.rpartition(".")[2]]


def published_names(hf: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors under their names in published files, which transformers reads but does not write for some families."""
    return {_published(hf, name): tensor for name, tensor in {**state, **_parted(hf, state)}.items()}


def _parted(hf: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Convolutions of OLMo Hybrid in their parts. transformers cuts each into three equal ones."""
    if hf.model_type != "olmo_hybrid":
        return {}
    found, keys = {}, hf.linear_num_key_heads * hf.linear_key_head_dim
    for name in state:
        if name.endswith(".q_conv1d.weight"):
            names = [name.replace(".q_", f".{part}_") for part in "qkv"]
            whole = torch.cat([state[part] for part in names])
            found |= zip(names, whole.split([keys, keys, len(whole) - 2 * keys]), strict=True)
    return found


def _published(hf: Any, name: str) -> str:
    for pattern, other in _OTHER.get(hf.model_type, ()):
        name = re.sub(pattern, other, name)
    written, published, field, kind = WRITTEN.get(hf.model_type, ("", "", "", ""))
    numbered = re.search(r"\.layers\.(\d+)\.", name)
    if not written or not numbered or getattr(hf, field)[int(numbered[1])] != kind:
        return name
    return name.replace(written, published)
